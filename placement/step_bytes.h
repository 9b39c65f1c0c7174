// How many bytes the steps of a plan send: the definitions in redistribute_plan.h in closed form, so
// that they do not cost time per rank. Internal to placement/.
//
//   TensorCuts cuts = uncut({7, 5});
//   add_cut(cuts[0], {&shard, /*num_ranks=*/2, /*mesh_dim=*/0});  // pieces of 4 and 3 rows
//   all_gather_bytes(cuts, 0, /*element_size=*/4);                // (7 - 3) * 5 * 4
#pragma once

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "shardweave/placement/placement.h"

namespace shardweave {

// The cut of one mesh dimension through one tensor dimension.
struct Cut {
  const Placement* placement;  // a shard; outlives the cut
  int64_t num_ranks;
  int mesh_dim;
};

// Ascending, each once. Pieces have few different sizes (full ones, the rest, nothing), which is what
// makes exact answers cheap for uneven cuts as well.
using SizeSet = absl::InlinedVector<int64_t, 4>;

// The cuts of one tensor dimension, outermost first, and the sizes of the pieces.
struct DimCuts {
  int64_t size;  // uncut
  absl::InlinedVector<Cut, 4> chain;
  SizeSet outer;   // before the last cut
  SizeSet pieces;  // after it
};
using TensorCuts = absl::InlinedVector<DimCuts, 4>;  // per tensor dimension

TensorCuts uncut(absl::Span<const int64_t> shape);
// Adds an innermost cut; false, and no change, if a ragged shard does not fit the pieces.
bool add_cut(DimCuts& cuts, const Cut& cut);

// All results saturate at the largest int64_t.
// Gathers the last cut of dimension `dim`.
int64_t all_gather_bytes(const TensorCuts& cuts, int dim, int64_t element_size);
// Scatters as `cut` of dimension `dim`.
int64_t reduce_scatter_bytes(const TensorCuts& cuts, int dim, const Cut& cut, int64_t element_size);
int64_t all_reduce_bytes(const TensorCuts& cuts, int64_t num_ranks, int64_t element_size);
// Turns the last cut of `from_dim` into `cut`, the last one of `to_dim`.
int64_t all_to_all_bytes(const TensorCuts& cuts, int from_dim, int to_dim, const Cut& cut,
                         int64_t element_size);
// Between any cuts; every mesh dimension of the cuts that differ must cut something in `before`.
int64_t exchange_bytes(const TensorCuts& before, const TensorCuts& after, int64_t element_size);

}  // namespace shardweave

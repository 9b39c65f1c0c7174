// How many bytes the steps of a plan send: the definitions in redistribute_plan.h in closed form,
// so that they do not cost time per rank. Internal to placement/.
//
//   TensorCuts before = cuts_of(layout, {2}, {7, 5});  // S(0): 4 and 3 rows
//   TensorCuts after = uncut({7, 5});
//   step_bytes(StepKind::kAllGather, /*mesh_dim=*/0, 2, before, after, 4);  // (7 - 3) * 5 * 4
#pragma once

#include <cstdint>
#include <limits>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "shardweave/placement/layout.h"
#include "shardweave/placement/placement.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave::placement_internal {

// The cut of one mesh dimension through one tensor dimension.
struct Cut {
  const Placement* placement;  // a shard; outlives the cut
  int64_t num_ranks;
  int mesh_dim;
};

// Ascending, each once. Pieces have few different sizes (full ones, the rest, nothing), which is
// what makes exact answers cheap for uneven cuts as well.
using SizeSet = absl::InlinedVector<int64_t, 4>;

// The cuts of one tensor dimension, outermost first, and the sizes of the pieces.
struct DimCuts {
  absl::InlinedVector<Cut, 3> chain;
  absl::InlinedVector<SizeSet, 4> levels;  // levels[i]: after i cuts; never empty
  const SizeSet& pieces() const { return levels.back(); }
};
using TensorCuts = absl::InlinedVector<DimCuts, 3>;  // per tensor dimension

TensorCuts uncut(absl::Span<const int64_t> shape);
// Adds an innermost cut; false, and no change, if a ragged shard does not fit the pieces.
bool add_cut(DimCuts& cuts, const Cut& cut);
// `layout` must be valid and outlive the result.
TensorCuts cuts_of(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                   absl::Span<const int64_t> shape);

// What the rank at `coordinate` (in the mesh) holds of `size` elements under these cuts.
Intervals held_by(absl::Span<const int64_t> coordinate, int64_t size, absl::Span<const Cut> cuts);

// RedistributeStep::bytes. `mesh_dim`: the only one of an all_gather or all_to_all; `num_ranks`: of
// the group of an all_reduce. For an exchange above `enough` it may be less than that, but still
// above `enough`.
int64_t step_bytes(StepKind kind, int mesh_dim, int64_t num_ranks, const TensorCuts& before,
                   const TensorCuts& after, int64_t element_size,
                   int64_t enough = std::numeric_limits<int64_t>::max());

// Of kExchange, as part of step_bytes().
int64_t exchange_bytes(const TensorCuts& before, const TensorCuts& after, int64_t element_size,
                       int64_t enough);

// a * b, or the largest int64_t if that is less.
int64_t saturating_product(int64_t a, int64_t b);

// RedistributeStep::cost.
double step_cost(const CostModel::Link& link, int64_t bytes);

}  // namespace shardweave::placement_internal

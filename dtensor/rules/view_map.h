// What becomes of a shard when a tensor is viewed in another shape.
//
//   // [4, 6] cut by its second dimension over 2 ranks, as [24]: every fourth part has a piece for each.
//   map_cuts({4, 6}, {24}, {{Shard(1), 2}});   // {StridedShard(0, 4)}
//
// Pure arithmetic on shapes: nothing here knows tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "shardweave/placement/layout.h"

namespace shardweave::dtensor_internal {

// One cut of a tensor: how, and over how many ranks.
struct MeshCut {
  Placement placement;
  int64_t num_ranks;
};

// Sizes that ranks may have of something. Ascending, distinct.
using SizeSet = absl::InlinedVector<int64_t, 2>;

// Maps the cuts of a tensor of shape `from`, outermost first, to cuts of the same elements in shape
// `to` (row major, equally many elements), where every rank keeps what it has.
class CutMap {
 public:
  CutMap(absl::Span<const int64_t> from, absl::Span<const int64_t> to);

  // What the next cut becomes; nullopt: no placement describes it. Replicate and Partial stay.
  std::optional<Placement> map(const MeshCut& cut) const;
  // The next cut is this one, which map() has made `mapped` of. What no placement describes is left
  // out, as if it were not there.
  void add(const MeshCut& cut, const std::optional<Placement>& mapped);

 private:
  // Dimensions [from_begin, from_end) together have the elements of [to_begin, to_end) together.
  struct Group {
    int from_begin, from_end, to_begin, to_end;
    bool same_dim() const { return from_end - from_begin == 1 && to_end - to_begin == 1; }
  };

  absl::InlinedVector<Group, 6> groups_;                   // the smallest there are
  absl::InlinedVector<SizeSet, 6> from_sizes_, to_sizes_;  // after the cuts so far
};

// All of them.
std::vector<std::optional<Placement>> map_cuts(absl::Span<const int64_t> from,
                                               absl::Span<const int64_t> to,
                                               absl::Span<const MeshCut> cuts);

}  // namespace shardweave::dtensor_internal

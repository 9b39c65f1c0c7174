// What becomes of a shard when a tensor is viewed in another shape.
//
//   // [4, 6] cut by its second dimension over 2 ranks, as [24]: every fourth part has a piece for each.
//   map_shards({4, 6}, {24}, {{Shard(1), 2}});   // {StridedShard(0, 4)}
//
// Pure arithmetic on shapes: nothing here knows tensors.
#pragma once

#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "shardweave/placement/layout.h"

namespace shardweave::dtensor_internal {

// One cut of a tensor: how, and over how many ranks.
struct MeshCut {
  Placement placement;
  int64_t num_ranks;
};

// The cuts of a tensor of shape `from`, outermost first, as cuts of the same elements in shape `to`
// (row major, equally many elements), where every rank keeps what it has. nullopt for a cut that no
// placement describes; the cuts after it are mapped as if it were not there. Replicate and Partial
// stay.
std::vector<std::optional<Placement>> map_cuts(absl::Span<const int64_t> from,
                                               absl::Span<const int64_t> to,
                                               absl::Span<const MeshCut> cuts);

}  // namespace shardweave::dtensor_internal

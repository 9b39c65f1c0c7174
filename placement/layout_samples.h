// Layouts for tests that go through all of them.
#pragma once

#include <vector>

#include "shardweave/placement/layout.h"

namespace shardweave {

// All layouts of placements[m] on mesh dimension m, in all orders of the cuts, that fit the mesh
// and the tensor; each once.
std::vector<Layout> all_layouts(const std::vector<Placements>& placements, const Dims& mesh_shape,
                                const Dims& shape);

// Replicate, shards of all kinds of all dimensions, and Partials of `reductions`, for a mesh
// dimension of `num_ranks`. The ragged shards are uneven, and some of their pieces empty.
Placements all_placements(int64_t num_ranks, const Dims& shape,
                          const std::vector<ReduceOp>& reductions);

}  // namespace shardweave

// Runs a test's body on rank threads, one per rank of a mesh.
//
//   on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
//     EXPECT_TRUE(is_dtensor(zeros({7, 5}, mesh, {Shard(0), Replicate()})));
//   });
#pragma once

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "shardweave/dtensor/dtensor.h"

namespace shardweave::testing {

// Fails the test (naming the rank) if a body throws.
void on_mesh(const std::vector<MeshDim>& dims, const std::function<void(const MeshPtr&)>& body);

// The first failure of any rank, for tests that expect one.
absl::Status try_on_mesh(const std::vector<MeshDim>& dims,
                         const std::function<void(const MeshPtr&)>& body);

// Every placement of a tensor with `ndim` dimensions along one mesh dimension: R, S(0).., and
// Partial sum if wanted.
std::vector<Placement> all_placements(int ndim, bool partial);

// All combinations of them over `mesh_ndim` mesh dimensions.
std::vector<Placements> all_layouts(int mesh_ndim, int ndim, bool partial);

// A DTensor with the value `whole` in any layout, Partial too: the summands differ from rank to
// rank (and are exact for sums: small integers times powers of two).
at::Tensor scattered(const at::Tensor& whole, const MeshPtr& mesh, const Placements& placements);

}  // namespace shardweave::testing

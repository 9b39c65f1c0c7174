#include "shardweave/dtensor/testing/on_mesh.h"

#include "ATen/Parallel.h"
#include "ATen/ops/zeros_like.h"
#include "gtest/gtest.h"
#include "shardweave/comm/world.h"

namespace shardweave::testing {

absl::Status try_on_mesh(const std::vector<MeshDim>& dims,
                         const std::function<void(const MeshPtr&)>& body) {
  int64_t ranks = 1;
  for (const MeshDim& dim : dims) ranks *= dim.size;
  WorldOptions options;
  options.timeout = absl::Seconds(60);
  return run_ranks(
      static_cast<int>(ranks),
      [&](World& world) -> absl::Status {
        at::set_num_threads(1);
        auto mesh = init_device_mesh(world, dims);
        if (!mesh.ok()) return mesh.status();
        try {
          body(*mesh);
        } catch (const Error& error) {
          return error.status();
        }
        return absl::OkStatus();
      },
      options);
}

void on_mesh(const std::vector<MeshDim>& dims, const std::function<void(const MeshPtr&)>& body) {
  const absl::Status status = try_on_mesh(dims, body);
  EXPECT_TRUE(status.ok()) << status;
}

std::vector<Placement> all_placements(int ndim, bool partial) {
  std::vector<Placement> placements = {Replicate()};
  for (int d = 0; d < ndim; ++d) placements.push_back(Shard(d));
  if (partial) placements.push_back(Partial());
  return placements;
}

std::vector<Placements> all_layouts(int mesh_ndim, int ndim, bool partial) {
  std::vector<Placements> layouts = {{}};
  for (int m = 0; m < mesh_ndim; ++m) {
    std::vector<Placements> longer;
    for (const Placements& layout : layouts) {
      for (const Placement& p : all_placements(ndim, partial)) {
        longer.push_back(layout);
        longer.back().push_back(p);
      }
    }
    layouts = std::move(longer);
  }
  return layouts;
}

at::Tensor scattered(const at::Tensor& whole, const MeshPtr& mesh, const Placements& placements) {
  Placements cuts = placements;
  double share = 1;
  int64_t first = 0;  // coordinates on Partial dimensions, as one number
  int64_t summands = 1;
  for (int m = 0; m < mesh->mesh().ndim(); ++m) {
    if (!placements[m].is_partial()) continue;
    cuts[m] = Replicate();
    first = first * mesh->mesh().size(m) + mesh->coordinate()[m];
    summands *= mesh->mesh().size(m);
  }
  at::Tensor local =
      to_local(distribute_tensor(whole, mesh, cuts, {.source = std::nullopt})).detach();
  if (summands > 1) {
    // Rank r holds whole * 2 * (r + 1) except the last, which makes up for it.
    share = first + 1 < summands ? 2.0 * static_cast<double>(first + 1)
                                 : 1.0 - static_cast<double>(summands * (summands - 1));
    local = local.mul(share);
  }
  return from_local(local, mesh, placements, whole.sizes().vec());
}

}  // namespace shardweave::testing

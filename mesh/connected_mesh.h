// A ConnectedMesh is a DeviceMesh as one rank sees it: its coordinate, and a communicator per mesh dimension, made on first use.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/comm/world.h"
#include "shardweave/mesh/device_mesh.h"

namespace shardweave {

class ConnectedMesh {
 public:
  // `world`: group rank == world rank. This rank must be in the mesh.
  static absl::StatusOr<std::shared_ptr<ConnectedMesh>> create(DeviceMesh mesh, std::shared_ptr<Communicator> world);

  const DeviceMesh& mesh() const;
  Rank rank() const;
  const Coordinate& coordinate() const;
  // Group rank == coordinate along `dim`. First use: collective over the group (all its ranks reach it in the same order).
  absl::StatusOr<std::shared_ptr<Communicator>> communicator(int dim);
  // Of several dimensions together, row-major in the order given (last fastest).
  absl::StatusOr<std::shared_ptr<Communicator>> communicator(absl::Span<const int> dims);

  // What a higher layer keeps for this mesh and rank (dtensor/: interned specs, caches). Made by `make` on the first call and
  // destroyed with the mesh; one layer uses it.
  std::shared_ptr<void> extension(
      const std::function<std::shared_ptr<void>(ConnectedMesh&)>& make);
};

// The mesh must have exactly as many ranks as the world.
absl::StatusOr<std::shared_ptr<ConnectedMesh>> init_device_mesh(World& world, std::vector<MeshDim> dims);

}  // namespace shardweave

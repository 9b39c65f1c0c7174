// A ConnectedMesh is a DeviceMesh as one rank sees it: its coordinate, and communicators along the
// mesh's dimensions, made on first use.
//
//   auto mesh = init_device_mesh(world, {{"dp", 2}, {"tp", 2}});
//   auto tp = (*mesh)->communicator(1);                   // this rank's group along "tp"
//   (*tp)->all_reduce(x, x, ReduceOp::kSum).wait();       // among 2 ranks
//   auto dp_only = (*mesh)->slice({"dp"});                // shares its communicators
//
// Equal meshes of a World (the same names, sizes and ranks) are one object, whether they were made
// twice, sliced or reshaped, so that tensors on them go together; and groups of the same name and
// ranks are one communicator. All of them live until the World and the last handle to any of them
// are gone, not only as long as their own handles: ranks whose handles are collected at different
// times (Go, Rust) still agree on what exists. A mesh is not handed out again once a group of the
// World's meshes has failed: from then on meshes are new ones, with new groups.
//
// Order: making a communicator is collective among its ranks. All ranks of the mesh make their
// communicators in the same order; a program that is the same on all ranks does so by itself. One
// that is not (pipeline stages) calls connect() first, which makes those of all dimensions at once.
//
// Threads: each rank has its own ConnectedMesh (never share one between rank threads). Its
// functions may be called from several threads of that rank; a thread that makes a communicator
// holds up the others until all ranks of the group have come. The communicators themselves have
// rules of their own.
//
// Errors: InvalidArgument for a mesh that does not fit the world and for bad dimensions, NotFound
// for a rank or a name that the mesh does not have; making a communicator passes on the error of
// Communicator::subgroup, and may be tried again.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/comm/world.h"
#include "shardweave/mesh/device_mesh.h"

namespace shardweave {

class ConnectedMesh {
 public:
  // In `world` every rank has its world rank. It may have ranks that are not in the mesh; this one
  // is. A mesh of its own, with groups of its own, whatever else was made on `world`: connect_mesh()
  // below is what shares them.
  static absl::StatusOr<std::shared_ptr<ConnectedMesh>> create(DeviceMesh mesh,
                                                               std::shared_ptr<Communicator> world);
  ~ConnectedMesh();

  const DeviceMesh& mesh() const { return mesh_; }
  Rank rank() const { return rank_; }
  const Coordinate& coordinate() const { return coordinate_; }
  // The communicator of the whole world, which this one's are made from.
  const std::shared_ptr<Communicator>& world() const;

  // Group rank == coordinate along `dim`, also if its size is 1. First use: collective over the
  // group.
  absl::StatusOr<std::shared_ptr<Communicator>> communicator(int dim);
  // Of several dimensions together, row-major in the order given (last fastest).
  absl::StatusOr<std::shared_ptr<Communicator>> communicator(absl::Span<const int> dims);
  // Makes the communicators of all single dimensions now, first to last.
  absl::Status connect();

  // The sub-mesh of the named dimensions that contains this rank; communicators made by either are
  // there for both.
  absl::StatusOr<std::shared_ptr<ConnectedMesh>> slice(const std::vector<std::string>& names) const;
  // Another mesh of the same world, such as mesh().flatten(). This rank is in it.
  absl::StatusOr<std::shared_ptr<ConnectedMesh>> another(DeviceMesh mesh) const;

  // What a higher layer keeps for this mesh and rank (dtensor/: interned specs, caches). Made by
  // `make` on the first call and destroyed with the mesh; one layer uses it. `make` must not call
  // extension().
  std::shared_ptr<void> extension(const std::function<std::shared_ptr<void>(ConnectedMesh&)>& make);

 private:
  // The meshes and communicators of a world; handles to a mesh own it.
  struct Pool;
  friend absl::StatusOr<std::shared_ptr<ConnectedMesh>> connect_mesh(World& world, DeviceMesh mesh);
  ConnectedMesh(DeviceMesh mesh, Rank rank, Coordinate coordinate, Pool* pool);

  const DeviceMesh mesh_;
  const Rank rank_;
  const Coordinate coordinate_;
  Pool* const pool_;  // owns this

  std::mutex mutex_;                                   // guards by_dim_
  std::vector<std::shared_ptr<Communicator>> by_dim_;  // null: not yet made
  std::mutex extension_mutex_;                         // guards extension_
  std::shared_ptr<void> extension_;
};

// The mesh on this rank of `world`, which is in it; others need not be. Does not communicate.
absl::StatusOr<std::shared_ptr<ConnectedMesh>> connect_mesh(World& world, DeviceMesh mesh);

// The mesh of all ranks of `world`, row-major; it must have exactly as many.
absl::StatusOr<std::shared_ptr<ConnectedMesh>> init_device_mesh(World& world,
                                                                std::vector<MeshDim> dims);

}  // namespace shardweave

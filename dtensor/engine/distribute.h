// What distribute_tensor() and distribute_module() check alike. Internal to dtensor/.
#pragma once

#include "absl/status/statusor.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"

namespace shardweave::dtensor_internal {

// resolve(), as a status.
absl::StatusOr<Placements> try_resolve(const DeviceMesh& mesh, const NamedPlacements& named);

// Throws Error (OutOfRange) in `function` for a source that is no rank of the mesh.
void check_source(const DeviceMesh& mesh, const DistributeOptions& options, const char* function);

// distribute_tensor(), with an order in which the mesh's dimensions cut, for a `cause` that may be
// another one.
at::Tensor distributed(const at::Tensor& tensor, const MeshPtr& mesh, const Layout& layout,
                       const DistributeOptions& options, const Cause& cause);

// This rank's part, as `spec` says, of what rank `source` (row-major index in the mesh) has as
// `whole`; elsewhere that tells the dtype and the device. A rank gets its part and nothing else: the
// source cuts it along the mesh dimensions that cut, and the others of those broadcast it to the
// ranks that have the same. May be `whole` itself. Collective over the mesh: ranks whose
// `fingerprint` is another one get an error, all of them.
at::Tensor part_of_source(MeshContext& context, const Spec& spec, const at::Tensor& whole,
                          int64_t source, uint64_t fingerprint, const Cause& cause);

}  // namespace shardweave::dtensor_internal

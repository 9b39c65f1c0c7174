// What distribute_tensor() and distribute_module() check alike. Internal to dtensor/.
#pragma once

#include "absl/status/statusor.h"
#include "shardweave/dtensor/dtensor.h"

namespace shardweave::dtensor_internal {

// resolve(), as a status.
absl::StatusOr<Placements> try_resolve(const DeviceMesh& mesh, const NamedPlacements& named);

// Throws Error (OutOfRange) in `function` for a source that is no rank of the mesh.
void check_source(const DeviceMesh& mesh, const DistributeOptions& options, const char* function);

}  // namespace shardweave::dtensor_internal

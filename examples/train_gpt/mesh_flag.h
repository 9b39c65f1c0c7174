// --mesh of the examples that train.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "shardweave/mesh/device_mesh.h"

namespace train_gpt {

// "dp=2,tp=2", either one alone, in either order: dp and tp, of which one that was not named has
// size 1. `with_replicas`: so has "replicas", of groups that dp divides. InvalidArgument says what
// was given and what was wanted.
absl::StatusOr<std::vector<shardweave::MeshDim>> parse_mesh(const std::string& text,
                                                            bool with_replicas = false);

// "dp=2,tp=2"
std::string to_string(const std::vector<shardweave::MeshDim>& mesh);

int num_ranks(const std::vector<shardweave::MeshDim>& mesh);

}  // namespace train_gpt

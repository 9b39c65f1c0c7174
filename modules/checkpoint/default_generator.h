// LibTorch's own generator of the CPU, from which plain tensors draw. A process has one, so it belongs
// to a run where that has one rank: a module that nobody has distributed. Internal to modules/.
#pragma once

#include "ATen/core/TensorBody.h"
#include "shardweave/mesh/connected_mesh.h"

namespace shardweave::checkpoint_internal {

// Where it stands; undefined on a mesh of several ranks.
at::Tensor default_generator_state(const MeshPtr& mesh);
// Whether that is one of it. (A version of LibTorch may have another kind.)
bool is_default_generator_state(const at::Tensor& state);
// Undefined: nothing is done.
void set_default_generator_state(const at::Tensor& state);

}  // namespace shardweave::checkpoint_internal

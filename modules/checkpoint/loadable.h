// Whether values can be copied into a tensor: asked before the first of many is changed. Internal to modules/.
#pragma once

#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"

namespace shardweave::checkpoint_internal {

// Of what part_to_write() gives. FailedPrecondition, with the name: no memory (meta), not dense, elements that share
// memory, or one of inference mode.
absl::Status check_loadable(const std::string& name, const at::Tensor& part);

}  // namespace shardweave::checkpoint_internal

// The local parts of DTensors, for code that writes them past the dispatcher (an optimizer, the
// clipping of gradients): what dispatch.cc does around an operator that writes is to be done there
// too.
//
//   at::Tensor part = part_to_write(parameter, "FusedOptimizer");  // a plain tensor: itself
//   ... part is written ...
//   part_written(parameter, "FusedOptimizer");
//
// Collective over the mesh if the tensor is a view that is a copy (detour.h). Internal to dtensor/
// and modules/.
#pragma once

#include <string_view>

#include "ATen/core/Tensor.h"

namespace shardweave::dtensor_internal {

// Up to date, and what is written to it reaches the tensor and what it is a view of. Throws Error
// (FailedPrecondition) where it would not.
at::Tensor part_to_write(const at::Tensor& tensor, std::string_view who);
// Up to date, to be read.
at::Tensor part_to_read(const at::Tensor& tensor, std::string_view who);

// Autograd, which may have saved the tensor or its part, and its views learn that it has been
// written. For plain tensors too: LibTorch's fused optimizers do not tell autograd.
void part_written(const at::Tensor& tensor, std::string_view who);

// A tensor of this rank's `part` that lies as `tensor` does; plain if that is.
at::Tensor lying_as(const at::Tensor& tensor, at::Tensor part);

}  // namespace shardweave::dtensor_internal

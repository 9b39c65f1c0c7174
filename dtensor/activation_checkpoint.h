// Activation checkpointing: what a function computes in between is not kept for the backward, which
// runs the function a second time.
//
//   at::Tensor y = checkpoint([&](const at::Tensor& x) { return block->forward(x); }, x);
//
// The second run draws the same random numbers on the meshes of the inputs (dropout), works under
// the same autocast, and communicates as the first one did. Numbers that the function draws elsewhere
// (a mesh of none of the inputs, LibTorch's own generators) are other ones the second time: make the
// inputs DTensors of the mesh, or set that state within the function. The second run is recorded and
// differentiated on its own: gradients of parameters that the function uses are added to their .grad
// then, so backward() is the way to get them, and torch::autograd::grad gives those of the inputs only.
//
// What the function writes besides, it writes twice. A batch norm in training counts a batch two times
// in its running statistics, as under PyTorch's checkpoint(): leave such layers out of the function.
//
// Tensors that require grad and are no parameters are inputs, too (a time embedding, what an encoder
// gives): captured, they are differentiated through while the function's own backward runs, and a second
// time by whoever else uses them, whose graph is gone then.
//
// The function must compute the same when it is called again. Second derivatives are refused.
// Collective as the function is. The method is that of Chen, Xu, Zhang and Guestrin, "Training deep
// nets with sublinear memory cost" (2016).
#pragma once

#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"

namespace shardweave {

using CheckpointedFunction =
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

// The results require grad if recording is on: the function's parameters may, even if no input does.
// Throws Error (InvalidArgument) without inputs.
std::vector<at::Tensor> checkpoint(const CheckpointedFunction& function,
                                   const std::vector<at::Tensor>& inputs);
at::Tensor checkpoint(const std::function<at::Tensor(const at::Tensor&)>& function,
                      const at::Tensor& input);

}  // namespace shardweave

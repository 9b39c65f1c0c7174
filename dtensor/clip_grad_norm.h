// Clips gradients by their norm, wherever they lie.
//
//   loss.backward();
//   finish_grad_sync(*model);
//   const double norm = clip_grad_norm(model->parameters(), 1.0);   // before the clipping
//   optimizer.step();
//
// torch::nn::utils::clip_grad_norm_ works on DTensors of one mesh, with a collective for each parameter that
// is cut; this one on DTensors of any number of meshes and on plain tensors (the same on every rank) together,
// with one number per mesh on the wire, in one collective.
#pragma once

#include <source_location>
#include <vector>

#include "ATen/core/Tensor.h"

namespace shardweave {

// The norm (`norm_type`: above 0, infinity too) of all gradients as one vector, each element
// counted once; the same bits on every rank. If it is above `max_norm`, every gradient is
// multiplied by max_norm / (norm + 1e-6), as LibTorch does; with an infinite `max_norm` it is measured
// and nothing is multiplied, whatever it is. Parameters without a gradient do not
// count; one that is given twice (tied weights) counts once. Collective over the meshes: all ranks
// call it with the same parameters. Throws Error (InvalidArgument) for a max_norm that is negative or
// no number, and for a norm_type that is not above 0.
// `error_if_nonfinite`: a norm that is no finite number is an Error (OutOfRange) on every rank,
// before a gradient is changed.
double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                      double norm_type = 2, bool error_if_nonfinite = false,
                      std::source_location where = std::source_location::current());

}  // namespace shardweave

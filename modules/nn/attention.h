// Attention as modules/nn's models use it.
#pragma once

#include <optional>

#include "ATen/core/Tensor.h"

namespace shardweave::nn_internal {

// at::scaled_dot_product_attention() without a mask. Dropout draws the mesh's random numbers, the same
// however tensors are cut: no fused kernel does, and there is one for it on GPUs alone.
at::Tensor attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                     double dropout, bool is_causal, std::optional<double> scale = std::nullopt);

}  // namespace shardweave::nn_internal

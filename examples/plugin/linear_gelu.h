// A fused operator that LibTorch does not know, with a derivative and sharding rules:
//
//   example::linear_gelu(x, weight, bias) = gelu(x weight^T + bias)
//
// What is between the product and the activation is not kept for backward, which computes it again.
#pragma once

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/rule.h"

namespace plugin_example {

// x: [..., in], weight: [out, in], bias: [out]; [..., out]
at::Tensor linear_gelu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

shardweave::Rule linear_gelu_rule();
shardweave::Rule linear_gelu_backward_rule();

}  // namespace plugin_example

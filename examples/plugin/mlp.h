// An MLP as a model has it, and a faster one that takes its place under a plan.
#pragma once

#include "ATen/core/Tensor.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/plugin.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"

namespace plugin_example {

// Knows of nothing.
struct MlpImpl : torch::nn::Module {
  MlpImpl(int64_t dim, int64_t hidden);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear up, down;
};
TORCH_MODULE(Mlp);

// The same numbers by the fused operator of linear_gelu.h, on the same weights.
struct FusedMlpImpl : torch::nn::Module {
  explicit FusedMlpImpl(const MlpImpl& mlp);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor up, up_bias, down, down_bias;
};
using FusedMlp = torch::nn::ModuleHolder<shardweave::Hooked<FusedMlpImpl>>;

// How the operator shards, how a FusedMlp does, and that it takes an Mlp's place.
const shardweave::Plugins& plugins();

}  // namespace plugin_example

// The MLP of Llama and its kin: SwiGLU (Shazeer), or with another activation another GLU.
// down_proj(act(gate_proj(x)) * up_proj(x)), with the names of transformers.
//
//   nn::GatedMlp mlp(nn::GatedMlpOptions{.hidden_size = 4096, .intermediate_size = 11008});
//   const at::Tensor y = mlp(x);  // [..., hidden_size]
#pragma once

#include <cstdint>
#include <string_view>

#include "ATen/core/Tensor.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/nn/activation.h"
#include "shardweave/modules/nn/plan_options.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"

namespace shardweave::nn {

struct GatedMlpOptions {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  Activation activation = Activation::kSilu;
  bool bias = false;
};

struct GatedMlpImpl : torch::nn::Module {
  explicit GatedMlpImpl(const GatedMlpOptions& options);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};

 private:
  const Activation activation_;
};
using GatedMlp = torch::nn::ModuleHolder<Hooked<GatedMlpImpl>>;

// The intermediate features are cut. `fqn`: as attention_plan()'s.
ShardingPlan gated_mlp_plan(const DeviceMesh& mesh, const PlanOptions& plan_options = {},
                            std::string_view fqn = "");

}  // namespace shardweave::nn

// A layer of experts of which each token takes the best few (Shazeer et al.), as Mixtral's: a
// router's softmax, its top k weighed to a sum of 1, and the sum of those experts' gated MLPs.
// Names and shapes are those of transformers 5: gate.weight [experts, hidden_size],
// experts.gate_up_proj [experts, 2 intermediate_size, hidden_size], experts.down_proj.
//
//   nn::MixtureOfExperts experts(nn::MixtureOfExpertsOptions{.hidden_size = 4096,
//       .intermediate_size = 14336, .num_experts = 8, .num_experts_per_tok = 2});
//   const at::Tensor y = experts(x);  // [batch, length, hidden_size]
//
// An expert computes only the tokens that chose it (routed_experts.h).
#pragma once

#include <cstdint>
#include <string_view>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/nn/activation.h"
#include "shardweave/modules/nn/plan_options.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"

namespace shardweave::nn {

struct MixtureOfExpertsOptions {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_experts = 8;
  int64_t num_experts_per_tok = 2;
  Activation activation = Activation::kSilu;
};

// InvalidArgument: sizes that are not positive, more experts per token than there are.
absl::Status check(const MixtureOfExpertsOptions& options);

// What every expert weighs for a token.
struct TopKRouterImpl : torch::nn::Module {
  TopKRouterImpl(int64_t hidden_size, int64_t num_experts, int64_t top_k);
  at::Tensor forward(const at::Tensor& x);  // [tokens, hidden_size] -> [tokens, experts]

  at::Tensor weight;

 private:
  const int64_t top_k_;
};
using TopKRouter = torch::nn::ModuleHolder<Hooked<TopKRouterImpl>>;

struct ExpertsImpl : torch::nn::Module {
  explicit ExpertsImpl(const MixtureOfExpertsOptions& options);
  at::Tensor forward(const at::Tensor& x, const at::Tensor& weights);

  at::Tensor gate_up_proj, down_proj;

 private:
  const Activation activation_;
};
using Experts = torch::nn::ModuleHolder<Hooked<ExpertsImpl>>;

struct MixtureOfExpertsImpl : torch::nn::Module {
  // Throws Error (InvalidArgument): check()
  explicit MixtureOfExpertsImpl(const MixtureOfExpertsOptions& options);
  at::Tensor forward(const at::Tensor& x);

  TopKRouter gate{nullptr};
  Experts experts{nullptr};
};
using MixtureOfExperts = torch::nn::ModuleHolder<Hooked<MixtureOfExpertsImpl>>;

// A part of every expert on each rank, or whole experts (PlanOptions::expert_parallel). `fqn`: as
// attention_plan()'s.
ShardingPlan mixture_of_experts_plan(const DeviceMesh& mesh, const PlanOptions& plan_options = {},
                                     std::string_view fqn = "");

}  // namespace shardweave::nn

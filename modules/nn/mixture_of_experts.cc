#include "shardweave/modules/nn/mixture_of_experts.h"

#include <cmath>
#include <string>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/softmax.h"
#include "ATen/ops/zeros_like.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/nn/plan_entries.h"
#include "shardweave/modules/nn/routed_experts.h"
#include "torch/nn/init.h"

namespace shardweave::nn {
namespace {

// The two halves of gate_up_proj are each cut.
constexpr int64_t kHalves = 2;

at::Tensor drawn(at::IntArrayRef sizes) {
  return torch::nn::init::normal_(at::empty(sizes), 0, 1 / std::sqrt(sizes.back()));
}

}  // namespace

absl::Status check(const MixtureOfExpertsOptions& options) {
  for (const auto& [name, value] : {std::pair("hidden_size", options.hidden_size),
                                    {"intermediate_size", options.intermediate_size},
                                    {"num_experts", options.num_experts},
                                    {"num_experts_per_tok", options.num_experts_per_tok}}) {
    if (value > 0) continue;
    return absl::InvalidArgumentError(str_cat(name, " is ", value, "; wanted a positive number"));
  }
  if (options.num_experts_per_tok > options.num_experts) {
    return absl::InvalidArgumentError(str_cat("num_experts_per_tok is ",
                                              options.num_experts_per_tok, ", but there are ",
                                              options.num_experts, " experts"));
  }
  return absl::OkStatus();
}

TopKRouterImpl::TopKRouterImpl(int64_t hidden_size, int64_t num_experts, int64_t top_k)
    : weight(register_parameter("weight", drawn({num_experts, hidden_size}))), top_k_(top_k) {}

at::Tensor TopKRouterImpl::forward(const at::Tensor& x) {
  const bool is_double = x.scalar_type() == at::kDouble;
  const at::Tensor logits = at::linear(x, weight).to(is_double ? at::kDouble : at::kFloat);
  // The softmax of the best is the softmax of all, its best weighed to a sum of 1.
  const auto [best, experts] = logits.topk(top_k_, -1);
  return at::zeros_like(logits).scatter(-1, experts, at::softmax(best, -1)).to(x.scalar_type());
}

ExpertsImpl::ExpertsImpl(const MixtureOfExpertsOptions& options)
    : gate_up_proj(register_parameter(
          "gate_up_proj",
          drawn({options.num_experts, 2 * options.intermediate_size, options.hidden_size}))),
      down_proj(register_parameter("down_proj", drawn({options.num_experts, options.hidden_size,
                                                       options.intermediate_size}))),
      activation_(options.activation) {}

at::Tensor ExpertsImpl::forward(const at::Tensor& x, const at::Tensor& weights) {
  return routed_experts(x, weights, gate_up_proj, down_proj, activation_);
}

MixtureOfExpertsImpl::MixtureOfExpertsImpl(const MixtureOfExpertsOptions& options) {
  const absl::Status status = check(options);
  if (!status.ok()) throw Error("MixtureOfExperts", status);
  gate = register_module(
      "gate", TopKRouter(options.hidden_size, options.num_experts, options.num_experts_per_tok));
  experts = register_module("experts", Experts(options));
}

at::Tensor MixtureOfExpertsImpl::forward(const at::Tensor& x) {
  const at::Tensor tokens = x.reshape({-1, x.size(-1)});
  return experts(tokens, gate(tokens)).view(x.sizes());
}

ShardingPlan mixture_of_experts_plan(const DeviceMesh& mesh, const PlanOptions& plan_options,
                                     std::string_view fqn) {
  ShardingPlan plan;
  nn_internal::PlanEntries entries(plan, mesh, plan_options, std::string(fqn));
  if (plan_options.expert_parallel) {
    entries.parameter("experts.{gate_up,down}_proj", Shard(0));
  } else {
    entries.parameter("experts.gate_up_proj", StridedShard(1, kHalves))
        .parameter("experts.down_proj", Shard(2));
  }
  entries.sums();
  return plan;
}

}  // namespace shardweave::nn

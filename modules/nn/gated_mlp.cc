#include "shardweave/modules/nn/gated_mlp.h"

#include <string>

#include "shardweave/modules/nn/plan_entries.h"

namespace shardweave::nn {

GatedMlpImpl::GatedMlpImpl(const GatedMlpOptions& options) : activation_(options.activation) {
  const auto linear = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name,
                           torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(options.bias)));
  };
  gate_proj = linear("gate_proj", options.hidden_size, options.intermediate_size);
  up_proj = linear("up_proj", options.hidden_size, options.intermediate_size);
  down_proj = linear("down_proj", options.intermediate_size, options.hidden_size);
}

at::Tensor GatedMlpImpl::forward(const at::Tensor& x) {
  return down_proj(activate(activation_, gate_proj(x)) * up_proj(x));
}

ShardingPlan gated_mlp_plan(const DeviceMesh& mesh, const PlanOptions& plan_options,
                            std::string_view fqn) {
  ShardingPlan plan;
  nn_internal::PlanEntries(plan, mesh, plan_options, std::string(fqn))
      .parameter("{gate,up}_proj.*", Shard(0))
      .parameter("down_proj.weight", Shard(1))
      .sums();
  return plan;
}

}  // namespace shardweave::nn

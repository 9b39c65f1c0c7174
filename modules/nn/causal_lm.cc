#include "shardweave/modules/nn/causal_lm.h"

#include <string_view>
#include <utility>

#include "ATen/OpMathType.h"
#include "ATen/ops/constant_pad_nd.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/linear.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/modules/nn/plan_entries.h"

namespace shardweave::nn {

at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& labels,
                           int64_t ignore_index) {
  const at::Tensor next = at::constant_pad_nd(labels, {0, 1}, ignore_index).slice(1, 1);
  // In 16 bits neither the sum nor the number of many positions is a number.
  const at::Tensor scores = logits.to(at::toOpMathType(logits.scalar_type()));
  return at::cross_entropy_loss(scores.flatten(0, 1), next.flatten(), /*weight=*/{},
                                at::Reduction::Mean, ignore_index);
}

LmHeadImpl::LmHeadImpl(at::Tensor weight_in)
    : weight(register_parameter("weight", std::move(weight_in))) {}

at::Tensor LmHeadImpl::forward(const at::Tensor& x) {
  return at::linear(x, weight);
}

void initialize(torch::nn::Module& module, double standard_deviation) {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> drawn;  // tied weights once
  for (const auto& item : module.named_parameters()) {
    at::Tensor parameter = item.value();
    const std::string_view name = item.key();
    if (name.ends_with("bias")) {
      parameter.zero_();
    } else if (parameter.dim() > 1) {
      bool done = false;
      for (const at::Tensor& each : drawn) done |= each.is_same(parameter);
      if (done) continue;
      parameter.normal_(0, standard_deviation);
      drawn.push_back(parameter);
    }
  }
}

ShardingPlan causal_lm_plan(const DecoderOptions& options, bool tie_word_embeddings,
                            const ShardingPlan& mlp, const DeviceMesh& mesh,
                            const PlanOptions& plan_options) {
  ShardingPlan plan =
      attention_plan(options.attention, mesh, plan_options, "model.layers.*.self_attn");
  plan.parameter.insert(plan.parameter.end(), mlp.parameter.begin(), mlp.parameter.end());
  plan.forward.insert(plan.forward.end(), mlp.forward.begin(), mlp.forward.end());
  constexpr char kEmbedding[] = "model.embed_tokens.weight";
  nn_internal::add_vocabulary(plan, mesh, plan_options, kEmbedding, "model.layers.0", "model.norm",
                              tie_word_embeddings ? kEmbedding : "lm_head.weight");
  return plan;
}

}  // namespace shardweave::nn

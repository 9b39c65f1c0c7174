#include "shardweave/modules/nn/vit.h"

#include <utility>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/nn/causal_lm.h"
#include "shardweave/modules/nn/config.h"
#include "shardweave/modules/nn/decoder_config.h"
#include "shardweave/modules/nn/plan_entries.h"
#include "torch/nn/modules/container/modulelist.h"

namespace shardweave::nn {
namespace {

torch::nn::LayerNorm layer_norm(const VitOptions& options) {
  return torch::nn::LayerNorm(
      torch::nn::LayerNormOptions({options.hidden_size}).eps(options.layer_norm_eps));
}

int64_t patches(const VitOptions& options) {
  const int64_t side = options.image_size / options.patch_size;
  return side * side;
}

}  // namespace

absl::StatusOr<VitOptions> VitOptions::from_json(std::string_view text) {
  absl::StatusOr<nn_internal::Config> config = nn_internal::Config::read(text, "vit");
  if (!config.ok()) return config.status();
  VitOptions options;
  config->get("hidden_size", options.hidden_size);
  config->get("num_hidden_layers", options.num_hidden_layers);
  config->get("num_attention_heads", options.num_attention_heads);
  config->get("intermediate_size", options.intermediate_size);
  nn_internal::read_activation(*config, "hidden_act", options.hidden_act);
  config->get("hidden_dropout_prob", options.hidden_dropout_prob);
  config->get("attention_probs_dropout_prob", options.attention_probs_dropout_prob);
  config->get("initializer_range", options.initializer_range);
  config->get("layer_norm_eps", options.layer_norm_eps);
  config->get("image_size", options.image_size);
  config->get("patch_size", options.patch_size);
  config->get("num_channels", options.num_channels);
  config->get("qkv_bias", options.qkv_bias);
  if (const int64_t labels = config->size("id2label"); labels > 0) options.num_labels = labels;
  config->get("num_labels", options.num_labels);
  if (!config->status().ok()) return config->status();
  if (absl::Status status = check(options); !status.ok()) return status;
  return options;
}

AttentionOptions VitOptions::attention() const {
  return {.hidden_size = hidden_size,
          .num_attention_heads = num_attention_heads,
          .is_causal = false,
          .qkv_bias = qkv_bias,
          .o_bias = true,
          .dropout = attention_probs_dropout_prob};
}

absl::Status check(const VitOptions& options) {
  for (const auto& [name, value] : {std::pair("num_hidden_layers", options.num_hidden_layers),
                                    {"intermediate_size", options.intermediate_size},
                                    {"image_size", options.image_size},
                                    {"patch_size", options.patch_size},
                                    {"num_channels", options.num_channels},
                                    {"num_labels", options.num_labels}}) {
    if (absl::Status status = nn_internal::check_positive(name, value); !status.ok()) return status;
  }
  if (options.image_size < options.patch_size) {
    return absl::InvalidArgumentError(
        str_cat("an image of ", options.image_size, " has no patch of ", options.patch_size));
  }
  const double p = options.hidden_dropout_prob;
  if (!(p >= 0 && p < 1)) {
    return absl::InvalidArgumentError(
        str_cat("hidden_dropout_prob is ", p, "; wanted 0 or more, below 1"));
  }
  return check(options.attention());
}

VitPatchEmbeddingsImpl::VitPatchEmbeddingsImpl(const VitOptions& options)
    : projection(register_module(
          "projection",
          torch::nn::Conv2d(torch::nn::Conv2dOptions(options.num_channels, options.hidden_size,
                                                     options.patch_size)
                                .stride(options.patch_size)))) {}

at::Tensor VitPatchEmbeddingsImpl::forward(const at::Tensor& pixel_values) {
  return projection(pixel_values).flatten(2).transpose(1, 2);
}

VitEmbeddingsImpl::VitEmbeddingsImpl(const VitOptions& options)
    : cls_token(register_parameter("cls_token", at::empty({1, 1, options.hidden_size}))),
      position_embeddings(register_parameter(
          "position_embeddings", at::empty({1, 1 + patches(options), options.hidden_size}))),
      patch_embeddings(register_module("patch_embeddings", VitPatchEmbeddings(options))),
      dropout_(options.hidden_dropout_prob) {}

at::Tensor VitEmbeddingsImpl::forward(const at::Tensor& pixel_values) {
  const at::Tensor x = patch_embeddings(pixel_values);
  const at::Tensor all = at::cat({cls_token.expand({x.size(0), 1, x.size(2)}), x}, 1);
  return dropped(all + position_embeddings, dropout_, is_training());
}

VitMlpImpl::VitMlpImpl(const VitOptions& options)
    : fc1(register_module("fc1",
                          torch::nn::Linear(options.hidden_size, options.intermediate_size))),
      fc2(register_module("fc2",
                          torch::nn::Linear(options.intermediate_size, options.hidden_size))),
      activation_(options.hidden_act) {}

at::Tensor VitMlpImpl::forward(const at::Tensor& x) {
  return fc2(activate(activation_, fc1(x)));
}

VitLayerImpl::VitLayerImpl(const VitOptions& options)
    : attention(register_module("attention", GroupedQueryAttention(options.attention()))),
      layernorm_before(register_module("layernorm_before", layer_norm(options))),
      layernorm_after(register_module("layernorm_after", layer_norm(options))),
      mlp(register_module("mlp", VitMlp(options))),
      dropout_(options.hidden_dropout_prob) {}

at::Tensor VitLayerImpl::forward(const at::Tensor& x) {
  const at::Tensor y = x + dropped(attention(layernorm_before(x), at::Tensor(), at::Tensor()),
                                   dropout_, is_training());
  return y + dropped(mlp(layernorm_after(y)), dropout_, is_training());
}

VitEncoderImpl::VitEncoderImpl(const VitOptions& options) {
  embeddings = register_module("embeddings", VitEmbeddings(options));
  torch::nn::ModuleList list = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < options.num_hidden_layers; ++i) {
    layers.emplace_back(options);
    list->push_back(layers.back());
  }
  layernorm = register_module("layernorm", layer_norm(options));
}

at::Tensor VitEncoderImpl::forward(const at::Tensor& pixel_values) {
  at::Tensor x = embeddings(pixel_values);
  for (VitLayer& layer : layers) x = layer(x);
  return layernorm(x);
}

VitImpl::VitImpl(const VitOptions& options) {
  nn_internal::checked("Vit", options);
  vit = register_module("vit", VitEncoder(options));
  classifier =
      register_module("classifier", torch::nn::Linear(options.hidden_size, options.num_labels));
  initialize(*this, options.initializer_range);
}

at::Tensor VitImpl::forward(const at::Tensor& pixel_values) {
  return classifier(vit(pixel_values).select(1, 0));
}

ShardingPlan vit_plan(const VitOptions& options, const DeviceMesh& mesh,
                      const PlanOptions& plan_options) {
  using nn_internal::PlanEntries;
  ShardingPlan plan =
      attention_plan(options.attention(), mesh, plan_options, "vit.layers.*.attention");
  PlanEntries(plan, mesh, plan_options, "vit.layers.*.mlp")
      .parameter("fc1.*", Shard(0))
      .parameter("fc2.weight", Shard(1))
      .sums();
  if (plan_options.sequence_parallel) {
    PlanEntries whole(plan, mesh, plan_options, "vit");
    whole.forward("layers.0.input", whole.between()).forward("layernorm.output", Replicate());
  }
  return plan;
}

}  // namespace shardweave::nn

#include "shardweave/modules/nn/gpt2.h"

#include <cmath>
#include <string>
#include <utility>

#include "ATen/ops/empty_like.h"
#include "c10/core/GradMode.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/nn/attention.h"
#include "shardweave/modules/nn/config.h"
#include "shardweave/modules/nn/decoder_config.h"
#include "shardweave/modules/nn/plan_entries.h"
#include "torch/nn/modules/container/modulelist.h"

namespace shardweave::nn {
namespace {

// c_attn is three matrices in one, and each of them is cut.
constexpr int64_t kPacked = 3;

torch::nn::LayerNorm layer_norm(const Gpt2Options& options) {
  return torch::nn::LayerNorm(
      torch::nn::LayerNormOptions({options.n_embd}).eps(options.layer_norm_epsilon));
}

}  // namespace

absl::StatusOr<Gpt2Options> Gpt2Options::from_json(std::string_view text) {
  absl::StatusOr<nn_internal::Config> config = nn_internal::Config::read(text, "gpt2");
  if (!config.ok()) return config.status();
  Gpt2Options options;
  config->get("vocab_size", options.vocab_size);
  config->get("n_positions", options.n_positions);
  config->get("n_embd", options.n_embd);
  config->get("n_layer", options.n_layer);
  config->get("n_head", options.n_head);
  config->get("n_inner", options.n_inner);
  nn_internal::read_activation(*config, "activation_function", options.activation_function);
  config->get("resid_pdrop", options.resid_pdrop);
  config->get("embd_pdrop", options.embd_pdrop);
  config->get("attn_pdrop", options.attn_pdrop);
  config->get("layer_norm_epsilon", options.layer_norm_epsilon);
  config->get("initializer_range", options.initializer_range);
  config->get("scale_attn_weights", options.scale_attn_weights);
  config->get("scale_attn_by_inverse_layer_idx", options.scale_attn_by_inverse_layer_idx);
  config->get("tie_word_embeddings", options.tie_word_embeddings);
  bool cross = false;
  config->get("add_cross_attention", cross);
  if (cross) config->refuse("add_cross_attention", "is not there; wanted false");
  if (!config->status().ok()) return config->status();
  if (absl::Status status = check(options); !status.ok()) return status;
  return options;
}

absl::Status check(const Gpt2Options& options) {
  for (const auto& [name, value] : {std::pair("vocab_size", options.vocab_size),
                                    {"n_positions", options.n_positions},
                                    {"n_embd", options.n_embd},
                                    {"n_layer", options.n_layer},
                                    {"n_head", options.n_head},
                                    {"n_inner", options.inner()}}) {
    if (absl::Status status = nn_internal::check_positive(name, value); !status.ok()) return status;
  }
  if (options.n_embd % options.n_head != 0) {
    return absl::InvalidArgumentError(
        str_cat("n_embd ", options.n_embd, " does not divide by ", options.n_head, " heads"));
  }
  for (const auto& [name, p] : {std::pair("resid_pdrop", options.resid_pdrop),
                                {"embd_pdrop", options.embd_pdrop},
                                {"attn_pdrop", options.attn_pdrop}}) {
    if (p >= 0 && p < 1) continue;
    return absl::InvalidArgumentError(str_cat(name, " is ", p, "; wanted 0 or more, below 1"));
  }
  return absl::OkStatus();
}

Gpt2AttentionImpl::Gpt2AttentionImpl(const Gpt2Options& options, int64_t layer)
    : c_attn(register_module("c_attn", Conv1d(options.n_embd, 3 * options.n_embd))),
      c_proj(register_module("c_proj", Conv1d(options.n_embd, options.n_embd))),
      heads_(options.n_head),
      scale_((options.scale_attn_weights
                  ? 1 / std::sqrt(static_cast<double>(options.n_embd / options.n_head))
                  : 1) /
             (options.scale_attn_by_inverse_layer_idx ? static_cast<double>(layer + 1) : 1)),
      attn_pdrop_(options.attn_pdrop),
      resid_pdrop_(options.resid_pdrop) {}

at::Tensor Gpt2AttentionImpl::forward(const at::Tensor& x) {
  const std::vector<at::Tensor> parts = c_attn(x).chunk(kPacked, -1);
  const auto heads = [&](const at::Tensor& y) {
    return y.view({x.size(0), x.size(1), heads_, x.size(2) / heads_}).transpose(1, 2);
  };
  const at::Tensor mixed =
      nn_internal::attention(heads(parts[0]), heads(parts[1]), heads(parts[2]),
                             is_training() ? attn_pdrop_ : 0.0, /*is_causal=*/true, scale_);
  return dropped(c_proj(mixed.transpose(1, 2).reshape(x.sizes())), resid_pdrop_, is_training());
}

Gpt2MlpImpl::Gpt2MlpImpl(const Gpt2Options& options)
    : c_fc(register_module("c_fc", Conv1d(options.n_embd, options.inner()))),
      c_proj(register_module("c_proj", Conv1d(options.inner(), options.n_embd))),
      activation_(options.activation_function),
      resid_pdrop_(options.resid_pdrop) {}

at::Tensor Gpt2MlpImpl::forward(const at::Tensor& x) {
  return dropped(c_proj(activate(activation_, c_fc(x))), resid_pdrop_, is_training());
}

Gpt2BlockImpl::Gpt2BlockImpl(const Gpt2Options& options, int64_t layer)
    : ln_1(register_module("ln_1", layer_norm(options))),
      ln_2(register_module("ln_2", layer_norm(options))),
      attn(register_module("attn", Gpt2Attention(options, layer))),
      mlp(register_module("mlp", Gpt2Mlp(options))) {}

at::Tensor Gpt2BlockImpl::forward(const at::Tensor& x) {
  const at::Tensor y = x + attn(ln_1(x));
  return y + mlp(ln_2(y));
}

Gpt2TransformerImpl::Gpt2TransformerImpl(const Gpt2Options& options)
    : embd_pdrop_(options.embd_pdrop) {
  wte = register_module("wte", torch::nn::Embedding(options.vocab_size, options.n_embd));
  wpe = register_module("wpe", torch::nn::Embedding(options.n_positions, options.n_embd));
  torch::nn::ModuleList list = register_module("h", torch::nn::ModuleList());
  for (int64_t i = 0; i < options.n_layer; ++i) {
    h.emplace_back(options, i);
    list->push_back(h.back());
  }
  ln_f = register_module("ln_f", layer_norm(options));
}

at::Tensor Gpt2TransformerImpl::forward(const at::Tensor& input_ids) {
  const int64_t length = input_ids.size(1);
  if (length > wpe->weight.size(0)) {
    throw Error("Gpt2",
                absl::InvalidArgumentError(str_cat("a sequence of ", length, " tokens, but ",
                                                   wpe->weight.size(0), " positions")));
  }
  at::Tensor x = wte(input_ids) + wpe->weight.slice(0, 0, length);
  x = dropped(x, embd_pdrop_, is_training());
  for (Gpt2Block& block : h) x = block(x);
  return ln_f(x);
}

Gpt2Impl::Gpt2Impl(const Gpt2Options& options) {
  nn_internal::checked("Gpt2", options);
  transformer = register_module("transformer", Gpt2Transformer(options));
  const at::Tensor& embedding = transformer->wte->weight;
  lm_head = register_module(
      "lm_head", LmHead(options.tie_word_embeddings ? embedding : at::empty_like(embedding)));
  initialize(*this, options.initializer_range);
  // What is added to the residual stream grows with the number of layers less.
  const double added =
      options.initializer_range / std::sqrt(2 * static_cast<double>(options.n_layer));
  const c10::AutoGradMode no_grad(false);
  for (const Gpt2Block& block : transformer->h) {
    block->attn->c_proj->weight.normal_(0, added);
    block->mlp->c_proj->weight.normal_(0, added);
  }
}

at::Tensor Gpt2Impl::forward(const at::Tensor& input_ids) {
  return lm_head(transformer(input_ids));
}

ShardingPlan gpt2_plan(const Gpt2Options& options, const DeviceMesh& mesh,
                       const PlanOptions& plan_options) {
  using nn_internal::PlanEntries;
  ShardingPlan plan;
  PlanEntries attention(plan, mesh, plan_options, "transformer.h.*.attn");
  nn_internal::check_heads_divide("transformer.h.*.attn", options.n_head, attention.ranks(),
                                  plan_options.mesh_dim);
  attention.parameter("c_attn.weight", StridedShard(1, kPacked))
      .parameter("c_attn.bias", StridedShard(0, kPacked))
      .parameter("c_proj.weight", Shard(0))
      .sums();
  PlanEntries(plan, mesh, plan_options, "transformer.h.*.mlp")
      .parameter("c_fc.weight", Shard(1))
      .parameter("c_fc.bias", Shard(0))
      .parameter("c_proj.weight", Shard(0))
      .sums();
  constexpr char kEmbedding[] = "transformer.wte.weight";
  nn_internal::add_vocabulary(plan, mesh, plan_options, kEmbedding, "transformer.h.0",
                              "transformer.ln_f",
                              options.tie_word_embeddings ? kEmbedding : "lm_head.weight");
  return plan;
}

}  // namespace shardweave::nn

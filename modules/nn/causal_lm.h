// What Llama and its kin have in common: an embedding, layers of attention and an MLP with RMSNorm
// before each, and a head that gives the next token's logits.
//
//   nn::Llama model(nn::LlamaOptions{.vocab_size = 32000, .hidden_size = 512, ...});
//   const at::Tensor logits = model(input_ids);  // [batch, length, vocab_size]
//   nn::next_token_loss(logits, /*labels=*/input_ids).backward();
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/nn/gated_mlp.h"
#include "shardweave/modules/nn/grouped_query_attention.h"
#include "shardweave/modules/nn/mixture_of_experts.h"
#include "shardweave/modules/nn/rms_norm.h"
#include "shardweave/modules/nn/rotary_embedding.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/pimpl.h"

namespace shardweave::nn {

// The mean cross entropy of every position's logits against the next position's label, over those
// that are not `ignore_index`; the last position has none. logits: [batch, length, vocabulary],
// whole or cut by the vocabulary; of 16 bits they become float32, as does the loss.
at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& labels,
                           int64_t ignore_index = -100);

// x @ weight^T. Tied: the weight is the embedding's, one parameter with two names.
struct LmHeadImpl : torch::nn::Module {
  explicit LmHeadImpl(at::Tensor weight);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;
};
using LmHead = torch::nn::ModuleHolder<Hooked<LmHeadImpl>>;

// Draws what transformers draws: matrices and embeddings from a normal distribution, biases 0,
// norms 1 and 0.
void initialize(torch::nn::Module& module, double standard_deviation);

// `Mlp`: GatedMlp or MixtureOfExperts.
template <typename Mlp>
struct DecoderLayerImpl : torch::nn::Module {
  template <typename MlpOptions>
  DecoderLayerImpl(const AttentionOptions& attention, const MlpOptions& mlp_options, double eps)
      : self_attn(register_module("self_attn", GroupedQueryAttention(attention))),
        mlp(register_module("mlp", Mlp(mlp_options))),
        input_layernorm(register_module("input_layernorm", RMSNorm(attention.hidden_size, eps))),
        post_attention_layernorm(
            register_module("post_attention_layernorm", RMSNorm(attention.hidden_size, eps))) {}

  at::Tensor forward(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    const at::Tensor y = x + self_attn(input_layernorm(x), cos, sin);
    return y + mlp(post_attention_layernorm(y));
  }

  GroupedQueryAttention self_attn;
  Mlp mlp;
  RMSNorm input_layernorm, post_attention_layernorm;
};
template <typename Mlp>
using DecoderLayer = torch::nn::ModuleHolder<Hooked<DecoderLayerImpl<Mlp>>>;

struct DecoderOptions {
  int64_t vocab_size = 0;
  // Of the token whose embedding begins as 0 and learns nothing; below 0: counted from the end.
  std::optional<int64_t> pad_token_id;
  int64_t num_hidden_layers = 0;
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 0;
  AttentionOptions attention;
  RopeOptions rope;
};

// Without the head: "model" in its FQNs.
template <typename Mlp>
struct DecoderImpl : torch::nn::Module {
  template <typename MlpOptions>
  DecoderImpl(const DecoderOptions& options, const MlpOptions& mlp) {
    const int64_t hidden_size = options.attention.hidden_size;
    torch::nn::EmbeddingOptions embedding(options.vocab_size, hidden_size);
    if (options.pad_token_id.has_value()) embedding.padding_idx(*options.pad_token_id);
    embed_tokens = register_module("embed_tokens", torch::nn::Embedding(embedding));
    torch::nn::ModuleList list = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < options.num_hidden_layers; ++i) {
      layers.emplace_back(options.attention, mlp, options.rms_norm_eps);
      list->push_back(layers.back());
    }
    norm = register_module("norm", RMSNorm(hidden_size, options.rms_norm_eps));
    rotary_emb = register_module("rotary_emb",
                                 RotaryEmbedding(options.attention.head_size(),
                                                 options.max_position_embeddings, options.rope));
  }

  at::Tensor forward(const at::Tensor& input_ids) {
    at::Tensor x = embed_tokens(input_ids);
    const auto [cos, sin] = rotary_emb(input_ids.size(1), x.scalar_type());
    for (DecoderLayer<Mlp>& layer : layers) x = layer(x, cos, sin);
    return norm(x);
  }

  torch::nn::Embedding embed_tokens{nullptr};
  std::vector<DecoderLayer<Mlp>> layers;
  RMSNorm norm{nullptr};
  RotaryEmbedding rotary_emb{nullptr};
};

// What LlamaImpl and MixtralImpl are.
template <typename Mlp>
struct CausalLmImpl : torch::nn::Module {
  using Decoder = torch::nn::ModuleHolder<Hooked<DecoderImpl<Mlp>>>;

  template <typename MlpOptions>
  CausalLmImpl(const DecoderOptions& options, const MlpOptions& mlp, bool tie_word_embeddings,
               double initializer_range)
      : model(register_module("model", Decoder(options, mlp))) {
    const at::Tensor& embedding = model->embed_tokens->weight;
    lm_head = register_module("lm_head",
                              LmHead(tie_word_embeddings ? embedding : at::empty_like(embedding)));
    initialize(*this, initializer_range);
    if (options.pad_token_id.has_value()) {
      const c10::AutoGradMode no_grad(false);
      embedding.select(0, *options.pad_token_id).zero_();
    }
  }

  // [batch, length] -> [batch, length, vocab_size]
  at::Tensor forward(const at::Tensor& input_ids) { return lm_head(model(input_ids)); }

  Decoder model;
  LmHead lm_head{nullptr};
};

// Both models' plan, but for that of their MLP, which the caller gives for "model.layers.*.mlp".
ShardingPlan causal_lm_plan(const DecoderOptions& options, bool tie_word_embeddings,
                            const ShardingPlan& mlp, const DeviceMesh& mesh,
                            const PlanOptions& plan_options);

}  // namespace shardweave::nn

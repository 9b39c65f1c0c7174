// Llama (Touvron et al.), with the names, the numerics and the configurations of transformers'
// LlamaForCausalLM.
//
//   const nn::LlamaOptions options = {.vocab_size = 32000, .hidden_size = 512,
//       .intermediate_size = 1376, .num_hidden_layers = 8, .num_attention_heads = 8,
//       .num_key_value_heads = 2};                       // or nn::LlamaOptions::from_json(text)
//   nn::Llama model(options);
//   parallelize_module(*model, mesh, nn::llama_plan(options, mesh->mesh()));
//   nn::next_token_loss(model(input_ids), input_ids).backward();
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/modules/nn/causal_lm.h"
#include "shardweave/modules/nn/plan_options.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/pimpl.h"

namespace shardweave::nn {

// The names and defaults of transformers' LlamaConfig.
struct LlamaOptions {
  int64_t vocab_size = 32000;
  int64_t hidden_size = 4096;
  int64_t intermediate_size = 11008;
  int64_t num_hidden_layers = 32;
  int64_t num_attention_heads = 32;
  std::optional<int64_t> num_key_value_heads;  // absent: as many
  std::optional<int64_t> head_dim;             // absent: hidden_size / num_attention_heads
  Activation hidden_act = Activation::kSilu;
  int64_t max_position_embeddings = 2048;
  double initializer_range = 0.02;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  std::optional<int64_t> pad_token_id;  // its embedding is 0 and learns nothing
  RopeOptions rope_parameters;
  bool attention_bias = false;
  double attention_dropout = 0;
  bool mlp_bias = false;

  // Of a config.json with "model_type": "llama". Keys that change nothing here are passed over.
  // InvalidArgument, with its line: a value of another type, an unknown activation, what check()
  // says.
  static absl::StatusOr<LlamaOptions> from_json(std::string_view text);

  DecoderOptions decoder() const;
  GatedMlpOptions mlp() const;
};

// InvalidArgument: sizes that are not positive or do not divide, rotary embeddings that cannot be.
absl::Status check(const LlamaOptions& options);

// model.embed_tokens, model.layers.N.{self_attn,mlp,input_layernorm,post_attention_layernorm},
// model.norm, lm_head. forward: input_ids [batch, length] -> logits [batch, length, vocab_size].
struct LlamaImpl : CausalLmImpl<GatedMlp> {
  // Throws Error (InvalidArgument): check()
  explicit LlamaImpl(const LlamaOptions& options);
  at::Tensor forward(const at::Tensor& input_ids);
};
using Llama = torch::nn::ModuleHolder<Hooked<LlamaImpl>>;

// Throws Error: InvalidArgument if the heads do not divide by the ranks; NotFound if the mesh has
// no such dimension.
ShardingPlan llama_plan(const LlamaOptions& options, const DeviceMesh& mesh,
                        const PlanOptions& plan_options = {});

}  // namespace shardweave::nn

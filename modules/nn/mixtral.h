// Mixtral (Jiang et al.): Llama with a mixture of experts in place of every MLP, with the names,
// the numerics and the configurations of transformers' MixtralForCausalLM.
//
//   const nn::MixtralOptions options = {.vocab_size = 32000, .hidden_size = 512,
//       .intermediate_size = 1792, .num_hidden_layers = 8, .num_attention_heads = 8,
//       .num_key_value_heads = 2, .num_local_experts = 4};  // or MixtralOptions::from_json(text)
//   nn::Mixtral model(options);
//   parallelize_module(*model, mesh, nn::mixtral_plan(options, mesh->mesh()));
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

// The names and defaults of transformers' MixtralConfig.
struct MixtralOptions {
  int64_t vocab_size = 32000;
  int64_t hidden_size = 4096;
  int64_t intermediate_size = 14336;
  int64_t num_hidden_layers = 32;
  int64_t num_attention_heads = 32;
  std::optional<int64_t> num_key_value_heads = 8;  // absent: num_attention_heads
  std::optional<int64_t> head_dim;                 // absent: hidden_size / num_attention_heads
  Activation hidden_act = Activation::kSilu;
  int64_t max_position_embeddings = 4096 * 32;
  double initializer_range = 0.02;
  double rms_norm_eps = 1e-5;
  bool tie_word_embeddings = false;
  std::optional<int64_t> pad_token_id;  // its embedding is 0 and learns nothing
  RopeOptions rope_parameters = {.rope_theta = 1e6};
  double attention_dropout = 0;
  int64_t num_experts_per_tok = 2;
  int64_t num_local_experts = 8;

  // Of a config.json with "model_type": "mixtral". InvalidArgument: as LlamaOptions::from_json(); a
  // sliding window and noise in the router, which are not there.
  static absl::StatusOr<MixtralOptions> from_json(std::string_view text);

  DecoderOptions decoder() const;
  MixtureOfExpertsOptions mlp() const;
};

absl::Status check(const MixtralOptions& options);

// As Llama's; model.layers.N.mlp is a MixtureOfExperts (transformers 5's names in memory; in files
// an expert's matrices are w1, w2 and w3 of block_sparse_moe.experts.M).
struct MixtralImpl : CausalLmImpl<MixtureOfExperts> {
  // Throws Error (InvalidArgument): check()
  explicit MixtralImpl(const MixtralOptions& options);
  at::Tensor forward(const at::Tensor& input_ids);
};
using Mixtral = torch::nn::ModuleHolder<Hooked<MixtralImpl>>;

// As llama_plan().
ShardingPlan mixtral_plan(const MixtralOptions& options, const DeviceMesh& mesh,
                          const PlanOptions& plan_options = {});

}  // namespace shardweave::nn

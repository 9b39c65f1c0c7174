#include "shardweave/modules/nn/llama.h"

#include "shardweave/dtensor/error.h"
#include "shardweave/modules/nn/config.h"
#include "shardweave/modules/nn/decoder_config.h"

namespace shardweave::nn {

absl::StatusOr<LlamaOptions> LlamaOptions::from_json(std::string_view text) {
  absl::StatusOr<nn_internal::Config> config = nn_internal::Config::read(text, "llama");
  if (!config.ok()) return config.status();
  LlamaOptions options;
  config->get("vocab_size", options.vocab_size);
  config->get("hidden_size", options.hidden_size);
  config->get("intermediate_size", options.intermediate_size);
  config->get("num_hidden_layers", options.num_hidden_layers);
  config->get("num_attention_heads", options.num_attention_heads);
  config->get("num_key_value_heads", options.num_key_value_heads);
  config->get("head_dim", options.head_dim);
  nn_internal::read_activation(*config, "hidden_act", options.hidden_act);
  config->get("max_position_embeddings", options.max_position_embeddings);
  config->get("initializer_range", options.initializer_range);
  config->get("rms_norm_eps", options.rms_norm_eps);
  config->get("tie_word_embeddings", options.tie_word_embeddings);
  config->get("pad_token_id", options.pad_token_id);
  nn_internal::read_rope(*config, options.rope_parameters);
  config->get("attention_bias", options.attention_bias);
  config->get("attention_dropout", options.attention_dropout);
  config->get("mlp_bias", options.mlp_bias);
  if (!config->status().ok()) return config->status();
  if (absl::Status status = check(options); !status.ok()) return status;
  return options;
}

DecoderOptions LlamaOptions::decoder() const {
  return {.vocab_size = vocab_size,
          .pad_token_id = pad_token_id,
          .num_hidden_layers = num_hidden_layers,
          .max_position_embeddings = max_position_embeddings,
          .rms_norm_eps = rms_norm_eps,
          .attention = {.hidden_size = hidden_size,
                        .num_attention_heads = num_attention_heads,
                        .num_key_value_heads = num_key_value_heads,
                        .head_dim = head_dim,
                        .qkv_bias = attention_bias,
                        .o_bias = attention_bias,
                        .dropout = attention_dropout},
          .rope = rope_parameters};
}

GatedMlpOptions LlamaOptions::mlp() const {
  return {.hidden_size = hidden_size,
          .intermediate_size = intermediate_size,
          .activation = hidden_act,
          .bias = mlp_bias};
}

absl::Status check(const LlamaOptions& options) {
  const absl::Status status =
      nn_internal::check_positive("intermediate_size", options.intermediate_size);
  return status.ok() ? nn_internal::check(options.decoder()) : status;
}

LlamaImpl::LlamaImpl(const LlamaOptions& options)
    : CausalLmImpl(nn_internal::checked("Llama", options).decoder(), options.mlp(),
                   options.tie_word_embeddings, options.initializer_range) {}

at::Tensor LlamaImpl::forward(const at::Tensor& input_ids) {
  return CausalLmImpl::forward(input_ids);
}

ShardingPlan llama_plan(const LlamaOptions& options, const DeviceMesh& mesh,
                        const PlanOptions& plan_options) {
  return causal_lm_plan(options.decoder(), options.tie_word_embeddings,
                        gated_mlp_plan(mesh, plan_options, "model.layers.*.mlp"), mesh,
                        plan_options);
}

}  // namespace shardweave::nn

#include "shardweave/modules/nn/decoder_config.h"

#include <string>
#include <utility>

#include "shardweave/comm/str_cat.h"

namespace shardweave::nn_internal {

void read_activation(Config& config, std::string_view key, nn::Activation& activation) {
  if (!config.has(key)) return;
  std::string name;
  config.get(key, name);
  if (!config.status().ok()) return;
  const absl::StatusOr<nn::Activation> known = nn::activation_of(name);
  if (known.ok()) {
    activation = *known;
  } else {
    config.refuse(key, std::string(known.status().message()));
  }
}

void read_rope(Config& config, nn::RopeOptions& rope) {
  config.get("rope_theta", rope.rope_theta);
  double partial = 1;
  config.get("partial_rotary_factor", partial);
  std::optional<int64_t> original;  // some configurations have it outside; that counts
  config.get("original_max_position_embeddings", original);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!config.has(key) || !config.enter(key)) continue;
    config.get("type", rope.rope_type);
    config.get("rope_type", rope.rope_type);
    if (rope.rope_type == "su") rope.rope_type = "longrope";
    config.get("rope_theta", rope.rope_theta);
    config.get("partial_rotary_factor", partial);
    config.get("factor", rope.factor);
    config.get("original_max_position_embeddings", rope.original_max_position_embeddings);
    config.get("attention_factor", rope.attention_factor);
    config.get("beta_fast", rope.beta_fast);
    config.get("beta_slow", rope.beta_slow);
    config.get("mscale", rope.mscale);
    config.get("mscale_all_dim", rope.mscale_all_dim);
    config.get("truncate", rope.truncate);
    config.get("low_freq_factor", rope.low_freq_factor);
    config.get("high_freq_factor", rope.high_freq_factor);
    config.get("short_factor", rope.short_factor);
    config.get("long_factor", rope.long_factor);
    config.enter("");
  }
  if (original.has_value()) rope.original_max_position_embeddings = original;
  if (partial != 1) {
    config.refuse("partial_rotary_factor",
                  str_cat("is ", partial, "; only whole heads are turned (1)"));
  }
}

absl::Status check_positive(std::string_view name, int64_t value) {
  if (value > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(str_cat(name, " is ", value, "; wanted a positive number"));
}

absl::Status check(const nn::DecoderOptions& options) {
  for (const auto& [name, value] : {std::pair("vocab_size", options.vocab_size),
                                    {"num_hidden_layers", options.num_hidden_layers},
                                    {"max_position_embeddings", options.max_position_embeddings}}) {
    if (absl::Status status = check_positive(name, value); !status.ok()) return status;
  }
  if (const auto pad = options.pad_token_id.value_or(0);
      pad < -options.vocab_size || pad >= options.vocab_size) {
    return absl::InvalidArgumentError(
        str_cat("pad_token_id is ", pad, "; the vocab_size is ", options.vocab_size));
  }
  if (absl::Status status = nn::check(options.attention); !status.ok()) return status;
  return nn::check(options.rope, options.attention.head_size());
}

}  // namespace shardweave::nn_internal

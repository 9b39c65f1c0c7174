// What configurations of Llama and its kin have in common. Internal to modules/nn.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/nn/activation.h"
#include "shardweave/modules/nn/causal_lm.h"
#include "shardweave/modules/nn/config.h"
#include "shardweave/modules/nn/rotary_embedding.h"

namespace shardweave::nn_internal {

void read_activation(Config& config, std::string_view key, nn::Activation& activation);

// "rope_parameters" or, as before transformers 5, "rope_scaling" and "rope_theta".
void read_rope(Config& config, nn::RopeOptions& rope);

// InvalidArgument: `name` is not positive.
absl::Status check_positive(std::string_view name, int64_t value);
absl::Status check(const nn::DecoderOptions& options);

// Throws Error (InvalidArgument), with the model's name. Gives the options back.
template <typename Options>
const Options& checked(std::string_view model, const Options& options) {
  const absl::Status status = check(options);
  if (!status.ok()) throw Error(model, status);
  return options;
}

}  // namespace shardweave::nn_internal

// config.json, as transformers writes and reads it, and the options of modules/nn's models.
//
//   absl::Status fits = check_model_config(text);         // does it say what a model here computes?
//   auto options = nn::LlamaOptions::from_json(text);     // StatusOr
//   std::string again = model_config(*options);           // and back
//
// What a configuration may say, by the table in model_config.cc for each kind of model:
//
//   keys that are read             by from_json() of nn/llama.h, gpt2.h, mixtral.h, vit.h
//   keys that change no number     other token ids than a Llama's or Mixtral's "pad_token_id", what
//                                  generate() takes, names, versions: kept as they are
//   keys that would change numbers by something that is not here ("quantization_config", "auto_map",
//                                  "reorder_and_upcast_attn"): an error unless they say that it is not there
//   other keys                     an error, for who knows what they change, unless they are null, false, "",
//                                  [] or {}, begin with "_" or end in "_version"
//
// Pure functions.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/modules/nn/gpt2.h"
#include "shardweave/modules/nn/llama.h"
#include "shardweave/modules/nn/mixtral.h"
#include "shardweave/modules/nn/vit.h"

namespace shardweave {

struct ModelConfigRules {
  bool allow_unknown = false;  // keys that are in no table are passed over
};

// InvalidArgument, with line and key: what is said above, a kind of model that is not here, sizes of more than 10^9 and
// more than 100,000 layers, and what the kind's from_json() refuses.
absl::Status check_model_config(std::string_view text, const ModelConfigRules& rules = {});

// "llama", "gpt2", "mixtral" or "vit". InvalidArgument for another, and for none.
absl::StatusOr<std::string> model_kind(std::string_view config_json);

// That from_json() reads as these options, and transformers, of version 4 and 5, alike.
std::string model_config(const nn::LlamaOptions& options);
std::string model_config(const nn::Gpt2Options& options);
std::string model_config(const nn::MixtralOptions& options);
std::string model_config(const nn::VitOptions& options);

// As it stands beside files of weights: with the class that transformers makes of it, unless it names one, and
// the dtype of the weights ("float32", "bfloat16", ...). All else stays. InvalidArgument: no such configuration.
absl::StatusOr<std::string> config_with_dtype(std::string_view config_json, std::string_view dtype);

}  // namespace shardweave

#include "shardweave/modules/hugging_face/model_config.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_join.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/json_document.h"

namespace shardweave {
namespace {

using modules_internal::Json;
using modules_internal::JsonDocument;

using Keys = std::vector<std::string_view>;

// A key that may say one thing.
struct OneValue {
  std::string_view key, value;  // JSON
};

template <typename Options>
absl::Status read(std::string_view text) {
  return Options::from_json(text).status();
}

struct KindOfConfig {
  std::string_view kind;
  std::string_view architecture;
  absl::Status (*read)(std::string_view text);
  Keys keys;      // that from_json() reads
  Keys harmless;  // besides kHarmless
  std::vector<OneValue> fixed;
};

const std::vector<KindOfConfig>& kinds() {
  static const auto* const kKinds = new std::vector<KindOfConfig>{
      {"llama",
       "LlamaForCausalLM",
       read<nn::LlamaOptions>,
       {"vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "initializer_range",
        "rms_norm_eps",
        "tie_word_embeddings",
        "pad_token_id",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "attention_bias",
        "attention_dropout",
        "mlp_bias"},
       {"pretraining_tp"},
       {{"sliding_window", "null"}}},
      {"gpt2",
       "GPT2LMHeadModel",
       read<nn::Gpt2Options>,
       {"vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner",
        "activation_function", "resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon",
        "initializer_range", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
        "tie_word_embeddings", "add_cross_attention"},
       {"n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
        "summary_type", "summary_use_proj", "gradient_checkpointing"},
       {{"reorder_and_upcast_attn", "false"}}},
      {"mixtral",
       "MixtralForCausalLM",
       read<nn::MixtralOptions>,
       {"vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "initializer_range",
        "rms_norm_eps",
        "tie_word_embeddings",
        "pad_token_id",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "attention_dropout",
        "num_experts_per_tok",
        "num_local_experts",
        "sliding_window",
        "router_jitter_noise"},
       {"router_aux_loss_coef", "experts_implementation"},
       {{"output_router_logits", "false"}}},
      {"vit",
       "ViTForImageClassification",
       read<nn::VitOptions>,
       {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
        "hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range",
        "layer_norm_eps", "image_size", "patch_size", "num_channels", "qkv_bias", "num_labels",
        "id2label"},
       {"encoder_stride", "pooler_act", "pooler_output_size"},
       {}},
  };
  return *kKinds;
}

// What any configuration of transformers may have.
const Keys& harmless() {
  static const auto* const kHarmless = new Keys{
      "architectures", "model_type", "torch_dtype", "dtype", "use_cache", "name_or_path",
      "tokenizer_class", "finetuning_task", "task_specific_params", "problem_type", "prefix",
      "id2label", "label2id", "num_labels", "return_dict", "output_hidden_states",
      "output_attentions", "torchscript", "use_bfloat16", "tf_legacy_loss", "is_decoder",
      "chunk_size_feed_forward", "attn_implementation", "gradient_checkpointing",
      // Tokens.
      "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
      "decoder_start_token_id",
      // generate()'s.
      "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams",
      "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
      "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
      "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
      "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
      "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
      "begin_suppress_tokens"};
  return *kHarmless;
}

const std::vector<OneValue>& fixed() {
  static const auto* const kFixed = new std::vector<OneValue>{
      {"is_encoder_decoder", "false"},
      {"add_cross_attention", "false"},
      {"cross_attention_hidden_size", "null"},
      {"tie_encoder_decoder", "false"},
      {"pruned_heads", "{}"},
      {"quantization_config", "null"},
      {"auto_map", "null"},  // a model whose code comes with it
  };
  return *kFixed;
}

// Of "rope_parameters" or "rope_scaling".
const Keys& rope_keys() {
  static const auto* const kRope = new Keys{"type",
                                            "rope_type",
                                            "rope_theta",
                                            "partial_rotary_factor",
                                            "factor",
                                            "original_max_position_embeddings",
                                            "attention_factor",
                                            "beta_fast",
                                            "beta_slow",
                                            "mscale",
                                            "mscale_all_dim",
                                            "truncate",
                                            "low_freq_factor",
                                            "high_freq_factor",
                                            "short_factor",
                                            "long_factor"};
  return *kRope;
}

bool has(const Keys& keys, std::string_view key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

const OneValue* find(const std::vector<OneValue>& values, std::string_view key) {
  const auto found = std::find_if(values.begin(), values.end(),
                                  [&](const OneValue& each) { return each.key == key; });
  return found == values.end() ? nullptr : &*found;
}

// What cannot switch anything on.
bool says_nothing(const Json& json) {
  return json.is_null() || json == false || (json.is_string() && json.get<std::string>().empty()) ||
         (json.is_structured() && json.empty());
}

const KindOfConfig* find_kind(std::string_view kind) {
  for (const KindOfConfig& each : kinds()) {
    if (each.kind == kind) return &each;
  }
  return nullptr;
}

absl::StatusOr<const KindOfConfig*> kind_of(const JsonDocument& document) {
  const Json& json = document.json();
  if (!json.is_object()) return document.expected({}, "an object", json);
  const auto type = json.find("model_type");
  if (type == json.end()) {
    return absl::InvalidArgumentError("the configuration has no \"model_type\"");
  }
  if (!type->is_string()) return document.expected({"model_type"}, "a text", *type);
  const KindOfConfig* found = find_kind(type->get<std::string>());
  if (found != nullptr) return found;
  std::vector<std::string> known;
  for (const KindOfConfig& each : kinds()) known.emplace_back(each.kind);
  return document.refuse({"model_type"},
                         str_cat("the library has no model \"", type->get<std::string>(),
                                 "\"; there are: ", absl::StrJoin(known, ", ")));
}

absl::Status check_keys(const JsonDocument& document, const KindOfConfig& kind,
                        const ModelConfigRules& rules) {
  for (const auto& [key, value] : document.json().items()) {
    const OneValue* one = find(kind.fixed, key);
    if (one == nullptr && !has(kind.keys, key)) one = find(fixed(), key);
    if (one != nullptr) {
      if (value == Json::parse(one->value) || value.is_null()) continue;
      return document.refuse(
          {key}, str_cat("is ", value.dump(), ", which is not here; wanted ", one->value));
    }
    // Products of two of them are numbers. Modules are made for each layer, and files have a tensor of
    // each expert.
    const bool is_count =
        key == "num_hidden_layers" || key == "n_layer" || key == "num_local_experts";
    const int64_t most = is_count ? 100'000 : 1'000'000'000;
    if (has(kind.keys, key) && value.is_number_unsigned() &&
        value.get<uint64_t>() > static_cast<uint64_t>(most)) {
      return document.refuse({key}, str_cat("is ", value.dump(), "; wanted at most ", most));
    }
    if (has(kind.keys, key) || has(kind.harmless, key) || has(harmless(), key)) continue;
    if (rules.allow_unknown || says_nothing(value) || key.starts_with("_") ||
        key.ends_with("_version")) {
      continue;
    }
    return document.refuse(
        {key}, str_cat("is not known of ", kind.kind,
                       ", and may change its numbers; remove it, or allow unknown keys"));
  }
  for (const char* rope : {"rope_scaling", "rope_parameters"}) {
    const auto found = document.json().find(rope);
    if (!has(kind.keys, rope) || found == document.json().end() || !found->is_object()) continue;
    for (const auto& [key, value] : found->items()) {
      if (has(rope_keys(), key) || rules.allow_unknown) continue;
      return document.refuse({rope, key}, "is not known, and may change the model's numbers");
    }
  }
  return absl::OkStatus();
}

std::string name_of(nn::Activation activation) {
  switch (activation) {
    case nn::Activation::kSilu:
      return "silu";
    case nn::Activation::kGelu:
      return "gelu";
    case nn::Activation::kGeluTanh:
      return "gelu_new";
    case nn::Activation::kRelu:
      return "relu";
  }
  return "";
}

template <typename T>
void put(Json& json, const char* key, const std::optional<T>& value) {
  if (value.has_value()) json[key] = *value;
}

// transformers 5 reads "rope_parameters", 4 the other two.
void put_rope(Json& json, const nn::RopeOptions& rope) {
  Json its = {{"rope_type", rope.rope_type}};
  put(its, "factor", rope.factor);
  put(its, "original_max_position_embeddings", rope.original_max_position_embeddings);
  put(its, "attention_factor", rope.attention_factor);
  put(its, "beta_fast", rope.beta_fast);
  put(its, "beta_slow", rope.beta_slow);
  put(its, "mscale", rope.mscale);
  put(its, "mscale_all_dim", rope.mscale_all_dim);
  if (!rope.truncate) its["truncate"] = false;
  put(its, "low_freq_factor", rope.low_freq_factor);
  put(its, "high_freq_factor", rope.high_freq_factor);
  if (!rope.short_factor.empty()) its["short_factor"] = rope.short_factor;
  if (!rope.long_factor.empty()) its["long_factor"] = rope.long_factor;
  json["rope_theta"] = rope.rope_theta;
  if (rope.rope_type != "default") json["rope_scaling"] = its;
  its["rope_theta"] = rope.rope_theta;
  json["rope_parameters"] = std::move(its);
  // Where longrope's length is looked for.
  if (rope.rope_type == "longrope") {
    put(json, "original_max_position_embeddings", rope.original_max_position_embeddings);
  }
}

Json begun(std::string_view kind) {
  return {{"architectures", Json::array({std::string(find_kind(kind)->architecture)})},
          {"model_type", std::string(kind)}};
}

template <typename Options>
Json decoder_config(std::string_view kind, const Options& options) {
  Json json = begun(kind);
  json["vocab_size"] = options.vocab_size;
  json["hidden_size"] = options.hidden_size;
  json["intermediate_size"] = options.intermediate_size;
  json["num_hidden_layers"] = options.num_hidden_layers;
  json["num_attention_heads"] = options.num_attention_heads;
  json["num_key_value_heads"] = options.num_key_value_heads.value_or(options.num_attention_heads);
  json["head_dim"] = options.decoder().attention.head_size();
  json["hidden_act"] = name_of(options.hidden_act);
  json["max_position_embeddings"] = options.max_position_embeddings;
  json["initializer_range"] = options.initializer_range;
  json["rms_norm_eps"] = options.rms_norm_eps;
  json["tie_word_embeddings"] = options.tie_word_embeddings;
  put_rope(json, options.rope_parameters);
  json["attention_dropout"] = options.attention_dropout;
  if (options.pad_token_id.has_value()) json["pad_token_id"] = *options.pad_token_id;
  return json;
}

std::string text_of(const Json& json) {
  return json.dump(2) + "\n";
}

}  // namespace

absl::Status check_model_config(std::string_view text, const ModelConfigRules& rules) {
  const absl::StatusOr<JsonDocument> document = JsonDocument::read(text);
  if (!document.ok()) return document.status();
  const absl::StatusOr<const KindOfConfig*> kind = kind_of(*document);
  if (!kind.ok()) return kind.status();
  if (absl::Status status = check_keys(*document, **kind, rules); !status.ok()) return status;
  return (*kind)->read(text);
}

absl::StatusOr<std::string> model_kind(std::string_view config_json) {
  const absl::StatusOr<JsonDocument> document = JsonDocument::read(config_json);
  if (!document.ok()) return document.status();
  const absl::StatusOr<const KindOfConfig*> kind = kind_of(*document);
  if (!kind.ok()) return kind.status();
  return std::string((*kind)->kind);
}

std::string model_config(const nn::LlamaOptions& options) {
  Json json = decoder_config("llama", options);
  json["attention_bias"] = options.attention_bias;
  json["mlp_bias"] = options.mlp_bias;
  return text_of(json);
}

std::string model_config(const nn::MixtralOptions& options) {
  Json json = decoder_config("mixtral", options);
  json["num_experts_per_tok"] = options.num_experts_per_tok;
  json["num_local_experts"] = options.num_local_experts;
  json["sliding_window"] = nullptr;
  json["router_jitter_noise"] = 0.0;
  return text_of(json);
}

std::string model_config(const nn::Gpt2Options& options) {
  Json json = begun("gpt2");
  json["vocab_size"] = options.vocab_size;
  json["n_positions"] = options.n_positions;
  json["n_embd"] = options.n_embd;
  json["n_layer"] = options.n_layer;
  json["n_head"] = options.n_head;
  json["n_inner"] = options.inner();
  json["activation_function"] = name_of(options.activation_function);
  json["resid_pdrop"] = options.resid_pdrop;
  json["embd_pdrop"] = options.embd_pdrop;
  json["attn_pdrop"] = options.attn_pdrop;
  json["layer_norm_epsilon"] = options.layer_norm_epsilon;
  json["initializer_range"] = options.initializer_range;
  json["scale_attn_weights"] = options.scale_attn_weights;
  json["scale_attn_by_inverse_layer_idx"] = options.scale_attn_by_inverse_layer_idx;
  json["tie_word_embeddings"] = options.tie_word_embeddings;
  return text_of(json);
}

std::string model_config(const nn::VitOptions& options) {
  Json json = begun("vit");
  json["hidden_size"] = options.hidden_size;
  json["num_hidden_layers"] = options.num_hidden_layers;
  json["num_attention_heads"] = options.num_attention_heads;
  json["intermediate_size"] = options.intermediate_size;
  json["hidden_act"] = name_of(options.hidden_act);
  json["hidden_dropout_prob"] = options.hidden_dropout_prob;
  json["attention_probs_dropout_prob"] = options.attention_probs_dropout_prob;
  json["initializer_range"] = options.initializer_range;
  json["layer_norm_eps"] = options.layer_norm_eps;
  json["image_size"] = options.image_size;
  json["patch_size"] = options.patch_size;
  json["num_channels"] = options.num_channels;
  json["qkv_bias"] = options.qkv_bias;
  // transformers counts the labels by these.
  for (int64_t i = 0; i < options.num_labels; ++i) {
    const std::string number = std::to_string(i), label = str_cat("LABEL_", i);
    json["id2label"][number] = label;
    json["label2id"][label] = i;
  }
  return text_of(json);
}

absl::StatusOr<std::string> config_with_dtype(std::string_view config_json,
                                              std::string_view dtype) {
  const absl::StatusOr<JsonDocument> document = JsonDocument::read(config_json);
  if (!document.ok()) return document.status();
  const absl::StatusOr<const KindOfConfig*> kind = kind_of(*document);
  if (!kind.ok()) return kind.status();
  Json json = document->json();
  if (!json.contains("architectures") || json["architectures"].is_null()) {
    json["architectures"] = Json::array({std::string((*kind)->architecture)});
  }
  // The first is transformers 4's, the second 5's.
  json["torch_dtype"] = std::string(dtype);
  json["dtype"] = std::string(dtype);
  return text_of(json);
}

}  // namespace shardweave

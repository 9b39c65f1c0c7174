#include "shardweave/modules/nn/registry.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_join.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/json_document.h"
#include "shardweave/modules/nn/config.h"
#include "shardweave/modules/nn/gated_mlp.h"
#include "shardweave/modules/nn/gpt2.h"
#include "shardweave/modules/nn/grouped_query_attention.h"
#include "shardweave/modules/nn/llama.h"
#include "shardweave/modules/nn/mixtral.h"
#include "shardweave/modules/nn/mixture_of_experts.h"
#include "shardweave/modules/nn/vit.h"

namespace shardweave::nn {
namespace {

struct ModelKind {
  const char* name;
  const char* input;
  bool has_vocabulary, has_experts;
  absl::StatusOr<Model> (*make)(const ModelKind& kind, std::string_view config_json);
  absl::StatusOr<ShardingPlan> (*plan)(std::string_view config_json, const DeviceMesh& mesh,
                                       const PlanOptions& options);
};

template <typename Holder, typename Options, auto kPlan>
absl::StatusOr<Model> make(const ModelKind& kind, std::string_view config_json) {
  const absl::StatusOr<Options> options = Options::from_json(config_json);
  if (!options.ok()) return options.status();
  Holder holder(*options);
  return Model{
      .module = holder.ptr(),
      .inputs = {kind.input},
      .outputs = {"logits"},
      .forward =
          [holder, name = kind.name](const std::vector<at::Tensor>& inputs) mutable {
            if (inputs.size() != 1) {
              throw Error(
                  absl::InvalidArgumentError(str_cat(name, " takes 1 input, not ", inputs.size())));
            }
            return std::vector<at::Tensor>{holder(inputs[0])};
          },
      .plan = [options = *options](
                  const DeviceMesh& mesh,
                  const PlanOptions& plan_options) { return kPlan(options, mesh, plan_options); },
  };
}

template <typename Options, auto kPlan>
absl::StatusOr<ShardingPlan> plan_of(std::string_view config_json, const DeviceMesh& mesh,
                                     const PlanOptions& plan_options) {
  const absl::StatusOr<Options> options = Options::from_json(config_json);
  if (!options.ok()) return options.status();
  return kPlan(*options, mesh, plan_options);
}

constexpr ModelKind kModelKinds[] = {
    {"gpt2", "input_ids", true, false, make<Gpt2, Gpt2Options, gpt2_plan>,
     plan_of<Gpt2Options, gpt2_plan>},
    {"llama", "input_ids", true, false, make<Llama, LlamaOptions, llama_plan>,
     plan_of<LlamaOptions, llama_plan>},
    {"mixtral", "input_ids", true, true, make<Mixtral, MixtralOptions, mixtral_plan>,
     plan_of<MixtralOptions, mixtral_plan>},
    {"vit", "pixel_values", false, false, make<Vit, VitOptions, vit_plan>,
     plan_of<VitOptions, vit_plan>},
};

// A part of a model, for plans of models that the zoo does not have: `fqn` is where it stands.
struct PartKind {
  const char* name;
  bool has_experts;
  absl::StatusOr<ShardingPlan> (*plan)(std::string_view config_json, const DeviceMesh& mesh,
                                       const PlanOptions& options, std::string_view fqn);
};

absl::StatusOr<ShardingPlan> plan_of_attention(std::string_view config_json, const DeviceMesh& mesh,
                                               const PlanOptions& plan_options,
                                               std::string_view fqn) {
  absl::StatusOr<nn_internal::Config> config = nn_internal::Config::read(config_json, "");
  if (!config.ok()) return config.status();
  AttentionOptions options;
  config->get("num_attention_heads", options.num_attention_heads);
  config->get("num_key_value_heads", options.num_key_value_heads);
  if (options.num_attention_heads < 1) {
    config->refuse("num_attention_heads",
                   "is missing or less than 1; wanted how many heads it has");
  } else if (options.key_value_heads() < 1 ||
             options.num_attention_heads % options.key_value_heads() != 0) {
    config->refuse("num_key_value_heads", "does not divide \"num_attention_heads\"");
  }
  if (!config->status().ok()) return config->status();
  return attention_plan(options, mesh, plan_options, fqn);
}

// Whatever its sizes.
template <auto kPlan>
absl::StatusOr<ShardingPlan> plan_of_part(std::string_view config_json, const DeviceMesh& mesh,
                                          const PlanOptions& plan_options, std::string_view fqn) {
  absl::StatusOr<nn_internal::Config> config = nn_internal::Config::read(config_json, "");
  if (!config.ok()) return config.status();
  return kPlan(mesh, plan_options, fqn);
}

constexpr PartKind kPartKinds[] = {
    {"attention", false, plan_of_attention},
    {"mlp", false, plan_of_part<gated_mlp_plan>},
    {"moe", true, plan_of_part<mixture_of_experts_plan>},
};

// `kind` empty: the configuration's "model_type".
absl::StatusOr<const ModelKind*> find_model(std::string_view kind, std::string_view config_json) {
  std::string wanted(kind);
  if (kind.empty()) {
    absl::StatusOr<nn_internal::Config> config = nn_internal::Config::read(config_json, "");
    if (!config.ok()) return config.status();
    config->get("model_type", wanted);
    if (!config->status().ok()) return config->status();
    if (wanted.empty()) {
      return absl::InvalidArgumentError("the configuration has no \"model_type\"");
    }
  }
  for (const ModelKind& each : kModelKinds) {
    if (each.name == wanted) return &each;
  }
  return absl::InvalidArgumentError(str_cat("the library has no model \"", wanted,
                                            "\"; there are: ", absl::StrJoin(model_kinds(), ", "),
                                            modules_internal::did_you_mean(wanted, model_kinds())));
}

// What a plan may be asked for; `fqn` null: it is a whole model's.
absl::StatusOr<PlanOptions> read_plan_options(std::string_view kind, bool has_vocabulary,
                                              bool has_experts, std::string* fqn,
                                              std::string_view text) {
  absl::StatusOr<modules_internal::JsonDocument> document =
      modules_internal::JsonDocument::read(text.empty() ? "{}" : text);
  if (!document.ok()) return document.status();
  if (!document->json().is_object()) return document->expected({}, "an object", document->json());
  PlanOptions options;
  std::vector<std::pair<std::string, bool*>> flags = {
      {"sequence_parallel", &options.sequence_parallel}};
  if (has_vocabulary) flags.emplace_back("shard_vocabulary", &options.shard_vocabulary);
  if (has_experts) flags.emplace_back("expert_parallel", &options.expert_parallel);
  std::vector<std::string> names = {"mesh_dim"};
  for (const auto& [name, flag] : flags) names.push_back(name);
  if (fqn != nullptr) names.emplace_back("fqn");
  for (const auto& [key, json] : document->json().items()) {
    if (key == "mesh_dim") {
      if (!json.is_string()) return document->expected({key}, "a mesh dimension's name", json);
      options.mesh_dim = json.get<std::string>();
      continue;
    }
    if (key == "fqn" && fqn != nullptr) {
      if (!json.is_string()) return document->expected({key}, "a pattern of modules", json);
      *fqn = json.get<std::string>();
      continue;
    }
    const auto flag = std::find_if(flags.begin(), flags.end(),
                                   [&key = key](const auto& each) { return each.first == key; });
    if (flag == flags.end()) {
      return document->refuse({key}, str_cat("is no option of ", kind,
                                             "'s plan; there are: ", absl::StrJoin(names, ", "),
                                             modules_internal::did_you_mean(key, names)));
    }
    if (!json.is_boolean()) return document->expected({key}, "true or false", json);
    *flag->second = json.get<bool>();
  }
  return options;
}

}  // namespace

std::vector<std::string> model_kinds() {
  std::vector<std::string> names;
  for (const ModelKind& kind : kModelKinds) names.emplace_back(kind.name);
  return names;
}

absl::StatusOr<Model> make_model(std::string_view kind, std::string_view config_json) {
  const absl::StatusOr<const ModelKind*> found = find_model(kind, config_json);
  if (!found.ok()) return found.status();
  return (*found)->make(**found, config_json);
}

absl::StatusOr<ShardingPlan> model_plan(std::string_view kind, std::string_view config_json,
                                        const DeviceMesh& mesh, std::string_view options_json) {
  for (const PartKind& part : kPartKinds) {
    if (part.name != kind) continue;
    std::string fqn;
    const absl::StatusOr<PlanOptions> options =
        read_plan_options(kind, false, part.has_experts, &fqn, options_json);
    if (!options.ok()) return options.status();
    return part.plan(config_json, mesh, *options, fqn);
  }
  const absl::StatusOr<const ModelKind*> found = find_model(kind, config_json);
  if (!found.ok()) {
    std::string known;
    for (const PartKind& part : kPartKinds)
      str_append(&known, known.empty() ? "" : ", ", part.name);
    return absl::Status(found.status().code(), str_cat(std::string(found.status().message()),
                                                       "; and plans of parts: ", known));
  }
  const ModelKind& model = **found;
  const absl::StatusOr<PlanOptions> options =
      read_plan_options(model.name, model.has_vocabulary, model.has_experts, nullptr, options_json);
  if (!options.ok()) return options.status();
  return (*found)->plan(config_json, mesh, *options);
}

}  // namespace shardweave::nn

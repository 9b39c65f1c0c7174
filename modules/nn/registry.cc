#include "shardweave/modules/nn/registry.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_join.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/nn/config.h"
#include "shardweave/modules/nn/gpt2.h"
#include "shardweave/modules/nn/llama.h"
#include "shardweave/modules/nn/mixtral.h"
#include "shardweave/modules/nn/vit.h"

namespace shardweave::nn {
namespace {

struct Kind {
  const char* name;
  const char* input;
  absl::StatusOr<Model> (*make)(const Kind& kind, std::string_view config_json);
};

template <typename Holder, typename Options, auto kPlan>
absl::StatusOr<Model> make(const Kind& kind, std::string_view config_json) {
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

constexpr Kind kKinds[] = {
    {"gpt2", "input_ids", make<Gpt2, Gpt2Options, gpt2_plan>},
    {"llama", "input_ids", make<Llama, LlamaOptions, llama_plan>},
    {"mixtral", "input_ids", make<Mixtral, MixtralOptions, mixtral_plan>},
    {"vit", "pixel_values", make<Vit, VitOptions, vit_plan>},
};

}  // namespace

std::vector<std::string> model_kinds() {
  std::vector<std::string> names;
  for (const Kind& kind : kKinds) names.emplace_back(kind.name);
  return names;
}

absl::StatusOr<Model> make_model(std::string_view kind, std::string_view config_json) {
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
  for (const Kind& each : kKinds) {
    if (each.name == wanted) return each.make(each, config_json);
  }
  return absl::InvalidArgumentError(str_cat("the library has no model \"", wanted,
                                            "\"; there are: ", absl::StrJoin(model_kinds(), ", ")));
}

}  // namespace shardweave::nn

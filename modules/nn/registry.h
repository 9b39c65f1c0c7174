// The library's models by name, for programs that choose at run time and hosts in other languages.
//
//   const nn::Model model = *nn::make_model("", config_json);  // the kind is its "model_type"
//   parallelize_module(*model.module, mesh, model.plan(mesh->mesh(), {}));
//   const at::Tensor logits = model.forward({input_ids})[0];
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/modules/nn/plan_options.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/module.h"

namespace shardweave::nn {

struct Model {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<std::string> inputs, outputs;  // names of what forward takes and gives
  // Throws Error (InvalidArgument) for another number of inputs. Keeps the module alive.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> forward;
  // The zoo's plan for it: llama_plan(), ...
  std::function<ShardingPlan(const DeviceMesh&, const PlanOptions&)> plan;
};

// "gpt2", "llama", "mixtral", "vit".
std::vector<std::string> model_kinds();

// `kind`: one of those, or "" for the configuration's "model_type". InvalidArgument: an unknown
// kind (the message lists those that there are), a configuration of another kind, what the kind's
// from_json() says.
absl::StatusOr<Model> make_model(std::string_view kind, std::string_view config_json);

// The zoo's plan for a model that is not there, or written otherwise with the same names. `kind` may
// also be a part of models, "attention" (q_proj, k_proj, v_proj, o_proj), "mlp" (gate_proj, up_proj,
// down_proj) or "moe", for models that the zoo does not have: `options_json` says with "fqn", a
// pattern, where it stands ("": it is the model), and of the configuration no more is read than
// "num_attention_heads" and "num_key_value_heads", for attention. Plans are put together by adding
// their entries.
// `options_json`: an object with PlanOptions' members by their names, of those that the kind has
// ("shard_vocabulary" of models of text, "expert_parallel" of mixtral); "" is an empty one.
// InvalidArgument: as make_model(), and an option that the kind does not have, or of another type.
// Throws Error: what the kind's plan does.
absl::StatusOr<ShardingPlan> model_plan(std::string_view kind, std::string_view config_json,
                                        const DeviceMesh& mesh, std::string_view options_json);

}  // namespace shardweave::nn

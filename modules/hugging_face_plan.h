// The tensor-parallel plans of Hugging Face's models, as a ShardingPlan.
//
//   auto plan = hugging_face_plan(*model, R"json({
//       "layers.*.self_attn.q_proj": "colwise",
//       "layers.*.self_attn.o_proj": "rowwise",
//       "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
//       "lm_head": "colwise_gather_output"})json");
//   parallelize_module(*model, mesh, *plan);
//
// Such a plan is what a configuration's base_model_tp_plan and a model's _tp_plan say, in transformers 4
// and 5: names of modules, or of parameters, in the base model, each with a style. The names count with
// and without the base model's own ("model.") before them.
//
// What a style says of the weights' placements and of inputs and outputs that would not come about by
// themselves is in the plan; what remains (the sum after a rowwise layer, gradients of a norm on parts of
// heads) DTensors find out.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "shardweave/modules/parallelize_module.h"

namespace shardweave {

// For `module`, whose parameters are named as there. `text`: the plan's object, or a configuration
// (config.json) with a base_model_tp_plan, some of whose names the module need not have: it speaks of
// all models of its type. InvalidArgument says on which line something is no plan, or a name that the
// module does not have; for a style that is not known it lists those that are.
absl::StatusOr<ShardingPlan> hugging_face_plan(const torch::nn::Module& module,
                                               std::string_view text,
                                               std::string_view tp_mesh_dim = "tp");

}  // namespace shardweave

// One call makes a model that was written for one device an nD-parallel one: where its parameters lie,
// and where the inputs and outputs of its modules go.
//
//   const ShardingPlan plan = {
//       .parameter = {{"*.{q,k,v,up}.weight", {{"tp", Shard(0)}}},
//                     {"*.{o,down}.weight", {{"tp", Shard(1)}}}},
//       .forward = {{"*.norm.input", {{"tp", Shard(1)}}},         // along the sequence, outside of
//                   {"*.{q,k,v,up}.input", {{"tp", Replicate()}}},  // attention and MLP
//                   {"*.{o,down}.output", {{"tp", Shard(1)}}}},
//   };
//   parallelize_module(*model, mesh, plan);
//
// A module's forward is a plain function in C++, which nobody can hook into. Its inputs and outputs are
// met where its weight is: in the operators that `weight` (or the module's only parameter) takes part
// in. That covers what torch::nn calls layers (linear, embedding, convolutions, norms), TorchScript's,
// and forwards in other languages. A module without a weight of its own, a block or an attention, is
// met if it was made as Hooked<Impl> (hooked.h).
#pragma once

#include <source_location>
#include <string>
#include <vector>

#include "shardweave/dtensor/distribute_module.h"

namespace shardweave {

// Where the inputs or outputs of modules go.
struct ForwardEntry {
  // A pattern of modules' FQNs (see FqnPattern), then ".input" or ".output", then which: nothing for
  // the first, an index (".input.1": among the arguments that are tensors), or an argument's name
  // (".input.mask", as the operator of a layer calls it). Of the whole model's: "input", "output".
  // In a module's place may stand the exact name of a parameter, where a module has several that
  // inputs meet ("attn.in_proj_weight.input"): what the layers' operators on it take and give.
  std::string pattern;
  // Along mesh dimensions that are not named a tensor stays as it is.
  PlanPlacements placements;
};
// In any order: the most specific pattern counts.
using ForwardPlan = std::vector<ForwardEntry>;

// Modules that say themselves how they lie, by plug-ins (plugin.h).
struct ModuleEntry {
  std::string pattern;  // of modules' FQNs
  struct Along {
    std::string mesh_dim;
    std::string style;  // a word for the plug-in; "": none
    friend bool operator==(const Along&, const Along&) = default;
  };
  std::vector<Along> along;
};
// In any order: the most specific pattern counts. What a plug-in answers for a module stands beside
// the plan's other entries as if they named its parameters, inputs and outputs exactly, and so comes
// before their patterns.
using ModulePlan = std::vector<ModuleEntry>;

struct ShardingPlan {
  ParameterPlan parameter;
  ForwardPlan forward;
  ModulePlan module = {};
};

// What a plan says of one input or output of one module.
struct ResolvedForward {
  std::string module;  // FQN; "": the whole model
  std::string value;   // "input.0", "output.0", "input.mask"
  PlanPlacements placements;
  // Of the forward plan, that decided; of several that agree the first. Beyond its end: what a
  // plug-in has said.
  size_t entry = 0;
  std::string pattern;  // of that entry
};

struct ResolvedPlan {
  std::vector<ResolvedTensor> tensors;   // as resolve_plan() gives them
  std::vector<ResolvedForward> forward;  // by modules' FQNs
};

// What parallelize_module() would do, without doing anything; throws what that would, but for what only
// all ranks know together, and the operators' rules of a mesh.
ResolvedPlan resolve_sharding_plan(torch::nn::Module& module, const DeviceMesh& mesh,
                                   const ShardingPlan& plan);

// to_string() of the tensors, and a row per input and output.
std::string to_string(const ResolvedPlan& resolved);

// distribute_module(), and from then on the plan's inputs and outputs are redistributed whenever
// the model runs, in training, evaluation and recomputation; differentiably. A plain tensor among them
// counts as replicated, and is compared with the other ranks' before a value leaves the mesh.
//
// Throws Error before anything is changed: as distribute_module(), and likewise for the forward
// entries; FailedPrecondition for one that matches a module whose forward cannot be met, saying what to
// do; NotFound for a module entry that names a type without a plug-in (plugin.h). While the model runs: a placement that a tensor cannot have, naming the entry's module.
void parallelize_module(torch::nn::Module& module, const MeshPtr& mesh, const ShardingPlan& plan,
                        const DistributeOptions& options = {},
                        std::source_location where = std::source_location::current());

}  // namespace shardweave

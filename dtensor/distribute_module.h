// Shards an ordinary torch::nn::Module by a plan of a few lines.
//
//   distribute_module(*model, mesh, {
//       {"*.{q,k,v,up}.weight", {{"tp", Shard(0)}}},
//       {"*.{o,down}.weight",   {{"tp", Shard(1)}}},
//   });
//   ...
//   loss.backward();
//   finish_grad_sync(*model);      // every gradient in its parameter's placement
//   optimizer.step();
#pragma once

#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "shardweave/dtensor/dtensor.h"

namespace torch::nn {
class Module;
}

namespace shardweave {

// Parameters and buffers whose fully qualified name (FQN, "blocks.0.attn.q.weight") matches
// `pattern` get these placements. In a pattern `*` stands for any characters, `?` for one, `{a,b}`
// for either.
struct PlanEntry {
  std::string pattern;
  NamedPlacements placements;
};
using ParameterPlan = std::vector<PlanEntry>;

bool matches_fqn(std::string_view pattern, std::string_view fqn);

// Turns every parameter and buffer into a DTensor, in place: all handles to them (the module's
// members, an optimizer's list) see it. The first matching entry of the plan counts; what none
// matches is replicated. A parameter that two modules share stays shared. Values come from
// `options.source` (by default the mesh's first rank). Throws Error for an entry that matches
// nothing, before anything is changed.
void distribute_module(torch::nn::Module& module, const MeshPtr& mesh, const ParameterPlan& plan,
                       const DistributeOptions& options = {},
                       std::source_location where = std::source_location::current());

// Brings every gradient into its parameter's layout. Gradients that wait for the same reduction
// travel together, in buckets.
void finish_grad_sync(torch::nn::Module& module,
                      std::source_location where = std::source_location::current());
void finish_grad_sync(const std::vector<at::Tensor>& parameters,
                      std::source_location where = std::source_location::current());

}  // namespace shardweave

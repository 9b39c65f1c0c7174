// Shards an ordinary torch::nn::Module by a plan of a few lines.
//
//   distribute_module(*model, mesh, {
//       {"*.{q,k,v,up}.weight", {{"tp", Shard(0)}}},
//       {"*.{o,down}.weight",   {{"tp", Shard(1)}}},
//       {"*.qkv.weight",        {{"tp", StridedShard(0, 3)}}},  // three in one, each of them cut
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
// for either (names, not patterns).
struct PlanEntry {
  std::string pattern;
  NamedPlacements placements;
};
using ParameterPlan = std::vector<PlanEntry>;

bool matches_fqn(std::string_view pattern, std::string_view fqn);

// Turns every parameter and buffer into a DTensor, in place: all handles to them (the module's
// members, an optimizer's list) see it. The first matching entry of the plan counts; what none
// matches is replicated. Values come from `options.source` (by default the mesh's first rank);
// without a source every rank's own count, and one small all-reduce of checksums finds out whether
// they are the same.
//
// A tensor with several names (tied weights) stays one: entries may match any of its names, and
// have to agree; only "*", which is for all the rest, gives way to an entry that matches one of them. Different tensors over the same memory (a view that is registered as another
// parameter) would come apart, and are refused.
//
// Throws Error before anything is changed, naming the entry and what it matches: NotFound for an
// entry that matches nothing, or names a dimension that the mesh does not have; OutOfRange for a
// source that is no rank of the mesh; InvalidArgument for a pattern with an odd brace, an entry that
// decides nothing, since earlier ones match all that it does, Partial and placements that do not
// fit, names of one tensor with different placements, tensors that overlap in memory, and, without a
// source, the first tensor that is not the same on every rank.
void distribute_module(torch::nn::Module& module, const MeshPtr& mesh, const ParameterPlan& plan,
                       const DistributeOptions& options = {},
                       std::source_location where = std::source_location::current());

// A module's parameters, each once: LibTorch's parameters() has a tensor with two names (tied
// weights) twice, and torch::optim and torch::nn::utils::clip_grad_norm_ then count it twice. Of a
// list: each tensor where it comes first. FusedOptimizer, clip_grad_norm and finish_grad_sync do
// this themselves.
std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module);
std::vector<at::Tensor> unique_parameters(const std::vector<at::Tensor>& parameters);

// Brings every gradient into its parameter's layout. Gradients that wait for the same reduction
// travel together, in buckets. One that moves becomes another tensor: who holds the old one keeps it
// as it was.
void finish_grad_sync(torch::nn::Module& module,
                      std::source_location where = std::source_location::current());
void finish_grad_sync(const std::vector<at::Tensor>& parameters,
                      std::source_location where = std::source_location::current());

}  // namespace shardweave

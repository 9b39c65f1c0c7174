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
#include "shardweave/dtensor/parameter_plan.h"

namespace shardweave {

// Turns every parameter and buffer into a DTensor, in place: all handles to them (the module's
// members, an optimizer's list) see it. What no entry of the plan matches is replicated. Values come
// from `options.source` (by default the mesh's first rank); without a source every rank's own count.
// Collective over the mesh: one small all-reduce finds out whether all ranks have the same tensors
// and the same plan, without a source the same values, too.
//
// A tensor with several names (tied weights) stays one. Different tensors over the same memory (a
// view that is registered as another parameter) would come apart, and are refused.
//
// Throws Error before anything is changed: what resolve_plan() throws; OutOfRange for a source that is
// no rank of the mesh; FailedPrecondition for a DTensor; InvalidArgument for tensors that cannot be
// one or that overlap in memory, for the first tensor that is not the same on every rank, and on the
// ranks where nothing is wrong while another refuses.
void distribute_module(torch::nn::Module& module, const MeshPtr& mesh, const ParameterPlan& plan,
                       const DistributeOptions& options = {},
                       std::source_location where = std::source_location::current());

// A module's parameters, each once: LibTorch's parameters() has a tensor with two names (tied
// weights) twice, and torch::optim and torch::nn::utils::clip_grad_norm_ then count it twice. Of a
// list: each tensor where it comes first. FusedOptimizer, clip_grad_norm and finish_grad_sync do
// this themselves.
std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module);
std::vector<at::Tensor> unique_parameters(const std::vector<at::Tensor>& parameters);

// Brings every gradient into its parameter's layout; those of a ZeRO optimizer's parameters
// (modules/zero.h) to the ranks that step them. Gradients that wait for the same reduction
// travel together, in buckets. One that moves becomes another tensor: who holds the old one keeps it
// as it was. One with a graph of its own (create_graph) keeps that, and travels alone.
void finish_grad_sync(torch::nn::Module& module,
                      std::source_location where = std::source_location::current());
void finish_grad_sync(const std::vector<at::Tensor>& parameters,
                      std::source_location where = std::source_location::current());

}  // namespace shardweave

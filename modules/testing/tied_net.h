// The model of fully_shard()'s tests, whose head may be tied to its embedding; what it is fed, on which
// meshes, and which collectives were of units.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"

namespace shardweave::testing::tied_net {

namespace nn = torch::nn;

inline constexpr int64_t kDim = 5, kHidden = 7, kWords = 11, kBatch = 7, kLength = 3;

// Values that do not depend on who makes them.
inline void initialize(const nn::Module& module) {
  const c10::AutoGradMode no_grad(false);
  double k = 0;
  for (at::Tensor p : module.parameters()) {
    p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
  }
}

struct BlockImpl : nn::Module {
  BlockImpl() {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kDim})));
    up = register_module("up", nn::Linear(kDim, kHidden));
    down = register_module("down", nn::Linear(kHidden, kDim));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  nn::LayerNorm norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

// Its weight may be another module's.
struct HeadImpl : nn::Module {
  explicit HeadImpl(const at::Tensor& tied) {
    weight = register_parameter("weight", tied.defined() ? tied : at::zeros({kWords, kDim}));
    bias = register_parameter("bias", at::zeros({kWords}));
  }
  at::Tensor forward(const at::Tensor& x) { return nn::functional::linear(x, weight, bias); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Head);

struct NetImpl : nn::Module {
  explicit NetImpl(int num_blocks = 3, bool tied = false) {
    embed = register_module("embed", nn::Embedding(kWords, kDim));
    blocks = register_module("blocks", nn::ModuleList());
    for (int i = 0; i < num_blocks; ++i) blocks->push_back(Block());
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kDim})));
    head = register_module("head", Head(tied ? embed->weight : at::Tensor()));
    initialize(*this);
  }
  at::Tensor logits(const at::Tensor& tokens, const std::vector<int>& order = {0, 1, 2}) {
    at::Tensor x = embed(tokens);
    for (const int i : order) x = block(i)(x);
    return head(norm(x));
  }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets,
                  const std::vector<int>& order = {0, 1, 2}) {
    return at::cross_entropy_loss(logits(tokens, order).view({-1, kWords}), targets.view({-1}));
  }
  Block block(int i) { return Block(std::dynamic_pointer_cast<BlockImpl>(blocks->ptr(i))); }

  nn::Embedding embed{nullptr};
  nn::ModuleList blocks{nullptr};
  nn::LayerNorm norm{nullptr};
  Head head{nullptr};
};
TORCH_MODULE(Net);

struct Batch {
  at::Tensor tokens, targets;
};
inline Batch batch(int step) {
  const at::Tensor all =
      (at::arange(kBatch * (kLength + 1)).view({kBatch, kLength + 1}) * (3 + step) + step)
          .remainder(kWords);
  return {all.slice(1, 0, kLength).contiguous(), all.slice(1, 1).contiguous()};
}
inline Batch fed(int step, const MeshPtr& mesh, const std::string& dim = "dp") {
  const Batch b = batch(step);
  return {distribute_tensor(b.tokens, mesh, {{dim, Shard(0)}}),
          distribute_tensor(b.targets, mesh, {{dim, Shard(0)}})};
}

// The cuts are uneven: 7 and 11 over two ranks.
inline const ParameterPlan kTensorParallel = {{"blocks.*.up.*", {{"tp", Shard(0)}}},
                                              {"blocks.*.down.weight", {{"tp", Shard(1)}}},
                                              {"embed.weight", {{"tp", Shard(0)}}}};

inline const std::vector<std::vector<MeshDim>> kMeshes = {
    {{"dp", 1}},
    {{"dp", 2}},
    {{"dp", 3}},
    {{"dp", 4}},
    {{"dp", 2}, {"tp", 2}},
    {{"dp", 3}, {"tp", 2}},
    {{"pp", 1}, {"dp", 2}, {"tp", 2}},
    {{"replicas", 2}, {"dp", 2}},
};
inline bool has_dim(const std::vector<MeshDim>& dims, const std::string& name) {
  return std::any_of(dims.begin(), dims.end(), [&](const MeshDim& d) { return d.name == name; });
}

struct Collectives {
  int64_t gathers = 0, reductions = 0, others = 0, bytes = 0;
};
inline Collectives of_units(const CommTrace& trace) {
  Collectives c;
  for (const CommEvent& event : trace.events()) {
    const bool gather = event.collective == "all_gather";
    const bool reduction = event.collective == "reduce_scatter";
    c.gathers += gather;
    c.reductions += reduction;
    c.others += !gather && !reduction;
    if (gather || reduction) c.bytes += event.bytes;
  }
  return c;
}

// What a gather is needed by is the operator that touched the unit.
inline bool is_of_units(const CommEvent& event) {
  const bool gather = event.collective == "all_gather" && event.shape.size() == 1;
  return event.op == "fully_shard" || (gather && !event.parameters.empty());
}

}  // namespace shardweave::testing::tied_net

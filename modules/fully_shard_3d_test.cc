// Three mesh dimensions at a time: tensor and sequence parallel inside, fully sharded around it,
// replicas of all that. Twenty steps of AdamW with clipping are those of one device.
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/adamw.h"
#include "torch/script.h"

namespace shardweave {
namespace {

using testing::on_mesh;
namespace nn = torch::nn;

constexpr int64_t kDim = 6, kHidden = 10, kWords = 12, kBatch = 4, kLength = 4;
constexpr int kSteps = 20;

// Values that do not depend on who makes them.
void initialize(const std::vector<at::Tensor>& parameters) {
  const c10::AutoGradMode no_grad(false);
  double k = 0;
  for (const at::Tensor& p : parameters) {
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

struct NetImpl : nn::Module {
  NetImpl() {
    embed = register_module("embed", nn::Embedding(kWords, kDim));
    blocks = register_module("blocks", nn::ModuleList());
    for (int i = 0; i < 2; ++i) blocks->push_back(Block());
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kDim})));
    head = register_module("head", nn::Linear(kDim, kWords));
    initialize(parameters());
  }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) {
    at::Tensor x = embed(tokens);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return at::cross_entropy_loss(head(norm(x)).view({-1, kWords}), targets.view({-1}));
  }
  nn::Embedding embed{nullptr};
  nn::ModuleList blocks{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

at::Tensor numbers(int step) {
  return (at::arange(kBatch * (kLength + 1)).view({kBatch, kLength + 1}) * (3 + step) + step)
      .remainder(kWords);
}

struct Trained {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> values;
};

using Feed = std::function<at::Tensor(const at::Tensor&)>;
using Loss = std::function<at::Tensor(int step, const Feed& feed)>;

Trained train(nn::Module& module, const Loss& loss_of, const Feed& feed) {
  Trained trained;
  torch::optim::AdamW optimizer(module.parameters(), torch::optim::AdamWOptions(0.02));
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor loss = loss_of(step, feed);
    trained.losses.push_back(loss.item<double>());
    loss.backward();
    finish_grad_sync(module);
    trained.norms.push_back(clip_grad_norm(module.parameters(), 0.5));
    optimizer.step();
    optimizer.zero_grad();
  }
  const c10::AutoGradMode no_grad(false);
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& p = item.value();
    trained.values[item.key()] = (is_dtensor(p) ? full_tensor(p) : p).detach().clone();
  }
  return trained;
}

void expect_alike(const Trained& got, const Trained& wanted) {
  for (int step = 0; step < kSteps; ++step) {
    const auto s = static_cast<size_t>(step);
    EXPECT_NEAR(got.losses[s], wanted.losses[s], 1e-3) << step;
    EXPECT_NEAR(got.norms[s], wanted.norms[s], 2e-2) << step;
  }
  EXPECT_LT(wanted.losses.back(), wanted.losses.front());
  EXPECT_GT(wanted.norms.front(), 0.5);  // clipped
  for (const auto& [name, value] : wanted.values) {
    EXPECT_TRUE(at::allclose(got.values.at(name), value, 5e-3, 5e-3))
        << name << "\n"
        << got.values.at(name) - value;
  }
}

const std::vector<std::vector<MeshDim>> kMeshes = {{{"replicas", 2}, {"dp", 2}, {"tp", 2}},
                                                   {{"dp", 2}, {"replicas", 2}, {"tp", 2}}};

Feed on(const MeshPtr& mesh) {
  return [mesh](const at::Tensor& rows) {
    return distribute_tensor(rows, mesh, {{"replicas", Shard(0)}, {"dp", Shard(0)}});
  };
}

// Between attention-like parts activations are cut along the sequence.
const ShardingPlan kPlan = {.parameter = {{"blocks.*.up.*", {{"tp", Shard(0)}}},
                                          {"blocks.*.down.weight", {{"tp", Shard(1)}}}},
                            .forward = {{"embed.output", {{"tp", Shard(1)}}},
                                        {"blocks.*.norm.output", {{"tp", Replicate()}}},
                                        {"blocks.*.down.output", {{"tp", Shard(1)}}},
                                        {"head.input", {{"tp", Replicate()}}}}};

TEST(FullyShard3dTest, TensorAndSequenceParallelInside) {
  const auto loss_of = [](Net& model) -> Loss {
    return [model](int step, const Feed& feed) mutable {
      const at::Tensor all = numbers(step);
      return model->loss(feed(all.slice(1, 0, kLength).contiguous()),
                         feed(all.slice(1, 1).contiguous()));
    };
  };
  Net plain;
  const Trained wanted = train(*plain, loss_of(plain), [](const at::Tensor& rows) { return rows; });
  for (const auto& dims : kMeshes) {
    for (const bool equal : {false, true}) {
      on_mesh(dims, [&](const MeshPtr& mesh) {
        Net model;
        parallelize_module(*model, mesh, kPlan);
        fully_shard(*model, mesh,
                    {.mesh_dim = "dp", .units = {"blocks.*"}, .equal_segments = equal});
        expect_alike(train(*model, loss_of(model), on(mesh)), wanted);
        EXPECT_EQ(fully_shard_counters(mesh).wrong_prefetches, 0);
        EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
      });
    }
  }
}

// The parameters of a file, as a module that fully_shard() takes.
struct HolderImpl : nn::Module {
  explicit HolderImpl(const torch::jit::Module& script) {
    for (const auto& p : script.named_parameters()) register_parameter(p.name, p.value);
  }
};
TORCH_MODULE(Holder);

TEST(FullyShard3dTest, TorchScript) {
  const auto make = [] {
    torch::jit::Module module("m");
    std::vector<at::Tensor> parameters;
    for (const auto& [name, sizes] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
             {"a", {kHidden, kDim}}, {"b", {kHidden}}, {"c", {kDim, kHidden}}}) {
      parameters.push_back(at::zeros(sizes).requires_grad_());
      module.register_parameter(name, parameters.back(), /*is_buffer=*/false);
    }
    initialize(parameters);
    module.define(R"(
      def forward(self, x):
          h = torch.tanh(torch.linear(x, self.a, self.b))
          return (x + torch.linear(h, self.c)).square().mean()
    )");
    return module;
  };
  const auto loss_of = [](torch::jit::Module script) -> Loss {
    return [script](int step, const Feed& feed) mutable {
      const at::Tensor x =
          at::cos(at::arange(kBatch * kDim, at::kFloat).view({kBatch, kDim}) + step);
      return script.forward({feed(x)}).toTensor();
    };
  };
  torch::jit::Module plain = make();
  Holder parameters(plain);
  const Trained wanted =
      train(*parameters, loss_of(plain), [](const at::Tensor& rows) { return rows; });
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      torch::jit::Module script = make();
      Holder its(script);
      parallelize_module(*its, mesh,
                         {.parameter = {{"{a,b}", {{"tp", Shard(0)}}}, {"c", {{"tp", Shard(1)}}}}});
      fully_shard(*its, mesh, {.mesh_dim = "dp"});
      expect_alike(train(*its, loss_of(script), on(mesh)), wanted);
    });
  }
}

}  // namespace
}  // namespace shardweave

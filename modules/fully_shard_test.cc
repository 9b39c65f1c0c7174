// Parameters that are whole only while they are used: what one device computes, in three collectives
// for a unit and step, with two units in memory at a time.
#include "shardweave/modules/fully_shard.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "c10/core/InferenceMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/activation_checkpoint.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/adamw.h"
#include "torch/script.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;
namespace nn = torch::nn;

constexpr int64_t kDim = 5, kHidden = 7, kWords = 11, kBatch = 7, kLength = 3;

// Values that do not depend on who makes them.
void initialize(const nn::Module& module) {
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
Batch batch(int step) {
  const at::Tensor all =
      (at::arange(kBatch * (kLength + 1)).view({kBatch, kLength + 1}) * (3 + step) + step)
          .remainder(kWords);
  return {all.slice(1, 0, kLength).contiguous(), all.slice(1, 1).contiguous()};
}
Batch fed(int step, const MeshPtr& mesh, const std::string& dim = "dp") {
  const Batch b = batch(step);
  return {distribute_tensor(b.tokens, mesh, {{dim, Shard(0)}}),
          distribute_tensor(b.targets, mesh, {{dim, Shard(0)}})};
}

// The cuts are uneven: 7 and 11 over two ranks.
const ParameterPlan kTensorParallel = {{"blocks.*.up.*", {{"tp", Shard(0)}}},
                                       {"blocks.*.down.weight", {{"tp", Shard(1)}}},
                                       {"embed.weight", {{"tp", Shard(0)}}}};

const std::vector<std::vector<MeshDim>> kMeshes = {
    {{"dp", 1}},
    {{"dp", 2}},
    {{"dp", 3}},
    {{"dp", 4}},
    {{"dp", 2}, {"tp", 2}},
    {{"dp", 3}, {"tp", 2}},
    {{"pp", 1}, {"dp", 2}, {"tp", 2}},
    {{"replicas", 2}, {"dp", 2}},
};
bool has_dim(const std::vector<MeshDim>& dims, const std::string& name) {
  return std::any_of(dims.begin(), dims.end(), [&](const MeshDim& d) { return d.name == name; });
}

using Values = std::map<std::string, at::Tensor>;
Values values_of(const nn::Module& module) {
  const c10::AutoGradMode no_grad(false);
  Values values;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& p = item.value();
    values[item.key()] = (is_dtensor(p) ? full_tensor(p) : p).detach().clone();
  }
  return values;
}
Values gradients_of(const nn::Module& module) {
  Values values;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& grad = item.value().grad();
    if (!grad.defined()) continue;
    if (is_dtensor(item.value())) {
      EXPECT_EQ(layout_of(grad), layout_of(item.value())) << item.key();
    }
    values[item.key()] = (is_dtensor(grad) ? full_tensor(grad) : grad).detach().clone();
  }
  return values;
}
void expect_close(const Values& got, const Values& wanted, double tolerance = 1e-5) {
  EXPECT_EQ(got.size(), wanted.size());
  for (const auto& [name, value] : wanted) {
    const auto it = got.find(name);
    if (it == got.end()) {
      ADD_FAILURE() << name << " is not there";
      continue;
    }
    EXPECT_TRUE(at::allclose(it->second, value, tolerance, tolerance)) << name << "\n"
                                                                       << it->second << "\nwanted\n"
                                                                       << value;
  }
}

// As each rank has it, of all parameters in units.
int64_t bytes_at_rest(const nn::Module& module) {
  int64_t bytes = 0;
  for (const at::Tensor& p : unique_parameters(module)) {
    bytes += static_cast<int64_t>(to_local(p).nbytes());
  }
  return bytes;
}

constexpr int kSteps = 5;

struct Trained {
  std::vector<double> losses, norms;
  Values values;
};

Trained train(NetImpl& model, const std::function<Batch(int)>& feed) {
  Trained trained;
  torch::optim::AdamW optimizer(unique_parameters(model), torch::optim::AdamWOptions(0.02));
  for (int step = 0; step < kSteps; ++step) {
    const Batch b = feed(step);
    const at::Tensor loss = model.loss(b.tokens, b.targets);
    trained.losses.push_back(loss.item<double>());
    loss.backward();
    finish_grad_sync(model);
    trained.norms.push_back(clip_grad_norm(model.parameters(), 0.5));
    optimizer.step();
    optimizer.zero_grad();
  }
  trained.values = values_of(model);
  return trained;
}

TEST(FullyShardTest, TrainsAsOneDevice) {
  Net plain;
  const Trained wanted = train(*plain, batch);
  ASSERT_GT(wanted.norms[0], 0.5);  // clipped
  for (const auto& dims : kMeshes) {
    for (const bool keep : {false, true}) {
      SCOPED_TRACE(dims.size() * 100 + dims.back().size);
      on_mesh(dims, [&](const MeshPtr& mesh) {
        Net model;
        if (has_dim(dims, "tp")) parallelize_module(*model, mesh, {.parameter = kTensorParallel});
        const auto units =
            fully_shard(*model, mesh,
                        {.mesh_dim = "dp", .units = {"blocks.*"}, .reshard_after_forward = !keep});
        EXPECT_EQ(units.size(), 4U);
        const Trained got = train(*model, [&](int step) {
          Batch b = fed(step, mesh);
          if (has_dim(dims, "replicas")) {
            b.tokens = redistribute(b.tokens, {Shard(0), Shard(0)});
            b.targets = redistribute(b.targets, {Shard(0), Shard(0)});
          }
          return b;
        });
        for (int step = 0; step < kSteps; ++step) {
          EXPECT_NEAR(got.losses[step], wanted.losses[step], 1e-4) << step;
          EXPECT_NEAR(got.norms[step], wanted.norms[step], 1e-3) << step;
        }
        expect_close(got.values, wanted.values, 1e-3);
        EXPECT_EQ(fully_shard_counters(mesh).wrong_prefetches, 0);
        EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
      });
    }
  }
}

TEST(FullyShardTest, GradientsAreOneDevices) {
  Net plain;
  const Batch first = batch(0);
  plain->loss(first.tokens, first.targets).backward();
  const Values wanted = gradients_of(*plain);
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Net model;
      if (has_dim(dims, "tp")) parallelize_module(*model, mesh, {.parameter = kTensorParallel});
      fully_shard(*model, mesh, {.mesh_dim = "dp", .units = {"blocks.*"}});
      const Batch b = fed(0, mesh);
      model->loss(b.tokens, b.targets).backward();
      expect_close(gradients_of(*model),
                   wanted);  // they lie as the parameters: nothing is left to do
      const CommTrace trace(mesh);
      finish_grad_sync(*model);
      EXPECT_TRUE(trace.events().empty()) << trace.to_string();
    });
  }
}

struct Collectives {
  int64_t gathers = 0, reductions = 0, others = 0, bytes = 0;
};
Collectives of_units(const CommTrace& trace) {
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
bool is_of_units(const CommEvent& event) {
  const bool gather = event.collective == "all_gather" && event.shape.size() == 1;
  return event.op == "fully_shard" || (gather && !event.parameters.empty());
}

TEST(FullyShardTest, ThreeCollectivesForAUnitAndStep) {
  for (const int64_t ranks : {2, 3, 4}) {
    for (const bool keep : {false, true}) {
      on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
        Net model;
        const auto units = fully_shard(
            *model, mesh, {.units = {"blocks.*", "embed", "head"}, .reshard_after_forward = !keep});
        ASSERT_EQ(units.size(), 6U);  // the norm is left
        int64_t numel = 0;
        for (const FullyShardUnit& unit : units) {
          numel += unit.numel;
          EXPECT_GE(unit.kept, 0);
        }
        for (int step = 0; step < 4; ++step) {
          const Batch b = fed(step, mesh);
          const CommTrace trace(mesh);
          const at::Tensor loss = model->loss(b.tokens, b.targets);
          const int64_t forward = of_units(trace).gathers;
          loss.backward();
          const Collectives c = of_units(trace);
          EXPECT_EQ(forward, 6) << trace.to_string();
          // The last unit is full when backward begins, and the embedding's weight is not read there.
          EXPECT_LE(c.gathers, keep ? 6 : 2 * 6) << trace.to_string();
          EXPECT_GE(c.gathers, keep ? 6 : 6 + 3) << trace.to_string();
          EXPECT_EQ(c.reductions, 6) << trace.to_string();
          EXPECT_LE(c.bytes, 3 * 4 * (numel - numel / ranks) + 3 * 4 * 6 * kHidden * ranks);
          EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
          for (at::Tensor& p : model->parameters()) p.mutable_grad() = at::Tensor();
        }
        // Learned in the first step.
        EXPECT_GT(fully_shard_counters(mesh).prefetches, 0);
        EXPECT_EQ(fully_shard_counters(mesh).wrong_prefetches, 0);
      });
    }
  }
}

TEST(FullyShardTest, TwoUnitsAreInMemoryAtATime) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    const auto units = fully_shard(*model, mesh, {.units = {"blocks.*", "embed", "head"}});
    std::vector<int64_t> bytes;
    int64_t kept = 0;
    for (const FullyShardUnit& unit : units) {
      bytes.push_back(unit.numel * 4);
      kept += unit.kept * 4;
    }
    EXPECT_EQ(bytes_at_rest(*model), kept);
    std::sort(bytes.rbegin(), bytes.rend());
    for (int step = 0; step < 3; ++step) {
      const Batch b = fed(step, mesh);
      model->loss(b.tokens, b.targets).backward();
    }
    EXPECT_LE(fully_shard_counters(mesh).peak_gathered_bytes, bytes[0] + bytes[1]);
    EXPECT_GE(fully_shard_counters(mesh).peak_gathered_bytes, bytes[0]);
  });
}

// The parts of a unit are one row, of which each rank has about as much as the others.
TEST(FullyShardTest, RanksKeepAboutAsMuch) {
  for (const int64_t ranks : {2, 3, 4}) {
    on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
      Net model;
      for (const FullyShardUnit& unit : fully_shard(*model, mesh, {.units = {"blocks.*"}})) {
        // Cuts are between rows: at most half a row off, at both ends.
        EXPECT_NEAR(static_cast<double>(unit.kept), static_cast<double>(unit.numel) / ranks,
                    kHidden);
      }
      const at::Tensor first = to_local(model->embed->weight);
      EXPECT_TRUE(first.is_alias_of(to_local(model->head->bias)));
    });
  }
}

TEST(FullyShardTest, AnotherOrderIsServedRightAndCounted) {
  const std::vector<std::vector<int>> orders = {{0, 1, 2}, {0, 1, 2}, {2, 1, 0}, {2, 1, 0},
                                                {0, 1, 2}, {0, 2},    {1, 1, 1}, {0, 1, 2}};
  std::vector<Values> wanted;
  for (const auto& order : orders) {
    Net plain;
    const Batch b = batch(0);
    plain->loss(b.tokens, b.targets, order).backward();
    wanted.push_back(gradients_of(*plain));
  }
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    Net model;
    fully_shard(*model, mesh, {.units = {"blocks.*"}});
    for (size_t i = 0; i < orders.size(); ++i) {
      const Batch b = fed(0, mesh);
      model->loss(b.tokens, b.targets, orders[i]).backward();
      expect_close(gradients_of(*model), wanted[i]);
      EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
      for (at::Tensor& p : model->parameters()) p.mutable_grad() = at::Tensor();
    }
    EXPECT_GT(fully_shard_counters(mesh).wrong_prefetches, 0);
  });
}

// --- how programs use models ---------------------------------------------------------------------

using Program = std::function<void(NetImpl& model, const std::function<Batch(int)>& feed)>;

// The gradients after `program` are those of one device.
void expect_same(const Program& program, const FullyShardOptions& options = {.units = {"blocks.*"}},
                 bool tied = false) {
  Net plain(3, tied);
  program(*plain, batch);
  const Values wanted = gradients_of(*plain), values = values_of(*plain);
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"dp", 1}}, {{"dp", 2}}, {{"dp", 3}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Net model(3, tied);
      fully_shard(*model, mesh, options);
      program(*model, [&](int step) { return fed(step, mesh); });
      expect_close(gradients_of(*model), wanted);
      expect_close(values_of(*model), values);
      EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
    });
  }
}

TEST(FullyShardTest, GradientsAreAccumulated) {
  expect_same([](NetImpl& model, const std::function<Batch(int)>& feed) {
    for (int step = 0; step < 3; ++step) {
      const Batch b = feed(step);
      model.loss(b.tokens, b.targets).backward();
    }
  });
}

TEST(FullyShardTest, SeveralForwardsBeforeOneBackward) {
  expect_same([](NetImpl& model, const std::function<Batch(int)>& feed) {
    const Batch a = feed(0), b = feed(1);
    const at::Tensor first = model.loss(a.tokens, a.targets);
    const at::Tensor second = model.loss(b.tokens, b.targets);
    (first * second).backward();
  });
  expect_same([](NetImpl& model, const std::function<Batch(int)>& feed) {
    const Batch a = feed(0), b = feed(1);
    const at::Tensor first = model.loss(a.tokens, a.targets);
    const at::Tensor second = model.loss(b.tokens, b.targets);
    second.backward();
    first.backward();
  });
}

TEST(FullyShardTest, AGraphIsKept) {
  expect_same([](NetImpl& model, const std::function<Batch(int)>& feed) {
    const Batch b = feed(0);
    const at::Tensor loss = model.loss(b.tokens, b.targets);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  });
}

TEST(FullyShardTest, TiedFrozenAndUnusedParameters) {
  const Program once = [](NetImpl& model, const std::function<Batch(int)>& feed) {
    const Batch b = feed(0);
    model.loss(b.tokens, b.targets).backward();
  };
  expect_same(once, {.units = {"blocks.*"}}, /*tied=*/true);
  expect_same(once, {.units = {"blocks.*", "embed", "head"}}, /*tied=*/true);
  expect_same([](NetImpl& model, const std::function<Batch(int)>& feed) {
    model.block(1)->up->weight.requires_grad_(false);
    for (at::Tensor& p : model.block(0)->parameters()) p.requires_grad_(false);
    Batch b = feed(0);
    model.loss(b.tokens, b.targets).backward();
    model.block(1)->up->weight.requires_grad_(true);
    b = feed(1);
    model.loss(b.tokens, b.targets).backward();
  });
  expect_same([](NetImpl& model, const std::function<Batch(int)>& feed) {
    const Batch b = feed(0);
    model.loss(b.tokens, b.targets, {0, 2}).backward();
  });
}

// A parameter without a gradient has none to show, as on one device, while other graphs of its unit
// live, too.
TEST(FullyShardTest, HooksOfUnusedParametersAreNotCalled) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    fully_shard(*model, mesh);
    std::map<std::string, int> calls;
    for (const auto& item : model->named_parameters()) {
      item.value().register_hook([&calls, name = item.key()](const at::Tensor& grad) {
        EXPECT_TRUE(grad.defined()) << name;
        ++calls[name];
        return grad * 2;
      });
    }
    std::vector<at::Tensor> kept;
    const std::vector<std::vector<int>> orders = {{0, 2}, {0, 1, 2}, {0, 2}};
    for (size_t step = 0; step < orders.size(); ++step) {
      const Batch b = fed(static_cast<int>(step), mesh);
      kept.push_back(model->loss(b.tokens, b.targets, orders[step]));
      kept.back().backward();
    }
    for (const auto& item : model->named_parameters()) {
      EXPECT_EQ(calls[item.key()], item.key().starts_with("blocks.1.") ? 1 : 3) << item.key();
    }
  });
}

// Gradients from before are added to, whoever has computed them.
TEST(FullyShardTest, GradientsOfBefore) {
  const auto backward = [](NetImpl& model, const Batch& b) {
    model.loss(b.tokens, b.targets).backward();
  };
  Net plain;
  for (const int step : {0, 1}) backward(*plain, batch(step));
  const Values wanted = gradients_of(*plain);
  for (const std::vector<MeshDim>& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Net model;
      backward(*model, batch(0));
      if (has_dim(dims, "tp")) parallelize_module(*model, mesh, {.parameter = kTensorParallel});
      fully_shard(*model, mesh, {.mesh_dim = "dp", .units = {"blocks.*"}});
      backward(*model, fed(1, mesh));
      finish_grad_sync(*model);
      expect_close(gradients_of(*model), wanted);
    });
  }
}

TEST(FullyShardTest, CheckpointsAreGatheredAgain) {
  expect_same([](NetImpl& model, const std::function<Batch(int)>& feed) {
    for (int step = 0; step < 3; ++step) {
      const Batch b = feed(step);
      at::Tensor x = model.embed(b.tokens);
      for (int i = 0; i < 3; ++i) {
        x = checkpoint(
            [&model, i](const std::vector<at::Tensor>& in) {
              return std::vector<at::Tensor>{model.block(i)(in[0])};
            },
            {x})[0];
      }
      at::cross_entropy_loss(model.head(model.norm(x)).view({-1, kWords}), b.targets.view({-1}))
          .backward();
    }
  });
}

// A backward within a backward is not its end: what was gathered ahead stays.
TEST(FullyShardTest, CheckpointsKeepWhatWasGatheredAhead) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model(4);
    fully_shard(*model, mesh, {.units = {"blocks.*", "embed", "head"}});
    for (int step = 0; step < 4; ++step) {
      const int64_t before = fully_shard_counters(mesh).gathers;
      const Batch b = fed(step, mesh);
      at::Tensor x = model->embed(b.tokens);
      for (int i = 0; i < 4; i += 2) {
        x = checkpoint(
            [&model, i](const std::vector<at::Tensor>& in) {
              return std::vector<at::Tensor>{model->block(i + 1)(model->block(i)(in[0]))};
            },
            {x})[0];
      }
      at::cross_entropy_loss(model->head(model->norm(x)).view({-1, kWords}), b.targets.view({-1}))
          .backward();
      // Seven units; then the norm, and of each pair of blocks both and the first once more. The last
      // pair's second is still there when backward begins to run it again, and a forward without
      // gradients, as checkpoint()'s, has guesses of its own: none of them is wrong.
      if (step > 1) {
        EXPECT_EQ(fully_shard_counters(mesh).gathers - before, 7 + 2 * 3 - 1) << step;
      }
      EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0) << step;
    }
  });
}

TEST(FullyShardTest, GradientsOfGradients) {
  expect_same([](NetImpl& model, const std::function<Batch(int)>& feed) {
    const Batch b = feed(0);
    const at::Tensor loss = model.loss(b.tokens, b.targets);
    const std::vector<at::Tensor> inputs = {model.head->weight, model.block(1)->up->weight};
    const auto grads = torch::autograd::grad({loss}, inputs, {}, std::nullopt,
                                             /*create_graph=*/true);
    (grads[0].square().sum() + grads[1].square().sum()).backward();
  });
}

TEST(FullyShardTest, EvaluationGathersUnitsToo) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net plain;
    const Batch first = batch(0);
    const at::Tensor wanted = plain->logits(first.tokens).detach();
    Net model;
    fully_shard(*model, mesh, {.units = {"blocks.*"}});
    const Batch b = fed(0, mesh);
    const auto evaluate = [&] {
      const CommTrace trace(mesh);
      const at::Tensor logits = model->logits(b.tokens);
      EXPECT_LE(of_units(trace).gathers, 5);
      EXPECT_TRUE(at::allclose(full_tensor(logits), wanted, 1e-5, 1e-5));
      EXPECT_EQ(dispatch_counters(mesh).unsharded_weights, 0);
    };
    for (int i = 0; i < 3; ++i) {
      const c10::AutoGradMode no_grad(false);
      evaluate();
    }
    {
      const c10::InferenceMode inference;
      evaluate();
    }
    reshard(mesh);
    EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
    // What is written is gathered anew, also if the unit was still full.
    const c10::AutoGradMode no_grad(false);
    for (at::Tensor& p : model->parameters()) p.mul_(2);
    for (at::Tensor& p : plain->parameters()) p.mul_(2);
    EXPECT_TRUE(at::allclose(full_tensor(model->logits(b.tokens)), plain->logits(first.tokens),
                             1e-4, 1e-4));
    for (at::Tensor& p : model->parameters()) p.mul_(0.5);
    EXPECT_TRUE(at::allclose(full_tensor(model->logits(b.tokens)), wanted, 1e-5, 1e-5));
  });
}

TEST(FullyShardTest, FusedOptimizersAndGradSync) {
  const auto run = [](NetImpl& model, const std::function<Batch(int)>& feed) {
    std::unique_ptr<GradSync> sync;
    if (is_dtensor(model.head->weight)) sync = std::make_unique<GradSync>(model);
    FusedOptimizer optimizer(model.parameters(), AdamWOptions{.lr = 0.02});
    for (int step = 0; step < 4; ++step) {
      const Batch b = feed(step);
      model.loss(b.tokens, b.targets).backward();
      finish_grad_sync(model);
      clip_grad_norm(model.parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  Net plain;
  run(*plain, batch);
  const Values wanted = values_of(*plain);
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    Net model;
    fully_shard(*model, mesh, {.units = {"blocks.*"}});
    run(*model, [&](int step) { return fed(step, mesh); });
    expect_close(values_of(*model), wanted, 1e-3);
  });
}

TEST(FullyShardTest, TorchScript) {
  const auto make = [] {
    torch::jit::Module module("m");
    for (const auto& [name, sizes] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
             {"a", {kHidden, kDim}}, {"b", {kHidden}}, {"c", {kWords, kHidden}}}) {
      at::Tensor value =
          at::sin(at::arange(at::prod(at::tensor(sizes)).item<int64_t>(), at::kFloat)).view(sizes);
      module.register_parameter(name, value.requires_grad_(), /*is_buffer=*/false);
    }
    module.define(R"(
      def forward(self, x):
          h = torch.tanh(torch.linear(x, self.a, self.b))
          return torch.linear(h, self.c).square().mean()
    )");
    return module;
  };
  // The parameters of a file, as a module of LibTorch's that fully_shard() takes.
  struct Holder : nn::Module {
    explicit Holder(const torch::jit::Module& script) {
      for (const auto& p : script.named_parameters()) register_parameter(p.name, p.value);
    }
  };
  const auto input = [](int step) {
    return at::cos(at::arange(kBatch * kDim, at::kFloat).view({kBatch, kDim}) + step);
  };
  torch::jit::Module plain = make();
  const Holder plain_parameters(plain);
  for (int step = 0; step < 4; ++step) plain.forward({input(step)}).toTensor().backward();
  const Values wanted = gradients_of(plain_parameters);
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    torch::jit::Module script = make();
    Holder parameters(script);
    fully_shard(parameters, mesh);
    for (int step = 0; step < 4; ++step) {
      const at::Tensor x = distribute_tensor(input(step), mesh, {{"dp", Shard(0)}});
      script.forward({x}).toTensor().backward();
    }
    expect_close(gradients_of(parameters), wanted);
    EXPECT_EQ(dispatch_counters(mesh).unsharded_weights, 0);
  });
}

TEST(FullyShardTest, ModelsWithoutMemory) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const auto make = [] {
      nn::Sequential model(nn::Linear(kDim, kHidden), nn::Linear(kHidden, kWords));
      return model;
    };
    nn::Sequential model = deferred_init(make);
    fully_shard(*model, mesh, {.units = {"0"}});
    EXPECT_EQ(fully_shard_counters(mesh).gathers, 0);
    materialize(*model, {.seed = 7});
    // A part that is in somebody's hand stays the parameter's.
    const at::Tensor weight = model->parameters()[0], part = to_local(weight.detach());
    nn::Sequential whole = deferred_init(make);
    distribute_module(*whole, mesh, {});
    materialize(*whole, {.seed = 7});
    const at::Tensor x = distribute_tensor(at::ones({4, kDim}), mesh, {{"dp", Shard(0)}});
    const at::Tensor wanted = whole->forward(x), got = model->forward(x);
    EXPECT_TRUE(at::allclose(full_tensor(got), full_tensor(wanted)));
    EXPECT_TRUE(to_local(weight.detach()).is_alias_of(part));
    got.sum().backward();
    wanted.sum().backward();
    finish_grad_sync(*whole);
    expect_close(gradients_of(*model), [&] {
      Values values;
      for (const auto& item : whole->named_parameters()) {
        values[item.key()] = full_tensor(item.value().grad());
      }
      return values;
    }());
  });
}

// Whatever is full when it is written.
TEST(FullyShardTest, WritesAreSeenByTheNextForward) {
  for (const bool without_memory : {false, true}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      const auto make = [] {
        return nn::Sequential(nn::Linear(kDim, kHidden), nn::Linear(kHidden, kWords));
      };
      nn::Sequential model = deferred_init(make), whole = deferred_init(make);
      distribute_module(*whole, mesh, {});
      materialize(*whole, {.seed = 7});
      if (!without_memory) materialize(*model, {.seed = 7});
      fully_shard(*model, mesh, {.units = {"0"}, .reshard_after_forward = false});
      if (without_memory) materialize(*model, {.seed = 7});
      const at::Tensor x = distribute_tensor(at::ones({4, kDim}), mesh, {{"dp", Shard(0)}});
      const c10::AutoGradMode no_grad(false);
      for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(at::allclose(full_tensor(model->forward(x)), full_tensor(whole->forward(x))))
            << i;
        for (nn::Sequential& m : std::vector<nn::Sequential>{model, whole}) {
          manual_seed(mesh, 5);
          for (const at::Tensor& p : m->parameters()) i == 0 ? p.mul_(1.5) : p.uniform_(-1, 1);
        }
      }
    });
  }
}

// What is remembered of a weight, whole along another mesh dimension, ends with a write to anything
// of its unit.
TEST(FullyShardTest, AWriteEndsWhatIsRememberedOfAWeight) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    nn::Linear model(kDim, kHidden), plain(kDim, kHidden);
    initialize(*model);
    initialize(*plain);
    distribute_module(*model, mesh, {.parameter = {{"weight", {{"tp", Shard(0)}}}}});
    fully_shard(*model, mesh, {.mesh_dim = "dp"});
    const at::Tensor columns = at::sin(at::arange(64 * kDim, at::kFloat)).view({kDim, 64});
    const auto expect_alike = [&](int cut) {
      const at::Tensor x = distribute_tensor(columns, mesh, {{"dp", Shard(1)}, {"tp", Shard(cut)}});
      EXPECT_TRUE(at::allclose(full_tensor(at::mm(model->weight, x)),
                               at::mm(plain->weight, columns), 1e-4, 1e-4));
    };
    expect_alike(1);
    const int64_t before = dispatch_counters(mesh).remembered_uses;
    expect_alike(1);
    expect_alike(0);  // takes its columns of what is remembered
    EXPECT_EQ(dispatch_counters(mesh).remembered_uses, before + 2);
    for (const int cut : {0, 1, 0}) {
      {
        const c10::AutoGradMode no_grad(false);
        for (nn::Linear& m : std::vector<nn::Linear>{model, plain}) m->bias.mul_(2);
      }
      expect_alike(cut);
      expect_alike(1);
    }
  });
}

// A copy that requires grad is a leaf of its own.
TEST(FullyShardTest, CopiesOfHandlesHaveTheirOwnGradients) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    nn::Linear model(kDim, kHidden);
    initialize(*model);
    const at::Tensor wanted = model->weight.detach().clone().requires_grad_();
    const at::Tensor x = at::ones({4, kDim});
    at::linear(x, wanted).square().sum().backward();
    fully_shard(*model, mesh);
    for (const bool frozen : {false, true}) {
      model->weight.requires_grad_(!frozen);
      const at::Tensor copy = model->weight.detach().requires_grad_();
      at::linear(distribute_tensor(x, mesh, {{"dp", Shard(0)}}), copy).square().sum().backward();
      ASSERT_TRUE(copy.grad().defined());
      EXPECT_TRUE(at::allclose(full_tensor(copy.grad()), wanted.grad()));
      EXPECT_FALSE(model->weight.grad().defined());
    }
  });
}

// --- units ---------------------------------------------------------------------------------------

std::vector<std::string> names(const std::vector<FullyShardUnit>& units) {
  std::vector<std::string> names;
  for (const FullyShardUnit& unit : units) names.push_back(unit.module);
  return names;
}

TEST(FullyShardTest, UnitsByCallPatternTypeAndSize) {
  using ::testing::ElementsAre;
  using ::testing::UnorderedElementsAre;
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const auto units = [&](const FullyShardOptions& options) {
      Net model;
      return names(fully_shard(*model, mesh, options));
    };
    EXPECT_THAT(units({}), ElementsAre(""));
    // Not what is in them.
    EXPECT_THAT(units({.units = {"blocks.*"}}),
                UnorderedElementsAre("", "blocks.0", "blocks.1", "blocks.2"));
    EXPECT_THAT(units({.units = {"blocks.*", "blocks.1.up"}}),
                UnorderedElementsAre("", "blocks.0", "blocks.1", "blocks.1.up", "blocks.2"));
    EXPECT_THAT(units({.unit_types = {"Block"}}),
                UnorderedElementsAre("", "blocks.0", "blocks.1", "blocks.2"));
    EXPECT_THAT(units({.units = {"blocks.*", "embed"}, .min_numel = 60}),
                UnorderedElementsAre("", "blocks.0", "blocks.1", "blocks.2"));
    EXPECT_THAT(units({.min_numel = 60}),
                UnorderedElementsAre("", "blocks.0", "blocks.1", "blocks.2", "head"));
    Net model;
    for (int i = 0; i < 3; ++i)
      EXPECT_THAT(names(fully_shard(*model->block(i), mesh)), ElementsAre(""));
    const auto rest = fully_shard(*model, mesh);
    EXPECT_THAT(names(rest), ElementsAre(""));
    EXPECT_THAT(rest[0].parameters, UnorderedElementsAre("embed.weight", "norm.weight", "norm.bias",
                                                         "head.weight", "head.bias"));
    const Batch b = fed(0, mesh);
    model->loss(b.tokens, b.targets).backward();
    Net plain;
    plain->loss(batch(0).tokens, batch(0).targets).backward();
    expect_close(gradients_of(*model), gradients_of(*plain));
  });
}

// --- bad input -----------------------------------------------------------------------------------

void expect_error(const std::vector<MeshDim>& dims, const std::function<void(const MeshPtr&)>& body,
                  absl::StatusCode code, const std::string& text) {
  const absl::Status status = try_on_mesh(dims, body);
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

TEST(FullyShardTest, BadInput) {
  const std::vector<MeshDim> two = {{"dp", 2}};
  using enum absl::StatusCode;
  expect_error(
      {{"dp", 4}},
      [](const MeshPtr& mesh) {
        nn::Linear tiny(nn::LinearOptions(3, 1).bias(false));
        try {
          fully_shard(*tiny, mesh);
        } catch (...) {
          EXPECT_FALSE(is_dtensor(tiny->weight));
          throw;
        }
      },
      kInvalidArgument, "the unit '(rest)' has 3 elements for the 4 ranks along 'dp'");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        fully_shard(*model, mesh);
        fully_shard(*model->block(0), mesh);
      },
      kFailedPrecondition,
      "'down.bias' is in the unit '(rest)'; modules that are units within others come first");
  expect_error(
      {{"dp", 2}, {"more", 1}},
      [](const MeshPtr& mesh) {
        Net model;
        fully_shard(*model->block(0), mesh, {.mesh_dim = "dp"});
        fully_shard(*model, mesh, {.mesh_dim = "more"});
      },
      kInvalidArgument, "is in a unit of another mesh or mesh dimension already");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        fully_shard(*model, mesh);
        parallelize_module(*model, mesh, {});
      },
      kFailedPrecondition, "plans come first");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        distribute_module(*model, mesh, {{"head.weight", {{"dp", Shard(0)}}}});
        fully_shard(*model, mesh);
      },
      kInvalidArgument, "'head.weight': lies [S(0)]: wanted whole along 'dp'");
  expect_error(
      two, [](const MeshPtr& mesh) { fully_shard(*Net(), mesh, {.mesh_dim = "tp"}); }, kNotFound,
      "tp");
  expect_error(
      two, [](const MeshPtr& mesh) { fully_shard(*Net(), mesh, {.units = {"layers.*"}}); },
      kNotFound, "the pattern of units 'layers.*' matches no submodule");
  expect_error(
      two, [](const MeshPtr& mesh) { fully_shard(*Net(), mesh, {.unit_types = {"Layer"}}); },
      kNotFound, "the type of units 'Layer' matches no submodule");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        fully_shard(*Net(), mesh, {.reshard_after_forward = mesh->coordinate()[0] == 0});
      },
      kInvalidArgument,
      "what the options say is not the same on ranks 0 and 1; here it is reshard_after_forward ");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        model->norm->bias.set_requires_grad(mesh->coordinate()[0] == 0);
        fully_shard(*model, mesh, {.units = {"blocks.*"}});
      },
      kInvalidArgument, "the unit '(rest)' is not the same on ranks 0 and 1");
  expect_error(
      two, [](const MeshPtr& mesh) { fully_shard(*Net(), mesh, {.units = {"block.0"}}); },
      kNotFound, "did you mean 'blocks.0'");
  expect_error(
      two, [](const MeshPtr& mesh) { fully_shard(*Net(), mesh, {.unit_types = {"Blok"}}); },
      kNotFound, "BlockImpl");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        fully_shard(*Net(), mesh, {.distribute = {.source = mesh->coordinate()[0]}});
      },
      kInvalidArgument, "is not the same on ranks 0 and 1");
}

// Two modules, of which the second cannot be cut: nothing is.
struct UnevenImpl : nn::Module {
  UnevenImpl() {
    first = register_module("first", nn::Linear(kDim, kHidden));
    second = register_module("second", nn::Linear(kDim, kHidden));
    initialize(*this);
  }
  nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Uneven);

TEST(FullyShardTest, WhatIsRefusedIsRefusedBeforeAnythingChanges) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    Uneven model;
    distribute_module(*model, mesh, {{"second.weight", {{"tp", RaggedShard(0, {3, 4})}}}});
    model->register_buffer("plain", at::ones({3}));
    const Values before = values_of(*model);
    const Layout whole = layout_of(model->first->weight);
    try {
      fully_shard(*model, mesh, {.mesh_dim = "dp", .units = {"first", "second"}});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("'second.weight'"));
    }
    EXPECT_EQ(layout_of(model->first->weight), whole);
    EXPECT_FALSE(is_dtensor(model->named_buffers()["plain"]));
    expect_close(values_of(*model), before, 0);
  });
  // One rank alone has something against it: all hear of it, and the mesh is as it was.
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    if (mesh->coordinate()[0] == 0) {
      model->register_buffer("sparse", at::ones({3}).to_sparse());
    } else {
      model->register_buffer("sparse", at::ones({3}));
    }
    try {
      fully_shard(*model, mesh, {.units = {"blocks.*"}});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
    }
    EXPECT_FALSE(is_dtensor(model->head->weight));
    EXPECT_EQ(full_tensor(ones({7, 5}, mesh, {Shard(0)})).sum().item<float>(), 35);
  });
}

TEST(FullyShardTest, WhatMovesAParameterIsAnError) {
  const std::vector<MeshDim> two = {{"dp", 2}};
  using enum absl::StatusCode;
  const auto sharded = [&](const std::function<void(NetImpl&, const MeshPtr&)>& body) {
    return [body](const MeshPtr& mesh) {
      Net model;
      fully_shard(*model, mesh, {.units = {"blocks.*"}});
      body(*model, mesh);
    };
  };
  expect_error(two, sharded([](NetImpl& m, const MeshPtr&) { m.to(at::kDouble); }),
               kFailedPrecondition, "its data would be replaced");
  expect_error(two, sharded([](NetImpl& m, const MeshPtr&) {
                 const c10::AutoGradMode no_grad(false);
                 m.head->weight.resize_({2, 2});
               }),
               kFailedPrecondition, "'head.weight' rests in its unit's memory");
  expect_error(two, sharded([](NetImpl& m, const MeshPtr&) {
                 const c10::AutoGradMode no_grad(false);
                 m.head->weight.t().mul_(2);
               }),
               kFailedPrecondition, "write to the parameter itself");
  // Where nothing moves it is none.
  on_mesh(two, sharded([](NetImpl& m, const MeshPtr& mesh) {
            m.to(at::kCPU);
            m.to(at::kFloat);
            const Batch b = fed(0, mesh);
            m.loss(b.tokens, b.targets).backward();
            EXPECT_EQ(layout_of(m.head->weight.grad()), layout_of(m.head->weight));
            EXPECT_TRUE(layout_of(m.head->weight)[0].is_shard());
          }));
  // Backward would see other values than forward.
  const absl::Status status = try_on_mesh(two, sharded([](NetImpl& m, const MeshPtr& mesh) {
                                            const Batch b = fed(0, mesh);
                                            const at::Tensor loss = m.loss(b.tokens, b.targets);
                                            {
                                              const c10::AutoGradMode no_grad(false);
                                              m.head->weight.mul_(2);
                                            }
                                            EXPECT_THROW(loss.backward(), c10::Error);
                                          }));
  EXPECT_TRUE(status.ok()) << status;
}

TEST(FullyShardTest, RanksThatGoApartHearOfIt) {
  const absl::Status status = try_on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    fully_shard(*model, mesh, {.units = {"blocks.*"}});
    const Batch b = fed(0, mesh);
    const bool first = mesh->coordinate()[0] == 0;
    model->loss(b.tokens, b.targets, first ? std::vector<int>{0, 1} : std::vector<int>{1, 0})
        .backward();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  for (const char* unit : {"'fully_shard blocks.0'", "'fully_shard blocks.1'"}) {
    EXPECT_THAT(status.message(), HasSubstr(unit));
  }
}

// A rank without its share of micro-batches, or without the scope that the others are in.
TEST(FullyShardTest, RanksWithOtherMicroBatchesHearWhichUnit) {
  const auto stranger = [](const MeshPtr& mesh) { return mesh->coordinate()[0] == 1; };
  const auto skips = [&](const MeshPtr& mesh, Net& model) {
    const Batch b = fed(0, mesh);
    for (int i = 0; i < (stranger(mesh) ? 1 : 2); ++i) {
      model->loss(b.tokens, b.targets, {0, 1}).backward();
    }
    clip_grad_norm(model->parameters(), 1);
  };
  const auto forgets_the_scope = [&](const MeshPtr& mesh, Net& model) {
    std::optional<FullyShardNoSync> scope;
    if (!stranger(mesh)) scope.emplace(mesh);
    const Batch b = fed(0, mesh);
    model->loss(b.tokens, b.targets, {0, 1}).backward();
    scope.reset();
    model->loss(b.tokens, b.targets, {0, 1}).backward();
  };
  for (const std::function<void(const MeshPtr&, Net&)>& body :
       {std::function<void(const MeshPtr&, Net&)>(skips), {forgets_the_scope}}) {
    const absl::Status status = try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      Net model;
      fully_shard(*model, mesh, {.units = {"blocks.*"}});
      body(mesh, model);
    });
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(status.message(), HasSubstr("'fully_shard")) << status;
  }
}

// --- mixed precision -----------------------------------------------------------------------------

using Dtype = std::optional<at::ScalarType>;

struct Casts {
  at::ScalarType rest;  // of the parameters
  Dtype param, reduce, output;
  at::ScalarType used() const { return param.value_or(rest); }
  at::ScalarType reduced() const { return reduce.value_or(used()); }
};
const std::vector<Casts> kCasts = {
    {at::kDouble, at::kFloat, at::kDouble, {}}, {at::kDouble, at::kFloat, {}, at::kDouble},
    {at::kDouble, {}, at::kFloat, {}},          {at::kFloat, at::kBFloat16, at::kFloat, at::kFloat},
    {at::kFloat, at::kBFloat16, {}, {}},        {at::kFloat, at::kHalf, at::kFloat, {}},
};

FullyShardOptions mixed(const Casts& casts) {
  return {.mesh_dim = "dp",
          .units = {"blocks.*"},
          .param_dtype = casts.param,
          .reduce_dtype = casts.reduce,
          .output_dtype = casts.output};
}

// One device that casts where units do: torch::nn's linear is a product, and then a sum in place.
at::Tensor logits_with_casts(NetImpl& m, const at::Tensor& tokens, const std::vector<int>& order,
                             const Casts& casts) {
  std::map<const c10::TensorImpl*, at::Tensor> used;  // once, as tied ones are
  const auto in = [&](const at::Tensor& t) { return t.to(casts.used()); };
  const auto weight = [&](const at::Tensor& t) {
    at::Tensor& its = used[t.unsafeGetTensorImpl()];
    if (!its.defined()) its = in(t);
    return its;
  };
  const auto out = [&](const at::Tensor& t) { return casts.output ? t.to(*casts.output) : t; };
  const auto norm = [&](nn::LayerNorm& its, const at::Tensor& x) {
    return out(at::layer_norm(in(x), {kDim}, weight(its->weight), weight(its->bias)));
  };
  const auto linear = [&](const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias) {
    return out(at::matmul(in(x), weight(w).t())) + weight(bias);
  };
  at::Tensor x = out(at::embedding(weight(m.embed->weight), tokens));
  for (const int i : order) {
    Block block = m.block(i);
    const at::Tensor h = linear(norm(block->norm, x), block->up->weight, block->up->bias);
    x = x + linear(at::gelu(h), block->down->weight, block->down->bias);
  }
  return linear(norm(m.norm, x), m.head->weight, m.head->bias);
}

// Rows of a batch, and what each of their logits counts for: the sum of a loss over ranks is then
// the loss of all rows, to the last bit of every gradient.
struct Rows {
  at::Tensor tokens, counts;
};
Rows rows(int step, int64_t count = kBatch) {
  return {batch(step).tokens.slice(0, 0, count),
          at::sin(at::arange(count * kLength * kWords, at::kDouble) * 0.3 + step)
              .view({count, kLength, kWords})};
}
at::Tensor loss_of(const at::Tensor& logits, const Rows& r) {
  return (logits.to(at::kDouble) * r.counts).sum();
}

struct Variant {
  std::string name;
  bool tied = false;
  std::vector<int> order = {0, 1, 2};
  bool frozen = false;
  bool checkpointed = false;
  bool accumulates = false;
};
const std::vector<Variant> kVariants = {
    {.name = "plain"},
    {.name = "tied", .tied = true},
    {.name = "unused", .order = {0, 2}},
    {.name = "frozen", .frozen = true},
    {.name = "checkpointed", .checkpointed = true},
    {.name = "accumulated", .accumulates = true},
};
void prepare(NetImpl& model, const Casts& casts, const Variant& variant) {
  model.to(casts.rest);
  if (variant.frozen) {
    model.block(1)->up->weight.requires_grad_(false);
    for (at::Tensor& p : model.block(2)->parameters()) p.requires_grad_(false);
  }
}

// What each rank of each group feeds: rows, cut as Shard(0) does.
std::vector<at::Tensor> pieces(const at::Tensor& tensor, int64_t count) {
  std::vector<at::Tensor> pieces = tensor.chunk(count);
  while (static_cast<int64_t>(pieces.size()) < count) pieces.push_back(tensor.slice(0, 0, 0));
  return pieces;
}

// The gradients of a backward: of each rank's rows on one device, summed as units sum them, over the
// ranks of a group and then over groups.
Values summed_gradients(NetImpl& model, const Rows& all, int64_t groups, int64_t ranks,
                        const Casts& casts, const Variant& variant) {
  Values total;
  const auto add = [](Values& sum, const std::string& name, const at::Tensor& value) {
    at::Tensor& its = sum[name];
    its = its.defined() ? its + value : value;
  };
  for (int64_t g = 0; g < groups; ++g) {
    Values of_group;
    for (int64_t r = 0; r < ranks; ++r) {
      const auto piece = [&](const at::Tensor& t) {
        return pieces(pieces(t, groups)[static_cast<size_t>(g)], ranks)[static_cast<size_t>(r)];
      };
      const Rows mine = {piece(all.tokens), piece(all.counts)};
      loss_of(logits_with_casts(model, mine.tokens, variant.order, casts), mine).backward();
      for (const auto& [name, grad] : gradients_of(model)) {
        add(of_group, name, grad.to(casts.reduced()));
      }
      for (at::Tensor& p : model.parameters()) p.mutable_grad() = at::Tensor();
    }
    for (const auto& [name, grad] : of_group) add(total, name, grad);
  }
  for (auto& [name, grad] : total) grad = grad.to(casts.rest);
  return total;
}

void expect_equal(const Values& got, const Values& wanted, const std::string& where) {
  EXPECT_EQ(got.size(), wanted.size());
  for (const auto& [name, value] : wanted) {
    const auto it = got.find(name);
    if (it == got.end()) {
      ADD_FAILURE() << name << " is not there";
      continue;
    }
    EXPECT_EQ(it->second.scalar_type(), value.scalar_type()) << name;
    EXPECT_TRUE(at::equal(it->second, value)) << where << ": " << name << " is off by at most "
                                              << (it->second - value).abs().max().item<double>();
  }
}

constexpr int kMixedSteps = 2;

// To the last bit, for steps of AdamW, too: rows are computed alone, so that nothing depends on the
// ranks but in which order gradients are summed; of two summands, and in a wider dtype, not even that.
TEST(FullyShardTest, MixedPrecisionIsThatOfOneDevice) {
  const std::vector<std::vector<MeshDim>> meshes = {
      {{"dp", 1}}, {{"dp", 2}}, {{"dp", 3}}, {{"replicas", 2}, {"dp", 2}}};
  for (size_t c = 0; c < kCasts.size(); ++c) {
    const Casts& casts = kCasts[c];
    for (const Variant& variant : kVariants) {
      for (const auto& dims : meshes) {
        const std::string where = absl::StrCat("case ", c, ", ", variant.name, ", ", dims.size(),
                                               " dims, the last ", dims.back().size);
        const int64_t groups = dims.size() == 2 ? dims[0].size : 1, ranks = dims.back().size;
        const bool is_wider = c10::elementSize(casts.reduced()) > c10::elementSize(casts.used());
        if (ranks > 2 && !is_wider) continue;
        if (c % 3 != 0 && variant.name != "plain") continue;  // the others are as these
        const int backwards = variant.accumulates ? 3 : 1;
        // Rows that two mesh dimensions cut unevenly move before they are flattened.
        const int64_t count = groups > 1 ? groups * ranks : kBatch;
        on_mesh(dims, [&](const MeshPtr& mesh) {
          // Here: kernels sum as many parts as their thread may use others.
          Net plain(3, variant.tied);
          prepare(*plain, casts, variant);
          std::vector<Values> wanted_gradients, wanted_values;
          torch::optim::AdamW alone(unique_parameters(*plain), torch::optim::AdamWOptions(0.02));
          for (int step = 0; step < kMixedSteps; ++step) {
            Values total;
            for (int b = 0; b < backwards; ++b) {
              for (const auto& [name, grad] : summed_gradients(
                       *plain, rows(step * backwards + b, count), groups, ranks, casts, variant)) {
                at::Tensor& its = total[name];
                its = its.defined() ? its + grad : grad;
              }
            }
            for (const auto& item : plain->named_parameters()) {
              const auto it = total.find(item.key());
              if (it != total.end()) item.value().mutable_grad() = it->second.clone();
            }
            wanted_gradients.push_back(gradients_of(*plain));
            alone.step();
            alone.zero_grad();
            wanted_values.push_back(values_of(*plain));
          }
          Net model(3, variant.tied);
          prepare(*model, casts, variant);
          fully_shard(*model, mesh, mixed(casts));
          torch::optim::AdamW optimizer(unique_parameters(*model),
                                        torch::optim::AdamWOptions(0.02));
          const auto cut = [&](const at::Tensor& t) {
            return distribute_tensor(t, mesh, Placements(dims.size(), Shard(0)));
          };
          for (int step = 0; step < kMixedSteps; ++step) {
            for (int b = 0; b < backwards; ++b) {
              const Rows all = rows(step * backwards + b, count);
              const Rows r = {cut(all.tokens), cut(all.counts)};
              const CommTrace trace(mesh);
              at::Tensor logits;
              if (variant.checkpointed) {
                at::Tensor x = model->embed(r.tokens);
                for (const int i : variant.order) {
                  x = checkpoint(
                      [&model, i](const std::vector<at::Tensor>& in) {
                        return std::vector<at::Tensor>{model->block(i)(in[0])};
                      },
                      {x})[0];
                }
                logits = model->head(model->norm(x));
              } else {
                logits = model->logits(r.tokens, variant.order);
              }
              loss_of(logits, r).backward();
              for (const CommEvent& event : trace.events()) {
                if (!is_of_units(event)) continue;
                const bool gathers = event.collective == "all_gather";
                EXPECT_EQ(event.dtype, gathers ? casts.used() : casts.reduced())
                    << event.collective;
              }
            }
            expect_equal(gradients_of(*model), wanted_gradients[static_cast<size_t>(step)], where);
            optimizer.step();
            optimizer.zero_grad();
            expect_equal(values_of(*model), wanted_values[static_cast<size_t>(step)], where);
          }
          EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
        });
      }
    }
  }
}

double furthest(const Values& got, const Values& wanted) {
  double far = 0;
  for (const auto& [name, value] : wanted) {
    far = std::max(far, (got.at(name).to(at::kDouble) - value).abs().max().item<double>());
  }
  return far;
}

// Tensor parallelism sums in other places, each with a rounding of its own. The measure is how far
// one device that casts is from one that has doubles everywhere: where it rounds once, k ranks round
// k summands and k - 1 sums.
TEST(FullyShardTest, MixedPrecisionOverTensorParallelIsAsExactAsOneDevice) {
  const Variant variant;
  for (const Casts& casts : kCasts) {
    Net exact, rounded;
    const Casts none = {at::kDouble, {}, {}, {}};
    prepare(*exact, none, variant);
    prepare(*rounded, casts, variant);
    const Values wanted = summed_gradients(*exact, rows(0), 1, 1, none, variant);
    const double off = furthest(summed_gradients(*rounded, rows(0), 1, 1, casts, variant), wanted);
    ASSERT_GT(off, 0);
    for (const auto& dims : std::vector<std::vector<MeshDim>>{
             {{"dp", 2}, {"tp", 2}}, {{"dp", 3}, {"tp", 2}}, {{"pp", 1}, {"dp", 2}, {"tp", 2}}}) {
      on_mesh(dims, [&](const MeshPtr& mesh) {
        Net model;
        prepare(*model, casts, variant);
        parallelize_module(*model, mesh, {.parameter = kTensorParallel});
        fully_shard(*model, mesh, mixed(casts));
        const Rows all = rows(0);
        const Rows r = {distribute_tensor(all.tokens, mesh, {{"dp", Shard(0)}}),
                        distribute_tensor(all.counts, mesh, {{"dp", Shard(0)}})};
        const CommTrace trace(mesh);
        loss_of(model->logits(r.tokens), r).backward();
        for (const CommEvent& event : trace.events()) {
          if (!is_of_units(event)) continue;
          const bool gathers = event.collective == "all_gather";
          EXPECT_EQ(event.dtype, gathers ? casts.used() : casts.reduced()) << event.collective;
        }
        const auto k = static_cast<double>(mesh->mesh().size());
        EXPECT_LE(furthest(gradients_of(*model), wanted), (2 * k - 1) * off) << dims.size();
      });
    }
  }
}

TEST(FullyShardTest, MixedPrecisionSendsAndGathersHalfTheBytes) {
  struct Sent {
    int64_t gathers = 0, gathered = 0, sums = 0, summed = 0, peak = 0;
    int64_t two_units = 0;  // the largest, in bytes as they rest
  };
  const auto run = [](const std::vector<MeshDim>& dims, Dtype param, Dtype reduce) {
    Sent sent;
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Net model;
      if (has_dim(dims, "tp")) parallelize_module(*model, mesh, {.parameter = kTensorParallel});
      std::map<std::string, int64_t> units;
      for (const auto& p : model->named_parameters()) {
        const at::Tensor& t = p.value();
        const std::string& name = p.key();
        const bool is_of_block = name.starts_with("blocks.");
        units[is_of_block ? name.substr(0, name.find('.', 7)) : ""] +=
            (is_dtensor(t) ? to_local(t) : t).numel() * 4;
      }
      std::vector<int64_t> sizes;
      for (const auto& [name, bytes] : units) sizes.push_back(bytes);
      std::sort(sizes.rbegin(), sizes.rend());
      fully_shard(
          *model, mesh,
          {.mesh_dim = "dp", .units = {"blocks.*"}, .param_dtype = param, .reduce_dtype = reduce});
      Batch b = fed(0, mesh);
      if (has_dim(dims, "replicas")) {
        // Evenly: a view of rows that are cut unevenly along both gathers them along one, and then
        // gradients are whole along that.
        const NamedPlacements rows = {{"replicas", Shard(0)}, {"dp", Shard(0)}};
        const Batch all = batch(0);
        b.tokens = distribute_tensor(all.tokens.slice(0, 0, 4), mesh, rows);
        b.targets = distribute_tensor(all.targets.slice(0, 0, 4), mesh, rows);
      }
      const CommTrace trace(mesh);
      model->loss(b.tokens, b.targets).backward();
      EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
      const auto at = mesh->coordinate();
      if (std::any_of(at.begin(), at.end(), [](int64_t c) { return c != 0; })) return;
      for (const CommEvent& event : trace.events()) {
        if (!is_of_units(event)) continue;
        const bool gathers = event.collective == "all_gather";
        ++(gathers ? sent.gathers : sent.sums);
        (gathers ? sent.gathered : sent.summed) += event.bytes;
      }
      sent.peak = fully_shard_counters(mesh).peak_gathered_bytes;
      sent.two_units = sizes[0] + sizes[1];
    });
    return sent;
  };
  for (const auto& dims : std::vector<std::vector<MeshDim>>{
           {{"dp", 2}}, {{"dp", 3}}, {{"dp", 2}, {"tp", 2}}, {{"replicas", 2}, {"dp", 2}}}) {
    SCOPED_TRACE(::testing::Message() << dims.size() << " dims, the last " << dims.back().size);
    const Sent whole = run(dims, {}, {}), half = run(dims, at::kBFloat16, {}),
               wide = run(dims, at::kBFloat16, at::kFloat);
    EXPECT_GT(whole.gathers, 0);
    for (const Sent& s : {half, wide}) {
      EXPECT_EQ(s.gathers, whole.gathers);
      EXPECT_EQ(s.sums, whole.sums);
      EXPECT_EQ(2 * s.gathered, whole.gathered);
    }
    EXPECT_EQ(2 * half.summed, whole.summed);
    EXPECT_EQ(wide.summed, whole.summed);
    // The one that computes and the one whose gradients travel, until they have left: that depends on
    // how the ranks wait for each other. Gradients that are wider come in place of the parameters, not
    // beside them.
    EXPECT_LE(whole.peak, whole.two_units);
    EXPECT_LE(2 * half.peak, whole.two_units);
    EXPECT_LE(wide.peak, whole.two_units);
  }
  // One rank gathers nothing, and has a copy of what it uses.
  const Sent alone = run({{"dp", 1}}, at::kBFloat16, at::kFloat);
  EXPECT_EQ(alone.gathers + alone.sums, 0);
  EXPECT_GT(alone.peak, 0);
  EXPECT_LE(alone.peak, run({{"dp", 2}}, at::kBFloat16, {}).peak);
  EXPECT_EQ(run({{"dp", 1}}, {}, {}).peak, 0);
  // Of one unit it is either the parameters or the gradients.
  for (const bool is_wide : {false, true}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      nn::Linear model(kDim, kHidden);
      fully_shard(
          *model, mesh,
          {.param_dtype = at::kBFloat16, .reduce_dtype = is_wide ? at::kFloat : at::kBFloat16});
      const at::Tensor x = distribute_tensor(at::ones({4, kDim}), mesh, {{"dp", Shard(0)}});
      model->forward(x).square().sum().backward();
      EXPECT_EQ(fully_shard_counters(mesh).peak_gathered_bytes,
                (kDim + 1) * kHidden * (is_wide ? 4 : 2));
    });
  }
}

// An average of weights is of what rests, in 32 bits, whoever keeps it: a buffer of the module, or another
// module, whole or sharded.
TEST(FullyShardTest, MixedPrecisionDoesNotRoundAverages) {
  struct KeeperImpl : nn::Module {
    KeeperImpl() {
      layer = register_module("layer", nn::Linear(kDim, kHidden));
      shadow = register_buffer("shadow", at::zeros({kHidden, kDim}));
    }
    nn::Linear layer{nullptr};
    at::Tensor shadow;
  };
  const at::Tensor whole = [] {
    nn::Linear plain(kDim, kHidden);
    initialize(*plain);
    return plain->weight.detach().clone();
  }();
  ASSERT_FALSE(at::equal(whole.to(at::kBFloat16).to(at::kFloat), whole));
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"dp", 2}}, {{"dp", 3}}, {{"dp", 2}, {"replicas", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      KeeperImpl keeper;
      nn::Linear teacher(kDim, kHidden);
      for (nn::Linear layer : {keeper.layer, teacher}) initialize(*layer);
      fully_shard(keeper, mesh, {.mesh_dim = "dp", .param_dtype = at::kBFloat16});
      distribute_module(*teacher, mesh, {});
      const at::Tensor& p = keeper.layer->weight;
      const c10::AutoGradMode no_grad(false);
      const auto expect = [&](const at::Tensor& got, const at::Tensor& wanted) {
        EXPECT_EQ(got.scalar_type(), at::kFloat);
        EXPECT_TRUE(at::equal(full_tensor(got), wanted)) << full_tensor(got) << wanted;
      };
      keeper.shadow.copy_(p);
      expect(keeper.shadow, whole);
      keeper.shadow.add_(p, 0.5);
      expect(keeper.shadow, whole.add(whole, 0.5));
      keeper.shadow.lerp_(p, 0.1);
      expect(keeper.shadow, whole.add(whole, 0.5).lerp_(whole, 0.1));
      teacher->weight.mul_(0.9).add_(p, 0.1);
      expect(teacher->weight, whole.mul(0.9).add_(whole, 0.1));
      // What is no member sees what is used.
      const at::Tensor x = distribute_tensor(at::ones({4, kDim}), mesh, Placements(dims.size()));
      EXPECT_EQ(at::linear(x, p).scalar_type(), at::kBFloat16);
    });
  }
}

TEST(FullyShardTest, MixedPrecisionOfOtherUses) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    nn::Linear model(kDim, kHidden);
    initialize(*model);
    fully_shard(
        *model, mesh,
        {.param_dtype = at::kBFloat16, .reduce_dtype = at::kDouble, .output_dtype = at::kFloat});
    const at::Tensor& w = model->weight;
    // As they rest: what optimizers and initialisers see.
    EXPECT_EQ(full_tensor(w.detach()).scalar_type(), at::kFloat);
    {
      const c10::AutoGradMode no_grad(false);
      EXPECT_EQ(w.norm().scalar_type(), at::kFloat);
      w.mul_(2);
    }
    // As it is used, whole or through views.
    EXPECT_EQ((w * 1).scalar_type(), at::kBFloat16);
    EXPECT_EQ(w.t().scalar_type(), at::kBFloat16);
    const at::Tensor x = distribute_tensor(at::ones({4, kDim}), mesh, {{"dp", Shard(0)}});
    for (const at::Tensor& y :
         {at::linear(x, w), at::matmul(x, w.t()), at::mm(x, w.view({kHidden, kDim}).t()),
          at::addmm(model->bias, x, w.t()), model->forward(x)}) {
      EXPECT_EQ(y.scalar_type(), at::kFloat);
    }
    EXPECT_EQ(x.scalar_type(), at::kFloat);  // that which was given stays
    EXPECT_EQ((x * 2).scalar_type(), at::kFloat);
    // A gradient of gradients.
    const at::Tensor squares = at::linear(x, w).square().sum();
    const CommTrace trace(mesh);
    const auto grads = torch::autograd::grad({squares}, {w}, {}, std::nullopt,
                                             /*create_graph=*/true);
    int sums = 0;
    for (const CommEvent& event : trace.events()) {
      if (event.collective == "all_gather") continue;
      ++sums;
      EXPECT_EQ(event.dtype, at::kDouble) << event.collective;
    }
    EXPECT_EQ(sums, 1) << trace.to_string();
    EXPECT_EQ(grads[0].scalar_type(), at::kFloat);
    grads[0].square().sum().backward();
    EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
    EXPECT_EQ(layout_of(w.grad()), layout_of(w));
  });
  // A gradient that is whole on every rank, and one that lies as the parameter: nothing is summed,
  // and the number of ranks is not seen in it.
  for (const int64_t ranks : {1, 2}) {
    on_mesh({{"dp", ranks}}, [](const MeshPtr& mesh) {
      nn::Linear model(kDim, kHidden);
      initialize(*model);
      const at::Tensor x = at::sin(at::arange(3 * kDim, at::kFloat)).view({3, kDim});
      const at::Tensor wanted = at::ones({kHidden, 3}).mm(x).to(at::kBFloat16).to(at::kFloat);
      fully_shard(*model, mesh, {.reduce_dtype = at::kBFloat16});
      model->forward(distribute_tensor(x, mesh, Placements(1))).sum().backward();
      EXPECT_TRUE(at::equal(full_tensor(model->weight.grad()), wanted));
    });
  }
}

// What a forward asks for in the dtype that rests is computed in it, of the numbers that operators see.
TEST(FullyShardTest, MixedPrecisionGivesWhatIsAskedFor) {
  const at::Tensor x = at::sin(at::arange(4 * kDim, at::kFloat)).view({4, kDim});
  nn::Linear plain(kDim, kHidden);
  initialize(*plain);
  const at::Tensor seen = plain->weight.detach().to(at::kBFloat16).to(at::kFloat);
  const at::Tensor wanted = at::linear(x, seen);
  ASSERT_FALSE(at::allclose(wanted, wanted.to(at::kBFloat16).to(at::kFloat), 1e-5, 1e-5));
  for (const int64_t ranks : {1, 2, 3}) {
    on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
      nn::Linear model(kDim, kHidden);
      initialize(*model);
      fully_shard(*model, mesh, {.param_dtype = at::kBFloat16});
      const at::Tensor& w = model->weight;
      const auto scores = [&](const at::Tensor& in) {
        return at::linear(in.to(at::kFloat), w.to(at::kFloat));
      };
      const at::Tensor in = distribute_tensor(x, mesh, {{"dp", Shard(0)}}).requires_grad_();
      for (const bool again : {false, true}) {
        const at::Tensor got = again ? checkpoint(scores, in) : scores(in);
        EXPECT_EQ(got.scalar_type(), at::kFloat);
        EXPECT_TRUE(at::allclose(full_tensor(got.detach()), wanted, 1e-6, 1e-6));
        got.sum().backward();
        const at::Tensor grad = full_tensor(w.grad());
        EXPECT_TRUE(at::allclose(grad, at::ones({kHidden, 4}).mm(x), 1e-2, 1e-2)) << grad;
        w.mutable_grad() = at::Tensor();
      }
      // module->to() leaves all as it is.
      const c10::AutoGradMode no_grad(false);
      model->to(at::kFloat);
      EXPECT_TRUE(at::equal(full_tensor(w.detach()), plain->weight.detach()));
    });
  }
}

// checkpoint() runs a function twice, and both runs are of one function.
TEST(FullyShardTest, MixedPrecisionUnderCheckpoints) {
  struct GainImpl : nn::Module {
    GainImpl() { gain = register_parameter("gain", at::arange(kDim, at::kFloat) / 37); }
    at::Tensor forward(const at::Tensor& x) { return x * (1 + gain); }
    at::Tensor gain;
  };
  for (const bool outer : {false, true}) {  // one within another
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      GainImpl model;
      fully_shard(model, mesh, {.param_dtype = at::kBFloat16});
      const at::Tensor x =
          distribute_tensor(
              at::sin(at::arange(4 * kDim, at::kFloat) + 1).view({4, kDim}).to(at::kBFloat16), mesh,
              {{"dp", Shard(0)}})
              .requires_grad_();
      std::vector<at::Tensor> runs;
      const auto run = [&](const at::Tensor& in) {
        const at::Tensor out = model.forward(in);
        runs.push_back(out.detach().clone());
        return out;
      };
      const at::Tensor wanted = model.forward(x).detach();
      EXPECT_EQ(wanted.scalar_type(), at::kBFloat16);
      const at::Tensor got =
          outer ? checkpoint([&](const at::Tensor& in) { return checkpoint(run, in); }, x)
                : checkpoint(run, x);
      got.sum().backward();
      ASSERT_GE(runs.size(), 2U);
      runs.push_back(got.detach());
      for (const at::Tensor& one : runs) {
        EXPECT_EQ(one.scalar_type(), at::kBFloat16);
        EXPECT_TRUE(at::equal(full_tensor(one), full_tensor(wanted)));
      }
      // Behind it averages are of what rests again.
      const c10::AutoGradMode no_grad(false);
      EXPECT_EQ((1 + model.gain).scalar_type(), at::kFloat);
    });
  }
}

TEST(FullyShardTest, MixedPrecisionOfIndices) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    nn::Embedding model(kWords, kDim);
    initialize(*model);
    const at::Tensor whole = model->weight.detach().clone();
    fully_shard(*model, mesh, {.param_dtype = at::kBFloat16});
    const at::Tensor rows = at::arange(6) * 5 % kWords;
    const at::Tensor ids = distribute_tensor(rows, mesh, {{"dp", Shard(0)}});
    const auto look_up = [&] { return model->weight.index({ids}); };
    const at::Tensor wanted = whole.to(at::kBFloat16).index({rows});
    EXPECT_TRUE(at::equal(full_tensor(look_up().detach()), wanted));
    {
      const c10::AutoGradMode no_grad(false);
      EXPECT_EQ(look_up().scalar_type(), at::kBFloat16);
      EXPECT_TRUE(at::equal(full_tensor(look_up()), wanted));
    }
    look_up().sum().backward();
    at::Tensor counts = at::zeros({kWords, kDim});
    counts.index_put_({rows}, at::ones({6, kDim}), /*accumulate=*/true);
    EXPECT_TRUE(at::equal(full_tensor(model->weight.grad()), counts));
  });
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    nn::Embedding model(kWords, kDim);
    fully_shard(*model, mesh, {.param_dtype = at::kBFloat16, .output_dtype = at::kDouble});
    const at::Tensor ids = distribute_tensor(at::arange(6), mesh, {{"dp", Shard(0)}});
    EXPECT_EQ(model->weight.index({ids}).scalar_type(), at::kDouble);
  });
}

// What rests as several dtypes, and what mixed precision leaves as it is.
TEST(FullyShardTest, MixedPrecisionOfSeveralDtypes) {
  struct ManyImpl : nn::Module {
    ManyImpl() {
      first = register_module("first", nn::Linear(kDim, kHidden));
      second = register_module("second", nn::Linear(kHidden, kWords));
      initialize(*this);
      first->to(at::kDouble);
      turn = register_parameter(
          "turn", at::polar(at::ones({kWords}), at::arange(kWords, at::kFloat) * 0.1));
      const at::Tensor eighths =
          ((at::arange(2 * kWords, at::kFloat) - kWords) / 8).to(at::kFloat8_e4m3fn);
      small = register_parameter("small", eighths, /*requires_grad=*/false);
    }
    at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
    nn::Linear first{nullptr}, second{nullptr};
    at::Tensor turn, small;
  };
  const at::Tensor x = at::cos(at::arange(6 * kDim, at::kDouble)).view({6, kDim});
  ManyImpl plain;
  const auto in = [](const at::Tensor& t) { return t.to(at::kFloat); };
  const auto linear = [&](const at::Tensor& t, nn::Linear& l) {
    return at::addmm(in(l->bias), in(t), in(l->weight).t());
  };
  const auto forward = [&](const at::Tensor& t) {
    return linear(at::tanh(linear(t, plain.first)), plain.second);
  };
  forward(x).to(at::kDouble).sum().backward();
  const Values wanted = gradients_of(plain);
  for (const int64_t ranks : {1, 2}) {
    on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
      ManyImpl model;
      const auto units = fully_shard(model, mesh, {.param_dtype = at::kFloat});
      EXPECT_EQ(units.size(), 4U);  // one of each dtype
      const at::Tensor got = model.forward(distribute_tensor(x, mesh, {{"dp", Shard(0)}}));
      EXPECT_EQ(got.scalar_type(), at::kFloat);
      // Rank by rank: on some processors a row's last bits depend on how many are multiplied at once.
      std::vector<at::Tensor> rows;
      for (const at::Tensor& part : x.chunk(ranks)) rows.push_back(forward(part));
      EXPECT_TRUE(at::equal(full_tensor(got), at::cat(rows)));
      got.to(at::kDouble).sum().backward();
      const Values gradients = gradients_of(model);
      if (ranks == 1) expect_equal(gradients, wanted, "one rank");
      for (const auto& [name, grad] : wanted) {
        EXPECT_EQ(gradients.at(name).scalar_type(), grad.scalar_type()) << name;
        // Sums of six in another order: five roundings each.
        EXPECT_TRUE(at::allclose(gradients.at(name), grad, 1e-6, 1e-6)) << name;
      }
      for (at::Tensor& p : model.parameters()) p.mutable_grad() = at::Tensor();
      // As they are, and as what meets them is.
      EXPECT_EQ((model.turn * at::ones({kWords}, at::kComplexDouble)).scalar_type(),
                at::kComplexDouble);
      at::real(model.turn * model.turn.conj()).sum().backward();
      EXPECT_EQ(model.turn.grad().scalar_type(), at::kComplexFloat);
      EXPECT_TRUE(at::equal(full_tensor(model.small.to(at::kFloat)), plain.small.to(at::kFloat)));
      EXPECT_EQ(model.small.view({2, kWords}).scalar_type(), at::kFloat8_e4m3fn);
      EXPECT_EQ(fully_shard_counters(mesh).gathers > 0, ranks > 1);
    });
  }
}

// From the third run on LibTorch differentiates the graph by itself, and its gradients come past the
// unit's node.
TEST(FullyShardTest, MixedPrecisionOfTorchScript) {
  struct Holder : nn::Module {
    explicit Holder(const torch::jit::Module& script) {
      for (const auto& p : script.named_parameters()) register_parameter(p.name, p.value);
    }
  };
  for (const Dtype output : {Dtype(), Dtype(at::kDouble)}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      torch::jit::Module script("m");
      for (const auto& [name, sizes] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
               {"a", {kHidden, kDim}}, {"b", {kHidden}}, {"c", {kWords, kHidden}}}) {
        const at::Tensor value = at::sin(at::arange(c10::multiply_integers(sizes), at::kDouble));
        script.register_parameter(name, value.view(sizes).requires_grad_(), /*is_buffer=*/false);
      }
      script.define(R"(
        def forward(self, x):
            h = torch.tanh(torch.linear(x, self.a, self.b))
            return torch.linear(h, self.c).square().mean()
      )");
      Holder parameters(script);
      fully_shard(parameters, mesh,
                  {.param_dtype = at::kFloat, .reduce_dtype = at::kFloat, .output_dtype = output});
      // Of one dtype with what operators give: its own backward takes inputs as they were.
      const at::Tensor all = at::cos(at::arange(kBatch * kDim, at::kDouble)).view({kBatch, kDim});
      const at::Tensor x =
          distribute_tensor(all.to(output.value_or(at::kFloat)), mesh, {{"dp", Shard(0)}});
      Values first;
      for (int step = 0; step < 4; ++step) {
        const CommTrace trace(mesh);
        const at::Tensor loss = script.forward({x}).toTensor();
        EXPECT_EQ(loss.scalar_type(), output.value_or(at::kFloat));
        loss.backward();
        for (const CommEvent& event : trace.events()) {
          if (!is_of_units(event)) continue;
          EXPECT_EQ(event.dtype, at::kFloat) << event.collective;
        }
        const Values gradients = gradients_of(parameters);
        if (step == 0) first = gradients;
        expect_close(gradients, first, 1e-6);
        for (const auto& [name, grad] : gradients) EXPECT_EQ(grad.scalar_type(), at::kDouble);
        for (at::Tensor& p : parameters.parameters()) p.mutable_grad() = at::Tensor();
      }
    });
  }
}

TEST(FullyShardTest, DtypesThatAreWrongOrDifferOnARankAreAnErrorOnAll) {
  for (const bool everywhere : {false, true}) {
    for (int option = 0; option < 3; ++option) {
      on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
        Net model;
        FullyShardOptions options = {.units = {"blocks.*"}};
        Dtype& given = option == 0   ? options.param_dtype
                       : option == 1 ? options.reduce_dtype
                                     : options.output_dtype;
        if (everywhere || mesh->coordinate()[0] == 1) given = at::kInt;
        try {
          fully_shard(*model, mesh, options);
          ADD_FAILURE() << "no error";
        } catch (const Error& error) {
          EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument) << error.status();
          EXPECT_THAT(std::string(error.status().message()),
                      HasSubstr(everywhere ? "_dtype is Int; wanted Half, BFloat16, Float or Double"
                                           : "is not the same on ranks 0 and 1"));
        }
        for (const at::Tensor& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
        fully_shard(*model, mesh);  // nothing was changed, and the ranks go on together
      });
    }
  }
  expect_error(
      {{"dp", 2}},
      [](const MeshPtr& mesh) {
        fully_shard(*Net(), mesh,
                    {.reduce_dtype = mesh->coordinate()[0] == 0 ? at::kHalf : at::kFloat});
      },
      absl::StatusCode::kInvalidArgument, "is not the same on ranks 0 and 1");
}

TEST(FullyShardTest, NothingIsLeftBehind) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    std::weak_ptr<NetImpl> gone;
    at::Tensor loss;
    {
      Net model;
      gone = model.ptr();
      fully_shard(*model, mesh, {.units = {"blocks.*"}});
      const Batch b = fed(0, mesh);
      loss = model->loss(b.tokens, b.targets);
    }
    EXPECT_TRUE(gone.expired());
    EXPECT_GT(fully_shard_counters(mesh).gathered_bytes, 0);
    loss.backward();  // the graph has what it needs
    loss.reset();
    EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
  });
}

TEST(FullyShardTest, AUnitGoesWithItsParameters) {
  using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  for (const int64_t ranks : {1, 2}) {
    for (const bool trains : {false, true}) {
      on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
        std::vector<Storage> parts;
        {
          Net model;
          model->norm->weight.set_requires_grad(false);
          fully_shard(*model, mesh, {.units = {"blocks.*"}});
          if (trains) {
            const Batch b = fed(0, mesh);
            model->loss(b.tokens, b.targets).backward();
          }
          for (const at::Tensor& p : model->parameters()) {
            parts.emplace_back(to_local(p).storage().getWeakStorageImpl());
          }
        }
        for (const Storage& part : parts) EXPECT_TRUE(part.expired()) << ranks << trains;
      });
    }
  }
}

}  // namespace
}  // namespace shardweave

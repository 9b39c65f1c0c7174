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
#include "shardweave/modules/testing/tied_net.h"
#include "shardweave/modules/testing/values.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/adamw.h"
#include "torch/script.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;
using namespace testing;
using namespace testing::tied_net;
namespace nn = torch::nn;

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
      // Seven units; then of each pair of blocks both. What comes next stays: the norm when backward
      // begins, and a pair's first when that has been run again. A forward without gradients, as
      // checkpoint()'s, has guesses of its own: none of them is wrong.
      if (step > 1) {
        EXPECT_EQ(fully_shard_counters(mesh).gathers - before, 7 + 2 * 2) << step;
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

// --- lifetimes -----------------------------------------------------------------------------------

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

// A gate, or a scale of another type than its block's: some ranks keep nothing of the unit.
TEST(FullyShardTest, AUnitOfFewerElementsThanRanks) {
  struct GatedImpl : nn::Module {
    nn::Linear linear = register_module("linear", nn::Linear(3, 5));
    at::Tensor gate = register_parameter("gate", at::full({2}, 0.5, at::kDouble));
    at::Tensor forward(const at::Tensor& x) {
      return linear(x) * gate[0].to(at::kFloat) + gate[1].to(at::kFloat);
    }
  };
  const at::Tensor x = at::sin(at::arange(12, at::kFloat)).view({4, 3});
  const auto steps = [](GatedImpl& model, const at::Tensor& input) {
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.02));
    for (int step = 0; step < 3; ++step) {
      model.forward(input).square().sum().backward();
      clip_grad_norm(model.parameters(), 0.5);
      optimizer.step();
      optimizer.zero_grad();
    }
    return values_of(model);
  };
  GatedImpl plain;
  initialize(plain);
  const Values wanted = steps(plain, x);
  for (const int64_t ranks : {2, 3, 4}) {
    on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
      GatedImpl model;
      initialize(model);
      const auto units = fully_shard(model, mesh);
      EXPECT_EQ(units.size(), 2U);
      expect_close(steps(model, distribute_tensor(x, mesh, {{"dp", Shard(0)}})), wanted);
    });
  }
}

// Layers of the root between units, as of a U-Net, of which backward meets the first ones last: what comes
// next in forward does not come next there.
TEST(FullyShardTest, ForwardTeachesBackwardNothing) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    nn::Sequential model;
    for (int i = 0; i < 6; ++i) model->push_back(nn::Linear(4, 4));
    fully_shard(*model, mesh, {.units = {"2", "4"}});
    const at::Tensor x = distribute_tensor(at::ones({4, 4}), mesh, {{"dp", Shard(0)}});
    int64_t gathers = 0;
    for (int step = 0; step < 5; ++step) {
      at::Tensor y = x;
      for (const auto& layer : *model) y = at::tanh(layer.ptr<nn::LinearImpl>()->forward(y));
      y.sum().backward();
      const FullyShardCounters now = fully_shard_counters(mesh);
      // Root, 2, root, 4, root; from there 4, root, 2, root. What comes next stays: only 2 is gathered
      // once more.
      if (step > 2) {
        EXPECT_EQ(now.gathers - gathers, 4) << step;
      }
      gathers = now.gathers;
    }
    EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
  });
}

}  // namespace
}  // namespace shardweave

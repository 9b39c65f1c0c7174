// Optimizers that are divided among ranks: what one device computes, in two collectives for a bucket
// and step, with a part of the states.
#include "shardweave/modules/zero.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/activation_checkpoint.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/engine/gradient_owner.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/testing/values.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/lbfgs.h"
#include "torch/optim/optimizer.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

using testing::expect_close;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;
using testing::Values;
using testing::values_of;
namespace nn = torch::nn;
namespace optim = torch::optim;

constexpr int64_t kDim = 5, kHidden = 7, kWords = 11, kBatch = 7, kLength = 3;
constexpr int kSteps = 20;

// Tied, frozen and unused parameters, a number, sizes that do not divide.
struct NetImpl : nn::Module {
  NetImpl() {
    embed = register_module("embed", nn::Embedding(kWords, kDim));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kDim})));
    up = register_module("up", nn::Linear(kDim, kHidden));
    down = register_module("down", nn::Linear(kHidden, kDim));
    scale = register_parameter("scale", at::ones({}));
    head = register_parameter("head", embed->weight);
    bias = register_parameter("bias", at::zeros({kWords}));
    unused = register_parameter("unused", at::zeros({3, 2}));
    frozen = register_parameter("frozen", at::zeros({1, kDim}), /*requires_grad=*/false);
    const c10::AutoGradMode no_grad(false);
    double k = 0;
    for (at::Tensor p : parameters()) {
      p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
    }
  }
  at::Tensor block(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))) * scale; }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, bool recompute = false) {
    at::Tensor x = embed(tokens) + frozen;
    for (int i = 0; i < 2; ++i) {
      if (!recompute) {
        x = block(x);
        continue;
      }
      x = checkpoint(
          [this](const std::vector<at::Tensor>& in) {
            return std::vector<at::Tensor>{block(in[0])};
          },
          {x})[0];
    }
    const at::Tensor logits = nn::functional::linear(x, head, bias);
    return at::cross_entropy_loss(logits.view({-1, kWords}), targets.view({-1}));
  }

  nn::Embedding embed{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
  at::Tensor scale, head, bias, unused, frozen;
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

using Mesh = std::vector<MeshDim>;
bool has_dim(const Mesh& dims, const std::string& name) {
  return std::any_of(dims.begin(), dims.end(), [&](const MeshDim& d) { return d.name == name; });
}
const std::vector<Mesh> kMeshes = {
    {{"dp", 1}},
    {{"dp", 2}},
    {{"dp", 3}},
    {{"dp", 4}},
    {{"dp", 2}, {"tp", 2}},
    {{"tp", 2}, {"dp", 2}},
    {{"replicas", 2}, {"dp", 2}},
};
// The cuts are uneven: 7 and 11 over two ranks.
const ParameterPlan kTensorParallel = {{"up.*", {{"tp", Shard(0)}}},
                                       {"down.weight", {{"tp", Shard(1)}}},
                                       {"embed.weight", {{"tp", Shard(0)}}}};
void distribute(NetImpl& model, const MeshPtr& mesh) {
  const bool tp = has_dim(mesh->mesh().dims(), "tp");
  distribute_module(model, mesh, tp ? kTensorParallel : ParameterPlan());
}
Batch fed(int step, const MeshPtr& mesh) {
  const Batch b = batch(step);
  NamedPlacements placements = {{"dp", Shard(0)}};
  if (has_dim(mesh->mesh().dims(), "replicas")) placements.push_back({"replicas", Shard(0)});
  return {distribute_tensor(b.tokens, mesh, placements),
          distribute_tensor(b.targets, mesh, placements)};
}

struct Trained {
  std::vector<double> losses, norms;
  Values values;
};

// The same loop for one device and for many.
template <typename Optimizer>
Trained train(NetImpl& model, Optimizer& optimizer, const std::function<Batch(int)>& feed,
              int steps = kSteps) {
  Trained trained;
  for (int step = 0; step < steps; ++step) {
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

template <typename Optimizer, typename Options>
void expect_one_devices_training(const Options& options, const std::vector<Mesh>& meshes,
                                 double tolerance = 2e-3) {
  Net plain;
  Optimizer alone(unique_parameters(*plain), options);
  const Trained wanted = train(*plain, alone, batch);
  ASSERT_GT(wanted.norms[0], 0.5);  // clipped
  for (const Mesh& dims : meshes) {
    for (const int stage : {1, 2}) {
      for (const int64_t bucket_bytes : {int64_t{1}, int64_t{200}, int64_t{25} << 20}) {
        SCOPED_TRACE(::testing::Message() << dims.size() << " dims, the last " << dims.back().size
                                          << ", stage " << stage << ", " << bucket_bytes);
        on_mesh(dims, [&](const MeshPtr& mesh) {
          Net model;
          distribute(*model, mesh);
          ZeroRedundancyOptimizer<Optimizer> optimizer(
              model->parameters(), options,
              {.mesh_dim = "dp", .stage = stage, .bucket_bytes = bucket_bytes});
          const Trained got = train(*model, optimizer, [&](int step) { return fed(step, mesh); });
          for (int step = 0; step < kSteps; ++step) {
            EXPECT_NEAR(got.losses[step], wanted.losses[step], 1e-3) << step;
            EXPECT_NEAR(got.norms[step], wanted.norms[step], 1e-2) << step;
          }
          expect_close(got.values, wanted.values, tolerance);
          for (const at::Tensor& p : model->parameters()) {
            EXPECT_FALSE(layout_of(p)[mesh->mesh().dim("dp").value()].is_shard());
          }
          EXPECT_EQ(optimizer.partition().left_in_backward() > 0,
                    stage == 2 && mesh->mesh().size(mesh->mesh().dim("dp").value()) > 1);
        });
      }
    }
  }
}

TEST(ZeroTest, AdamWTrainsAsOnOneDevice) {
  expect_one_devices_training<optim::AdamW>(optim::AdamWOptions(0.02).weight_decay(0.1), kMeshes);
}

TEST(ZeroTest, FusedOptimizersTrainAsOnOneDevice) {
  expect_one_devices_training<FusedOptimizer>(AdamWOptions{.lr = 0.02, .weight_decay = 0.1},
                                              kMeshes);
}

TEST(ZeroTest, AnyOptimizerOfLibTorchs) {
  const std::vector<Mesh> meshes = {{{"dp", 3}}};
  expect_one_devices_training<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9), meshes);
  expect_one_devices_training<optim::Adam>(optim::AdamOptions(0.02).amsgrad(true), meshes);
  expect_one_devices_training<optim::RMSprop>(optim::RMSpropOptions(0.01).momentum(0.5), meshes);
  expect_one_devices_training<optim::Adagrad>(optim::AdagradOptions(0.05), meshes);
}

TEST(ZeroTest, AnOptimizerThatCallsForTheLoss) {
  const auto options = optim::LBFGSOptions(0.1).max_iter(4).history_size(3);
  const auto run = [](NetImpl& model, auto& optimizer, const Batch& b) {
    for (int step = 0; step < 3; ++step) {
      optimizer.step([&] {
        optimizer.zero_grad();
        const at::Tensor loss = model.loss(b.tokens, b.targets);
        loss.backward();
        finish_grad_sync(model);
        return loss;
      });
    }
    return values_of(model);
  };
  // LBFGS wants a gradient of each.
  const auto used = [](NetImpl& model) {
    std::vector<at::Tensor> parameters = unique_parameters(model);
    std::erase_if(parameters, [&](const at::Tensor& p) {
      return p.is_same(model.unused) || p.is_same(model.frozen);
    });
    return parameters;
  };
  Net plain;
  optim::LBFGS alone(used(*plain), options);
  const Values wanted = run(*plain, alone, batch(0));
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Net model;
    distribute(*model, mesh);
    ZeroRedundancyOptimizer<optim::LBFGS> optimizer(used(*model), options);
    expect_close(run(*model, optimizer, fed(0, mesh)), wanted, 1e-3);
  });
}

// --- what is sent, and what is kept --------------------------------------------------------------

struct Sent {
  int64_t gathers = 0, reductions = 0, others = 0, bytes = 0, other_bytes = 0;
};
Sent sent(const CommTrace& trace) {
  Sent s;
  for (const CommEvent& event : trace.events()) {
    const bool gather = event.collective == "all_gather";
    const bool reduction = event.collective == "reduce_scatter";
    s.gathers += gather;
    s.reductions += reduction;
    s.others += !gather && !reduction;
    (gather || reduction ? s.bytes : s.other_bytes) += event.bytes;
  }
  return s;
}

TEST(ZeroTest, TwoCollectivesForABucketAndStep) {
  for (const int64_t ranks : {2, 3, 4}) {
    for (const int stage : {1, 2}) {
      on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
        nn::Sequential model(nn::Linear(12, 24), nn::Linear(24, 12), nn::Linear(12, 24));
        distribute_module(*model, mesh, {});
        // One bucket for each layer.
        ZeroRedundancyOptimizer<FusedOptimizer> optimizer(
            model->parameters(), AdamWOptions{},
            {.stage = stage, .bucket_bytes = 4 * (24 * 12 + 24)});
        const at::Tensor x = distribute_tensor(at::ones({8, 12}), mesh, {{"dp", Shard(0)}});
        int64_t bytes = 0;
        for (const at::Tensor& p : model->parameters()) bytes += p.numel() * 4;
        for (int step = 0; step < 3; ++step) {
          const at::Tensor loss = model->forward(x).square().sum();
          const CommTrace trace(mesh);
          loss.backward();
          EXPECT_EQ(sent(trace).reductions, stage == 2 ? 3 : 0);
          finish_grad_sync(*model);
          EXPECT_EQ(sent(trace).reductions, 3) << trace.to_string();
          EXPECT_EQ(sent(trace).gathers, 0);
          optimizer.step();
          optimizer.zero_grad();
          const Sent s = sent(trace);
          EXPECT_EQ(s.reductions, 3) << trace.to_string();
          EXPECT_EQ(s.gathers, 3) << trace.to_string();
          EXPECT_EQ(s.others, 0) << trace.to_string();
          // 2 (n - 1) / n, but for cuts between rows of up to 24 elements.
          EXPECT_NEAR(static_cast<double>(s.bytes), 2.0 * bytes * (ranks - 1) / ranks,
                      2 * 3 * 4 * 24);
        }
        // Nothing was written: nothing is sent.
        const CommTrace trace(mesh);
        optimizer.step();
        EXPECT_TRUE(trace.events().empty()) << trace.to_string();
      });
    }
  }
}

TEST(ZeroTest, StatesAreDividedEvenly) {
  for (const int64_t ranks : {2, 3, 4}) {
    on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
      Net model;
      distribute(*model, mesh);
      ZeroRedundancyOptimizer<optim::AdamW> optimizer(model->parameters(), optim::AdamWOptions());
      train(*model, optimizer, [&](int step) { return fed(step, mesh); }, 1);
      int64_t kept = 0, all = 0;
      for (size_t i = 0; i < optimizer.parameters().size(); ++i) {
        for (const auto& [name, value] : optimizer.state(i)) {
          if (name == "step") continue;
          kept += to_local(value).numel();
          all += value.numel();
        }
      }
      ASSERT_GT(all, 0);
      EXPECT_NEAR(static_cast<double>(kept), static_cast<double>(all) / ranks, 40);
      // Shards are the parameters' memory.
      const auto& partition = optimizer.partition();
      for (size_t i = 0; i < partition.shards().size(); ++i) {
        const at::Tensor shard = to_local(partition.shards()[i].detach());
        if (shard.numel() == 0) continue;
        EXPECT_TRUE(shard.is_alias_of(to_local(partition.parameters()[i].detach())));
      }
    });
  }
}

TEST(ZeroTest, OnlyAPartOfEachGradientStaysInStageTwo) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    distribute(*model, mesh);
    ZeroPartition partition(unique_parameters(*model), {.stage = 2, .bucket_bytes = 64});
    const Batch b = fed(0, mesh);
    model->loss(b.tokens, b.targets).backward();
    int64_t here = 0, all = 0;
    for (const at::Tensor& p : partition.parameters()) {
      // One that was not used keeps its bucket's until the end.
      if (!p.grad().defined() || p.dim() == 0 || layout_of(p.grad())[0].is_partial()) continue;
      here += to_local(p.grad()).numel();
      all += p.numel();
    }
    EXPECT_GT(all, 0);
    EXPECT_NEAR(static_cast<double>(here), all / 2.0, 3 * kHidden);
  });
}

// The memory that a bucket is sent from is given up while backward goes on.
TEST(ZeroTest, TwoBucketsAreUnderWayAtATime) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    distribute(*model, mesh);
    ZeroPartition partition(unique_parameters(*model), {.stage = 2, .bucket_bytes = 1});
    const Batch b = fed(0, mesh);
    for (const bool first : {true, false}) {
      const int64_t before = partition.left_in_backward();
      model->loss(b.tokens, b.targets).backward();
      int under_way = 0;
      for (const at::Tensor& p : partition.parameters()) {
        using dtensor_internal::LocalPart;
        const bool has = p.grad().defined() && is_dtensor(p.grad());
        if (has && dtensor_internal::meta_of(p.grad()).part.state() == LocalPart::State::kUnderWay)
          ++under_way;
      }
      EXPECT_GT(partition.left_in_backward() - before, 4) << first;
      EXPECT_LE(under_way, 2) << first;
      partition.hand_out_gradients();
      partition.share_parameters();
      partition.zero_grad();
    }
  });
}

// --- how programs use it -------------------------------------------------------------------------

using Program = std::function<void(NetImpl& model, const std::function<Batch(int)>& feed,
                                   const std::function<void()>& step,
                                   const std::function<void()>& zero_grad, ZeroPartition*)>;

void expect_one_devices_values(const Program& program, double tolerance = 1e-4) {
  Net plain;
  optim::SGD alone(unique_parameters(*plain), optim::SGDOptions(0.1).momentum(0.9));
  program(*plain, batch, [&] { alone.step(); }, [&] { alone.zero_grad(); }, nullptr);
  const Values wanted = values_of(*plain);
  for (const Mesh& dims : {Mesh{{"dp", 1}}, {{"dp", 2}}, {{"dp", 3}}, {{"dp", 2}, {"tp", 2}}}) {
    for (const int stage : {1, 2}) {
      on_mesh(dims, [&](const MeshPtr& mesh) {
        Net model;
        distribute(*model, mesh);
        ZeroRedundancyOptimizer<optim::SGD> optimizer(model->parameters(),
                                                      optim::SGDOptions(0.1).momentum(0.9),
                                                      {.stage = stage, .bucket_bytes = 128});
        program(
            *model, [&](int step) { return fed(step, mesh); }, [&] { optimizer.step(); },
            [&] { optimizer.zero_grad(); }, &optimizer.partition());
        expect_close(values_of(*model), wanted, tolerance);
      });
    }
  }
}

TEST(ZeroTest, GradientsAreAccumulated) {
  for (const bool pause : {false, true}) {
    expect_one_devices_values([&](NetImpl& model, const auto& feed, const auto& step,
                                  const auto& zero_grad, ZeroPartition* partition) {
      for (int k = 0; k < 4; ++k) {
        {
          std::unique_ptr<ZeroPartition::NoSync> no_sync;
          if (pause && partition != nullptr) {
            no_sync = std::make_unique<ZeroPartition::NoSync>(*partition);
          }
          const Batch b = feed(2 * k);
          model.loss(b.tokens, b.targets).backward();
          if (pause && partition != nullptr) {
            for (const at::Tensor& p : partition->parameters()) {
              EXPECT_FALSE(p.grad().defined() && layout_of(p.grad())[0].is_shard());
            }
          }
        }
        const Batch b = feed(2 * k + 1);
        model.loss(b.tokens, b.targets).backward();
        step();
        zero_grad();
      }
    });
  }
}

TEST(ZeroTest, BackwardAfterTheSynchronisation) {
  expect_one_devices_values([](NetImpl& model, const auto& feed, const auto& step,
                               const auto& zero_grad, ZeroPartition*) {
    for (int k = 0; k < 3; ++k) {
      for (int i = 0; i < 2; ++i) {
        const Batch b = feed(2 * k + i);
        model.loss(b.tokens, b.targets).backward();
        finish_grad_sync(model);
        finish_grad_sync(model);
      }
      step();
      zero_grad();
    }
  });
}

TEST(ZeroTest, StepsAreSkipped) {
  expect_one_devices_values([](NetImpl& model, const auto& feed, const auto& step,
                               const auto& zero_grad, ZeroPartition*) {
    for (int k = 0; k < 6; ++k) {
      const Batch b = feed(k);
      model.loss(b.tokens, b.targets).backward();
      if (k % 3 == 1) model.zero_grad();
      if (k % 3 == 2) zero_grad();
      step();  // without gradients: nothing, momentum neither
      zero_grad();
    }
  });
}

TEST(ZeroTest, RecomputedAndKeptGraphs) {
  expect_one_devices_values([](NetImpl& model, const auto& feed, const auto& step,
                               const auto& zero_grad, ZeroPartition*) {
    for (int k = 0; k < 3; ++k) {
      const Batch b = feed(k);
      model.loss(b.tokens, b.targets, /*recompute=*/true).backward();
      step();
      zero_grad();
      const at::Tensor loss = model.loss(b.tokens, b.targets);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      step();
      zero_grad();
    }
  });
}

TEST(ZeroTest, GradientsOfGradients) {
  expect_one_devices_values([](NetImpl& model, const auto& feed, const auto& step,
                               const auto& zero_grad, ZeroPartition*) {
    for (int k = 0; k < 3; ++k) {
      const Batch b = feed(k);
      model.loss(b.tokens, b.targets).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      finish_grad_sync(model);
      const at::Tensor up = model.up->weight.grad(), scale = model.scale.grad();
      EXPECT_TRUE(up.requires_grad() && scale.requires_grad());
      const at::Tensor penalty = up.square().sum() + scale.square();
      for (const at::Tensor& p : model.parameters()) p.mutable_grad() = at::Tensor();
      penalty.backward();
      step();
      zero_grad();
    }
  });
}

// A gradient with a graph keeps it, in a bucket with others that have none (stage 2).
TEST(ZeroTest, AGraphStaysBesideGradientsWithout) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const auto made = [&](float by) {
      return distribute_tensor(at::arange(12, at::kFloat).view({3, 4}) * by, mesh, {Replicate()})
          .requires_grad_();
    };
    const std::vector<at::Tensor> parameters = {made(0.1f), made(0.2f)};
    ZeroPartition partition(parameters, {.stage = 2});
    const at::Tensor x =
        distribute_tensor(at::arange(6, at::kFloat).view({2, 3}), mesh, {Shard(0)});
    const auto loss = [&](size_t i, int power) { return x.matmul(parameters[i]).pow(power).sum(); };
    for (int i = 0; i < 2; ++i) {  // the first time nobody knows how many will come
      loss(0, 3).backward();
      loss(1, 1).backward();
      partition.hand_out_gradients();
      partition.share_parameters();
      partition.zero_grad();
    }
    loss(0, 3).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    loss(1, 1).backward();
    EXPECT_TRUE(parameters[0].grad().requires_grad());
    partition.hand_out_gradients();
    const at::Tensor gradient = parameters[0].grad();
    ASSERT_TRUE(gradient.requires_grad());
    const at::Tensor second = torch::autograd::grad({gradient.square().sum()}, {parameters[0]})[0];
    at::Tensor w = full_tensor(parameters[0].detach()).requires_grad_();
    const at::Tensor alone = torch::autograd::grad(
        {at::arange(6, at::kFloat).view({2, 3}).matmul(w).pow(3).sum()}, {w}, {}, true, true)[0];
    EXPECT_TRUE(at::allclose(full_tensor(gradient.detach()), alone.detach()));
    EXPECT_TRUE(at::allclose(full_tensor(second.detach()),
                             torch::autograd::grad({alone.square().sum()}, {w})[0]));
    partition.zero_grad();
  });
}

// Moments of another dtype are kept in the parameter's; values that lie otherwise on some rank, and
// options that no optimizer takes, are refused on all before anything changes.
TEST(ZeroTest, StatesOfOtherDtypesAndPlaces) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    distribute(*model, mesh);
    const std::vector<at::Tensor> all = model->parameters();
    const at::Tensor before = to_local(all[0].detach());
    for (const float lr : {-1.f, std::numeric_limits<float>::quiet_NaN()}) {
      EXPECT_THROW(ZeroRedundancyOptimizer<FusedOptimizer>(all, AdamWOptions{.lr = lr}), Error);
      EXPECT_TRUE(to_local(all[0].detach()).is_alias_of(before));
    }
    ZeroRedundancyOptimizer<optim::AdamW> optimizer(all, optim::AdamWOptions());
    const at::Tensor moment = at::full(all[0].sizes(), 3e-5, at::kHalf);
    const OptimizerState halves = {
        {"step", at::scalar_tensor(4)}, {"exp_avg", moment}, {"exp_avg_sq", moment}};
    optimizer.set_state(0, halves);
    EXPECT_EQ(optimizer.state(0).at("exp_avg_sq").scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(optimizer.consolidated_state(0).at("exp_avg_sq"), moment.to(at::kFloat)));
    OptimizerState otherwise = halves;
    otherwise["exp_avg"] = mesh->coordinate()[0] == 0
                               ? moment
                               : distribute_tensor(moment, mesh, {}, {.source = std::nullopt});
    if (mesh->coordinate()[0] == 0) distribute_tensor(moment, mesh, {}, {.source = std::nullopt});
    try {
      optimizer.set_state(0, otherwise);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(std::string(error.status().message()), HasSubstr("dtypes or layouts"));
    }
  });
}

TEST(ZeroTest, ParametersAreFrozenAndWritten) {
  expect_one_devices_values([](NetImpl& model, const auto& feed, const auto& step,
                               const auto& zero_grad, ZeroPartition*) {
    for (int k = 0; k < 6; ++k) {
      model.up->weight.requires_grad_(k % 2 == 0);
      model.frozen.requires_grad_(k > 2);
      {
        const c10::AutoGradMode no_grad(false);
        model.down->weight.mul_(0.9);
      }
      const Batch b = feed(k);
      model.loss(b.tokens, b.targets).backward();
      step();
      zero_grad();
    }
  });
}

// A backward that needs what a step has written is an error, as on one device.
TEST(ZeroTest, AutogradKnowsOfSteps) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    distribute(*model, mesh);
    ZeroRedundancyOptimizer<FusedOptimizer> optimizer(model->parameters(), SgdOptions{.lr = 0.1});
    const Batch b = fed(0, mesh);
    const at::Tensor loss = model->loss(b.tokens, b.targets);
    loss.backward({}, /*retain_graph=*/true);
    optimizer.step();
    EXPECT_THROW(loss.backward(), c10::Error);
  });
}

TEST(ZeroTest, MoreRanksThanElements) {
  on_mesh({{"dp", 4}}, [](const MeshPtr& mesh) {
    nn::Linear model(2, 1);
    {
      const c10::AutoGradMode no_grad(false);
      model->weight.fill_(0.5);
      model->bias.fill_(0.25);
    }
    nn::Linear plain(2, 1);
    {
      const c10::AutoGradMode no_grad(false);
      plain->weight.copy_(model->weight);
      plain->bias.copy_(model->bias);
    }
    distribute_module(*model, mesh, {});
    ZeroRedundancyOptimizer<optim::AdamW> optimizer(model->parameters(), optim::AdamWOptions(0.1));
    optim::AdamW alone(plain->parameters(), optim::AdamWOptions(0.1));
    const at::Tensor x = at::arange(10, at::kFloat).view({5, 2});
    for (int step = 0; step < 3; ++step) {
      model(distribute_tensor(x, mesh, {{"dp", Shard(0)}})).square().sum().backward();
      plain(x).square().sum().backward();
      optimizer.step();
      alone.step();
      optimizer.zero_grad();
      alone.zero_grad();
    }
    expect_close(values_of(*model), values_of(*plain));
  });
}

// One rank's gradient comes from its local part, the other's from operators that send nothing: as
// they are compared with nothing elsewhere, so here.
TEST(ZeroTest, RanksHaveTheirGradientsFromDifferentPlaces) {
  for (const int stage : {1, 2}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      nn::Linear model(nn::LinearOptions(3, 2).bias(false));
      {
        const c10::AutoGradMode no_grad(false);
        model->weight.copy_(at::arange(6, at::kFloat).view({2, 3}));
      }
      distribute_module(*model, mesh, {});
      ZeroRedundancyOptimizer<FusedOptimizer> optimizer(model->parameters(), SgdOptions{.lr = 0.1},
                                                        {.stage = stage});
      at::Tensor wanted = at::arange(6, at::kFloat).view({2, 3});
      for (int step = 0; step < 2; ++step) {
        const at::Tensor x = distribute_tensor(at::ones({2, 3}), mesh, {{"dp", Shard(0)}});
        if (mesh->coordinate()[0] == 0) {
          to_local(model->weight, Placements{Partial()}).square().sum().backward();
        } else {
          model(x).sum().backward();
        }
        optimizer.step();
        optimizer.zero_grad();
        wanted = wanted - 0.1 * (2 * wanted + 1);
      }
      expect_close(values_of(*model), {{"weight", wanted}});
    });
  }
}

// Of a ragged cut the first rank may have nothing, and still what follows comes after it.
TEST(ZeroTest, TheFirstRankOfACutHasNothing) {
  struct Pair : nn::Module {
    Pair() {
      weight = register_parameter("weight", at::arange(28, at::kFloat).view({4, 7}) * 0.1);
      bias = register_parameter("bias", at::arange(8, at::kFloat) * -0.3);
    }
    at::Tensor loss() const { return weight.square().sum() + bias.pow(3).sum(); }
    at::Tensor weight, bias;
  };
  Pair plain;
  FusedOptimizer alone(plain.parameters(), SgdOptions{.lr = 0.05});
  for (int step = 0; step < 3; ++step) {
    plain.loss().backward();
    alone.step();
    alone.zero_grad();
  }
  const auto expect_same = [&](const MeshPtr& mesh, const auto& train) {
    Pair model;
    distribute_module(model, mesh, {{"weight", {{"tp", RaggedShard(1, {0, 7})}}}});
    train(model);
    expect_close(values_of(model), values_of(plain));
  };
  for (const Mesh& dims : {Mesh{{"dp", 2}, {"tp", 2}}, Mesh{{"tp", 2}, {"dp", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      expect_same(mesh, [&](Pair& model) {
        ZeroRedundancyOptimizer<FusedOptimizer> optimizer(
            model.parameters(), SgdOptions{.lr = 0.05}, {.mesh_dim = "dp"});
        for (int step = 0; step < 3; ++step) {
          model.loss().backward();
          optimizer.step();
          optimizer.zero_grad();
        }
      });
    });
  }
}

TEST(ZeroTest, ParameterGroups) {
  const auto group = [](std::vector<at::Tensor> parameters) {
    return optim::OptimizerParamGroup(
        std::move(parameters),
        std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(0.05).weight_decay(0)));
  };
  const auto options = optim::AdamWOptions(0.02).weight_decay(0.5);
  Net plain;
  optim::AdamW alone({plain->embed->weight, plain->up->weight, plain->down->weight}, options);
  alone.add_param_group(group({plain->bias, plain->up->bias, plain->scale}));
  const Trained wanted = train(*plain, alone, batch, 5);
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    Net model;
    distribute(*model, mesh);
    ZeroRedundancyOptimizer<optim::AdamW> optimizer(
        {model->embed->weight, model->up->weight, model->down->weight}, options);
    optimizer.add_param_group(group({model->bias, model->up->bias, model->scale}));
    EXPECT_EQ(optimizer.optimizer().param_groups().size(), 2U);
    EXPECT_EQ(optimizer.parameters().size(), 6U);
    const Trained got = train(*model, optimizer, [&](int step) { return fed(step, mesh); }, 5);
    expect_close(got.values, wanted.values, 1e-3);
  });
}

// --- states --------------------------------------------------------------------------------------

template <typename Optimizer, typename Options>
void expect_resumes(const Options& options) {
  Net plain;
  Optimizer alone(unique_parameters(*plain), options);
  const Values wanted = train(*plain, alone, batch, 8).values;

  std::vector<OptimizerState> whole;
  Values half;
  const auto in_turn = [](const MeshPtr& mesh, int from) {
    return [&mesh, from](int step) { return fed(from + step, mesh); };
  };
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    Net model;
    distribute(*model, mesh);
    ZeroRedundancyOptimizer<Optimizer> optimizer(model->parameters(), options);
    const Values values = train(*model, optimizer, in_turn(mesh, 0), 4).values;
    std::vector<OptimizerState> states;
    for (size_t i = 0; i < optimizer.parameters().size(); ++i) {
      states.push_back(optimizer.consolidated_state(i));
      // Back again as this rank keeps it: the same.
      optimizer.set_state(i, optimizer.state(i));
    }
    if (mesh->coordinate()[0] == 0) {
      whole = states;
      half = values;
    }
    const Values all = train(*model, optimizer, in_turn(mesh, 4), 4).values;
    expect_close(all, wanted, 2e-3);
  });
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Net model;
    {
      const c10::AutoGradMode no_grad(false);
      for (auto& item : model->named_parameters()) item.value().copy_(half.at(item.key()));
    }
    distribute(*model, mesh);
    ZeroRedundancyOptimizer<Optimizer> optimizer(model->parameters(), options);
    for (size_t i = 0; i < whole.size(); ++i) {
      if (!whole[i].empty()) optimizer.set_state(i, whole[i]);
    }
    expect_close(train(*model, optimizer, in_turn(mesh, 4), 4).values, wanted, 2e-3);
  });
}

TEST(ZeroTest, StatesAreSavedAndSet) {
  expect_resumes<optim::AdamW>(optim::AdamWOptions(0.02));
  expect_resumes<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9));
  expect_resumes<FusedOptimizer>(AdamWOptions{.lr = 0.02});
}

TEST(ZeroTest, AnEmptyStateIsThatBeforeTheFirstStep) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const auto train = [&](auto& optimizer) {
      for (int step = 0; step < 3; ++step) {
        at::Tensor w = optimizer.parameters()[0];
        w.mutable_grad() =
            distribute_tensor(at::sin(at::arange(35, at::kFloat) * (step + 1)).view({7, 5}), mesh,
                              layout_of(w).placements());
        optimizer.step();
      }
      return full_tensor(optimizer.parameters()[0].detach()).clone();
    };
    const auto parameter = [&] {
      return distribute_tensor(at::ones({7, 5}), mesh, {}).requires_grad_();
    };
    for (const FusedOptimizer::Options& options :
         {FusedOptimizer::Options(SgdOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.5}),
          FusedOptimizer::Options(AdamWOptions{.lr = 0.1}),
          FusedOptimizer::Options(AdafactorOptions{.lr = 0.1})}) {
      ZeroRedundancyOptimizer<FusedOptimizer> fresh({parameter()}, options);
      const at::Tensor wanted = train(fresh);
      ZeroRedundancyOptimizer<FusedOptimizer> optimizer({parameter()}, options);
      train(optimizer);
      optimizer.set_state(0, {});
      for (const auto& [name, value] : optimizer.consolidated_state(0)) {
        EXPECT_TRUE(value.eq(0).all().item<bool>()) << name;
      }
      {
        const c10::AutoGradMode no_grad(false);
        at::Tensor w = optimizer.parameters()[0];
        w.copy_(distribute_tensor(at::ones({7, 5}), mesh, layout_of(w).placements()));
      }
      EXPECT_TRUE(at::allclose(train(optimizer), wanted));
    }
  });
}

TEST(ZeroTest, StatesThatDoNotFit) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    distribute(*model, mesh);
    ZeroRedundancyOptimizer<optim::AdamW> optimizer(model->parameters(), optim::AdamWOptions());
    const auto code = [&](size_t parameter, const OptimizerState& state) {
      try {
        optimizer.set_state(parameter, state);
      } catch (const Error& error) {
        return error.status().code();
      }
      return absl::StatusCode::kOk;
    };
    using enum absl::StatusCode;
    EXPECT_EQ(code(99, {}), kOutOfRange);
    EXPECT_EQ(code(0, {{"momentum", at::ones({})}}), kNotFound);
    EXPECT_EQ(code(0, {{"exp_avg", at::ones({2, 2})}}), kInvalidArgument);
    EXPECT_EQ(code(0, {{"exp_avg", at::Tensor()}}), kInvalidArgument);
    EXPECT_EQ(code(0, {{"step", at::scalar_tensor(-1)}}), kInvalidArgument);
    EXPECT_EQ(code(0, {{"step", at::scalar_tensor(1)}}), kInvalidArgument);  // and no moments
    EXPECT_TRUE(optimizer.state(0).empty());
    const at::Tensor one = distribute_tensor(at::ones({3}), mesh, {}).requires_grad_();
    ZeroRedundancyOptimizer<optim::LBFGS> unknown({one}, optim::LBFGSOptions());
    EXPECT_THROW((void)unknown.state(0), Error);
  });
}

// With which the optimizer could not step; refused on all ranks, before anything changes.
TEST(ZeroTest, StatesWithWhichNobodyCanStep) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    using enum absl::StatusCode;
    const auto expect_refused = [&](auto& optimizer, const auto& change, const std::string& what) {
      at::Tensor weight = optimizer.parameters()[0];
      const auto step = [&] {
        weight.square().sum().backward();
        optimizer.step();
        optimizer.zero_grad();
      };
      step();
      const OptimizerState before = optimizer.consolidated_state(0);
      OptimizerState state = before;
      for (auto& [name, value] : state) {
        if (name != "step") value = value + 1;
      }
      change(state);
      try {
        optimizer.set_state(0, state);
        ADD_FAILURE() << what << ": no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), kInvalidArgument) << error.what();
        EXPECT_THAT(error.what(), HasSubstr(what));
      }
      const OptimizerState after = optimizer.consolidated_state(0);
      EXPECT_EQ(after.size(), before.size());
      for (const auto& [name, value] : before) {
        ASSERT_TRUE(after.contains(name)) << name;
        EXPECT_TRUE(at::equal(after.at(name), value)) << name;
      }
      step();
    };
    const auto parameter = [&] {
      return distribute_tensor(at::ones({7, 3}), mesh, {}).requires_grad_();
    };
    const auto without = [](const char* name) {
      return [name](OptimizerState& state) { state.erase(name); };
    };
    ZeroRedundancyOptimizer<optim::AdamW> adamw({parameter()}, optim::AdamWOptions().amsgrad(true));
    expect_refused(adamw, without("max_exp_avg_sq"), "has no 'max_exp_avg_sq'");
    ZeroRedundancyOptimizer<optim::Adam> adam({parameter()}, optim::AdamOptions().amsgrad(true));
    expect_refused(adam, without("max_exp_avg_sq"), "has no 'max_exp_avg_sq'");
    ZeroRedundancyOptimizer<optim::RMSprop> rmsprop(
        {parameter()}, optim::RMSpropOptions().centered(true).momentum(0.9));
    expect_refused(rmsprop, without("grad_avg"), "has no 'grad_avg'");
    expect_refused(rmsprop, without("momentum_buffer"), "has no 'momentum_buffer'");
    ZeroRedundancyOptimizer<optim::Adagrad> adagrad({parameter()}, optim::AdagradOptions());
    expect_refused(adagrad, [](OptimizerState& state) { state.clear(); }, "has no 'step'");
    ZeroRedundancyOptimizer<FusedOptimizer> fused({parameter()}, AdamWOptions{.lr = 0.02});
    const auto steps = [](double value) {
      return
          [value](OptimizerState& state) { state["step"] = at::scalar_tensor(value, at::kDouble); };
    };
    expect_refused(fused, steps((1 << 24) + 2), "2^24");
    // On one rank alone.
    const bool first = mesh->coordinate()[0] == 0;
    const auto only_here = [first](const auto& change) {
      return [=](OptimizerState& state) {
        if (first) change(state);
      };
    };
    expect_refused(adamw, only_here(without("max_exp_avg_sq")), first ? "has no" : "other ranks");
    expect_refused(fused, only_here(steps(0.5)), first ? "whole number" : "other ranks");
    expect_refused(fused, only_here(steps(7)), "is not the same on all ranks");
  });
}

// --- bad input -----------------------------------------------------------------------------------

void expect_error(const Mesh& dims, const std::function<void(const MeshPtr&)>& body,
                  absl::StatusCode code, const std::string& text) {
  const absl::Status status = try_on_mesh(dims, body);
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

TEST(ZeroTest, BadInput) {
  const Mesh two = {{"dp", 2}};
  using enum absl::StatusCode;
  const auto with = [](const ZeroOptions& options) {
    return [options](const MeshPtr& mesh) {
      Net model;
      distribute(*model, mesh);
      const at::Tensor before = to_local(model->bias.detach());
      try {
        const ZeroPartition partition(model->parameters(), options);
      } catch (...) {
        EXPECT_TRUE(to_local(model->bias.detach()).is_alias_of(before));
        throw;
      }
    };
  };
  expect_error(two, with({.mesh_dim = "tp"}), kNotFound, "tp");
  expect_error(two, with({.stage = 3}), kInvalidArgument, "stage is 3; wanted 1 or 2");
  expect_error(two, with({.bucket_bytes = 0}), kInvalidArgument, "bucket_bytes is 0");
  expect_error(
      two, [](const MeshPtr&) { ZeroPartition({}); }, kInvalidArgument, "there is no parameter");
  expect_error(
      two, [](const MeshPtr&) { ZeroPartition(Net()->parameters()); }, kInvalidArgument,
      "distribute their module first");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        distribute(*model, mesh);
        ZeroPartition({model->bias, at::ones({2})});
      },
      kInvalidArgument, "parameter 1 is a plain tensor");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        distribute_module(*model, mesh, {{"up.weight", {{"dp", Shard(0)}}}});
        ZeroPartition partition(model->parameters());
      },
      kInvalidArgument, "('up.weight') lies [S(0)]: wanted whole along 'dp'");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        fully_shard(*model, mesh);
        ZeroPartition partition(model->parameters());
      },
      kInvalidArgument, "is fully sharded");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        distribute(*model, mesh);
        const ZeroPartition first(model->parameters());
        const ZeroPartition second({model->bias});
      },
      kFailedPrecondition, "('bias') is in a ZeRO partition already");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        distribute(*model, mesh);
        const ZeroPartition partition(model->parameters());
        const GradSync sync(*model);
      },
      kFailedPrecondition, "is in a ZeroPartition");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        distribute(*model, mesh);
        const GradSync sync(*model);
        const ZeroPartition partition(model->parameters());
      },
      kFailedPrecondition, "is in a GradSync");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        nn::Linear model = deferred_init([] { return nn::Linear(3, 4); });
        distribute_module(*model, mesh, {});
        const ZeroPartition partition(model->parameters());
      },
      kFailedPrecondition, "materialize it first");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        distribute(*model, mesh);
        const ZeroPartition partition(model->parameters(),
                                      {.stage = mesh->coordinate()[0] == 0 ? 1 : 2});
      },
      kInvalidArgument, "is not the same on ranks 0 and 1");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        distribute(*model, mesh);
        ZeroRedundancyOptimizer<FusedOptimizer> optimizer(model->parameters(), SgdOptions{});
        model->to(at::kDouble);
        optimizer.step();
      },
      kFailedPrecondition, "was moved since");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        distribute(*model, mesh);
        ZeroRedundancyOptimizer<FusedOptimizer> optimizer(model->parameters(), SgdOptions{});
        model->scale.set_data(model->scale.detach().clone());  // which no bucket has
        optimizer.step();
      },
      kFailedPrecondition, "'scale') was moved since");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        distribute(*model, mesh);
        ZeroRedundancyOptimizer<FusedOptimizer> optimizer(model->parameters(), SgdOptions{});
        model->norm->weight.set_data(model->norm->bias.detach());  // within the bucket
        optimizer.step();
      },
      kFailedPrecondition, "'norm.weight') was moved since");
}

TEST(ZeroTest, WhatIsRefusedIsRefusedBeforeAnythingChanges) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    nn::Module module;
    for (const char* name : {"first", "second", "uneven"}) {
      module.register_parameter(name, at::arange(7 * kDim, at::kFloat).view({7, kDim}));
    }
    distribute_module(module, mesh, {{"uneven", {{"tp", RaggedShard(0, {3, 4})}}}});
    const std::vector<at::Tensor> all = module.parameters();
    const auto refuses = [&](const std::function<void()>& call) {
      const at::Tensor before = to_local(all[1].detach());
      try {
        call();
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(error.what(), HasSubstr("('uneven')"));
      }
      EXPECT_TRUE(to_local(all[1].detach()).is_alias_of(before));
    };
    refuses([&] { ZeroPartition(all, {.mesh_dim = "dp", .bucket_bytes = 1}); });
    ZeroPartition partition({all[0]}, {.mesh_dim = "dp", .bucket_bytes = 1});
    refuses([&] { partition.add({all[1], all[2]}); });
    EXPECT_EQ(partition.parameters().size(), 1U);
    EXPECT_EQ(partition.shards().size(), 1U);
    partition.add({all[1]});
    (all[0].sum() + all[1].sum()).backward();
    partition.hand_out_gradients();
    for (const at::Tensor& shard : partition.shards()) EXPECT_TRUE(shard.grad().defined());
    partition.share_parameters();
  });
  // One rank alone has something against it: all hear of it, and the mesh is as it was.
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    distribute(*model, mesh);
    {
      std::unique_ptr<GradSync> only_here;
      if (mesh->coordinate()[0] == 0) only_here = std::make_unique<GradSync>(*model);
      EXPECT_THROW(ZeroPartition(model->parameters()), Error);
    }
    EXPECT_THROW(ZeroPartition(model->parameters(), {.stage = mesh->coordinate()[0] == 0 ? 3 : 1}),
                 Error);
    const std::vector<at::Tensor> all = model->parameters();
    ZeroPartition partition({all[0]});
    std::vector<at::Tensor> rest(all.begin() + 1, all.end());
    if (mesh->coordinate()[0] == 0) rest.clear();
    EXPECT_THROW(partition.add(rest), Error);
    partition.add({all.begin() + 1, all.end()});
    EXPECT_EQ(full_tensor(ones({7, 5}, mesh, {Shard(0)})).sum().item<float>(), 35);
  });
}

// An optimizer of the whole parameters would not know what to do with a part of their gradients.
TEST(ZeroTest, AnotherOptimizerIsAnError) {
  expect_error(
      {{"dp", 2}},
      [](const MeshPtr& mesh) {
        Net model;
        distribute(*model, mesh);
        FusedOptimizer wrong(model->parameters(), SgdOptions{});
        const ZeroPartition partition(model->parameters());
        const Batch b = fed(0, mesh);
        model->loss(b.tokens, b.targets).backward();
        finish_grad_sync(*model);
        wrong.step();
      },
      absl::StatusCode::kFailedPrecondition, "its gradient");
}

// After a backward that failed on one rank, wherever it was, the next iteration is one as any.
TEST(ZeroTest, DiscardedGradientsMeetNoneOfTheNextIteration) {
  for (const Mesh& dims : {Mesh{{"dp", 2}}, {{"dp", 3}}, {{"replicas", 1}, {"dp", 2}}}) {
    for (const int stage : {1, 2}) {
      for (const int64_t bucket_bytes : {int64_t{1}, int64_t{200}, int64_t{25} << 20}) {
        for (const char* where : {"bias", "up.weight", "embed.weight"}) {
          SCOPED_TRACE(::testing::Message() << dims.back().size << " ranks, stage " << stage << ", "
                                            << bucket_bytes << " bytes, in " << where);
          const auto discards = [](int k) { return k == 0 || k == 3 || k == 4; };
          Net plain;
          optim::SGD alone(unique_parameters(*plain), optim::SGDOptions(0.1).momentum(0.9));
          for (int k = 0; k < 7; ++k) {
            if (discards(k)) continue;
            const Batch b = batch(k);
            plain->loss(b.tokens, b.targets).backward();
            alone.step();
            alone.zero_grad();
          }
          on_mesh(dims, [&](const MeshPtr& mesh) {
            Net model;
            distribute(*model, mesh);
            ZeroRedundancyOptimizer<optim::SGD> optimizer(
                model->parameters(), optim::SGDOptions(0.1).momentum(0.9),
                {.mesh_dim = "dp", .stage = stage, .bucket_bytes = bucket_bytes});
            const bool is_last = mesh->rank().value == mesh->mesh().size() - 1;
            bool fails = false;
            model->named_parameters()[where].register_hook([&](const at::Tensor& grad) {
              if (fails) throw std::runtime_error("this rank's");
              return grad;
            });
            for (int k = 0; k < 7; ++k) {
              const Batch b = fed(k, mesh);
              fails = discards(k) && is_last;
              const at::Tensor loss = model->loss(b.tokens, b.targets);
              if (fails) {
                EXPECT_THROW(loss.backward(), std::exception);
              } else {
                loss.backward();
              }
              if (discards(k)) {
                optimizer.partition().discard();
              } else {
                optimizer.step();
              }
              optimizer.zero_grad();
            }
            expect_close(values_of(*model), values_of(*plain), 1e-4);
          });
        }
      }
    }
  }
}

TEST(ZeroTest, ARankThatTakesADiscardedIterationForOneSeesIt) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor one = distribute_tensor(at::ones({4, 3}), mesh, {}).requires_grad_();
    const at::Tensor two = distribute_tensor(at::ones({4, 3}), mesh, {}).requires_grad_();
    ZeroPartition partition({one, two}, {.stage = 2, .bucket_bytes = 1});
    const bool fails = mesh->rank() == Rank(1);
    one.register_hook([&](const at::Tensor& grad) {
      if (fails) throw std::runtime_error("this rank's");
      return grad;
    });
    const at::Tensor x = distribute_tensor(at::ones({6, 4}), mesh, {{"dp", Shard(0)}});
    const at::Tensor y = at::matmul(x, one);
    const at::Tensor loss = at::matmul(y, two.t()).sum();
    if (fails) {
      EXPECT_THROW(loss.backward(), std::exception);
      partition.discard();
    } else {
      loss.backward();
      partition.hand_out_gradients();
      EXPECT_FALSE(to_local(two.grad()).isnan().any().item<bool>());  // it had left
      EXPECT_TRUE(to_local(one.grad()).isnan().all().item<bool>());
    }
  });
}

// Of gradients that are compared with nothing elsewhere: on one rank two halves, on the other one.
TEST(ZeroTest, RanksWhoseGradientsComeInOtherNumbers) {
  // Also where not all ranks of the mesh are along the dimension: nobody waits until the deadline.
  for (const int64_t replicas : {1, 2}) {
    std::atomic<int> heard = 0;
    const absl::Status first = try_on_mesh({{"dp", 2}, {"tp", replicas}}, [&](const MeshPtr& mesh) {
      const at::Tensor weight = distribute_tensor(at::ones({4, 3}), mesh, {}).requires_grad_();
      ZeroPartition partition({weight}, {.mesh_dim = "dp", .stage = 2});
      try {
        for (int step = 0; step < 4; ++step) {
          const bool in_one = step > 0 && mesh->coordinate()[0] == 1;
          for (int half = 0; half < (in_one ? 1 : 2); ++half) {
            const at::Tensor mine = to_local(weight, Placements{Partial(), Replicate()});
            (mine.square().sum() * (in_one ? 2 : 1)).backward();
          }
          partition.hand_out_gradients();
          EXPECT_TRUE(at::equal(to_local(partition.shards()[0].grad()), at::full({2, 3}, 8.0F)));
          EXPECT_EQ(step, 0);
          partition.share_parameters();
          partition.zero_grad();
        }
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition) << error.what();
        ++heard;
      }
    });
    EXPECT_TRUE(first.ok()) << first;
    EXPECT_EQ(heard, 2 * replicas);
  }
  // Where all ranks change their numbers, and not alike, the error says so.
  std::atomic<int> told = 0;
  const absl::Status second = try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const at::Tensor weight = distribute_tensor(at::ones({4, 3}), mesh, {}).requires_grad_();
    ZeroPartition partition({weight}, {.stage = 2});
    {
      const ZeroPartition::NoSync no_sync(partition);
      to_local(weight, Placements{Partial()}).square().sum().backward();
    }
    partition.hand_out_gradients();
    partition.zero_grad();
    try {
      weight.mutable_grad() = from_local(at::ones({4, 3}), mesh, {Partial()});
      for (int i = 0; i < (mesh->rank() == Rank(0) ? 2 : 3); ++i) {
        dtensor_internal::owner_of_gradient(weight)->came(0);
      }
      partition.hand_out_gradients();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(error.what(), HasSubstr("in other numbers elsewhere"));
      ++told;
    }
    // What was refused has not been learnt: the ranks go on alike.
    partition.zero_grad();
    to_local(weight, Placements{Partial()}).square().sum().backward();
    partition.hand_out_gradients();
    EXPECT_TRUE(at::equal(to_local(partition.shards()[0].grad()), at::full({2, 3}, 4.0F)));
  });
  EXPECT_TRUE(second.ok()) << second;
  EXPECT_EQ(told, 2);
}

// As when some parameters are on a CPU and others on a GPU: autograd has a thread for each device.
TEST(ZeroTest, GradientsComeOnSeveralThreads) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    constexpr size_t kParameters = 64;
    std::vector<at::Tensor> parameters;
    for (size_t i = 0; i < kParameters; ++i) {
      parameters.push_back(distribute_tensor(at::ones({3}), mesh, {}).requires_grad_());
    }
    ZeroPartition partition(parameters, {.stage = 2});
    const auto owner = dtensor_internal::owner_of_gradient(parameters[0]);
    constexpr int kRounds = 300;
    for (int round = 0; round < kRounds; ++round) {
      for (const at::Tensor& p : parameters) {
        p.mutable_grad() = from_local(at::ones({3}), mesh, {Partial()});
      }
      std::atomic<int> ready = 0;
      const auto half = [&](size_t begin) {
        const c10::AutoGradMode no_grad(false);
        ++ready;
        while (ready < 2) {
        }
        for (size_t i = begin; i < kParameters; i += 2) owner->came(i);
      };
      std::thread other(half, 1);
      half(0);
      other.join();
      ASSERT_EQ(partition.left_in_backward(), round + 1);
      partition.hand_out_gradients();
      partition.zero_grad();
    }
  });
}

TEST(ZeroTest, GradientsThatAreNoNumbersAreSeenByAll) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    distribute(*model, mesh);
    ZeroRedundancyOptimizer<FusedOptimizer> optimizer(model->parameters(), SgdOptions{.lr = 0.1},
                                                      {.stage = 2});
    const Batch b = fed(0, mesh);
    (model->loss(b.tokens, b.targets) * std::numeric_limits<float>::infinity()).backward();
    EXPECT_THROW(clip_grad_norm(model->parameters(), 1.0, 2, /*error_if_nonfinite=*/true), Error);
    optimizer.zero_grad();
    const Values before = values_of(*model);
    optimizer.step();
    expect_close(values_of(*model), before, 0);
  });
}

// Parameters keep what they have; gradients go where they went before.
TEST(ZeroTest, NothingIsLeftBehind) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    distribute(*model, mesh);
    Values values;
    {
      ZeroRedundancyOptimizer<FusedOptimizer> optimizer(model->parameters(), SgdOptions{.lr = 0.1},
                                                        {.stage = 2});
      values = train(*model, optimizer, [&](int step) { return fed(step, mesh); }, 2).values;
    }
    expect_close(values_of(*model), values, 0);
    const Batch b = fed(0, mesh);
    model->loss(b.tokens, b.targets).backward();
    finish_grad_sync(*model);
    EXPECT_EQ(layout_of(model->bias.grad()), layout_of(model->bias));
    const ZeroPartition again(model->parameters());
  });
}

}  // namespace
}  // namespace shardweave

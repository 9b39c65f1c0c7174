// Backwards that send nothing, before one that does: the gradients of one device, in one reduction for a
// unit, whatever the last backward meets.
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/activation_checkpoint.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/summon_full_params.h"
#include "shardweave/modules/testing/values.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/adamw.h"
#include "torch/script.h"

namespace shardweave {
namespace {

using testing::expect_close;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::Values;
namespace nn = torch::nn;

constexpr int64_t kDim = 5, kHidden = 7, kBatch = 8;

struct ExpertImpl : nn::Module {
  ExpertImpl() {
    up = register_module("up", nn::Linear(kDim, kHidden));
    down = register_module("down", nn::Linear(kHidden, kDim));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }
  nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Expert);

// Of its experts each batch goes through one; within an expert all of it is met.
struct ModelImpl : nn::Module {
  ModelImpl() {
    experts = register_module("experts", nn::ModuleList());
    for (int i = 0; i < 3; ++i) experts->push_back(Expert());
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kDim})));
    head = register_module("head", nn::Linear(kDim, 3));
    gate = register_parameter("gate", at::ones({kDim}));
    const c10::AutoGradMode no_grad(false);
    double k = 0;
    for (at::Tensor p : parameters()) {
      p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
    }
  }
  at::Tensor loss(const at::Tensor& x, int expert, bool with_gate = true) {
    at::Tensor y = std::dynamic_pointer_cast<ExpertImpl>(experts->ptr(expert))->forward(x);
    if (with_gate) y = y * gate;
    return head(norm(y)).square().mean();
  }
  nn::ModuleList experts{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
  at::Tensor gate;
};
TORCH_MODULE(Model);

const FullyShardOptions kUnits = {.mesh_dim = "dp", .units = {"experts.*", "head"}};
constexpr int kNumUnits = 5;  // with the rest

at::Tensor input(int step) {
  return at::cos(at::arange(kBatch * kDim, at::kFloat).view({kBatch, kDim}) * 0.3 + step);
}
at::Tensor fed(int step, const MeshPtr& mesh) {
  at::Tensor x = distribute_tensor(input(step), mesh, {{"dp", Shard(0)}});
  if (mesh->mesh().dim("replicas").ok()) x = redistribute(x, {Shard(0), Shard(0)});
  return x;
}

// The experts of a step's batches: the first is met by earlier ones alone, and the last batch goes without
// the gate, which is in a unit that it meets.
const std::vector<int> kExperts = {0, 1, 1, 2};

// `held`: what is around all but the last.
void accumulate(ModelImpl& model, const std::function<at::Tensor(int)>& feed,
                const std::function<std::shared_ptr<void>()>& held) {
  for (size_t i = 0; i < kExperts.size(); ++i) {
    const bool is_last = i + 1 == kExperts.size();
    const std::shared_ptr<void> scope = is_last ? nullptr : held();
    model.loss(feed(static_cast<int>(i)), kExperts[i], /*with_gate=*/!is_last).backward();
  }
}
std::function<std::shared_ptr<void>()> no_sync(const MeshPtr& mesh) {
  return [mesh]() -> std::shared_ptr<void> { return std::make_shared<FullyShardNoSync>(mesh); };
}
std::shared_ptr<void> nothing() {
  return nullptr;
}

Values of_one_device() {
  Model plain;
  accumulate(*plain, input, nothing);
  return gradients_of(*plain);
}

struct Sent {
  int64_t collectives = 0, bytes = 0;
};
Sent reduced_in(const CommTrace& trace) {
  Sent sent;
  for (const CommEvent& event : trace.events()) {
    if (event.collective != "reduce_scatter") continue;
    ++sent.collectives;
    sent.bytes += event.bytes;
  }
  return sent;
}

const std::vector<std::vector<MeshDim>> kMeshes = {
    {{"dp", 1}},
    {{"dp", 2}},
    {{"dp", 3}},
    {{"dp", 4}},
    {{"dp", 2}, {"tp", 2}},
    {{"replicas", 2}, {"dp", 2}},
    {{"pp", 1}, {"dp", 2}, {"tp", 2}},
};
const ParameterPlan kTensorParallel = {{"experts.*.up.*", {{"tp", Shard(0)}}},
                                       {"experts.*.down.weight", {{"tp", Shard(1)}}}};

void shard(ModelImpl& model, const MeshPtr& mesh, const FullyShardOptions& options = kUnits) {
  if (mesh->mesh().dim("tp").ok()) parallelize_module(model, mesh, {.parameter = kTensorParallel});
  EXPECT_EQ(fully_shard(model, mesh, options).size(), static_cast<size_t>(kNumUnits));
}

TEST(FullyShardNoSyncTest, GradientsAreOneDevices) {
  const Values wanted = of_one_device();
  for (const auto& dims : kMeshes) {
    SCOPED_TRACE(dims.size() * 100 + dims.back().size);
    on_mesh(dims, [&](const MeshPtr& mesh) {
      for (const bool keep : {false, true}) {
        Model model;
        FullyShardOptions options = kUnits;
        options.reshard_after_forward = !keep;
        shard(*model, mesh, options);
        for (int step = 0; step < 2; ++step) {
          accumulate(*model, [&](int i) { return fed(i, mesh); }, no_sync(mesh));
          expect_close(gradients_of(*model), wanted);
          EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
          model->zero_grad();
        }
      }
    });
  }
}

TEST(FullyShardNoSyncTest, OneReductionForAUnit) {
  for (const int64_t ranks : {2, 3}) {
    on_mesh({{"dp", ranks}}, [](const MeshPtr& mesh) {
      Model model;
      shard(*model, mesh);
      const auto feed = [&](int i) { return fed(i, mesh); };
      Sent with, without;
      {
        const CommTrace trace(mesh);
        accumulate(*model, feed, nothing);
        without = reduced_in(trace);
      }
      model->zero_grad();
      {
        const CommTrace trace(mesh);
        accumulate(*model, feed, no_sync(mesh));
        with = reduced_in(trace);
      }
      // The experts, the head, and the norm and gate; in each batch one expert, and the rest.
      EXPECT_EQ(with.collectives, kNumUnits + 1);  // the gate is met by earlier batches alone
      EXPECT_EQ(without.collectives, 4 * 3);
      EXPECT_LT(with.bytes, without.bytes);
    });
  }
}

TEST(FullyShardNoSyncTest, NothingIsSentInTheScope) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Model model;
    shard(*model, mesh);
    const at::Tensor first = fed(0, mesh), second = fed(1, mesh);
    const CommTrace trace(mesh);
    {
      const FullyShardNoSync outer(mesh);
      {
        const FullyShardNoSync inner(mesh);
        model->loss(first, 0).backward();
      }
      model->loss(second, 0).backward();
    }
    for (const CommEvent& event : trace.events()) EXPECT_EQ(event.collective, "all_gather");
    EXPECT_TRUE(layout_of(model->gate.grad())[0].is_partial());
    EXPECT_EQ(fully_shard_counters(mesh).reduce_scatters, 0);
    model->zero_grad();
    // What was zeroed is gone.
    model->loss(fed(2, mesh), 1).backward();
    Model plain;
    plain->loss(input(2), 1).backward();
    expect_close(gradients_of(*model), gradients_of(*plain));
  });
}

TEST(FullyShardNoSyncTest, FinishGradSyncSendsWhatIsLeft) {
  Model plain;
  for (int i = 0; i < 3; ++i) plain->loss(input(i), i % 2).backward();
  const Values wanted = gradients_of(*plain);
  for (const auto& dims : kMeshes) {
    SCOPED_TRACE(dims.size() * 100 + dims.back().size);
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Model model;
      shard(*model, mesh);
      FusedOptimizer optimizer(model->parameters(), AdamWOptions{});
      {
        const FullyShardNoSync held(mesh);
        for (int i = 0; i < 3; ++i) model->loss(fed(i, mesh), i % 2).backward();
      }
      try {
        optimizer.step();
        ADD_FAILURE() << "stepped with gradients that are not reduced";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("finish_grad_sync() does that"));
      }
      const CommTrace trace(mesh);
      finish_grad_sync(*model);
      expect_close(gradients_of(*model), wanted);
      const int64_t reductions = reduced_in(trace).collectives;
      EXPECT_EQ(reductions, mesh->mesh().size(*mesh->mesh().dim("dp")) == 1 ? 0 : 4);
      optimizer.step();
    });
  }
}

TEST(FullyShardNoSyncTest, TrainsAsOneDevice) {
  const auto train = [](ModelImpl& model, const std::function<at::Tensor(int)>& feed,
                        const std::function<std::shared_ptr<void>()>& held) {
    torch::optim::AdamW optimizer(unique_parameters(model), torch::optim::AdamWOptions(0.02));
    for (int step = 0; step < 5; ++step) {
      accumulate(model, [&](int i) { return feed(i + step); }, held);
      clip_grad_norm(model.parameters(), 0.05);
      optimizer.step();
      optimizer.zero_grad();
    }
    Values values;
    const c10::AutoGradMode no_grad(false);
    for (const auto& item : model.named_parameters()) {
      const at::Tensor& p = item.value();
      values[item.key()] = (is_dtensor(p) ? full_tensor(p) : p).detach().clone();
    }
    return values;
  };
  Model plain;
  const Values wanted = train(*plain, input, nothing);
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Model model;
      shard(*model, mesh);
      expect_close(train(*model, [&](int i) { return fed(i, mesh); }, no_sync(mesh)), wanted, 1e-3);
    });
  }
}

// Sums of several backwards are of the resting dtype: as exact as one device's, where each batch's
// gradient is of 16 bits.
TEST(FullyShardNoSyncTest, MixedPrecision) {
  const Values wanted = of_one_device();
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    for (const at::ScalarType reduced : {at::kFloat, at::kBFloat16}) {
      Model model;
      FullyShardOptions options = kUnits;
      options.param_dtype = at::kBFloat16;
      options.reduce_dtype = reduced;
      shard(*model, mesh, options);
      const int64_t before = fully_shard_counters(mesh).reduce_scatters;
      const CommTrace trace(mesh);
      accumulate(*model, [&](int i) { return fed(i, mesh); }, no_sync(mesh));
      expect_close(gradients_of(*model), wanted, 0.03);
      EXPECT_EQ(reduced_in(trace).collectives, kNumUnits + 1);
      // As a unit's own, which go on while backward does.
      EXPECT_EQ(fully_shard_counters(mesh).reduce_scatters - before, kNumUnits + 1);
      for (const CommEvent& event : trace.events()) {
        if (event.collective == "reduce_scatter") {
          EXPECT_EQ(event.dtype, reduced);
        }
      }
    }
  });
}

TEST(FullyShardNoSyncTest, AfterABackwardThatHasSent) {
  Model plain;
  for (int i = 0; i < 3; ++i) plain->loss(input(i), 0).backward();
  const Values wanted = gradients_of(*plain);
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    Model model;
    shard(*model, mesh);
    model->loss(fed(0, mesh), 0).backward();
    {
      const FullyShardNoSync held(mesh);
      model->loss(fed(1, mesh), 0).backward();
    }
    model->loss(fed(2, mesh), 0).backward();
    expect_close(gradients_of(*model), wanted);
  });
}

// autograd::grad() has nothing to do with what is held, and holds nothing.
TEST(FullyShardNoSyncTest, GradientsThatAreAskedFor) {
  Model plain;
  plain->loss(input(0), 0).backward();
  const Values held = gradients_of(*plain);
  const auto asked = [](ModelImpl& model, const at::Tensor& x) {
    return torch::autograd::grad({model.loss(x, 0)}, {model.gate, model.head->weight});
  };
  const auto wanted = asked(*plain, input(1));
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model;
    shard(*model, mesh);
    const auto expect_wanted = [&] {
      const auto got = asked(*model, fed(1, mesh));
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(at::allclose(full_tensor(got[i]), wanted[i], 1e-5, 1e-5)) << i;
      }
      EXPECT_EQ(layout_of(got[0]), layout_of(model->gate));
      EXPECT_EQ(layout_of(got[1]), layout_of(model->head->weight));
    };
    {
      const FullyShardNoSync scope(mesh);
      model->loss(fed(0, mesh), 0).backward();
      expect_wanted();
    }
    expect_wanted();
    EXPECT_TRUE(layout_of(model->gate.grad())[0].is_partial());  // as it was
    EXPECT_TRUE(layout_of(model->experts->parameters()[0].grad())[0].is_partial());
    finish_grad_sync(*model);
    expect_close(gradients_of(*model), held);
  });
}

TEST(FullyShardNoSyncTest, BackwardOfGivenInputs) {
  Model plain;
  plain->loss(input(0), 0).backward();
  torch::autograd::backward({plain->loss(input(1), 0)}, {}, {}, false, {plain->gate});
  const Values wanted = gradients_of(*plain);
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model;
    shard(*model, mesh);
    {
      const FullyShardNoSync scope(mesh);
      model->loss(fed(0, mesh), 0).backward();
    }
    torch::autograd::backward({model->loss(fed(1, mesh), 0)}, {}, {}, false, {model->gate});
    expect_close(gradients_of(*model), wanted);
  });
}

TEST(FullyShardNoSyncTest, CheckpointsGraphsThatAreKeptAndTwoForwards) {
  const auto program = [](ModelImpl& model, const std::function<at::Tensor(int)>& feed,
                          const std::function<std::shared_ptr<void>()>& held) {
    const auto expert = [&](int e, const at::Tensor& x) {
      auto module = std::dynamic_pointer_cast<ExpertImpl>(model.experts->ptr(e));
      return checkpoint([module](const at::Tensor& in) { return module->forward(in); }, x);
    };
    {
      const auto scope = held();
      model.head(expert(0, expert(1, feed(0)))).square().mean().backward();
      const at::Tensor a = model.loss(feed(1), 1), b = model.loss(feed(2), 2);
      (a * b).backward({}, /*keep_graph=*/true);
      (a * b).backward();
    }
    model.head(expert(2, feed(3))).square().mean().backward();
  };
  Model plain;
  program(*plain, input, nothing);
  const Values wanted = gradients_of(*plain);
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model;
    shard(*model, mesh);
    program(*model, [&](int i) { return fed(i, mesh); }, no_sync(mesh));
    expect_close(gradients_of(*model), wanted);
    EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
  });
}

// What comes as one number for all elements, and one gradient that is two parameters'.
// The backward within a checkpoint's is not the last one's end, also where it is the first to come, and
// meets what is full.
TEST(FullyShardNoSyncTest, ACheckpointAtTheEnd) {
  const auto run = [](ModelImpl& model, const std::function<at::Tensor(int)>& feed,
                      const std::function<std::shared_ptr<void>()>& held) {
    for (int i = 0; i < 3; ++i) {
      const std::shared_ptr<void> scope = i == 2 ? nullptr : held();
      const at::Tensor x = feed(i);
      at::Tensor y = std::dynamic_pointer_cast<ExpertImpl>(model.experts->ptr(0))->forward(x);
      y = model.norm(y * model.gate);
      checkpoint([&](const at::Tensor& in) { return model.head(in).square().mean(); }, y)
          .backward();
    }
  };
  Model plain;
  run(*plain, input, nothing);
  const Values wanted = gradients_of(*plain);
  for (const int64_t ranks : {2, 3}) {
    on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
      Model model;
      shard(*model, mesh);
      const CommTrace trace(mesh);
      run(*model, [&](int i) { return fed(i, mesh); }, no_sync(mesh));
      EXPECT_EQ(reduced_in(trace).collectives, 3);  // an expert, the head, and the rest
      expect_close(gradients_of(*model), wanted);
    });
  }
}

TEST(FullyShardNoSyncTest, GradientsThatShareMemory) {
  struct Two : nn::Module {
    Two() {
      a = register_parameter("a", at::ones({6, 2}));
      b = register_parameter("b", at::ones({6, 2}) * 2);
    }
    at::Tensor loss(const at::Tensor& x) { return (a + b).sum() + (x * 2).sum() * (a * 3).sum(); }
    at::Tensor a, b;
  };
  const auto x = [](int i) { return at::arange(6, at::kFloat) + i; };
  Two plain;
  for (int i = 0; i < 3; ++i) plain.loss(x(i)).backward();
  const Values wanted = gradients_of(plain);
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Two model;
    fully_shard(model, mesh);
    for (int i = 0; i < 3; ++i) {
      const auto scope = i == 2 ? nullptr : std::make_unique<FullyShardNoSync>(mesh);
      model.loss(distribute_tensor(x(i), mesh, {{"dp", Shard(0)}})).backward();
    }
    expect_close(gradients_of(model), wanted);
  });
}

// Two gradients that are views of one memory, to which autograd adds in place.
TEST(FullyShardNoSyncTest, GradientsThatAreViewsOfOneMemory) {
  struct Two : nn::Module {
    Two() {
      a = register_parameter("a", at::ones({3, 4}));
      b = register_parameter("b", at::ones({4, 3}) * 2);
    }
    at::Tensor loss(const at::Tensor& x) { return ((a.view({-1}) + b.view({-1})).sin() * x).sum(); }
    at::Tensor a, b;
  };
  const auto x = [](int i) { return at::arange(12, at::kFloat) + i; };
  at::Tensor wanted = at::zeros({12});
  for (int i = 0; i < 3; ++i) wanted += at::full({12}, 3.0).cos() * x(i);
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Two model;
    fully_shard(model, mesh);
    for (int i = 0; i < 3; ++i) {
      const auto scope = i == 2 ? nullptr : std::make_unique<FullyShardNoSync>(mesh);
      model.loss(distribute_tensor(x(i), mesh, {{"dp", Shard(0)}})).backward();
    }
    EXPECT_TRUE(at::allclose(full_tensor(model.a.grad()).view({-1}), wanted, 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(full_tensor(model.b.grad()).view({-1}), wanted, 1e-5, 1e-5));
  });
}

TEST(FullyShardNoSyncTest, TorchScript) {
  const auto make = [] {
    torch::jit::Module module("m");
    module.register_parameter("a",
                              at::sin(at::arange(35, at::kFloat)).view({7, 5}).requires_grad_(),
                              /*is_buffer=*/false);
    module.register_parameter("b", at::ones({7}).requires_grad_(), /*is_buffer=*/false);
    module.define(R"(
      def forward(self, x):
          return torch.tanh(torch.linear(x, self.a, self.b)).square().mean()
    )");
    return module;
  };
  struct Holder : nn::Module {
    explicit Holder(const torch::jit::Module& script) {
      for (const auto& p : script.named_parameters()) register_parameter(p.name, p.value);
    }
  };
  torch::jit::Module plain = make();
  const Holder plain_parameters(plain);
  for (int i = 0; i < 8; ++i) plain.forward({input(i)}).toTensor().backward();
  const Values wanted = gradients_of(plain_parameters);
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    torch::jit::Module script = make();
    Holder parameters(script);
    fully_shard(parameters, mesh);
    for (int i = 0; i < 8; ++i) {  // the executor profiles the first
      const auto scope = i == 7 ? nullptr : std::make_unique<FullyShardNoSync>(mesh);
      script.forward({fed(i, mesh)}).toTensor().backward();
    }
    expect_close(gradients_of(parameters), wanted);
  });
}

// Whoever looks at a model in between finds its gradients, and they are not lost.
TEST(FullyShardNoSyncTest, ParametersThatAreSummonedInBetween) {
  const Values wanted = of_one_device();
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model;
    shard(*model, mesh);
    for (size_t i = 0; i < kExperts.size(); ++i) {
      const bool is_last = i + 1 == kExperts.size();
      const auto scope = is_last ? nullptr : std::make_unique<FullyShardNoSync>(mesh);
      model->loss(fed(static_cast<int>(i), mesh), kExperts[i], !is_last).backward();
      const FullParams whole(*model, {.writeback = false});
      EXPECT_TRUE(whole.parameter("gate").defined());
    }
    expect_close(gradients_of(*model), wanted);
  });
}

// A unit that the last backward finds full, on one rank and where the batch is not cut: what another
// unit has held is sent all the same.
TEST(FullyShardNoSyncTest, ALastBackwardThatSendsNothingItself) {
  struct Two : nn::Module {
    Two() {
      a = register_module("a", nn::Linear(kDim, 3));
      b = register_module("b", nn::Linear(kDim, 3));
      const c10::AutoGradMode no_grad(false);
      for (at::Tensor p : parameters()) p.fill_(0.5);
    }
    nn::Linear a{nullptr}, b{nullptr};
  };
  Two plain;
  plain.a(input(0)).square().sum().backward();
  plain.b(input(1)).square().sum().backward();
  const Values wanted = gradients_of(plain);
  for (const int64_t ranks : {1, 2}) {
    on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
      Two model;
      fully_shard(model, mesh, {.units = {"a", "b"}});
      const auto whole = [&](int i) { return distribute_tensor(input(i), mesh, {Replicate()}); };
      {
        const FullyShardNoSync scope(mesh);
        model.a(whole(0)).square().sum().backward();
      }
      model.b(whole(1)).square().sum().backward();
      expect_close(gradients_of(model), wanted);
    });
  }
}

// A hook sees each gradient once, as on one device.
TEST(FullyShardNoSyncTest, HooksOfParameters) {
  const auto hooked = [](ModelImpl& model) {
    model.gate.register_hook([](const at::Tensor& g) { return g * 0.5; });
    model.head->weight.register_hook([](const at::Tensor& g) { return g.clamp(-0.05, 0.05); });
  };
  Model plain;
  hooked(*plain);
  accumulate(*plain, input, nothing);
  const Values wanted = gradients_of(*plain);
  for (const int64_t ranks : {1, 2, 3}) {
    on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
      Model model;
      shard(*model, mesh);
      hooked(*model);
      accumulate(*model, [&](int i) { return fed(i, mesh); }, no_sync(mesh));
      expect_close(gradients_of(*model), wanted);
    });
  }
}

// What was held is there still when the last backward fails, and its repetition sends it.
TEST(FullyShardNoSyncTest, ALastBackwardThatFails) {
  const auto program = [](ModelImpl& model, const std::function<at::Tensor(int)>& feed,
                          const std::function<std::shared_ptr<void>()>& held) {
    {
      const auto scope = held();
      for (int i = 0; i < 2; ++i) model.loss(feed(i), 0).backward();
    }
    at::Tensor x = feed(2).detach().requires_grad_();
    x.register_hook([](const at::Tensor&) -> at::Tensor {
      throw std::runtime_error("the last node");  // behind the expert that it has gone through
    });
    EXPECT_THROW(model.loss(x, 1).backward(), std::runtime_error);
    model.experts->zero_grad();  // what the failed one has added to
    model.norm->zero_grad();
    model.head->zero_grad();
    model.gate.mutable_grad().reset();
    {
      const auto scope = held();
      for (int i = 0; i < 2; ++i) model.loss(feed(i), 0).backward();
    }
    const size_t refusing = model.gate.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the gate"); });
    EXPECT_THROW(model.loss(feed(2), 0).backward(), std::runtime_error);
    model.gate.remove_hook(static_cast<unsigned>(refusing));
    model.loss(feed(2), 0).backward();
  };
  Model plain;
  program(*plain, input, nothing);
  const at::Tensor wanted = plain->gate.grad();
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model;
    shard(*model, mesh);
    program(*model, [&](int i) { return fed(i, mesh); }, no_sync(mesh));
    EXPECT_TRUE(at::allclose(full_tensor(model->gate.grad()), wanted, 1e-5, 1e-5));
  });
}

// What a program keeps, gives back and sets itself.
TEST(FullyShardNoSyncTest, GradientsThatArePutAsideAndSet) {
  Model plain;
  for (const int i : {0, 2}) plain->loss(input(i), 0).backward();
  const Values wanted = gradients_of(*plain);
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model;
    shard(*model, mesh);
    {
      const FullyShardNoSync scope(mesh);
      model->loss(fed(0, mesh), 0).backward();
    }
    std::vector<at::Tensor> aside;
    for (at::Tensor& p : model->parameters()) aside.push_back(std::exchange(p.mutable_grad(), {}));
    model->loss(fed(1, mesh), 0).backward();
    for (size_t i = 0; i < aside.size(); ++i) model->parameters()[i].mutable_grad() = aside[i];
    model->loss(fed(2, mesh), 0).backward();
    expect_close(gradients_of(*model), wanted);
    // One that is whole on every rank counts once.
    model->zero_grad();
    model->loss(fed(2, mesh), 0).backward();
    const at::Tensor once = full_tensor(model->gate.grad());
    model->zero_grad();
    model->gate.mutable_grad() = distribute_tensor(at::ones({kDim}), mesh, {Replicate()});
    model->loss(fed(2, mesh), 0).backward();
    EXPECT_TRUE(at::allclose(full_tensor(model->gate.grad()), once + 1, 1e-5, 1e-5));
    EXPECT_EQ(layout_of(model->gate.grad()), layout_of(model->gate));
  });
}

TEST(FullyShardNoSyncTest, CopiesOfHandles) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const auto program = [](ModelImpl& model, const at::Tensor& gate,
                            const std::function<at::Tensor(int)>& feed,
                            int i) { model.head(feed(i) * gate).square().mean().backward(); };
    Model plain, model;
    shard(*model, mesh);
    const at::Tensor of_plain = plain->gate.detach().requires_grad_();
    const at::Tensor copy = model->gate.detach().requires_grad_();
    for (int i = 0; i < 3; ++i) {
      program(*plain, of_plain, input, i);
      const auto scope = i == 2 ? nullptr : std::make_unique<FullyShardNoSync>(mesh);
      program(*model, copy, [&](int k) { return fed(k, mesh); }, i);
    }
    EXPECT_TRUE(at::allclose(full_tensor(copy.grad()), of_plain.grad(), 1e-5, 1e-5));
    EXPECT_EQ(layout_of(copy.grad()), layout_of(model->gate));
  });
}

// Where gradients rest already, each backward brings its own as without the scope, a unit's together.
TEST(FullyShardNoSyncTest, GradientsThatRestAlready) {
  on_mesh({{"dp", 3}}, [](const MeshPtr& mesh) {
    Model model, plain;
    shard(*model, mesh);
    for (int i = 0; i < 3; ++i) plain->loss(input(i), 0).backward();
    model->loss(fed(0, mesh), 0).backward();
    const at::Tensor second = fed(1, mesh);
    {
      const FullyShardNoSync scope(mesh);
      const CommTrace trace(mesh);
      model->loss(second, 0).backward();
      EXPECT_EQ(reduced_in(trace).collectives, 3);  // the expert, the head, the rest
    }
    model->loss(fed(2, mesh), 0).backward();
    expect_close(gradients_of(*model), gradients_of(*plain));
  });
}

TEST(FullyShardNoSyncTest, GradientsWithAGraph) {
  const auto program = [](ModelImpl& model, const std::function<at::Tensor(int)>& feed,
                          const std::function<std::shared_ptr<void>()>& held) {
    {
      const auto scope = held();
      model.loss(feed(0), 0).backward();
      model.loss(feed(1), 0).backward({}, /*keep_graph=*/true, /*create_graph=*/true);
    }
    model.loss(feed(2), 0).backward();
  };
  Model plain;
  program(*plain, input, nothing);
  const Values wanted = gradients_of(*plain);
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model;
    shard(*model, mesh);
    program(*model, [&](int i) { return fed(i, mesh); }, no_sync(mesh));
    finish_grad_sync(*model);
    expect_close(gradients_of(*model), wanted);
    model->zero_grad();
  });
}

TEST(FullyShardNoSyncTest, AMeshOfNoUnits) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    try {
      const FullyShardNoSync scope(mesh);
      ADD_FAILURE() << "there is nothing to hold";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(error.what(), HasSubstr("no module on this mesh is fully sharded"));
    }
  });
}

}  // namespace
}  // namespace shardweave

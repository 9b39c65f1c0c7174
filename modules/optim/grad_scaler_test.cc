// Every rank decides alike, whichever has found a number that is not finite.
#include "shardweave/modules/optim/grad_scaler.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/zero.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;

at::Tensor with_gradient(at::Tensor parameter, at::Tensor grad) {
  parameter.requires_grad_();
  parameter.mutable_grad() = std::move(grad);
  return parameter;
}

// torch.amp.GradScaler's numbers.
TEST(GradScalerTest, GrowsAndBacksOff) {
  GradScaler scaler({.init_scale = 8, .growth_interval = 2});
  const at::Tensor w = with_gradient(at::zeros({2}), at::Tensor());
  const auto step = [&](double value) {
    w.mutable_grad() = at::full({2}, value);
    const bool is_finite = scaler.unscale({w});
    scaler.update();
    return is_finite;
  };
  EXPECT_TRUE(step(8));
  EXPECT_TRUE(at::equal(w.grad(), at::ones({2})));
  EXPECT_EQ(scaler.growth_tracker(), 1);
  EXPECT_EQ(scaler.scale(), 8);
  EXPECT_TRUE(step(1));
  EXPECT_EQ(scaler.scale(), 16);
  EXPECT_EQ(scaler.growth_tracker(), 0);
  EXPECT_TRUE(step(1));
  EXPECT_FALSE(step(INFINITY));
  EXPECT_EQ(scaler.scale(), 8);
  EXPECT_EQ(scaler.growth_tracker(), 0);
  EXPECT_FALSE(step(std::nan("")));
  EXPECT_EQ(scaler.scale(), 4);
  scaler.set_state(0.5, 1);
  EXPECT_TRUE(step(1));
  EXPECT_TRUE(at::equal(w.grad(), at::full({2}, 2.0)));
  EXPECT_EQ(scaler.scale(), 1);
  EXPECT_EQ(scaler.scale(at::full({}, 3.0)).item<float>(), 3);
  // Neither end of the numbers is fallen off.
  scaler.set_state(std::ldexp(1, 127), 1);
  step(1);
  EXPECT_EQ(scaler.scale(), std::ldexp(1, 127));
  scaler.set_state(std::numeric_limits<float>::min(), 0);
  step(INFINITY);
  EXPECT_GT(scaler.scale(), 0);
  EXPECT_TRUE(step(0));
}

// A parameter that has gone is no other one that lies where it did.
TEST(GradScalerTest, ParametersThatCome) {
  GradScaler scaler({.init_scale = 8});
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(scaler.unscale({with_gradient(at::zeros({2}), at::full({2}, 8.0))})) << i;
  }
}

// On one rank only, wherever it is, also of what others have the same of.
TEST(GradScalerTest, WhatOneRankFindsAllKnow) {
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"x", 2}}, {{"x", 3}}, {{"x", 2}, {"y", 2}}, {{"x", 8}}}) {
    int ranks = 1;
    for (const MeshDim& dim : dims) ranks *= static_cast<int>(dim.size);
    on_mesh(dims, [&](const MeshPtr& mesh) {
      for (const Placements& p : testing::all_layouts(mesh->mesh().ndim(), 2, false)) {
        for (int bad = -1; bad < ranks; ++bad) {
          const at::Tensor a = with_gradient(zeros({7, 5}, mesh, p), ones({7, 5}, mesh, p));
          const at::Tensor b = with_gradient(zeros({3}, mesh, Placements(dims.size())),
                                             ones({3}, mesh, Placements(dims.size())));
          const bool is_bad = mesh->rank().value == bad;
          at::Tensor part = to_local(a.grad());
          const bool has_any = part.numel() > 0;
          if (is_bad) (has_any ? part : to_local(b.grad())).view(-1)[0].fill_(INFINITY);
          GradScaler scaler({.init_scale = 4});
          EXPECT_EQ(scaler.unscale({a, b}), bad < 0) << to_string(p) << ", rank " << bad;
          scaler.update();
          EXPECT_EQ(scaler.scale(), bad < 0 ? 4 : 2);
          if (bad < 0) {
            EXPECT_TRUE(at::equal(full_tensor(a.grad()), at::full({7, 5}, 0.25)));
          }
        }
      }
    });
  }
}

TEST(GradScalerTest, OnSeveralMeshesWithPlainOnesAndOf16Bits) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const MeshPtr x = *mesh->slice({"x"}), y = *mesh->slice({"y"});
    for (int bad = -1; bad < 12; ++bad) {  // which of three, on which rank
      const auto grad = [](const at::Tensor& parameter, at::ScalarType dtype) {
        return at::ones_like(parameter, dtype);
      };
      at::Tensor a = zeros({4, 3}, x, {Shard(0)}).to(at::kHalf);
      a = with_gradient(a.detach(), grad(a, at::kHalf));
      at::Tensor b = zeros({4, 3}, y, {Shard(1)}).to(at::kBFloat16);
      b = with_gradient(b.detach(), grad(b, at::kBFloat16));
      const at::Tensor c = with_gradient(at::zeros({3}), at::ones({3}));
      if (bad >= 0 && mesh->rank().value == bad % 4) {
        const at::Tensor which[] = {to_local(a.grad()), to_local(b.grad()), c.grad()};
        which[bad / 4].view(-1)[0].fill_(std::nan(""));
      }
      GradScaler scaler({.init_scale = 2});
      CommTrace trace(x);
      EXPECT_EQ(scaler.unscale({a, b, c, c}), bad < 0) << bad;
      if (bad < 0) {
        EXPECT_TRUE(at::equal(c.grad(), at::full({3}, 0.5)));
        EXPECT_EQ(a.grad().scalar_type(), at::kHalf);
        EXPECT_TRUE(at::equal(full_tensor(a.grad()), at::full({4, 3}, 0.5, at::kHalf)));
      }
    }
  });
}

TEST(GradScalerTest, SendsOneNumberForAllGradients) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < 30; ++i) {
      const Placements layouts[] = {{Shard(0), Replicate()},
                                    {Replicate(), Shard(0)},
                                    {Shard(0), Shard(1)},
                                    {Replicate(), Replicate()}};
      parameters.push_back(with_gradient(zeros({4, 4 + i % 7}, mesh, layouts[i % 4]),
                                         ones({4, 4 + i % 7}, mesh, layouts[i % 4])));
    }
    const auto version = parameters[0].grad()._version();
    const at::Tensor view = parameters[0].grad().view({16});
    GradScaler scaler({.init_scale = 2});
    const DispatchCounters before = dispatch_counters(mesh);
    CommTrace trace(mesh);
    EXPECT_TRUE(scaler.unscale(parameters));
    EXPECT_EQ(trace.events().size(), 1u);
    EXPECT_EQ(dispatch_counters(mesh).operators, before.operators);
    EXPECT_GT(parameters[0].grad()._version(), version);
    EXPECT_TRUE(at::equal(full_tensor(view), at::full({16}, 0.5)));
  });
}

template <typename F>
void expect_error(F f, absl::StatusCode code, const std::string& part) {
  try {
    f();
    ADD_FAILURE() << "took it: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), code);
    EXPECT_THAT(std::string(error.what_without_backtrace()), HasSubstr(part));
  }
}

TEST(GradScalerTest, RefusesBeforeAnythingChanges) {
  constexpr auto kState = absl::StatusCode::kFailedPrecondition;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    const at::Tensor a = with_gradient(zeros({4}, mesh, {Shard(0)}), ones({4}, mesh, {Shard(0)}));
    const at::Tensor b = with_gradient(zeros({4}, mesh, {Replicate()}),
                                       from_local(at::ones({4}), mesh, {Partial()}));
    GradScaler scaler({.init_scale = 2});
    expect_error([&] { scaler.update(); }, kState, "nothing was unscaled since");
    expect_error([&] { scaler.unscale({a, b}); }, kState,
                 "the gradient of parameter 1 lies [P(sum)]; the gradients are to be synchronized "
                 "before the step (finish_grad_sync() does that)");
    EXPECT_TRUE(at::equal(full_tensor(a.grad()), at::ones({4})));
    EXPECT_TRUE(scaler.unscale({a}));
    expect_error([&] { scaler.unscale({a}); }, kState,
                 "the gradient of parameter 0 has been unscaled already");
    scaler.update();
    EXPECT_TRUE(scaler.unscale({a}));
  });
  const at::Tensor sparse = with_gradient(at::zeros({4}), at::ones({4}).to_sparse());
  expect_error([&] { GradScaler().unscale({sparse}); }, kState, "has a sparse gradient");
  expect_error([] { GradScaler().unscale({at::Tensor()}); }, kInvalid, "parameter 0 is undefined");
  expect_error([] { (void)GradScaler().scale(at::Tensor()); }, kInvalid, "the loss is undefined");
  expect_error([] { GradScaler({.init_scale = 0}); }, kInvalid, "init_scale is 0");
  expect_error([] { GradScaler({.init_scale = HUGE_VAL}); }, kInvalid, "init_scale is inf");
  expect_error([] { GradScaler({.growth_factor = 1}); }, kInvalid, "growth_factor is 1");
  expect_error([] { GradScaler({.backoff_factor = 1}); }, kInvalid, "backoff_factor is 1");
  expect_error([] { GradScaler({.growth_interval = 0}); }, kInvalid, "growth_interval is 0");
  expect_error([] { GradScaler().set_state(-1, 0); }, kInvalid, "scale is -1");
  expect_error([] { GradScaler().set_state(1, -1); }, kInvalid, "growth_tracker is -1");
}

TEST(GradScalerTest, WhatOneRankRefusesAllRefuse) {
  enum class What { kSparse, kUndefined, kInteger };
  for (const std::vector<MeshDim>& dims : {std::vector<MeshDim>{{"x", 3}}, {{"x", 2}, {"y", 2}}}) {
    for (const What what : {What::kSparse, What::kUndefined, What::kInteger}) {
      on_mesh(dims, [&](const MeshPtr& mesh) {
        const MeshPtr other = dims.size() == 1 ? mesh : *mesh->slice({"y"});
        const Placements rows(dims.size(), Shard(0));
        const at::Tensor a = with_gradient(zeros({8}, mesh, rows), ones({8}, mesh, rows));
        const at::Tensor b =
            with_gradient(zeros({4}, other, {Shard(0)}), ones({4}, other, {Shard(0)}));
        at::Tensor c = with_gradient(at::zeros({4}), at::ones({4}));
        const bool is_one = mesh->rank().value == 1;
        if (is_one && what == What::kSparse) c.mutable_grad() = at::ones({4}).to_sparse();
        if (is_one && what == What::kInteger) {
          c = at::zeros({4});
          c.mutable_grad() = at::ones({4}, at::kInt);
        }
        const at::Tensor given = is_one && what == What::kUndefined ? at::Tensor() : c;
        // What no scale brings back once it is divided.
        const at::Tensor tiny = with_gradient(at::zeros({4}), at::full({4}, 1e-42));
        const at::Tensor half = at::zeros({4}, at::kHalf);
        half.mutable_grad() = at::full({4}, 1e-3, at::kHalf);
        EXPECT_THROW(GradScaler({.init_scale = 3e8}).unscale({tiny, half, a, given, b}), Error);
        EXPECT_TRUE(at::equal(tiny.grad(), at::full({4}, 1e-42)));
        EXPECT_TRUE(at::equal(half.grad(), at::full({4}, 1e-3, at::kHalf)));
        GradScaler scaler({.init_scale = 4});
        try {
          scaler.unscale({a, given, b});
          ADD_FAILURE() << "no error on rank " << mesh->rank().value;
        } catch (const Error& error) {
          const char* const own[] = {"parameter 1 has a sparse gradient",
                                     "parameter 1 is undefined",
                                     "parameter 1 has a gradient of type Int"};
          EXPECT_THAT(std::string(error.what_without_backtrace()),
                      HasSubstr(is_one ? own[static_cast<int>(what)] : "refused on another rank"));
        }
        // As if nothing had been, and the communicators are as before.
        EXPECT_TRUE(to_local(a.grad()).eq(1).all().item<bool>());
        EXPECT_TRUE(to_local(b.grad()).eq(1).all().item<bool>());
        if (!is_one) {
          EXPECT_TRUE(c.grad().eq(1).all().item<bool>());
        }
        EXPECT_THROW(scaler.update(), Error);
        EXPECT_TRUE(scaler.unscale({a, b}));
        EXPECT_TRUE(at::equal(full_tensor(a.grad()), at::full({8}, 0.25)));
        scaler.update();
      });
    }
  }
}

TEST(GradScalerTest, AStateThatIsSetBeginsAnew) {
  const at::Tensor a = with_gradient(at::zeros({2}), at::full({2}, INFINITY));
  GradScaler scaler;
  EXPECT_FALSE(scaler.unscale({a}));
  scaler.set_state(8, 0);
  a.mutable_grad() = at::ones({2});
  EXPECT_TRUE(scaler.unscale({a}));  // which has not been, since
  EXPECT_EQ(scaler.update(), 1);     // and what was found before counts no more
}

// A step is skipped on all ranks or on none, and what follows is what one device does: in training,
// with FSDP and with ZeRO.
struct NetImpl : nn::Module {
  NetImpl() {
    up = register_module("up", nn::Linear(5, 7));
    down = register_module("down", nn::Linear(7, 3));
    const c10::AutoGradMode no_grad(false);
    double k = 0;
    for (at::Tensor p : parameters()) {
      p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
    }
  }
  at::Tensor loss(const at::Tensor& x) { return down(at::tanh(up(x))).square().sum(); }
  nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Net);

// One row is not finite in two of the steps: of one rank's part of the batch.
at::Tensor batch(int step) {
  at::Tensor x = at::cos(at::arange(7 * 5, at::kFloat) * (1 + 0.3 * step)).view({7, 5});
  if (step % 4 == 1) x[6][2].fill_(INFINITY);
  return x;
}

template <typename Optimizer>
std::vector<at::Tensor> trained(Net model, Optimizer& optimizer, const MeshPtr& mesh,
                                int* skipped) {
  GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
  for (int s = 0; s < 8; ++s) {
    at::Tensor x = batch(s);
    if (mesh != nullptr) x = distribute_tensor(x, mesh, {{"dp", Shard(0)}});
    scaler.scale(model->loss(x)).backward();
    if (mesh != nullptr) finish_grad_sync(*model);
    if (scaler.unscale(model->parameters())) {
      clip_grad_norm(model->parameters(), 1.0);
      optimizer.step();
    } else {
      ++*skipped;
    }
    scaler.update();
    optimizer.zero_grad();
  }
  std::vector<at::Tensor> values;
  for (const at::Tensor& p : model->parameters()) {
    values.push_back((mesh == nullptr ? p.detach() : full_tensor(p.detach())).clone());
  }
  EXPECT_EQ(scaler.scale(), 1024);  // twice halved, and doubled as often
  return values;
}

TEST(GradScalerTest, TrainsAsOneDevice) {
  Net plain;
  FusedOptimizer alone(plain->parameters(), AdamWOptions{.lr = 0.02});
  int skipped = 0;
  const std::vector<at::Tensor> wanted = trained(plain, alone, nullptr, &skipped);
  EXPECT_EQ(skipped, 2);
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    const auto check = [&](const std::vector<at::Tensor>& got, const int& its_skipped) {
      EXPECT_EQ(its_skipped, 2);
      for (size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_TRUE(at::allclose(got[i], wanted[i], 1e-4, 1e-5)) << i;
      }
    };
    {
      Net model;
      fully_shard(*model, mesh);
      FusedOptimizer optimizer(model->parameters(), AdamWOptions{.lr = 0.02});
      int its_skipped = 0;
      check(trained(model, optimizer, mesh, &its_skipped), its_skipped);
    }
    for (const int stage : {1, 2}) {
      Net model;
      distribute_module(*model, mesh, {});
      ZeroRedundancyOptimizer<FusedOptimizer> optimizer(model->parameters(),
                                                        AdamWOptions{.lr = 0.02}, {.stage = stage});
      int its_skipped = 0;
      check(trained(model, optimizer, mesh, &its_skipped), its_skipped);
    }
  });
}

}  // namespace
}  // namespace shardweave

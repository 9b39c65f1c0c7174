// Gradients of a unit travel while backward goes on: begun when they are there, waited for when the
// unit after the next is touched, and to the last bit what a backward gives that waits.
#include <algorithm>
#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/observe/observer.h"
#include "shardweave/dtensor/observe/profile_trace.h"
#include "shardweave/dtensor/testing/counting_allocator.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/fully_shard.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {
namespace {

using dtensor_internal::MeshContext;
using dtensor_internal::Observer;
using dtensor_internal::Observing;
using testing::CountingAllocator;
using testing::on_mesh;
namespace nn = torch::nn;

constexpr int64_t kDim = 6, kLayers = 5, kBatch = 12;

nn::Sequential make() {
  nn::Sequential model;
  for (int i = 0; i < kLayers; ++i) model->push_back(nn::Linear(kDim, kDim));
  const c10::AutoGradMode no_grad(false);
  double k = 0;
  for (at::Tensor p : model->parameters()) {
    p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
  }
  return model;
}

at::Tensor input(int step) {
  return at::cos(at::arange(kBatch * kDim, at::kFloat).view({kBatch, kDim}) + step);
}

at::Tensor loss_of(const nn::Sequential& model, const at::Tensor& x) {
  at::Tensor y = x;
  for (const auto& layer : *model) y = at::tanh(layer.ptr<nn::LinearImpl>()->forward(y));
  return y.square().sum();
}

const std::vector<std::string> kUnits = {"*"};

// What is under way, and which operators begin meanwhile.
class Watching final : public Observer {
 public:
  void operator_begins(const c10::OperatorHandle& op, absl::Span<const c10::IValue>) override {
    for (auto& [id, transfer] : in_flight_) {
      transfer.operators.push_back(op.operator_name().name);
    }
  }
  void collective_begins(int64_t id, const CommEvent& event) override {
    if (event.collective != "reduce_scatter") return;
    in_flight_[id] = {};
    most = std::max(most, in_flight_.size());
  }
  void collective_ends(int64_t id) override {
    const auto it = in_flight_.find(id);
    if (it == in_flight_.end()) return;
    transfers.push_back(it->second);
    in_flight_.erase(it);
  }

  struct TransferInFlight {
    std::vector<std::string> operators;
  };
  size_t most = 0;
  std::vector<TransferInFlight> transfers;
  bool all_have_arrived() const { return in_flight_.empty(); }

 private:
  std::map<int64_t, TransferInFlight> in_flight_;
};

std::vector<at::Tensor> gradients(const nn::Sequential& model) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : model->parameters()) {
    EXPECT_EQ(layout_of(p.grad()), layout_of(p));
    result.push_back(full_tensor(p.grad()).clone());
  }
  return result;
}

TEST(FullyShardOverlapTest, GradientsTravelWhileBackwardGoesOn) {
  for (const bool replicas : {false, true}) {
    std::vector<MeshDim> dims = {{"dp", 2}};
    if (replicas) dims.insert(dims.begin(), {"replicas", 2});
    on_mesh(dims, [&](const MeshPtr& mesh) {
      nn::Sequential model = make();
      fully_shard(*model, mesh, {.mesh_dim = "dp", .units = kUnits});
      for (int step = 0; step < 3; ++step) {
        at::Tensor x = distribute_tensor(input(step), mesh, {{"dp", Shard(0)}});
        if (replicas) x = redistribute(x, {Shard(0), Shard(0)});
        const at::Tensor loss = loss_of(model, x);
        Watching watching;
        {
          const Observing observing(MeshContext::of(mesh), watching);
          loss.backward();
          // Nothing is left for whoever comes after it.
          EXPECT_TRUE(watching.all_have_arrived());
        }
        EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
        ASSERT_EQ(watching.transfers.size(), static_cast<size_t>(kLayers));
        EXPECT_LE(watching.most, 2U);
        for (int i = 0; i + 1 < kLayers; ++i) {
          // The next unit's backward: its products, and those of its tanh.
          const std::vector<std::string>& meanwhile =
              watching.transfers[static_cast<size_t>(i)].operators;
          EXPECT_THAT(meanwhile, ::testing::Contains("aten::mm").Times(::testing::Ge(1))) << i;
          EXPECT_THAT(meanwhile, ::testing::Contains("aten::tanh_backward")) << i;
        }
        gradients(model);
        for (at::Tensor& p : model->parameters()) p.mutable_grad() = at::Tensor();
      }
      EXPECT_EQ(fully_shard_counters(mesh).wrong_prefetches, 0);
    });
  }
}

// Of two ranks sums do not depend on the order: the bits are those of the ranks' own gradients, added.
TEST(FullyShardOverlapTest, TheBitsAreThoseOfABackwardThatWaits) {
  std::vector<at::Tensor> wanted;
  {
    nn::Sequential plain = make();
    for (const at::Tensor& half : input(0).chunk(2)) {
      std::vector<at::Tensor> grads =
          torch::autograd::grad({loss_of(plain, half.contiguous())}, plain->parameters());
      for (size_t i = 0; i < grads.size(); ++i) {
        if (wanted.size() <= i) {
          wanted.push_back(grads[i]);
        } else {
          wanted[i] = wanted[i] + grads[i];
        }
      }
    }
  }
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    nn::Sequential model = make();
    fully_shard(*model, mesh, {.units = kUnits});
    const at::Tensor x = distribute_tensor(input(0), mesh, {{"dp", Shard(0)}});
    for (const bool hooked : {false, true}) {
      std::vector<unsigned> hooks;
      std::vector<double> seen;
      if (hooked) {  // needs the values at once
        for (const at::Tensor& p : model->parameters()) {
          hooks.push_back(p.register_hook([&](const at::Tensor& grad) {
            seen.push_back(full_tensor(grad).sum().item<double>());
          }));
        }
      }
      loss_of(model, x).backward();
      for (size_t i = 0; i < hooks.size(); ++i) model->parameters()[i].remove_hook(hooks[i]);
      const std::vector<at::Tensor> got = gradients(model);
      for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << i;
      EXPECT_EQ(seen.size(), hooked ? wanted.size() : 0);
      for (at::Tensor& p : model->parameters()) p.mutable_grad() = at::Tensor();
    }
    // Without .grad(), and twice through one graph.
    const at::Tensor loss = loss_of(model, x);
    for (const bool keeps : {true, false}) {
      const auto grads = torch::autograd::grad({loss}, model->parameters(), {}, keeps);
      for (size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_TRUE(at::equal(full_tensor(grads[i]), wanted[i])) << i;
      }
    }
    // Added to what is there.
    for (int twice = 0; twice < 2; ++twice) loss_of(model, x).backward();
    const std::vector<at::Tensor> sum = gradients(model);
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(sum[i], wanted[i] * 2)) << i;
    EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
  });
}

// Three units at most are in memory: the one that computes, the next, and one whose gradients travel
// (or have by now).
TEST(FullyShardOverlapTest, MemoryIsBounded) {
  on_mesh({{"dp", 3}}, [](const MeshPtr& mesh) {
    nn::Sequential model = make();
    fully_shard(*model, mesh, {.units = kUnits});
    for (int step = 0; step < 3; ++step) {
      loss_of(model, distribute_tensor(input(step), mesh, {{"dp", Shard(0)}})).backward();
      for (at::Tensor& p : model->parameters()) p.mutable_grad() = at::Tensor();
    }
    EXPECT_LE(fully_shard_counters(mesh).peak_gathered_bytes, 3 * (kDim + 1) * kDim * 4);
  });
}

// Nothing travels: what backward has made is the gradient.
TEST(FullyShardOverlapTest, ARankAloneCopiesNoGradients) {
  CountingAllocator::install();
  for (const std::vector<MeshDim>& dims :
       std::vector<std::vector<MeshDim>>{{{"dp", 1}}, {{"dp", 1}, {"tp", 1}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      constexpr int64_t kSize = 256, kGradients = kSize * (kSize + 1) * sizeof(float);
      nn::Linear model(kSize, kSize);
      fully_shard(*model, mesh, {.mesh_dim = "dp"});
      at::Tensor x = distribute_tensor(at::ones({1, kSize}), mesh, {{"dp", Shard(0)}});
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        const at::Tensor loss = model(x).sum();
        const int64_t before = CountingAllocator::mine().live;
        CountingAllocator::mine().peak = before;
        loss.backward();
        EXPECT_LT(CountingAllocator::mine().peak - before, kGradients * 5 / 4) << step;
      }
    });
  }
}

// But what somebody else has, or two gradients have in common, is.
TEST(FullyShardOverlapTest, ARankAloneSharesNoGradients) {
  struct Two : nn::Module {
    Two() {
      a = register_parameter("a", at::ones({3, 4}));
      b = register_parameter("b", at::ones({4, 3}));
    }
    at::Tensor a, b;
  };
  on_mesh({{"dp", 1}}, [&](const MeshPtr& mesh) {
    Two two;
    fully_shard(two, mesh);
    const at::Tensor given = at::ones({3, 4});
    for (int step = 1; step <= 3; ++step) {
      to_local(two.a).backward(given);
      EXPECT_TRUE(at::equal(to_local(two.a.grad()), given * step)) << step;
      EXPECT_TRUE(at::equal(given, at::ones({3, 4}))) << step;
    }
    two.zero_grad();
    // Both gradients are views of one tensor.
    const at::Tensor sum = two.a.view(-1) + two.b.view(-1);
    sum.backward(distribute_tensor(at::arange(12, at::kFloat), mesh, {Replicate()}));
    two.a.mutable_grad().mul_(2);
    EXPECT_TRUE(at::equal(to_local(two.b.grad()), at::arange(12, at::kFloat).view({4, 3})));
    EXPECT_TRUE(at::equal(to_local(two.a.grad()), at::arange(12, at::kFloat).view({3, 4}) * 2));
    two.zero_grad();
    // A hook keeps what becomes a gradient.
    at::Tensor kept;
    const at::Tensor used = two.a * 1;
    used.register_hook([&](const at::Tensor& grad) { kept = grad; });
    (used.view(-1) + two.b.view(-1)).sum().backward();
    for (const at::Tensor& p : {two.a, two.b}) p.mutable_grad().mul_(3);
    EXPECT_TRUE(at::equal(full_tensor(kept), at::ones({3, 4})));
  });
}

// What it looks like in a trace: spans of reduce-scatters and operators overlap.
TEST(FullyShardOverlapTest, TheTraceShowsIt) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    nn::Sequential model = make();
    fully_shard(*model, mesh, {.units = kUnits});
    const at::Tensor loss = loss_of(model, distribute_tensor(input(0), mesh, {{"dp", Shard(0)}}));
    ProfileScope profile(mesh);
    loss.backward();
    const nlohmann::json trace = nlohmann::json::parse(profile.to_json());
    struct Span {
      double begin, end;
    };
    std::vector<Span> sums, products;
    for (const auto& event : trace["traceEvents"]) {
      if (!event.contains("dur")) continue;
      const auto name = event["name"].get<std::string>();
      const Span span = {event["ts"].get<double>(),
                         event["ts"].get<double>() + event["dur"].get<double>()};
      if (name.find("reduce_scatter") != std::string::npos) sums.push_back(span);
      if (name == "aten::mm") products.push_back(span);
    }
    EXPECT_EQ(sums.size(), static_cast<size_t>(kLayers));
    int overlapping = 0;
    for (const Span& sum : sums) {
      overlapping += std::any_of(products.begin(), products.end(), [&](const Span& product) {
        return sum.begin < product.begin && product.end < sum.end;
      });
    }
    EXPECT_GE(overlapping, kLayers - 1);
  });
}

// A backward that throws in the middle: the next one is as any.
// A unit that is used again while its gradients travel, on a hybrid mesh: when they have been sent is a
// matter of time, and the sums over replicas are collectives, too. Ranks that took them at different
// places waited for each other, in a third of such backwards.
TEST(FullyShardOverlapTest, UnitsThatAreUsedAgainOverReplicas) {
  const absl::Status status =
      run_ranks(4,
                [](World& world) -> absl::Status {
                  const auto mesh = init_device_mesh(world, {{"replicas", 2}, {"dp", 2}});
                  if (!mesh.ok()) return mesh.status();
                  for (int i = 0; i < 30; ++i) {  // the order of units is new each time
                    nn::Linear a(16, 16), b(16, 16), c(16, 16);
                    nn::Sequential model(a, b, c);
                    fully_shard(*model, *mesh, {.mesh_dim = "dp", .units = kUnits});
                    const at::Tensor x = ones({8, 16}, *mesh, {Shard(0), Shard(0)});
                    a(c(a(b(a(x))))).sum().backward();
                    EXPECT_EQ(layout_of(a->weight.grad()), layout_of(a->weight));
                  }
                  return absl::OkStatus();
                },
                {.timeout = absl::Seconds(20)});
  EXPECT_TRUE(status.ok()) << status;
}

TEST(FullyShardOverlapTest, AfterABackwardThatFailed) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    nn::Sequential model = make(), other = make();
    fully_shard(*model, mesh, {.units = kUnits});
    fully_shard(*other, mesh, {.units = kUnits});
    const at::Tensor x = distribute_tensor(input(0), mesh, {{"dp", Shard(0)}});
    const at::Tensor& middle = model[2]->as<nn::Linear>()->weight;
    const unsigned hook = middle.register_hook(
        [](const at::Tensor&) -> void { throw std::runtime_error("in the middle"); });
    EXPECT_THROW(loss_of(model, x).backward(), std::exception);
    middle.remove_hook(hook);
    for (at::Tensor& p : model->parameters()) p.mutable_grad() = at::Tensor();
    loss_of(model, x).backward();
    loss_of(other, x).backward();
    const std::vector<at::Tensor> got = gradients(model), wanted = gradients(other);
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << i;
    EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
  });
}

// A rank that is slow has its gradients on their way for longer: all give them up alike.
TEST(FullyShardOverlapTest, AfterABackwardThatFailedWithReplicas) {
  for (int slow = 0; slow < 4; ++slow) {
    on_mesh({{"replicas", 2}, {"dp", 2}}, [&](const MeshPtr& mesh) {
      nn::Sequential model = make(), other = make();
      fully_shard(*model, mesh, {.mesh_dim = "dp", .units = kUnits});
      fully_shard(*other, mesh, {.mesh_dim = "dp", .units = kUnits});
      at::Tensor x = distribute_tensor(input(0), mesh, {{"dp", Shard(0)}});
      x = redistribute(x, {Shard(0), Shard(0)});
      at::Tensor y = x;
      for (int i = 0; i < kLayers; ++i) {
        y = at::tanh(model[static_cast<size_t>(i)]->as<nn::Linear>()->forward(y));
        if (i == kLayers - 3) {
          y.register_hook(
              [](const at::Tensor&) -> void { throw std::runtime_error("in the middle"); });
        } else if (i == kLayers - 2 && 2 * mesh->coordinate()[0] + mesh->coordinate()[1] == slow) {
          y.register_hook([](const at::Tensor&) -> void {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
          });
        }
      }
      EXPECT_THROW(y.square().sum().backward(), std::exception);
      for (at::Tensor& p : model->parameters()) p.mutable_grad() = at::Tensor();
      loss_of(model, x).backward();
      loss_of(other, x).backward();
      const std::vector<at::Tensor> got = gradients(model), wanted = gradients(other);
      for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << i;
      EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
    });
  }
}

}  // namespace
}  // namespace shardweave

// A small model with what makes checkpoints hard, and its training under several plans.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/fully_shard.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/adamw.h"

namespace shardweave::testing {

// Tied weights, a number, buffers of other dtypes, a bf16 parameter, sizes that do not divide, and a
// parameter that never has a gradient.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    up = register_module("up", torch::nn::Linear(5, 7));
    down = register_module("down", torch::nn::Linear(7, 5));
    scale = register_parameter("scale", at::ones({}));
    tied = register_parameter("tied", up->weight);
    unused = register_parameter("unused", at::ones({3}));
    half = register_parameter("half", at::ones({2, 5}, at::kBFloat16), /*requires_grad=*/false);
    steps = register_buffer("steps", at::zeros({}, at::kLong));
    mask = register_buffer("mask", at::ones({3}, at::kBool));
    const c10::AutoGradMode no_grad(false);
    double k = 0;
    for (at::Tensor p : parameters()) {
      p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
    }
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor h = at::dropout(at::gelu(up(x)), 0.2, /*train=*/true);
    const at::Tensor y = down(h) * scale + at::matmul(at::matmul(x, tied.t()), tied) * 0.1;
    return (y - at::sin(x)).pow(2).mean();
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor scale, tied, unused, half, steps, mask;
};

enum class Plan { kDdp, kTp, kFsdp, kZero, kTorchOptim };
inline const char* name_of(Plan plan) {
  const char* names[] = {"ddp", "tp", "fsdp", "zero", "torch::optim"};
  return names[static_cast<int>(plan)];
}

// A model under a plan, with its optimizer and what a checkpoint has of them.
class Training {
 public:
  // The first mesh dimension is dp, the last is what the plan is about.
  Training(const MeshPtr& mesh, Plan plan) : mesh_(mesh) {
    const std::string first(mesh->mesh().name(0));
    const std::string last(mesh->mesh().name(mesh->mesh().ndim() - 1));
    ParameterPlan placements;
    if (plan == Plan::kTp) {
      placements = {{"up.*", {{last, Shard(0)}}}, {"down.weight", {{last, Shard(1)}}}};
    }
    distribute_module(*net_, mesh, placements);
    manual_seed(mesh, 11);
    batch_dim_ = plan == Plan::kTp && mesh->mesh().ndim() == 1 ? "" : first;
    if (plan == Plan::kFsdp) fully_shard(*net_, mesh, {.mesh_dim = last});
    const AdamWOptions options = {.lr = 0.01};
    if (plan == Plan::kZero) {
      zero_ = std::make_unique<ZeroRedundancyOptimizer<FusedOptimizer>>(
          unique_parameters(*net_), options, ZeroOptions{.mesh_dim = first});
    } else if (plan == Plan::kTorchOptim) {
      torch_ = std::make_unique<torch::optim::AdamW>(unique_parameters(*net_),
                                                     torch::optim::AdamWOptions(0.01));
    } else {
      fused_ = std::make_unique<FusedOptimizer>(net_->parameters(), options);
    }
    add_module(state_, *net_);
    if (zero_) add_optimizer(state_, *zero_, *net_);
    if (torch_) add_optimizer(state_, *torch_, *net_);
    if (fused_) add_optimizer(state_, *fused_, *net_);
    add_random_state(state_, mesh);
    state_.set_value("epoch", "0");
  }

  // `before_update`: between backward and the optimizer's step.
  double step(int64_t number, const std::function<void()>& before_update = nullptr) {
    at::Tensor x =
        at::sin(at::arange(40, at::kFloat).view({8, 5}) * 0.3 + static_cast<double>(number));
    NamedPlacements placements;
    if (!batch_dim_.empty()) placements.emplace_back(batch_dim_, Shard(0));
    x = distribute_tensor(x, mesh_, placements);
    const at::Tensor loss = net_->loss(x);
    loss.backward();
    finish_grad_sync(*net_);
    if (before_update != nullptr) before_update();
    if (zero_) zero_->step();
    if (torch_) torch_->step();
    if (fused_) fused_->step();
    net_->zero_grad();
    {
      const c10::AutoGradMode no_grad(false);
      net_->steps.add_(1);
    }
    return loss.item<double>();
  }

  // All of the state, whole, on every rank.
  std::map<std::string, at::Tensor> values() const {
    const c10::AutoGradMode no_grad(false);
    std::map<std::string, at::Tensor> result;
    const auto add = [&](const std::string& name, const at::Tensor& tensor) {
      result[name] = (is_dtensor(tensor) ? full_tensor(tensor) : tensor).detach().clone();
    };
    for (const auto& one : state_.tensors()) add(one.name, one.tensor);
    for (const auto& late : state_.late()) {
      for (const auto& [name, tensor] : late.now()) add(late.prefix + name, tensor);
    }
    return result;
  }

  StateDict& state() { return state_; }
  NetImpl& net() { return *net_; }

 private:
  const MeshPtr mesh_;
  const std::shared_ptr<NetImpl> net_ = std::make_shared<NetImpl>();
  std::string batch_dim_;
  std::unique_ptr<ZeroRedundancyOptimizer<FusedOptimizer>> zero_;
  std::unique_ptr<torch::optim::AdamW> torch_;
  std::unique_ptr<FusedOptimizer> fused_;
  StateDict state_;
};

// "step" is of several dtypes, and what never had a gradient has state in some optimizers only.
inline void expect_equal(const std::map<std::string, at::Tensor>& got,
                         const std::map<std::string, at::Tensor>& wanted) {
  for (const auto& [name, value] : wanted) {
    const auto it = got.find(name);
    if (it == got.end()) {
      EXPECT_TRUE(name.find("unused") != std::string::npos) << name;
      continue;
    }
    if (name.ends_with(".step")) {
      EXPECT_EQ(it->second.item<double>(), value.item<double>()) << name;
    } else {
      EXPECT_EQ(it->second.scalar_type(), value.scalar_type()) << name;
      EXPECT_TRUE(at::equal(it->second, value)) << name << "\n" << it->second << "\n" << value;
    }
  }
}

// An empty directory of the test's own.
inline std::string new_directory(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/checkpoint_" + name;
  std::filesystem::remove_all(path);
  return path;
}

}  // namespace shardweave::testing

// examples/c/train_mlp.c, written in C++: both print the same losses.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

constexpr int64_t kBatch = 32, kIn = 16, kHidden = 64, kOut = 4;
constexpr int kSteps = 60;

struct Mlp : torch::nn::Module {
  struct Linear : torch::nn::Module {
    at::Tensor weight, bias;
  };
  explicit Mlp(const MeshPtr& mesh)
      : up(register_module("up", std::make_shared<Linear>())),
        down(register_module("down", std::make_shared<Linear>())) {
    const auto drawn = [&](at::IntArrayRef sizes) {
      return full_tensor(randn(sizes, mesh, Placements(mesh->mesh().ndim())) * 0.2);
    };
    up->weight = up->register_parameter("weight", drawn({kHidden, kIn}));
    up->bias = up->register_parameter("bias", drawn({kHidden}));
    down->weight = down->register_parameter("weight", drawn({kOut, kHidden}));
  }
  at::Tensor forward(const at::Tensor& x) const {
    return at::linear(at::relu(at::linear(x, up->weight, up->bias)), down->weight);
  }
  std::shared_ptr<Linear> up, down;
};

std::string train(const MeshPtr& mesh) {
  manual_seed(mesh, 1);
  Mlp model(mesh);
  distribute_module(model, mesh,
                    {{"up.*", {{"tp", Shard(0)}}}, {"down.weight", {{"tp", Shard(1)}}}});
  FusedOptimizer optimizer({model.up->weight, model.up->bias, model.down->weight},
                           AdamWOptions{.lr = 1e-2});
  const Placements rows = {Shard(0), Replicate()};
  const at::Tensor x = randn({kBatch, kIn}, mesh, rows), y = randn({kBatch, kOut}, mesh, rows);
  std::string lines;
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor loss = at::mse_loss(model.forward(x), y);
    loss.backward();
    finish_grad_sync(model);
    optimizer.step();
    optimizer.zero_grad();
    const double number = loss.item<double>();
    if (step % 10 != 0 && step != kSteps - 1) continue;
    char line[64];
    std::snprintf(line, sizeof(line), "step %2d  loss %.9g\n", step, number);
    lines += line;
  }
  return lines;
}

std::string output_of(const std::string& command) {
  std::string text;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return "popen failed";
  char buffer[4096];
  while (const size_t n = fread(buffer, 1, sizeof(buffer), pipe)) text.append(buffer, n);
  return pclose(pipe) == 0 ? text : "failed: " + text;
}

TEST(ParityTest, TheCTrainerHasTheLossesOfTheCppOne) {
  at::set_num_threads(1);
  for (const int ranks : {1, 2, 3, 4}) {
    std::string cpp;
    const bool even = ranks % 2 == 0;
    testing::on_mesh({{"dp", even ? ranks / 2 : ranks}, {"tp", even ? 2 : 1}},
                     [&](const MeshPtr& mesh) {
                       at::set_num_threads(1);
                       const std::string lines = train(mesh);
                       if (mesh->rank() == Rank(0)) cpp = lines;
                     });
    EXPECT_NE(cpp.find("step 59"), std::string::npos);
    EXPECT_EQ(
        output_of(std::string(std::getenv("TRAIN_MLP")) + " --ranks=" + std::to_string(ranks)), cpp)
        << ranks << " ranks";
  }
}

}  // namespace
}  // namespace shardweave

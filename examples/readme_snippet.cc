#include <iostream>

#include "shardweave/comm/world.h"
#include "shardweave/dtensor/distribute_module.h"
#include "torch/nn.h"
#include "torch/optim.h"

using namespace shardweave;

struct MlpImpl : torch::nn::Module {  // plain LibTorch, written for one device
  torch::nn::Linear up = register_module("up", torch::nn::Linear(64, 256));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(256, 10));
  at::Tensor forward(const at::Tensor& x) { return down(at::relu(up(x))); }
};
TORCH_MODULE(Mlp);

int main() {
  const ParameterPlan plan = {
      {"up.*", {{"tp", Shard(0)}}},         // weight and bias
      {"down.weight", {{"tp", Shard(1)}}},  // what no entry names is replicated
  };
  const absl::Status status = run_ranks(4, [&](World& world) {  // a thread per rank
    const MeshPtr mesh = value_or_throw(init_device_mesh(world, {{"dp", 2}, {"tp", 2}}));
    Mlp model;
    distribute_module(*model, mesh, plan);  // in place
    torch::optim::AdamW optimizer(unique_parameters(*model), torch::optim::AdamWOptions(3e-3));
    for (int step = 0; step < 50; ++step) {
      const at::Tensor x = distribute_tensor(at::randn({32, 64}), mesh, {{"dp", Shard(0)}});
      const at::Tensor labels = x.slice(1, 0, 10).argmax(1);  // any operator works on a DTensor
      const at::Tensor loss = at::cross_entropy_loss(model->forward(x), labels);
      loss.backward();
      finish_grad_sync(*model);  // every gradient where its parameter is
      optimizer.step();
      optimizer.zero_grad();
      const double value = loss.item<double>();  // collective: on all ranks, not in the next if
      if (world.rank() == 0) std::cout << "step " << step << ": " << value << "\n";
    }
  });
  std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}

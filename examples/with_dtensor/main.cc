// A weight that is sharded over two ranks learns to be zero.
//
//   bazel run //:with_dtensor
#include <iostream>

#include "ATen/ops/mm.h"
#include "ATen/ops/randn.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/mesh/connected_mesh.h"
#include "shardweave/modules/optim/fused_optimizer.h"

using namespace shardweave;

namespace {

void train(World& world) {
  const MeshPtr mesh = init_device_mesh(world, {{"tp", 2}}).value();
  const at::Tensor weight = distribute_tensor(at::randn({6, 5}), mesh, {{"tp", Shard(1)}});
  weight.requires_grad_();
  FusedOptimizer optimizer({weight}, AdamWOptions{.lr = 0.1});
  for (int step = 0; step < 20; ++step) {
    const at::Tensor x = distribute_tensor(at::randn({8, 6}), mesh, {{"tp", Replicate()}});
    const at::Tensor loss = at::mm(x, weight).pow(2).mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    const double value = loss.item<double>();
    if (world.rank() == 0) std::cout << "step " << step << ": " << value << "\n";
  }
}

}  // namespace

int main() {
  const absl::Status status = run_ranks(2, train);
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}

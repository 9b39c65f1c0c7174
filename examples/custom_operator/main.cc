// An operator that LibTorch does not know, on DTensors: four ranks, batches cut over "dp" and
// features over "tp".
//
//   ./bazelw run //examples/custom_operator

#include <iostream>

#include "ATen/ops/arange.h"
#include "ATen/ops/ones.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/dtensor.h"
#include "softsign.h"

using namespace shardweave;

int main() {
  const absl::Status status = run_ranks(4, [](World& world) {
    const MeshPtr mesh = init_device_mesh(world, {{"dp", 2}, {"tp", 2}}).value();
    add_rule(mesh, "mylib::softsign", custom_operator::softsign_rule());
    add_rule(mesh, "mylib::softsign_backward", custom_operator::softsign_backward_rule());

    const at::Tensor x = distribute_tensor(at::arange(35).to(at::kFloat).view({7, 5}), mesh,
                                           {{"dp", Shard(0)}, {"tp", Shard(1)}});
    at::Tensor scale = distribute_tensor(at::ones({5}), mesh, {{"tp", Shard(0)}});
    scale.requires_grad_();

    const StrictScope strict(mesh);  // the rules are enough: nothing is communicated
    const at::Tensor y = custom_operator::softsign(x, scale);
    y.sum().backward();
    if (world.rank() == 0) {
      std::cout << "result:   " << describe(y) << "\n"
                << "gradient: " << describe(scale.grad()) << "\n";
    }
  });
  std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}

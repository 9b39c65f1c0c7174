// The second program that the README shows: a process per rank.
#include <iostream>

#include "shardweave/comm/world.h"
#include "shardweave/dtensor/dtensor.h"

using namespace shardweave;

void run(World& world) {
  const MeshPtr mesh = value_or_throw(init_device_mesh(world, {{"dp", world.size()}}));
  const at::Tensor x = ones({7, 5}, mesh, {Shard(0)});
  const double sum = x.sum().item<double>();         // on all ranks
  const std::string small = values_to_string(x[0]);  // so is this
  if (world.rank() == 0) std::cout << "sum " << sum << "\n" << small << "\n";
}

int main() {
  const auto world = World::from_environment();  // tools/launch, torchrun, srun, mpirun, ...
  if (!world.ok()) {
    std::cerr << world.status() << "\n";
    return 1;
  }
  try {
    run(**world);
  } catch (const std::exception& error) {
    // Error (dtensor/error.h) has a status(), too. The others, which may wait for this rank, are told.
    const std::string text = message_of(error);  // without LibTorch's backtrace
    (*world)->comm()->abort(absl::AbortedError(text));
    std::cerr << "rank " << (*world)->rank() << ": " << text << "\n";
    return 1;
  }
  return 0;
}

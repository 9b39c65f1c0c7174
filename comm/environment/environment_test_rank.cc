// A rank of environment_test: joins the world of its environment, adds up the ranks, prints what it
// got.
//
//   environment_test_rank TIMEOUT_IN_MILLISECONDS [RANK_THAT_DIES_AFTER_JOINING]
#include <ATen/Parallel.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "shardweave/comm/environment/from_environment.h"

int main(int argc, char** argv) {
  const int milliseconds = argc > 1 ? std::atoi(argv[1]) : 60000;
  auto world = shardweave::World::from_environment({.timeout = absl::Milliseconds(milliseconds)});
  if (!world.ok()) {
    std::printf("%s\n", world.status().ToString().c_str());
    return 3;
  }
  shardweave::Communicator& comm = *(*world)->comm();
  if (argc > 2 && comm.rank() == std::atoi(argv[2])) ::raise(SIGKILL);
  int64_t sum = comm.rank();
  const auto buffer = shardweave::Buffer::of(&sum, 1);
  if (auto status =
          comm.all_reduce(buffer, buffer, shardweave::ReduceOp::kSum, {.tag = "the sum"}).wait();
      !status.ok()) {
    std::printf("%s\n", status.ToString().c_str());
    return 4;
  }
  std::printf("rank %d of %d, local %d, sum %d, threads %d\n", comm.rank(), comm.size(),
              (*world)->local_rank(), static_cast<int>(sum), at::get_num_threads());
  return 0;
}

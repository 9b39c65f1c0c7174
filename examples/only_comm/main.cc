// Estimates pi on several ranks: each draws points of its own, one all-reduce adds up the hits.
//
//   bazel run //:only_comm -- 4
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

#include "shardweave/comm/world.h"

namespace {

constexpr int64_t kPointsPerRank = 100'000;

int64_t hits_of(int rank) {
  std::mt19937_64 engine(static_cast<uint64_t>(rank));
  std::uniform_real_distribution<double> uniform(0, 1);
  int64_t hits = 0;
  for (int64_t i = 0; i < kPointsPerRank; ++i) {
    double x = uniform(engine);
    double y = uniform(engine);
    if (x * x + y * y < 1) ++hits;
  }
  return hits;
}

absl::Status estimate(shardweave::World& world) {
  int64_t hits = hits_of(world.rank());
  auto buffer = shardweave::Buffer::of(&hits, 1);
  absl::Status status = world.comm()->all_reduce(buffer, buffer, shardweave::ReduceOp::kSum).wait();
  if (status.ok() && world.rank() == 0) {
    double points = static_cast<double>(kPointsPerRank) * world.size();
    std::cout << world.size() << " ranks: pi is about " << 4 * static_cast<double>(hits) / points
              << "\n";
  }
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  absl::Status status = shardweave::run_ranks(argc > 1 ? std::atoi(argv[1]) : 4, estimate);
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}

// All-reduce between rank threads: microseconds, and the ratio to the bound, which is each rank
// copying its neighbour's buffer at the same time. The time is that of the slowest rank.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <vector>

#include "benchmark/benchmark.h"
#include "shardweave/comm/world.h"

namespace shardweave {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Seconds of one `step(comm)` when all ranks make `repeats` of them, after some to warm up.
template <typename Step>
double time_of(Communicator& comm, int repeats, const Step& step) {
  for (int i = 0; i < repeats / 10 + 1; ++i) step();
  if (!comm.barrier().wait().ok()) std::abort();
  const Clock::time_point begin = Clock::now();
  for (int i = 0; i < repeats; ++i) step();
  double seconds = seconds_since(begin) / repeats;
  const Buffer b = Buffer::of(&seconds, 1);
  if (!comm.all_reduce(b, b, ReduceOp::kMax).wait().ok()) std::abort();
  return seconds;
}

void all_reduce(benchmark::State& state) {
  const int num_ranks = static_cast<int>(state.range(0));
  const int64_t bytes = state.range(1);
  const int repeats = static_cast<int>(std::clamp<int64_t>((16 << 20) / (bytes + 1), 50, 5000));
  double copy_seconds = 0;
  double total_seconds = 0;
  for (auto _ : state) {
    std::vector<std::vector<float>> data(num_ranks, std::vector<float>(bytes / 4, 1));
    double reduce = 0;
    double copy = 0;
    const absl::Status status = run_ranks(num_ranks, [&](World& world) -> absl::Status {
      Communicator& comm = *world.comm();
      std::vector<float>& mine = data[comm.rank()];
      const std::vector<float>& neighbour = data[(comm.rank() + 1) % num_ranks];
      std::vector<float> out(mine.size());
      const Buffer b = Buffer::of(mine.data(), static_cast<int64_t>(mine.size()));
      const double one = time_of(comm, repeats, [&] {
        if (!comm.all_reduce(b, b, ReduceOp::kAvg).wait().ok()) std::abort();
      });
      const double other = time_of(comm, repeats, [&] {
        std::memcpy(out.data(), neighbour.data(), bytes);
        benchmark::ClobberMemory();
      });
      if (comm.rank() == 0) {
        reduce = one;
        copy = other;
      }
      return comm.barrier().wait();
    });
    if (!status.ok()) {
      state.SkipWithError(std::string(status.message()).c_str());
      return;
    }
    state.SetIterationTime(reduce);
    total_seconds += reduce;
    copy_seconds += copy;
  }
  state.counters["over_copy"] = total_seconds / copy_seconds;
}

BENCHMARK(all_reduce)
    ->ArgNames({"ranks", "bytes"})
    ->ArgsProduct({{2, 4}, {4, 4 << 10, 64 << 10, 512 << 10, 2 << 20, 16 << 20}})
    ->UseManualTime()
    ->Iterations(5)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace shardweave

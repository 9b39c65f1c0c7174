// The most that a rank of fully sharded training holds in memory at a time, over the formula: one line
// of JSON. `./bazelw run -c opt //bench:data_parallel` prints it as a table.
//
//   memory [MOST]      // fails if a ratio is larger than that; then of the smaller model alone

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "nlohmann/json.hpp"
#include "shardweave/bench/gpt/gpt.h"
#include "shardweave/dtensor/testing/counting_allocator.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace {

using bench_gpt::Sizes;
using shardweave::MeshPtr;
using shardweave::testing::CountingAllocator;

constexpr int64_t kSteps = 4;

// Of this thread, after two steps that make what stays.
int64_t peak_of_training(const Sizes& sizes, const std::string& mode, const MeshPtr& mesh) {
  int64_t step = 0;
  bench_gpt::train(sizes, mode, kSteps, mesh, [&](double /*loss*/) {
    CountingAllocator::Bytes& mine = CountingAllocator::mine();
    if (++step == 2) mine.peak = mine.live.load();
  });
  return CountingAllocator::mine().peak;
}

int64_t peak_on_ranks(const Sizes& sizes, const std::string& mode, int64_t ranks) {
  std::mutex mutex;
  int64_t peak = 0;
  shardweave::testing::on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
    const int64_t its = peak_of_training(sizes, mode, mesh);
    const std::lock_guard<std::mutex> lock(mutex);
    peak = std::max(peak, its);
  });
  return peak;
}

// The most that a forward holds beside the parameters.
int64_t peak_of_forward(const Sizes& sizes) {
  const std::function<at::Tensor()> forward = bench_gpt::forward_on_one_device(sizes);
  forward();  // what is made once
  CountingAllocator::Bytes& mine = CountingAllocator::mine();
  const int64_t before = mine.live;
  mine.peak = before;
  forward();
  return mine.peak - before;
}

nlohmann::json row(const Sizes& per_rank, int64_t ranks) {
  constexpr int64_t kBytes = sizeof(float);
  std::vector<int64_t> units = bench_gpt::elements_of_units(per_rank);
  const int64_t elements = std::accumulate(units.begin(), units.end(), int64_t{0});
  std::sort(units.begin(), units.end(), std::greater<>());
  // Parameters, gradients, two moments.
  const int64_t divided = 4 * elements * kBytes / ranks;
  const int64_t whole = ranks == 1 ? 0 : (units[0] + units[1]) * kBytes;
  const int64_t activations = peak_of_forward(per_rank);
  Sizes sizes = per_rank;
  sizes.batch *= ranks;
  const int64_t peak = peak_on_ranks(sizes, "fsdp", ranks);
  const int64_t formula = divided + whole + activations;
  return {{"dim", sizes.dim},
          {"mode", "fsdp"},
          {"ranks", ranks},
          {"peak_bytes", peak},
          {"formula_bytes", formula},
          {"divided_bytes", divided},
          {"units_bytes", whole},
          {"activations_bytes", activations},
          {"ratio", static_cast<double>(peak) / static_cast<double>(formula)}};
}

}  // namespace

int main(int argc, char** argv) {
  const double most = argc > 1 ? std::atof(argv[1]) : 0;
  at::set_num_threads(1);
  CountingAllocator::install();
  nlohmann::json rows = nlohmann::json::array();
  const Sizes small = {.dim = 64, .layers = 8, .length = 32, .batch = 2};
  const Sizes large = {.dim = 256, .layers = 8, .length = 64, .batch = 1};
  std::vector<Sizes> all = {small};
  if (most == 0) all.push_back(large);
  bool is_too_much = false;
  for (const Sizes& sizes : all) {
    for (const int64_t ranks : {1, 2, 4, 8}) {
      rows.push_back(row(sizes, ranks));
      is_too_much |= most > 0 && rows.back()["ratio"].get<double>() > most;
    }
  }
  std::cout << rows << std::endl;
  return is_too_much ? 1 : 0;
}

// What a mesh of 65,536 ranks costs, beside a table of its ranks (the bound that a mesh must stay
// far below).
#include <numeric>
#include <vector>

#include "absl/hash/hash.h"
#include "benchmark/benchmark.h"
#include "shardweave/mesh/device_mesh.h"

namespace shardweave {
namespace {

DeviceMesh large_mesh() {
  return DeviceMesh::create({{"pp", 16}, {"dp", 512}, {"tp", 8}}).value();
}

void BM_TableOfRanks(benchmark::State& state) {
  for (auto _ : state) {
    std::vector<int64_t> ranks(65536);
    std::iota(ranks.begin(), ranks.end(), 0);
    benchmark::DoNotOptimize(ranks.data());
  }
}
BENCHMARK(BM_TableOfRanks);

void BM_Create(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(large_mesh());
}
BENCHMARK(BM_Create);

void BM_Slice(benchmark::State& state) {
  const DeviceMesh mesh = large_mesh();
  for (auto _ : state) benchmark::DoNotOptimize(mesh.slice({"dp", "tp"}, Rank(40000)));
}
BENCHMARK(BM_Slice);

void BM_Flatten(benchmark::State& state) {
  const DeviceMesh mesh = large_mesh().slice({"pp", "tp"}, Rank(40000)).value();
  for (auto _ : state) benchmark::DoNotOptimize(mesh.flatten());
}
BENCHMARK(BM_Flatten);

void BM_Coordinate(benchmark::State& state) {
  const DeviceMesh mesh = large_mesh();
  for (auto _ : state) benchmark::DoNotOptimize(mesh.coordinate(Rank(40000)));
}
BENCHMARK(BM_Coordinate);

void BM_EqualAndHash(benchmark::State& state) {
  const DeviceMesh a = large_mesh();
  const DeviceMesh b = large_mesh();
  for (auto _ : state) {
    benchmark::DoNotOptimize(a == b);
    benchmark::DoNotOptimize(absl::HashOf(a));
  }
}
BENCHMARK(BM_EqualAndHash);

}  // namespace
}  // namespace shardweave

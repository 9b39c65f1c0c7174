// Time to plan a redistribution. dtensor/ caches plans: this is the cost of a cache miss.
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave {
namespace {

struct Case {
  const char* name;
  const char* from;
  const char* to;
  Dims mesh_shape;
  Dims shape;
};

const std::vector<Case> kCases = {
    // One mesh dimension changes, as its innermost cut: no search.
    {"all_gather", "[S(0)]", "[R]", {8}, {4096, 4096}},
    {"reduce_scatter", "[P(sum)]", "[S(0)]", {8}, {4096, 4096}},
    {"all_to_all", "[S(0)]", "[S(1)]", {8}, {4096, 4096}},
    {"uneven_all_to_all", "[S(0)]", "[S(1)]", {8}, {4097, 4095}},
    {"to_strided", "[S(0)]", "[S(0, sf=3)]", {8}, {4096, 4096}},
    {"3d_all_reduce", "[S(0), R, P(sum)]", "[S(0), R, R]", {8, 4, 2}, {64, 128, 1024}},
    {"3d_all_gather", "[S(0), S(0), S(0)]", "[S(0), S(0), R]", {8, 4, 2}, {64, 128, 1024}},
    {"65536_ranks", "[P(sum), S(0)]", "[S(1), S(0)]", {65536, 8}, {1 << 20, 1 << 20}},
    // Two.
    {"2d_gather", "[S(0), S(0)]", "[R, R]", {8, 4}, {4096, 4096}},
    {"2d_swap", "[S(0), S(1)]", "[S(1), S(0)]", {8, 4}, {4096, 4096}},
    {"2d_reduce", "[P(sum), P(sum)]", "[R, R]", {8, 4}, {4096, 4096}},
    {"2d_small", "[P(sum), S(0)]", "[S(0), R]", {8, 4}, {16, 16}},
    {"2d_outer", "[S(0), S(0)]", "[R, S(0)]", {8, 4}, {4096, 4096}},
    // Three.
    {"3d_reverse", "[S(0), S(0), S(0)]", "[S(0)@2, S(0)@1, S(0)@0]", {8, 4, 2}, {4096, 4096}},
    {"3d_rotate", "[S(0), S(1), S(2)]", "[S(1), S(2), S(0)]", {8, 4, 2}, {512, 512, 512}},
    {"3d_uneven", "[S(0), S(1), S(2)]", "[S(1), S(2), S(0)]", {8, 4, 2}, {513, 511, 509}},
    {"3d_reduce", "[P(sum), P(sum), P(sum)]", "[R, S(0), S(1)]", {8, 4, 2}, {4096, 4096}},
    {"3d_gather", "[S(0), S(1), S(0)]", "[R, R, R]", {8, 4, 2}, {4096, 4096}},
    {"3d_strided", "[S(0, sf=2), S(1), P(sum)]", "[S(1), R, S(0)]", {8, 4, 2}, {4096, 4096}},
    {"3d_small", "[P(sum), S(0), S(1)]", "[S(1), P(sum), R]", {8, 4, 2}, {64, 64, 3}},
    {"3d_1024_ranks", "[S(0), S(1), S(0)]", "[S(1), S(0), R]", {16, 8, 8}, {8192, 8192}},
};

void BM_Plan(benchmark::State& state) {
  const Case& c = kCases[state.range(0)];
  const Layout from = Layout::parse(c.from).value();
  const Layout to = Layout::parse(c.to).value();
  const CostModel model;
  RedistributePlan plan;
  for (auto _ : state) {
    plan = plan_redistribute(from, to, c.mesh_shape, c.shape, 4, model).value();
    benchmark::DoNotOptimize(plan);
  }
  state.SetLabel(std::string(c.name) + ": " + plan.to_string());
}
BENCHMARK(BM_Plan)->DenseRange(0, static_cast<int>(kCases.size()) - 1);

void BM_TransitionCost(benchmark::State& state) {
  const Placement from = Shard(0);
  const Placement to = Shard(1);
  for (auto _ : state) {
    benchmark::DoNotOptimize(transition_cost(from, to, 8, 1 << 20, CostModel::Link()));
  }
}
BENCHMARK(BM_TransitionCost);

}  // namespace
}  // namespace shardweave

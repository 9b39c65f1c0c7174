// What an operator on DTensors costs, in counts that do not depend on the machine: allocations of a
// cached call, the heap, and the arithmetic of specs on meshes of any size.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "c10/core/GradMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/counting/counting.h"
#include "shardweave/comm/testing/allocation_counter.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave::testing {
namespace {

// Per call, once everything is warm.
template <typename Function>
int64_t allocations_of(Function function) {
  for (int i = 0; i < 3; ++i) function();
  const int64_t before = allocations_so_far();
  constexpr int kCalls = 10;
  for (int i = 0; i < kCalls; ++i) function();
  return (allocations_so_far() - before) / kCalls;
}

struct Operands {
  at::Tensor a, b;
  std::vector<at::Tensor> eight, many;
};

struct Operator {
  const char* name;
  void (*run)(const Operands&);
  // Allocations over those of the plain operator: for a result its TensorImpl, its meta data and
  // what the boxed call needs.
  int64_t bound;
};

constexpr Operator kOperators[] = {
    {"add", [](const Operands& x) { at::add(x.a, x.b); }, 4},
    {"add_", [](const Operands& x) { at::Tensor(x.a).add_(x.b, 0); }, 1},
    {"mul by a number", [](const Operands& x) { at::mul(x.a, 2.0); }, 4},
    {"mm", [](const Operands& x) { at::mm(x.a, x.b); }, 4},
    {"t", [](const Operands& x) { x.a.t(); }, 4},
    {"view", [](const Operands& x) { x.a.view({2, 32}); }, 6},
    {"detach", [](const Operands& x) { x.a.detach(); }, 4},
    {"expand", [](const Operands& x) { x.a.expand({2, 8, 8}); }, 5},
    {"split", [](const Operands& x) { x.a.split(4, 1); }, 8},
    {"cat", [](const Operands& x) { at::cat({x.a, x.b}, 1); }, 5},
    {"stack of 8", [](const Operands& x) { at::stack(x.eight); }, 6},
    {"_foreach_add_ of 200", [](const Operands& x) { at::_foreach_add_(x.many, 0); }, 6},
};

TEST(HitCostTest, Allocations) {
  on_mesh({{"x", 1}}, [](const MeshPtr& mesh) {
    const c10::AutoGradMode no_grad(false);
    const auto make = [](const std::function<at::Tensor(const at::Tensor&)>& place) {
      Operands x{place(at::ones({8, 8})), place(at::ones({8, 8})), {}, {}};
      for (int i = 0; i < 8; ++i) x.eight.push_back(place(at::ones({8, 8})));
      for (int i = 0; i < 200; ++i) x.many.push_back(place(at::ones({4})));
      return x;
    };
    const Operands plain = make([](const at::Tensor& t) { return t; });
    const Operands sharded =
        make([&](const at::Tensor& t) { return distribute_tensor(t, mesh, Placements{Shard(0)}); });
    for (const Operator& op : kOperators) {
      const DispatchCounters before = dispatch_counters(mesh);
      const int64_t over =
          allocations_of([&] { op.run(sharded); }) - allocations_of([&] { op.run(plain); });
      EXPECT_LE(over, op.bound) << op.name;
      EXPECT_GE(over, 0) << op.name << ": the counter does not count";
      // One operator per call, one decision.
      EXPECT_EQ(dispatch_counters(mesh).operators - before.operators, 13) << op.name;
      EXPECT_LE(dispatch_counters(mesh).cache_misses - before.cache_misses, 1) << op.name;
    }
  });
}

// Numbers that change with every step make no cache entries and leave nothing behind.
TEST(HitCostTest, HeapIsConstant) {
  on_mesh({{"x", 1}}, [](const MeshPtr& mesh) {
    const c10::AutoGradMode no_grad(false);
    const at::Tensor a = ones({8, 8}, mesh, {Shard(0)});
    double scale = 0;
    const auto call = [&] { at::add(a, a, scale += 0.5); };
    for (int i = 0; i < 100; ++i) call();
    const DispatchCounters before = dispatch_counters(mesh);
    const int64_t heap = live_allocations();
    for (int i = 0; i < 10000; ++i) call();
    EXPECT_EQ(live_allocations(), heap);
    EXPECT_EQ(dispatch_counters(mesh).cache_misses, before.cache_misses);
  });
}

struct Cost {
  int64_t allocations;
  int64_t bytes;  // of them: a list of all ranks is one allocation, too
};

// Of one call more.
Cost cost_of(const std::function<void()>& call) {
  const Cost before{allocations_so_far(), allocated_bytes_of_thread()};
  call();
  return {allocations_so_far() - before.allocations, allocated_bytes_of_thread() - before.bytes};
}

void expect_the_same(const Cost& few, const Cost& many) {
  EXPECT_GT(few.allocations, 0);
  EXPECT_NEAR(static_cast<double>(many.allocations), static_cast<double>(few.allocations),
              0.1 * static_cast<double>(few.allocations));
  EXPECT_GT(few.bytes, 0);
  EXPECT_NEAR(static_cast<double>(many.bytes), static_cast<double>(few.bytes),
              0.1 * static_cast<double>(few.bytes) + 64);
}

// A mesh of `ranks`, a multiple of 4, seen from its last rank: nothing moves.
void on_two_dimensions(int ranks, const std::function<void(const MeshPtr&)>& body) {
  at::set_num_threads(1);
  auto comm = *count_communication(ranks - 1, ranks, std::make_shared<CountingLog>());
  World world(comm);
  const c10::AutoGradMode no_grad(false);
  body(*init_device_mesh(world, {{"dp", ranks / 4}, {"tp", 4}}));
}

// The cost of specs, decisions and plans.
Cost cost_of_misses(int ranks) {
  Cost cost;
  on_two_dimensions(ranks, [&](const MeshPtr& mesh) {
    const int64_t dp = ranks / 4;
    const at::Tensor constant = at::ones({8});
    const auto step = [&](int64_t rows) {  // decided anew: never seen shapes
      const at::Tensor x = empty({rows, 8}, mesh, {Shard(0), Replicate()});
      const at::Tensor w = empty({8, 12}, mesh, {Replicate(), Shard(1)});
      at::mm(x, w).relu().sum();
      x.view({dp, rows / dp, 8}).transpose(1, 2).reshape({dp * 8, rows / dp});
      (x * constant).unsqueeze(0).expand({2, rows, 8}).sum(at::IntArrayRef({0, 2}));
      const at::Tensor packed = empty({rows, 8}, mesh, {StridedShard(0, 2), Replicate()});
      packed.chunk(2, 0)[1].softmax(1);
      from_local(to_local(x), mesh, {Shard(0), Replicate()}, std::vector<int64_t>{rows, 8});
      distribute_tensor(constant, mesh, Placements{Replicate(), Shard(0)},
                        {.source = std::nullopt});
      redistribute(x, {Replicate(), Replicate()});
    };
    step(ranks);
    int64_t rows = 2 * int64_t{ranks};
    cost = cost_of([&] {
      for (int i = 0; i < 5; ++i) step(rows += ranks);
    });
  });
  return cost;
}

// What a decision allocates, over the same calls once they are decided: the specs of results, the
// entry of the cache, what the rules offer. Of a block whose sequences have another length each time.
double allocations_of_a_decision(const std::vector<MeshDim>& dims, const Placements& data,
                                 const Placements& columns) {
  int ranks = 1;
  for (const MeshDim& dim : dims) ranks *= static_cast<int>(dim.size);
  auto comm = *count_communication(0, ranks, std::make_shared<CountingLog>());
  World world(comm);
  const MeshPtr mesh = *init_device_mesh(world, dims);
  const c10::AutoGradMode no_grad(false);
  const Placements whole(dims.size());
  const at::Tensor w = empty({8, 16}, mesh, columns), norm = empty({8}, mesh, whole);
  const auto step = [&](int64_t length) {
    const at::Tensor x = empty({16, length, 8}, mesh, data);
    const at::Tensor h = at::layer_norm(x, {8}, norm);
    const at::Tensor y = at::mm(h.view({16 * length, 8}), w).view({16, length, 16});
    const at::Tensor heads = y.view({16, length, 4, 4}).transpose(1, 2);
    at::softmax(at::matmul(heads, heads.transpose(2, 3)), -1);
    at::gelu(y).add_(y).sum(at::IntArrayRef({0, 1}));
  };
  const auto steps = [&] {
    const int64_t before = allocations_so_far();
    for (int64_t length = 32; length < 42; ++length) step(length);
    return allocations_so_far() - before;
  };
  step(31);
  const int64_t misses = dispatch_counters(mesh).cache_misses;
  const int64_t fresh = steps();
  const int64_t made = dispatch_counters(mesh).cache_misses - misses;
  EXPECT_GE(made, 10 * 12);
  const int64_t seen = steps();
  EXPECT_EQ(dispatch_counters(mesh).cache_misses - misses, made);
  return static_cast<double>(fresh - seen) / static_cast<double>(made);
}

TEST(HitCostTest, AllocationsOfADecision) {
  at::set_num_threads(1);
  EXPECT_LE(allocations_of_a_decision({{"tp", 2}}, {Replicate()}, {Shard(1)}), 65);
  EXPECT_LE(allocations_of_a_decision({{"dp", 2}, {"tp", 2}}, {Shard(0), Replicate()},
                                      {Replicate(), Shard(1)}),
            85);
  EXPECT_LE(allocations_of_a_decision({{"dp", 2}, {"sp", 2}, {"tp", 2}},
                                      {Shard(0), Shard(0), Replicate()},
                                      {Replicate(), Replicate(), Shard(1)}),
            105);
}

TEST(HitCostTest, SpecArithmeticDoesNotDependOnTheNumberOfRanks) {
  expect_the_same(cost_of_misses(8), cost_of_misses(65536));
}

// What is done with a tensor whose dimensions grow with the ranks, whole or cut.
struct Call {
  const char* name;
  Placements placements;
  std::function<std::vector<int64_t>(int64_t n, int64_t i)> sizes;  // n: ranks; i: of which call
  std::function<void(const at::Tensor&)> run;
};

std::vector<Call> calls_at_any_number() {
  const auto rows = [](int64_t n, int64_t i) { return std::vector<int64_t>{n * (i + 1), 2}; };
  const auto square = [](int64_t n, int64_t i) { return std::vector<int64_t>{n, n * (i + 1)}; };
  const auto small = [](int64_t, int64_t i) { return std::vector<int64_t>{4 * (i + 1), 2}; };
  const auto to = [](const Placements& placements) {
    return [=](const at::Tensor& x) { redistribute(x, Layout(placements)); };
  };
  const Placements replicated = {Replicate(), Replicate()};
  return {
      {"all-gather", {Shard(0), Replicate()}, rows, to(replicated)},
      {"all-gather of blocks", {StridedShard(0, 4), Replicate()}, rows, to(replicated)},
      {"all-gather over both", {Shard(0), Shard(0)}, rows, to(replicated)},
      {"all-reduce", {Partial(), Replicate()}, small, to(replicated)},
      {"all-reduce over both", {Partial(), Partial()}, small, to(replicated)},
      {"reduce-scatter", {Partial(), Replicate()}, rows, to({Shard(0), Replicate()})},
      {"reduce-scatter over both", {Partial(), Partial()}, rows, to({Shard(0), Shard(0)})},
      {"all-to-all", {Shard(0), Replicate()}, square, to({Shard(1), Replicate()})},
      {"a cut", {Replicate(), Replicate()}, rows, to({Shard(0), Shard(0)})},
      {"the parts of a whole",
       {Shard(0), Shard(0)},
       rows,
       [](const at::Tensor& x) {
         from_local(to_local(x), mesh_of(x), {Shard(0), Shard(0)}, x.sizes().vec());
       }},
      {"scattered",
       {Shard(0), Shard(0)},
       rows,
       [](const at::Tensor& x) {
         distribute_tensor(at::empty(x.sizes()), mesh_of(x), Placements{Shard(0), Shard(0)});
       }},
      {"broadcast and scattered",
       {Shard(0), Replicate()},
       rows,
       [](const at::Tensor& x) {
         distribute_tensor(at::empty(x.sizes()), mesh_of(x), Placements{Shard(0), Replicate()});
       }},
      {"a plain tensor among DTensors",
       {Shard(0), Replicate()},
       rows,
       [](const at::Tensor& x) { full_tensor((x * at::ones({2})).sum()); }},
      {"clipping",
       {Shard(0), Shard(0)},
       rows,
       [](const at::Tensor& x) {
         at::Tensor parameter = x.detach();
         parameter.mutable_grad() = x;
         clip_grad_norm({parameter}, 1.0);
       }},
  };
}

// First of a size never seen, then again: memory is what a list of ranks would show in.
TEST(HitCostTest, NothingListsTheRanks) {
  const auto costs = [](int ranks, const Call& call, bool seen) {
    Cost cost;
    on_two_dimensions(ranks, [&](const MeshPtr& mesh) {
      std::vector<at::Tensor> each;
      for (int64_t i = 0; i < 8; ++i) {
        each.push_back(empty(call.sizes(ranks, i), mesh, call.placements));
        to_local(each.back()).zero_();
      }
      call.run(each[0]);  // makes the groups
      call.run(each[1]);
      cost = cost_of([&] {
        for (size_t i = 2; i < 8; ++i) call.run(each[seen ? 1 : i]);
      });
    });
    return cost;
  };
  for (const Call& call : calls_at_any_number()) {
    for (const bool seen : {false, true}) {
      SCOPED_TRACE(std::string(call.name) + (seen ? ", again" : ", the first time"));
      expect_the_same(costs(8, call, seen), costs(65536, call, seen));
    }
  }
}

// Even parts take the collectives without counts, and what is uneven keeps them: all ranks choose
// alike, those that have nothing, too.
TEST(HitCostTest, EvenPartsHaveNoCounts) {
  const auto sent = [](const std::vector<int64_t>& sizes, const Placement& from,
                       const Placement& to) {
    std::vector<std::string> each;
    for (int rank = 0; rank < 4; ++rank) {
      const auto log = std::make_shared<CountingLog>();
      auto comm = *count_communication(rank, 4, log);
      World world(comm);
      const MeshPtr mesh = *init_device_mesh(world, {{"x", 4}});
      const c10::AutoGradMode no_grad(false);
      const at::Tensor x = empty(sizes, mesh, {from});
      log->clear();
      redistribute(x, {to});
      std::string all;
      for (const CountedOperation& op : log->operations()) all += to_string(op.op);
      each.push_back(all);
    }
    for (const std::string& of_rank : each) EXPECT_EQ(of_rank, each[0]);
    return each[0];
  };
  EXPECT_EQ(sent({8, 3}, Shard(0), Replicate()), "all_gather");
  EXPECT_EQ(sent({7, 3}, Shard(0), Replicate()), "all_gather_v");
  EXPECT_EQ(sent({1, 3}, Shard(0), Replicate()), "all_gather_v");
  EXPECT_EQ(sent({16, 3}, StridedShard(0, 2), Replicate()), "all_gather");
  EXPECT_EQ(sent({12, 3}, StridedShard(0, 2), Replicate()), "all_gather_v");
  EXPECT_EQ(sent({8, 3}, RaggedShard(0, {2, 3, 1, 2}), Replicate()), "all_gather_v");
  EXPECT_EQ(sent({8, 3}, Partial(), Shard(0)), "reduce_scatter");
  EXPECT_EQ(sent({8, 3}, Partial(), Shard(1)), "reduce_scatter_v");
  EXPECT_EQ(sent({16, 3}, Partial(), StridedShard(0, 2)), "reduce_scatter");
  EXPECT_EQ(sent({12, 3}, Partial(), StridedShard(0, 2)), "reduce_scatter_v");
  EXPECT_EQ(sent({8, 4}, Shard(0), Shard(1)), "all_to_all");
  EXPECT_EQ(sent({8, 5}, Shard(0), Shard(1)), "all_to_all_v");
  EXPECT_EQ(sent({6, 4}, Shard(0), Shard(1)), "all_to_all_v");
  EXPECT_EQ(sent({1, 2}, Shard(0), Shard(1)), "all_to_all_v");
}

// Packing and unpacking make no tensor for a peer: a redistribution allocates as often for 4 ranks as
// for 512 (but for the counts that the collectives want, which are a few vectors).
int64_t allocations_of_a_redistribution(int ranks, const Placement& from, const Placement& to) {
  auto comm = *count_communication(ranks - 1, ranks, std::make_shared<CountingLog>());
  World world(comm);
  const MeshPtr mesh = *init_device_mesh(world, {{"x", ranks}});
  const c10::AutoGradMode no_grad(false);
  const at::Tensor x = empty({4, 2 * int64_t{ranks} + 1, 2 * int64_t{ranks}}, mesh, {from});
  return allocations_of([&] { redistribute(x, {to}); });
}

TEST(HitCostTest, PackingDoesNotDependOnTheNumberOfRanks) {
  at::set_num_threads(1);
  const std::pair<Placement, Placement> moves[] = {{Shard(1), Replicate()},
                                                   {Shard(1), Shard(2)},
                                                   {Partial(), Shard(1)},
                                                   {Partial(), StridedShard(2, 2)},
                                                   {Shard(2), StridedShard(2, 2)}};
  for (const auto& [from, to] : moves) {
    const int64_t few = allocations_of_a_redistribution(4, from, to);
    const int64_t many = allocations_of_a_redistribution(512, from, to);
    EXPECT_GT(few, 0);
    EXPECT_LE(many, few + 4) << from << " -> " << to;
  }
}

// The sizes of a ragged cut, one for each rank, are copied for none of the ranks.
TEST(HitCostTest, ARaggedCutCostsInProportionToTheRanks) {
  at::set_num_threads(1);
  const auto bytes = [](int ranks) {
    auto comm = *count_communication(ranks - 1, ranks, std::make_shared<CountingLog>());
    World world(comm);
    const MeshPtr mesh = *init_device_mesh(world, {{"x", ranks}});
    const c10::AutoGradMode no_grad(false);
    std::vector<int64_t> sizes(ranks, 1);
    sizes[0] = 3;
    const Placement ragged = RaggedShard(1, sizes);
    const at::Tensor x = empty({2, ranks + 2, 3}, mesh, {Partial()});
    const at::Tensor y = empty({2, ranks + 2, 3}, mesh, {ragged});
    const int64_t before = allocated_bytes_of_thread();
    redistribute(x, {ragged});
    redistribute(y, {Replicate()});
    return allocated_bytes_of_thread() - before;
  };
  bytes(64);  // what is made once
  const int64_t few = bytes(64);
  const int64_t many = bytes(1024);
  EXPECT_LT(many, 24 * few) << "for 16 times as many ranks";
}

}  // namespace
}  // namespace shardweave::testing

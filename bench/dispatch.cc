// What operators on DTensors cost over the same on plain tensors: one rank, so that only overhead
// counts. Sizes that change, also on ranks that are threads.
//
//   ./bazelw run -c opt //bench:dispatch            # a table
//   ./bazelw run -c opt //bench:dispatch -- --json  # one line
//
// Plain and sharded batches alternate in one run; an operator's overhead is the difference of the
// two medians, a transformer block's is their ratio. What is decided for the first time, and what is
// moved again, is measured on rank 0 of larger meshes, over a backend that sends nothing.

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "c10/core/GradMode.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/counting/counting.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"

ABSL_FLAG(bool, json, false, "print one line of JSON");
ABSL_FLAG(int, heap_calls, 1000000, "calls over which the heap must not grow");

namespace {

using shardweave::MeshPtr;
using Body = std::function<void()>;
using Tensors = std::vector<at::Tensor>;

double seconds(const Body& body, int calls) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Result {
  std::string name;
  int operators;  // per call
  double plain_us;
  double sharded_us;  // per call
  double overhead_us() const { return (sharded_us - plain_us) / operators; }
  double ratio() const { return sharded_us / plain_us; }
};

Result compare(std::string name, int operators, const Body& plain, const Body& sharded, int batches,
               int calls) {
  seconds(plain, calls);
  seconds(sharded, calls);
  std::vector<double> p, s;
  for (int i = 0; i < batches; ++i) {
    p.push_back(seconds(plain, calls));
    s.push_back(seconds(sharded, calls));
  }
  return {std::move(name), operators, median(p) / calls * 1e6, median(s) / calls * 1e6};
}

// --- single operators ----------------------------------------------------------------------------

// What the operators below work on: small, so that the work itself is short.
struct Operands {
  at::Tensor a, b;   // [8, 8]
  at::Tensor batch;  // [2, 8, 8]
  at::Tensor row;    // [8]
  at::Tensor mask;   // [8, 8] bool
  at::Tensor index;  // [8] int64
  at::Tensor four;   // [2, 2, 8, 4], queries, keys and values
  Tensors eight;     // 8 x [8, 8]
  Tensors many;      // 200 x [4]
};

Operands make_operands(const std::function<at::Tensor(const at::Tensor&)>& place) {
  Operands x{place(at::randn({8, 8})),
             place(at::randn({8, 8})),
             place(at::randn({2, 8, 8})),
             place(at::randn({8})),
             place(at::rand({8, 8}) > 0.5),
             place(at::arange(8)),
             place(at::randn({2, 2, 8, 4})),
             {},
             {}};
  for (int i = 0; i < 8; ++i) x.eight.push_back(place(at::randn({8, 8})));
  for (int i = 0; i < 200; ++i) x.many.push_back(place(at::randn({4})));
  return x;
}

struct Operator {
  const char* name;
  void (*run)(const Operands&);
};

// The commonest of forward, backward and optimizer steps.
constexpr Operator kCommon[] = {
    {"add", [](const Operands& x) { at::add(x.a, x.b); }},
    {"add_", [](const Operands& x) { at::Tensor(x.a).add_(x.b, 1e-9); }},
    {"add a number", [](const Operands& x) { at::add(x.a, 2.0); }},
    {"sub", [](const Operands& x) { at::sub(x.a, x.b); }},
    {"mul", [](const Operands& x) { at::mul(x.a, x.b); }},
    {"mul by a number", [](const Operands& x) { at::mul(x.a, 2.0); }},
    {"div", [](const Operands& x) { at::div(x.a, x.b); }},
    {"neg", [](const Operands& x) { at::neg(x.a); }},
    {"mm", [](const Operands& x) { at::mm(x.a, x.b); }},
    {"bmm", [](const Operands& x) { at::bmm(x.batch, x.batch); }},
    {"addmm", [](const Operands& x) { at::addmm(x.row, x.a, x.b); }},
    {"t", [](const Operands& x) { x.a.t(); }},
    {"transpose", [](const Operands& x) { x.batch.transpose(1, 2); }},
    {"view", [](const Operands& x) { x.batch.view({2, 64}); }},
    {"expand", [](const Operands& x) { x.row.expand({8, 8}); }},
    {"slice", [](const Operands& x) { x.a.slice(1, 2, 6); }},
    {"select", [](const Operands& x) { x.batch.select(0, 1); }},
    {"split", [](const Operands& x) { x.a.split(4, 1); }},
    {"cat", [](const Operands& x) { at::cat({x.a, x.b}, 1); }},
    {"stack of 8", [](const Operands& x) { at::stack(x.eight); }},
    {"sum", [](const Operands& x) { at::sum(x.a, {1}); }},
    {"mean", [](const Operands& x) { at::mean(x.a, {1}); }},
    {"softmax", [](const Operands& x) { at::_softmax(x.a, 1, false); }},
    {"log_softmax", [](const Operands& x) { at::_log_softmax(x.a, 1, false); }},
    {"layer_norm", [](const Operands& x) { at::native_layer_norm(x.a, {8}, x.row, x.row, 1e-5); }},
    {"gelu", [](const Operands& x) { at::gelu(x.a); }},
    {"embedding", [](const Operands& x) { at::embedding(x.a, x.index); }},
    {"where", [](const Operands& x) { at::where(x.mask, x.a, x.b); }},
    {"clone", [](const Operands& x) { x.a.clone(); }},
    {"detach", [](const Operands& x) { x.a.detach(); }},
};

constexpr Operator kLists[] = {
    {"_foreach_add_ of 200", [](const Operands& x) { at::_foreach_add_(x.many, 1e-9); }},
    {"_foreach_mul of 200", [](const Operands& x) { at::_foreach_mul(x.many, x.many); }},
};

// --- training steps ------------------------------------------------------------------------------

// Linear + GELU + mean, forward and backward, as in the peer's script: about 20 operators.
Body training_step(at::Tensor x, at::Tensor w, at::Tensor b) {
  w.requires_grad_();
  b.requires_grad_();
  return [=] { at::gelu(at::linear(x, w, b)).pow(2).mean().backward(); };
}

// A transformer block with 4 heads on an input of [4, seq, dim], forward and backward.
// `place`: of a weight, and the dimension of it that ranks may share, -1 if they do not.
std::function<void(const at::Tensor& x)> block_of(
    int dim, const std::function<at::Tensor(const at::Tensor&, int)>& place) {
  auto weight = [&](at::IntArrayRef sizes, int cut = -1) {
    return place(at::randn(sizes) * 0.02, cut).requires_grad_();
  };
  const at::Tensor norm1 = weight({dim}), norm2 = weight({dim});
  const at::Tensor qkv = weight({3 * dim, dim}), out = weight({dim, dim});
  const at::Tensor up = weight({4 * dim, dim}, 0), down = weight({dim, 4 * dim}, 1);
  return [=](const at::Tensor& x) {
    const int64_t seq = x.size(1);
    const at::Tensor h = at::layer_norm(x, {dim}, norm1);
    const Tensors parts =
        at::linear(h, qkv).view({4, seq, 3, 4, dim / 4}).permute({2, 0, 3, 1, 4}).unbind(0);
    const at::Tensor a =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, /*is_causal=*/true);
    const at::Tensor y = x + at::linear(a.transpose(1, 2).reshape({4, seq, dim}), out);
    const at::Tensor z =
        y + at::linear(at::gelu(at::linear(at::layer_norm(y, {dim}, norm2), up)), down);
    z.sum().backward();
  };
}

Body block(int dim, int seq, const std::function<at::Tensor(const at::Tensor&)>& place) {
  const at::Tensor x = place(at::randn({4, seq, dim}) * 0.02).requires_grad_();
  return [x, run = block_of(dim, [&](const at::Tensor& t, int) { return place(t); })] { run(x); };
}

// --- sizes that change, and tensors that move again ----------------------------------------------

// Steps of the block on lengths of 1 to 2048 at random, each new and then once more, as a step with a
// shape that stays. On rank 0; the shortest of three passes, before each of which all is forgotten.
struct DynamicShapes {
  std::string mesh;
  int64_t steps = 0;
  double new_us = 0;      // a step with a new length
  double seen_us = 0;     // with the same, seen before
  double most_ratio = 0;  // of one step
  double misses = 0;      // per step
  double operators = 0;   // likewise, forward and backward
  size_t entries = 0;     // of the cache, of specs and of plans, at the end
  size_t specs = 0;
  size_t plans = 0;
  double ratio() const { return new_us / seen_us; }
  double us_per_miss() const { return (new_us - seen_us) / misses; }
  double us_per_operator() const { return (new_us - seen_us) / operators; }
};

// `data`: how sequences lie. The last mesh dimension shares what the block lets it.
DynamicShapes dynamic_shapes(const MeshPtr& mesh, const shardweave::Placements& data,
                             size_t num_lengths) {
  using shardweave::Placements;
  constexpr int kDim = 64;
  const auto context = shardweave::dtensor_internal::MeshContext::of(mesh);
  std::vector<int64_t> lengths;
  for (int64_t n = 1; n <= 2048; ++n) lengths.push_back(n);
  std::shuffle(lengths.begin(), lengths.end(), std::mt19937(1));
  lengths.resize(num_lengths);
  const auto run = block_of(kDim, [&](const at::Tensor& t, int cut) {
    Placements placements(data.size());
    if (cut >= 0 && mesh->mesh().size() > 1) placements.back() = shardweave::Shard(cut);
    return shardweave::distribute_tensor(t, mesh, placements);
  });
  const auto step = [&](int64_t length) {
    const at::Tensor x = shardweave::zeros({4, length, kDim}, mesh, data).requires_grad_();
    mesh->world()->barrier().wait().IgnoreError();
    return seconds([&] { run(x); }, 1);
  };
  DynamicShapes result;
  result.mesh = mesh->mesh().to_string();
  result.steps = static_cast<int64_t>(lengths.size());
  std::vector<double> fresh(lengths.size(), 1e9), seen = fresh;
  for (int pass = 0; pass < 3; ++pass) {
    context->decisions.plans.clear();
    context->decisions.cache.clear();
    for (int i = 0; i < 3; ++i) step(2049);
    const auto counters = [&] { return shardweave::dispatch_counters(mesh); };
    const int64_t misses = counters().cache_misses, operators = counters().operators;
    for (size_t i = 0; i < lengths.size(); ++i) {
      fresh[i] = std::min(fresh[i], step(lengths[i]));
      seen[i] = std::min(seen[i], step(lengths[i]));
    }
    const auto steps = static_cast<double>(result.steps);
    result.misses = static_cast<double>(counters().cache_misses - misses) / steps;
    result.operators = static_cast<double>(counters().operators - operators) / (2 * steps);
  }
  // In pairs, for lengths differ.
  std::vector<double> differences;
  for (size_t i = 0; i < fresh.size(); ++i) {
    differences.push_back(fresh[i] - seen[i]);
    result.most_ratio = std::max(result.most_ratio, fresh[i] / seen[i]);
  }
  result.seen_us = median(seen) * 1e6;
  result.new_us = result.seen_us + median(differences) * 1e6;
  result.entries = context->decisions.cache.size();
  result.specs = context->num_specs();
  result.plans = context->decisions.plans.size();
  return result;
}

// Ranks are threads of this process, which share its cores.
DynamicShapes dynamic_shapes_of_ranks(const std::vector<shardweave::MeshDim>& dims,
                                      const shardweave::Placements& data) {
  int ranks = 1;
  for (const shardweave::MeshDim& dim : dims) ranks *= static_cast<int>(dim.size);
  DynamicShapes result;
  const absl::Status status =
      shardweave::run_ranks(ranks, [&](shardweave::World& world) -> absl::Status {
        at::set_num_threads(1);
        auto mesh = shardweave::init_device_mesh(world, dims);
        if (!mesh.ok()) return mesh.status();
        const DynamicShapes mine = dynamic_shapes(*mesh, data, 24);
        if (world.rank() == 0) result = mine;
        return absl::OkStatus();
      });
  if (!status.ok()) std::fprintf(stderr, "dispatch: %s\n", status.ToString().c_str());
  return result;
}

// On rank 0 of a mesh whose other ranks are not there.
void on_counting_mesh(const std::vector<shardweave::MeshDim>& dims,
                      const std::function<void(const MeshPtr&)>& body) {
  int ranks = 1;
  for (const shardweave::MeshDim& dim : dims) ranks *= static_cast<int>(dim.size);
  shardweave::World world(
      shardweave::count_communication(0, ranks, std::make_shared<shardweave::CountingLog>())
          .value());
  body(shardweave::init_device_mesh(world, dims).value());
}

// Of at::add and at::mm on sizes never seen before, made before the clock starts.
double miss_on_512_us() {
  double us = 0;
  on_counting_mesh({{"dp", 8}, {"sp", 8}, {"tp", 8}}, [&](const MeshPtr& mesh) {
    using shardweave::Replicate;
    using shardweave::Shard;
    const c10::AutoGradMode no_grad(false);
    std::vector<at::Tensor> a, w;
    for (int i = 0; i < 300; ++i) {
      a.push_back(shardweave::zeros({64 + i, 8}, mesh, {Shard(0), Replicate(), Replicate()}));
      w.push_back(shardweave::zeros({8, 64 + i}, mesh, {Replicate(), Replicate(), Shard(1)}));
    }
    size_t next = 0;
    const Body both = [&] {
      at::add(a[next], a[next]);
      at::mm(a[next], w[next]);
      ++next;
    };
    us = seconds(both, static_cast<int>(a.size())) / static_cast<double>(2 * a.size()) * 1e6;
  });
  return us;
}

struct Redistribution {
  double first_us = 0;  // searched, and its packing worked out
  double again_us = 0;
};

Redistribution memoised_redistribution() {
  Redistribution result;
  on_counting_mesh({{"dp", 2}, {"sp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    using shardweave::Replicate;
    using shardweave::Shard;
    const c10::AutoGradMode no_grad(false);
    const auto context = shardweave::dtensor_internal::MeshContext::of(mesh);
    const at::Tensor x = shardweave::zeros({16, 16, 4}, mesh, {Shard(0), Shard(1), Replicate()});
    const shardweave::Layout to({Shard(1), Shard(0), Replicate()});
    const Body again = [&] { shardweave::redistribute(x, to); };
    const Body first = [&] {
      context->decisions.plans.clear();
      again();
    };
    const Result times = compare("", 1, again, first, 41, 50);
    result = {times.sharded_us, times.plain_us};
  });
  return result;
}

// --- all of it -----------------------------------------------------------------------------------

struct Report {
  std::vector<Result> common;
  std::vector<Result> lists;
  std::vector<Result> steps;
  double median_overhead_us = 0;
  double miss_us = 0;
  double miss_on_512_us = 0;
  std::vector<DynamicShapes> dynamic;
  Redistribution redistribution;
  int64_t heap_growth = 0;
};

Report measure(const MeshPtr& mesh) {
  at::set_num_threads(1);
  Report report;
  const auto plain = [](const at::Tensor& t) { return t; };
  const auto sharded = [&](const at::Tensor& t) {
    return shardweave::distribute_tensor(t, mesh, shardweave::Placements{shardweave::Replicate()});
  };
  const Operands p = make_operands(plain), s = make_operands(sharded);
  {
    const c10::AutoGradMode no_grad(false);
    for (const Operator& op : kCommon) {
      report.common.push_back(compare(op.name, 1, [&] { op.run(p); }, [&] { op.run(s); }, 41, 400));
    }
    for (const Operator& op : kLists) {
      report.lists.push_back(compare(op.name, 200, [&] { op.run(p); }, [&] { op.run(s); }, 21, 50));
    }
  }
  std::vector<double> overheads;
  for (const Result& r : report.common) overheads.push_back(r.overhead_us());
  report.median_overhead_us = median(overheads);

  const at::Tensor x = at::randn({4, 16}), w = at::randn({32, 16}), bias = at::randn({32});
  report.steps.push_back(compare("linear+gelu+mean", 20, training_step(x, w.clone(), bias.clone()),
                                 training_step(sharded(x), sharded(w), sharded(bias)), 41, 200));
  report.steps.push_back(compare("transformer block d=64 T=32", 100, block(64, 32, plain),
                                 block(64, 32, sharded), 41, 20));
  report.steps.push_back(compare("transformer block d=512 T=128", 100, block(512, 128, plain),
                                 block(512, 128, sharded), 21, 1));

  using shardweave::Replicate;
  using shardweave::Shard;
  report.dynamic = {dynamic_shapes(mesh, {Replicate()}, 100),
                    dynamic_shapes_of_ranks({{"tp", 2}}, {Replicate()}),
                    dynamic_shapes_of_ranks({{"dp", 2}, {"sp", 2}, {"tp", 2}},
                                            {Shard(0), Shard(1), Replicate()})};
  report.miss_on_512_us = miss_on_512_us();
  report.redistribution = memoised_redistribution();

  // Misses: shapes never seen before, made before the clock starts.
  std::vector<at::Tensor> fresh;
  for (int i = 0; i < 500; ++i) fresh.push_back(sharded(at::zeros({9 + i, 3})));
  const c10::AutoGradMode no_grad(false);
  size_t next = 0;
  report.miss_us = seconds(
                       [&] {
                         at::add(fresh[next], fresh[next]);
                         ++next;
                       },
                       static_cast<int>(fresh.size())) /
                   static_cast<double>(fresh.size()) * 1e6;

  auto heap = [] { return static_cast<int64_t>(mallinfo2().uordblks); };
  double scale = 0;
  const auto call = [&] { at::add(s.a, s.b, scale += 0.5); };
  seconds(call, 1000);
  const int64_t before = heap();
  seconds(call, absl::GetFlag(FLAGS_heap_calls));
  report.heap_growth = heap() - before;
  return report;
}

nlohmann::json to_json(const std::vector<Result>& results) {
  nlohmann::json json = nlohmann::json::array();
  for (const Result& r : results) {
    json.push_back({{"name", r.name},
                    {"plain_us", r.plain_us},
                    {"dtensor_us", r.sharded_us},
                    {"overhead_us", r.overhead_us()},
                    {"ratio", r.ratio()}});
  }
  return json;
}

nlohmann::json to_json(const DynamicShapes& d) {
  return {{"mesh", d.mesh},
          {"steps", d.steps},
          {"new_length_us", d.new_us},
          {"seen_length_us", d.seen_us},
          {"ratio", d.ratio()},
          {"most_ratio", d.most_ratio},
          {"misses_per_step", d.misses},
          {"operators_per_step", d.operators},
          {"us_per_miss", d.us_per_miss()},
          {"us_per_operator", d.us_per_operator()},
          {"entries", d.entries},
          {"specs", d.specs},
          {"plans", d.plans}};
}

void print_json(const Report& report) {
  nlohmann::json on_ranks = nlohmann::json::array();
  for (size_t i = 1; i < report.dynamic.size(); ++i) on_ranks.push_back(to_json(report.dynamic[i]));
  const nlohmann::json json = {{"operators", to_json(report.common)},
                               {"lists", to_json(report.lists)},
                               {"steps", to_json(report.steps)},
                               {"median_overhead_us", report.median_overhead_us},
                               {"miss_us", report.miss_us},
                               {"miss_on_mesh_of_512_us", report.miss_on_512_us},
                               {"dynamic_shapes", to_json(report.dynamic[0])},
                               {"dynamic_shapes_on_ranks", on_ranks},
                               {"redistribution",
                                {{"first_us", report.redistribution.first_us},
                                 {"again_us", report.redistribution.again_us}}},
                               {"heap_growth_bytes", report.heap_growth},
                               {"heap_calls", absl::GetFlag(FLAGS_heap_calls)}};
  std::printf("%s\n", json.dump().c_str());
}

void print_table(const Report& report) {
  for (const auto* results : {&report.common, &report.lists, &report.steps}) {
    for (const Result& r : *results) {
      std::printf("%-30s plain %9.2f us  DTensor %9.2f us  ratio %5.2f  per operator %+6.3f us\n",
                  r.name.c_str(), r.plain_us, r.sharded_us, r.ratio(), r.overhead_us());
    }
  }
  for (const DynamicShapes& d : report.dynamic) {
    std::printf(
        "%-30s seen %9.2f us  new     %9.2f us  ratio %5.2f, at most %.2f  per miss %.1f us, per "
        "operator %.2f us, %.1f misses a step; %zu entries, %zu specs, %zu plans after %lld\n",
        ("lengths on " + d.mesh).c_str(), d.seen_us, d.new_us, d.ratio(), d.most_ratio,
        d.us_per_miss(), d.us_per_operator(), d.misses, d.entries, d.specs, d.plans,
        static_cast<long long>(d.steps));
  }
  std::printf("%-30s first %.1f us, again %.1f us\n", "redistribute on (2, 2, 2)",
              report.redistribution.first_us, report.redistribution.again_us);
  std::printf("%-30s %.3f us\n%-30s %.1f us\n%-30s %.1f us\n%-30s %lld bytes over %d calls\n",
              "median of the operators", report.median_overhead_us, "cache miss (add)",
              report.miss_us, "cache miss (add, mm) on 8x8x8", report.miss_on_512_us, "heap growth",
              static_cast<long long>(report.heap_growth), absl::GetFlag(FLAGS_heap_calls));
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  Report report;
  const absl::Status status =
      shardweave::run_ranks(1, [&](shardweave::World& world) -> absl::Status {
        auto mesh = shardweave::init_device_mesh(world, {{"x", 1}});
        if (!mesh.ok()) return mesh.status();
        report = measure(*mesh);
        return absl::OkStatus();
      });
  if (!status.ok()) {
    std::fprintf(stderr, "dispatch: %s\n", status.ToString().c_str());
    return 1;
  }
  if (absl::GetFlag(FLAGS_json)) {
    print_json(report);
  } else {
    print_table(report);
  }
  return 0;
}

// What an operator on DTensors costs over the plain operator, in microseconds: one rank, so that only overhead counts.
//
//   ./bazelw run -c opt //bench:dispatch            # a table
//   ./bazelw run -c opt //bench:dispatch -- --json  # one line
//
// Plain and sharded batches alternate in one run; the figure is the difference of the medians per operator.

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "c10/core/GradMode.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/dtensor.h"

ABSL_FLAG(bool, json, false, "print one line of JSON");
ABSL_FLAG(int, heap_calls, 1000000, "calls over which the heap must not grow");

namespace {

using shardweave::MeshPtr;
using Body = std::function<void()>;

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
  int operators;    // per call
  double plain_us;  // per call
  double sharded_us;
  double overhead_us() const { return (sharded_us - plain_us) / operators; }
};

Result compare(std::string name, int operators, const Body& plain, const Body& sharded) {
  constexpr int kBatches = 41;
  constexpr int kCalls = 400;
  seconds(plain, kCalls);
  seconds(sharded, kCalls);
  std::vector<double> p, s;
  for (int i = 0; i < kBatches; ++i) {
    p.push_back(seconds(plain, kCalls));
    s.push_back(seconds(sharded, kCalls));
  }
  return {std::move(name), operators, median(p) / kCalls * 1e6, median(s) / kCalls * 1e6};
}

// Linear + GELU + mean, forward and backward, as in the peer's script.
Body training_step(at::Tensor x, at::Tensor w, at::Tensor b) {
  w.requires_grad_();
  b.requires_grad_();
  return [=] { at::gelu(at::linear(x, w, b)).pow(2).mean().backward(); };
}

void run(const MeshPtr& mesh, std::vector<Result>& results, double& miss_us, int64_t& heap_growth) {
  using shardweave::Placements, shardweave::Shard, shardweave::Replicate,
      shardweave::distribute_tensor;
  at::set_num_threads(1);
  auto sharded = [&](const at::Tensor& t) {
    return distribute_tensor(t, mesh, Placements{Shard(0)});
  };
  auto whole = [&](const at::Tensor& t) {
    return distribute_tensor(t, mesh, Placements{Replicate()});
  };
  const at::Tensor a = at::randn({8, 8}), b = at::randn({8, 8});
  const at::Tensor da = sharded(a), db = sharded(b), dr = whole(b);
  {
    const c10::AutoGradMode no_grad(false);
    results.push_back(compare("add", 1, [&] { at::add(a, b); }, [&] { at::add(da, db); }));
    results.push_back(compare("mul by a scalar", 1, [&] { a * 2.0; }, [&] { da * 2.0; }));
    results.push_back(compare("mm", 1, [&] { at::mm(a, b); }, [&] { at::mm(da, dr); }));
    results.push_back(compare("t", 1, [&] { a.t(); }, [&] { da.t(); }));
    results.push_back(compare("detach", 1, [&] { a.detach(); }, [&] { da.detach(); }));
    results.push_back(compare(
        "stack of 8", 1, [&] { at::stack({a, b, a, b, a, b, a, b}); },
        [&] { at::stack({da, db, da, db, da, db, da, db}); }));
  }
  const at::Tensor x = at::randn({4, 16}), w = at::randn({32, 16}), bias = at::randn({32});
  results.push_back(compare("linear+gelu+mean step", 20, training_step(x, w.clone(), bias.clone()),
                            training_step(whole(x), whole(w), whole(bias))));

  // Misses: shapes never seen before, made before the clock starts.
  std::vector<at::Tensor> fresh;
  for (int i = 0; i < 500; ++i) fresh.push_back(sharded(at::zeros({9 + i, 3})));
  size_t next = 0;
  const c10::AutoGradMode no_grad(false);
  miss_us = seconds(
                [&] {
                  at::add(fresh[next], fresh[next]);
                  ++next;
                },
                static_cast<int>(fresh.size())) /
            static_cast<double>(fresh.size()) * 1e6;

  const int calls = absl::GetFlag(FLAGS_heap_calls);
  auto heap = [] { return static_cast<int64_t>(mallinfo2().uordblks); };
  seconds([&] { at::add(da, db, 0.5); }, 1000);
  const int64_t before = heap();
  double scale = 0;
  seconds([&] { at::add(da, db, scale += 0.5); }, calls);
  heap_growth = heap() - before;
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  std::vector<Result> results;
  double miss_us = 0;
  int64_t heap_growth = 0;
  const absl::Status status =
      shardweave::run_ranks(1, [&](shardweave::World& world) -> absl::Status {
        auto mesh = shardweave::init_device_mesh(world, {{"x", 1}});
        if (!mesh.ok()) return mesh.status();
        run(*mesh, results, miss_us, heap_growth);
        return absl::OkStatus();
      });
  if (!status.ok()) {
    std::fprintf(stderr, "dispatch: %s\n", status.ToString().c_str());
    return 1;
  }
  nlohmann::json json;
  for (const Result& r : results) {
    if (!absl::GetFlag(FLAGS_json)) {
      std::printf("%-24s plain %7.2f us  DTensor %7.2f us  overhead per operator %6.3f us\n",
                  r.name.c_str(), r.plain_us, r.sharded_us, r.overhead_us());
    }
    json["operators"].push_back({{"name", r.name},
                                 {"plain_us", r.plain_us},
                                 {"dtensor_us", r.sharded_us},
                                 {"overhead_us", r.overhead_us()}});
  }
  json["miss_us"] = miss_us;
  json["heap_growth_bytes"] = heap_growth;
  json["heap_calls"] = absl::GetFlag(FLAGS_heap_calls);
  if (absl::GetFlag(FLAGS_json)) {
    std::printf("%s\n", json.dump().c_str());
  } else {
    std::printf("%-24s %.1f us\n%-24s %lld bytes over %d calls\n", "cache miss (add)", miss_us,
                "heap growth", static_cast<long long>(heap_growth),
                absl::GetFlag(FLAGS_heap_calls));
  }
  return 0;
}

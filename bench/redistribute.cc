// What redistribution sends and how long it takes: bytes against the least that any way could do
// with, time against the backend's plain collectives of the same bytes.
//
//   ./bazelw run -c opt //bench:redistribute            # a table
//   ./bazelw run -c opt //bench:redistribute -- --json  # one line
//
// And whether it pays to cut a matrix product into pieces whose gathers (or sums) are under way while
// others are computed, two ranks: sequence parallelism's gather before and its reduce-scatter behind.
//
// Ranks are threads, over inproc and over Gloo (TCP on loopback). Redistribution and plain
// collectives, whole and in pieces, alternate in one run; the figures are medians.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "c10/core/GradMode.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/gloo/gloo_backend.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/status_exception.h"
#include "shardweave/comm/store/in_process_store.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/redistribute_async.h"
#include "shardweave/placement/redistribute_bound.h"

ABSL_FLAG(bool, json, false, "print one line of JSON");
ABSL_FLAG(std::string, backends, "inproc,gloo", "which backends, with commas");
ABSL_FLAG(int, calls, 40, "calls of each kind, of which the median is taken");

namespace {

using namespace shardweave;
using namespace shardweave::dtensor_internal;

struct Case {
  std::vector<MeshDim> mesh;
  std::vector<int64_t> sizes;
  const char* from;
  const char* to;
};

const std::vector<Case> kCases = {
    {{{"x", 4}}, {1024, 1024}, "[S(0)]", "[R]"},
    {{{"x", 4}}, {1024, 1024}, "[S(1)]", "[R]"},
    {{{"x", 4}}, {1024, 1024}, "[P(sum)]", "[R]"},
    {{{"x", 4}}, {1024, 1024}, "[P(sum)]", "[S(0)]"},
    {{{"x", 4}}, {1024, 1024}, "[P(sum)]", "[S(1)]"},
    {{{"x", 4}}, {1024, 1024}, "[S(0)]", "[S(1)]"},
    {{{"x", 4}}, {1024, 1024}, "[S(0)]", "[S(0, sf=2)]"},
    {{{"x", 4}}, {1023, 1021}, "[S(0)]", "[S(1)]"},
    {{{"x", 4}}, {1024, 1024}, "[S(0)]", "[S(0, sizes=[512,0,100,412])]"},
    {{{"x", 4}}, {64, 64}, "[P(sum)]", "[R]"},
    {{{"x", 2}, {"y", 2}}, {1024, 1024}, "[S(0), S(0)]", "[R, R]"},
    {{{"x", 2}, {"y", 2}}, {1024, 1024}, "[P(sum), P(sum)]", "[R, R]"},
    {{{"x", 2}, {"y", 2}}, {1024, 1024}, "[P(sum), P(sum)]", "[S(0), S(1)]"},
    {{{"x", 2}, {"y", 2}}, {1024, 1024}, "[S(0), S(1)]", "[S(1), S(0)]"},
    {{{"x", 2}, {"y", 2}}, {1024, 1024}, "[P(sum), S(0)]", "[S(1), R]"},
    {{{"x", 2}, {"y", 2}}, {1023, 1021}, "[S(0), S(0)]", "[S(1), S(1)]"},
};

struct Result {
  std::string plan;
  int64_t bytes = 0;
  int64_t bound = 0;
  double seconds = 0;
  double plain_seconds = 0;
};

// Small tensors at once against one by one.
struct ManyResult {
  int tensors = 100;
  double one_by_one_seconds = 0;
  double together_seconds = 0;
};

// A product with the collective before it (or behind), whole and in pieces.
struct PiecesResult {
  int64_t dim, length;
  bool before;
  int pieces;
  double whole_seconds = 0;
  double pieces_seconds = 0;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Of one call, with all ranks beginning together.
double timed(Communicator& all, const std::function<void()>& call) {
  throw_if_error(all.barrier().wait());
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The medians of calls of `a` and `b` in turn.
std::pair<double, double> compare(Communicator& all, const std::function<void()>& a,
                                  const std::function<void()>& b) {
  std::vector<double> first, second;
  for (int i = 0; i < absl::GetFlag(FLAGS_calls) + 5; ++i) {
    const double x = timed(all, a);
    const double y = timed(all, b);
    if (i < 5) continue;
    first.push_back(x);
    second.push_back(y);
  }
  return {median(first), median(second)};
}

Result run_case(const Case& c, const MeshPtr& mesh, Communicator& all) {
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  const Layout from = value_or_throw(Layout::parse(c.from));
  const Layout to = value_or_throw(Layout::parse(c.to));
  const Dims sizes(c.sizes.begin(), c.sizes.end());
  const SpecRef spec =
      context->intern(from, sizes, contiguous_strides(sizes), at::kFloat, at::kCPU);
  const at::Tensor tensor = wrap(
      at::ones(at::IntArrayRef(spec->local_sizes.data(), spec->local_sizes.size())), spec, context);
  const PlanRef plan = plan_for(*context, spec, context->with_layout(*spec, to));

  // What goes into the collectives, and where it comes out.
  std::vector<CollectiveTransfer> transfers;
  PlanRun run(*context, *plan, meta_of(tensor).local(), sizes);
  for (CollectiveTransfer transfer; run.next(&transfer); run.arrived(transfer)) {
    throw_if_error(send(*context, transfer, "warm-up").wait());
    transfers.push_back(transfer);
  }
  Result result;
  result.plan = plan->plan.to_string();
  result.bytes = plan->plan.bytes();
  result.bound = least_bytes(from, to, mesh->mesh().shape(), sizes, 4);
  std::tie(result.seconds, result.plain_seconds) = compare(
      all, [&] { redistribute(tensor, to); },
      [&] {
        for (const CollectiveTransfer& transfer : transfers) {
          throw_if_error(send(*context, transfer, "plain").wait());
        }
      });
  return result;
}

ManyResult run_many(const MeshPtr& mesh, Communicator& all) {
  ManyResult result;
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < result.tensors; ++i) {
    tensors.push_back(zeros({16 + i % 3, 16}, mesh, {i % 2 == 0 ? Shard(0) : Partial()}));
  }
  const std::vector<Layout> layouts(tensors.size(), Layout({Replicate()}));
  std::tie(result.one_by_one_seconds, result.together_seconds) = compare(
      all,
      [&] {
        for (size_t i = 0; i < tensors.size(); ++i) redistribute(tensors[i], layouts[i]);
      },
      [&] { redistribute_all(tensors, layouts); });
  return result;
}

// [4, length, dim] with 4 dim features, as in an MLP: gathered along the sequence, then cut by columns;
// or cut by rows, then summed and scattered along the sequence.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, bool before) {
  if (before) return at::linear(redistribute(x, {Replicate()}), weight);
  return redistribute(at::linear(x, weight), {Shard(1)});
}

// The same of a part of the batch each, with the next one's gather (or the last one's sum) under way.
void product_in_pieces(const std::vector<at::Tensor>& parts, const at::Tensor& weight,
                       bool before) {
  std::vector<at::Tensor> results;
  if (before) {
    std::vector<PendingTensor> pending = {redistribute_async(parts[0], {Replicate()})};
    for (size_t i = 0; i < parts.size(); ++i) {
      if (i + 1 < parts.size()) pending.push_back(redistribute_async(parts[i + 1], {Replicate()}));
      results.push_back(at::linear(pending[i].wait(), weight));
    }
    return;
  }
  std::vector<PendingTensor> pending;
  for (const at::Tensor& part : parts) {
    pending.push_back(redistribute_async(at::linear(part, weight), {Shard(1)}));
  }
  for (PendingTensor& p : pending) results.push_back(p.wait());
}

void run_pieces(int rank, std::unique_ptr<Backend> carrier, std::vector<PiecesResult>& results) {
  at::set_num_threads(1);
  const c10::AutoGradMode no_grad(false);
  const std::shared_ptr<Communicator> all = Communicator::create(std::move(carrier));
  const MeshPtr mesh =
      value_or_throw(ConnectedMesh::create(value_or_throw(DeviceMesh::create({{"tp", 2}})), all));
  for (const auto& [dim, length] : {std::pair<int64_t, int64_t>(256, 128), {1024, 512}}) {
    for (const bool before : {true, false}) {
      const at::Tensor weight =
          before ? ones({4 * dim, dim}, mesh, {Shard(0)}) : ones({dim, 4 * dim}, mesh, {Shard(1)});
      const Placement cut = before ? Shard(1) : Shard(2);
      const at::Tensor x = ones({4, length, before ? dim : 4 * dim}, mesh, {cut});
      for (const int pieces : {2, 4}) {
        const std::vector<at::Tensor> parts = x.chunk(pieces, 0);
        PiecesResult result{dim, length, before, pieces};
        std::tie(result.whole_seconds, result.pieces_seconds) = compare(
            *all, [&, b = before] { product(x, weight, b); },
            [&, b = before] { product_in_pieces(parts, weight, b); });
        if (rank == 0) results.push_back(result);
      }
    }
  }
  throw_if_error(all->barrier().wait());
}

// On rank 0's view of the clock.
void run_rank(const std::string& backend, int rank, int num_ranks, std::unique_ptr<Backend> carrier,
              std::vector<Result>& results, ManyResult& many) {
  at::set_num_threads(1);
  const c10::AutoGradMode no_grad(false);
  const std::shared_ptr<Communicator> all = Communicator::create(std::move(carrier));
  for (const Case& c : kCases) {
    const MeshPtr mesh =
        value_or_throw(ConnectedMesh::create(value_or_throw(DeviceMesh::create(c.mesh)), all));
    Result result = run_case(c, mesh, *all);
    if (rank == 0) results.push_back(std::move(result));
  }
  const MeshPtr line = value_or_throw(
      ConnectedMesh::create(value_or_throw(DeviceMesh::create({{"x", num_ranks}})), all));
  const ManyResult result = run_many(line, *all);
  if (rank == 0) many = result;
  throw_if_error(all->barrier({.timeout = absl::ZeroDuration(), .tag = backend}).wait());
}

// False, with a word to stderr, if a rank failed.
bool run_backend(const std::string& backend, int ranks,
                 const std::function<void(int rank, std::unique_ptr<Backend>)>& body) {
  InprocHub hub(ranks);
  const std::shared_ptr<Store> store = make_in_process_store();
  std::vector<std::string> failures(ranks);
  std::vector<int> world(ranks);
  std::iota(world.begin(), world.end(), 0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        std::unique_ptr<Backend> carrier;
        if (backend == "gloo") {
          GroupInfo group{
              .name = "world", .rank = rank, .world_ranks = {world.begin(), world.end()}};
          carrier = value_or_throw(make_gloo_backend(store, std::move(group)));
        } else {
          carrier = hub.make_backend(rank);
        }
        body(rank, std::move(carrier));
      } catch (const std::exception& e) {
        failures[rank] = message_of(e);
        hub.abort(absl::AbortedError(failures[rank]));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) {
    if (failure.empty()) continue;
    std::fprintf(stderr, "redistribute over %s: %s\n", backend.c_str(), failure.c_str());
    return false;
  }
  return true;
}

std::string mesh_name(const std::vector<MeshDim>& dims) {
  return "(" +
         absl::StrJoin(
             dims, ",",
             [](std::string* out, const MeshDim& d) { out->append(std::to_string(d.size)); }) +
         ")";
}

constexpr int kRanks = 4;

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const bool as_json = absl::GetFlag(FLAGS_json);
  nlohmann::json json;
  for (const std::string& backend : std::vector<std::string>(
           absl::StrSplit(absl::GetFlag(FLAGS_backends), ',', absl::SkipEmpty()))) {
    if (backend != "inproc" && backend != "gloo") {
      std::fprintf(stderr, "redistribute: no backend '%s' (wanted: inproc, gloo)\n",
                   backend.c_str());
      return 1;
    }
    std::vector<Result> results;
    ManyResult many;
    std::vector<PiecesResult> pieces;
    const auto redistributions = [&](int rank, std::unique_ptr<Backend> carrier) {
      run_rank(backend, rank, kRanks, std::move(carrier), results, many);
    };
    const auto products = [&](int rank, std::unique_ptr<Backend> carrier) {
      run_pieces(rank, std::move(carrier), pieces);
    };
    if (!run_backend(backend, kRanks, redistributions) || !run_backend(backend, 2, products)) {
      return 1;
    }
    if (!as_json) {
      std::printf("\n%s, 4 ranks, f32\n%-6s %-10s %-46s %10s %7s %9s %9s %6s\n", backend.c_str(),
                  "mesh", "tensor", "from -> to", "bytes", "/bound", "us", "plain us", "ratio");
    }
    for (size_t i = 0; i < results.size(); ++i) {
      const Case& c = kCases[i];
      const Result& r = results[i];
      const std::string sizes = absl::StrJoin(c.sizes, "x");
      const std::string way = std::string(c.from) + " -> " + c.to;
      const double over_bound = static_cast<double>(r.bytes) / static_cast<double>(r.bound);
      const double ratio = r.seconds / r.plain_seconds;
      if (!as_json) {
        std::printf("%-6s %-10s %-46s %10lld %7.3f %9.1f %9.1f %6.2f\n", mesh_name(c.mesh).c_str(),
                    sizes.c_str(), way.c_str(), static_cast<long long>(r.bytes), over_bound,
                    r.seconds * 1e6, r.plain_seconds * 1e6, ratio);
      }
      json[backend]["transitions"].push_back({{"mesh", mesh_name(c.mesh)},
                                              {"tensor", sizes},
                                              {"from", c.from},
                                              {"to", c.to},
                                              {"plan", r.plan},
                                              {"bytes", r.bytes},
                                              {"least_bytes", r.bound},
                                              {"us", r.seconds * 1e6},
                                              {"plain_us", r.plain_seconds * 1e6},
                                              {"ratio", ratio}});
    }
    if (!as_json) {
      std::printf("%d small tensors to Replicate: one by one %.1f us, together %.1f us\n",
                  many.tensors, many.one_by_one_seconds * 1e6, many.together_seconds * 1e6);
    }
    json[backend]["small_tensors"] = {{"tensors", many.tensors},
                                      {"one_by_one_us", many.one_by_one_seconds * 1e6},
                                      {"together_us", many.together_seconds * 1e6}};
    for (const PiecesResult& p : pieces) {
      const double ratio = p.pieces_seconds / p.whole_seconds;
      const char* const what = p.before ? "gather, product" : "product, reduce-scatter";
      if (!as_json) {
        std::printf("%s, d=%lld T=%lld B=4, 2 ranks: whole %.1f us, in %d pieces %.1f us (%.2f)\n",
                    what, static_cast<long long>(p.dim), static_cast<long long>(p.length),
                    p.whole_seconds * 1e6, p.pieces, p.pieces_seconds * 1e6, ratio);
      }
      json[backend]["pieces"].push_back({{"what", what},
                                         {"dim", p.dim},
                                         {"length", p.length},
                                         {"pieces", p.pieces},
                                         {"whole_us", p.whole_seconds * 1e6},
                                         {"pieces_us", p.pieces_seconds * 1e6},
                                         {"ratio", ratio}});
    }
  }
  if (as_json) std::printf("%s\n", json.dump().c_str());
  return 0;
}

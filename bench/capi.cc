// What an operator costs through the C interface over the same call in C++, in microseconds; and
// what it allocates on the way in.
//
//   ./bazelw run -c opt //bench:capi            # a table
//   ./bazelw run -c opt //bench:capi -- --json  # one line
//
// Both kinds of calls alternate in one run; the figure is the difference of the medians. Each C
// call frees its result, as each C++ call does. "kernel" is not LibTorch's: the operator is the
// same. One rank, one thread.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "c10/core/GradMode.h"
#include "nlohmann/json.hpp"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/comm/testing/allocation_counter.h"

ABSL_FLAG(bool, json, false, "print one line of JSON");

namespace {

using Body = std::function<void()>;

constexpr double kBoundUs = 0.25;

void check(swv_status* status) {
  if (status == nullptr) return;
  std::fprintf(stderr, "capi: %s\n", swv_status_message(status));
  std::exit(1);
}

// Of this thread, which does everything: a machine that is busy with other things matters less.
double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}
double seconds(const Body& body, int calls) {
  const double start = cpu_seconds();
  for (int i = 0; i < calls; ++i) body();
  return cpu_seconds() - start;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

int64_t allocations(const Body& body) {
  body();
  body();
  const int64_t before = shardweave::allocations_so_far();
  body();
  return shardweave::allocations_so_far() - before;
}

struct Result {
  std::string name;
  double cpp_us;
  double c_us;
  int64_t cpp_allocations;
  int64_t c_allocations;  // one more is the result's handle
  double overhead_us() const { return c_us - cpp_us; }
};

Result compare(std::string name, const Body& cpp, const Body& c) {
  constexpr int kBatches = 201;
  constexpr int kCalls = 300;
  seconds(cpp, kCalls);
  seconds(c, kCalls);
  std::vector<double> x, y;
  for (int i = 0; i < kBatches; ++i) {
    x.push_back(seconds(cpp, kCalls));
    y.push_back(seconds(c, kCalls));
  }
  return {std::move(name), median(x) / kCalls * 1e6, median(y) / kCalls * 1e6, allocations(cpp),
          allocations(c)};
}

// An operator with one result.
Body c_call(const char* name, std::vector<swv_value> arguments) {
  swv_op* op = nullptr;
  check(swv_op_find(name, &op));  // lives as long as the program
  return [op, arguments = std::move(arguments)] {
    swv_value result;
    check(
        swv_op_call(op, SWV_MODE_NO_GRAD, arguments.data(), arguments.size(), &result, 1, nullptr));
    swv_tensor_free(result.as.tensor);
  };
}

void compare_on(const std::string& what, swv_tensor* a, swv_tensor* b, swv_tensor* c,
                std::vector<Result>& results) {
  const at::Tensor x = a->tensor, y = b->tensor, z = c->tensor;
  static const int64_t dims[] = {1};
  static swv_tensor* list[2];
  list[0] = a;
  list[1] = b;
  const swv_value va = swv_value_tensor(a), vb = swv_value_tensor(b), vc = swv_value_tensor(c);
  const auto add = [&](const char* name, const Body& cpp, const Body& by_c) {
    results.push_back(compare(what + name, cpp, by_c));
  };
  add("add", [&] { at::add(x, y); }, c_call("aten::add.Tensor", {va, vb}));
  add("add, all overloads", [&] { at::add(x, y); }, c_call("aten::add", {va, vb}));
  add(
      "mul by a number", [&] { at::mul(x, 2.0); },
      c_call("aten::mul.Scalar", {va, swv_value_float(2)}));
  add("mm", [&] { at::mm(x, y); }, c_call("aten::mm", {va, vb}));
  add("linear with bias", [&] { at::linear(x, y, z); }, c_call("aten::linear", {va, vb, vc}));
  add(
      "sum over a dimension", [&] { at::sum(x, {1}); },
      c_call("aten::sum.dim_IntList", {va, swv_value_ints(dims, 1)}));
  add("cat of two", [&] { at::cat({x, y}); }, c_call("aten::cat", {swv_value_tensors(list, 2)}));
  add(
      "addcmul, 4 arguments", [&] { at::addcmul(x, x, y, 0.5); },
      c_call("aten::addcmul", {va, va, vb, swv_value_float(0.5)}));
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  at::set_num_threads(1);
  check(swv_set_num_threads(1));
  const c10::AutoGradMode no_grad(false);
  swv_world* world = nullptr;
  swv_mesh* mesh = nullptr;
  swv_layout* layout = nullptr;
  const swv_mesh_dim dim = {"x", 1};
  check(swv_world_create_local(1, nullptr, &world));
  check(swv_mesh_create(world, &dim, 1, &mesh));
  check(swv_layout_parse("[R]", &layout));
  const int64_t sizes[] = {8, 8};
  std::vector<Result> results;
  for (const bool sharded : {false, true}) {
    swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
    if (sharded) options.mesh = mesh, options.layout = layout;
    swv_tensor *a = nullptr, *b = nullptr, *c = nullptr;
    check(swv_tensor_randn(sizes, 2, &options, &a));
    check(swv_tensor_randn(sizes, 2, &options, &b));
    check(swv_tensor_randn(sizes, 1, &options, &c));
    compare_on(sharded ? "sharded: " : "plain: ", a, b, c, results);
    swv_tensor_free(a);
    swv_tensor_free(b);
    swv_tensor_free(c);
  }
  nlohmann::json json;
  json["bound_us"] = kBoundUs;
  double worst = 0;
  for (const Result& r : results) {
    worst = std::max(worst, r.overhead_us());
    if (!absl::GetFlag(FLAGS_json)) {
      std::printf("%-32s C++ %7.3f us  C %7.3f us  over %6.3f us  allocations %3lld and %3lld\n",
                  r.name.c_str(), r.cpp_us, r.c_us, r.overhead_us(),
                  static_cast<long long>(r.cpp_allocations),
                  static_cast<long long>(r.c_allocations));
    }
    json["operators"].push_back({{"name", r.name},
                                 {"cpp_us", r.cpp_us},
                                 {"c_us", r.c_us},
                                 {"overhead_us", r.overhead_us()},
                                 {"cpp_allocations", r.cpp_allocations},
                                 {"c_allocations", r.c_allocations}});
  }
  json["worst_overhead_us"] = worst;
  if (absl::GetFlag(FLAGS_json)) {
    std::printf("%s\n", json.dump().c_str());
  } else {
    std::printf("worst: %.3f us (bound %.2f)\n", worst, kBoundUs);
  }
  swv_layout_free(layout);
  swv_mesh_free(mesh);
  swv_world_free(world);
  return 0;
}

// What an operator costs through the C interface over the same call in C++, in microseconds; and
// what it allocates on the way in.
//
//   ./bazelw run -c opt //bench:capi            # a table
//   ./bazelw run -c opt //bench:capi -- --json  # one line
//   ./bazelw run -c opt //bench:capi -- --filter addcmul  # the operators with that in their name
//
// Both kinds of calls alternate, in rounds over all operators, so that a moment in which the machine is
// slower falls on few batches of each; the figure is the difference of what both take undisturbed. Each C
// call frees its result, as each C++ call does. "kernel" is not LibTorch's: the operator is the
// same. One rank, one thread.

#include <sys/personality.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <utility>
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
ABSL_FLAG(std::string, filter, "", "only operators whose name has this in it");

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

// Of the fastest tenth the slowest: what a call takes while nothing disturbs it. (Medians of the same
// run differ by up to 0.1 us on a machine that is shared.)
double undisturbed(std::vector<double> values) {
  const auto tenth = values.begin() + static_cast<int64_t>(values.size() / 10);
  std::nth_element(values.begin(), tenth, values.end());
  return *tenth;
}

int64_t allocations(const Body& body) {
  body();
  body();
  const int64_t before = shardweave::allocations_so_far();
  body();
  return shardweave::allocations_so_far() - before;
}

struct Operator {
  std::string name;
  Body cpp, c;
};

struct Result {
  std::string name;
  double cpp_us;
  double c_us;
  int64_t cpp_allocations;
  int64_t c_allocations;  // one more is the result's handle
  double overhead_us() const { return c_us - cpp_us; }
};

std::vector<Result> compare(const std::vector<Operator>& operators) {
  constexpr int kRounds = 601;
  constexpr int kCalls = 300;
  struct Times {
    std::vector<double> cpp, c;
  };
  std::vector<Times> times(operators.size());
  for (const Operator& each : operators) {
    seconds(each.cpp, kCalls);
    seconds(each.c, kCalls);
  }
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < operators.size(); ++i) {
      times[i].cpp.push_back(seconds(operators[i].cpp, kCalls) / kCalls * 1e6);
      times[i].c.push_back(seconds(operators[i].c, kCalls) / kCalls * 1e6);
    }
  }
  std::vector<Result> results;
  for (size_t i = 0; i < operators.size(); ++i) {
    results.push_back({operators[i].name, undisturbed(times[i].cpp), undisturbed(times[i].c),
                       allocations(operators[i].cpp), allocations(operators[i].c)});
  }
  return results;
}

// The same addresses in each run: where memory happens to lie moves a row by up to 0.1 us. (Where that is
// not allowed it does.)
void fix_addresses(char** argv) {
  const int persona = ::personality(0xffffffff);
  if (persona < 0 || (persona & ADDR_NO_RANDOMIZE) != 0) return;
  if (::personality(persona | ADDR_NO_RANDOMIZE) >= 0) ::execv("/proc/self/exe", argv);
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

// Of tensors that live longer.
void add_operators(const std::string& what, swv_tensor* a, swv_tensor* b, swv_tensor* c,
                   std::vector<Operator>& operators) {
  const at::Tensor x = a->tensor, y = b->tensor, z = c->tensor;
  static const int64_t dims[] = {1};
  const swv_value va = swv_value_tensor(a), vb = swv_value_tensor(b), vc = swv_value_tensor(c);
  const auto add = [&](const char* name, Body cpp, Body by_c) {
    operators.push_back({what + name, std::move(cpp), std::move(by_c)});
  };
  add("add", [=] { at::add(x, y); }, c_call("aten::add.Tensor", {va, vb}));
  add("add, all overloads", [=] { at::add(x, y); }, c_call("aten::add", {va, vb}));
  add(
      "mul by a number", [=] { at::mul(x, 2.0); },
      c_call("aten::mul.Scalar", {va, swv_value_float(2)}));
  add("mm", [=] { at::mm(x, y); }, c_call("aten::mm", {va, vb}));
  add("linear with bias", [=] { at::linear(x, y, z); }, c_call("aten::linear", {va, vb, vc}));
  add(
      "sum over a dimension", [=] { at::sum(x, {1}); },
      c_call("aten::sum.dim_IntList", {va, swv_value_ints(dims, 1)}));
  const auto list = std::make_shared<std::vector<swv_tensor*>>(std::vector{a, b});
  add(
      "cat of two", [=] { at::cat({x, y}); },
      [list, call = c_call("aten::cat", {swv_value_tensors(list->data(), 2)})] { call(); });
  add(
      "addcmul, 4 arguments", [=] { at::addcmul(x, x, y, 0.5); },
      c_call("aten::addcmul", {va, va, vb, swv_value_float(0.5)}));
}

}  // namespace

int main(int argc, char** argv) {
  fix_addresses(argv);
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
  std::vector<swv_tensor*> tensors;
  const auto randn = [&](size_t ndim, const swv_tensor_options& options) {
    swv_tensor* made = nullptr;
    check(swv_tensor_randn(sizes, ndim, &options, &made));
    tensors.push_back(made);
    return made;
  };
  std::vector<Operator> operators;
  for (const bool sharded : {false, true}) {
    swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
    if (sharded) options.mesh = mesh, options.layout = layout;
    swv_tensor *const a = randn(2, options), *const b = randn(2, options);
    add_operators(sharded ? "sharded: " : "plain: ", a, b, randn(1, options), operators);
  }
  std::erase_if(operators, [](const Operator& each) {
    return each.name.find(absl::GetFlag(FLAGS_filter)) == std::string::npos;
  });
  const std::vector<Result> results = compare(operators);
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
  for (swv_tensor* tensor : tensors) swv_tensor_free(tensor);
  swv_layout_free(layout);
  swv_mesh_free(mesh);
  swv_world_free(world);
  return 0;
}

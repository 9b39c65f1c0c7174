// A rank that moves between threads, as goroutines and tasks do, goes backward in the order that it
// went forward in, reversed: the order of its collectives, and of the sums in its gradients. And traces
// of its backward know the modules.
#include <array>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave.h"

namespace {

void must(swv_status* status) {
  if (status == nullptr) return;
  ADD_FAILURE() << swv_status_message(status);
  swv_status_free(status);
}

// A function that is the identity, and tells when backward passes it.
struct Step {
  int number;
  std::vector<int>* passed;
};

swv_status* pass(void*, const swv_function_call* call) {
  const swv_value args[] = {swv_value_tensor(const_cast<swv_tensor*>(call->inputs[0]))};
  swv_op* op = nullptr;
  if (swv_status* status = swv_op_find("aten::clone", &op)) return status;
  swv_value result;
  size_t num_results = 0;
  swv_status* status = swv_op_call(op, call->mode, args, 1, &result, 1, &num_results);
  swv_op_free(op);
  if (status == nullptr) call->outputs[0] = result.as.tensor;
  return status;
}

swv_status* pass_back(void* user_data, const swv_function_call* call) {
  const Step& step = *static_cast<Step*>(user_data);
  step.passed->push_back(step.number);
  return pass(nullptr, call);
}

swv_tensor* call(const char* name, std::vector<swv_value> args) {
  swv_op* op = nullptr;
  must(swv_op_find(name, &op));
  swv_value result = {};
  size_t num_results = 0;
  must(swv_op_call(op, SWV_MODE_GRAD, args.data(), args.size(), &result, 1, &num_results));
  swv_op_free(op);
  return result.as.tensor;
}

class MovedBranchTest : public ::testing::TestWithParam<bool> {};

TEST_P(MovedBranchTest, GoesBackInTheOrderItWentForward) {
  constexpr int kSteps = 12;
  const bool sharded = GetParam();
  swv_world* world = nullptr;
  swv_mesh* mesh = nullptr;
  swv_tensor* x = nullptr;
  const swv_mesh_dim dim = {"x", 1};
  const int64_t sizes[] = {3};
  must(swv_world_create_local(1, nullptr, &world));
  must(swv_mesh_create(world, &dim, 1, &mesh));
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  if (sharded) options.mesh = mesh;
  must(swv_tensor_rand(sizes, 1, &options, &x));
  must(swv_tensor_set_requires_grad(x, 1));
  for (int i = 0; i < 100; ++i) swv_tensor_free(call("aten::neg", {swv_value_tensor(x)}));

  // Branches of one tensor: nothing but the numbers says in which order they go back. Every third
  // is on the first thread, the others are on threads of their own.
  std::vector<int> passed;
  std::array<Step, kSteps> steps;
  std::array<swv_tensor*, kSteps> branches = {};
  for (int i = 0; i < kSteps; ++i) {
    steps[i] = {i, &passed};
    const auto branch = [&] {
      swv_function function = SWV_FUNCTION_INIT;
      function.name = "pass";
      function.forward = pass;
      function.backward = pass_back;
      function.user_data = &steps[i];
      const swv_tensor* inputs[] = {x};
      must(swv_function_apply(&function, SWV_MODE_GRAD, inputs, 1, &branches[i], 1));
    };
    i % 3 == 0 ? branch() : std::thread(branch).join();
  }
  swv_tensor* sum = nullptr;
  std::thread([&] {
    sum = call("aten::sum", {swv_value_tensor(branches[0])});
    for (int i = 1; i < kSteps; ++i) {
      swv_tensor* its = call("aten::sum", {swv_value_tensor(branches[i])});
      swv_tensor* both = call("aten::add", {swv_value_tensor(sum), swv_value_tensor(its)});
      swv_tensor_free(its);
      swv_tensor_free(std::exchange(sum, both));
    }
  }).join();
  must(swv_tensor_backward(sum, nullptr, nullptr));

  std::vector<int> reversed;
  for (int i = kSteps; i-- > 0;) reversed.push_back(i);
  EXPECT_EQ(passed, reversed);

  for (swv_tensor* branch : branches) swv_tensor_free(branch);
  swv_tensor_free(sum);
  swv_tensor_free(x);
  swv_mesh_free(mesh);
  swv_world_free(world);
}

// Each rank enters and leaves its modules, goes forward and backward each on a thread of its own, of
// which the later have recorded less.
TEST(MovedRankTest, BackwardKnowsTheModules) {
  constexpr int kRanks = 2;
  const auto on_fresh_thread = [](const auto& function) { std::thread(function).join(); };
  const auto rank = [&](swv_world* world) {
    swv_mesh* mesh = nullptr;
    swv_layout *rows = nullptr, *columns = nullptr;
    swv_tensor *x = nullptr, *turned = nullptr, *back = nullptr;
    swv_trace* trace = nullptr;
    const swv_mesh_dim dim = {"x", kRanks};
    const int64_t sizes[] = {4, 4};
    must(swv_mesh_create(world, &dim, 1, &mesh));
    must(swv_layout_parse("[S(0)]", &rows));
    must(swv_layout_parse("[S(1)]", &columns));
    swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
    options.mesh = mesh;
    options.layout = rows;
    must(swv_tensor_rand(sizes, 2, &options, &x));
    must(swv_tensor_set_requires_grad(x, 1));
    for (int i = 0; i < 100; ++i) swv_tensor_free(call("aten::neg", {swv_value_tensor(x)}));

    on_fresh_thread([&] { must(swv_trace_create(mesh, &trace)); });
    swv_scope* module = nullptr;
    on_fresh_thread([&] { must(swv_mesh_enter_module(mesh, "first", &module)); });
    must(swv_tensor_redistribute(x, columns, SWV_MODE_GRAD, &turned));
    on_fresh_thread([&] { swv_scope_free(module); });
    on_fresh_thread([&] { must(swv_mesh_enter_module(mesh, "second", &module)); });
    on_fresh_thread([&] { must(swv_tensor_redistribute(turned, rows, SWV_MODE_GRAD, &back)); });
    on_fresh_thread([&] { swv_scope_free(module); });
    swv_tensor* squares = call("aten::square", {swv_value_tensor(back)});
    swv_tensor* sum = call("aten::sum", {swv_value_tensor(squares)});
    must(swv_tensor_backward(sum, nullptr, nullptr));

    swv_string* json = nullptr;
    must(swv_trace_to_json(trace, &json));
    const auto seen = nlohmann::json::parse(swv_string_data(json))["events"];
    std::vector<std::string> modules;
    for (const auto& event : seen) {
      modules.push_back(event.value("phase", "") + ", " + event.value("module", ""));
    }
    EXPECT_EQ(modules, (std::vector<std::string>{"forward, first", "forward, second",
                                                 "backward, second", "backward, first"}));

    swv_string_free(json);
    on_fresh_thread([&] { swv_trace_free(trace); });
    for (swv_tensor* t : {x, turned, back, squares, sum}) swv_tensor_free(t);
    swv_layout_free(rows);
    swv_layout_free(columns);
    swv_mesh_free(mesh);
    swv_world_free(world);
  };
  std::array<swv_world*, kRanks> worlds = {};
  must(swv_world_create_local(kRanks, nullptr, worlds.data()));
  std::vector<std::thread> ranks;
  for (swv_world* world : worlds) ranks.emplace_back([&rank, world] { rank(world); });
  for (std::thread& its : ranks) its.join();
}

INSTANTIATE_TEST_SUITE_P(Tensors, MovedBranchTest, ::testing::Bool(),
                         [](const auto& of) { return of.param ? "sharded" : "plain"; });

}  // namespace

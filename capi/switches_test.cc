// What is set while a program runs: checks of handles, and where the library speaks. And what handles
// are: second ones, and ranks in errors.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "shardweave.h"
#include "testing/check.h"

namespace {

std::string message_of(swv_status* status) {
  std::string message = swv_status_message(status);
  swv_status_free(status);
  return message;
}
swv_plan* new_plan() {
  swv_plan* plan = nullptr;
  CHECK_OK(swv_plan_create(&plan));
  return plan;
}
std::string use(swv_plan* plan) {
  swv_string* text = nullptr;
  swv_status* status = swv_plan_to_json(plan, &text);
  swv_string_free(text);
  return message_of(status);
}

// Where they come before any handle, whatever the library has not made is none. (The first test here.)
TEST(SwitchesTest, ChecksBeforeTheFirstHandle) {
  EXPECT_EQ(swv_live_handles(), -1) << "SWV_CHECK_HANDLES is set";
  CHECK_OK(swv_set_handle_checks(SWV_CHECKS_REPORT));
  auto* const nowhere = reinterpret_cast<swv_plan*>(0x1230);  // NOLINT: it is not looked at
  EXPECT_NE(use(nowhere).find("argument 'plan' is no handle"), std::string::npos);
  CHECK_OK(swv_set_handle_checks(SWV_CHECKS_OFF));
}

// Checks come and go; what was made in between is no misuse.
TEST(SwitchesTest, HandleChecks) {
  EXPECT_EQ(swv_live_handles(), -1) << "SWV_CHECK_HANDLES is set";
  swv_plan* const before = new_plan();
  CHECK_OK(swv_set_handle_checks(SWV_CHECKS_REPORT));
  EXPECT_EQ(swv_live_handles(), 0);
  EXPECT_EQ(use(before), "");
  swv_plan* const checked = new_plan();
  swv_plan* const freed = new_plan();
  EXPECT_EQ(swv_live_handles(), 2);
  swv_plan_free(freed);
  EXPECT_NE(use(freed).find("is a swv_plan that was freed"), std::string::npos);
  testing::internal::CaptureStderr();
  swv_plan_free(freed);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "shardweave: swv_plan_free: the argument is a swv_plan that was freed\n");
  swv_plan* const later = new_plan();
  CHECK_OK(swv_set_handle_checks(SWV_CHECKS_OFF));
  EXPECT_EQ(swv_live_handles(), -1);
  swv_plan* const unchecked = new_plan();
  for (swv_plan* plan : {before, checked, later, unchecked}) EXPECT_EQ(use(plan), "");
  swv_plan_free(checked);  // leaves the table all the same
  CHECK_OK(swv_set_handle_checks(SWV_CHECKS_REPORT));
  EXPECT_EQ(swv_live_handles(), 1);
  EXPECT_NE(use(checked).find("is a swv_plan that was freed"), std::string::npos);
  for (swv_plan* plan : {before, later, unchecked}) {
    EXPECT_EQ(use(plan), "");
    swv_plan_free(plan);
  }
  EXPECT_EQ(swv_live_handles(), 0);
  EXPECT_NE(message_of(swv_set_handle_checks(3)).find("'checks' is 3; wanted a swv_checks, 0 to 2"),
            std::string::npos);
  CHECK_OK(swv_set_handle_checks(SWV_CHECKS_OFF));
}

struct Lines {
  std::vector<std::string> lines;
  int drops = 0;
};
void take_line(void* user_data, const char* message) {
  static_cast<Lines*>(user_data)->lines.emplace_back(message);
}
void count_drop(void* user_data) {
  ++static_cast<Lines*>(user_data)->drops;
}

TEST(SwitchesTest, Log) {
  Lines first, second;
  CHECK_OK(swv_set_log(take_line, &first, count_drop));
  CHECK_OK(swv_set_handle_checks(SWV_CHECKS_REPORT));
  testing::internal::CaptureStderr();
  swv_plan* const plan = new_plan();
  swv_plan_free(plan);
  swv_plan_free(plan);
  EXPECT_EQ(first.lines,
            std::vector<std::string>{"swv_plan_free: the argument is a swv_plan that was freed"});
  EXPECT_EQ(first.drops, 0);
  CHECK_OK(swv_set_log(take_line, &second, count_drop));
  EXPECT_EQ(first.drops, 1);
  // What LibTorch and the sharded operators warn of goes there, too.
  swv_world* world = nullptr;
  swv_mesh* mesh = nullptr;
  swv_tensor* x = nullptr;
  const swv_mesh_dim dim = {"x", 1};
  const int64_t sizes[] = {3, 3};
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  CHECK_OK(swv_world_create_local(1, nullptr, &world));
  CHECK_OK(swv_mesh_create(world, &dim, 1, &mesh));
  options.mesh = mesh;
  CHECK_OK(swv_tensor_ones(sizes, 2, &options, &x));
  const swv_value argument = swv_value_tensor(x);
  swv_op* op = nullptr;
  swv_value results[2];
  CHECK_OK(swv_op_find("aten::_aminmax", &op));
  CHECK_OK(swv_op_call(op, SWV_MODE_NO_GRAD, &argument, 1, results, 2, nullptr));
  // LibTorch has something to say of this operator, too.
  int told = 0;
  for (const std::string& line : second.lines) {
    told += line.find("aten::_aminmax has no sharding rule") == 0;
  }
  EXPECT_EQ(told, 1);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  for (swv_value& result : results) swv_value_clear(&result);
  swv_op_free(op);
  swv_tensor_free(x);
  swv_mesh_free(mesh);
  swv_world_free(world);
  CHECK_OK(swv_set_log(nullptr, nullptr, nullptr));
  EXPECT_EQ(second.drops, 1);
  CHECK_OK(swv_set_handle_checks(SWV_CHECKS_OFF));
}

swv_status* second_fails(void* heard, swv_world* world) {
  int32_t rank = -1;
  swv_comm* comm = nullptr;
  CHECK_OK(swv_world_rank(world, &rank));
  if (rank == 1) return swv_status_new(SWV_CODE_DATA_LOSS, "gone bad");
  CHECK_OK(swv_world_comm(world, &comm));
  swv_status* status = swv_comm_barrier(comm, nullptr, nullptr);
  if (rank == 0) *static_cast<int32_t*>(heard) = swv_status_rank(status);
  swv_comm_free(comm);
  return status;
}

TEST(SwitchesTest, RanksOfErrors) {
  int32_t heard = -7;
  swv_status* status = swv_run_ranks(3, second_fails, &heard, nullptr);
  EXPECT_EQ(swv_status_code(status), SWV_CODE_DATA_LOSS) << swv_status_message(status);
  EXPECT_EQ(swv_status_rank(status), 1);
  swv_status_free(status);
  EXPECT_EQ(heard, 1);
  EXPECT_EQ(swv_status_rank(nullptr), -1);
  status = swv_status_new(SWV_CODE_ABORTED, "mine");
  EXPECT_EQ(swv_status_rank(status), -1);
  swv_status_free(status);
}

// A second handle is the same object, and outlives the first.
TEST(SwitchesTest, SecondHandles) {
  swv_plan *const plan = new_plan(), *again = nullptr;
  const swv_named_placement placement = {"x", "S(0)"};
  CHECK_OK(swv_plan_share(plan, &again));
  CHECK_OK(swv_plan_add(plan, "*", &placement, 1));
  swv_plan_free(plan);
  swv_string* text = nullptr;
  CHECK_OK(swv_plan_to_json(again, &text));
  EXPECT_NE(std::string(swv_string_data(text)).find("S(0)"), std::string::npos);
  swv_string_free(text);
  swv_plan_free(again);

  swv_module *module = nullptr, *same = nullptr;
  swv_tensor *weight = nullptr, *found = nullptr;
  size_t count = 0;
  CHECK_OK(swv_module_create(&module));
  CHECK_OK(swv_module_share(module, &same));
  CHECK_OK(swv_tensor_ones(nullptr, 0, nullptr, &weight));
  CHECK_OK(swv_module_add_parameter(module, "w", weight));
  swv_module_free(module);
  CHECK_OK(swv_module_num_parameters(same, &count));
  EXPECT_EQ(count, 1u);
  CHECK_OK(swv_module_get(same, "w", &found));

  swv_optimizer *optimizer = nullptr, *other = nullptr;
  double lr = 0;
  CHECK_OK(swv_optimizer_create_sgd(&weight, 1, nullptr, &optimizer));
  CHECK_OK(swv_optimizer_share(optimizer, &other));
  CHECK_OK(swv_optimizer_set_lr(optimizer, 0.5));
  swv_optimizer_free(optimizer);
  CHECK_OK(swv_optimizer_lr(other, &lr));
  EXPECT_EQ(lr, 0.5);
  swv_optimizer_free(other);
  swv_tensor_free(found);
  swv_tensor_free(weight);
  swv_module_free(same);

  swv_op *op = nullptr, *op_again = nullptr;
  CHECK_OK(swv_op_find("aten::relu", &op));
  CHECK_OK(swv_op_share(op, &op_again));
  swv_op_free(op);
  CHECK_OK(swv_op_schema(op_again, &text));
  EXPECT_NE(std::string(swv_string_data(text)).find("aten::relu"), std::string::npos);
  swv_string_free(text);
  swv_op_free(op_again);

  swv_layout *layout = nullptr, *layout_again = nullptr;
  swv_bool equal = 0;
  CHECK_OK(swv_layout_parse("[S(0)]", &layout));
  CHECK_OK(swv_layout_share(layout, &layout_again));
  CHECK_OK(swv_layout_equal(layout, layout_again, &equal));
  EXPECT_EQ(equal, 1);
  swv_layout_free(layout);
  swv_layout_free(layout_again);

  swv_world* world = nullptr;
  swv_mesh* mesh = nullptr;
  swv_comm* comm = nullptr;
  swv_work *work = nullptr, *work_again = nullptr;
  swv_trace *trace = nullptr, *trace_again = nullptr;
  const swv_mesh_dim dim = {"x", 1};
  CHECK_OK(swv_world_create_local(1, nullptr, &world));
  CHECK_OK(swv_world_comm(world, &comm));
  CHECK_OK(swv_comm_barrier(comm, nullptr, &work));
  CHECK_OK(swv_work_share(work, &work_again));
  swv_work_free(work);
  CHECK_OK(swv_work_wait(work_again));
  swv_work_free(work_again);
  CHECK_OK(swv_mesh_create(world, &dim, 1, &mesh));
  CHECK_OK(swv_trace_create(mesh, &trace));
  CHECK_OK(swv_trace_share(trace, &trace_again));
  swv_trace_free(trace);
  CHECK_OK(swv_trace_num_events(trace_again, &count));
  swv_trace_free(trace_again);
  swv_mesh_free(mesh);
  swv_comm_free(comm);
  swv_world_free(world);
}

struct RanksHeard {
  int32_t of_operator = -7, of_function = -7;
};
struct Sum {
  swv_op* add;
  const swv_tensor* other;
};
swv_status* add_in_function(void* user_data, const swv_function_call* call) {
  const Sum& sum = *static_cast<Sum*>(user_data);
  const swv_value values[] = {swv_value_tensor(const_cast<swv_tensor*>(call->inputs[0])),
                              swv_value_tensor(const_cast<swv_tensor*>(sum.other))};
  swv_value result = SWV_NONE;
  swv_status* const status = swv_op_call(sum.add, call->mode, values, 2, &result, 1, nullptr);
  if (status == nullptr) call->outputs[0] = result.as.tensor;
  return status;
}
swv_status* second_aborts(void* user_data, swv_world* world) {
  RanksHeard& heard = *static_cast<RanksHeard*>(user_data);
  int32_t rank = -1;
  swv_comm* comm = nullptr;
  swv_mesh* mesh = nullptr;
  CHECK_OK(swv_world_rank(world, &rank));
  CHECK_OK(swv_world_comm(world, &comm));
  CHECK_OK(swv_mesh_parse(world, "dp=2", &mesh));
  if (rank == 1) {
    CHECK_OK(swv_comm_abort(comm, "enough"));
    swv_mesh_free(mesh);
    swv_comm_free(comm);
    return nullptr;
  }
  swv_layout *rows = nullptr, *columns = nullptr;
  swv_tensor *x = nullptr, *y = nullptr, *out = nullptr;
  swv_op* add = nullptr;
  const int64_t sizes[] = {4, 4};
  CHECK_OK(swv_layout_parse("[S(0)]", &rows));
  CHECK_OK(swv_layout_parse("[S(1)]", &columns));
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.mesh = mesh;
  options.layout = rows;
  CHECK_OK(swv_tensor_ones(sizes, 2, &options, &x));
  options.layout = columns;
  CHECK_OK(swv_tensor_ones(sizes, 2, &options, &y));
  CHECK_OK(swv_op_find("aten::add.Tensor", &add));
  const swv_value values[] = {swv_value_tensor(x), swv_value_tensor(y)};
  swv_value result = SWV_NONE;
  swv_status* status = swv_op_call(add, SWV_MODE_NO_GRAD, values, 2, &result, 1, nullptr);
  EXPECT_EQ(swv_status_code(status), SWV_CODE_ABORTED) << swv_status_message(status);
  heard.of_operator = swv_status_rank(status);
  swv_status_free(status);

  Sum sum{add, y};
  swv_function function = SWV_FUNCTION_INIT;
  function.user_data = &sum;
  function.forward = add_in_function;
  const swv_tensor* const inputs[] = {x};
  status = swv_function_apply(&function, SWV_MODE_NO_GRAD, inputs, 1, &out, 1);
  EXPECT_EQ(swv_status_code(status), SWV_CODE_ABORTED) << swv_status_message(status);
  heard.of_function = swv_status_rank(status);
  swv_status_free(status);
  swv_op_free(add);
  for (swv_tensor* tensor : {x, y}) swv_tensor_free(tensor);
  for (swv_layout* layout : {rows, columns}) swv_layout_free(layout);
  swv_mesh_free(mesh);
  swv_comm_free(comm);
  return nullptr;
}

TEST(SwitchesTest, RanksOfErrorsOfOperatorsAndFunctions) {
  RanksHeard heard;
  CHECK_OK(swv_run_ranks(2, second_aborts, &heard, nullptr));
  EXPECT_EQ(heard.of_operator, 1);
  EXPECT_EQ(heard.of_function, 1);
}

}  // namespace

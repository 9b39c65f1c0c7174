// Messages speak the caller's language: the function of C comes first, once, and nothing behind it is
// spelled as in C++. What they say is passed on to Rust and Go.
#include <cmath>
#include <limits>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "shardweave.h"
#include "testing/buffer.h"

namespace {

// Empty if there is nothing to say against it.
std::string spelling_of_cpp(const std::string& message) {
  static const std::regex front("^swv_[a-z_]+: ");
  if (!std::regex_search(message, front)) return "no function of C at its front";
  std::string rest = std::regex_replace(message, front, "");
  rest = std::regex_replace(rest, std::regex("swv_[a-z_]+"), "");
  rest = std::regex_replace(rest, std::regex("aten::[a-zA-Z0-9_.]+(\\('[^)]*\\))?"), "");
  static const std::regex cpp(
      R"(\w+\(\)|::|\[&\]|\bint64_t\b|^[a-z_]+[a-z]: |\.(slice|flatten|unflatten)\b)"
      R"(|\b[a-z]+\('|\b(FusedOptimizer|ConnectedMesh|[A-Z]\w*Scope)\b)"
      R"(|\b(distribute_(tensor|module)|init_device_mesh|run_ranks|from_ranks|count_communication)\b)"
      R"(|\b(from_local|to_local|full_tensor|layout_of|mesh_of|manual_seed|finish_grad_sync)\b)"
      R"(|\b(send_counts|recv_counts|message_tag)\b)");
  std::smatch found;
  return std::regex_search(rest, found, cpp) ? "'" + found.str() + "'" : "";
}

TEST(MessagesCheckTest, KnowsCpp) {
  for (const char* bad :
       {"wanted a plain tensor", "swv_tensor_from_local: from_local: wanted a plain tensor",
        "swv_op_call: aten::add: make it a DTensor with distribute_tensor()",
        "swv_mesh_slice: DeviceMesh(x=1).slice(x=1, x=1): two dimensions are named \"x\"",
        "swv_op_explain: explain('aten::mm'): none of the arguments is a DTensor"}) {
    EXPECT_NE(spelling_of_cpp(bad), "") << bad;
  }
  EXPECT_EQ(spelling_of_cpp("swv_op_call: aten::mm: argument 'self' (a tensor) is not swv_op"), "");
}

class MessagesTest : public testing::Test {
 protected:
  void SetUp() override {
    ok(swv_world_create_local(1, nullptr, &world_));
    const swv_mesh_dim dims[] = {{"x", 1}, {"y", 1}, {"z", 1}};
    ok(swv_mesh_create(world_, dims, 1, &mesh_));
    ok(swv_mesh_create(world_, dims, 3, &cube_));
    ok(swv_layout_parse("[S(0)]", &rows_));
    ok(swv_layout_parse("[R]", &whole_));
    ok(swv_layout_parse("[P]", &partial_));
    ok(swv_layout_parse("[S(0), R]", &two_));
    ok(swv_layout_parse("[S(5)]", &beyond_));
    const int64_t sizes[] = {4, 2};
    ok(swv_tensor_ones(sizes, 2, nullptr, &plain_));
    ok(swv_tensor_distribute(plain_, mesh_, rows_, nullptr, &sharded_));
  }
  void TearDown() override {
    for (swv_tensor* t : {plain_, sharded_}) swv_tensor_free(t);
    for (swv_layout* l : {rows_, whole_, partial_, two_, beyond_}) swv_layout_free(l);
    for (swv_mesh* m : {mesh_, cube_}) swv_mesh_free(m);
    swv_world_free(world_);
  }

  static void ok(swv_status* status) {
    EXPECT_EQ(status, nullptr) << swv_status_message(status);
    swv_status_free(status);
  }
  void says(swv_status* status, const std::string& part) {
    ASSERT_NE(status, nullptr) << part;
    const std::string message = swv_status_message(status);
    swv_status_free(status);
    EXPECT_NE(message.find(part), std::string::npos) << "want '" << part << "' in: " << message;
    EXPECT_EQ(spelling_of_cpp(message), "") << message;
  }

  swv_world* world_ = nullptr;
  swv_mesh *mesh_ = nullptr, *cube_ = nullptr;
  swv_layout *rows_ = nullptr, *whole_ = nullptr, *partial_ = nullptr, *two_ = nullptr,
             *beyond_ = nullptr;
  swv_tensor *plain_ = nullptr, *sharded_ = nullptr;
};

TEST_F(MessagesTest, Tensors) {
  swv_tensor* out = nullptr;
  swv_layout* layout = nullptr;
  swv_mesh* mesh = nullptr;
  swv_string* text = nullptr;
  const int64_t sizes[] = {5, 2};
  swv_distribute_options from_nowhere = SWV_DISTRIBUTE_OPTIONS_INIT;
  from_nowhere.source = 7;
  says(swv_tensor_distribute(sharded_, mesh_, rows_, nullptr, &out), "is sharded");
  says(swv_tensor_distribute(plain_, mesh_, partial_, nullptr, &out), "has a Partial");
  says(swv_tensor_distribute(plain_, mesh_, two_, nullptr, &out), "has 2 placements");
  says(swv_tensor_distribute(plain_, mesh_, beyond_, nullptr, &out), "cuts tensor dimension 5");
  says(swv_tensor_distribute(plain_, mesh_, rows_, &from_nowhere, &out),
       "the source is rank 7 of DeviceMesh(x=1); wanted 0");
  says(swv_tensor_from_local(sharded_, mesh_, rows_, nullptr, 0, SWV_MODE_GRAD, &out), "sharded");
  says(swv_tensor_from_local(plain_, mesh_, two_, nullptr, 0, SWV_MODE_GRAD, &out),
       "has 2 placements");
  says(swv_tensor_from_local(plain_, mesh_, rows_, sizes, 2, SWV_MODE_GRAD, &out), "on this rank");
  says(swv_tensor_to_local(plain_, nullptr, SWV_MODE_GRAD, &out), "plain tensor of shape [4, 2]");
  says(swv_tensor_to_local(sharded_, two_, SWV_MODE_GRAD, &out), "has 2 placements");
  says(swv_tensor_redistribute(plain_, rows_, SWV_MODE_GRAD, &out), "plain tensor of shape [4, 2]");
  says(swv_tensor_redistribute(sharded_, two_, SWV_MODE_GRAD, &out), "has 2 placements");
  says(swv_tensor_redistribute(sharded_, beyond_, SWV_MODE_GRAD, &out), "cuts tensor dimension 5");
  says(swv_tensor_layout(plain_, &layout), "plain tensor of shape [4, 2]");
  says(swv_tensor_mesh(plain_, &mesh), "plain tensor of shape [4, 2]");
  says(swv_tensor_picture(plain_, &text), "plain tensor of shape [4, 2]");
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.mesh = mesh_;
  options.layout = partial_;
  says(swv_tensor_full(sizes, 2, 1, &options, &out), "has a Partial");
  says(swv_tensor_randn(sizes, 2, &options, &out), "has a Partial");
  options.layout = two_;
  says(swv_tensor_zeros(sizes, 2, &options, &out), "has 2 placements");
}

TEST_F(MessagesTest, Meshes) {
  swv_mesh* out = nullptr;
  const swv_mesh_dim none[] = {{"x", 0}}, twice[] = {{"x", 1}, {"x", 1}}, two[] = {{"x", 2}};
  const int32_t ranks[] = {0, 0};
  const char* const names[] = {"x", "z", "x"};
  says(swv_mesh_create(world_, none, 1, &out), "has size 0");
  says(swv_mesh_create(world_, twice, 2, &out), "two dimensions are named");
  says(swv_mesh_create(world_, two, 1, &out), "has 2 ranks");
  says(swv_mesh_parse(world_, "x=2", &out), "has 2 ranks");
  says(swv_mesh_parse(world_, "x", &out), "is not NAME=SIZE");
  says(swv_mesh_create_from_ranks(world_, two, 1, ranks, 1, &out), "wanted 2 ranks, given 1");
  says(swv_mesh_create_from_ranks(world_, two, 1, ranks, 2, &out), "rank 0 is there twice");
  const int32_t far[] = {0, 7};
  says(swv_mesh_create_from_ranks(world_, two, 1, far, 2, &out), "has rank 7");
  says(swv_mesh_slice(mesh_, names + 1, 1, &out), "has no dimension \"z\"");
  says(swv_mesh_slice(cube_, names, 3, &out), "two dimensions are named");
  says(swv_mesh_flatten(cube_, names, 2, nullptr, &out), "wanted neighbouring dimensions");
  says(swv_mesh_flatten(cube_, names, 1, "y", &out), "two dimensions are named");
  says(swv_mesh_unflatten(cube_, "x", two, 1, &out), "multiply to 2");
  says(swv_mesh_unflatten(cube_, "x", none, 1, &out), "has size 0");
}

TEST_F(MessagesTest, Modules) {
  const auto plan = [](const char* json) {
    swv_plan* made = nullptr;
    ok(swv_plan_from_json(json, &made));
    return made;
  };
  const auto distribute = [&](swv_module* module, const char* json) {
    swv_plan* how = plan(json);
    swv_status* status = swv_module_distribute(module, mesh_, how, nullptr);
    swv_plan_free(how);
    return status;
  };
  const auto module = [](std::vector<std::pair<const char*, swv_tensor*>> parameters) {
    swv_module* made = nullptr;
    ok(swv_module_create(&made));
    for (const auto& [name, tensor] : parameters) ok(swv_module_add_parameter(made, name, tensor));
    return made;
  };
  swv_module* tied = module({{"a", plain_}, {"b", plain_}});
  says(distribute(tied, R"json({"parameter": {"c": {"x": "S(0)"}}})json"), "matches no parameter");
  says(distribute(tied, R"json({"parameter": {"a": {"x": "S(4)"}}})json"), "'a'");
  says(distribute(tied, R"json({"parameter": {"a": {"q": "S(0)"}}})json"),
       "the plan's entry 1, 'a' ('a'): DeviceMesh(x=1) has no dimension \"q\"");
  says(distribute(tied, R"json({"parameter": {"*": {"x": "P(sum)"}}})json"),
       "the plan's entry 1, '*' ('a'): [P(sum)] has a Partial");
  swv_plan* none = nullptr;
  says(swv_plan_from_json(R"json({"parameter": {"{a,b": {"x": "S(0)"}}})json", &none),
       "line 1, \"parameter\", \"{a,b\": has a '{' without");
  says(distribute(tied,
                  R"json({"parameter": {"*": {}, "a": {"x": "S(0)"}, "b": {"x": "S(0)"}}})json"),
       "the plan's entry 1, '*', decides nothing");
  says(distribute(tied, R"json({"parameter": {"a": ["R", "S(0)"]}})json"),
       "[R, S(0)] has 2 placements; DeviceMesh(x=1) wants 1");
  swv_distribute_options from_nowhere = SWV_DISTRIBUTE_OPTIONS_INIT;
  from_nowhere.source = 5;
  says(swv_module_distribute(tied, mesh_, nullptr, &from_nowhere), "the source is rank 5 of");
  says(distribute(tied, R"json({"parameter": {"a": {"x": "S(0)"}, "b": {"x": "S(1)"}}})json"),
       "are one tensor");
  swv_op* view = nullptr;
  swv_value row = SWV_NONE;
  const int64_t sizes[] = {8};
  ok(swv_op_find("aten::view", &view));
  const swv_value args[] = {swv_value_tensor(plain_), swv_value_ints(sizes, 1)};
  ok(swv_op_call(view, SWV_MODE_NO_GRAD, args, 2, &row, 1, nullptr));
  swv_module* over = module({{"a", plain_}, {"b", row.as.tensor}});
  says(distribute(over, "{\"parameter\": {}}"), "over the same memory");
  swv_module* done = module({{"a", sharded_}});
  says(distribute(done, "{\"parameter\": {}}"), "DTensor already");
  swv_module* fresh = module({});
  swv_op* clone = nullptr;
  swv_value cloned = SWV_NONE;
  ok(swv_op_find("aten::clone", &clone));
  ok(swv_op_call(clone, SWV_MODE_INFERENCE, args, 1, &cloned, 1, nullptr));
  says(swv_module_add_parameter(fresh, "inner.weight", cloned.as.tensor), "SWV_MODE_INFERENCE");
  ok(swv_module_add_buffer(fresh, "inner", plain_));  // the name is still free
  for (swv_module* m : {tied, over, done, fresh}) swv_module_free(m);
  swv_value_clear(&cloned);
  swv_op_free(clone);
  swv_value_clear(&row);
  swv_op_free(view);
}

TEST_F(MessagesTest, GradientsAndOptimizers) {
  ok(swv_tensor_set_requires_grad(sharded_, 1));
  swv_tensor* const parameters[] = {sharded_};
  swv_optimizer* optimizer = nullptr;
  swv_sgd_options sgd = SWV_SGD_OPTIONS_INIT;
  sgd.lr = -1;
  says(swv_optimizer_create_sgd(parameters, 1, &sgd, &optimizer), "-1");
  sgd.lr = 1;
  sgd.nesterov = 1;
  says(swv_optimizer_create_sgd(parameters, 1, &sgd, &optimizer), "nesterov");
  swv_adamw_options adamw = SWV_ADAMW_OPTIONS_INIT;
  adamw.beta2 = 2;
  says(swv_optimizer_create_adamw(parameters, 1, &adamw, &optimizer), "beta2 is 2");
  ok(swv_optimizer_create_adamw(parameters, 1, nullptr, &optimizer));
  swv_tensor* state = nullptr;
  says(swv_optimizer_set_lr(optimizer, -2), "-2");
  says(swv_optimizer_state(optimizer, 3, "step", &state), "parameter 3 of 1");
  says(swv_optimizer_state(optimizer, 0, "speed", &state), "'speed'");
  says(swv_optimizer_set_state(optimizer, 0, "exp_avg", plain_), "plain tensor");
  says(swv_optimizer_set_state(optimizer, 0, "step", plain_), "one number");
  swv_tensor *grad = nullptr, *infinite = nullptr;
  ok(swv_tensor_redistribute(sharded_, whole_, SWV_MODE_NO_GRAD, &grad));
  ok(swv_tensor_set_grad(sharded_, grad));
  says(swv_optimizer_step(optimizer),
       "its gradient [R]; the gradients are to be synchronized before "
       "the step (swv_module_finish_grad_sync");
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.mesh = mesh_;
  options.layout = rows_;
  const int64_t sizes[] = {4, 2};
  ok(swv_tensor_full(sizes, 2, std::numeric_limits<double>::infinity(), &options, &infinite));
  ok(swv_tensor_set_grad(sharded_, infinite));
  swv_clip_options clip = SWV_CLIP_OPTIONS_INIT;
  clip.error_if_nonfinite = 1;
  says(swv_clip_grad_norm(parameters, 1, 1, &clip, nullptr), "norm of the gradients");
  says(swv_clip_grad_norm(parameters, 1, -1, nullptr, nullptr),
       "argument 'max_norm' is -1; wanted 0 or more");
  says(swv_clip_grad_norm(parameters, 1, std::nan(""), nullptr, nullptr), "'max_norm' is nan");
  for (swv_tensor* t : {grad, infinite}) swv_tensor_free(t);
  swv_optimizer_free(optimizer);
}

TEST_F(MessagesTest, Operators) {
  const auto call = [](const char* name, std::vector<swv_value> args) {
    swv_op* op = nullptr;
    swv_value results[4];
    ok(swv_op_find(name, &op));
    swv_status* status =
        swv_op_call(op, SWV_MODE_GRAD, args.data(), args.size(), results, 4, nullptr);
    swv_op_free(op);
    return status;
  };
  const auto explain = [](const char* name, std::vector<swv_value> args) {
    swv_op* op = nullptr;
    swv_string *table = nullptr, *json = nullptr;
    ok(swv_op_find(name, &op));
    swv_status* status = swv_op_explain(op, args.data(), args.size(), &table, &json);
    swv_op_free(op);
    return status;
  };
  const swv_value sharded = swv_value_tensor(sharded_), plain = swv_value_tensor(plain_);
  ok(swv_tensor_set_requires_grad(plain_, 1));
  says(call("aten::add.Tensor", {sharded, plain}), "it requires grad");
  says(call("aten::set_.source_Tensor", {sharded, plain}), "aten::set_");
  const int64_t ints[] = {1, 2};
  const double floats[] = {1, 2};
  says(call("aten::mul", {sharded, swv_value_ints(ints, 2), swv_value_none()}),
       "aten::mul: the arguments (a tensor, integers, none) fit none of its schemas:\naten::mul.");
  says(call("aten::mul", {}), "the arguments (none) fit none");
  says(call("aten::mul", {swv_value_string("x", 1), swv_value_floats(floats, 2)}),
       "the arguments (a string, floats) fit");
  // A number stands for a tensor, but nobody would see what is written to it.
  says(call("aten::mul_.Tensor", {swv_value_int(3), plain}),
       "argument 'self' is an integer; wanted Tensor, which is written");
  says(call("aten::sort.values",
            {plain, swv_value_default(), swv_value_default(), plain, swv_value_int(0)}),
       "argument 'indices' is an integer; wanted Tensor, which is written");
  swv_op* sum = nullptr;
  ok(swv_op_find("aten::sum", &sum));
  const swv_value named[] = {sharded, swv_value_ints(ints, 1), swv_value_ints(ints, 1)};
  const char* const names[] = {"dim", "keepdim"};
  swv_value result = SWV_NONE;
  says(swv_op_call_named(sum, SWV_MODE_GRAD, named, 3, names, 2, &result, 1, nullptr),
       "the arguments (a tensor, dim: integers, keepdim: integers) fit none");
  swv_op_free(sum);
  says(explain("aten::relu", {plain}), "none of the arguments is a DTensor");
  says(explain("aten::linear", {sharded, sharded}), "made of others");
}

// Without SWV_CHECK_HANDLES: what is seen then is the kind that a handle begins with.
TEST_F(MessagesTest, WhatIsNoHandle) {
  alignas(16) char junk[64] = {};
  int32_t ndim = 0;
  says(swv_tensor_ndim(reinterpret_cast<swv_tensor*>(junk), &ndim),
       "argument 'tensor' is no handle; wanted a swv_tensor");
  says(swv_tensor_ndim(reinterpret_cast<swv_tensor*>(mesh_), &ndim),
       "argument 'tensor' is a swv_mesh; wanted a swv_tensor");
  testing::internal::CaptureStderr();
  swv_tensor_free(reinterpret_cast<swv_tensor*>(junk));
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "shardweave: swv_tensor_free: the argument is no handle of this kind\n");
}

TEST_F(MessagesTest, Worlds) {
  swv_world* out = nullptr;
  swv_rendezvous meet = SWV_RENDEZVOUS_INIT;
  meet.file = "/tmp/nowhere";
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  options.backend = "inproc";
  says(swv_world_join(&meet, &options, &out), "wanted \"gloo\"");
  says(swv_world_create_counting(8, 8, &out), "rank 8 is not in a world of 8");
  says(swv_run_ranks(0, nullptr, nullptr, nullptr), "num_ranks");
  const auto nothing = [](void*, swv_world*) -> swv_status* { return nullptr; };
  for (const char* backend : {"nccl", "gloop", ""}) {
    swv_world* worlds[1] = {};
    options.backend = backend;
    const std::string text = "argument 'options.backend' is \"" + std::string(backend) + "\"";
    says(swv_run_ranks(1, nothing, nullptr, &options), text);
    says(swv_world_create_local(1, &options, worlds), text);
  }
  for (const char* backend : {"gloo", "inproc"}) {  // options that processes have, too
    options.backend = backend;
    ok(swv_run_ranks(1, nothing, nullptr, &options));
  }
  swv_comm *comm = nullptr, *other = nullptr, *counted = nullptr;
  ok(swv_world_comm(world_, &comm));
  float data[3] = {};
  const swv_buffer buffer = cpu_buffer(data, 1, SWV_DTYPE_F32);
  const swv_buffer third = cpu_buffer(data + 2, 1, SWV_DTYPE_F32);
  const int64_t counts[] = {2}, one[] = {1};
  says(swv_comm_all_to_all_v(comm, &buffer, counts, &third, one, 1, nullptr, nullptr),
       "does not add up");
  says(swv_comm_all_to_all_v(comm, &buffer, one, &third, counts, 1, nullptr, nullptr),
       "does not add up");
  says(swv_comm_send(comm, &buffer, 0, -1, nullptr, nullptr), "is -1");
  // Nobody would ever receive it.
  says(swv_comm_send(comm, &buffer, 0, 7, nullptr, nullptr), "cannot call recv with message tag 7");
  says(swv_comm_recv(comm, &buffer, 0, 7, nullptr, nullptr), "cannot call send with message tag 7");
  swv_work* receiving = nullptr;
  ok(swv_comm_recv(comm, &third, 0, 7, nullptr, &receiving));
  ok(swv_comm_send(comm, &buffer, 0, 7, nullptr, nullptr));
  ok(swv_work_wait(receiving));
  swv_work_free(receiving);
  ok(swv_world_create_counting(0, 8, &out));
  ok(swv_world_comm(out, &counted));
  says(swv_comm_split(counted, 0, 0, "half", &other), "moves no data");
  for (swv_comm* c : {comm, counted}) swv_comm_free(c);
  swv_world_free(out);
}

}  // namespace

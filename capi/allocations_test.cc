// What an operator's call allocates: nothing on the way in, and a handle for each result on the way
// out.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "c10/core/GradMode.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/capi/values.h"
#include "shardweave/comm/testing/allocation_counter.h"
#include "testing/buffer.h"
#include "torch/csrc/jit/frontend/function_schema_parser.h"

namespace shardweave::capi {
namespace {

class AllocationsTest : public ::testing::Test {
 protected:
  static void must(swv_status* status) { ASSERT_EQ(status, nullptr) << swv_status_message(status); }
  void SetUp() override {
    at::set_num_threads(1);
    must(swv_set_num_threads(1));
    const swv_mesh_dim dim = {"x", 1};
    must(swv_world_create_local(1, nullptr, &world_));
    must(swv_mesh_create(world_, &dim, 1, &mesh_));
    const int64_t sizes[] = {8, 8};
    for (int sharded : {0, 1}) {
      swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
      if (sharded) options.mesh = mesh_;
      must(swv_tensor_rand(sizes, 2, &options, &square_[sharded]));
      must(swv_tensor_rand(sizes, 1, &options, &row_[sharded]));
    }
  }
  void TearDown() override {
    for (int sharded : {0, 1}) swv_tensor_free(square_[sharded]), swv_tensor_free(row_[sharded]);
    swv_mesh_free(mesh_);
    swv_world_free(world_);
  }

  swv_world* world_ = nullptr;
  swv_mesh* mesh_ = nullptr;
  swv_tensor* square_[2] = {};  // plain, sharded
  swv_tensor* row_[2] = {};
};

// Of the third call: the first ones fill caches.
template <typename Body>
int64_t allocations(const Body& body) {
  body();
  body();
  const int64_t before = allocations_so_far();
  body();
  return allocations_so_far() - before;
}

Communicator* in_cpp(const swv_comm* comm) {
  return comm->comm.get();
}

// As operators' schemas, whatever the kernels do with the arguments. (Of what an IValue holds only
// complex numbers need memory of their own.)
TEST_F(AllocationsTest, EveryKindOfArgumentComesInWithoutAny) {
  swv_tensor* const t = square_[0];
  const int64_t ints[] = {1, 2, 3, 4};
  const double floats[] = {1, 2, 3, 4};
  const swv_bool bools[] = {0, 1, 0, 1};
  swv_tensor* some[] = {t, nullptr, t, nullptr};
  swv_tensor* all[] = {t, t, t, t};
  const swv_value device = swv_value_device({SWV_DEVICE_CPU, 0}), flags = swv_value_bools(bools, 4);
  const struct {
    const char* schema;
    std::vector<swv_value> arguments;
  } cases[] = {
      {"f(Tensor a, Tensor? b, Tensor? c) -> ()",
       {swv_value_tensor(t), swv_value_tensor(t), swv_value_none()}},
      {"f(int a, int? b, float c, float d, bool e, Scalar f, Scalar g, Scalar h) -> ()",
       {swv_value_int(1), swv_value_int(2), swv_value_float(3), swv_value_int(4), swv_value_bool(1),
        swv_value_int(1), swv_value_float(2), swv_value_bool(0)}},
      {"f(str a, str? b, ScalarType c, Layout? d, MemoryFormat? e, Device f) -> ()",
       {swv_value_string("tanh", 4),
        swv_value_string("a text that std::string does not hold in place", 45),
        swv_value_dtype(SWV_DTYPE_F64), swv_value_string("strided", 7),
        swv_value_string("channels_last", 13), device}},
      {"f(int[] a, SymInt[2] b, int[1]? c, int[] d) -> ()",
       {swv_value_ints(ints, 4), swv_value_int(3), swv_value_ints(ints, 1),
        swv_value_ints(ints, 0)}},
      {"f(float[] a, float[] b, bool[4] c, Scalar[] d) -> ()",
       {swv_value_floats(floats, 4), swv_value_ints(ints, 4), flags, swv_value_floats(floats, 4)}},
      {"f(Tensor[] a, Tensor[] b, Tensor?[] c) -> ()",
       {swv_value_tensors(all, 4), swv_value_tensors(all, 2), swv_value_tensors(some, 4)}},
      {"f(Tensor a, int b=1, str c=\"mean\", int[] d=[1, 2], float e=0.5, *, Scalar alpha=1, "
       "Tensor? g=None) -> ()",
       {swv_value_tensor(t)}},
  };
  for (const auto& [schema, arguments] : cases) {
    const Signature signature(torch::jit::parseSchema(schema));
    std::string mismatch;
    EXPECT_EQ(allocations([&] {
                CallStack stack;
                const auto given = given_arguments(arguments.data(), arguments.size());
                ASSERT_TRUE(push_arguments(signature, given, Match::kLenient, stack, &mismatch))
                    << mismatch;
              }),
              0)
        << schema;
  }
}

// The same operator through C and in C++. A list of integers costs one: the wrapper between
// LibTorch's boxed calls and its kernels copies it.
TEST_F(AllocationsTest, ACallAddsOnlyTheHandlesOfItsResults) {
  const c10::AutoGradMode no_grad(false);
  for (int sharded : {0, 1}) {
    swv_tensor *a = square_[sharded], *r = row_[sharded];
    swv_tensor* list[] = {a, a};
    const int64_t one[] = {1};
    const int64_t shape[] = {8};
    const at::Tensor x = a->tensor, bias = r->tensor;
    const swv_value va = swv_value_tensor(a), vr = swv_value_tensor(r), half = swv_value_float(0.5);
    const swv_value yes = swv_value_bool(1), none = swv_value_none();
    const struct {
      const char* name;
      std::vector<swv_value> arguments;
      std::function<void()> cpp;
    } cases[] = {
        {"aten::add.Tensor", {va, va}, [&] { at::add(x, x); }},
        {"aten::add", {va, va}, [&] { at::add(x, x); }},
        {"aten::add", {va, va, swv_value_int(2)}, [&] { at::add(x, x, 2); }},
        {"aten::relu", {va}, [&] { at::relu(x); }},
        {"aten::mm", {va, va}, [&] { at::mm(x, x); }},
        {"aten::linear", {va, va, vr}, [&] { at::linear(x, x, bias); }},
        {"aten::linear", {va, va, none}, [&] { at::linear(x, x); }},
        {"aten::addcmul", {va, va, va, half}, [&] { at::addcmul(x, x, x, 0.5); }},
        {"aten::softmax.int", {va, swv_value_int(1)}, [&] { at::softmax(x, 1); }},
        {"aten::gelu", {va, swv_value_string("tanh", 4)}, [&] { at::gelu(x, "tanh"); }},
        {"aten::sum.dim_IntList",
         {va, swv_value_ints(one, 1), yes},
         [&] { at::sum(x, one, true); }},
        {"aten::cat", {swv_value_tensors(list, 2), swv_value_int(0)}, [&] { at::cat({x, x}); }},
        {"aten::max.dim", {va, swv_value_int(1)}, [&] { at::max(x, 1); }},
        {"aten::layer_norm",
         {va, swv_value_ints(shape, 1), vr, vr, swv_value_float(1e-5), yes},
         [&] { at::layer_norm(x, shape, bias, bias, 1e-5, true); }},
    };
    for (const auto& each : cases) {
      swv_op* op = nullptr;
      must(swv_op_find(each.name, &op));
      size_t num_results = 0;
      const int64_t c = allocations([&] {
        swv_value results[4];
        must(swv_op_call(op, SWV_MODE_NO_GRAD, each.arguments.data(), each.arguments.size(),
                         results, 4, &num_results));
        for (size_t i = 0; i < num_results; ++i) swv_value_clear(&results[i]);
      });
      const int64_t lists =
          std::count_if(each.arguments.begin(), each.arguments.end(),
                        [](const swv_value& v) { return v.kind == SWV_VALUE_INTS; });
      EXPECT_LE(c, allocations(each.cpp) + static_cast<int64_t>(num_results) + lists)
          << each.name << (sharded ? ", sharded" : ", plain");
      swv_op_free(op);
    }
  }
}

// The overload that was found is not looked for again: nothing is converted for those that do not
// fit. (A complex number is the argument that costs memory.)
TEST_F(AllocationsTest, AnOverloadIsFoundOnce) {
  swv_tensor* condition = nullptr;
  swv_op *all = nullptr, *one = nullptr;
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.dtype = SWV_DTYPE_BOOL;
  must(swv_tensor_ones(nullptr, 0, &options, &condition));
  must(swv_op_find("aten::where", &all));
  must(swv_op_find("aten::where.ScalarSelf", &one));
  const swv_value number = swv_value_complex(1, 0);
  const swv_value arguments[] = {swv_value_tensor(condition), number, swv_value_tensor(square_[0])};
  const auto call = [&](swv_op* op) {
    return allocations([&] {
      swv_value result = SWV_NONE;
      must(swv_op_call(op, SWV_MODE_NO_GRAD, arguments, 3, &result, 1, nullptr));
      swv_value_clear(&result);
    });
  };
  EXPECT_EQ(call(all), call(one));
  // Another one is found where the kinds are the same, but what they hold is not.
  const swv_value tensors[] = {swv_value_tensor(condition), swv_value_tensor(square_[0]),
                               swv_value_int(2)};
  swv_value result = SWV_NONE;
  must(swv_op_call(all, SWV_MODE_NO_GRAD, tensors, 3, &result, 1, nullptr));
  swv_value_clear(&result);
  EXPECT_EQ(call(all), call(one));
  swv_op_free(one);
  swv_op_free(all);
  swv_tensor_free(condition);
}

// What an operation of a group allocates is what it allocates in C++: no name is spelled for an
// error that does not come.
TEST_F(AllocationsTest, ACollectiveAddsNone) {
  swv_comm* comm = nullptr;
  must(swv_world_comm(world_, &comm));
  float in[4] = {}, out[4] = {};
  const swv_buffer from = cpu_buffer(in, 4, SWV_DTYPE_F32), to = cpu_buffer(out, 4, SWV_DTYPE_F32);
  const int64_t c = allocations(
      [&] { must(swv_comm_all_reduce(comm, &from, &to, SWV_REDUCE_SUM, nullptr, nullptr)); });
  Communicator& group = *in_cpp(comm);
  const int64_t cpp = allocations([&] {
    ASSERT_TRUE(
        group.all_reduce(Buffer::of(in, 4), Buffer::of(out, 4), ReduceOp::kSum).wait().ok());
  });
  EXPECT_EQ(c, cpp);
  swv_comm_free(comm);
}

// A module of a thousand parameters answers as one of ten does.
TEST_F(AllocationsTest, AModuleFindsWhatItHasWithoutGoingThroughIt) {
  int64_t counts[2][4] = {};
  for (int large : {0, 1}) {
    const int size = large ? 1000 : 10;
    swv_module* module = nullptr;
    must(swv_module_create(&module));
    std::vector<swv_tensor*> tensors(size + 4);
    for (swv_tensor*& t : tensors) must(swv_tensor_zeros(nullptr, 0, nullptr, &t));
    for (int i = 0; i < size; ++i) {
      must(swv_module_add_parameter(module, ("layer." + std::to_string(i)).c_str(), tensors[i]));
    }
    size_t next = size, num = 0;
    counts[large][0] = allocations([&] {
      swv_tensor* t = nullptr;
      must(swv_module_get(module, "layer.7", &t));
      swv_tensor_free(t);
    });
    counts[large][1] = allocations([&] {
      swv_tensor* t = nullptr;
      must(swv_module_parameter(module, 7, nullptr, &t));
      swv_tensor_free(t);
    });
    counts[large][2] = allocations([&] { must(swv_module_num_parameters(module, &num)); });
    EXPECT_EQ(num, tensors.size() - 4);
    counts[large][3] = allocations([&] {
      must(swv_module_add_parameter(module, ("another." + std::to_string(next)).c_str(),
                                    tensors[next]));
      ++next;
    });
    swv_module_free(module);
    for (swv_tensor* t : tensors) swv_tensor_free(t);
  }
  for (int i = 0; i < 3; ++i) EXPECT_EQ(counts[1][i], counts[0][i]) << i;
  // Where a list of torch's grows.
  EXPECT_LE(counts[1][3], counts[0][3] + 4);
}

}  // namespace
}  // namespace shardweave::capi

// A plain gradient of a tensor that lies on a mesh: it lies there too, and ranks that give different ones
// hear of it before anybody sees a number.
#include <cstdint>

#include "capi/testing/on_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave.h"

namespace {

using namespace c_test;  // NOLINT: this file is a test in it

using ::testing::HasSubstr;

constexpr int64_t kSizes[] = {5, 3};

swv_tensor* plain(double value) {
  swv_tensor* result = nullptr;
  ok(swv_tensor_full(kSizes, 2, value, nullptr, &result));
  return result;
}

// x, cut by rows, and twice that.
struct Doubled {
  explicit Doubled(swv_mesh* mesh) {
    Layout rows;
    ok(swv_layout_parse("[S(0)]", rows.out()));
    swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
    options.mesh = mesh;
    options.layout = rows;
    options.requires_grad = 1;
    ok(swv_tensor_ones(kSizes, 2, &options, x.out()));
    Op mul;
    ok(swv_op_find("aten::mul", mul.out()));
    const swv_value args[] = {swv_value_tensor(x), swv_value_float(2)};
    swv_value result = SWV_NONE;
    ok(swv_op_call(mul, SWV_MODE_GRAD, args, 2, &result, 1, nullptr));
    *y.out() = result.as.tensor;
  }
  Tensor x, y;
};

double sum_of(swv_tensor* t) {
  Op sum;
  ok(swv_op_find("aten::sum", sum.out()));
  const swv_value args[] = {swv_value_tensor(t)};
  swv_value total = SWV_NONE, number = SWV_NONE;
  ok(swv_op_call(sum, SWV_MODE_NO_GRAD, args, 1, &total, 1, nullptr));
  Tensor held;
  *held.out() = total.as.tensor;
  ok(swv_tensor_item(held, &number));
  return number.as.number;
}

bool is_sharded(swv_tensor* t) {
  swv_bool sharded = 0;
  ok(swv_tensor_is_sharded(t, &sharded));
  return sharded != 0;
}

int64_t rank_of(swv_mesh* mesh) {
  int64_t rank = 0;
  size_t ndim = 0;
  ok(swv_mesh_coordinate(mesh, &rank, 1, &ndim));
  return rank;
}

TEST(PlainGradientsTest, OfBackward) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    const Doubled d(mesh);
    Tensor with, grad;
    *with.out() = plain(3);
    ok(swv_tensor_backward(d.y, with, nullptr));
    ok(swv_tensor_grad(d.x, grad.out()));
    EXPECT_TRUE(is_sharded(grad));
    EXPECT_EQ(sum_of(grad), 15 * 6);
  });
}

TEST(PlainGradientsTest, OfGradients) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    const Doubled d(mesh);
    Tensor with, grad;
    *with.out() = plain(3);
    const swv_tensor* const of[] = {d.y};
    const swv_tensor* const by[] = {d.x};
    const swv_tensor* const grads[] = {with};
    ok(swv_gradients(of, 1, by, 1, grads, nullptr, grad.out()));
    EXPECT_TRUE(is_sharded(grad));
    EXPECT_EQ(sum_of(grad), 15 * 6);
  });
}

TEST(PlainGradientsTest, OfAFunction) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    swv_function function = SWV_FUNCTION_INIT;
    function.forward = [](void*, const swv_function_call* call) {
      return swv_tensor_share(call->inputs[0], &call->outputs[0]);
    };
    function.backward = [](void*, const swv_function_call* call) {
      return swv_tensor_full(kSizes, 2, 7, nullptr, &call->outputs[0]);
    };
    const Doubled d(mesh);
    Tensor y, with, grad;
    const swv_tensor* const inputs[] = {d.x};
    ok(swv_function_apply(&function, SWV_MODE_GRAD, inputs, 1, y.out(), 1));
    *with.out() = plain(1);
    ok(swv_tensor_backward(y, with, nullptr));
    ok(swv_tensor_grad(d.x, grad.out()));
    EXPECT_TRUE(is_sharded(grad));
    EXPECT_EQ(sum_of(grad), 15 * 7);
  });
}

// What stands in for a gradient that nobody wants may be anything.
TEST(PlainGradientsTest, OfAnInputThatWantsNoneNothingIsCompared) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    struct Given {
      int64_t rank;
    } given{rank_of(mesh)};
    swv_function function = SWV_FUNCTION_INIT;
    function.user_data = &given;
    function.forward = [](void*, const swv_function_call* call) {
      return swv_tensor_share(call->inputs[0], &call->outputs[0]);
    };
    function.backward = [](void* user_data, const swv_function_call* call) {
      swv_status* const status = swv_tensor_share(call->inputs[0], &call->outputs[0]);
      if (status != nullptr) return status;
      const auto own = static_cast<double>(static_cast<Given*>(user_data)->rank);
      return swv_tensor_full(kSizes, 2, own, nullptr, &call->outputs[1]);
    };
    const Doubled d(mesh);
    Tensor labels, y, with, grad;
    ok(swv_tensor_detach(d.x, labels.out()));
    *with.out() = plain(3);
    const swv_tensor* const inputs[] = {d.x, labels};
    ok(swv_function_apply(&function, SWV_MODE_GRAD, inputs, 2, y.out(), 1));
    ok(swv_tensor_backward(y, with, nullptr));
    ok(swv_tensor_grad(d.x, grad.out()));
    EXPECT_EQ(sum_of(grad), 15 * 3);
  });
}

TEST(PlainGradientsTest, OtherOnesOnARankAreAnErrorBeforeANorm) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    const Doubled d(mesh);
    Tensor with;
    *with.out() = plain(3 + static_cast<double>(rank_of(mesh)));
    ok(swv_tensor_backward(d.y, with, nullptr));
    swv_tensor* const parameters[] = {d.x};
    double norm = 0;
    const std::string message = message_of(swv_clip_grad_norm(parameters, 1, 1.0, nullptr, &norm));
    EXPECT_THAT(message, HasSubstr("differ"));
  });
}

}  // namespace

// Calls under autocast: it is the call's, and a callback's that the call makes, and nobody's after that.
#include <string>
#include <vector>

#include "capi/testing/on_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave.h"

namespace {

using namespace c_test;  // NOLINT: this file is a test in it

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr swv_grad_mode kBFloat16 = SWV_MODE_GRAD | SWV_MODE_AUTOCAST_BF16;

swv_tensor* weight(swv_mesh* mesh, const char* layout) {
  const int64_t sizes[] = {4, 4};
  Layout rows;
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.requires_grad = 1;
  if (mesh != nullptr) {
    ok(swv_layout_parse(layout, rows.out()));
    options.mesh = mesh;
    options.layout = rows;
  }
  swv_tensor* result = nullptr;
  ok(swv_tensor_full(sizes, 2, 1.001953125, &options, &result));  // 1 in bfloat16
  return result;
}

swv_tensor* call(const char* name, swv_grad_mode mode, std::vector<swv_tensor*> inputs) {
  Op op;
  ok(swv_op_find(name, op.out()));
  std::vector<swv_value> args;
  for (swv_tensor* input : inputs) args.push_back(swv_value_tensor(input));
  swv_value result = SWV_NONE;
  ok(swv_op_call(op, mode, args.data(), args.size(), &result, 1, nullptr));
  return result.as.tensor;
}

swv_dtype type_of(swv_tensor* tensor) {
  swv_dtype dtype = 0;
  ok(swv_tensor_dtype(tensor, &dtype));
  return dtype;
}

swv_dtype type_of_product(swv_tensor* w, swv_grad_mode mode) {
  Tensor y;
  *y.out() = call("aten::mm", mode, {w, w});
  return type_of(y);
}

double total(swv_tensor* tensor) {
  Tensor sum;
  *sum.out() = call("aten::sum", SWV_MODE_NO_GRAD, {tensor});
  swv_value number = SWV_NONE;
  ok(swv_tensor_item(sum, &number));
  return number.as.number;
}

TEST(AutocastTest, IsTheCallsAlone) {
  on_mesh("x=2", [](swv_mesh* mesh) {
    for (swv_mesh* on : {static_cast<swv_mesh*>(nullptr), mesh}) {
      Tensor w;
      *w.out() = weight(on, "[S(0)]");
      for (const swv_grad_mode mode : {SWV_MODE_GRAD, SWV_MODE_NO_GRAD, SWV_MODE_INFERENCE}) {
        EXPECT_EQ(type_of_product(w, mode | SWV_MODE_AUTOCAST_BF16), SWV_DTYPE_BF16);
        EXPECT_EQ(type_of_product(w, mode), SWV_DTYPE_F32);
        EXPECT_EQ(type_of_product(w, mode | SWV_MODE_AUTOCAST_F16), SWV_DTYPE_F16);
        EXPECT_EQ(type_of_product(w, mode), SWV_DTYPE_F32);
      }
    }
  });
}

// Values, what keeps its range, and gradients of parameters in their own type.
TEST(AutocastTest, ForwardAndBackward) {
  on_mesh("x=2", [](swv_mesh* mesh) {
    for (swv_mesh* on : {static_cast<swv_mesh*>(nullptr), mesh}) {
      Tensor a, b, product, exact, loss, grad;
      *a.out() = weight(on, "[S(0)]");
      *b.out() = weight(on, "[S(1)]");
      *product.out() = call("aten::mm", kBFloat16, {a, b});
      EXPECT_EQ(total(product), 4 * 16);  // of ones
      *exact.out() = call("aten::mse_loss", kBFloat16, {product, product});
      EXPECT_EQ(type_of(exact), SWV_DTYPE_F32);
      *loss.out() = call("aten::sum", SWV_MODE_GRAD, {product});
      ok(swv_tensor_backward(loss, nullptr, nullptr));
      ok(swv_tensor_grad(a, grad.out()));
      EXPECT_EQ(type_of(grad), SWV_DTYPE_F32);
      EXPECT_EQ(total(grad), 4 * 16);  // of ones, too
    }
  });
}

// What is cast is a call's own: a weight that was written since is cast anew.
TEST(AutocastTest, KeepsNoWeights) {
  Tensor w, y, two;
  *w.out() = weight(nullptr, "");
  EXPECT_EQ(type_of_product(w, kBFloat16), SWV_DTYPE_BF16);
  Op fill;
  ok(swv_op_find("aten::fill_.Scalar", fill.out()));
  const swv_value args[] = {swv_value_tensor(w), swv_value_float(2)};
  swv_value filled = SWV_NONE;
  ok(swv_op_call(fill, SWV_MODE_NO_GRAD, args, 2, &filled, 1, nullptr));
  swv_value_clear(&filled);
  *y.out() = call("aten::mm", kBFloat16, {w, w});
  EXPECT_EQ(total(y), 16 * 16);
}

TEST(AutocastTest, OtherModesAreRefused) {
  Tensor w;
  *w.out() = weight(nullptr, "");
  Op op;
  ok(swv_op_find("aten::mm", op.out()));
  const swv_value args[] = {swv_value_tensor(w), swv_value_tensor(w)};
  for (const swv_grad_mode mode :
       {3, 16, -1, SWV_MODE_GRAD | SWV_MODE_AUTOCAST_F16 | SWV_MODE_AUTOCAST_BF16,
        3 | SWV_MODE_AUTOCAST_F16}) {
    swv_value result = SWV_NONE;
    const std::string message = message_of(swv_op_call(op, mode, args, 2, &result, 1, nullptr));
    EXPECT_THAT(message, HasSubstr("argument 'mode' is " + std::to_string(mode) + "; wanted"));
    EXPECT_THAT(message,
                HasSubstr("with SWV_MODE_AUTOCAST_F16, SWV_MODE_AUTOCAST_BF16 or neither"));
  }
}

// --- callbacks -----------------------------------------------------------------------------------

// What a callback saw: its modes, and what its operators gave under the call's mode and under none.
struct Seen {
  std::vector<swv_grad_mode> modes;
  std::vector<swv_dtype> types;
};

swv_status* look(void* user_data, const swv_function_call* call_) {
  Seen& seen = *static_cast<Seen*>(user_data);
  seen.modes.push_back(call_->mode);
  swv_tensor* const w = const_cast<swv_tensor*>(call_->inputs[0]);
  seen.types.push_back(type_of_product(w, call_->mode));
  seen.types.push_back(type_of_product(w, SWV_MODE_NO_GRAD));
  call_->outputs[0] = call("aten::mul", call_->mode, {w, w});
  return nullptr;
}

TEST(AutocastTest, OfAFunctionAndNotOfItsBackward) {
  Seen seen;
  swv_function function = SWV_FUNCTION_INIT;
  function.name = "looks";
  function.user_data = &seen;
  function.forward = look;
  function.backward = look;
  Tensor w, y, loss;
  *w.out() = weight(nullptr, "");
  const swv_tensor* const inputs[] = {w};
  ok(swv_function_apply(&function, kBFloat16, inputs, 1, y.out(), 1));
  *loss.out() = call("aten::sum", SWV_MODE_GRAD, {y});
  ok(swv_tensor_backward(loss, nullptr, nullptr));
  EXPECT_THAT(seen.modes, ElementsAre(SWV_MODE_NO_GRAD | SWV_MODE_AUTOCAST_BF16, SWV_MODE_NO_GRAD));
  EXPECT_THAT(seen.types, ElementsAre(SWV_DTYPE_BF16, SWV_DTYPE_F32, SWV_DTYPE_F32, SWV_DTYPE_F32));
  EXPECT_EQ(type_of_product(w, SWV_MODE_GRAD), SWV_DTYPE_F32);
}

TEST(AutocastTest, OfBothRunsOfASegment) {
  on_mesh("x=2", [](swv_mesh* mesh) {
    Seen seen;
    swv_segment segment = SWV_SEGMENT_INIT;
    segment.user_data = &seen;
    segment.forward = look;
    Tensor w, y, loss;
    *w.out() = weight(mesh, "[S(0)]");
    const swv_tensor* const inputs[] = {w};
    ok(swv_checkpoint(&segment, SWV_MODE_GRAD | SWV_MODE_AUTOCAST_F16, inputs, 1, y.out(), 1));
    *loss.out() = call("aten::sum", SWV_MODE_GRAD, {y});
    ok(swv_tensor_backward(loss, nullptr, nullptr));
    EXPECT_THAT(seen.modes, ElementsAre(SWV_MODE_NO_GRAD | SWV_MODE_AUTOCAST_F16,
                                        SWV_MODE_GRAD | SWV_MODE_AUTOCAST_F16));
    EXPECT_THAT(seen.types,
                ElementsAre(SWV_DTYPE_F16, SWV_DTYPE_F32, SWV_DTYPE_F16, SWV_DTYPE_F32));
  });
}

// One that fails leaves nothing behind.
TEST(AutocastTest, EndsWithACallThatFails) {
  swv_function function = SWV_FUNCTION_INIT;
  function.name = "fails";
  function.forward = [](void* /*user_data*/, const swv_function_call* /*call*/) {
    return swv_status_new(SWV_CODE_DATA_LOSS, "no more");
  };
  function.backward = function.forward;
  Tensor w;
  *w.out() = weight(nullptr, "");
  const swv_tensor* const inputs[] = {w};
  swv_tensor* y = nullptr;
  EXPECT_THAT(
      message_of(swv_function_apply(&function, kBFloat16, inputs, 1, &y, 1), SWV_CODE_DATA_LOSS),
      HasSubstr("no more"));
  EXPECT_EQ(type_of_product(w, SWV_MODE_GRAD), SWV_DTYPE_F32);
}

}  // namespace

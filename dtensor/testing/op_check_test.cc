// That op_check can fail: operators that are wrong on DTensors only.
#include "shardweave/dtensor/testing/op_check.h"

#include "ATen/ops/add.h"
#include "ATen/ops/clamp.h"
#include "ATen/ops/floor.h"
#include "ATen/ops/hardsigmoid.h"
#include "ATen/ops/mul.h"
#include "ATen/ops/sum.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "torch/csrc/autograd/custom_function.h"

namespace shardweave {
namespace {

using testing::check_on_mesh;
using testing::CheckResult;
using ::testing::Contains;
using ::testing::ElementsAre;
using testing::find_differences;
using ::testing::HasSubstr;
using testing::in;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::OpCase;
using testing::Tensors;

const std::vector<MeshDim> kMesh = {{"x", 3}};

TEST(OpCheckTest, FindsNothingWhereNothingIs) {
  EXPECT_THAT(find_differences({"add",
                                {in({7, 5}), in({5})},
                                [](const Tensors& x) { return Tensors{at::add(x[0], x[1])}; }},
                               kMesh),
              IsEmpty());
}

TEST(OpCheckTest, FindsAWrongValue) {
  const OpCase op = {"mul", {in({7, 5})}, [](const Tensors& x) {
                       return Tensors{at::mul(x[0], is_dtensor(x[0]) ? 2.001 : 2.0)};
                     }};
  EXPECT_THAT(find_differences(op, kMesh), Contains(HasSubstr("output 0: max difference")));
}

TEST(OpCheckTest, FindsAWrongGradient) {
  const OpCase op = {
      "mul", {in({7, 5})}, [](const Tensors& x) {
        at::Tensor wrong = x[0].mul(0.5);
        return Tensors{is_dtensor(x[0]) ? wrong.add(x[0].detach().mul(0.5)) : x[0].mul(1)};
      }};
  const auto found = find_differences(op, kMesh);
  EXPECT_THAT(found, Contains(HasSubstr("gradient of input 0: max difference")));
  EXPECT_THAT(found, Not(Contains(HasSubstr("output 0"))));
}

// x * x, whose second derivative is 1 on DTensors: there half of it takes one factor for a constant.
TEST(OpCheckTest, FindsAWrongSecondGradient) {
  const OpCase op = {"square", {in({7, 5})}, [](const Tensors& x) {
                       if (!is_dtensor(x[0])) return Tensors{at::mul(x[0], x[0])};
                       const at::Tensor constant = x[0].detach();
                       return Tensors{at::mul(x[0], x[0]).mul(0.5) + at::mul(x[0], constant) -
                                      at::mul(constant, constant).mul(0.5)};
                     }};
  const auto found = find_differences(op, kMesh);
  EXPECT_THAT(found, Contains(HasSubstr(": second gradient of input 0: max difference")));
  EXPECT_THAT(found, Not(Contains(HasSubstr(": gradient of input 0"))));
  EXPECT_THAT(found, Not(Contains(HasSubstr("with create_graph, gradient of input 0"))));
}

// Linear: the gradient of the gradient is by its cotangent alone.
TEST(OpCheckTest, FindsAWrongSecondGradientOfACotangent) {
  struct Twice : torch::autograd::Function<Twice> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
      return x.mul(2);
    }
    static Tensors backward(torch::autograd::AutogradContext*, Tensors cotangents) {
      const at::Tensor& c = cotangents[0];
      return {is_dtensor(c) ? c.mul(3) - c.detach() : c.mul(2)};
    }
  };
  const OpCase op = {
      "twice", {in({7, 5})}, [](const Tensors& x) { return Tensors{Twice::apply(x[0])}; }};
  const auto found = find_differences(op, kMesh);
  EXPECT_THAT(
      found, Contains(HasSubstr(": second gradient of the cotangent of output 0: max difference")));
  EXPECT_THAT(found, Not(Contains(HasSubstr(": gradient of input 0"))));
}

TEST(OpCheckTest, AGradientThatIsRightOnlyWithoutAGraphIsWrong) {
  struct Twice : torch::autograd::Function<Twice> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
      return x.mul(2);
    }
    static Tensors backward(torch::autograd::AutogradContext*, Tensors cotangents) {
      const at::Tensor& c = cotangents[0];
      return {c.mul(is_dtensor(c) && at::GradMode::is_enabled() ? 3 : 2)};
    }
  };
  const OpCase op = {
      "twice", {in({7, 5})}, [](const Tensors& x) { return Tensors{Twice::apply(x[0])}; }};
  EXPECT_THAT(find_differences(op, kMesh),
              Contains(HasSubstr("with create_graph, gradient of input 0: max difference")));
}

// LibTorch has no second derivative of hardsigmoid.
TEST(OpCheckTest, NamesASecondGradientThatRaises) {
  OpCase op = {
      "hardsigmoid", {in({7, 5})}, [](const Tensors& x) {
        return Tensors{is_dtensor(x[0]) ? at::hardsigmoid(x[0]) : at::clamp(x[0] + 3, 0, 6).div(6)};
      }};
  op.tolerance = 1e-7;  // its backward's 1 / 6 has the digits of a float
  EXPECT_THAT(find_differences(op, kMesh),
              ElementsAre(HasSubstr("second gradient: derivative for aten::hardsigmoid_backward")));
}

TEST(OpCheckTest, CountsSecondGradients) {
  const OpCase mul = {
      "mul", {in({7, 5}), in({5})}, [](const Tensors& x) { return Tensors{at::mul(x[0], x[1])}; }};
  const CheckResult all = check_on_mesh(mul, kMesh, {.second_gradients_every = 1});
  EXPECT_GT(all.combinations, 3);
  EXPECT_EQ(all.second_gradients, all.combinations);
  EXPECT_EQ(all.no_second_derivative, "");
  const CheckResult third = check_on_mesh(mul, kMesh);
  EXPECT_EQ(third.second_gradients, (all.combinations + 2) / 3);
  // What only they reach wants a sample of its own.
  EXPECT_EQ(third.reached, all.reached);
}

TEST(OpCheckTest, WhatOneDeviceCannotDifferentiateTwiceIsCountedApart) {
  const CheckResult none =
      check_on_mesh({"hardsigmoid",
                     {in({7, 5})},
                     [](const Tensors& x) { return Tensors{at::hardsigmoid(x[0])}; }},
                    kMesh);
  EXPECT_THAT(none.differences, IsEmpty());
  EXPECT_GT(none.combinations, 0);
  EXPECT_EQ(none.second_gradients, 0);
  EXPECT_THAT(none.no_second_derivative, HasSubstr("hardsigmoid_backward is not implemented"));
  const CheckResult zero = check_on_mesh(
      {"floor", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::floor(x[0])}; }}, kMesh);
  EXPECT_EQ(zero.second_gradients, 0);
  EXPECT_EQ(zero.no_second_derivative, "no gradient requires grad");
}

// What is wrong for one layout only.
TEST(OpCheckTest, FindsASumOfSquaresOfSummands) {
  const OpCase op = {
      "sum of squares", {in({7, 5})}, [](const Tensors& x) {
        if (!is_dtensor(x[0]) || !layout_of(x[0]).has_partial()) {
          return Tensors{at::sum(x[0].mul(x[0]))};
        }
        const at::Tensor local = to_local(x[0]);
        return Tensors{at::sum(from_local(local.mul(local), mesh_of(x[0]), {Partial()}))};
      }};
  EXPECT_THAT(find_differences(op, kMesh), Contains(HasSubstr("[7, 5] [P(sum)]: output 0")));
}

TEST(OpCheckTest, FindsAWrongShape) {
  const OpCase op = {"sum", {in({7, 5})}, [](const Tensors& x) {
                       return Tensors{at::sum(x[0], 0, is_dtensor(x[0]))};
                     }};
  EXPECT_THAT(find_differences(op, kMesh), Contains(HasSubstr("[1, 5] with strides")));
}

TEST(OpCheckTest, NamesTheCombinationThatRaises) {
  const OpCase op = {"add", {in({7, 5}), in({7})}, [](const Tensors& x) {
                       return Tensors{at::add(x[0], is_dtensor(x[0]) ? x[1] : x[1].sum())};
                     }};
  EXPECT_THAT(find_differences(op, kMesh),
              ElementsAre(HasSubstr("add on DeviceMesh(x=3) at rank")));
}

}  // namespace
}  // namespace shardweave

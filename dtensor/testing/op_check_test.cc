// That op_check can fail: operators that are wrong on DTensors only.
#include "shardweave/dtensor/testing/op_check.h"

#include "ATen/ops/add.h"
#include "ATen/ops/mul.h"
#include "ATen/ops/sum.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"

namespace shardweave {
namespace {

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

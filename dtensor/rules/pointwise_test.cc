// Elementwise operators on shards against one device.
#include <cmath>

#include "ATen/ATen.h"
#include "c10/core/DefaultDtype.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/op_check.h"

namespace shardweave {
namespace {

using at::Tensor;
using testing::check_op;
using testing::check_ops;
using testing::in;
using testing::Input;
using testing::on_mesh;
using testing::OpCase;
using testing::Tensors;

struct Unary {
  const char* name;
  Tensor (*run)(const Tensor&);
  double low = -3, high = 3;  // where it is defined
};

TEST(PointwiseRulesTest, OneOperand) {
  const std::vector<Unary> operators = {{"abs", at::abs},
                                        {"acos", at::acos, -0.9, 0.9},
                                        {"acosh", at::acosh, 1.1, 3},
                                        {"asin", at::asin, -0.9, 0.9},
                                        {"asinh", at::asinh},
                                        {"atan", at::atan},
                                        {"atanh", at::atanh, -0.9, 0.9},
                                        {"ceil", at::ceil},
                                        {"conj_physical", at::conj_physical},
                                        {"cos", at::cos},
                                        {"cosh", at::cosh},
                                        {"deg2rad", at::deg2rad},
                                        {"digamma", at::digamma, 0.5, 3},
                                        {"erf", at::erf},
                                        {"erfc", at::erfc},
                                        {"erfinv", at::erfinv, -0.9, 0.9},
                                        {"exp", at::exp},
                                        {"exp2", at::exp2},
                                        {"expm1", at::expm1},
                                        {"floor", at::floor},
                                        {"frac", at::frac},
                                        {"hardsigmoid", at::hardsigmoid},
                                        {"hardswish", at::hardswish},
                                        {"i0", at::i0},
                                        {"lgamma", at::lgamma, 0.5, 3},
                                        {"log", at::log, 0.1, 3},
                                        {"log10", at::log10, 0.1, 3},
                                        {"log1p", at::log1p, -0.5, 3},
                                        {"log2", at::log2, 0.1, 3},
                                        {"log_sigmoid", at::log_sigmoid},
                                        {"mish", at::mish},
                                        {"neg", at::neg},
                                        {"positive", at::positive},
                                        {"rad2deg", at::rad2deg},
                                        {"reciprocal", at::reciprocal, 0.5, 3},
                                        {"relu", at::relu},
                                        {"relu6", at::relu6},
                                        {"round", at::round},
                                        {"rsqrt", at::rsqrt, 0.1, 3},
                                        {"selu", at::selu},
                                        {"sigmoid", at::sigmoid},
                                        {"sign", at::sign},
                                        {"silu", at::silu},
                                        {"sin", at::sin},
                                        {"sinc", at::sinc},
                                        {"sinh", at::sinh},
                                        {"sqrt", at::sqrt, 0.1, 3},
                                        {"square", at::square},
                                        {"tan", at::tan, -1, 1},
                                        {"tanh", at::tanh},
                                        {"trunc", at::trunc},
                                        {"special_entr", at::special_entr, 0.1, 3},
                                        {"special_i1", at::special_i1},
                                        {"special_ndtr", at::special_ndtr},
                                        {"special_log_ndtr", at::special_log_ndtr}};
  for (const Unary& op : operators) {
    SCOPED_TRACE(op.name);
    check_op({op.name, {in({5, 3}).uniform(op.low, op.high)}, [&](const Tensors& x) {
                return Tensors{op.run(x[0])};
              }});
  }
}

TEST(PointwiseRulesTest, OneOperandWithNumbers) {
  check_ops({
      {"celu", {in({7})}, [](const Tensors& x) { return Tensors{at::celu(x[0], 0.7)}; }},
      {"elu", {in({7})}, [](const Tensors& x) { return Tensors{at::elu(x[0], 0.7)}; }},
      {"gelu", {in({7})}, [](const Tensors& x) { return Tensors{at::gelu(x[0])}; }},
      {"gelu tanh", {in({7})}, [](const Tensors& x) { return Tensors{at::gelu(x[0], "tanh")}; }},
      {"hardshrink",
       {in({7})},
       [](const Tensors& x) { return Tensors{at::hardshrink(x[0], 0.3)}; }},
      {"hardtanh",
       {in({7})},
       [](const Tensors& x) { return Tensors{at::hardtanh(x[0], -0.5, 0.5)}; }},
      {"leaky_relu",
       {in({7})},
       [](const Tensors& x) { return Tensors{at::leaky_relu(x[0], 0.1)}; }},
      {"softplus", {in({7})}, [](const Tensors& x) { return Tensors{at::softplus(x[0], 2)}; }},
      {"softshrink",
       {in({7})},
       [](const Tensors& x) { return Tensors{at::softshrink(x[0], 0.3)}; }},
      {"threshold",
       {in({7})},
       [](const Tensors& x) { return Tensors{at::threshold(x[0], 0.1, 2)}; }},
      {"clamp", {in({7})}, [](const Tensors& x) { return Tensors{at::clamp(x[0], -0.5, 0.7)}; }},
      {"clamp_min", {in({7})}, [](const Tensors& x) { return Tensors{at::clamp_min(x[0], -0.5)}; }},
      {"logit",
       {in({7}).uniform(0.1, 0.9)},
       [](const Tensors& x) { return Tensors{at::logit(x[0])}; }},
      {"logit with an edge",
       {in({7}).uniform(0.1, 0.9)},
       [](const Tensors& x) { return Tensors{at::logit(x[0], 0.3)}; }},
      {"mvlgamma",
       {in({7}).uniform(3, 5)},
       [](const Tensors& x) { return Tensors{at::mvlgamma(x[0], 2)}; }},
      {"nan_to_num", {in({7})}, [](const Tensors& x) { return Tensors{at::nan_to_num(x[0], 1)}; }},
      {"polygamma",
       {in({7}).uniform(1, 3)},
       [](const Tensors& x) { return Tensors{at::polygamma(1, x[0])}; }},
      {"round to decimals",
       {in({7})},
       [](const Tensors& x) { return Tensors{at::round(x[0], 1)}; }},
      {"frexp",
       {in({7})},
       [](const Tensors& x) {
         auto [mantissa, exponent] = at::frexp(x[0]);
         return Tensors{mantissa, exponent};
       }},
      {"pow number", {in({7})}, [](const Tensors& x) { return Tensors{at::pow(x[0], 3)}; }},
      {"number pow", {in({7})}, [](const Tensors& x) { return Tensors{at::pow(2, x[0])}; }},
      {"add number", {in({7})}, [](const Tensors& x) { return Tensors{x[0] + 2}; }},
      {"sub number", {in({7})}, [](const Tensors& x) { return Tensors{x[0] - 2}; }},
      {"rsub number", {in({7})}, [](const Tensors& x) { return Tensors{2 - x[0]}; }},
      {"mul number", {in({7})}, [](const Tensors& x) { return Tensors{x[0] * 2}; }},
      {"div number", {in({7})}, [](const Tensors& x) { return Tensors{x[0] / 2}; }},
      {"number div", {in({7}).uniform(1, 2)}, [](const Tensors& x) { return Tensors{2 / x[0]}; }},
      {"div number floor",
       {in({7})},
       [](const Tensors& x) { return Tensors{at::div(x[0], 2, "floor")}; }},
      {"floor_divide number",
       {in({7})},
       [](const Tensors& x) { return Tensors{at::floor_divide(x[0], 0.3)}; },
       false},
      {"fmod number", {in({7})}, [](const Tensors& x) { return Tensors{at::fmod(x[0], 0.3)}; }},
      {"remainder number",
       {in({7})},
       [](const Tensors& x) { return Tensors{at::remainder(x[0], 0.3)}; }},
      {"number remainder",
       {in({7})},
       [](const Tensors& x) { return Tensors{at::remainder(5, x[0])}; },
       false},
      {"comparisons",
       {in({7})},
       [](const Tensors& x) {
         return Tensors{x[0] > 0,
                        x[0] >= 0,
                        x[0] < 0.5,
                        x[0] <= 0,
                        x[0] == 0,
                        x[0] != 0,
                        at::isnan(x[0]),
                        at::isinf(x[0]),
                        at::isposinf(x[0]),
                        at::isneginf(x[0]),
                        at::isfinite(x[0]),
                        at::signbit(x[0]),
                        at::logical_not(x[0])};
       }},
  });
}

struct Binary {
  const char* name;
  Tensor (*run)(const Tensor&, const Tensor&);
  double low = -3, high = 3;
  bool gradients = true;
};

TEST(PointwiseRulesTest, TwoOperands) {
  const std::vector<Binary> operators = {{"atan2", at::atan2},
                                         {"copysign", at::copysign, -3, 3, false},
                                         {"fmax", at::fmax},
                                         {"fmin", at::fmin},
                                         {"fmod", at::fmod},
                                         {"heaviside", at::heaviside, -3, 3, false},
                                         {"hypot", at::hypot},
                                         {"igamma", at::igamma, 0.5, 3, false},
                                         {"ldexp", at::ldexp},
                                         {"logaddexp", at::logaddexp},
                                         {"logaddexp2", at::logaddexp2},
                                         {"maximum", at::maximum},
                                         {"minimum", at::minimum},
                                         {"mul", at::mul},
                                         {"nextafter", at::nextafter, -3, 3, false},
                                         {"pow", at::pow, 0.5, 2},
                                         {"remainder", at::remainder},
                                         {"xlogy", at::xlogy, 0.5, 3},
                                         {"special_xlog1py", at::special_xlog1py, 0.5, 3},
                                         {"div", at::div, 0.5, 2},
                                         {"floor_divide", at::floor_divide, 0.5, 3, false},
                                         {"true_divide", at::true_divide, 0.5, 2},
                                         {"max", at::max},
                                         {"min", at::min},
                                         {"special_zeta", at::special_zeta, 1.5, 3, false}};
  for (const Binary& op : operators) {
    SCOPED_TRACE(op.name);
    auto run = [&](const Tensors& x) { return Tensors{op.run(x[0], x[1])}; };
    auto input = [&](std::vector<int64_t> sizes) {
      return in(std::move(sizes)).uniform(op.low, op.high);
    };
    check_op({op.name, {input({5, 3}), input({5, 3})}, run, op.gradients});
  }
}

TEST(PointwiseRulesTest, Broadcasting) {
  auto add = [](const Tensors& x) { return Tensors{at::add(x[0], x[1], 2)}; };
  auto mul = [](const Tensors& x) { return Tensors{x[0] * x[1]}; };
  auto div = [](const Tensors& x) { return Tensors{x[0] / x[1]}; };
  const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> shapes = {
      {{5, 3}, {3}},    {{5, 3}, {5, 1}}, {{5, 1}, {1, 3}}, {{5, 1}, {5, 1}},
      {{3}, {2, 5, 3}}, {{5, 3}, {}},     {{0, 3}, {1, 3}}};
  for (const auto& [a, b] : shapes) {
    check_ops({{"add", {in(a), in(b)}, add},
               {"mul", {in(a), in(b)}, mul},
               {"div", {in(a), in(b).uniform(1, 2)}, div}});
  }
  check_ops({
      {"sub",
       {in({5, 3}), in({3})},
       [](const Tensors& x) { return Tensors{at::sub(x[0], x[1], 2)}; }},
      {"rsub",
       {in({5, 3}), in({3})},
       [](const Tensors& x) { return Tensors{at::rsub(x[0], x[1], 2)}; }},
      {"add of a transposed one", {in({5, 3}).transposed(), in({5, 3})}, add},
      {"mul of integers", {in({5, 3}).integers(-5, 5), in({3})}, mul},
      {"div rounded",
       {in({5, 3}), in({3}).uniform(1, 2)},
       [](const Tensors& x) { return Tensors{at::div(x[0], x[1], "trunc")}; }},
  });
}

TEST(PointwiseRulesTest, IntegersAndFlags) {
  auto input = [] { return in({5, 3}).integers(1, 20); };
  check_ops({
      {"bits",
       {input(), input()},
       [](const Tensors& x) {
         return Tensors{at::bitwise_and(x[0], x[1]),
                        at::bitwise_or(x[0], x[1]),
                        at::bitwise_xor(x[0], x[1]),
                        at::bitwise_not(x[0]),
                        at::gcd(x[0], x[1]),
                        at::lcm(x[0], x[1]),
                        at::bitwise_left_shift(x[0], x[1]),
                        at::bitwise_right_shift(x[0], x[1]),
                        x[0].__lshift__(x[1]),
                        x[0].__rshift__(2),
                        at::floor_divide(x[0], x[1])};
       }},
      {"logic",
       {in({5, 3}).flags(), in({3}).flags()},
       [](const Tensors& x) {
         return Tensors{at::logical_and(x[0], x[1]), at::logical_or(x[0], x[1]),
                        at::logical_xor(x[0], x[1]), x[0] & x[1], at::logical_not(x[0])};
       }},
      {"comparisons",
       {input(), input()},
       [](const Tensors& x) {
         return Tensors{at::eq(x[0], x[1]),  at::ne(x[0], x[1]), at::gt(x[0], x[1]),
                        at::ge(x[0], x[1]),  at::lt(x[0], x[1]), at::le(x[0], x[1]),
                        at::isin(x[0], x[1])};
       }},
      {"integers in floating functions",
       {input()},
       [](const Tensors& x) {
         return Tensors{at::sqrt(x[0]),
                        at::logit(x[0] * 0),
                        at::mvlgamma(x[0] + 3, 2),
                        at::sigmoid(x[0]),
                        x[0] / 2,
                        at::relu(x[0]),
                        at::abs(x[0]),
                        at::nan_to_num(x[0])};
       }},
      {"logical_and of floats",
       {in({5, 3}).with_ties(), in({5, 3}).with_ties()},
       [](const Tensors& x) { return Tensors{at::logical_and(x[0], x[1])}; },
       false},
  });
}

TEST(PointwiseRulesTest, ThreeOperands) {
  check_ops({
      {"addcmul",
       {in({5, 3}), in({5, 3}), in({3})},
       [](const Tensors& x) { return Tensors{at::addcmul(x[0], x[1], x[2], 2)}; }},
      {"addcdiv",
       {in({5, 3}), in({5, 3}), in({3}).uniform(1, 2)},
       [](const Tensors& x) { return Tensors{at::addcdiv(x[0], x[1], x[2], 2)}; }},
      {"lerp number",
       {in({5, 3}), in({5, 3})},
       [](const Tensors& x) { return Tensors{at::lerp(x[0], x[1], 0.3)}; }},
      {"lerp",
       {in({5, 3}), in({5, 3}), in({3})},
       [](const Tensors& x) { return Tensors{at::lerp(x[0], x[1], x[2])}; }},
      {"where",
       {in({5, 3}).flags(), in({5, 3}), in({3})},
       [](const Tensors& x) { return Tensors{at::where(x[0], x[1], x[2])}; }},
      {"where number",
       {in({5, 3}).flags(), in({5, 3})},
       [](const Tensors& x) { return Tensors{at::where(x[0], x[1], 0.5)}; }},
      {"where of types",
       {in({5, 3}).flags(), in({5, 3}).integers(0, 9), in({3}).dtype(at::kFloat)},
       [](const Tensors& x) {
         return Tensors{at::where(x[0], x[1], x[2]), at::where(x[0], x[1], 0.5)};
       },
       false},
      {"clamp by tensors",
       {in({5, 3}), in({3}).uniform(-1, 0), in({5, 1}).uniform(0, 1)},
       [](const Tensors& x) {
         return Tensors{at::clamp(x[0], x[1], x[2]), at::clamp(x[0], x[1])};
       }},
      {"masked_fill with zeros",
       {in({5, 3}), in({5, 1}).flags()},
       [](const Tensors& x) { return Tensors{at::masked_fill(x[0], x[1], 0)}; }},
      {"masked_fill with a number",
       {in({5, 3}), in({3}).flags()},
       [](const Tensors& x) { return Tensors{at::masked_fill(x[0], x[1], 7)}; }},
      {"masked_fill with a tensor",
       {in({5, 3}), in({5, 3}).flags(), in({})},
       [](const Tensors& x) { return Tensors{at::masked_fill(x[0], x[1], x[2])}; }},
      {"prelu",
       {in({2, 3, 4}), in({3})},
       [](const Tensors& x) { return Tensors{at::prelu(x[0], x[1])}; }},
      {"prelu with one weight",
       {in({2, 3, 4}), in({1})},
       [](const Tensors& x) { return Tensors{at::prelu(x[0], x[1])}; }},
      {"glu", {in({5, 4})}, [](const Tensors& x) { return Tensors{at::glu(x[0], 1)}; }},
  });
}

TEST(PointwiseRulesTest, InPlaceAndOut) {
  check_ops({
      {"in place",
       {in({5, 3}).uniform(1, 2), in({3}).uniform(1, 2)},
       [](const Tensors& x) {
         Tensor y = x[0].clone();
         y.mul_(x[1]).add_(x[1], 2).sub_(1).div_(x[1]).sqrt_().neg_().abs_().clamp_(0.1, 5).pow_(2);
         y.addcmul_(x[0], x[1], 0.5)
             .addcdiv_(x[0], x[1], 0.5)
             .lerp_(x[0], 0.25)
             .masked_fill_(x[0] > 1.5, 0.5);
         return Tensors{y, x[0].clone().copy_(x[1]), x[0].clone().fill_(3), x[0].clone().zero_()};
       },
       false},
      {"in place with gradients",
       {in({5, 3}), in({3})},
       [](const Tensors& x) {
         return Tensors{x[0].clone().mul_(2).add_(x[1], 2).neg_(), x[0].clone().copy_(x[1])};
       }},
      {"logic in place",
       {in({5, 3}), in({3})},
       [](const Tensors& x) {
         return Tensors{x[0].clone().gt_(x[1]), x[0].clone().logical_and_(x[1])};
       },
       false},
      {"out",
       {in({5, 3}).uniform(1, 2), in({3}).uniform(1, 2)},
       [](const Tensors& x) {
         Tensor a = at::empty_like(x[0]), b = at::empty_like(x[0]);
         at::add_out(a, x[0], x[1], 2);
         at::where_out(b, a > 3, a, x[0]);
         return Tensors{a, b};
       },
       false},
  });
}

// What stays unreduced, and what must not.
TEST(PointwiseRulesTest, PartialsPassWhatIsLinear) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    auto partial = [&](ReduceOp op) { return from_local(at::ones({4, 3}), mesh, {Partial(op)}); };
    // Of its own each time: what has been reduced once is used so.
    auto sum = [&] { return partial(ReduceOp::kSum); };
    const Tensor r = ones({4, 3}, mesh, {Replicate()});
    const Tensor flags =
        distribute_tensor(at::ones({4, 3}, at::kBool), mesh, Placements{Replicate()});
    auto stays = [](const Tensor& t) { return layout_of(t)[0].is_partial(ReduceOp::kSum); };
    EXPECT_TRUE(stays(sum() + sum()));
    EXPECT_TRUE(stays(sum() + r));
    EXPECT_TRUE(stays(sum() * 2));
    EXPECT_TRUE(stays(sum() / ones({}, mesh, {Replicate()})));
    EXPECT_TRUE(stays(-sum()));
    EXPECT_TRUE(stays(at::where(flags, sum(), sum())));
    EXPECT_TRUE(stays(sum().masked_fill(flags, 0)));
    EXPECT_TRUE(stays(sum().clone()));
    // Products may stay, but each would owe a reduction of its own.
    EXPECT_FALSE(stays(sum() * r));
    EXPECT_FALSE(stays(sum() / r));
    EXPECT_FALSE(stays(at::gelu_backward(sum(), r)));
    EXPECT_FALSE(stays(sum() + 1));
    EXPECT_TRUE(stays(sum().masked_fill(flags, 1)));  // filled on one rank
    EXPECT_TRUE(at::equal(full_tensor(sum().masked_fill(flags, 1)), at::ones({4, 3})));
    EXPECT_FALSE(stays(r / sum()));
    EXPECT_FALSE(stays(sum().relu()));
    EXPECT_FALSE(stays(at::div(sum(), r, "floor")));
    EXPECT_FALSE(stays(at::gelu_backward(r, sum())));
    const Tensor max = partial(ReduceOp::kMax);
    EXPECT_TRUE(layout_of(at::where(flags, max, max))[0].is_partial(ReduceOp::kMax));
    EXPECT_TRUE(layout_of(-max)[0].is_partial(ReduceOp::kMin));
    const double rank = static_cast<double>(mesh->coordinate()[0]);
    const Tensor up = from_local(at::full({4, 3}, rank), mesh, {Partial(ReduceOp::kMax)});
    const Tensor down = from_local(at::full({4, 3}, -rank), mesh, {Partial(ReduceOp::kMax)});
    // A rank that had nothing may hold infinity, to which nothing is added before it is reduced.
    const Tensor one = shardweave::ones({}, mesh, {Replicate()}, at::kFloat);
    EXPECT_TRUE(layout_of(up + one)[0].is_replicate());
    EXPECT_TRUE(at::equal(full_tensor(up + one), at::full({4, 3}, 3.0)));
    EXPECT_TRUE(layout_of(up + down)[0].is_replicate());
    EXPECT_TRUE(at::equal(full_tensor(up + down), at::full({4, 3}, 2.0)));
  });
}

// What a number makes of integers, by its kind and the default dtype of then.
TEST(PointwiseRulesTest, IntegersWithNumbers) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = at::arange(1, 8);
    const Tensor x = distribute_tensor(whole, mesh, Placements{Shard(0)});
    const auto expect_same = [](const Tensor& got, const Tensor& want) {
      EXPECT_EQ(got.scalar_type(), want.scalar_type());
      EXPECT_TRUE(at::equal(full_tensor(got), want)) << got << want;
    };
    expect_same(at::floor_divide(x, 2.5), at::floor_divide(whole, 2.5));
    expect_same(at::floor_divide(x, 2), at::floor_divide(whole, 2));
    expect_same(at::remainder(2.5, x), at::remainder(2.5, whole));
    expect_same(at::remainder(9, x), at::remainder(9, whole));
  });
  on_mesh({{"x", 1}}, [&](const MeshPtr& mesh) {
    const Tensor x = distribute_tensor(at::arange(4), mesh, Placements{Shard(0)});
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
      EXPECT_EQ((x / 2).scalar_type(), dtype);
    }
  });
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(at::kFloat));
}

// The other operator of that name: indices, of which only the values say how many.
TEST(PointwiseRulesTest, WhereOfAConditionAlone) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const Tensor whole = at::arange(20).view({5, 4}).remainder(3).eq(0);
    const std::vector<Tensor> want = at::where(whole);
    const std::vector<Tensor> got = at::where(distribute_tensor(whole, mesh, Placements{Shard(0)}));
    ASSERT_EQ(got.size(), want.size());
    for (size_t d = 0; d < want.size(); ++d) EXPECT_TRUE(at::equal(full_tensor(got[d]), want[d]));
  });
}

// The extremes of a rank that has no elements are infinite, or the largest integers: nothing is added to
// them, and no sign is changed, before the others' are known.
TEST(PointwiseRulesTest, ExtremesWhereARankHasNothing) {
  on_mesh({{"x", 4}}, [](const MeshPtr& mesh) {
    for (const at::ScalarType dtype : {at::kLong, at::kInt, at::kByte, at::kDouble}) {
      const Tensor whole = at::tensor({5, 7, 9}, dtype);
      const Tensor x = distribute_tensor(whole, mesh, Placements{Shard(0)});
      const auto expect = [&](const Tensor& got, const Tensor& want) {
        EXPECT_TRUE(at::equal(full_tensor(got), want)) << full_tensor(got) << want << dtype;
      };
      expect(x.max() - 1, whole.max() - 1);
      expect(x.min() + 1, whole.min() + 1);
      expect(x.max() - x.min(), whole.max() - whole.min());
      expect(x.max().neg(), whole.max().neg());
      expect(x.min().neg(), whole.min().neg());
    }
    const Tensor x = distribute_tensor(at::tensor({5.0, 7.0, 9.0}), mesh, Placements{Shard(0)});
    const Tensor none = distribute_tensor(at::tensor(-INFINITY), mesh, Placements{Replicate()});
    EXPECT_EQ(full_tensor(x.max() - none).item<double>(), INFINITY);
  });
}

// A sum of truth values is true if any is, and no count: it is reduced before it becomes a number.
TEST(PointwiseRulesTest, PartialTruthValues) {
  on_mesh({{"x", 4}}, [](const MeshPtr& mesh) {
    const Tensor ids = distribute_tensor(at::zeros({16}, at::kLong), mesh, Placements{Shard(0)});
    const Tensor none = zeros({8}, mesh, {Replicate()}, at::kBool);
    const Tensor used = at::scatter_add(none, 0, ids, at::ones_like(ids, at::kBool));
    ASSERT_EQ(layout_of(used)[0], Partial());
    const Tensor want = at::arange(8).eq(0);
    const Tensor weights = at::arange(8, at::kFloat);
    const Tensor w = distribute_tensor(weights, mesh, Placements{Replicate()});
    EXPECT_TRUE(at::equal(full_tensor(used), want));
    EXPECT_TRUE(at::equal(full_tensor(used * 0.5), want * 0.5));
    EXPECT_TRUE(at::equal(full_tensor(used + w), want + weights));
    EXPECT_TRUE(at::equal(full_tensor(used.mul(3)), want.mul(3)));
    EXPECT_TRUE(at::equal(full_tensor(used.div(2)), want.div(2)));
    EXPECT_TRUE(at::equal(full_tensor(at::stack({used.to(at::kFloat), w})),
                          at::stack({want.to(at::kFloat), weights})));
    EXPECT_TRUE(at::equal(full_tensor(at::cat({used, w})), at::cat({want, weights})));
    EXPECT_TRUE(at::equal(full_tensor(at::where(w.gt(2), used, w)),
                          at::where(weights.gt(2), want, weights)));
    const auto again = [&] { return at::scatter_add(none, 0, ids, at::ones_like(ids, at::kBool)); };
    const Tensor either = at::where(w.gt(2), again(), again());
    EXPECT_EQ(layout_of(either)[0], Partial());
    EXPECT_TRUE(at::equal(full_tensor(either), want));
  });
}

// An average of integers is rounded: before anything is made of it.
TEST(PointwiseRulesTest, PartialAveragesOfIntegers) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor one = at::full({1}, mesh->coordinate()[0] + 1, at::kLong);
    const Tensor n = from_local(one, mesh, {Partial(ReduceOp::kAvg)});
    EXPECT_EQ(full_tensor(n).item<int64_t>(), 1);
    EXPECT_EQ(full_tensor(n * 2).item<int64_t>(), 2);
    EXPECT_EQ(full_tensor(n.to(at::kDouble)).item<double>(), 1.0);
    const Tensor fresh = from_local(one, mesh, {Partial(ReduceOp::kAvg)});
    EXPECT_EQ(full_tensor(fresh.to(at::kFloat)).item<float>(), 1.0f);
    const Tensor other = from_local(one, mesh, {Partial(ReduceOp::kAvg)}).view({1, 1});
    EXPECT_TRUE(layout_of(other).has_partial());
    EXPECT_EQ(full_tensor(other).item<int64_t>(), 1);
  });
}

}  // namespace
}  // namespace shardweave

// The functions that are written out against the library's.
#include "shardweave/dtensor/engine/random_arithmetic.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <random>

#include "gtest/gtest.h"

namespace shardweave::dtensor_internal {
namespace {

// Of the last place of `want`.
double units(double got, double want) {
  if (got == want) return 0;
  const double size = std::abs(want);
  return std::abs(got - want) / (std::nextafter(size, HUGE_VAL) - size);
}

TEST(RandomArithmeticTest, Logarithm) {
  std::mt19937_64 random(1);
  double worst = 0;
  const auto check = [&](double x) {
    worst = std::max(worst, units(log_of<OneLane>(x), std::log(x)));
  };
  for (int i = 0; i < 100'000; ++i) check(open_unit<OneLane>(random()));
  for (int e = -1022; e < 1023; ++e) check(std::ldexp(1.37, e));
  for (double near : {1.0, std::numbers::sqrt2, 1 / std::numbers::sqrt2, 0.5}) {
    check(std::nextafter(near, 0));
    check(near);
    check(std::nextafter(near, 2));
  }
  EXPECT_EQ(log_of<OneLane>(1), 0);
  EXPECT_LE(worst, 2);
  EXPECT_GT(worst, 0);
}

TEST(RandomArithmeticTest, OpenUnitIsOpen) {
  EXPECT_EQ(open_unit<OneLane>(0), 0x1p-53);
  EXPECT_EQ(open_unit<OneLane>(~uint64_t{0}), 1 - 0x1p-53);
  EXPECT_EQ(open_unit<OneLane>(uint64_t{1} << 63), 0.5 + 0x1p-53);
}

TEST(RandomArithmeticTest, Exponential) {
  std::mt19937_64 random(2);
  double worst = 0;
  const auto check = [&](double x) { worst = std::max(worst, units(exp_of(x), std::exp(x))); };
  for (double range : {1.0, 30.0, 700.0}) {
    std::uniform_real_distribution<double> some(-range, range);
    for (int i = 0; i < 30'000; ++i) check(some(random));
  }
  // Subnormal ones, too.
  for (double x : {-708.5, -720.25, -744.0, -745.0, -745.2}) check(x);
  EXPECT_LE(worst, 2);
  EXPECT_EQ(exp_of(0), 1);
  EXPECT_EQ(exp_of(710), HUGE_VAL);
  EXPECT_EQ(exp_of(1e300), HUGE_VAL);
  EXPECT_LT(exp_of(709.78), HUGE_VAL);
  EXPECT_EQ(exp_of(-746), 0);
  EXPECT_EQ(exp_of(-HUGE_VAL), 0);
  EXPECT_TRUE(std::isnan(exp_of(std::nan(""))));
}

TEST(RandomArithmeticTest, SineAndCosine) {
  std::mt19937_64 random(3);
  double worst = 0;
  for (int i = 0; i < 100'000; ++i) {
    const double quarters = static_cast<double>(random() >> 11) * 0x1p-52 - 1;  // in [-1, 1)
    double sine, cosine;
    sin_cos_of_quarters<OneLane>(quarters, sine, cosine);
    const double angle = quarters * std::numbers::pi / 2;
    worst = std::max({worst, std::abs(sine - std::sin(angle)), std::abs(cosine - std::cos(angle))});
  }
  EXPECT_LT(worst, 4e-16);
  for (int quarter = -4; quarter <= 8; ++quarter) {
    double sine, cosine;
    sin_cos_of_quarters<OneLane>(quarter, sine, cosine);
    const int turned = (quarter + 8) % 4;
    EXPECT_EQ(sine, turned == 1 ? 1 : turned == 3 ? -1 : 0) << quarter;
    EXPECT_EQ(cosine, turned == 0 ? 1 : turned == 2 ? -1 : 0) << quarter;
  }
}

TEST(RandomArithmeticTest, ElementsOfWhatIsTooLarge) {
  EXPECT_EQ(element_of<int64_t>(1e30), INT64_MAX);
  EXPECT_EQ(element_of<int64_t>(-1e30), INT64_MIN);
  EXPECT_EQ(element_of<uint8_t>(300.0), 44);
  EXPECT_EQ(element_of<int32_t>(0x1p32 + 5), 5);
  EXPECT_TRUE(element_of<bool>(0.5));
  EXPECT_FALSE(element_of<bool>(int64_t{0}));
  EXPECT_EQ(element_of<float>(1e300), HUGE_VALF);
  EXPECT_EQ(element_of<F16>(1e300).bits, 0x7C00);
}

}  // namespace
}  // namespace shardweave::dtensor_internal

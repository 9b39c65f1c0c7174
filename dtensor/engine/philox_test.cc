#include "shardweave/dtensor/engine/philox.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

using ::testing::ElementsAre;

// kat_vectors of the authors' library, Random123.
TEST(PhiloxTest, KnownAnswers) {
  EXPECT_THAT(philox4x32_10({0, 0, 0, 0}, {0, 0}),
              ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  EXPECT_THAT(
      philox4x32_10({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
      ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(
      philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

// Which word of which block is number i: the definition that any other implementation has to
// follow.
TEST(PhiloxTest, NumbersByIndex) {
  const uint64_t seed = 0x0123456789abcdef, id = 0xfedcba9876543210;
  // Beyond 2^32 blocks too.
  for (int64_t first : {int64_t{0}, int64_t{5}, (int64_t{1} << 34) - 7, (int64_t{1} << 40) + 3}) {
    PhiloxStream stream(seed, id);
    std::vector<uint32_t> words(100);
    stream.bits(first, absl::MakeSpan(words));
    std::vector<uint64_t> pairs(100);
    stream.bits(first, absl::MakeSpan(pairs));
    auto block = [&](int64_t b) {
      return philox4x32_10({static_cast<uint32_t>(b), static_cast<uint32_t>(b >> 32),
                            static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32)},
                           {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    };
    for (int64_t i = 0; i < 100; ++i) {
      const int64_t n = first + i;
      EXPECT_EQ(words[i], block(n / 16 * 4 + n % 4)[n / 4 % 4]) << n;
      const auto four = block(n / 8 * 4 + n % 4);
      const int64_t w = n / 4 % 2 * 2;
      EXPECT_EQ(pairs[i], static_cast<uint64_t>(four[w]) << 32 | four[w + 1]) << n;
    }
  }
}

template <typename Number, typename Read>
void expect_independent_of_the_way(Read read) {
  std::vector<Number> whole(1000);
  PhiloxStream stream(3, 4);
  read(stream, 17, absl::MakeSpan(whole));
  for (size_t step : {1, 2, 3, 5, 16, 17, 100, 333}) {
    PhiloxStream other(3, 4);
    std::vector<Number> parts(1000);
    // Backwards, to have nothing in the cache.
    for (size_t end = 1000; end > 0; end -= std::min(step, end)) {
      const size_t begin = end - std::min(step, end);
      read(other, 17 + static_cast<int64_t>(begin), absl::MakeSpan(&parts[begin], end - begin));
    }
    EXPECT_EQ(parts, whole) << step;
  }
}

TEST(PhiloxTest, AnyPartInAnyOrder) {
  expect_independent_of_the_way<uint32_t>([](auto& s, int64_t i, auto out) { s.bits(i, out); });
  expect_independent_of_the_way<uint64_t>([](auto& s, int64_t i, auto out) { s.bits(i, out); });
  expect_independent_of_the_way<float>([](auto& s, int64_t i, auto out) { s.normal(i, out); });
  expect_independent_of_the_way<double>([](auto& s, int64_t i, auto out) { s.normal(i, out); });
}

TEST(PhiloxTest, SeedsAndStreamsDiffer) {
  auto draw = [](uint64_t seed, uint64_t id) {
    std::vector<uint32_t> words(64);
    PhiloxStream(seed, id).bits(0, absl::MakeSpan(words));
    return words;
  };
  const auto a = draw(1, 1);
  EXPECT_EQ(a, draw(1, 1));
  for (const auto& b :
       {draw(2, 1), draw(1, 2), draw(uint64_t{1} << 32 | 1, 1), draw(1, uint64_t{1} << 32 | 1)}) {
    EXPECT_LT(
        std::inner_product(a.begin(), a.end(), b.begin(), 0, std::plus<>(), std::equal_to<>()), 2);
  }
}

// Distance between the empirical distribution and the normal one, times sqrt(n) (Kolmogorov).
template <typename Number>
double normal_distance(std::vector<Number> numbers) {
  std::sort(numbers.begin(), numbers.end());
  double distance = 0;
  const double n = static_cast<double>(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double p = 0.5 * std::erfc(-static_cast<double>(numbers[i]) / std::sqrt(2.0));
    distance = std::max({distance, std::abs(p - static_cast<double>(i) / n),
                         std::abs(p - static_cast<double>(i + 1) / n)});
  }
  return distance * std::sqrt(n);
}

template <typename Number>
void expect_normal() {
  std::vector<Number> z(1 << 18);
  for (uint64_t seed : {0, 1, 2}) {
    PhiloxStream(seed, 7).normal(0, absl::MakeSpan(z));
    EXPECT_LT(normal_distance(z), 1.95);  // one in a thousand is above
    double sum = 0, squares = 0, fourth = 0, neighbours = 0, pairs = 0;
    for (size_t i = 0; i < z.size(); ++i) {
      const double x = static_cast<double>(z[i]);
      sum += x;
      squares += x * x;
      fourth += x * x * x * x;
      if (i > 0) neighbours += x * static_cast<double>(z[i - 1]);
      if (i >= 4) pairs += x * static_cast<double>(z[i - 4]);  // the two of Box and Muller
    }
    const double n = static_cast<double>(z.size());
    EXPECT_NEAR(sum / n, 0, 4 / std::sqrt(n));
    EXPECT_NEAR(squares / n, 1, 4 * std::sqrt(2 / n));
    EXPECT_NEAR(fourth / n, 3, 4 * std::sqrt(96 / n));
    EXPECT_NEAR(neighbours / n, 0, 4 / std::sqrt(n));
    EXPECT_NEAR(pairs / n, 0, 4 / std::sqrt(n));
  }
}

TEST(PhiloxTest, NormalNumbersAreNormal) {
  expect_normal<float>();
  expect_normal<double>();
}

// The polynomials of the float numbers against the library's functions.
TEST(PhiloxTest, NormalFloatsAreExact) {
  std::vector<uint32_t> words(1 << 16);
  std::vector<float> z(1 << 16);
  PhiloxStream(5, 6).bits(0, absl::MakeSpan(words));
  PhiloxStream(5, 6).normal(0, absl::MakeSpan(z));
  double worst = 0;
  for (size_t group = 0; group < z.size(); group += 16) {
    for (size_t i = group; i < group + 16; ++i) {
      if ((i / 4) % 2 != 0) continue;
      const double u = static_cast<double>(static_cast<float>(words[i] >> 1) + 0.5f) * 0x1p-31;
      const double turn = static_cast<double>(words[i + 4] >> 8) * 0x1p-24;
      const double radius = std::sqrt(-2 * std::log(u));
      worst = std::max({worst, std::abs(z[i] - radius * std::cos(turn * 2 * M_PI)),
                        std::abs(z[i + 4] - radius * std::sin(turn * 2 * M_PI))});
    }
  }
  EXPECT_LT(worst, 2e-6);
}

}  // namespace
}  // namespace shardweave

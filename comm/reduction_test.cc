#include "shardweave/comm/reduction.h"

#include <bit>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "shardweave/comm/testing/values.h"

namespace shardweave {
namespace {

// The reduction of one element per rank.
template <typename T>
T reduce(DType dtype, ReduceOp op, const std::vector<T>& by_rank) {
  std::vector<const void*> inputs;
  for (const T& value : by_rank) inputs.push_back(&value);
  T result{};
  void* output = &result;
  reduce_ranks(dtype, op, inputs, absl::MakeSpan(&output, 1), 1);
  return result;
}
template <typename T>
T reduce(ReduceOp op, const std::vector<T>& by_rank) {
  return reduce(kDTypeOf<T>, op, by_rank);
}

TEST(ReductionTest, IsDefinedForAllButFp8AndTheAverageOfBool) {
  for (DType dtype : all_dtypes()) {
    for (ReduceOp op : all_reduce_ops()) {
      const bool fp8 = dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2;
      EXPECT_EQ(is_reduction_defined(dtype, op),
                !fp8 && !(dtype == DType::kBool && op == ReduceOp::kAvg));
    }
  }
}

// Sizes around the block, from one rank to many, the outputs among the inputs and apart.
TEST(ReductionTest, MatchesTheOracle) {
  for (DType dtype : all_dtypes()) {
    for (ReduceOp op : all_reduce_ops()) {
      if (!is_reduction_defined(dtype, op)) continue;
      for (int num_ranks : {1, 2, 5}) {
        for (int64_t count : {0, 1, 511, 1024, 4097}) {
          const Values want(dtype, count,
                            [&](int64_t i) { return reduced_sample(dtype, op, num_ranks, i); });
          std::vector<Values> values;
          for (int r = 0; r < num_ranks; ++r) {
            values.emplace_back(dtype, count, [&](int64_t i) { return sample(dtype, op, r, i); });
          }
          Values apart(dtype, count);
          std::vector<const void*> inputs;
          std::vector<void*> outputs = {apart.buffer().data};
          for (Values& v : values) inputs.push_back(v.buffer().data);
          outputs.push_back(values.back().buffer().data);
          reduce_ranks(dtype, op, inputs, absl::MakeSpan(outputs), count);
          EXPECT_EQ(apart, want) << to_string(op) << " of " << num_ranks;
          EXPECT_EQ(values.back(), want) << to_string(op) << " of " << num_ranks << ", in place";
        }
      }
    }
  }
}

TEST(ReductionTest, IntegersWrapAround) {
  EXPECT_EQ(reduce<int8_t>(ReduceOp::kSum, {127, 1}), -128);
  EXPECT_EQ(reduce<uint8_t>(ReduceOp::kSum, {255, 2}), 1);
  EXPECT_EQ(reduce<int16_t>(ReduceOp::kProduct, {-32768, -1}), -32768);
  EXPECT_EQ(reduce<uint16_t>(ReduceOp::kProduct, {65535, 65535}), 1);
  constexpr int32_t kMax32 = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(reduce<int32_t>(ReduceOp::kSum, {kMax32, kMax32}), -2);
  constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min();
  EXPECT_EQ(reduce<int64_t>(ReduceOp::kSum, {kMin64, -1}), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(reduce<int64_t>(ReduceOp::kProduct, {kMin64, -1}), kMin64);
}

TEST(ReductionTest, AveragesOfIntegersAreTruncatedTowardsZero) {
  EXPECT_EQ(reduce<int32_t>(ReduceOp::kAvg, {3, 4}), 3);
  EXPECT_EQ(reduce<int32_t>(ReduceOp::kAvg, {-3, -4}), -3);
  EXPECT_EQ(reduce<int8_t>(ReduceOp::kAvg, {-1, 0, 0}), 0);
  EXPECT_EQ(reduce<uint64_t>(ReduceOp::kAvg, {uint64_t{1} << 63, 2}), (uint64_t{1} << 62) + 1);
  // More ranks than an int8 holds; the sum wraps to -56.
  EXPECT_EQ(reduce<int8_t>(ReduceOp::kAvg, std::vector<int8_t>(200, 1)), 0);
}

TEST(ReductionTest, MinAndMaxPropagateNaN) {
  const double nan = std::nan("");
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    for (const std::vector<double>& values :
         {std::vector<double>{nan, 1, 2}, {1, nan, 2}, {1, 2, nan}}) {
      EXPECT_TRUE(std::isnan(reduce(op, values)));
      const std::vector<float> floats(values.begin(), values.end());
      EXPECT_TRUE(std::isnan(reduce(op, floats)));
      for (DType half : {DType::kF16, DType::kBF16}) {
        std::vector<uint16_t> encoded(values.size());
        for (size_t i = 0; i < values.size(); ++i) {
          encode(half, values[i], reinterpret_cast<std::byte*>(&encoded[i]));
        }
        const uint16_t result = reduce(half, op, encoded);
        EXPECT_TRUE(std::isnan(decode(half, reinterpret_cast<const std::byte*>(&result))));
      }
    }
  }
}

TEST(ReductionTest, EveryByteButZeroIsTrue) {
  const std::vector<uint8_t> values = {0, 2, 0};
  EXPECT_EQ(reduce(DType::kBool, ReduceOp::kSum, values), 1);
  EXPECT_EQ(reduce(DType::kBool, ReduceOp::kMax, values), 1);
  EXPECT_EQ(reduce(DType::kBool, ReduceOp::kMin, values), 0);
  EXPECT_EQ(reduce(DType::kBool, ReduceOp::kProduct, std::vector<uint8_t>{4, 2}), 1);
  // A sum of 256 would be 0 in a byte.
  EXPECT_EQ(reduce(DType::kBool, ReduceOp::kSum, std::vector<uint8_t>(256, 1)), 1);
}

// All 65,536 of them, as the sum of one rank: the way through float and back changes nothing.
TEST(ReductionTest, SixteenBitFloatsSurviveTheAccumulator) {
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    for (int bits = 0; bits < 1 << 16; ++bits) {
      const uint16_t value = static_cast<uint16_t>(bits);
      const double want = decode(dtype, reinterpret_cast<const std::byte*>(&value));
      const uint16_t got = reduce(dtype, ReduceOp::kSum, std::vector<uint16_t>{value});
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(decode(dtype, reinterpret_cast<const std::byte*>(&got)))) << bits;
      } else {
        ASSERT_EQ(got, value) << to_string(dtype);
      }
    }
  }
}

// Sums of two, where rounding, overflow and subnormal results happen.
TEST(ReductionTest, SixteenBitSumsAreRoundedToNearestEven) {
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    uint32_t state = 1;
    for (int i = 0; i < 200'000; ++i) {
      state = state * 1664525 + 1013904223;
      const uint16_t a = static_cast<uint16_t>(state >> 16);
      // Near in size, so that the sum needs rounding; sometimes far.
      const uint16_t b = static_cast<uint16_t>(i % 4 == 0 ? state : a ^ (state & 0x87ff));
      const double x = decode(dtype, reinterpret_cast<const std::byte*>(&a));
      const double y = decode(dtype, reinterpret_cast<const std::byte*>(&b));
      const uint16_t got = reduce(dtype, ReduceOp::kSum, std::vector<uint16_t>{a, b});
      const double sum = decode(dtype, reinterpret_cast<const std::byte*>(&got));
      const double want = rounded(dtype, static_cast<float>(x) + static_cast<float>(y));
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(sum)) << x << " + " << y;
      } else {
        ASSERT_EQ(sum, want) << to_string(dtype) << ": " << x << " + " << y;
      }
    }
  }
}

TEST(ReductionTest, SumsInRankOrder) {
  const float big = 1e8f;
  EXPECT_EQ(reduce<float>(ReduceOp::kSum, {big, -big, 1}), 1.0f);
  EXPECT_EQ(reduce<float>(ReduceOp::kSum, {1, big, -big}), 0.0f);
}

}  // namespace
}  // namespace shardweave

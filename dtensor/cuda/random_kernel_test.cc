// The kernels' body, run by the host, against what the host draws; and the boxes it works on.
#include "shardweave/dtensor/cuda/random_kernel.h"

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/cuda/index_boxes.h"
#include "shardweave/dtensor/cuda/testing/fill_on_host.h"
#include "shardweave/dtensor/engine/random_draw.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

using ::testing::ElementsAre;
using testing::fill_on_host;

constexpr uint64_t kSeed = 0x0123456789abcdef, kStream = 0xfedcba9876543210;

// Calls f(global index, where it lies) for each element of a box, in the order of its dimensions.
void for_each_element(const IndexBox& box, const std::function<void(int64_t, int64_t)>& f) {
  std::function<void(int, int64_t, int64_t)> descend = [&](int d, int64_t index, int64_t at) {
    if (d == box.ndim) {
      for (int64_t i = 0; i < box.length; ++i) f(index + i, at + i * box.step);
      return;
    }
    for (int64_t i = 0; i < box.sizes[d]; ++i) {
      descend(d + 1, index + i * box.index_strides[d], at + i * box.memory_strides[d]);
    }
  };
  descend(0, box.first, box.at);
}

std::vector<RandomDraw> all_draws(const double* each) {
  std::vector<RandomDraw> draws;
  for (int i = 0; i < kNumDTypes; ++i) {
    const DType dtype = static_cast<DType>(i);
    for (const RandomDraw& draw :
         {RandomDraw::uniform(dtype, -2, 3), RandomDraw::uniform(dtype, 1e-3, 1.5e-3),
          RandomDraw::normal(dtype, 0, 1), RandomDraw::normal(dtype, 1, 0.02),
          RandomDraw::log_normal(dtype, 0.5, 0.25), RandomDraw::log_normal(dtype, 0, 300),
          RandomDraw::exponential(dtype, 2.5), RandomDraw::cauchy(dtype, 1, 2),
          RandomDraw::geometric(dtype, 0.3), RandomDraw::geometric(dtype, 1e-30),
          RandomDraw::bernoulli(dtype, 0.3), RandomDraw::bernoulli(dtype, 1),
          RandomDraw::bernoulli_each(dtype, each), RandomDraw::integers(dtype, 0, 100),
          RandomDraw::integers(dtype, -7, 8), RandomDraw::integers(dtype, 0, 0),
          RandomDraw::integers(dtype, 0, (uint64_t{1} << 63) + 12345)}) {
      if (can_draw(draw.kind, dtype)) draws.push_back(draw);
    }
  }
  return draws;
}

std::vector<IndexBox> odd_boxes() {
  return {
      {.first = 0, .length = 1},
      {.first = 0, .length = 64},
      {.first = 3, .at = 2, .length = 77},
      {.first = 15, .length = 2},
      {.first = 16, .length = 16},
      {.first = 7, .length = 9},
      // Beyond 2^32 blocks.
      {.first = (int64_t{1} << 34) - 7, .length = 40},
      {.first = (int64_t{1} << 40) + 3, .length = 33, .step = 2},
      // Columns of a matrix, and its transpose.
      {.first = 5,
       .length = 3,
       .ndim = 1,
       .sizes = {9},
       .index_strides = {11},
       .memory_strides = {3}},
      {.first = 4,
       .at = 1,
       .length = 4,
       .step = 10,
       .ndim = 1,
       .sizes = {7},
       .index_strides = {13},
       .memory_strides = {1}},
      // No two neighbours.
      {.first = 2, .ndim = 2, .sizes = {5, 7}, .index_strides = {100, 3}, .memory_strides = {7, 1}},
      {.first = 1,
       .length = 17,
       .ndim = 3,
       .sizes = {2, 3, 2},
       .index_strides = {1000, 100, 31},
       .memory_strides = {120, 40, 20}},
  };
}

// Bits are equal, whatever the kind, the type and the box, and nothing else is written.
TEST(RandomKernelTest, DrawsWhatTheHostDraws) {
  constexpr size_t kElements = 512;
  std::vector<double> each(kElements);
  for (size_t i = 0; i < kElements; ++i) each[i] = static_cast<double>(i % 10) / 10;
  int compared = 0;
  for (const RandomDraw& draw : all_draws(each.data())) {
    const size_t size = static_cast<size_t>(element_size(draw.dtype));
    for (const IndexBox& box : odd_boxes()) {
      std::vector<unsigned char> want(kElements * size, 0xA5), got = want;
      for_each_element(box, [&](int64_t index, int64_t at) {
        ASSERT_LT(at, static_cast<int64_t>(kElements));
        RandomDraw one = draw;
        if (one.each != nullptr) one.each += at;
        draw_numbers(one, PhiloxStream(kSeed, kStream), &want[static_cast<size_t>(at) * size],
                     [&](RunVisitor run) { run(index, 1); });
      });
      fill_on_host(draw, {.seed = kSeed, .stream = kStream}, {box}, got.data());
      EXPECT_EQ(got, want) << kernel_name(draw) << " " << draw.a << " " << draw.b << ": "
                           << to_string(box);
      ++compared;
    }
  }
  EXPECT_GT(compared, 1000);
}

// Many of them: each value of a float has its own way through the polynomials.
TEST(RandomKernelTest, DrawsManyOfThem) {
  constexpr int64_t kCount = 200'003;
  std::vector<double> each(kCount, 0.37);
  for (const RandomDraw& draw : all_draws(each.data())) {
    const size_t bytes = static_cast<size_t>(kCount * element_size(draw.dtype));
    std::vector<unsigned char> want(bytes), got(bytes);
    draw_numbers(draw, PhiloxStream(7, 8), want.data(), [&](RunVisitor run) { run(5, kCount); });
    fill_on_host(draw, {.seed = 7, .stream = 8}, {{.first = 5, .length = kCount}}, got.data());
    EXPECT_EQ(std::memcmp(want.data(), got.data(), bytes), 0) << kernel_name(draw);
  }
}

TEST(RandomKernelTest, AddsToTheStreamWhatIsThereWhenItRuns) {
  const RandomDraw draw = RandomDraw::normal(DType::kF32, 0, 1);
  std::vector<float> want(10), got(10);
  const IndexBox box = {.length = 10};
  fill_on_host(draw, {.seed = 1, .stream = 12}, {box}, want.data());
  const uint64_t added = 10;
  fill_on_host(draw, {.seed = 1, .stream = 2, .added = &added}, {box}, got.data());
  EXPECT_EQ(got, want);
}

// Which elements there are, by enumeration: (global index, place) of each.
std::vector<std::pair<int64_t, int64_t>> enumerate(const std::vector<IndexBox>& boxes) {
  std::vector<std::pair<int64_t, int64_t>> all;
  for (const IndexBox& box : boxes) {
    for_each_element(box, [&](int64_t index, int64_t at) { all.emplace_back(index, at); });
  }
  std::sort(all.begin(), all.end());
  return all;
}

std::vector<std::pair<int64_t, int64_t>> expected(const std::vector<Intervals>& held,
                                                  const std::vector<int64_t>& sizes,
                                                  const std::vector<int64_t>& strides) {
  std::vector<std::pair<int64_t, int64_t>> all = {{0, 0}};
  for (size_t d = 0; d < sizes.size(); ++d) {
    std::vector<std::pair<int64_t, int64_t>> next;
    for (const auto& [index, at] : all) {
      int64_t local = 0;
      for (const Interval& interval : held[d]) {
        for (int64_t i = interval.begin; i < interval.end; ++i) {
          next.emplace_back(index * sizes[d] + i, at + local++ * strides[d]);
        }
      }
    }
    all = std::move(next);
  }
  std::sort(all.begin(), all.end());
  return all;
}

TEST(IndexBoxesTest, HaveEveryElementOnce) {
  const std::vector<std::vector<Intervals>> helds = {
      {{{0, 5}}, {{0, 7}}, {{0, 3}}},                  // all of it
      {{{1, 4}}, {{0, 7}}, {{0, 3}}},                  // some first indices
      {{{0, 5}}, {{2, 3}}, {{0, 3}}},                  // one of the middle
      {{{0, 5}}, {{0, 7}}, {{1, 2}}},                  // one of the last
      {{{1, 3}}, {{2, 6}}, {{1, 3}}},                  // of each
      {{{0, 1}, {3, 5}}, {{0, 2}, {4, 5}}, {{0, 3}}},  // several intervals
      {{{0, 1}, {3, 4}}, {{1, 2}}, {{0, 1}, {2, 3}}},
  };
  const std::vector<int64_t> sizes = {5, 7, 3};
  for (const auto& held : helds) {
    std::vector<int64_t> local;
    for (const Intervals& intervals : held) {
      int64_t size = 0;
      for (const Interval& interval : intervals) size += interval.size();
      local.push_back(size);
    }
    // Row by row, column by column, and with gaps.
    for (const std::vector<int64_t>& strides :
         {std::vector<int64_t>{local[1] * local[2], local[2], 1},
          std::vector<int64_t>{1, local[0], local[0] * local[1]},
          std::vector<int64_t>{local[1] * local[2] * 6, local[2] * 2, 2}}) {
      EXPECT_EQ(enumerate(index_boxes(held, sizes, strides)), expected(held, sizes, strides));
    }
  }
}

TEST(IndexBoxesTest, AreFew) {
  // A whole tensor is one row.
  EXPECT_THAT(index_boxes({{{0, 5}}, {{0, 7}}}, {5, 7}, {7, 1}),
              ElementsAre(IndexBox{.length = 35}));
  // So are whole rows of it.
  EXPECT_THAT(index_boxes({{{2, 4}}, {{0, 7}}}, {5, 7}, {7, 1}),
              ElementsAre(IndexBox{.first = 14, .length = 14}));
  // The example in the header.
  EXPECT_THAT(index_boxes({{{0, 6}}, {{4, 8}}}, {6, 8}, {4, 1}),
              ElementsAre(IndexBox{.first = 4,
                                   .length = 4,
                                   .ndim = 1,
                                   .sizes = {6},
                                   .index_strides = {8},
                                   .memory_strides = {4}}));
  // Two parts of the rows.
  EXPECT_EQ(index_boxes({{{0, 6}}, {{0, 2}, {4, 6}}}, {6, 8}, {4, 1}).size(), 2);
  // A number; nothing.
  EXPECT_THAT(index_boxes({}, {}, {}), ElementsAre(IndexBox{}));
  EXPECT_THAT(index_boxes({{{0, 6}}, {}}, {6, 8}, {0, 1}), ElementsAre());
}

// Of more dimensions than a box has.
TEST(IndexBoxesTest, OfManyDimensions) {
  const std::vector<Intervals> held(11, Intervals{{0, 2}});
  const std::vector<int64_t> sizes(11, 3);
  std::vector<int64_t> strides(11, 1);
  for (size_t d = 10; d > 0; --d) strides[d - 1] = strides[d] * 2;
  const std::vector<IndexBox> boxes = index_boxes(held, sizes, strides);
  EXPECT_EQ(boxes.size(), 4);
  EXPECT_EQ(enumerate(boxes), expected(held, sizes, strides));
}

TEST(RandomDrawTest, NamesAndTypes) {
  EXPECT_EQ(kernel_name(RandomDraw::bernoulli_each(DType::kBF16, nullptr)), "bernoulli_each_bf16");
  EXPECT_TRUE(can_draw(RandomKind::kGeometric, DType::kU8));
  EXPECT_FALSE(can_draw(RandomKind::kUniform, DType::kI64));
  EXPECT_FALSE(can_draw(RandomKind::kIntegers, DType::kU64));
  EXPECT_FALSE(can_draw(RandomKind::kNormal, DType::kF8E4M3));
}

}  // namespace
}  // namespace shardweave

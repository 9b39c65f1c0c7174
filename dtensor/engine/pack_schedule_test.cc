// Packing against narrow() and cat(), for parts of all sorts.

#include "shardweave/dtensor/engine/pack_schedule.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/error.h"

namespace shardweave::dtensor_internal {
namespace {

using ::testing::HasSubstr;

Dims dims(at::IntArrayRef sizes) {
  return Dims(sizes.begin(), sizes.end());
}

// Into a buffer and back, for elements of 1 to 16 bytes.
void check(const PackSchedule& schedule, at::IntArrayRef sizes, const at::Tensor& wanted_indices) {
  ASSERT_EQ(schedule.numel(), wanted_indices.numel());
  int64_t n = 1;
  for (int64_t size : sizes) n *= size;
  for (at::ScalarType dtype :
       {at::kByte, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexDouble}) {
    const at::Tensor tensor = at::arange(n).remainder(251).to(dtype).view(sizes);
    const at::Tensor wanted = tensor.reshape({-1}).index_select(0, wanted_indices);
    const at::Tensor buffer = at::zeros({schedule.numel()}, dtype);
    schedule.pack(tensor, buffer);
    EXPECT_TRUE(at::equal(buffer, wanted)) << dtype;
    const at::Tensor back = at::zeros(sizes, dtype);
    schedule.unpack(buffer, back);
    at::Tensor expected = at::zeros({n}, dtype);
    expected.index_copy_(0, wanted_indices, wanted);
    EXPECT_TRUE(at::equal(back, expected.view(sizes))) << dtype;
    EXPECT_EQ(schedule.is_in_order(), at::equal(wanted_indices, at::arange(n)));
  }
}

at::Tensor indices_of(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (int64_t size : sizes) n *= size;
  return at::arange(n).view(sizes);
}

TEST(PackScheduleTest, CutsOfOneDimension) {
  const std::vector<int64_t> sizes = {3, 12, 2};
  const Placement placements[] = {Shard(0),
                                  Shard(1),
                                  Shard(2),
                                  StridedShard(1, 2),
                                  StridedShard(1, 5),
                                  RaggedShard(1, {5, 0, 1, 6}),
                                  RaggedShard(0, {0, 0, 3, 0})};
  for (const Placement& p : placements) {
    SCOPED_TRACE(p.to_string());
    const at::Tensor indices = indices_of(sizes);
    PackSchedule schedule(dims(sizes));
    std::vector<at::Tensor> wanted;
    for (int64_t r = 0; r < 4; ++r) {
      const Intervals intervals = cut(p, sizes[p.dim()], 4, r);
      schedule.add_part(p.dim(), intervals);
      std::vector<at::Tensor> pieces = {indices.narrow(p.dim(), 0, 0)};
      for (const Interval& i : intervals) {
        pieces.push_back(indices.narrow(p.dim(), i.begin, i.size()));
      }
      wanted.push_back(at::cat(pieces, p.dim()).reshape({-1}));
    }
    schedule.finish();
    check(schedule, sizes, at::cat(wanted));
  }
}

TEST(PackScheduleTest, Boxes) {
  std::mt19937 random(1);
  const std::vector<int64_t> sizes = {4, 5, 1, 6};
  for (int trial = 0; trial < 200; ++trial) {
    const at::Tensor indices = indices_of(sizes);
    PackSchedule schedule(dims(sizes));
    std::vector<at::Tensor> wanted = {at::empty({0}, at::kLong)};
    // Of different rows: none twice.
    for (int64_t row = 0; row < 4; ++row) {
      Dims offset, shape;
      at::Tensor box = indices;
      for (size_t d = 0; d < sizes.size(); ++d) {
        offset.push_back(d == 0 ? row : static_cast<int64_t>(random() % sizes[d]));
        shape.push_back(d == 0 ? 1 : static_cast<int64_t>(random() % (sizes[d] - offset[d] + 1)));
        box = box.narrow(static_cast<int64_t>(d), offset[d], shape[d]);
      }
      schedule.add_part(offset, shape);
      wanted.push_back(box.reshape({-1}));
    }
    schedule.finish();
    check(schedule, sizes, at::cat(wanted));
  }
}

TEST(PackScheduleTest, EvenPartsAreOneEntryHoweverMany) {
  for (const int64_t ranks : {2, 64, 4096}) {
    PackSchedule schedule({3, 2 * ranks, 5});
    for (int64_t r = 0; r < ranks; ++r) schedule.add_part(1, {{2 * r, 2 * r + 2}});
    schedule.finish();
    EXPECT_EQ(schedule.num_entries(), 1u);
    PackSchedule strided({3, 2 * ranks, 5});
    for (int64_t r = 0; r < ranks; ++r) {
      strided.add_part(1, cut(StridedShard(1, 2), 2 * ranks, ranks, r));
    }
    strided.finish();
    EXPECT_LE(strided.num_entries(), 2u);
  }
}

// What is said at once is what is said part by part; `pieces`: of a strided cut.
TEST(PackScheduleTest, EvenPartsAtOnce) {
  const std::vector<int64_t> sizes = {3, 24, 2};
  for (const int64_t pieces : {1, 2, 4}) {
    SCOPED_TRACE(pieces);
    PackSchedule at_once(dims(sizes)), one_by_one(dims(sizes));
    const PackSchedule::Repeat ranks{3, 2, 8 / pieces};
    at_once.add_even_parts({3, pieces, 24 / pieces, 2}, {3, pieces, 8 / pieces, 2}, {ranks});
    for (int64_t r = 0; r < 3; ++r) one_by_one.add_part(1, cut(StridedShard(1, pieces), 24, 3, r));
    at_once.finish();
    one_by_one.finish();
    EXPECT_EQ(at_once.num_entries(), 1u);
    const at::Tensor tensor = indices_of(sizes), wanted = at::empty({tensor.numel()}, at::kLong);
    one_by_one.pack(tensor, wanted);
    check(at_once, sizes, wanted);
  }
  // Over two dimensions, the last fastest; whole dimensions in order are the tensor as it lies.
  PackSchedule boxes(dims(sizes)), whole(dims(sizes));
  boxes.add_even_parts({3, 24, 2}, {1, 8, 2}, {{3, 1, 8}, {3, 0, 1}});
  whole.add_even_parts({3, 24, 2}, {1, 8, 2}, {{3, 0, 1}, {3, 1, 8}});
  std::vector<at::Tensor> wanted;
  for (int64_t column = 0; column < 3; ++column) {
    for (int64_t row = 0; row < 3; ++row) {
      wanted.push_back(indices_of(sizes).narrow(0, row, 1).narrow(1, 8 * column, 8).reshape({-1}));
    }
  }
  boxes.finish();
  whole.finish();
  check(boxes, sizes, at::cat(wanted));
  check(whole, sizes, at::arange(144));
  PackSchedule nothing({3, 0});
  nothing.add_even_parts({3, 0}, {1, 0}, {{3, 0, 1}});
  nothing.finish();
  EXPECT_EQ(nothing.numel(), 0);
}

TEST(PackScheduleTest, OnManyThreads) {
  const int threads = at::get_num_threads();
  at::set_num_threads(4);
  const std::vector<int64_t> sizes = {300, 700, 5};
  PackSchedule schedule(dims(sizes));
  std::vector<at::Tensor> wanted;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 100}, {100, 700}}) {
    schedule.add_part(1, {{begin, end}});
    wanted.push_back(indices_of(sizes).narrow(1, begin, end - begin).reshape({-1}));
  }
  schedule.finish();
  check(schedule, sizes, at::cat(wanted));
  at::set_num_threads(threads);
}

TEST(PackScheduleTest, WhatDoesNotFitIsRefused) {
  PackSchedule schedule({4, 3});
  schedule.add_part(0, {{1, 3}});
  schedule.finish();
  const at::Tensor tensor = at::zeros({4, 3}), buffer = at::zeros({6});
  schedule.pack(tensor, buffer);
  const auto refuses = [&](const at::Tensor& t, const at::Tensor& b) {
    try {
      schedule.pack(t, b);
      ADD_FAILURE() << "packed";
    } catch (const Error& error) {
      EXPECT_THAT(std::string(error.what()), HasSubstr("[4, 3] and 6 elements"));
    }
  };
  refuses(at::zeros({3, 4}), buffer);
  refuses(at::zeros({3, 4}).t(), buffer);
  refuses(tensor, at::zeros({7}));
  refuses(tensor, at::zeros({6}, at::kDouble));
}

}  // namespace
}  // namespace shardweave::dtensor_internal

// No plan sends less than the bound, and those of the field's collectives send no more.
#include "shardweave/placement/redistribute_bound.h"

#include <random>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"
#include "shardweave/placement/layout_samples.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave {
namespace {

Layout layout(std::string_view text) {
  return Layout::parse(text).value();
}

// Bytes are all that counts.
CostModel bandwidth_only(size_t mesh_ndim) {
  return {std::vector<CostModel::Link>(mesh_ndim, CostModel::Link{0, 1e9})};
}

int64_t planned_bytes(const Layout& from, const Layout& to, const Dims& mesh_shape,
                      const Dims& shape) {
  return plan_redistribute(from, to, mesh_shape, shape, 4, bandwidth_only(mesh_shape.size()))
      .value()
      .bytes();
}

TEST(RedistributeBoundTest, WhatIsKnown) {
  EXPECT_EQ(least_bytes(layout("[S(0)]"), layout("[R]"), {4}, {8, 4}, 4), 96);
  EXPECT_EQ(least_bytes(layout("[P(sum)]"), layout("[R]"), {4}, {8, 4}, 4), 192);
  EXPECT_EQ(least_bytes(layout("[P(sum)]"), layout("[S(0)]"), {4}, {8, 4}, 4), 96);
  EXPECT_EQ(least_bytes(layout("[S(0)]"), layout("[S(1)]"), {4}, {8, 4}, 4), 24);
  EXPECT_EQ(least_bytes(layout("[R]"), layout("[S(1)]"), {4}, {8, 4}, 4), 0);
  EXPECT_EQ(least_bytes(layout("[R]"), layout("[P(max)]"), {4}, {8, 4}, 4), 0);
  EXPECT_EQ(least_bytes(layout("[P(sum)]"), layout("[P(sum)]"), {4}, {8, 4}, 4), 0);
  EXPECT_EQ(least_bytes(layout("[P(sum), S(0)]"), layout("[P(sum), R]"), {2, 2}, {8, 4}, 4), 64);
  EXPECT_EQ(least_bytes(layout("[S(0)]"), layout("[R]"), {4}, {0, 4}, 4), 0);
  EXPECT_EQ(least_bytes(layout("[P(sum)]"), layout("[R]"), {3}, {}, 4), 8);
  // Of 7 rows one rank has none; the others send 3 and 4.
  EXPECT_EQ(
      least_bytes(layout("[S(0, sizes=[3,4,0])]"), layout("[S(0, sizes=[0,0,7])]"), {3}, {7}, 4),
      16);
}

TEST(RedistributeBoundTest, PlansOfEvenPiecesReachIt) {
  const struct {
    const char* from;
    const char* to;
    Dims mesh_shape;
  } cases[] = {
      {"[S(0)]", "[R]", {8}},
      {"[S(0)]", "[S(1)]", {8}},
      {"[S(0)]", "[S(0, sf=2)]", {4}},
      {"[P(sum)]", "[R]", {8}},
      {"[P(sum)]", "[S(1)]", {8}},
      {"[P(sum)]", "[S(0, sf=2)]", {4}},
      {"[P(max)]", "[S(0, sizes=[0,16,32,0])]", {4}},
      {"[S(0), S(1)]", "[R, R]", {4, 2}},
      {"[S(0), S(0)]", "[R, R]", {4, 2}},
      {"[S(0), S(1)]", "[S(1), S(0)]", {2, 2}},
      {"[S(0), S(0)]", "[S(1), S(1)]", {4, 2}},
      {"[P(sum), P(sum)]", "[R, R]", {4, 2}},
      {"[P(sum), P(sum)]", "[S(0), S(1)]", {4, 2}},
      {"[P(sum), P(sum)]", "[S(0), R]", {4, 2}},
      {"[P(sum), S(0)]", "[R, S(0)]", {2, 4}},
      {"[P(sum), S(0)]", "[S(1), S(0)]", {2, 4}},
      {"[S(0), P(sum)]", "[S(0), S(0)]", {2, 4}},
      {"[P(sum), P(sum), P(sum)]", "[R, R, R]", {2, 2, 2}},
      {"[S(0), S(1), S(0)]", "[R, R, R]", {2, 2, 2}},
  };
  for (const auto& c : cases) {
    const Layout from = layout(c.from);
    const Layout to = layout(c.to);
    EXPECT_EQ(planned_bytes(from, to, c.mesh_shape, {48, 64}),
              least_bytes(from, to, c.mesh_shape, {48, 64}, 4))
        << from << " to " << to;
  }
}

TEST(RedistributeBoundTest, NoPlanIsBelowIt) {
  const std::vector<ReduceOp> reductions = {ReduceOp::kSum, ReduceOp::kMax};
  for (const Dims& shape : std::vector<Dims>{{7, 5}, {1, 3}, {16, 12}}) {
    for (int64_t n : {2, 3, 4}) {
      const auto layouts = all_layouts({all_placements(n, shape, reductions)}, {n}, shape);
      for (const Layout& from : layouts) {
        for (const Layout& to : layouts) {
          EXPECT_GE(planned_bytes(from, to, {n}, shape), least_bytes(from, to, {n}, shape, 4))
              << from << " to " << to;
        }
      }
    }
  }
  std::mt19937_64 random(5);
  for (const Dims& mesh_shape : std::vector<Dims>{{2, 2}, {2, 3}, {4, 4}, {2, 2, 2}, {2, 4, 2}}) {
    for (const Dims& shape : std::vector<Dims>{{13, 9}, {32, 16}}) {
      std::vector<Placements> placements;
      for (int64_t n : mesh_shape) placements.push_back(all_placements(n, shape, reductions));
      const auto layouts = all_layouts(placements, mesh_shape, shape);
      std::uniform_int_distribution<size_t> any(0, layouts.size() - 1);
      for (int i = 0; i < 200; ++i) {
        const Layout& from = layouts[any(random)];
        const Layout& to = layouts[any(random)];
        EXPECT_GE(planned_bytes(from, to, mesh_shape, shape),
                  least_bytes(from, to, mesh_shape, shape, 4))
            << from << " to " << to;
      }
    }
  }
}

}  // namespace
}  // namespace shardweave

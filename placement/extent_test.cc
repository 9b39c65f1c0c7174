// Who holds what: against the definition applied index by index, and in numbers that no list fits.
#include <limits>
#include <numeric>
#include <set>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/placement/layout.h"
#include "shardweave/placement/layout_samples.h"
#include "shardweave/placement/simulated_mesh.h"

namespace shardweave {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

Layout layout(std::string_view text) {
  return Layout::parse(text).value();
}

TEST(ChunkTest, IsTorchChunk) {
  // torch.arange(7).chunk(4) has pieces of 2, 2, 2, 1; torch.arange(5).chunk(4) of 2, 2, 1.
  EXPECT_EQ(chunk(7, 4, 0), (Interval{0, 2}));
  EXPECT_EQ(chunk(7, 4, 3), (Interval{6, 7}));
  EXPECT_EQ(chunk(5, 4, 2), (Interval{4, 5}));
  EXPECT_EQ(chunk(5, 4, 3), (Interval{5, 5}));
  EXPECT_EQ(chunk(0, 4, 2), (Interval{0, 0}));
  EXPECT_EQ(chunk(6, 1, 0), (Interval{0, 6}));
}

TEST(ChunkTest, LargestNumbers) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(chunk(kMax, 1, 0), (Interval{0, kMax}));
  EXPECT_EQ(chunk(kMax, 2, 1), (Interval{kMax / 2 + 1, kMax}));
  EXPECT_EQ(chunk(kMax, kMax, kMax - 1), (Interval{kMax - 1, kMax}));
  EXPECT_EQ(chunk(kMax - 1, kMax, kMax - 1), (Interval{kMax - 1, kMax - 1}));
  EXPECT_EQ(chunk(3, kMax, kMax - 1), (Interval{3, 3}));
}

Indices listed(const Intervals& intervals) {
  Indices result;
  for (const Interval& interval : intervals) {
    for (int64_t i = interval.begin; i < interval.end; ++i) result.push_back(i);
  }
  return result;
}

TEST(CutTest, IsItsDefinition) {
  for (int64_t size = 0; size < 20; ++size) {
    Indices indices(size);
    std::iota(indices.begin(), indices.end(), 0);
    for (int64_t n = 1; n < 7; ++n) {
      Placements placements = all_placements(n, {size}, {ReduceOp::kSum});
      for (int64_t split_factor : {4, 5, 7, 19, 40}) {
        placements.push_back(StridedShard(0, split_factor));
      }
      for (const Placement& p : placements) {
        std::set<int64_t> sizes;
        for (int64_t index = 0; index < n; ++index) sizes.insert(cut_size(p, size, n, index));
        EXPECT_THAT(cut_sizes(p, size, n), ElementsAreArray(sizes))
            << p << " of " << size << " over " << n;
        for (int64_t index = 0; index < n; ++index) {
          const Indices want = naive_cut(indices, p, n, index);
          const Intervals have = cut(p, size, n, index);
          EXPECT_EQ(listed(have), want) << p << " of " << size << " over " << n;
          EXPECT_EQ(cut_size(p, size, n, index), static_cast<int64_t>(want.size()));
          for (size_t i = 0; i < have.size(); ++i) {
            EXPECT_GT(have[i].size(), 0);
            EXPECT_TRUE(i == 0 || have[i].begin > have[i - 1].end) << p << " could be joined";
          }
        }
      }
    }
  }
}

// All functions of layout.h for all ranks, against lists of indices; and each element is there
// once.
void check_layout(const Layout& l, const Dims& mesh_shape, const Dims& shape) {
  const SimulatedMesh mesh(mesh_shape, shape);
  std::vector<Dims> local_shapes;
  for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
    const Dims& coordinate = mesh.coordinate(rank);
    const std::vector<Indices> want = naive_indices(l, mesh_shape, coordinate, shape);
    const LocalExtent extent = local_extent(l, mesh_shape, coordinate, shape);
    bool contiguous = true;
    for (int dim = 0; dim < static_cast<int>(shape.size()); ++dim) {
      EXPECT_EQ(listed(local_intervals(l, mesh_shape, coordinate, shape, dim)), want[dim]) << l;
      const auto size = static_cast<int64_t>(want[dim].size());
      EXPECT_EQ(extent.shape[dim], size) << l;
      EXPECT_EQ(extent.offset[dim], size == 0 ? 0 : want[dim][0]) << l;
      if (size > 0 && want[dim].back() - want[dim][0] != size - 1) contiguous = false;
    }
    EXPECT_EQ(extent.contiguous, contiguous) << l;
    EXPECT_EQ(local_shape(l, mesh_shape, coordinate, shape), extent.shape) << l;
    local_shapes.push_back(extent.shape);
  }
  const auto global = global_shape(l, mesh_shape, local_shapes);
  ASSERT_TRUE(global.ok()) << l << ": " << global.status();
  EXPECT_EQ(*global, shape) << l;
}

TEST(ExtentTest, AllLayoutsOfTwoMeshDimensions) {
  for (const Dims& mesh_shape : std::vector<Dims>{{2, 3}, {3, 2}, {4, 1}}) {
    for (const Dims& shape : std::vector<Dims>{{7, 5}, {12, 1}, {0, 4}, {13}}) {
      const std::vector<Placements> placements = {
          all_placements(mesh_shape[0], shape, {ReduceOp::kSum}),
          all_placements(mesh_shape[1], shape, {ReduceOp::kSum})};
      for (const Layout& l : all_layouts(placements, mesh_shape, shape)) {
        check_layout(l, mesh_shape, shape);
      }
    }
  }
}

TEST(ExtentTest, ThreeCutsOfOneDimension) {
  for (int64_t size : {1, 11, 24, 30}) {
    const Dims mesh_shape = {2, 3, 2};
    std::vector<Placements> placements;
    for (int64_t n : mesh_shape) {
      placements.push_back({Shard(0), StridedShard(0, 2), StridedShard(0, 5),
                            RaggedShard(0, std::vector<int64_t>(n, size / n))});
    }
    for (const Layout& l : all_layouts(placements, mesh_shape, {size})) {
      check_layout(l, mesh_shape, {size});
    }
  }
}

TEST(ExtentTest, InnerCutsApplyToWhatOuterOnesLeft) {
  // 7 rows: 4 and 3 on mesh dimension 0, then 2 and 2, 2 and 1.
  EXPECT_THAT(local_shape(layout("[S(0), S(0)]"), {2, 2}, {1, 1}, {7, 5}), ElementsAre(1, 5));
  const LocalExtent extent = local_extent(layout("[S(0)@1, S(0)@0]"), {2, 2}, {0, 1}, {7, 5});
  EXPECT_THAT(extent.shape, ElementsAre(2, 5));
  EXPECT_THAT(extent.offset, ElementsAre(4, 0));
}

TEST(ExtentTest, AMergedQkvWeight) {
  // Q, K and V of 8 rows each, over 4 ranks: 2 rows of each.
  const Layout l = layout("[S(0, sf=3)]");
  EXPECT_THAT(local_intervals(l, {4}, {1}, {24, 8}, 0),
              ElementsAre(Interval{2, 4}, Interval{10, 12}, Interval{18, 20}));
  EXPECT_FALSE(local_extent(l, {4}, {1}, {24, 8}).contiguous);
}

// No loop over ranks could end here.
TEST(ExtentTest, FourBillionRanks) {
  constexpr int64_t kSide = 65536;
  const Dims mesh_shape = {kSide, kSide};
  const Dims shape = {int64_t{1} << 40, 7};
  const LocalExtent last =
      local_extent(layout("[S(0), S(0)]"), mesh_shape, {kSide - 1, kSide - 1}, shape);
  EXPECT_THAT(last.shape, ElementsAre(256, 7));
  EXPECT_THAT(last.offset, ElementsAre(shape[0] - 256, 0));
  EXPECT_THAT(local_shape(layout("[S(1), P]"), mesh_shape, {6, 9}, shape),
              ElementsAre(shape[0], 1));
  EXPECT_THAT(local_shape(layout("[S(1), P]"), mesh_shape, {7, 9}, shape),
              ElementsAre(shape[0], 0));
  const Layout strided = layout("[S(0, sf=3)@1, S(0)@0]");
  EXPECT_TRUE(validate(strided, mesh_shape, shape).ok());
  EXPECT_EQ(local_intervals(strided, mesh_shape, {5, kSide - 1}, shape, 0).size(), 3u);
}

TEST(GlobalShapeTest, NamesTheFirstRankThatDoesNotFit) {
  const Layout l = layout("[S(0), R]");
  const auto wrong = global_shape(l, {2, 2}, {{4, 5}, {4, 5}, {3, 5}, {2, 5}});
  EXPECT_EQ(wrong.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      wrong.status().message(),
      HasSubstr("rank 3 at [1, 1] has the local shape [2, 5], but the layout [S(0), R] cuts "
                "the global shape [7, 5] into [3, 5] there"));
}

TEST(GlobalShapeTest, RefusesPiecesInTheWrongOrder) {
  const auto wrong = global_shape(layout("[S(0)]"), {2}, {{3}, {4}});
  EXPECT_THAT(wrong.status().message(), HasSubstr("rank 0 at [0] has the local shape [3]"));
}

TEST(GlobalShapeTest, KnowsRaggedSizes) {
  EXPECT_THAT(*global_shape(layout("[S(0, sizes=[2,3])]"), {2}, {{2}, {3}}), ElementsAre(5));
  EXPECT_THAT(*global_shape(layout("[S(0), S(0, sizes=[1,3])]"), {2, 2}, {{1}, {3}, {1}, {3}}),
              ElementsAre(8));
  const auto wrong = global_shape(layout("[S(0, sizes=[2,3])]"), {2}, {{2}, {4}});
  EXPECT_THAT(wrong.status().message(), HasSubstr("rank 1 at [1] has the local shape [4]"));
}

TEST(GlobalShapeTest, RefusesWhatIsNotAShapePerRank) {
  const std::vector<Dims> three = {{4}, {4}, {4}};
  const auto missing = global_shape(layout("[S(0), R]"), {2, 2}, three);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(missing.status().message(), HasSubstr("but 3 were given"));
  EXPECT_FALSE(global_shape(layout("[S(0)]"), {3, 1}, three).ok());
  EXPECT_FALSE(global_shape(layout("[S(0)]"), {0}, {}).ok());
  const auto ndim = global_shape(layout("[S(0)]"), {3}, {{4}, {4, 1}, {4}});
  EXPECT_THAT(ndim.status().message(), HasSubstr("rank 1 at [1] has the local shape [4, 1]"));
  EXPECT_FALSE(global_shape(layout("[S(1)]"), {3}, three).ok());
  EXPECT_FALSE(global_shape(layout("[S(0)]"), {3}, {{4}, {-1}, {4}}).ok());
}

}  // namespace
}  // namespace shardweave

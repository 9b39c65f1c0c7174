// Plans as values: which steps they choose, what they cost, what they refuse. That they lead where
// they should is for redistribute_transitions_test, that none is cheaper for
// redistribute_optimality_test.
#include "shardweave/placement/redistribute_plan.h"

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/placement/direct_plan.h"
#include "shardweave/placement/layout_samples.h"
#include "shardweave/placement/redistribute_search.h"

namespace shardweave {
namespace {

using namespace placement_internal;

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Layout layout(std::string_view text) {
  return Layout::parse(text).value();
}

RedistributePlan plan(std::string_view from, std::string_view to, const Dims& mesh_shape,
                      const Dims& shape, const CostModel& model = CostModel()) {
  return plan_redistribute(layout(from), layout(to), mesh_shape, shape, 4, model).value();
}

TEST(RedistributePlanTest, OneCollectiveForOneMeshDimension) {
  const struct {
    const char* from;
    const char* to;
    const char* plan;
  } cases[] = {
      {"[S(0)]", "[R]", "all_gather(mesh dim 0, S(0) -> R): 96 bytes"},
      {"[R]", "[S(1)]", "slice(mesh dim 0, R -> S(1))"},
      {"[P(avg)]", "[R]", "all_reduce(mesh dim 0, P(avg) -> R): 192 bytes"},
      {"[P(sum)]", "[S(0)]", "reduce_scatter(mesh dim 0, P(sum) -> S(0)): 96 bytes"},
      {"[P(max)]", "[S(1, sizes=[0,1,3,0])]",
       "reduce_scatter(mesh dim 0, P(max) -> S(1, sizes=[0,1,3,0])): 128 bytes"},
      {"[S(0)]", "[S(1)]", "all_to_all(mesh dim 0, S(0) -> S(1)): 24 bytes"},
      {"[S(0)]", "[S(1, sf=2)]", "all_to_all(mesh dim 0, S(0) -> S(1, sf=2)): 32 bytes"},
      {"[S(0)]", "[S(0, sf=2)]", "exchange(mesh dims [0], [S(0)] -> [S(0, sf=2)]): 32 bytes"},
      {"[R]", "[P(min)]", "to_partial(mesh dim 0, R -> P(min))"},
      {"[S(0)]", "[P(sum)]",
       "all_gather(mesh dim 0, S(0) -> R): 96 bytes; to_partial(mesh dim 0, R -> P(sum))"},
      {"[P(sum)]", "[P(max)]",
       "all_reduce(mesh dim 0, P(sum) -> R): 192 bytes; to_partial(mesh dim 0, R -> P(max))"},
      {"[P(sum)]", "[S(0, sf=2)]", "reduce_scatter(mesh dim 0, P(sum) -> S(0, sf=2)): 96 bytes"},
      {"[S(0)]", "[S(0)]", "nothing to do"},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(plan(c.from, c.to, {4}, {8, 4}).to_string(), c.plan) << c.from << " to " << c.to;
  }
}

TEST(RedistributePlanTest, PartialStaysWhileShardsMove) {
  EXPECT_EQ(plan("[P(sum), S(0)]", "[P(sum), R]", {2, 2}, {8, 4}).to_string(),
            "all_gather(mesh dim 1, S(0) -> R): 64 bytes");
  EXPECT_EQ(
      plan("[S(0), P(sum), S(0)]", "[S(0)@1, P(sum), S(0)@0]", {2, 2, 2}, {8, 4}).to_string(),
      "exchange(mesh dims [0, 2], [S(0), P(sum), S(0)] -> [S(0)@1, P(sum), S(0)@0]): 32 bytes");
}

TEST(RedistributePlanTest, UninvolvedMeshDimensionsStayAlone) {
  // With dimension 0 replicated the reduction could be split over it, at the price of touching it.
  EXPECT_EQ(plan("[R, P(sum)]", "[R, R]", {8, 8}, {1024, 1024}).to_string(),
            "all_reduce(mesh dim 1, P(sum) -> R): 7340032 bytes");
}

TEST(RedistributePlanTest, ReductionsOverSeveralMeshDimensionsAreOneCollective) {
  EXPECT_EQ(plan("[P(sum), P(sum)]", "[R, R]", {8, 4}, {8, 8}).to_string(),
            "all_reduce(mesh dims [0, 1], [P(sum), P(sum)] -> [R, R]): 496 bytes");
  EXPECT_EQ(plan("[P(max), S(1), P(max)]", "[S(0), S(1), S(0)]", {2, 2, 2}, {7, 4}).to_string(),
            "reduce_scatter(mesh dims [0, 2], [P(max), S(1), P(max)] -> [S(0), S(1), S(0)]): "
            "48 bytes");
  EXPECT_EQ(plan("[P(sum), P(sum)]", "[S(1), S(0)]", {2, 2}, {3, 5}).to_string(),
            "reduce_scatter(mesh dims [0, 1], [P(sum), P(sum)] -> [S(1), S(0)]): 52 bytes");
  // A strided shard takes none with it.
  const RedistributePlan strided =
      plan("[P(sum), P(sum), P(sum)]", "[S(1), S(0, sf=2), S(1)]", {2, 2, 2}, {1024, 1024});
  for (const RedistributeStep& step : strided.steps) {
    if (step.after[1] != step.before[1]) {
      EXPECT_THAT(step.mesh_dims, ElementsAre(1)) << strided;
    }
  }
  EXPECT_EQ(strided.bytes(), 4 * 7 * (1 << 17)) << strided;
  // The sum is not to be had before the maximum.
  EXPECT_EQ(plan("[P(sum), P(max)]", "[R, R]", {2, 2}, {8, 8}).steps.size(), 2u);
}

TEST(RedistributePlanTest, LargeReductionsOverUnlikeMeshDimensionsAreSplit) {
  const CostModel model = {{{5e-6, 1e8}, {5e-6, 1e10}}};
  const RedistributePlan large = plan("[P(sum), P(sum)]", "[R, R]", {8, 4}, {4096, 4096}, model);
  EXPECT_EQ(large.to_string(),
            "reduce_scatter(mesh dim 1, P(sum) -> S(0)): 50331648 bytes; "
            "all_reduce(mesh dim 0, P(sum) -> R): 29360128 bytes; "
            "all_gather(mesh dim 1, S(0) -> R): 50331648 bytes");
  const RedistributePlan small = plan("[P(sum), P(sum)]", "[R, R]", {8, 4}, {8, 8}, model);
  EXPECT_EQ(small.steps.size(), 1u) << small;
}

TEST(RedistributePlanTest, MoreMeshDimensionsThanTheSearchTakesAreReducedTogether) {
  EXPECT_EQ(
      plan("[P(sum), P(sum), P(sum), P(sum)]", "[R, R, R, R]", {2, 2, 2, 2}, {8, 8}).to_string(),
      "all_reduce(mesh dims [0, 1, 2, 3], [P(sum), P(sum), P(sum), P(sum)] -> "
      "[R, R, R, R]): 480 bytes");
}

TEST(RedistributePlanTest, ReductionsThatDoNotCommuteGoFromTheLastToTheFirst) {
  const RedistributePlan p = plan("[P(max), P(sum)]", "[R, R]", {2, 2}, {8, 4});
  ASSERT_EQ(p.steps.size(), 2u) << p;
  EXPECT_THAT(p.steps[0].mesh_dims, ElementsAre(1));
  EXPECT_THAT(p.steps[1].mesh_dims, ElementsAre(0));
  // The sum must make way, though it stays.
  const RedistributePlan q = plan("[P(max), P(sum)]", "[R, P(sum)]", {2, 2}, {8, 4});
  EXPECT_EQ(q.steps.back().to_string(), "to_partial(mesh dim 1, R -> P(sum))");
  EXPECT_EQ(q.steps.size(), 3u) << q;
}

TEST(RedistributePlanTest, ASlowLinkIsSpared) {
  // Mesh dimension 0 is slow: it gets pieces instead of whole tensors.
  const CostModel model = {{{1e-6, 1e6}, {1e-6, 1e9}}};
  const RedistributePlan p = plan("[P(sum), P(sum)]", "[R, R]", {2, 2}, {64, 64}, model);
  int64_t slow_bytes = 0;
  for (const RedistributeStep& step : p.steps) {
    if (step.mesh_dims[0] == 0) slow_bytes += step.bytes;
  }
  EXPECT_EQ(slow_bytes, 64 * 64 * 4 / 2) << p;
}

TEST(RedistributePlanTest, EqualDistributionsNeedNothing) {
  // As FSDP around tensor parallelism is written with a strided shard, or with the order of the
  // cuts.
  const RedistributePlan strided = plan("[S(0, sf=2), S(0)]", "[S(0)@1, S(0)@0]", {4, 2}, {16, 3});
  EXPECT_TRUE(strided.is_local()) << strided;
  EXPECT_EQ(strided.cost(), 0) << strided;
  // Uneven pieces of a ragged shard are not those of a plain one.
  EXPECT_TRUE(plan("[S(0, sizes=[3,3,2])]", "[S(0)]", {3}, {8}).is_noop());
  EXPECT_FALSE(plan("[S(0, sizes=[3,2,3])]", "[S(0)]", {3}, {8}).is_local());
  EXPECT_EQ(plan("[S(0, sizes=[3,2,3])]", "[S(0)]", {3}, {8}).to_string(),
            "exchange(mesh dims [0], [S(0, sizes=[3,2,3])] -> [S(0)]): 4 bytes");
}

TEST(RedistributePlanTest, MeshDimensionsOfSizeOneAreFree) {
  EXPECT_TRUE(plan("[S(0), P(max), S(1)]", "[R, P(max), S(0)]", {1, 4, 1}, {8, 8}).is_noop());
  const RedistributePlan p = plan("[S(0), S(0), P(avg)]", "[S(1), S(1), S(0)]", {1, 4, 1}, {8, 8});
  EXPECT_EQ(p.to_string(), "all_to_all(mesh dim 1, S(0) -> S(1)): 48 bytes");
  EXPECT_EQ(p.steps[0].before, layout("[S(0), S(0), P(avg)]"));
  EXPECT_EQ(p.steps[0].after, layout("[S(1), S(1), S(0)]"));
}

TEST(RedistributePlanTest, EmptyTensorsCostNothing) {
  for (const char* from : {"[S(0), S(0)]", "[P(sum), S(1)]", "[R, P(max)]"}) {
    for (const char* to : {"[R, R]", "[S(1), P(sum)]", "[S(0)@1, S(0)@0]"}) {
      const RedistributePlan p = plan(from, to, {2, 3}, {0, 5});
      EXPECT_TRUE(p.is_local()) << p;
      EXPECT_EQ(p.cost(), 0) << p;
    }
  }
}

TEST(RedistributePlanTest, SumsUp) {
  const RedistributePlan p = plan("[S(0)]", "[P(sum)]", {4}, {8, 4});
  EXPECT_EQ(p.bytes(), 96);
  EXPECT_DOUBLE_EQ(p.cost(), 5e-6 + 96 / 5e9);
  EXPECT_FALSE(p.is_local());
  EXPECT_TRUE(p.steps[1].is_local());
  const RedistributePlan nothing;
  EXPECT_TRUE(nothing.is_local());
  EXPECT_EQ(nothing.bytes(), 0);
  EXPECT_EQ(nothing.cost(), 0);
}

TEST(RedistributePlanTest, TheLargestTensorsSaturate) {
  const Dims shape = {int64_t{1} << 30, (int64_t{1} << 31) - 1};
  EXPECT_EQ(plan("[P(sum)]", "[R]", {4}, shape).bytes(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(plan("[S(0)]", "[R]", {4}, shape).bytes(), 4 * shape[0] / 4 * 3 * shape[1]);
  EXPECT_EQ(plan("[S(0), S(1)]", "[S(1), S(0)]", {4, 2}, shape).bytes(),
            4 * shape[0] / 4 * (int64_t{1} << 30));
}

TEST(RedistributePlanTest, ManyRanks) {
  const Dims shape = {int64_t{1} << 20, int64_t{1} << 20};
  EXPECT_EQ(plan("[S(0), S(1)]", "[S(0), R]", {65536, 65536}, shape).to_string(),
            "all_gather(mesh dim 1, S(1) -> R): 67107840 bytes");
  // Only the ranks that exchange count; here 2 of 4 rows are kept.
  EXPECT_EQ(plan("[S(0), S(0)]", "[S(0), S(0, sf=2)]", {65536, 2}, {8 * 65536, 1}).bytes(), 8);
  // Too many to count what each one keeps.
  EXPECT_EQ(plan("[S(0)]", "[S(0, sf=2)]", {65536}, shape).bytes(), 4 * 16 * shape[1]);
}

TEST(RedistributePlanTest, RefusesWhatDoesNotFit) {
  const struct {
    const char* from;
    const char* to;
    int64_t element_size;
    CostModel model;
    const char* message;
  } cases[] = {
      {"[R]",
       "[S(0)]",
       int64_t{1} << 60,
       {},
       "a tensor of shape [8, 4] with elements of 1152921504"},
      {"[S(2)]", "[R]", 4, {}, "the layout [S(2)] does not fit a tensor of shape [8, 4]"},
      {"[R]", "[S(2)]", 4, {}, "the layout [S(2)] does not fit a tensor of shape [8, 4]"},
      {"[R]", "[R, R]", 4, {}, "the layout [R, R] has 2 placements"},
      {"[R]", "[S(0)]", 0, {}, "with elements of 0 bytes (wanted: at least 1"},
      {"[R]", "[S(0)]", 4, {{{-1, 1}}}, "mesh dimension 0 a latency of -1 s"},
      {"[R]", "[S(0)]", 4, {{{NAN, 1}}}, "a latency of nan s"},
      {"[R]", "[S(0)]", 4, {{{0, 0}}}, "a bandwidth of 0 bytes/s"},
  };
  for (const auto& c : cases) {
    const auto refused =
        plan_redistribute(layout(c.from), layout(c.to), {4}, {8, 4}, c.element_size, c.model);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(refused.status().message(), HasSubstr(c.message));
  }
}

TEST(RedistributePlanTest, ThePlanOfOneMeshDimensionIsTheOneThatASearchFinds) {
  for (int64_t n : {2, 3, 5}) {
    for (const Dims& shape : std::vector<Dims>{{8, 6}, {7, 5}, {1, 3}, {2, 9}}) {
      const std::vector<Placements> placements = {
          {Replicate(), Shard(0), Shard(1), Partial(ReduceOp::kMin)},
          all_placements(n, shape, {ReduceOp::kSum, ReduceOp::kProduct})};
      const std::vector<Layout> layouts = all_layouts(placements, {2, n}, shape);
      const CostModel model = {{{1e-6, 1e8}, {1e-6, 1e8}}};
      for (const Layout& from : layouts) {
        for (const Layout& to : layouts) {
          const MeshDims active = active_mesh_dims(from, to);
          if (active.size() != 1) continue;
          const Dims mesh_shape = {2, n};
          const RedistributeProblem problem{from, to, mesh_shape, shape, 4, model};
          const auto searched = search_plan(problem, active, nullptr);
          const auto planned = plan_redistribute(from, to, mesh_shape, shape, 4, model);
          ASSERT_TRUE(searched.has_value()) << from << " to " << to;
          // An even ragged shard is taken for a plain one, which the search alone does not do.
          if (planned->is_noop()) continue;
          EXPECT_EQ(*planned, *searched) << from << " to " << to;
        }
      }
    }
  }
}

TEST(RedistributePlanTest, StepsAndPlansCompareAndPrint) {
  const RedistributePlan a = plan("[S(0)]", "[R]", {4}, {8, 4});
  EXPECT_EQ(a, plan("[S(0)]", "[R]", {4}, {8, 4}));
  EXPECT_NE(a, plan("[S(0)]", "[R]", {2}, {8, 4}));
  EXPECT_EQ(testing::PrintToString(a.steps[0]), a.to_string());
}

TEST(ExchangePartTest, SaysWhoSendsWhat) {
  // Rows 0-1, 2-3, 4-4 become rows 0 and 2, 1 and 4 (of chunks 0-2 and 3-4: 0,3 / 1,4 / 2).
  const ExchangePart part =
      exchange_part(layout("[S(0)]"), layout("[S(0, sf=2)]"), {0}, {3}, {1}, {5, 2});
  ASSERT_EQ(part.send.size(), 3u);
  EXPECT_THAT(part.send[0], ElementsAre(ExchangeBlock{{1, 0}, {1, 2}}));  // row 3
  EXPECT_THAT(part.send[1], IsEmpty());
  EXPECT_THAT(part.send[2], ElementsAre(ExchangeBlock{{0, 0}, {1, 2}}));  // row 2
  EXPECT_THAT(part.recv[0], ElementsAre(ExchangeBlock{{0, 0}, {1, 2}}));  // row 1
  EXPECT_THAT(part.recv[1], IsEmpty());
  EXPECT_THAT(part.recv[2], ElementsAre(ExchangeBlock{{1, 0}, {1, 2}}));  // row 4
}

TEST(ExchangePartTest, ReplicasReadFromTheirOwnKind) {
  const ExchangePart part =
      exchange_part(layout("[S(0), R]"), layout("[R, S(0)]"), {0, 1}, {2, 2}, {0, 1}, {4});
  // Peers (0,0) (0,1) (1,0) (1,1): only those at coordinate 1 of mesh dimension 1 count.
  EXPECT_THAT(part.send[0], IsEmpty());
  EXPECT_THAT(part.send[2], IsEmpty());
  EXPECT_THAT(part.recv[0], IsEmpty());
  EXPECT_THAT(part.recv[1], IsEmpty());
  EXPECT_THAT(part.recv[3], ElementsAre(ExchangeBlock{{0}, {2}}));
}

TEST(TransitionCostTest, IsWhatThePlannerSaysForEvenPieces) {
  const Dims shape = {48, 96};
  const CostModel::Link link{3e-6, 1e8};
  const Placements placements = {Replicate(), Shard(0),
                                 Shard(1),    RaggedShard(1, {24, 24, 24, 24}),
                                 Partial(),   Partial(ReduceOp::kMax)};
  for (const Placement& from : placements) {
    for (const Placement& to : placements) {
      const Layout a({from});
      const auto p = plan_redistribute(a, Layout({to}), {4}, shape, 4, {{link}});
      const Dims local = local_shape(a, {4}, {0}, shape);
      // A ragged shard is taken as it may be, an even one as what it is.
      if (from != to && from.is_shard() && to.is_shard() && from.dim() == to.dim()) continue;
      EXPECT_NEAR(transition_cost(from, to, 4, local[0] * local[1] * 4, link), p->cost(), 1e-12)
          << from << " to " << to;
    }
  }
}

TEST(TransitionCostTest, CountsWhatIsKeptWhereTheKindOfShardChanges) {
  const CostModel::Link link{3e-6, 1e8};
  const Placements placements = {Shard(0), StridedShard(0, 2), StridedShard(0, 4), Partial()};
  for (const Placement& from : placements) {
    for (const Placement& to : placements) {
      if (from == to) continue;
      const Layout a({from});
      const int64_t local_bytes = 64 * 4 / (from.is_shard() ? 4 : 1);
      const double exact = plan_redistribute(a, Layout({to}), {4}, {64}, 4, {{link}})->cost();
      const double estimate = transition_cost(from, to, 4, local_bytes, link);
      EXPECT_GE(estimate, exact - 1e-15) << from << " to " << to;
      EXPECT_LE(estimate, exact + 64 / link.bandwidth + 1e-15) << from << " to " << to;
    }
  }
}

TEST(TransitionCostTest, LocalStepsAndSingleRanksAreFree) {
  const CostModel::Link link;
  EXPECT_EQ(transition_cost(Replicate(), Shard(0), 4, 1000, link), 0);
  EXPECT_EQ(transition_cost(Replicate(), Partial(), 4, 1000, link), 0);
  EXPECT_EQ(transition_cost(Shard(0), Shard(0), 4, 1000, link), 0);
  EXPECT_EQ(transition_cost(Shard(0), Replicate(), 1, 1000, link), 0);
  EXPECT_EQ(transition_cost(Partial(), Replicate(), 4, 0, link), 0);
}

}  // namespace
}  // namespace shardweave

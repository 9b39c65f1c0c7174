// Plans lead where they should: executed on simulated ranks, for all transitions of small meshes.
#include "shardweave/placement/redistribute_plan.h"

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "shardweave/placement/layout_samples.h"
#include "shardweave/placement/simulated_mesh.h"

namespace shardweave {
namespace {

const std::vector<ReduceOp> kAllReductions = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin,
                                              ReduceOp::kMax, ReduceOp::kProduct};

constexpr int64_t kElementSize = 4;

// Latency and bandwidth differ from one mesh dimension to the next, so that detours pay.
CostModel uneven_links() {
  return {{{1e-6, 1e6}, {2e-6, 5e7}, {1e-7, 2e5}}};
}

// Executes the plan and checks all that a plan promises. False (and a failure) if it breaks one.
bool check_transition(const Dims& mesh_shape, const Dims& shape, const Layout& from,
                      const Layout& to, const CostModel& model) {
  const std::string what =
      absl::StrCat(from.to_string(), " to ", to.to_string(), " on the mesh [",
                   absl::StrJoin(mesh_shape, ", "), "], tensor [", absl::StrJoin(shape, ", "), "]");
  const auto plan = plan_redistribute(from, to, mesh_shape, shape, kElementSize, model);
  if (!plan.ok()) {
    ADD_FAILURE() << what << ": " << plan.status();
    return false;
  }
  SimulatedMesh mesh(mesh_shape, shape);
  mesh.distribute(from, /*seed=*/shape.size() + mesh_shape[0]);
  Layout at = from;
  for (const RedistributeStep& step : plan->steps) {
    EXPECT_EQ(step.before, at) << what;
    const SimulatedMesh before = mesh;
    EXPECT_EQ(mesh.run(step) * kElementSize, step.bytes) << what << ": " << step.to_string();
    if (step.is_local() && step.kind != StepKind::kSlice && step.kind != StepKind::kToPartial) {
      EXPECT_TRUE(mesh.same_elements(before)) << what << ": " << step;
    }
    at = step.after;
  }
  EXPECT_TRUE(at == to || plan->is_noop()) << what;
  const std::string difference = mesh.first_difference(to);
  EXPECT_EQ(difference, "") << what << ": " << plan->to_string();
  return difference.empty();
}

void check_all_transitions(const std::vector<Placements>& placements, const Dims& mesh_shape,
                           const std::vector<Dims>& shapes) {
  for (const Dims& shape : shapes) {
    const std::vector<Layout> layouts = all_layouts(placements, mesh_shape, shape);
    for (const Layout& from : layouts) {
      for (const Layout& to : layouts) {
        if (!check_transition(mesh_shape, shape, from, to, uneven_links())) return;
      }
    }
  }
}

// As check_all_transitions, for `n` random pairs.
void check_some_transitions(const std::vector<Placements>& placements, const Dims& mesh_shape,
                            const std::vector<Dims>& shapes, int n) {
  std::mt19937_64 random(17);
  for (const Dims& shape : shapes) {
    const std::vector<Layout> layouts = all_layouts(placements, mesh_shape, shape);
    std::uniform_int_distribution<size_t> any(0, layouts.size() - 1);
    for (int i = 0; i < n; ++i) {
      const Layout& from = layouts[any(random)];
      if (!check_transition(mesh_shape, shape, from, layouts[any(random)], uneven_links())) return;
    }
  }
}

TEST(RedistributeTransitionsTest, EveryTransitionOnOneMeshDimension) {
  for (int64_t n : {1, 2, 3, 5}) {
    for (const Dims& shape : std::vector<Dims>{{7}, {6, 5}, {1, 3}, {0, 3}, {2, 3, 4}}) {
      check_all_transitions({all_placements(n, shape, kAllReductions)}, {n}, {shape});
    }
  }
}

TEST(RedistributeTransitionsTest, EveryTransitionOfAScalar) {
  check_all_transitions(
      {all_placements(2, {}, kAllReductions), all_placements(3, {}, kAllReductions)}, {2, 3}, {{}});
}

TEST(RedistributeTransitionsTest, EveryTransitionOnTwoMeshDimensions) {
  Placements placements = all_placements(2, {7, 5}, {ReduceOp::kSum, ReduceOp::kMax});
  check_all_transitions({placements, placements}, {2, 2}, {{7, 5}});
}

TEST(RedistributeTransitionsTest, ManyTransitionsOnTwoMeshDimensions) {
  for (const Dims& mesh_shape : std::vector<Dims>{{2, 3}, {4, 2}}) {
    for (const Dims& shape : std::vector<Dims>{{7, 5}, {3, 2, 4}}) {
      check_some_transitions({all_placements(mesh_shape[0], shape, kAllReductions),
                              all_placements(mesh_shape[1], shape, kAllReductions)},
                             mesh_shape, {shape}, 1500);
    }
  }
}

TEST(RedistributeTransitionsTest, UnevenAndEmptyShapesOnTwoMeshDimensions) {
  const Placements placements = {Replicate(), Shard(0), Shard(1), StridedShard(0, 2), Partial()};
  check_all_transitions({placements, placements}, {3, 2}, {{1, 3}, {0, 3}, {5, 1}, {6, 6}});
}

TEST(RedistributeTransitionsTest, EveryReductionBesideEveryOtherOne) {
  Placements placements = {Replicate(), Shard(0)};
  for (ReduceOp op : kAllReductions) placements.push_back(Partial(op));
  check_all_transitions({placements, placements}, {3, 2}, {{4}});
}

TEST(RedistributeTransitionsTest, EveryTransitionOnThreeMeshDimensions) {
  const Placements placements = {Replicate(), Shard(0), Partial()};
  check_all_transitions({placements, placements, placements}, {2, 2, 2}, {{11}});
}

TEST(RedistributeTransitionsTest, ManyTransitionsOnThreeMeshDimensions) {
  const Dims shape = {9, 4};
  std::vector<Placements> placements;
  for (int64_t n : {2, 3, 2}) {
    placements.push_back(all_placements(n, shape, {ReduceOp::kSum, ReduceOp::kMin}));
  }
  check_some_transitions(placements, {2, 3, 2}, {shape}, 1000);
}

TEST(RedistributeTransitionsTest, MeshDimensionsOfSizeOne) {
  const Placements placements = {Replicate(), Shard(0), StridedShard(1, 2), Partial(),
                                 Partial(ReduceOp::kMax)};
  check_some_transitions({placements, placements, placements}, {1, 3, 1}, {{5, 4}}, 3000);
}

TEST(RedistributeTransitionsTest, MoreMeshDimensionsThanTheSearchTakes) {
  const Placements placements = {Replicate(),           Shard(0),  Shard(1),
                                 StridedShard(1, 2),    Partial(), Partial(ReduceOp::kProduct),
                                 RaggedShard(0, {5, 4})};
  for (int mesh_ndim : {4, 5}) {
    check_some_transitions(std::vector<Placements>(mesh_ndim, placements), Dims(mesh_ndim, 2),
                           {{9, 10}}, 150);
  }
}

}  // namespace
}  // namespace shardweave

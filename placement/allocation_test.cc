// What is called for every operator must not allocate.
#include <cstdint>

#include "gtest/gtest.h"
#include "shardweave/comm/testing/allocation_counter.h"
#include "shardweave/placement/layout.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave {
namespace {

template <typename Function>
int64_t count_allocations(Function function) {
  const int64_t before = allocations_so_far();
  function();
  return allocations_so_far() - before;
}

TEST(AllocationTest, TheCounterCounts) {
  EXPECT_GT(count_allocations([] { Layout({Shard(0)}); }), 0);
}

TEST(AllocationTest, TransitionCostDoesNotAllocate) {
  const Placement all[] = {Replicate(), Shard(0),           Shard(1),
                           Partial(),   StridedShard(0, 3), RaggedShard(0, {1, 2, 3, 4})};
  double sum = 0;
  EXPECT_EQ(count_allocations([&] {
              for (const Placement& from : all) {
                for (const Placement& to : all) {
                  sum += transition_cost(from, to, 4, 1000, CostModel::Link());
                }
              }
            }),
            0);
  EXPECT_GT(sum, 0);
}

TEST(AllocationTest, LocalShapesAndExtentsDoNotAllocate) {
  const Layout layout = Layout::parse("[S(0)@1, S(1), S(0)@0]").value();
  const Dims mesh_shape = {65536, 8, 65536};
  const Dims coordinate = {65535, 7, 3};
  const Dims shape = {int64_t{1} << 40, 100};
  int64_t rows = 0;
  EXPECT_EQ(count_allocations([&] {
              rows += local_shape(layout, mesh_shape, coordinate, shape)[0];
              rows += local_extent(layout, mesh_shape, coordinate, shape).shape[0];
            }),
            0);
  EXPECT_EQ(rows, 512);
}

}  // namespace
}  // namespace shardweave

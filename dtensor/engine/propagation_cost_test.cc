// What it costs to decide on an operator over a long list of tensors (the norms of all gradients,
// stacked; _foreach_mul_): in bytes from the heap, which do not depend on the machine. In
// proportion to the list, not to its square.
#include <cstdint>
#include <functional>
#include <vector>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "shardweave/comm/testing/allocation_counter.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using testing::on_mesh;

// Of a first call over tensors that `make` makes, by their number.
void expect_proportional(const std::function<at::Tensor(const MeshPtr&, int64_t)>& make,
                         const std::function<void(const std::vector<at::Tensor>&)>& run) {
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    const auto bytes = [&](int64_t count) {
      std::vector<at::Tensor> tensors;
      for (int64_t i = 0; i < count; ++i) tensors.push_back(make(mesh, i));
      const int64_t misses = dispatch_counters(mesh).cache_misses;
      const int64_t before = allocated_bytes_of_thread();  // a rank is a thread
      run(tensors);
      const int64_t after = allocated_bytes_of_thread();
      EXPECT_GT(dispatch_counters(mesh).cache_misses, misses);
      return after - before;
    };
    bytes(10);  // what is made once
    const int64_t few = bytes(150);
    const int64_t many = bytes(600);
    EXPECT_LT(many, 6 * few) << "for four times as many tensors";
  });
}

TEST(PropagationCostTest, AStackOfManyTensors) {
  // Replicated ones could become Partials as they are, if others are; ragged cuts show who looks at
  // all others for each: a copy of one takes memory.
  expect_proportional(
      [](const MeshPtr& mesh, int64_t i) {
        return zeros({4}, mesh, {i % 2 == 0 ? Placement(Replicate()) : RaggedShard(0, {1, 3})});
      },
      [](const std::vector<at::Tensor>& tensors) { at::stack(tensors); });
}

TEST(PropagationCostTest, AnOperatorOnEachOfManyTensors) {
  expect_proportional(
      [](const MeshPtr& mesh, int64_t /*i*/) { return zeros({4}, mesh, {Shard(0)}); },
      [](const std::vector<at::Tensor>& tensors) {
        std::vector<at::Tensor> list = tensors;
        at::_foreach_mul_(list, 2.0);
      });
}

}  // namespace
}  // namespace shardweave

// What it costs to decide on an operator over a long list of tensors (the norms of all gradients,
// stacked; _foreach_mul_): in bytes from the heap, which do not depend on the machine. In
// proportion to the list, not to its square.
#include <cstdlib>
#include <functional>
#include <new>
#include <vector>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace {

thread_local int64_t bytes_so_far = 0;  // a rank is a thread

void* allocate(std::size_t size) {
  bytes_so_far += static_cast<int64_t>(size);
  void* result = std::malloc(size == 0 ? 1 : size);
  if (result == nullptr) std::abort();
  return result;
}

}  // namespace

void* operator new(std::size_t size) {
  return allocate(size);
}
void* operator new[](std::size_t size) {
  return allocate(size);
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete[](void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, std::size_t) noexcept {
  std::free(p);
}

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
      const int64_t before = bytes_so_far;
      run(tensors);
      const int64_t after = bytes_so_far;
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

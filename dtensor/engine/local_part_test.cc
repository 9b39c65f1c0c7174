// Parts that are not in memory until somebody needs them: the same numbers, brought when they are
// used, as often as their state says.
#include "shardweave/dtensor/engine/local_part.h"

#include <memory>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave::dtensor_internal {
namespace {

using shardweave::testing::on_mesh;

// Brings `values`, and counts how often. Gathered on use, it never becomes ready.
class Counted final : public LocalPart::Source {
 public:
  Counted(LocalPart::State state, at::Tensor values) : state_(state), values_(std::move(values)) {}

  LocalPart::State state() const override { return state_; }
  const at::Tensor& bring() override {
    ++brought;
    if (state_ != LocalPart::State::kGatheredOnUse) state_ = LocalPart::State::kReady;
    return values_;
  }

  int brought = 0;

 private:
  LocalPart::State state_;
  const at::Tensor values_;
};

struct Lazy {
  std::shared_ptr<Counted> source;
  at::Tensor tensor;
};

Lazy lazy(LocalPart::State state, const at::Tensor& like) {
  const DTensorMeta& meta = meta_of(like);
  auto source = std::make_shared<Counted>(state, meta.local().clone());
  return {source, wrap(LocalPart(source), meta.spec, meta.context)};
}

TEST(LocalPartTest, IsBroughtWhenValuesAreNeededAndNotBefore) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::arange(35, at::kFloat).view({7, 5});
    const at::Tensor ready = distribute_tensor(whole, mesh, Placements{Shard(0)});
    EXPECT_EQ(meta_of(ready).part.state(), LocalPart::State::kReady);
    for (const auto state : {LocalPart::State::kUnderWay, LocalPart::State::kDeferred}) {
      const auto [source, tensor] = lazy(state, ready);
      EXPECT_EQ(tensor.sizes(), whole.sizes());
      EXPECT_EQ(layout_of(tensor), layout_of(ready));
      EXPECT_EQ(meta_of(tensor).part.state(), state);
      EXPECT_EQ(source->brought, 0);
      const at::Tensor shared = tensor.variable_data();  // a copy of the handle, not of the values
      EXPECT_EQ(source->brought, 0);
      EXPECT_TRUE(at::equal(full_tensor(tensor * 2), whole * 2));
      EXPECT_EQ(source->brought, 1);
      EXPECT_EQ(meta_of(tensor).part.state(), LocalPart::State::kReady);
      EXPECT_TRUE(at::equal(full_tensor(tensor.t()), whole.t()));
      EXPECT_EQ(source->brought, 1);
      EXPECT_TRUE(at::equal(full_tensor(shared), whole));
      EXPECT_TRUE(meta_of(shared).local().is_same(meta_of(tensor).local()));
    }
  });
}

TEST(LocalPartTest, GatheredOnUseIsAskedForAtEveryUse) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::arange(35, at::kFloat).view({7, 5});
    const auto [source, tensor] = lazy(LocalPart::State::kGatheredOnUse,
                                       distribute_tensor(whole, mesh, Placements{Shard(1)}));
    for (int use = 1; use <= 3; ++use) {
      EXPECT_TRUE(at::equal(full_tensor(tensor.relu()), whole));
      EXPECT_EQ(meta_of(tensor).part.state(), LocalPart::State::kGatheredOnUse);
      EXPECT_GE(source->brought, use);
    }
  });
}

TEST(LocalPartTest, WhatIsWrittenIsTheTensorThatWasBrought) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::ones({3, 4});
    const auto [source, tensor] =
        lazy(LocalPart::State::kDeferred, distribute_tensor(whole, mesh, Placements{Shard(0)}));
    tensor.mul_(3);
    EXPECT_TRUE(at::equal(full_tensor(tensor), whole * 3));
    tensor.t_();  // another shape: a part of its own
    EXPECT_TRUE(at::equal(full_tensor(tensor), (whole * 3).t()));
    EXPECT_EQ(source->brought, 1);
  });
}

}  // namespace
}  // namespace shardweave::dtensor_internal

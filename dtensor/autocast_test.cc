#include "shardweave/dtensor/autocast.h"

#include <optional>
#include <string>

#include "ATen/ATen.h"
#include "ATen/autocast_mode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/testing/counted_mesh.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;

at::ScalarType product() {
  return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type();
}

TEST(AutocastTest, ScopesNestAndEnd) {
  EXPECT_EQ(product(), at::kFloat);
  {
    const AutocastScope autocast(at::kBFloat16);
    EXPECT_EQ(product(), at::kBFloat16);
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCUDA));
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCUDA), at::kBFloat16);
    {
      const AutocastScope exact(at::kFloat);
      EXPECT_EQ(product(), at::kFloat);
      const AutocastScope half(at::kHalf);
      EXPECT_EQ(product(), at::kHalf);
    }
    EXPECT_EQ(product(), at::kBFloat16);
  }
  EXPECT_EQ(product(), at::kFloat);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCUDA));
}

// What a program has set without the scope is as it was, the type of a device that is off, too.
TEST(AutocastTest, WhatWasSetBeforeComesBack) {
  const at::ScalarType before = at::autocast::get_autocast_dtype(at::kCPU);
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  { const AutocastScope autocast(at::kBFloat16); }
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kHalf);
  at::autocast::set_autocast_dtype(at::kCPU, before);
}

// LibTorch's table would give the first cast again, of whatever type, whatever has been written since.
TEST(AutocastTest, ParametersAreCastAtEachUse) {
  const at::Tensor weight = at::ones({2, 2}).requires_grad_();
  const auto use = [&] { return at::mm(weight, weight); };
  const AutocastScope outer(at::kBFloat16);
  EXPECT_EQ(use().scalar_type(), at::kBFloat16);
  EXPECT_EQ(use().sum().item<float>(), 8);
  weight.data().fill_(2);  // as an optimizer does
  EXPECT_EQ(use().sum().item<float>(), 32);
  {
    const AutocastScope inner(at::kHalf);
    EXPECT_EQ(use().scalar_type(), at::kHalf);
  }
  use().sum().backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
}

// Nor do LibTorch's own scopes keep anything there, once the thread has a mesh; a scope that began before
// does not switch it on again.
TEST(AutocastTest, OnRankThreadsNothingIsKept) {
  using testing::Carrier;
  for (const Carrier carrier : {Carrier::kInproc, Carrier::kGloo}) {
    testing::on_counted_mesh({{"x", 2}}, carrier, [](const MeshPtr& mesh, testing::Sent&) {
      distribute_tensor(at::ones({4, 4}), mesh, Placements{Shard(0)});
      EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    });
  }
  const absl::Status status = run_ranks(2, [](World& world) {
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    {
      const AutocastScope autocast(at::kBFloat16);
      const MeshPtr mesh = value_or_throw(init_device_mesh(world, {{"x", 2}}));
      const at::Tensor a = distribute_tensor(at::ones({4, 4}), mesh, Placements{Shard(0)});
      EXPECT_EQ(at::mm(a, a).scalar_type(), at::kBFloat16);
    }
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(AutocastTest, OtherTypesAreRefused) {
  std::optional<AutocastScope> autocast;
  try {
    autocast.emplace(at::kInt);
    ADD_FAILURE() << "wanted an error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("Autocast: dtype is Int; wanted BFloat16 or Half"));
  }
  EXPECT_EQ(product(), at::kFloat);
}

}  // namespace
}  // namespace shardweave

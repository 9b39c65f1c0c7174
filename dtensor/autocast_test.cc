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

// A parameter is cast once in the outermost scope, and no longer kept after it.
TEST(AutocastTest, ParametersThatWereCastAreKeptUntilTheOutermostScopeEnds) {
  const at::Tensor weight = at::ones({2, 2}).requires_grad_();
  const auto version_of_use = [&] { return at::mm(weight, at::ones({2, 2})).sum().item<float>(); };
  {
    const AutocastScope outer(at::kBFloat16);
    EXPECT_EQ(version_of_use(), 8);
    weight.data().fill_(2);  // autograd does not hear of it, nor autocast
    {
      const AutocastScope inner(at::kBFloat16);
      EXPECT_EQ(version_of_use(), 8);
    }
    EXPECT_EQ(version_of_use(), 8);
  }
  const AutocastScope autocast(at::kBFloat16);
  EXPECT_EQ(version_of_use(), 16);
}

// A scope that begins before its thread has a mesh does not switch on again what the mesh switches off.
TEST(AutocastTest, OnRankThreadsNothingIsKept) {
  using testing::Carrier;
  for (const Carrier carrier : {Carrier::kInproc, Carrier::kGloo}) {
    testing::on_counted_mesh({{"x", 2}}, carrier, [](const MeshPtr& mesh, testing::Sent&) {
      {
        const AutocastScope autocast(at::kBFloat16);
        const at::Tensor a = distribute_tensor(at::ones({4, 4}), mesh, Placements{Shard(0)});
        EXPECT_EQ(at::mm(a, a).scalar_type(), at::kBFloat16);
      }
      EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    });
  }
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

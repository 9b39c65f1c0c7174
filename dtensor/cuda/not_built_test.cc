// A program without kernels: what is said of it.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/cuda/random_fill.h"

namespace shardweave::dtensor_internal {
namespace {

TEST(NotBuiltTest, SaysSo) {
  EXPECT_FALSE(has_random_kernels());
  float out[3] = {1, 2, 3};
  const IndexBox box = {.length = 3};
  const absl::Status status =
      fill_random(RandomDraw::normal(DType::kF32, 0, 1), {}, {box}, out, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("--config=cuda"));
  EXPECT_EQ(load_random_kernels(0), status);
  EXPECT_EQ(out[0], 1);
}

}  // namespace
}  // namespace shardweave::dtensor_internal

// Without a GPU: what is missing is said, and nothing else happens.
#include "shardweave/dtensor/load_cuda.h"

#include <string>

#include "ATen/ops/ones.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardweave {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LoadCudaTest, IsThereOrSaysWhyNot) {
  for (int twice = 0; twice < 2; ++twice) {
    const absl::Status status = load_cuda();
    if (status.ok()) {
      EXPECT_EQ(at::ones({4}, at::kCUDA).sum().item<float>(), 4);
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                AnyOf(HasSubstr("/libtorch_cuda.so"), HasSubstr("finds no GPU")));
    // Bazel's links to LibTorch stand in a folder that never has the other half.
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("_solib")));
    EXPECT_EQ(at::ones({4}).sum().item<float>(), 4);
  }
}

}  // namespace
}  // namespace shardweave

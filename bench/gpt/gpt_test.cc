// What is timed has the losses of one rank.
#include "gpt.h"

#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/bench/recorded_step/recorded_step.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/mesh/connected_mesh.h"

namespace bench_gpt {
namespace {

using Train = decltype(&train);

std::vector<double> losses(const Sizes& sizes, const std::string& mode,
                           const shardweave::MeshPtr& mesh, int64_t steps = 3, Train by = train) {
  std::vector<double> all;
  by(sizes, mode, steps, mesh, [&](double loss) { all.push_back(loss); });
  return all;
}

TEST(GptBenchTest, LossesAreThoseOfOneRank) {
  at::set_num_threads(1);
  for (const Sizes& sizes : {Sizes{}, Sizes{.dim = 256, .length = 128}}) {
    const std::vector<double> alone = losses(sizes, "tp", nullptr);
    for (const std::string mode : {"tp", "sp", "ddp", "zero1", "zero2", "fsdp"}) {
      shardweave::testing::on_mesh({{mesh_dim_of(mode), 2}}, [&](const shardweave::MeshPtr& mesh) {
        const std::vector<double> now = losses(sizes, mode, mesh);
        ASSERT_EQ(now.size(), alone.size());
        for (size_t i = 0; i < now.size(); ++i) {
          EXPECT_NEAR(now[i], alone[i], 1e-5 * alone[i]) << mode << ", step " << i + 1;
        }
      });
    }
  }
}

// A step of three micro-batches is one of a batch that is their sum: whose gradients stay until the last.
TEST(GptBenchTest, MicroBatchesHaveTheLossesOfOneRank) {
  at::set_num_threads(1);
  const Sizes sizes = {.batch = 2, .micro_batches = 3};
  const std::vector<double> alone = losses(sizes, "tp", nullptr);
  for (const std::string mode : {"ddp", "fsdp"}) {
    shardweave::testing::on_mesh({{"dp", 2}}, [&](const shardweave::MeshPtr& mesh) {
      const std::vector<double> now = losses(sizes, mode, mesh);
      ASSERT_EQ(now.size(), alone.size());
      for (size_t i = 0; i < now.size(); ++i) {
        EXPECT_NEAR(now[i], alone[i], 1e-5 * alone[i]) << mode << ", step " << i + 1;
      }
    });
  }
}

// To the last bit: the same kernels run, on the same numbers.
TEST(GptBenchTest, ReplaysHaveTheLossesOfSteps) {
  at::set_num_threads(1);
  const Sizes sizes;
  EXPECT_EQ(losses(sizes, "", nullptr, 8, train_recorded), losses(sizes, "", nullptr, 8));
  const absl::Status status =
      bench_recorded_step::run_recordable_ranks(2, [&](shardweave::World& world) {
        const shardweave::MeshPtr mesh = *shardweave::init_device_mesh(world, {{"tp", 2}});
        EXPECT_EQ(losses(sizes, "tp", mesh, 8, train_recorded), losses(sizes, "tp", mesh, 8));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

// Parts that are packed for a collective are copied past the dispatcher.
TEST(GptBenchTest, AStepThatPacksIsNotRecorded) {
  at::set_num_threads(1);
  const absl::Status status =
      bench_recorded_step::run_recordable_ranks(2, [&](shardweave::World& world) {
        losses({}, "sp", *shardweave::init_device_mesh(world, {{"tp", 2}}), 4, train_recorded);
        return absl::OkStatus();
      });
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr("memory that was written past LibTorch's dispatcher"));
}

}  // namespace
}  // namespace bench_gpt

// What is timed has the losses of one rank.
#include "gpt.h"

#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace bench_gpt {
namespace {

std::vector<double> losses(const Sizes& sizes, const std::string& mode,
                           const shardweave::MeshPtr& mesh) {
  std::vector<double> all;
  train(sizes, mode, 3, mesh, [&](double loss) { all.push_back(loss); });
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

}  // namespace
}  // namespace bench_gpt

// What belongs to somebody else already, and gradients that are no numbers: errors on all ranks.
#include <limits>
#include <string>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/zero.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;

template <typename F>
void expect_refused(F body, absl::StatusCode code, const std::string& text) {
  try {
    body();
    ADD_FAILURE() << "no error: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(text));
  }
}

TEST(FullyShardOwnersTest, AParameterHasOneOwner) {
  for (const int64_t ranks : {2, 3}) {
    on_mesh({{"dp", ranks}}, [](const MeshPtr& mesh) {
      nn::Linear model(5, 7);
      distribute_module(*model, mesh, {}, {.source = 0});
      const auto shard = [&] { fully_shard(*model, mesh); };
      {
        const ZeroPartition partition(model->parameters());
        expect_refused(shard, absl::StatusCode::kFailedPrecondition, "is in a ZeRO partition");
      }
      {
        const GradSync sync(*model);
        expect_refused(shard, absl::StatusCode::kFailedPrecondition, "is in a GradSync");
      }
      EXPECT_TRUE(layout_of(model->weight)[0].is_replicate());
      shard();  // they are gone
      expect_refused([&] { const ZeroPartition partition(model->parameters()); },
                     absl::StatusCode::kInvalidArgument, "is fully sharded");
      const GradSync sync(*model);  // has nothing to do, and does not mind
      model->forward(distribute_tensor(at::ones({4, 5}), mesh, {{"dp", Shard(0)}}))
          .sum()
          .backward();
      finish_grad_sync(*model);
      EXPECT_EQ(layout_of(model->weight.grad()), layout_of(model->weight));
    });
  }
}

// One rank's rows alone are infinite: all hear of it, and nothing is stepped.
TEST(FullyShardOwnersTest, GradientsThatAreNoNumbers) {
  for (const int64_t ranks : {1, 2, 3}) {
    on_mesh({{"dp", ranks}}, [](const MeshPtr& mesh) {
      nn::Linear model(5, 7);
      distribute_module(*model, mesh, {}, {.source = 0});
      fully_shard(*model, mesh);
      at::Tensor rows = at::ones({6, 5});
      rows[5].fill_(std::numeric_limits<float>::infinity());
      model->forward(distribute_tensor(rows, mesh, {{"dp", Shard(0)}})).sum().backward();
      const at::Tensor before = full_tensor(model->weight.grad()).clone();
      expect_refused(
          [&] { clip_grad_norm(model->parameters(), 1.0, 2, /*error_if_nonfinite=*/true); },
          absl::StatusCode::kOutOfRange, "norm");
      EXPECT_TRUE(at::equal(full_tensor(model->weight.grad()), before));
      // The next step is one as any.
      for (at::Tensor& p : model->parameters()) p.mutable_grad() = at::Tensor();
      model->forward(distribute_tensor(at::ones({6, 5}), mesh, {{"dp", Shard(0)}}))
          .sum()
          .backward();
      EXPECT_GT(clip_grad_norm(model->parameters(), 1.0, 2, /*error_if_nonfinite=*/true), 0);
    });
  }
}

}  // namespace
}  // namespace shardweave

// Copies that are made while training goes on: what is saved is what was there when save_async() was called, or nothing is.
#include <mutex>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/checkpoint/testing/training.h"

namespace shardweave {
namespace {

using testing::expect_equal;
using ::testing::HasSubstr;
using testing::new_directory;
using testing::on_mesh;
using testing::Plan;
using testing::Training;

const CheckpointOptions kBeside = {.copy_beside_training = true};
constexpr Plan kPlans[] = {Plan::kDdp, Plan::kTp, Plan::kFsdp, Plan::kZero, Plan::kTorchOptim};

absl::Status error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.status();
  }
  return absl::OkStatus();
}

void expect_too_early(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("was written to after save_async(), before wait_for_copy()"));
}

TEST(CopyBesideTest, SavesWhatWasThere) {
  for (const Plan plan : kPlans) {
    SCOPED_TRACE(name_of(plan));
    const std::string directory = new_directory("beside_" + std::to_string(static_cast<int>(plan)));
    on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
      Training training(mesh, plan);
      for (int64_t step = 0; step < 2; ++step) training.step(step);
      const auto wanted = training.values();
      Checkpointer checkpointer(directory, mesh, kBeside);
      ASSERT_TRUE(checkpointer.save_async(2, training.state()));
      {
        // Buffers are changed by forward, and so were copied at once.
        const c10::AutoGradMode no_grad(false);
        training.net().steps.fill_(99);
        training.net().mask.logical_not_();
        EXPECT_TRUE(is_dtensor(training.net().mask));
      }
      training.step(2, [&] { checkpointer.wait_for_copy(); });
      training.step(3, [&] { checkpointer.wait_for_copy(); });
      checkpointer.wait();

      Training loaded(mesh, plan);
      loaded.step(99);
      EXPECT_EQ(checkpointer.load(loaded.state()).step, 2);
      expect_equal(loaded.values(), wanted);
    });
    EXPECT_TRUE(verify_checkpoint(directory + "/step-000002").ok());
  }
}

TEST(CopyBesideTest, WhatIsWrittenToTooEarlyIsNotSaved) {
  for (const Plan plan : kPlans) {
    SCOPED_TRACE(name_of(plan));
    const std::string directory = new_directory("early_" + std::to_string(static_cast<int>(plan)));
    on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
      Training training(mesh, plan);
      training.step(0);
      Checkpointer checkpointer(directory, mesh, kBeside);
      checkpointer.save_async(1, training.state());
      training.step(1);
      checkpointer.wait_for_copy();
      expect_too_early(error_of([&] { checkpointer.wait(); }));
      EXPECT_FALSE(std::filesystem::exists(directory + "/step-000001"));
      // It is told once, and the next one is as good as any.
      const auto wanted = training.values();
      checkpointer.save_async(2, training.state());
      checkpointer.wait();
      training.step(2);
      EXPECT_EQ(checkpointer.load(training.state()).step, 2);
      expect_equal(training.values(), wanted);
    });
  }
}

// The kernels of optimizers do not count what they write; FusedOptimizer does.
TEST(CopyBesideTest, AnOptimizersStateAloneIsWatched) {
  const std::vector<OptimizerOptions> all = {AdamWOptions{}, SgdOptions{.momentum = 0.9},
                                             LionOptions{}, MuonOptions{}, AdafactorOptions{}};
  for (size_t kind = 0; kind < all.size(); ++kind) {
    SCOPED_TRACE(kind);
    const std::string directory = new_directory("state_alone_" + std::to_string(kind));
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      torch::nn::Linear net(6, 4);
      distribute_module(*net, mesh, {{"weight", {{"dp", Shard(0)}}}});
      FusedOptimizer optimizer({{{net->weight}, all[kind]}});
      const auto step = [&] {
        net->weight.mutable_grad() = at::ones_like(net->weight);
        optimizer.step();
      };
      step();
      StateDict state;
      add_optimizer(state, optimizer, *net);
      Checkpointer checkpointer(directory, mesh, kBeside);
      checkpointer.save_async(1, state);
      step();
      expect_too_early(error_of([&] { checkpointer.wait(); }));
      checkpointer.save_async(2, state);
      checkpointer.wait_for_copy();
      step();
      checkpointer.wait();
    });
  }
}

TEST(CopyBesideTest, ARankThatThrowsLeavesNobodyWaiting) {
  const std::string directory = new_directory("throws");
  const absl::Time begun = absl::Now();
  const absl::Status status = testing::try_on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    Training training(mesh, Plan::kFsdp);
    Checkpointer checkpointer(directory, mesh, kBeside);
    checkpointer.save_async(1, training.state());
    if (mesh->rank() == Rank(1)) throw Error("forward", absl::InternalError("out of something"));
    training.step(0, [&] { checkpointer.wait_for_copy(); });
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("out of something"));
  EXPECT_LT(absl::Now() - begun, absl::Seconds(20));
}

TEST(CopyBesideTest, WhatOneRankWritesToTooEarlyAllAreTold) {
  const std::string directory = new_directory("early_on_one");
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    at::Tensor cut = distribute_tensor(at::ones({3, 64}), mesh, {Shard(0)}).requires_grad_();
    StateDict state;
    state.add_tensor("cut", cut);
    Checkpointer checkpointer(directory, mesh, kBeside);
    checkpointer.save_async(1, state);
    if (mesh->rank() == Rank(1)) {
      const c10::AutoGradMode no_grad(false);
      at::Tensor local = to_local(cut);
      local.fill_(2);
    }
    expect_too_early(error_of([&] { checkpointer.wait(); }));
    EXPECT_FALSE(std::filesystem::exists(directory + "/step-000001"));
  });
}

TEST(CopyBesideTest, AnyOtherCallWaitsToo) {
  const std::string directory = new_directory("any_call");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Training training(mesh, Plan::kFsdp);
    CheckpointOptions options = kBeside;
    options.when_busy = WhenBusy::kSkip;
    {
      Checkpointer checkpointer(directory, mesh, options);
      checkpointer.wait_for_copy();  // of nothing
      int64_t saved = 0;
      for (int64_t step = 1; step <= 20; ++step) {
        if (checkpointer.save_async(step, training.state())) saved = step;
      }
      EXPECT_GE(saved, 1);
      checkpointer.save(21, training.state());
      EXPECT_EQ(checkpointer.load(training.state()).step, 21);
      checkpointer.save_async(22, training.state());
      checkpointer.open();
      EXPECT_EQ(list_checkpoints(directory)->back(), 22);
      checkpointer.save_async(23, training.state());
    }  // and it ends
    EXPECT_EQ(list_checkpoints(directory)->back(), 23);
  });
}

TEST(CopyBesideTest, RanksThatDifferAreAllTold) {
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    StateDict state;
    state.add_tensor("w", at::ones({2}));
    Checkpointer checkpointer(new_directory("differ"), mesh,
                              {.copy_beside_training = mesh->rank() == Rank(1)});
    const absl::Status status = error_of([&] { checkpointer.save_async(1, state); });
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("an option"));
  });
}

}  // namespace
}  // namespace shardweave

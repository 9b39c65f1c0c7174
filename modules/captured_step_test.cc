// Steps that are captured and replayed on GPUs (of the fake): the numbers of steps that are called.
#include "shardweave/dtensor/captured_step.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/dtensor/testing/fake_cuda.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/data_parallel.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/testing/words_net.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::host;
using testing::host_waits;
using testing::kBatch;
using testing::kDim;
using testing::kHidden;
using testing::loss_of;
using testing::make_words_net;
using testing::on_gpus;
using testing::on_mesh;
using testing::try_on_gpus;
using testing::words_of;
using testing::WordsNet;
namespace nn = torch::nn;

constexpr int kEager = 2, kReplayed = 3;

const FakeGpuScript kSlow = {.delay_microseconds = 500, .operation_milliseconds = 1};

double lr_of(int step) {
  return 1e-2 / (1 + step);
}

std::vector<float> losses_of_one_device(const OptimizerOptions& options, int steps) {
  WordsNet net = make_words_net();
  FusedOptimizer optimizer(net->parameters(), options);
  std::vector<float> result;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    optimizer.set_lr(lr_of(step));
    const at::Tensor loss = loss_of(net, words_of(step), words_of(step + 1));
    loss.backward();
    optimizer.step();
    result.push_back(loss.item<float>());
  }
  return result;
}

using Prepare = std::function<std::shared_ptr<void>(WordsNet&, const MeshPtr&)>;

// Eager steps, replayed ones, and an eager one at last.
void check_training(const std::vector<MeshDim>& dims, const Placements& batch,
                    const Prepare& prepare, const OptimizerOptions& options = AdamWOptions{}) {
  const std::vector<float> wanted = losses_of_one_device(options, kEager + kReplayed + 1);
  on_gpus(
      dims,
      [&](const MeshPtr& mesh) {
        WordsNet net = make_words_net();
        net->to(at::kCUDA);
        const std::shared_ptr<void> kept = prepare(net, mesh);
        FusedOptimizer optimizer(net->parameters(), options);
        const auto data = [&](int step) {
          return distribute_tensor(words_of(step).to(at::kCUDA), mesh, batch);
        };
        at::Tensor words = data(0), next = data(1), loss;
        const auto feed = [&](int step) {
          const c10::AutoGradMode no_grad(false);
          words.copy_(data(step));
          next.copy_(data(step + 1));
          optimizer.set_lr(lr_of(step));
        };
        const auto train = [&] {
          optimizer.zero_grad();
          loss = loss_of(net, words, next);
          loss.backward();
          finish_grad_sync(*net);
          optimizer.step();
        };
        int step = 0;
        const auto check = [&](const char* how) {
          EXPECT_NEAR(host(loss).item<float>(), wanted[static_cast<size_t>(step)], 2e-5)
              << how << ", step " << step;
        };
        for (; step < kEager; ++step) {
          feed(step);
          train();
          check("eager");
        }
        const at::Tensor before = host(net->head->weight);
        CapturedStep captured = CapturedStep::capture(mesh, net->parameters(), train);
        EXPECT_TRUE(at::equal(host(net->head->weight), before)) << "nothing has run";
        for (; step < kEager + kReplayed; ++step) {
          feed(step);
          const int64_t waits = host_waits();
          captured.replay();
          EXPECT_EQ(host_waits(), waits) << "the host waits in a replay";
          check("replayed");
        }
        EXPECT_EQ(captured.replays(), kReplayed);
        EXPECT_EQ(optimizer.state(0, "step").item<float>(), kEager + kReplayed);
        feed(step);
        train();
        check("eager after replays");
      },
      kSlow);
}

std::shared_ptr<void> replicated(WordsNet& net, const MeshPtr& mesh) {
  distribute_module(*net, mesh, ParameterPlan());
  return nullptr;
}

// Of the plan of tensor parallelism.
std::shared_ptr<void> tensor_parallel(WordsNet& net, const MeshPtr& mesh) {
  ShardingPlan plan;
  plan.parameter = {{"embed.weight", NamedPlacements{{"tp", Shard(0)}}},
                    {"blocks.*.up.*", NamedPlacements{{"tp", Shard(0)}}},
                    {"blocks.*.down.weight", NamedPlacements{{"tp", Shard(1)}}},
                    {"head.*", NamedPlacements{{"tp", Shard(0)}}}};
  parallelize_module(*net, mesh, plan);
  return nullptr;
}

TEST(CapturedStepTest, OneRank) {
  check_training({{"dp", 1}}, {Shard(0)}, replicated);
}

TEST(CapturedStepTest, OptimizersWhoseNumbersTheHostKeeps) {
  check_training({{"dp", 1}}, {Shard(0)}, replicated, AdamOptions{});
  check_training({{"dp", 1}}, {Shard(0)}, replicated, SgdOptions{.lr = 0.1, .momentum = 0.9});
}

TEST(CapturedStepTest, DataParallel) {
  check_training({{"dp", 3}}, {Shard(0)}, replicated);
}

TEST(CapturedStepTest, DistributedDataParallel) {
  check_training({{"dp", 2}}, {Shard(0)}, [](WordsNet& net, const MeshPtr& mesh) {
    return std::shared_ptr<GradSync>(new GradSync(distributed_data_parallel(*net, mesh)));
  });
}

TEST(CapturedStepTest, TensorParallel) {
  check_training({{"tp", 2}}, {Replicate()}, tensor_parallel);
}

class CapturedFullyShardTest : public ::testing::TestWithParam<FullyShardOptions> {};
INSTANTIATE_TEST_SUITE_P(
    Modes, CapturedFullyShardTest,
    ::testing::Values(FullyShardOptions{.units = {"*"}},
                      FullyShardOptions{.units = {"*"}, .reshard_after_forward = false},
                      FullyShardOptions{.units = {"blocks.*"}, .equal_segments = true}));

TEST_P(CapturedFullyShardTest, Trains) {
  check_training({{"dp", 2}}, {Shard(0)}, [](WordsNet& net, const MeshPtr& mesh) {
    fully_shard(*net, mesh, GetParam());
    return nullptr;
  });
}

TEST(CapturedStepTest, FullyShardOfNeighbours) {
  check_training({{"dp", 4}}, {Shard(0)}, [](WordsNet& net, const MeshPtr& mesh) {
    fully_shard(*net, mesh, {.units = {"*"}, .reshard_after_forward_ranks = 2});
    return nullptr;
  });
}

TEST(CapturedStepTest, TensorParallelInsideFullyShard) {
  check_training({{"dp", 2}, {"tp", 2}}, {Shard(0), Replicate()},
                 [](WordsNet& net, const MeshPtr& mesh) {
                   tensor_parallel(net, mesh);
                   fully_shard(*net, mesh, {.mesh_dim = "dp", .units = {"*"}});
                   return nullptr;
                 });
}

// What was gathered of a weight before, or in between, is not what a replay has written.
TEST(CapturedStepTest, WhatIsRememberedIsOfTheLastReplay) {
  on_gpus({{"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor w = distribute_tensor(at::ones({4, 4}).to(at::kCUDA), mesh, {Shard(0)});
    const at::Tensor x = distribute_tensor(at::ones({4}).to(at::kCUDA), mesh, {Replicate()});
    w.requires_grad_();
    const auto sum = [&] { return host(at::mv(w, x).detach()).sum().item<float>(); };
    EXPECT_EQ(sum(), 16);
    CapturedStep step = CapturedStep::capture(mesh, {}, [&] {
      const c10::AutoGradMode no_grad(false);
      w.mul_(2);
    });
    EXPECT_EQ(sum(), 16);
    for (float wanted : {32.0F, 64.0F}) {
      step.replay();
      EXPECT_EQ(sum(), wanted);
      EXPECT_EQ(sum(), wanted);
    }
  });
}

// Forward and backward alone; the optimizer's step comes after the replay.
TEST(CapturedStepTest, GradientsAreThoseOfTheLastReplay) {
  on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    at::Tensor w = distribute_tensor(at::ones({4}).to(at::kCUDA), mesh, {Replicate()});
    at::Tensor x = distribute_tensor(at::ones({4}).to(at::kCUDA), mesh, {Shard(0)});
    w.requires_grad_();
    const auto gradient = [&] {
      w.mutable_grad() = at::Tensor();
      (w * x).sum().backward();
      w.mutable_grad() = redistribute(w.grad(), {Replicate()});
    };
    const auto is = [&](float value) {
      EXPECT_TRUE(at::equal(host(w.grad()), at::full({4}, value))) << host(w.grad());
    };
    gradient();
    is(1);
    CapturedStep step = CapturedStep::capture(mesh, {w}, gradient);
    for (float value : {2.0F, 3.0F}) {
      const c10::AutoGradMode no_grad(false);
      x.add_(1);
      w.mutable_grad() = at::Tensor();  // an optimizer's zero_grad()
      step.replay();
      is(value);
    }
    gradient();  // as ever
    is(3);
    step.replay();
    is(3);
  });
}

TEST(CapturedStepErrorTest, AFailedCaptureLeavesNothingBehind) {
  const FakeGpuScript script = {.delay_microseconds = 500, .calls_go_on = true, .looks = 20};
  on_gpus(
      {{"dp", 2}},
      [](const MeshPtr& mesh) {
        nn::Linear net(kDim, kHidden);
        net->to(at::kCUDA);
        fully_shard(*net, mesh, {.reshard_after_forward = false});
        const at::Tensor x =
            distribute_tensor(at::ones({kBatch, kDim}).to(at::kCUDA), mesh, {Shard(0)});
        const auto step = [&] {
          net->zero_grad();
          net(x).sum().backward();
          finish_grad_sync(*net);
        };
        step();
        const at::Tensor y = host(net(x).detach()), grad = host(net->weight.grad());
        for (const bool in_the_middle : {true, false}) {
          try {
            CapturedStep::capture(mesh, net->parameters(), [&] {
              if (in_the_middle) {
                const at::Tensor all = redistribute(x, {Replicate()});
                throw Error(absl::DataLossError("no more data"));
              }
              step();
              net(x).sum().item<float>();
            });
            ADD_FAILURE() << "captured";
          } catch (const Error&) {
          }
          EXPECT_TRUE(at::equal(host(net->weight.grad()), grad));
          EXPECT_TRUE(at::allclose(host(net(x).detach()), y));
          EXPECT_TRUE(at::allclose(host(redistribute(x, {Replicate()})), host(x)));
        }
        CapturedStep captured = CapturedStep::capture(mesh, net->parameters(), step);
        captured.replay();
        EXPECT_TRUE(at::allclose(host(net->weight.grad()), grad));
      },
      script);
}

void expect_error(const std::vector<absl::Status>& results, absl::StatusCode code,
                  const std::string& part) {
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

TEST(CapturedStepErrorTest, WithoutCuda) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    // The fake is there for the whole program, but these ranks have none of it.
    try {
      CapturedStep::capture(mesh, {}, [] {});
      ADD_FAILURE() << "captured";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(error.what(), HasSubstr("wanted nccl"));
    }
  });
}

TEST(CapturedStepErrorTest, AParameterThatIsElsewhere) {
  expect_error(
      try_on_gpus({{"dp", 2}},
                  [](const MeshPtr& mesh) { CapturedStep::capture(mesh, {at::ones({2})}, [] {}); }),
      absl::StatusCode::kInvalidArgument, "parameter 0 is on cpu");
}

TEST(CapturedStepErrorTest, ANumberOnTheHost) {
  for (int how = 0; how < 3; ++how) {
    on_gpus({{"dp", 2}}, [&](const MeshPtr& mesh) {
      at::Tensor x = distribute_tensor(at::ones({4}).to(at::kCUDA), mesh, {Shard(0)});
      x.requires_grad_();
      x.mutable_grad() = x.detach().clone();
      try {
        CapturedStep::capture(mesh, {}, [&] {
          const at::Tensor sum = (x * 2).sum();
          if (how == 0) sum.item<float>();
          if (how == 1) full_tensor(sum).cpu();
          if (how == 2) clip_grad_norm(std::vector<at::Tensor>{x}, 1.0);
        });
        ADD_FAILURE() << "captured";
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition) << error.what();
        EXPECT_THAT(error.what(), HasSubstr("being captured")) << how;
      }
      // And all goes on.
      EXPECT_EQ(host(x.detach()).sum().item<float>(), 4);
      const CapturedStep another = CapturedStep::capture(mesh, {}, [&] { (x * 2).sum(); });
      EXPECT_EQ(another.replays(), 0);
    });
  }
}

TEST(CapturedStepErrorTest, RandomNumbersOfTheHost) {
  expect_error(try_on_gpus({{"dp", 2}},
                           [](const MeshPtr& mesh) {
                             const at::Tensor x =
                                 distribute_tensor(at::ones({4}).to(at::kCUDA), mesh, {Shard(0)});
                             CapturedStep::capture(mesh, {}, [&] { at::dropout(x, 0.5, true); });
                           }),
               absl::StatusCode::kFailedPrecondition, "--config=cuda");
}

TEST(CapturedStepErrorTest, OneWithinAnother) {
  expect_error(try_on_gpus({{"dp", 1}},
                           [](const MeshPtr& mesh) {
                             CapturedStep::capture(mesh, {},
                                                   [&] { CapturedStep::capture(mesh, {}, [] {}); });
                           }),
               absl::StatusCode::kFailedPrecondition, "being captured already");
}

TEST(CapturedStepErrorTest, OneReplayedInAnother) {
  expect_error(try_on_gpus({{"dp", 1}},
                           [](const MeshPtr& mesh) {
                             CapturedStep step = CapturedStep::capture(mesh, {}, [] {});
                             CapturedStep::capture(mesh, {}, [&] { step.replay(); });
                           }),
               absl::StatusCode::kFailedPrecondition, "none is replayed in it");
}

TEST(CapturedStepErrorTest, AnotherMesh) {
  expect_error(try_on_gpus({{"dp", 2}, {"tp", 2}},
                           [](const MeshPtr& mesh) {
                             const MeshPtr tp = value_or_throw(mesh->slice({"tp"}));
                             const at::Tensor x =
                                 distribute_tensor(at::ones({4}).to(at::kCUDA), tp, {Shard(0)});
                             CapturedStep::capture(mesh, {},
                                                   [&] { redistribute(x, {Replicate()}); });
                           }),
               absl::StatusCode::kFailedPrecondition, "another mesh");
}

TEST(CapturedStepErrorTest, AnOptimizerAndAReplayOfAnotherMesh) {
  for (const bool replays : {false, true}) {
    expect_error(
        try_on_gpus({{"dp", 2}, {"tp", 2}},
                    [&](const MeshPtr& mesh) {
                      const MeshPtr tp = value_or_throw(mesh->slice({"tp"}));
                      at::Tensor p = distribute_tensor(at::ones({4}).to(at::kCUDA), tp, {Shard(0)});
                      p.requires_grad_();
                      p.mutable_grad() = p.detach().clone();
                      FusedOptimizer optimizer({p}, AdamWOptions{});
                      optimizer.step();
                      CapturedStep other = CapturedStep::capture(tp, {}, [] {});
                      CapturedStep::capture(mesh, {},
                                            [&] { replays ? other.replay() : optimizer.step(); });
                    }),
        absl::StatusCode::kFailedPrecondition, replays ? "none is replayed in it" : "another mesh");
  }
}

// Positions, a mask: they are compared when they are met first, by the host.
TEST(CapturedStepTest, PlainTensorsThatTheStepMakes) {
  on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4}).to(at::kCUDA), mesh, {Shard(0)});
    at::Tensor y;
    const auto step = [&] {
      y = x * at::arange(4, at::TensorOptions(at::kFloat).device(at::kCUDA));
    };
    try {
      CapturedStep::capture(mesh, {}, step);
      ADD_FAILURE() << "captured";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("have not compared yet"));
    }
    step();
    CapturedStep captured = CapturedStep::capture(mesh, {}, step);
    captured.replay();
    EXPECT_TRUE(at::equal(host(y), at::arange(4, at::kFloat)));
  });
}

TEST(CapturedStepErrorTest, OptimizersThatAreNot) {
  const auto with = [](const OptimizerOptions& options, bool stepped = true) {
    return try_on_gpus({{"dp", 1}}, [&, stepped](const MeshPtr& mesh) {
      at::Tensor p = distribute_tensor(at::ones({4, 4}).to(at::kCUDA), mesh, {Replicate()});
      p.requires_grad_();
      p.mutable_grad() = p.detach().clone();
      FusedOptimizer optimizer({p}, options);
      if (stepped) optimizer.step();
      CapturedStep::capture(mesh, {p}, [&] { optimizer.step(); });
    });
  };
  expect_error(with(LionOptions{}), absl::StatusCode::kUnimplemented, "Lion");
  expect_error(with(MuonOptions{}), absl::StatusCode::kUnimplemented, "Muon");
  expect_error(with(AdamWOptions{}, false), absl::StatusCode::kFailedPrecondition,
               "take a step before");
}

TEST(CapturedStepErrorTest, WhatTheStepThrowsOnOneRank) {
  const std::vector<absl::Status> results = try_on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    CapturedStep::capture(mesh, {}, [&] {
      if (mesh->rank().value == 1) throw Error(absl::DataLossError("no more data"));
    });
  });
  EXPECT_EQ(results[1].code(), absl::StatusCode::kDataLoss) << results[1];
  EXPECT_THAT(std::string(results[0].message()), HasSubstr("one has refused")) << results[0];
}

// One rank refuses before it has begun, and all of them can capture after that.
TEST(CapturedStepErrorTest, WhatOneRankRefusesIsNoCaptureOfTheOthers) {
  const std::vector<absl::Status> results = try_on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    std::vector<at::Tensor> parameters;
    if (mesh->rank().value == 0) parameters = {at::ones({2})};  // on the host
    EXPECT_THROW(CapturedStep::capture(mesh, parameters, [] {}), Error);
    const at::Tensor x = distribute_tensor(at::ones({4}).to(at::kCUDA), mesh, {Shard(0)});
    at::Tensor sum;
    CapturedStep step =
        CapturedStep::capture(mesh, {}, [&] { sum = redistribute(x.sum(), {Replicate()}); });
    step.replay();
    EXPECT_EQ(host(sum).item<float>(), 4);
  });
  for (const absl::Status& result : results) EXPECT_TRUE(result.ok()) << result;
}

TEST(CapturedStepErrorTest, AReplayThatIsRefusedCountsNoStep) {
  const std::vector<absl::Status> results = try_on_gpus({{"dp", 1}}, [](const MeshPtr& mesh) {
    std::vector<at::Tensor> p;
    for (int i = 0; i < 3; ++i) {
      p.push_back(distribute_tensor(at::ones({4}).to(at::kCUDA), mesh, {Replicate()}));
      p[i].requires_grad_();
      p[i].mutable_grad() = p[i].detach().clone();
    }
    FusedOptimizer first({p[0]}, AdamWOptions{}), second({p[1], p[2]}, AdamWOptions{});
    const auto steps = [&] {
      first.step();
      second.step();
    };
    steps();
    CapturedStep step = CapturedStep::capture(mesh, p, steps);
    const double before = first.state(0, "step").item<double>();
    second.set_state(0, "step", at::scalar_tensor(7.0f));
    try {
      step.replay();
      ADD_FAILURE() << "replayed";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(error.what(), HasSubstr("no longer are: capture it again"));
    }
    EXPECT_EQ(first.state(0, "step").item<double>(), before);
  });
  for (const absl::Status& result : results) EXPECT_TRUE(result.ok()) << result;
}

TEST(CapturedStepErrorTest, ARankThatReplaysLess) {
  const std::vector<absl::Status> results = try_on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4}).to(at::kCUDA), mesh, {Shard(0)});
    at::Tensor sum;
    CapturedStep step =
        CapturedStep::capture(mesh, {}, [&] { sum = redistribute(x.sum(), {Replicate()}); });
    step.replay();
    EXPECT_EQ(host(sum).item<float>(), 4);
    if (mesh->rank().value == 1) throw Error(absl::DataLossError("no more data"));
    step.replay();
    sum.item<float>();
  });
  EXPECT_EQ(results[1].code(), absl::StatusCode::kDataLoss) << results[1];
  EXPECT_THAT(std::string(results[0].message()), HasSubstr("no more data")) << results[0];
}

TEST(CapturedStepErrorTest, RanksThatReplayDifferentSteps) {
  expect_error(try_on_gpus({{"dp", 2}},
                           [](const MeshPtr& mesh) {
                             const at::Tensor x =
                                 distribute_tensor(at::ones({4}).to(at::kCUDA), mesh, {Shard(0)});
                             at::Tensor sum;
                             CapturedStep step = CapturedStep::capture(
                                 mesh, {}, [&] { sum = redistribute(x.sum(), {Replicate()}); });
                             step.replay();
                             // The other one computes something else.
                             mesh->rank().value == 0 ? step.replay() : void(full_tensor(x));
                             host(sum);
                           }),
               absl::StatusCode::kFailedPrecondition, "captured step");
}

}  // namespace
}  // namespace shardweave

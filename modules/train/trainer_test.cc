#include "shardweave/modules/train/trainer.h"

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/data_parallel.h"
#include "shardweave/modules/fully_shard.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/adamw.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;

// A language model over bytes, of sizes that do not divide.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(11, 5));
    up = register_module("up", torch::nn::Linear(5, 7));
    down = register_module("down", torch::nn::Linear(7, 11));
    const c10::AutoGradMode no_grad(false);
    double k = 0;
    for (at::Tensor p : parameters()) {
      p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
    }
  }
  at::Tensor loss(const TokenBatch& batch) {
    const at::Tensor scores = down(at::gelu(up(embedding(batch.tokens))));
    return at::cross_entropy_loss(scores.flatten(0, 1), batch.targets.flatten());
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};

std::vector<TokenFile> files() {
  std::string text;
  for (int i = 0; i < 400; ++i) text.push_back(static_cast<char>(i * i % 11));
  return {TokenFile::of_text(text).value()};
}
constexpr TokenLoaderOptions kBatches = {.seq = 3, .batch = 6, .seed = 5};

std::string new_path(const std::string& name) {
  std::string path = ::testing::TempDir() + "/trainer_" + name;
  std::filesystem::remove_all(path);
  return path;
}

enum class Way { kDdp, kZero2, kFsdp, kTorchOptim, kZeroOfTorch };

// A net on the mesh's first dimension, trained one of these ways.
class Trainee {
 public:
  Trainee(const MeshPtr& mesh, Way way, TrainerOptions options,
          const TokenLoaderOptions& batches = kBatches)
      : loader_(files(), batches, mesh, NamedPlacements{{"dp", Shard(0)}}) {
    distribute_module(*net_, mesh, {});
    manual_seed(mesh, 3);
    const AdamWOptions adamw = {.lr = 0.03};
    if (way == Way::kDdp) {
      sync_ = std::make_unique<GradSync>(*net_, GradSyncOptions{.bucket_bytes = 200});
      options.sync = sync_.get();
    }
    if (way == Way::kFsdp) fully_shard(*net_, mesh, {.mesh_dim = "dp"});
    if (way == Way::kZero2) {
      zero_ = std::make_unique<ZeroRedundancyOptimizer<FusedOptimizer>>(
          net_->parameters(), adamw,
          ZeroOptions{.mesh_dim = "dp", .stage = 2, .bucket_bytes = 200});
      trainer_ = std::make_unique<Trainer>(*net_, *zero_, mesh, options);
    } else if (way == Way::kZeroOfTorch) {
      zero_of_torch_ = std::make_unique<ZeroRedundancyOptimizer<torch::optim::AdamW>>(
          net_->parameters(), torch::optim::AdamWOptions(0.03).weight_decay(adamw.weight_decay),
          ZeroOptions{.mesh_dim = "dp"});
      trainer_ = std::make_unique<Trainer>(*net_, *zero_of_torch_, mesh, options);
    } else if (way == Way::kTorchOptim) {
      torch_ = std::make_unique<torch::optim::AdamW>(
          net_->parameters(), torch::optim::AdamWOptions(0.03).weight_decay(adamw.weight_decay));
      trainer_ = std::make_unique<Trainer>(*net_, *torch_, mesh, options);
    } else {
      fused_ = std::make_unique<FusedOptimizer>(net_->parameters(), adamw);
      trainer_ = std::make_unique<Trainer>(*net_, *fused_, mesh, options);
    }
  }

  TrainerResult run() {
    return trainer_->run(loader_, [&](const TokenBatch& batch) { return net_->loss(batch); });
  }
  Trainer& trainer() { return *trainer_; }
  NetImpl& net() { return *net_; }

  std::vector<at::Tensor> weights() const {
    const c10::AutoGradMode no_grad(false);
    std::vector<at::Tensor> all;
    for (const at::Tensor& p : net_->parameters()) all.push_back(full_tensor(p).clone());
    return all;
  }

 private:
  std::shared_ptr<NetImpl> net_ = std::make_shared<NetImpl>();
  TokenLoader loader_;
  std::unique_ptr<GradSync> sync_;
  std::unique_ptr<ZeroRedundancyOptimizer<FusedOptimizer>> zero_;
  std::unique_ptr<ZeroRedundancyOptimizer<torch::optim::AdamW>> zero_of_torch_;
  std::unique_ptr<torch::optim::AdamW> torch_;
  std::unique_ptr<FusedOptimizer> fused_;
  std::unique_ptr<Trainer> trainer_;
};

// The loop as one writes it by hand, on plain tensors.
std::vector<at::Tensor> by_hand(int64_t steps, int64_t accumulate, double clip_norm,
                                const Schedule& schedule, std::vector<double>* losses = nullptr) {
  NetImpl net;
  TokenLoader loader(files(), kBatches);
  FusedOptimizer optimizer(net.parameters(), AdamWOptions{.lr = 0.03});
  for (int64_t step = 0; step < steps; ++step) {
    double sum = 0;
    for (int64_t i = 0; i < accumulate; ++i) {
      const at::Tensor loss = net.loss(*loader.next());
      (loss / static_cast<double>(accumulate)).backward();
      sum += loss.item<double>();
    }
    clip_grad_norm(net.parameters(), clip_norm);
    optimizer.set_lr(0.03 * schedule(step));
    optimizer.step();
    optimizer.zero_grad();
    if (losses != nullptr) losses->push_back(sum / static_cast<double>(accumulate));
  }
  return net.parameters();
}

void expect_close(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(at::allclose(got[i], wanted[i], 1e-4, 1e-5)) << i << "\n" << got[i] << wanted[i];
  }
}

TEST(TrainerTest, StepsAreThoseOfALoopByHand) {
  const Schedule schedule = Schedule::cosine(6).warmup(2).floor(0.1);
  std::vector<double> losses;
  const std::vector<at::Tensor> wanted = by_hand(6, 3, 0.5, schedule, &losses);
  const std::vector<std::pair<Way, bool>> ways = {
      {Way::kDdp, false}, {Way::kZero2, false},      {Way::kFsdp, false},
      {Way::kFsdp, true}, {Way::kTorchOptim, false}, {Way::kZeroOfTorch, false}};
  for (const auto& [way, waits] : ways) {
    for (const std::vector<MeshDim>& dims :
         {std::vector<MeshDim>{{"dp", 1}}, {{"dp", 2}}, {{"dp", 3}}, {{"dp", 2}, {"more", 2}}}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(way) << " " << dims[0].size);
      on_mesh(dims, [&](const MeshPtr& mesh) {
        std::vector<double> got;
        Trainee trainee(mesh, way,
                        {.steps = 6,
                         .accumulate = 3,
                         .clip_norm = 0.5,
                         .schedule = schedule,
                         .fully_shard_no_sync = waits,
                         .step_done = [&](const TrainerStep& done) {
                           EXPECT_EQ(done.step, std::ssize(got) + 1);
                           got.push_back(done.loss);
                         }});
        const TrainerResult result = trainee.run();
        EXPECT_EQ(result.first_step, 0);
        EXPECT_EQ(result.last_step, 6);
        EXPECT_FALSE(result.is_stopped || result.is_exhausted);
        ASSERT_EQ(got.size(), losses.size());
        for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], losses[i], 1e-5) << i;
        expect_close(trainee.weights(), wanted);
        if (way == Way::kFsdp && dims[0].size > 1) {
          EXPECT_EQ(fully_shard_counters(mesh).reduce_scatters, 6 * (waits ? 1 : 3));
        }
      });
    }
  }
}

// A norm that is clipped before the gradients are divided by 1024 is another step.
TEST(TrainerTest, AScaleChangesNothing) {
  const Schedule schedule = Schedule::cosine(6).warmup(2).floor(0.1);
  const std::vector<at::Tensor> wanted = by_hand(6, 3, 0.05, schedule);
  for (const Way way : {Way::kDdp, Way::kZero2, Way::kFsdp}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      GradScaler scaler({.init_scale = 1024, .growth_interval = 4});
      std::vector<double> factors, norms;
      Trainee trainee(
          mesh, way,
          {.steps = 6,
           .accumulate = 3,
           .clip_norm = 0.05,
           .schedule = schedule,
           .scaler = &scaler,
           .scale_changed = [&](double factor) { factors.push_back(factor); },
           .step_done = [&](const TrainerStep& done) { norms.push_back(done.grad_norm); }});
      trainee.run();
      expect_close(trainee.weights(), wanted);
      EXPECT_EQ(factors, (std::vector<double>{2}));
      for (const double norm : norms)
        EXPECT_THAT(norm, AllOf(::testing::Gt(0.05), ::testing::Lt(5)));
    });
  }
}

TEST(TrainerTest, RunAgainItGoesOn) {
  const Schedule schedule = Schedule::linear(7).warmup(3);
  const std::vector<at::Tensor> wanted = by_hand(7, 2, 1.0, schedule);
  const std::string directory = new_path("again");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Trainer* trainer = nullptr;
    std::vector<double> grad_norms;
    Trainee trainee(mesh, Way::kFsdp,
                    {.steps = 7,
                     .accumulate = 2,
                     .clip_norm = 1.0,
                     .schedule = schedule,
                     .checkpoints = directory,
                     .keep_last = 0,
                     .step_done = [&](const TrainerStep& done) {
                       if (done.step == 3) trainer->request_stop();
                     }});
    trainer = &trainee.trainer();
    TrainerResult result = trainee.run();
    EXPECT_EQ(result.last_step, 3);
    EXPECT_TRUE(result.is_stopped);
    result = trainee.run();
    EXPECT_EQ(result.first_step, 3);
    EXPECT_EQ(result.last_step, 7);
    EXPECT_FALSE(result.is_stopped);
    expect_close(trainee.weights(), wanted);
    result = trainee.run();
    EXPECT_EQ(result.last_step, 7);
  });
  EXPECT_THAT(list_checkpoints(directory).value(), ::testing::ElementsAre(3, 7));
  // Who begins does not find out after the training.
  const absl::Status status = try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Trainee trainee(
        mesh, Way::kDdp,
        {.steps = 9, .checkpoints = directory, .step_done = [](const TrainerStep&) { FAIL(); }});
    trainee.run();
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("has checkpoints, and resume is kNo"));
}

TEST(TrainerTest, RanksThatAgreeNowAndThen) {
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Trainer* trainer = nullptr;
    Trainee trainee(mesh, Way::kDdp,
                    {.steps = 100, .stop = {.every = 4}, .step_done = [&](const TrainerStep& done) {
                       if (done.step == 5 && mesh->rank().value == 1) trainer->request_stop();
                     }});
    trainer = &trainee.trainer();
    EXPECT_EQ(trainee.run().last_step, 8);
  });
}

TEST(TrainerTest, ParametersThatTheOptimizerDoesNotHave) {
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    NetImpl net;
    distribute_module(net, mesh, {});
    FusedOptimizer optimizer(net.down->parameters(), AdamWOptions{.lr = 0.0});
    std::vector<double> norms;
    Trainer trainer(net, optimizer, mesh, {.steps = 3, .step_done = [&](const TrainerStep& done) {
                                             norms.push_back(done.grad_norm);
                                           }});
    TokenLoaderOptions all = kBatches;
    all.batch = 133;  // the same in each step
    TokenLoader loader(files(), all, mesh, NamedPlacements{{"dp", Shard(0)}});
    trainer.run(loader, [&](const TokenBatch& batch) { return net.loss(batch); });
    EXPECT_NEAR(norms[2], norms[0], 1e-4 * norms[0]);
  });
}

TEST(TrainerTest, GoesOnOnAnotherMeshAnotherWay) {
  const Schedule schedule = Schedule::linear(9).warmup(3);
  const std::vector<at::Tensor> wanted = by_hand(9, 2, 1.0, schedule);
  const std::string directory = new_path("goes_on");
  const auto run = [&](int size, Way way, int64_t stop_at, int64_t first, int64_t last) {
    on_mesh({{"dp", size}}, [&](const MeshPtr& mesh) {
      Trainer* trainer = nullptr;
      Trainee trainee(mesh, way,
                      {.steps = 9,
                       .accumulate = 2,
                       .clip_norm = 1.0,
                       .schedule = schedule,
                       .checkpoints = directory,
                       .save_every = 2,
                       .resume = Resume::kIfThere,
                       .step_done = [&](const TrainerStep& done) {
                         // One rank's wish is enough.
                         if (done.step == stop_at && mesh->rank().value == size - 1) {
                           trainer->request_stop();
                         }
                       }});
      trainer = &trainee.trainer();
      trainer->state().set_value("name", "\"mine\"");
      const TrainerResult result = trainee.run();
      EXPECT_EQ(result.first_step, first);
      EXPECT_EQ(result.last_step, last);
      EXPECT_EQ(result.is_stopped, stop_at != 0);
      EXPECT_EQ(result.signal, 0);
      EXPECT_EQ(trainer->state().value("name"), "\"mine\"");
      if (stop_at == 0) expect_close(trainee.weights(), wanted);
    });
  };
  run(2, Way::kDdp, 3, 0, 3);   // nothing is there to resume; stops beside save_every
  run(3, Way::kFsdp, 4, 3, 4);  // and on it
  run(1, Way::kZero2, 7, 4, 7);
  run(4, Way::kDdp, 0, 7, 9);
  run(2, Way::kFsdp, 0, 9, 9);  // there is nothing to do any more
}

// The checksums of pieces are of pieces that ranks read whole, as on the mesh that saved them.
TEST(TrainerTest, OnAnotherMeshABitThatHasChangedIsNoticed) {
  const std::string directory = new_path("changed");
  const auto run = [&](int size, const Placement& cut, int64_t steps) {
    return try_on_mesh({{"dp", size}}, [&](const MeshPtr& mesh) {
      Trainee trainee(mesh, Way::kDdp,
                      {.steps = steps, .checkpoints = directory, .resume = Resume::kIfThere});
      trainee.trainer().state().add_tensor("rows",
                                           distribute_tensor(at::ones({7, 2}), mesh, {cut}));
      trainee.run();
    });
  };
  EXPECT_EQ(run(2, Replicate(), 1), absl::OkStatus());
  // Whole in one of the files.
  int changed = 0;
  for (const char* name : {"/rank-00000.safetensors", "/rank-00001.safetensors"}) {
    const std::string path = directory + "/step-000001" + name;
    const auto opened = value_or_throw(SafetensorsFile::open(path));
    const StoredTensor* tensor = opened->find("rows");
    if (tensor == nullptr) continue;
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    uint64_t header = 0;
    file.read(reinterpret_cast<char*>(&header), sizeof(header));
    const auto last = static_cast<int64_t>(sizeof(header) + header) + tensor->end - 4;
    file.seekg(last);
    const auto byte = static_cast<char>(file.get());
    file.seekp(last);
    file.put(static_cast<char>(byte ^ 1));
    ++changed;
  }
  EXPECT_EQ(changed, 1);
  EXPECT_EQ(run(2, Replicate(), 2).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(run(3, Shard(0), 2).code(), absl::StatusCode::kDataLoss);
}

// A sum of many in 16 bits stands still where its neighbours are further away than a summand.
TEST(TrainerTest, LossesOf16BitsAreAddedUpInMore) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    std::vector<double> losses;
    Trainee trainee(mesh, Way::kDdp,
                    {.steps = 1, .accumulate = 600, .step_done = [&](const TrainerStep& done) {
                       losses.push_back(done.loss);
                     }});
    const at::Tensor& weight = trainee.net().down->bias;
    trainee.trainer().run([&](int64_t) -> std::optional<at::Tensor> {
      return (weight.sum() * 0 + 3).to(at::kBFloat16);
    });
    EXPECT_EQ(losses, std::vector<double>{3});
  });
}

TEST(TrainerTest, AGroupThatAStepAddsIsScheduledAndSaved) {
  const std::string directory = new_path("group");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    NetImpl net;
    distribute_module(net, mesh, {});
    FusedOptimizer optimizer({net.up->weight}, AdamWOptions{.lr = 1});
    std::vector<double> rates;
    const Schedule schedule = Schedule::linear(4);
    Trainer trainer(net, optimizer, mesh,
                    {.steps = 4,
                     .schedule = schedule,
                     .checkpoints = directory,
                     .step_done = [&](const TrainerStep& done) {
                       if (done.step == 2) {
                         optimizer.add_group({{net.down->weight}, AdamWOptions{.lr = 8}});
                       }
                       if (optimizer.num_groups() == 2) rates.push_back(optimizer.lr(1));
                     }});
    TokenLoader loader(files(), kBatches, mesh, NamedPlacements{{"dp", Shard(0)}});
    trainer.run(loader, [&](const TokenBatch& batch) {
      if (optimizer.num_groups() == 2) rates.push_back(optimizer.lr(1));
      return net.loss(batch);
    });
    // As it was given; in steps 2 and 3, each in its forward and when it is done.
    EXPECT_EQ(rates, (std::vector<double>{8, 8 * schedule(2), 8 * schedule(3), 8 * schedule(3),
                                          8 * schedule(3)}));
  });
  const absl::StatusOr<Manifest> manifest = read_manifest(directory + "/" + checkpoint_name(4));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_TRUE(manifest->tensors.contains("optimizer.down.weight.exp_avg"));
}

TEST(TrainerTest, CopiesBesideTraining) {
  for (const Way way : {Way::kDdp, Way::kFsdp, Way::kZero2, Way::kTorchOptim}) {
    std::vector<std::vector<at::Tensor>> weights;
    for (const bool beside : {false, true}) {
      const std::string directory = new_path("copies_beside");
      const auto options = [&](int64_t steps) {
        return TrainerOptions{.steps = steps,
                              .accumulate = 2,
                              .checkpoints = directory,
                              .save_every = 1,
                              .keep_last = 0,
                              .copy_beside_training = beside,
                              .resume = Resume::kIfThere};
      };
      on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) { Trainee(mesh, way, options(3)).run(); });
      std::filesystem::remove_all(directory + "/" + checkpoint_name(3));
      on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
        Trainee trainee(mesh, way, options(4));  // from what was saved beside step 3
        EXPECT_EQ(trainee.run().first_step, 2);
        const std::vector<at::Tensor> all = trainee.weights();
        if (mesh->rank() == Rank(0)) weights.push_back(all);
      });
    }
    ASSERT_EQ(weights.size(), 2u);
    for (size_t i = 0; i < weights[0].size(); ++i) EXPECT_TRUE(weights[0][i].equal(weights[1][i]));
  }
  // What the loss writes to parameters it cannot see.
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Trainee trainee(mesh, Way::kDdp,
                    {.steps = 4,
                     .checkpoints = new_path("writes"),
                     .save_every = 1,
                     .copy_beside_training = true});
    TokenLoader loader(files(), kBatches, mesh, NamedPlacements{{"dp", Shard(0)}});
    absl::Status status;
    try {
      trainee.trainer().run([&](int64_t) -> std::optional<at::Tensor> {
        {
          const c10::AutoGradMode no_grad(false);
          trainee.net().down->weight.clamp_(-1, 1);
        }
        return trainee.net().loss(*loader.next());
      });
    } catch (const Error& error) {
      status = error.status();
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no copy_beside_training"));
  });
}

TEST(TrainerTest, ResumesAtTheNextBatchWhateverIsAccumulated) {
  const std::string directory = new_path("accumulate");
  const auto run = [&](int64_t steps, int64_t accumulate) {
    std::vector<int64_t> batches;
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      Trainee trainee(mesh, Way::kDdp,
                      {.steps = steps,
                       .accumulate = accumulate,
                       .checkpoints = directory,
                       .keep_last = 0,
                       .resume = Resume::kIfThere});
      TokenLoader loader(files(), kBatches, mesh, NamedPlacements{{"dp", Shard(0)}});
      trainee.trainer().run([&](int64_t batch) -> std::optional<at::Tensor> {
        if (mesh->rank() == Rank(0)) batches.push_back(batch);
        return trainee.net().loss(*loader.next());
      });
    });
    return batches;
  };
  EXPECT_EQ(run(2, 3), (std::vector<int64_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(run(4, 2), (std::vector<int64_t>{6, 7, 8, 9}));
  EXPECT_EQ(run(5, 1), std::vector<int64_t>{10});
  // A checkpoint of before batches were counted has steps of `accumulate` each.
  const std::string old = new_path("accumulate_old");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Trainee trainee(mesh, Way::kDdp, {.steps = 1});
    trainee.run();
    StateDict state;
    add_module(state, trainee.net());
    for (const auto& late : trainee.trainer().state().late()) state.add_late(late);
    for (const auto& [name, value] : trainee.trainer().state().values()) {
      if (name == "random") state.add_value(name, value);
    }
    save_checkpoint(old, 2, state, mesh);
  });
  std::filesystem::remove_all(directory);
  std::filesystem::rename(old, directory);
  EXPECT_EQ(run(3, 2), (std::vector<int64_t>{4, 5}));
}

TEST(TrainerTest, ASignalEndsAllRanksAtOneStep) {
  auto signals = StopSignals::create().value();
  const std::string directory = new_path("signal");
  std::mutex mutex;
  std::set<int64_t> steps;
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    Trainee trainee(mesh, Way::kDdp,
                    {.steps = 1000,
                     .checkpoints = directory,
                     .signals = signals.get(),
                     .step_done = [&](const TrainerStep& done) {
                       if (done.step == 4 && mesh->rank().value == 1) std::raise(SIGUSR1);
                     }});
    const TrainerResult result = trainee.run();
    EXPECT_TRUE(result.is_stopped);
    EXPECT_EQ(result.signal, SIGUSR1);
    const std::lock_guard lock(mutex);
    steps.insert(result.last_step);
  });
  ASSERT_EQ(steps.size(), 1);
  EXPECT_THAT(*steps.begin(), AllOf(::testing::Ge(4), ::testing::Le(5)));
  EXPECT_THAT(list_checkpoints(directory).value(), ::testing::ElementsAre(*steps.begin()));
}

TEST(TrainerTest, TellsWhatItDoes) {
  const std::string log = new_path("log.jsonl"), events = new_path("events");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    std::ostringstream bar;
    Trainee* me = nullptr;
    Trainee trainee(mesh, Way::kFsdp,
                    {.steps = 5,
                     .schedule = Schedule::constant().warmup(2),
                     .evaluate =
                         [&] {
                           EXPECT_FALSE(me->net().is_training());
                           EXPECT_FALSE(c10::GradMode::is_enabled());
                           return std::vector<Metric>{{"evaluation_loss", 7}};
                         },
                     .evaluate_every = 2,
                     .log = log,
                     .events = events,
                     .progress = &bar,
                     .throughput = {.tokens_per_step = 18}});
    me = &trainee;
    trainee.net().up->eval();
    trainee.run();
    EXPECT_TRUE(trainee.net().is_training());
    EXPECT_TRUE(trainee.net().down->is_training());
    EXPECT_FALSE(trainee.net().up->is_training());
    EXPECT_EQ(bar.str().empty(), mesh->rank().value != 0);
    if (mesh->rank().value == 0) {
      EXPECT_THAT(bar.str(), AllOf(HasSubstr("5/5"), HasSubstr("tokens/s")));
    }
  });
  std::ifstream file(log);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(lines.size(), 5);
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(lines[i]["step"], i + 1);
    EXPECT_GT(lines[i]["loss"].get<double>(), 0);
    EXPECT_GT(lines[i]["grad_norm"].get<double>(), 0);
    EXPECT_NEAR(lines[i]["lr"].get<double>(), 0.03 * std::min(1.0, static_cast<double>(i) / 2),
                1e-9);
    EXPECT_EQ(lines[i].contains("evaluation_loss"), i == 1 || i == 3 || i == 4);
    EXPECT_TRUE(lines[i].contains("tokens_per_second"));
  }
  EXPECT_FALSE(std::filesystem::is_empty(events));
}

// Full from the third line on.
class FullWriter final : public MetricsWriter {
 public:
  using MetricsWriter::write;
  absl::Status write(int64_t step, absl::Span<const Metric>, absl::Time) override {
    return step < 3 ? absl::OkStatus() : absl::ResourceExhaustedError("the disk is full");
  }
  absl::Status flush() override { return absl::OkStatus(); }
};

TEST(TrainerTest, MetricsThatCannotBeWrittenEndARunInOrder) {
  const std::string directory = new_path("full");
  std::mutex mutex;
  int told = 0;
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    FullWriter writer;
    Trainee trainee(mesh, Way::kDdp,
                    {.steps = 100, .checkpoints = directory, .writers = {&writer}});
    try {
      trainee.run();
      FAIL();
    } catch (const Error& error) {
      EXPECT_TRUE(absl::IsResourceExhausted(error.status())) << error.status();
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 0"), HasSubstr("the disk is full")));
    }
    const std::lock_guard lock(mutex);
    ++told;
  });
  EXPECT_EQ(told, 2);
  EXPECT_THAT(list_checkpoints(directory).value(), ::testing::ElementsAre(4));
}

struct Writer final : MetricsWriter {
  using MetricsWriter::write;
  absl::Status write(int64_t, absl::Span<const Metric> metrics, absl::Time) override {
    ++lines;
    last = metrics.back().name;
    last_has_loss = metrics[0].name == "loss";
    return absl::OkStatus();
  }
  absl::Status flush() override { return absl::OkStatus(); }
  int lines = 0;
  std::string last;
  bool last_has_loss = false;
};

TEST(TrainerTest, BatchesThatAreLeftOverAreLeftOut) {
  // 7 batches: three steps of two.
  for (const Way way : {Way::kDdp, Way::kZero2, Way::kFsdp}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      TokenLoaderOptions batches = kBatches;
      batches.epochs = 1;
      batches.batch = 19;  // of 133 samples
      Writer writer;
      Trainee trainee(mesh, way,
                      {.steps = 100,
                       .accumulate = 2,
                       .evaluate = [] { return std::vector<Metric>{{"evaluation_loss", 7}}; },
                       .writers = {&writer}},
                      batches);
      const TrainerResult result = trainee.run();
      const bool is_first = mesh->rank().value == 0;
      EXPECT_EQ(writer.lines, is_first ? 4 : 0);  // and what was evaluated at the end
      EXPECT_EQ(writer.last, is_first ? "evaluation_loss" : "");
      EXPECT_EQ(writer.last_has_loss, is_first);  // a step that is written again is written whole
      // What was left out comes again, if there is more.
      EXPECT_THAT(trainee.trainer().state().value("loader"), HasSubstr("\"sample\":114"));
      EXPECT_TRUE(result.is_exhausted);
      EXPECT_EQ(result.last_step, 3);
      for (const at::Tensor& p : trainee.net().parameters()) {
        EXPECT_TRUE(!p.grad().defined() || full_tensor(p.grad()).eq(0).all().item<bool>());
      }
    });
  }
}

// Nor do buffers that forwards change, as statistics of a batch norm.
TEST(TrainerTest, BuffersDoNotCountBatchesThatAreLeftOut) {
  struct CountingImpl : NetImpl {
    CountingImpl() { seen = register_buffer("seen", at::zeros({3})); }
    at::Tensor loss_of(const at::Tensor& tokens) {
      seen.add_(1);
      return down(at::gelu(up(embedding(tokens)))).square().mean();
    }
    at::Tensor seen;
  };
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const auto net = std::make_shared<CountingImpl>();
    distribute_module(*net, mesh, {});
    FusedOptimizer optimizer(net->parameters(), AdamWOptions{.lr = 0.03});
    Trainer trainer(*net, optimizer, mesh, {.steps = 4, .accumulate = 3});
    int64_t end = 8;  // two steps, and two batches more
    const auto loss = [&](int64_t batch) -> std::optional<at::Tensor> {
      if (batch == end) return std::nullopt;
      return net->loss_of(
          distribute_tensor(at::full({4, 3}, batch % 11, at::kLong), mesh, {Shard(0)}));
    };
    EXPECT_EQ(trainer.run(loss).last_step, 2);
    EXPECT_TRUE(full_tensor(net->seen).eq(6).all().item<bool>()) << full_tensor(net->seen);
    end = 100;
    EXPECT_EQ(trainer.run(loss).last_step, 4);
    EXPECT_TRUE(full_tensor(net->seen).eq(12).all().item<bool>()) << full_tensor(net->seen);
  });
}

// Before the first step, not after the last.
TEST(TrainerTest, ADirectoryThatCannotBeMadeIsAnErrorAtOnce) {
  const std::string file = new_path("no_directory");
  std::ofstream(file) << "a file";
  for (const std::string& path : {file, file + "/below", std::string("/proc/no_directory")}) {
    int steps = 0;
    const absl::Status status = try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      Trainee trainee(
          mesh, Way::kDdp,
          {.steps = 3, .checkpoints = path, .step_done = [&](const TrainerStep&) { ++steps; }});
      trainee.run();
    });
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(status.message(), HasSubstr("no_directory")) << status;
    EXPECT_EQ(steps, 0);
  }
}

// What time does not mend ends a run, which would go on unsaved.
TEST(TrainerTest, ASaveThatCannotWorkLaterEndsTheRunAtTheNext) {
  const std::string path = new_path("cannot_work");
  int steps = 0;
  const absl::Status status = try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const bool is_first = mesh->rank() == Rank(0);
    Trainee trainee(mesh, Way::kDdp,
                    {.steps = 6,
                     .checkpoints = path,
                     .save_every = 2,
                     .step_done = [&](const TrainerStep& done) {
                       if (!is_first) return;
                       steps = static_cast<int>(done.step);
                       if (done.step == 1) std::filesystem::create_directory(path + "/step-000002");
                     }});
    trainee.run();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
  EXPECT_EQ(steps, 4);
}

// Whatever was in the way of the last save: it is tried again.
TEST(TrainerTest, TheLastSaveIsTriedTwice) {
  // Somebody reads what is said, and sees to it.
  class Helper : public c10::WarningHandler {
   public:
    explicit Helper(std::string obstacle) : obstacle_(std::move(obstacle)) {}
    void process(const c10::Warning& warning) override {
      if (warning.msg().find("is there already") == std::string::npos) return;
      std::filesystem::remove_all(obstacle_);
    }

   private:
    const std::string obstacle_;
  };
  for (const bool is_mended : {true, false}) {
    // With and without one that is under way when the run ends.
    for (const int64_t save_every : {int64_t{0}, int64_t{3}}) {
      const std::string path = new_path("twice");
      const std::string obstacle = path + "/step-000003";
      const absl::Status status = try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
        const bool is_first = mesh->rank() == Rank(0);
        Helper helper(is_first && is_mended ? obstacle : "");
        const c10::WarningUtils::WarningHandlerGuard guard(&helper);
        Trainee trainee(mesh, Way::kDdp,
                        {.steps = 3,
                         .checkpoints = path,
                         .save_every = save_every,
                         .step_done = [&](const TrainerStep& done) {
                           if (is_first && done.step == 2) {
                             std::filesystem::create_directory(obstacle);
                           }
                         }});
        trainee.run();
      });
      EXPECT_EQ(status.code(), is_mended ? absl::StatusCode::kOk : absl::StatusCode::kAlreadyExists)
          << status;
      EXPECT_EQ(std::filesystem::exists(obstacle + "/manifest.json"), is_mended);
    }
  }
}

// A job that is started again while the one before still saves.
TEST(TrainerTest, AnotherRunThatSavesThereIsAnErrorBeforeAnythingIsLoaded) {
  const std::string path = new_path("another_run");
  const absl::Status status = try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Trainee(mesh, Way::kDdp, {.steps = 1, .checkpoints = path}).run();
    Checkpointer other(path, mesh);
    other.open();
    Trainee again(mesh, Way::kDdp, {.steps = 2, .checkpoints = path, .resume = Resume::kIfThere});
    const std::vector<at::Tensor> before = again.weights();
    EXPECT_THROW(again.run(), Error);
    const std::vector<at::Tensor> after = again.weights();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i]));
    // One that has nothing to do saves nothing.
    Trainee done(mesh, Way::kDdp, {.steps = 1, .checkpoints = path, .resume = Resume::kIfThere});
    EXPECT_EQ(done.run().last_step, 1);
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A gradient hook does not learn of what is left out.
TEST(TrainerTest, AHookIsToldWhatIsLeftOut) {
  struct Sums final : GradientHook {
    std::string name() const override { return "sums"; }
    void finish(GradientBucket& bucket) override {
      bucket.all_reduce(bucket.flat);
      bucket.wait();
      ++(bucket.is_discarded ? discarded : finished);
    }
    int discarded = 0, finished = 0;
  };
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const auto net = std::make_shared<NetImpl>();
    const auto hook = std::make_shared<Sums>();
    GradSync sync = distributed_data_parallel(*net, mesh, {.sync = {.hook = hook}});
    FusedOptimizer optimizer(net->parameters(), AdamWOptions{.lr = 0.03});
    TokenLoaderOptions batches = kBatches;
    batches.epochs = 1;
    batches.batch = 19;  // 7 batches: three steps of two
    TokenLoader loader(files(), batches, mesh, NamedPlacements{{"dp", Shard(0)}});
    Trainer trainer(*net, optimizer, mesh, {.steps = 100, .accumulate = 2, .sync = &sync});
    const TrainerResult result =
        trainer.run(loader, [&](const TokenBatch& batch) { return net->loss(batch); });
    EXPECT_EQ(result.last_step, 3);
    EXPECT_GT(hook->finished, 0);
    EXPECT_EQ(hook->finished % 3, 0);
    EXPECT_EQ(hook->discarded, hook->finished / 3);
  });
}

// Of steps that are taken, and no other; a table of them is a schedule.
TEST(TrainerTest, TheScheduleIsAskedForStepsThatThereAre) {
  const std::string directory = new_path("table");
  const auto table = [](int64_t step) {
    return std::vector<double>{1, 0.5, 0.25}.at(static_cast<size_t>(step));
  };
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    for (int run = 0; run < 2; ++run) {  // the second has nothing to do
      Trainee trainee(
          mesh, Way::kFsdp,
          {.steps = 3, .schedule = table, .checkpoints = directory, .resume = Resume::kIfThere});
      const TrainerResult result = trainee.run();
      EXPECT_EQ(result.first_step, run == 0 ? 0 : 3);
      EXPECT_EQ(result.last_step, 3);
    }
  });
  EXPECT_EQ(list_checkpoints(directory).value(), std::vector<int64_t>{3});
}

TEST(TrainerTest, AScalerSkipsAStepAndIsSaved) {
  const std::string directory = new_path("scaler");
  for (const int size : {2, 3}) {
    on_mesh({{"dp", size}}, [&](const MeshPtr& mesh) {
      GradScaler scaler({.init_scale = 1024, .growth_interval = 100});
      std::vector<bool> skipped;
      Trainee* me = nullptr;
      Trainee trainee(
          mesh, Way::kFsdp,
          {.steps = size == 2 ? 3 : 4,
           .scaler = &scaler,
           .checkpoints = directory,
           .resume = Resume::kIfThere,
           .step_done = [&](const TrainerStep& done) { skipped.push_back(done.is_skipped); }});
      me = &trainee;
      int64_t calls = 0;
      TokenLoader loader(files(), kBatches, mesh, NamedPlacements{{"dp", Shard(0)}});
      const TrainerResult result = trainee.trainer().run([&](int64_t) -> std::optional<at::Tensor> {
        const at::Tensor loss = me->net().loss(*loader.next());
        return size == 2 && ++calls == 2 ? loss * std::numeric_limits<double>::infinity() : loss;
      });
      if (size == 2) {
        EXPECT_EQ(skipped, (std::vector<bool>{false, true, false}));
      } else {
        EXPECT_EQ(result.first_step, 3);
      }
      EXPECT_EQ(scaler.scale(), 512);
      EXPECT_EQ(scaler.growth_tracker(), size == 2 ? 1 : 2);
    });
  }
}

absl::Status error_of(const TrainerOptions& options, const TrainerOptions& last_ranks) {
  return try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Trainee trainee(mesh, Way::kFsdp, mesh->rank().value == 0 ? options : last_ranks);
    trainee.run();
  });
}
absl::Status error_of(const TrainerOptions& options) {
  return error_of(options, options);
}

TEST(TrainerTest, SaysWhatIsWrong) {
  const auto says = [](const absl::Status& status, absl::StatusCode code, const std::string& text) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  using enum absl::StatusCode;
  says(error_of({.steps = 0}), kInvalidArgument, "steps is 0; wanted 1 or more");
  says(error_of({.accumulate = 0}), kInvalidArgument, "accumulate is 0; wanted 1 or more");
  says(error_of({.clip_norm = std::nan("")}), kInvalidArgument, "clip_norm is nan");
  says(error_of({.schedule = nullptr}), kInvalidArgument, "schedule is empty");
  says(error_of({.keep_last = -1}), kInvalidArgument, "keep_last is -1; wanted 0 or more");
  says(error_of({.save_timeout = absl::ZeroDuration()}), kInvalidArgument, "save_timeout is 0");
  says(error_of({.throughput = {.tokens_per_step = 0}}), kInvalidArgument,
       "throughput.tokens_per_step is 0");
  says(error_of({.clip_norm = 1}, {.clip_norm = 1.0000001}), kInvalidArgument,
       "differ between ranks");
  says(error_of({.schedule = [](int64_t) -> double { throw std::runtime_error("no schedule"); }}),
       kInternal, "no schedule");
  says(error_of({.save_every = 3}), kInvalidArgument, "checkpoints is \"\"");
  says(error_of({.resume = Resume::kNewest}), kInvalidArgument, "checkpoints is \"\"");
  says(error_of({.evaluate_every = 3}), kInvalidArgument, "evaluate is empty");
  says(error_of({.writers = {nullptr}}), kInvalidArgument, "a writer is null");
  says(error_of({.steps = 5}, {.steps = 6}), kInvalidArgument, "the options differ between ranks");
  says(error_of({}, {.step_done = [](const TrainerStep&) {}}), kInvalidArgument,
       "the options differ between ranks");
  says(error_of({.steps = 5}, {.steps = 0}), kInvalidArgument, "rank 1: steps is 0");
  says(error_of({.checkpoints = new_path("none"), .resume = Resume::kNewest}), kNotFound, "none");
  // A file for a directory, on the rank that writes.
  says(error_of({.log = "/dev/null/log"}), kFailedPrecondition, "/dev/null/log");
}

TEST(TrainerTest, AGradientThatIsNotFiniteIsAnErrorBeforeTheStep) {
  for (const bool allowed : {false, true}) {
    std::mutex mutex;
    int errors = 0;
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      Trainee trainee(mesh, Way::kFsdp, {.steps = 4, .allow_nonfinite = allowed});
      TokenLoader loader(files(), kBatches, mesh, NamedPlacements{{"dp", Shard(0)}});
      int64_t calls = 0;
      std::vector<at::Tensor> before;
      try {
        trainee.trainer().run([&](int64_t) -> std::optional<at::Tensor> {
          if (++calls == 3) before = trainee.weights();
          const at::Tensor loss = trainee.net().loss(*loader.next());
          return calls == 3 ? loss * std::numeric_limits<double>::quiet_NaN() : loss;
        });
        EXPECT_TRUE(allowed);
      } catch (const Error& error) {
        EXPECT_FALSE(allowed);
        EXPECT_TRUE(absl::IsOutOfRange(error.status())) << error.status();
        EXPECT_THAT(error.what(), HasSubstr("in step 3"));
        const std::vector<at::Tensor> after = trainee.weights();
        for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i]));
        const std::lock_guard lock(mutex);
        ++errors;
      }
    });
    EXPECT_EQ(errors, allowed ? 0 : 2);
  }
}

TEST(TrainerTest, AnEvaluationThatFails) {
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    for (const bool has_name : {false, true}) {
      Trainee trainee(mesh, Way::kDdp, {.steps = 1, .evaluate = [&]() -> std::vector<Metric> {
                                          if (!has_name)
                                            throw Error(absl::DataLossError("no such file"));
                                          return {{"loss", 1}};
                                        }});
      try {
        trainee.run();
        FAIL();
      } catch (const Error& error) {
        EXPECT_THAT(error.what(),
                    HasSubstr(has_name ? "evaluate has given a metric 'loss'" : "no such file"));
      }
      EXPECT_TRUE(trainee.net().is_training());
    }
  });
}

TEST(TrainerTest, BatchesOfOnesOwnComeByTheirNumbers) {
  const std::string directory = new_path("numbers");
  for (const int size : {2, 3}) {
    on_mesh({{"dp", size}}, [&](const MeshPtr& mesh) {
      Trainee trainee(mesh, Way::kFsdp,
                      {.steps = 5,
                       .accumulate = 2,
                       .checkpoints = directory,
                       .keep_last = 0,
                       .resume = Resume::kIfThere});
      TokenLoaderOptions all = kBatches;
      all.shuffle = false;
      std::vector<int64_t> numbers;
      const int64_t end = size == 2 ? 5 : 100;  // one is left over
      const TrainerResult result =
          trainee.trainer().run([&](int64_t batch) -> std::optional<at::Tensor> {
            if (batch == end) return std::nullopt;
            numbers.push_back(batch);
            TokenLoader loader(files(), all, mesh, NamedPlacements{{"dp", Shard(0)}});
            return trainee.net().loss(*loader.next());
          });
      EXPECT_EQ(numbers, size == 2 ? (std::vector<int64_t>{0, 1, 2, 3, 4})
                                   : (std::vector<int64_t>{4, 5, 6, 7, 8, 9}));
      EXPECT_EQ(result.is_exhausted, size == 2);
    });
  }
}

TEST(TrainerTest, AModuleThatNobodyHasDistributed) {
  const absl::Status status = try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    NetImpl net;
    FusedOptimizer optimizer(net.parameters(), AdamWOptions{});
    Trainer trainer(net, optimizer, mesh, {.steps = 1});
  });
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no parameter of the module is a DTensor"));
}

TEST(TrainerTest, ALossThatIsNoNumber) {
  const absl::Status status = try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Trainee trainee(mesh, Way::kDdp, {.steps = 1});
    trainee.trainer().run(
        [&](int64_t) -> std::optional<at::Tensor> { return zeros({2}, mesh, {Replicate()}); });
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("the loss has 2 elements; wanted a number"));
}

// Plain tensors draw from LibTorch's generator, which a run of one rank has to itself.
TEST(TrainerTest, AModuleThatNobodyHasDistributedResumesWithItsRandomNumbers) {
  const auto weights = [](const std::string& directory, std::vector<int64_t> ends) {
    std::vector<at::Tensor> result;
    for (size_t i = 0; i < ends.size(); ++i) {
      on_mesh({{"dp", 1}}, [&](const MeshPtr& mesh) {
        at::manual_seed(i == 0 ? 5 : 99);  // a process that begins again has other numbers
        NetImpl net;
        FusedOptimizer optimizer(net.parameters(), AdamWOptions{.lr = 0.01});
        Trainer* running = nullptr;
        TrainerOptions options;
        options.steps = 6;
        options.checkpoints = directory;
        options.resume = Resume::kIfThere;
        options.evaluate_every = 2;
        options.evaluate = [&]() -> std::vector<Metric> {
          return {{"noise", at::rand({3}).sum().item<double>()}};
        };
        options.step_done = [&](const TrainerStep& done) {
          if (done.step == ends[i]) running->request_stop();
        };
        Trainer trainer(net, optimizer, mesh, options);
        running = &trainer;
        trainer.run([&](int64_t batch) -> std::optional<at::Tensor> {
          const at::Tensor tokens =
              (at::arange(12, at::kLong) * 5 + batch).remainder(11).view({3, 4});
          const at::Tensor x = at::dropout(net.embedding(tokens), 0.5, /*train=*/true);
          const at::Tensor scores = net.down(at::gelu(net.up(x)));
          return at::cross_entropy_loss(scores.flatten(0, 1), tokens.flatten());
        });
        result.clear();
        for (const at::Tensor& p : net.parameters()) result.push_back(p.detach().clone());
      });
    }
    return result;
  };
  const std::vector<at::Tensor> wanted = weights(new_path("unbroken"), {6});
  const std::vector<at::Tensor> got = weights(new_path("broken"), {3, 6});
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << i;
}

}  // namespace
}  // namespace shardweave

// Save on one mesh under one plan, load on another under another: the same bits, and training goes on
// as if nothing had been.
#include "shardweave/modules/checkpoint/checkpointer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <set>

#include "ATen/ops/_neg_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/modules/checkpoint/safetensors.h"
#include "shardweave/modules/checkpoint/safetensors_tensor.h"
#include "shardweave/modules/checkpoint/testing/faulty_file_system.h"
#include "shardweave/modules/checkpoint/testing/training.h"
#include "shardweave/modules/nn/llama.h"
#include "shardweave/modules/non_persistent_buffers.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/adam.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::new_directory;
using ::testing::Not;
using testing::on_mesh;
using testing::Plan;
using testing::Training;
using testing::try_on_mesh;
using ::testing::UnorderedElementsAre;
namespace fs = std::filesystem;

using Mesh = std::vector<MeshDim>;
constexpr int64_t kBefore = 3, kAfter = 3;

std::vector<double> unbroken() {
  std::vector<double> losses;
  on_mesh({{"dp", 1}}, [&](const MeshPtr& mesh) {
    Training training(mesh, Plan::kDdp);
    for (int64_t step = 0; step < kBefore + kAfter; ++step) losses.push_back(training.step(step));
  });
  return losses;
}

TEST(CheckpointTest, LoadsOnAnyMeshUnderAnyPlanAndGoesOn) {
  const std::vector<double> oracle = unbroken();
  struct Way {
    Mesh mesh;
    Plan plan;
  };
  const std::vector<Way> savers = {{{{"dp", 2}, {"tp", 2}}, Plan::kTp},
                                   {{{"dp", 2}, {"tp", 2}}, Plan::kFsdp},
                                   {{{"dp", 3}}, Plan::kZero},
                                   {{{"dp", 3}}, Plan::kTorchOptim}};
  const std::vector<Way> loaders = {{{{"dp", 4}}, Plan::kFsdp},
                                    {{{"dp", 4}}, Plan::kTp},
                                    {{{"dp", 1}}, Plan::kDdp},
                                    {{{"dp", 2}}, Plan::kZero},
                                    {{{"dp", 2}}, Plan::kTorchOptim}};
  int number = 0;
  for (const Way& saver : savers) {
    const std::string directory = new_directory("any_" + std::to_string(number++));
    std::map<std::string, at::Tensor> wanted;
    on_mesh(saver.mesh, [&](const MeshPtr& mesh) {
      Training training(mesh, saver.plan);
      for (int64_t step = 0; step < kBefore; ++step) training.step(step);
      training.state().set_value("epoch", "7");
      save_checkpoint(directory, kBefore, training.state(), mesh);
      auto values = training.values();
      if (mesh->rank() == Rank(0)) wanted = std::move(values);
    });
    EXPECT_TRUE(verify_checkpoint(directory + "/step-000003").ok());
    for (const Way& loader : loaders) {
      SCOPED_TRACE(std::string(testing::name_of(saver.plan)) + " to " +
                   testing::name_of(loader.plan));
      on_mesh(loader.mesh, [&](const MeshPtr& mesh) {
        Training training(mesh, loader.plan);
        training.step(99);  // other values, and a state, before it is loaded
        const LoadedCheckpoint loaded =
            load_checkpoint(directory, training.state(), mesh, {.verify = true});
        EXPECT_EQ(loaded.step, kBefore);
        EXPECT_TRUE(loaded.missing.empty());
        EXPECT_LE(static_cast<double>(loaded.bytes_read),
                  1.01 * static_cast<double>(loaded.bytes_kept));
        EXPECT_EQ(training.state().value("epoch"), "7");
        const auto got = training.values();
        if (mesh->rank() == Rank(0)) expect_equal(got, wanted);
        for (int64_t step = kBefore; step < kBefore + kAfter; ++step) {
          EXPECT_NEAR(training.step(step), oracle[static_cast<size_t>(step)], 2e-5) << step;
        }
      });
    }
  }
}

TEST(CheckpointTest, WhatIsLoadedReadsNoByteTooMany) {
  const std::string directory = new_directory("bytes");
  on_mesh({{"dp", 8}}, [&](const MeshPtr& mesh) {
    StateDict state;
    for (int i = 0; i < 4; ++i) {
      state.add_tensor("w" + std::to_string(i),
                       randn({101, 3000}, mesh, {i % 2 == 0 ? Shard(0) : Shard(1)}));
    }
    save_checkpoint(directory, 1, state, mesh);
  });
  auto counting = std::make_shared<testing::FaultyFileSystem>(testing::Fault());
  on_mesh({{"dp", 6}}, [&](const MeshPtr& mesh) {
    StateDict state;
    for (int i = 0; i < 4; ++i) {
      state.add_tensor("w" + std::to_string(i),
                       zeros({101, 3000}, mesh, {i < 2 ? Shard(0) : Shard(1)}));
    }
    const LoadedCheckpoint loaded =
        load_checkpoint(directory, state, mesh, {.file_system = counting});
    EXPECT_EQ(loaded.bytes_read, loaded.bytes_kept);
  });
  // All of it once, and headers: rows are so long that no gap between parts of them is read.
  EXPECT_LE(static_cast<double>(counting->bytes_read()), 1.01 * 4 * 101 * 3000 * 4 + 6 * 8 * 600);
}

TEST(CheckpointTest, EveryOptimizerComesBack) {
  using namespace torch::optim;
  const std::string directory = new_directory("optimizers");
  const auto make = [](int kind,
                       const std::vector<at::Tensor>& parameters) -> std::unique_ptr<Optimizer> {
    switch (kind) {
      case 0:
        return std::make_unique<SGD>(parameters, SGDOptions(0.1).momentum(0.9));
      case 1:
        return std::make_unique<Adam>(parameters, torch::optim::AdamOptions(0.01).amsgrad(true));
      case 2:
        return std::make_unique<RMSprop>(parameters, RMSpropOptions(0.01).momentum(0.5));
      default:
        return std::make_unique<Adagrad>(parameters, AdagradOptions(0.1));
    }
  };
  for (const bool before_first_step : {false, true}) {
    for (int kind = 0; kind < 4; ++kind) {
      SCOPED_TRACE(kind);
      fs::remove_all(directory);
      std::vector<double> wanted;
      const auto train = [&](const MeshPtr& mesh, bool plain, bool resumes) {
        torch::nn::Linear net(5, 3);
        {
          const c10::AutoGradMode no_grad(false);
          for (at::Tensor p : net->parameters()) {
            p.copy_(at::arange(p.numel(), at::kFloat).view(p.sizes()) * (resumes ? 0.3 : 0.1));
          }
        }
        if (!plain) distribute_module(*net, mesh, {{"weight", {{"dp", Shard(0)}}}});
        const auto optimizer = make(kind, net->parameters());
        StateDict state;
        add_module(state, *net);
        add_optimizer(state, *optimizer, *net);
        const auto step = [&](int i) {
          at::Tensor x = at::sin(at::arange(10, at::kFloat).view({2, 5}) + i);
          if (!plain) x = distribute_tensor(x, mesh, {});
          const at::Tensor loss = net->forward(x).pow(2).mean();
          loss.backward();
          if (!plain) finish_grad_sync(*net);
          optimizer->step();
          optimizer->zero_grad();
          return loss.item<double>();
        };
        if (resumes) {
          step(9);  // a state that has to go
          load_checkpoint(directory, state, mesh);
        } else {
          if (!before_first_step) step(0);
          save_checkpoint(directory, 1, state, mesh);
        }
        std::vector<double> losses = {step(1), step(2)};
        if (mesh->rank() != Rank(0)) return;
        if (!resumes) {
          wanted = losses;
          return;
        }
        for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(losses[i], wanted[i], 1e-6);
      };
      on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) { train(mesh, false, false); });
      on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) { train(mesh, false, true); });
      on_mesh({{"dp", 1}}, [&](const MeshPtr& mesh) { train(mesh, true, true); });  // plain tensors
    }
  }
}

// A layer that thaws while it trains: what its group has learned is saved and loaded, by a state that was
// made before the group.
TEST(CheckpointTest, GroupsThatAreAddedLaterBelongToTheState) {
  enum class Kind { kFused, kTorch, kZero };
  for (const Kind kind : {Kind::kFused, Kind::kTorch, Kind::kZero}) {
    const std::string directory = new_directory("groups");
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      torch::nn::Linear net(5, 3);
      distribute_module(
          *net, mesh,
          kind == Kind::kZero ? ParameterPlan{} : ParameterPlan{{"*", {{"dp", Shard(0)}}}});
      const std::vector<at::Tensor> first = {net->weight}, second = {net->bias};
      std::unique_ptr<FusedOptimizer> fused;
      std::unique_ptr<torch::optim::AdamW> torch;
      std::unique_ptr<ZeroRedundancyOptimizer<FusedOptimizer>> zero;
      StateDict state;
      add_module(state, *net);
      switch (kind) {
        case Kind::kFused:
          fused = std::make_unique<FusedOptimizer>(first, AdamWOptions{});
          add_optimizer(state, *fused, *net);
          break;
        case Kind::kTorch:
          torch = std::make_unique<torch::optim::AdamW>(first);
          add_optimizer(state, *torch, *net);
          break;
        case Kind::kZero:
          zero = std::make_unique<ZeroRedundancyOptimizer<FusedOptimizer>>(first, AdamWOptions{});
          add_optimizer(state, *zero, *net);
          break;
      }
      const auto step = [&](double scale) {
        const at::Tensor x = at::sin(at::arange(20, at::kFloat) * scale).view({4, 5});
        net->forward(distribute_tensor(x, mesh, {{"dp", Shard(0)}})).pow(2).mean().backward();
        finish_grad_sync(*net);
        if (fused != nullptr) fused->step();
        if (torch != nullptr) torch->step();
        if (zero != nullptr) zero->step();
        net->zero_grad();
      };
      const auto moments = [&] {
        std::map<std::string, at::Tensor> result;
        for (const auto& late : state.late()) {
          for (const auto& [name, tensor] : late.now()) {
            result[late.prefix + name] =
                (is_dtensor(tensor) ? full_tensor(tensor) : tensor).clone();
          }
        }
        return result;
      };
      step(0.5);
      EXPECT_EQ(moments().count("optimizer.bias.exp_avg"), 0U);
      if (fused != nullptr) fused->add_group({second, AdamWOptions{}});
      if (torch != nullptr) torch->add_param_group({second});
      if (zero != nullptr) zero->add_group({second, AdamWOptions{}});
      step(0.7);
      const auto wanted = moments();
      EXPECT_EQ(wanted.count("optimizer.bias.exp_avg"), 1U);
      save_checkpoint(directory, 1, state, mesh);
      step(0.9);
      EXPECT_FALSE(
          at::equal(moments().at("optimizer.bias.exp_avg"), wanted.at("optimizer.bias.exp_avg")));
      load_checkpoint(directory, state, mesh);
      const auto got = moments();
      EXPECT_EQ(got.size(), wanted.size());
      for (const auto& [name, value] : wanted) EXPECT_TRUE(at::equal(got.at(name), value)) << name;
      // What the module has not is an error at the save, on all ranks.
      const at::Tensor alien = distribute_tensor(at::ones({3}), mesh, {}).requires_grad_();
      if (torch != nullptr) {
        torch->add_param_group({{alien}});
        EXPECT_THROW(save_checkpoint(directory + "2", 2, state, mesh), Error);
      }
    });
  }
}

// torch::optim's SGD has no "step", and without a momentum nothing; Adagrad's state is there from the
// start.
TEST(CheckpointTest, WhatAnotherOptimizerOfTheKindHasSaved) {
  const std::string directory = new_directory("other_optimizers");
  const auto run = [&](const MeshPtr& mesh, const auto& make, const auto& body) {
    torch::nn::Linear net(5, 3);
    {
      const c10::AutoGradMode no_grad(false);
      for (at::Tensor p : net->parameters()) {
        p.copy_(at::arange(p.numel(), at::kFloat).view(p.sizes()) * 0.1);
      }
    }
    distribute_module(*net, mesh, {{"weight", {{"dp", Shard(0)}}}});
    auto optimizer = make(net->parameters());
    StateDict state;
    add_module(state, *net);
    add_optimizer(state, optimizer, *net);
    body(state, [&](int i) {
      const at::Tensor x = at::sin(at::arange(10, at::kFloat).view({2, 5}) + i);
      const at::Tensor loss = net->forward(distribute_tensor(x, mesh, {})).pow(2).mean();
      loss.backward();
      finish_grad_sync(*net);
      optimizer.step();
      optimizer.zero_grad();
      return loss.item<double>();
    });
  };
  using torch::optim::Adagrad;
  using torch::optim::SGD;
  using Parameters = std::vector<at::Tensor>;
  for (const double momentum : {0.0, 0.9}) {
    SCOPED_TRACE(momentum);
    const auto fused = [&](const Parameters& p) {
      return FusedOptimizer(p, SgdOptions{.lr = 0.1, .momentum = momentum});
    };
    const auto torchs = [&](const Parameters& p) {
      return SGD(p, torch::optim::SGDOptions(0.1).momentum(momentum));
    };
    std::array<std::vector<double>, 2> wanted;  // by rank
    const auto saves = [&](const MeshPtr& mesh, const auto& make) {
      run(mesh, make, [&](StateDict& state, const auto& step) {
        step(0);
        save_checkpoint(directory, 1, state, mesh);
        wanted[static_cast<size_t>(mesh->rank().value)] = {step(1), step(2)};
      });
    };
    const auto loads = [&](const MeshPtr& mesh, const auto& make) {
      run(mesh, make, [&](StateDict& state, const auto& step) {
        step(9);
        load_checkpoint(directory, state, mesh);
        EXPECT_NEAR(step(1), wanted[0][0], 1e-6);
        EXPECT_NEAR(step(2), wanted[0][1], 1e-6);
      });
    };
    fs::remove_all(directory);
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) { saves(mesh, fused); });
    on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) { loads(mesh, torchs); });
    if (momentum == 0) continue;
    fs::remove_all(directory);
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) { saves(mesh, torchs); });
    on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) { loads(mesh, fused); });
  }
  // Of one that has no state yet.
  fs::remove_all(directory);
  const auto adam = [](const Parameters& p) {
    return torch::optim::Adam(p, torch::optim::AdamOptions(0.1));
  };
  const auto adagrad = [](const Parameters& p) {
    return Adagrad(p, torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.25));
  };
  std::array<double, 2> wanted = {};
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    run(mesh, adam,
        [&](StateDict& state, const auto&) { save_checkpoint(directory, 1, state, mesh); });
    run(mesh, adagrad, [&](StateDict&, const auto& step) {
      const std::array<double, 2> losses = {step(1), step(2)};
      if (mesh->rank() == Rank(0)) wanted = losses;
    });
  });
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    run(mesh, adagrad, [&](StateDict& state, const auto& step) {
      step(9);
      load_checkpoint(directory, state, mesh);
      EXPECT_NEAR(step(1), wanted[0], 1e-6);
      EXPECT_NEAR(step(2), wanted[1], 1e-6);
    });
  });
}

TEST(CheckpointTest, AnyToolReadsIt) {
  const std::string directory = new_directory("tool");
  at::Tensor whole = at::arange(35, at::kFloat).view({7, 5});
  on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    StateDict state;
    state.add_tensor("w", distribute_tensor(whole, mesh, {{"tp", StridedShard(0, 2)}}));
    state.add_tensor("plain", at::arange(3));
    state.add_tensor("none", zeros({0, 4}, mesh, {Shard(0), Replicate()}));
    // On a slice of the mesh: the same on both.
    const MeshPtr tp = *mesh->slice({"tp"});
    state.add_tensor("slice", distribute_tensor(whole, tp, {Shard(1)}));
    save_checkpoint(directory, 12, state, mesh, {.keep_last = 1});
  });
  const std::string path = directory + "/step-000012";
  const auto manifest = read_manifest(path);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->mesh, "dp=2,tp=2");
  for (const char* name : {"w", "slice"}) {
    at::Tensor together = at::full({7, 5}, -1.F);
    for (const SavedPiece& piece : manifest->tensors.at(name).pieces) {
      const auto file = SafetensorsFile::open(path + "/" + piece.file);
      ASSERT_TRUE(file.ok()) << file.status();
      const at::Tensor part = read_tensor(**file, piece_name(name, Dims{7, 5}, piece.box));
      together.narrow(0, piece.box.offset[0], piece.box.shape[0])
          .narrow(1, piece.box.offset[1], piece.box.shape[1])
          .copy_(part);
    }
    EXPECT_TRUE(at::equal(together, whole)) << name;
  }
  EXPECT_EQ(manifest->tensors.at("plain").pieces.size(), 1);
  EXPECT_TRUE(manifest->tensors.at("none").pieces.empty());
  std::ifstream latest(directory + "/latest");
  std::string name;
  latest >> name;
  EXPECT_EQ(name, "step-000012");
}

TEST(CheckpointTest, TiedWeightsLoadByEitherName) {
  const std::string directory = new_directory("tied");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    StateDict tied;
    tied.add_tensor("a", distribute_tensor(at::arange(6, at::kFloat), mesh, {Shard(0)}), {"b"});
    save_checkpoint(directory, 1, tied, mesh);
    StateDict apart;
    const at::Tensor a = zeros({6}, mesh, {Replicate()});
    const at::Tensor b = zeros({6}, mesh, {Shard(0)});
    apart.add_tensor("a", a);
    apart.add_tensor("b", b);
    load_checkpoint(directory, apart, mesh);
    EXPECT_EQ(full_tensor(a).sum().item<double>(), 15);
    EXPECT_EQ(full_tensor(b).sum().item<double>(), 15);
    // And back: what was saved apart loads into one, if it is the same.
    StateDict alike;
    alike.add_tensor("a", b);
    alike.add_tensor("b", b.clone());
    save_checkpoint(directory, 2, alike, mesh);
    StateDict other;
    const at::Tensor one = zeros({6}, mesh, {Shard(0)});
    other.add_tensor("b", one, {"a"});
    load_checkpoint(directory, other, mesh);
    EXPECT_EQ(full_tensor(one).sum().item<double>(), 15);
    // Two that are others do not: one of them would be gone without a word.
    {
      const c10::AutoGradMode no_grad(false);
      at::Tensor changed = a;
      changed.add_(1);
    }
    save_checkpoint(directory, 3, apart, mesh);
    try {
      load_checkpoint(directory, other, mesh);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("unexpected: a"));
    }
    const LoadedCheckpoint loaded =
        load_checkpoint(directory, other, mesh, {.allow_unexpected = true});
    EXPECT_THAT(loaded.unexpected, ElementsAre("a"));
    EXPECT_EQ(full_tensor(one).sum().item<double>(), 15);
  });
}

struct TableImpl : torch::nn::Module, NonPersistentBuffers {
  TableImpl() {
    weight = register_parameter("weight", at::ones({3}));
    mean = register_buffer("mean", at::ones({2}));
    angles = register_buffer("angles", at::ones({4}));
  }
  std::vector<std::string> non_persistent_buffers() const override { return {"angles"}; }
  at::Tensor weight, mean, angles;
};

TEST(CheckpointTest, WhatIsNotPersistentIsLeftOut) {
  const auto table = std::make_shared<TableImpl>();
  const auto outer = std::make_shared<torch::nn::Module>("outer");
  outer->register_module("table", table);
  outer->register_buffer("seen", table->angles);  // a second name, under which it is kept
  StateDict alone, inside;
  add_module(alone, *table);
  add_module(inside, *outer);
  EXPECT_THAT(alone.tensor_names(), ElementsAre("model.weight", "model.mean"));
  EXPECT_THAT(inside.tensor_names(),
              UnorderedElementsAre("model.table.weight", "model.table.mean", "model.seen"));
  // Of the library's own models: what another language's checkpoint of the same has.
  StateDict llama;
  add_module(llama, *nn::Llama(nn::LlamaOptions{.vocab_size = 5,
                                                .hidden_size = 4,
                                                .intermediate_size = 3,
                                                .num_hidden_layers = 1,
                                                .num_attention_heads = 2}));
  EXPECT_THAT(llama.tensor_names(), Each(Not(HasSubstr("rotary"))));
}

// What went wrong, as every rank has heard it; nothing of the state has changed.
absl::Status failure(const Mesh& dims, const std::string& directory,
                     const std::function<void(const MeshPtr&, StateDict&)>& more,
                     const LoadOptions& options = {}) {
  std::mutex mutex;
  std::vector<absl::Status> statuses;
  on_mesh(dims, [&](const MeshPtr& mesh) {
    StateDict state;
    const at::Tensor w = distribute_tensor(at::full({6, 4}, 5.F), mesh, {Shard(0)});
    const at::Tensor plain = at::full({3}, 5.F);
    state.add_tensor("w", w);
    state.add_tensor("plain", plain);
    state.set_value("epoch", "5");
    more(mesh, state);
    absl::Status status;
    try {
      load_checkpoint(directory, state, mesh, options);
    } catch (const Error& error) {
      status = error.status();
    }
    EXPECT_EQ(full_tensor(w).sum().item<double>(), 24 * 5);
    EXPECT_EQ(plain.sum().item<double>(), 15);
    EXPECT_EQ(state.value("epoch"), "5");
    const std::lock_guard lock(mutex);
    statuses.push_back(status);
  });
  for (const absl::Status& status : statuses) EXPECT_EQ(status.message(), statuses[0].message());
  return statuses.at(0);
}

// The bytes of a file, one of which is another meanwhile.
class Flipped {
 public:
  Flipped(const std::string& path, int64_t at) : path_(path), at_(at) { flip(); }
  ~Flipped() { flip(); }

 private:
  void flip() const {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at_);
    const int byte = file.get();
    file.seekp(at_);
    file.put(static_cast<char>(byte ^ 1));
  }
  const std::string path_;
  const int64_t at_;
};

// What ranks cut anew, none of them reads whole.
TEST(CheckpointTest, ADamagedByteIsFoundHoweverRanksCut) {
  const std::string directory = new_directory("flipped");
  for (const int64_t step : {1, 2}) {
    on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
      StateDict state;
      state.add_tensor("f32", randn({7, 5}, mesh, {Shard(0), Shard(1)}));
      state.add_tensor("f64", randn({6, 3}, mesh, {Replicate(), Shard(0)}).to(at::kDouble));
      state.add_tensor("bf16", randn({3, 5, 2}, mesh, {Shard(1), Replicate()}).to(at::kBFloat16));
      state.add_tensor("u8", randn({11}, mesh, {Shard(0), Shard(0)}).abs().to(at::kByte));
      save_checkpoint(directory, step, state, mesh);
    });
  }
  const std::string path = directory + "/step-000002";
  const Manifest manifest = *read_manifest(path);
  const auto load_on = [&](const std::vector<MeshDim>& named, const Placements& placements) {
    std::mutex mutex;
    std::set<std::string> messages;
    on_mesh(named, [&](const MeshPtr& mesh) {
      StateDict state;
      std::vector<at::Tensor> all;
      for (const auto& [name, saved] : manifest.tensors) {
        const at::IntArrayRef sizes(saved.shape.data(), saved.shape.size());
        all.push_back(
            distribute_tensor(at::zeros(sizes, scalar_type_of(saved.dtype)), mesh, placements));
        state.add_tensor(name, all.back());
      }
      std::string message;
      try {
        load_checkpoint(directory, state, mesh);
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), absl::StatusCode::kDataLoss) << error.what();
        message = std::string(error.status().message());
        for (const at::Tensor& each : all)
          EXPECT_EQ(full_tensor(each).count_nonzero().item<int64_t>(), 0);
      }
      const std::lock_guard lock(mutex);
      messages.insert(message);
    });
    EXPECT_EQ(messages.size(), 1) << "ranks say different things";
    return *messages.begin();
  };
  const std::vector<std::pair<std::vector<MeshDim>, Placements>> ways = {
      {{{"dp", 3}}, {Shard(0)}},
      {{{"dp", 2}, {"tp", 2}}, {Replicate(), Shard(0)}},
      {{{"dp", 2}, {"tp", 3}}, {Shard(0), Shard(0)}},
      {{{"dp", 1}}, {Replicate()}}};
  int cut = 0;
  for (const auto& [named, placements] : ways) {
    EXPECT_EQ(load_on(named, placements), "");
    for (const auto& [name, saved] : manifest.tensors) {
      for (const SavedPiece& piece : saved.pieces) {
        const auto file = SafetensorsFile::open(path + "/" + piece.file);
        const StoredTensor* info = (*file)->find(piece_name(name, saved.shape, piece.box));
        const Flipped flipped(path + "/" + piece.file,
                              (*file)->offset(*info) + (info->end - info->begin) / 2);
        const std::string message = load_on(named, placements);
        EXPECT_THAT(message, HasSubstr(name));
        EXPECT_THAT(message, HasSubstr(piece.file));
        EXPECT_THAT(message, HasSubstr("'step-000001' beside it is the newest of those before it"));
        cut += static_cast<int>(message.find("read in parts from") != std::string::npos);
      }
    }
  }
  EXPECT_GT(cut, 10);
}

// Whose copies add up to more, or of which the mesh that loads has a part.
TEST(CheckpointTest, WhatLiesOnSlicesComesBack) {
  const std::string directory = new_directory("slices");
  const at::Tensor whole = at::arange(35, at::kFloat).view({7, 5});
  for (const bool on_slice : {true, false}) {
    fs::remove_all(directory);
    on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
      StateDict state;
      state.add_tensor("w", on_slice ? distribute_tensor(whole, *mesh->slice({"tp"}), {Shard(1)})
                                     : distribute_tensor(whole, mesh, {Shard(0), Shard(1)}));
      save_checkpoint(directory, 1, state, mesh);
    });
    on_mesh({{"dp", 2}, {"tp", 3}}, [&](const MeshPtr& mesh) {
      const MeshPtr tp = *mesh->slice({"tp"});
      const std::vector<std::tuple<at::Tensor, MeshPtr>> ways = {
          {distribute_tensor(at::zeros({7, 5}), tp, {Shard(1)}), mesh},
          {distribute_tensor(at::zeros({7, 5}), tp, {Shard(0)}), tp},
          {distribute_tensor(at::zeros({7, 5}), mesh, {Replicate(), Shard(0)}), mesh},
          {distribute_tensor(at::zeros({7, 5}), mesh, {Shard(0), Shard(1)}), tp},
          {distribute_tensor(at::zeros({7, 5}), mesh, {Replicate(), Replicate()}), tp}};
      for (const auto& [w, loader] : ways) {
        StateDict state;
        state.add_tensor("w", w);
        load_checkpoint(directory, state, loader);
        EXPECT_TRUE(at::equal(full_tensor(w), whole)) << describe(w);
      }
    });
  }
}

TEST(CheckpointTest, ManifestsWithoutSumsAreRead) {
  const std::string directory = new_directory("no_sums");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    StateDict state;
    state.add_tensor("w", randn({7, 5}, mesh, {Shard(0)}));
    save_checkpoint(directory, 1, state, mesh);
  });
  const std::string path = directory + "/step-000001";
  Manifest manifest = *read_manifest(path);
  for (SavedPiece& piece : manifest.tensors.begin()->second.pieces) {
    EXPECT_TRUE(piece.sum.has_value());
    piece.sum.reset();
  }
  const std::string text = manifest.to_json();
  EXPECT_THAT(text, Not(HasSubstr("\"sum\"")));
  std::ofstream(path + "/manifest.json") << text;
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    StateDict state;
    const at::Tensor w = distribute_tensor(at::zeros({7, 5}), mesh, {Shard(0)});
    state.add_tensor("w", w);
    load_checkpoint(directory, state, mesh);
    EXPECT_GT(full_tensor(w).count_nonzero().item<int64_t>(), 30);
  });
}

bool can_read_past_cache(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  if (file < 0) return false;
  alignas(kFilePage) static std::array<char, kFilePage> page;
  const bool can = ::pread(file, page.data(), page.size(), 0) > 0;
  ::close(file);
  return can;
}

// How much of a file the system has in its cache.
double cached_share(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const size_t size = fs::file_size(path);
  void* const map = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
  ::close(file);
  std::vector<unsigned char> pages((size + kFilePage - 1) / kFilePage);
  EXPECT_EQ(::mincore(map, size, pages.data()), 0);
  ::munmap(map, size);
  const auto there =
      std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1) != 0; });
  return static_cast<double>(there) / static_cast<double>(pages.size());
}

// Of several chunks, some of which begin and end within pages, and from a file that is in no cache.
TEST(CheckpointTest, LargeTensorsComeAsTheyWere) {
  const std::string directory = new_directory("large");
  const auto values = [](int64_t rows) {
    return at::arange(rows * 1021, at::kInt).view({rows, 1021});
  };
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    StateDict state;
    state.add_tensor("odd", distribute_tensor(values(2053), mesh, {Shard(0)}));
    state.add_tensor("pages", distribute_tensor(values(2048), mesh, {Shard(0)}));
    state.add_tensor("small", distribute_tensor(values(3), mesh, {Shard(0)}));
    save_checkpoint(directory, 1, state, mesh);
  });
  const auto cached = [&] {
    double most = 0;
    for (const auto& entry : fs::directory_iterator(directory + "/step-000001")) {
      if (entry.path().extension() == ".safetensors")
        most = std::max(most, cached_share(entry.path()));
    }
    return most;
  };
  for (const bool in_cache : {true, false}) {
    if (!in_cache) {
      for (const auto& entry : fs::directory_iterator(directory + "/step-000001")) {
        const int file = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
        EXPECT_EQ(::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED), 0);
        ::close(file);
      }
    }
    for (const int64_t ranks : {2, 3}) {
      on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
        StateDict state;
        std::map<std::string, std::pair<int64_t, at::Tensor>> all;
        for (const auto& [name, rows] : {std::pair{"odd", 2053}, {"pages", 2048}, {"small", 3}}) {
          const at::Tensor w =
              distribute_tensor(at::zeros({rows, 1021}, at::kInt), mesh, {Shard(0)});
          all[name] = {rows, w};
          state.add_tensor(name, w);
        }
        load_checkpoint(directory, state, mesh);
        for (const auto& [name, rows_and_w] : all) {
          const auto& [rows, w] = rows_and_w;
          EXPECT_TRUE(at::equal(full_tensor(w), values(rows))) << name << " on " << ranks;
        }
      });
      // What each rank reads whole, and alone, is in nobody's way there.
      if (!in_cache && ranks == 2 &&
          can_read_past_cache(directory + "/step-000001/manifest.json")) {
        EXPECT_LT(cached(), 0.1);
      }
    }
  }
}

TEST(CheckpointTest, APrefixOfNothingIsAnErrorWhateverMayBeMissing) {
  const std::string directory = new_directory("prefix");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    StateDict state, other;
    state.add_tensor("model.w", randn({3}, mesh, {Shard(0)}));
    save_checkpoint(directory, 1, state, mesh);
    other.add_tensor("modle.w", randn({3}, mesh, {Shard(0)}));
    other.add_tensor("modle.b", randn({3}, mesh, {Shard(0)}));
    try {
      load_checkpoint(directory, other, mesh, {.allow_missing = true, .allow_unexpected = true});
      ADD_FAILURE() << "loaded";
    } catch (const Error& error) {
      EXPECT_THAT(
          std::string(error.what()),
          HasSubstr("has none of the 2 tensors that are wanted, such as modle.w; it has model.w"));
    }
  });
}

TEST(CheckpointTest, BadFilesAreErrorsOnAllRanksBeforeAnythingIsApplied) {
  const std::string directory = new_directory("bad_files");
  const std::string path = directory + "/step-000001";
  const auto save = [&] {
    fs::remove_all(directory);
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      StateDict state;
      state.add_tensor(
          "w", distribute_tensor(at::arange(24, at::kFloat).view({6, 4}), mesh, {Shard(0)}));
      state.add_tensor("plain", at::arange(3, at::kFloat));
      state.set_value("epoch", "1");
      save_checkpoint(directory, 1, state, mesh);
    });
  };
  const auto nothing = [](const MeshPtr&, StateDict&) {};
  const auto fails = [&](const std::function<void()>& damage, absl::StatusCode code,
                         const std::string& words, const LoadOptions& options = {}) {
    save();
    damage();
    const absl::Status status = failure({{"dp", 2}}, directory, nothing, options);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  const std::string second = path + "/rank-00001.safetensors";
  const auto poke = [&](int64_t from_end) {
    std::fstream file(second, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-from_end, std::ios::end);
    file.put('\x7f');
  };
  using enum absl::StatusCode;
  fails([&] { fs::remove(second); }, kDataLoss,
        "rank-00001.safetensors' is not there, and the manifest names it");
  fails([&] { fs::resize_file(second, fs::file_size(second) - 1); }, kDataLoss,
        "the manifest says");
  fails([&] { fs::resize_file(second, 3); }, kDataLoss, "the manifest says");
  fails([&] { fs::resize_file(second, 0); }, kDataLoss, "has 0 bytes");
  fails([&] { poke(1); }, kDataLoss, "has the checksum");
  const std::string manifest = path + "/manifest.json";
  for (const size_t kept : {0, 1, 2, 40, 300}) {
    fails([&] { fs::resize_file(manifest, kept); }, kDataLoss,
          "it is cut short, or not as it was written");
  }
  fails([&] { fs::resize_file(manifest, fs::file_size(manifest) - 1); }, kDataLoss,
        "as it was written");
  fails([&] { std::ofstream(manifest) << std::string(300, '\0'); }, kDataLoss, "it is cut short");
  fails([&] { std::ofstream(manifest) << "{\n  \"name\": \"of a web app\"\n}\n"; },
        kInvalidArgument, "format");
  // In the header, in whose first byte JSON begins.
  fails([&] { poke(static_cast<int64_t>(fs::file_size(second)) - 8); }, kDataLoss,
        "it is not as it was written");
  fails([&] { poke(1); }, kDataLoss, "rank-00001.safetensors' has the checksum", {.verify = true});
  fails(
      [&] {
        fs::copy_file(path + "/rank-00000.safetensors", second,
                      fs::copy_options::overwrite_existing);
      },
      kDataLoss, "the manifest says");
  fails(
      [&] {
        fs::remove(second);
        std::ofstream(second) << std::string(fs::file_size(path + "/manifest.json"), 'x');
      },
      kDataLoss, "the manifest says");
  fails(
      [&] {
        fs::rename(second, directory + "/elsewhere");
        fs::create_symlink(directory + "/elsewhere", second);
      },
      kFailedPrecondition, "is a symbolic link");
  fails(
      [&] {
        fs::rename(path + "/manifest.json", directory + "/elsewhere");
        fs::create_symlink(directory + "/elsewhere", path + "/manifest.json");
      },
      kFailedPrecondition, "is a symbolic link");
  fails(
      [&] {
        fs::rename(path, directory + "_out");
        fs::create_directory_symlink(directory + "_out", path);
      },
      kNotFound, "has no checkpoint");
  fs::remove_all(directory + "_out");
  fails([&] { fs::remove(path + "/manifest.json"); }, kDataLoss,
        "has files of a checkpoint and no manifest.json: not all of it is there");
  fails([&] { std::ofstream(path + "/manifest.json") << "{}"; }, kInvalidArgument, "\"format\"");
  fails([&] { fs::remove_all(path); }, kNotFound, "has no checkpoint");
  fails([&] { fs::remove_all(directory); }, kNotFound, "No such file");
  if (::geteuid() != 0) {
    fails([&] { fs::permissions(second, fs::perms::none); }, kPermissionDenied, second);
  }
}

TEST(CheckpointTest, MoreFilesThanAProcessMayHaveOpen) {
  const std::string directory = new_directory("many");
  constexpr int64_t kRanks = 270;
  on_mesh({{"dp", kRanks}}, [&](const MeshPtr& mesh) {
    StateDict state;
    state.add_tensor(
        "x", distribute_tensor(at::arange(2 * kRanks), mesh, {Shard(0)}, {.source = std::nullopt}));
    save_checkpoint(directory, 1, state, mesh);
  });
  rlimit limit = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit few = {.rlim_cur = 200, .rlim_max = limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  on_mesh({{"dp", 1}}, [&](const MeshPtr& mesh) {
    StateDict state;
    const at::Tensor x = zeros({2 * kRanks}, mesh, {Replicate()}, at::kLong);
    state.add_tensor("x", x);
    load_checkpoint(directory, state, mesh);
    EXPECT_TRUE(at::equal(full_tensor(x), at::arange(2 * kRanks)));
  });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST(CheckpointTest, AManifestIsNoLargerThanItCanBe) {
  const std::string directory = new_directory("large_manifest");
  fs::create_directories(directory);
  std::ofstream(directory + "/manifest.json") << "{";
  fs::resize_file(directory + "/manifest.json", (1 << 28) + 1);  // a hole
  const absl::Status status = read_manifest(directory).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(status.message()), HasSubstr("wanted at most 268435456"));
}

TEST(CheckpointTest, AnotherStateIsOneErrorThatNamesAllOfIt) {
  const std::string directory = new_directory("bad_state");
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    StateDict state;
    state.add_tensor("w", zeros({6, 4}, mesh, {Shard(0)}));
    state.add_tensor("plain", at::zeros({4}));
    state.add_tensor("only.there", at::zeros({1}));
    state.add_tensor("half", at::zeros({2}, at::kBFloat16));
    state.set_value("epoch", "1");
    state.set_value("random", "{\"seed\": -1}");
    save_checkpoint(directory, 1, state, mesh);
  });
  const auto more = [](const MeshPtr& mesh, StateDict& state) {
    state.add_tensor("only.here", zeros({6, 4}, mesh, {Shard(0)}));
    state.add_tensor("half", at::zeros({2}, at::kFloat));
    state.set_value("lr", "1");
    add_random_state(state, mesh);
  };
  const absl::Status status = failure({{"dp", 2}}, directory, more);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("missing: only.here, value lr;"),
                    HasSubstr("unexpected: only.there;"), HasSubstr("plain ([4] there, [3] here)"),
                    HasSubstr("half (BF16 there, F32 here)"), HasSubstr("is no random state")));
  const absl::Status lenient =
      failure({{"dp", 2}}, directory, more,
              {.allow_missing = true, .allow_unexpected = true, .cast = true});
  EXPECT_THAT(std::string(lenient.message()),
              AllOf(HasSubstr("state: differing: plain ([4] there, [3] here), the value"),
                    ::testing::Not(HasSubstr("half"))));
  // With what is allowed it loads, and says so.
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    StateDict state;
    const at::Tensor half = at::ones({2}, at::kFloat);
    const at::Tensor here = ones({6, 4}, mesh, {Shard(0)});
    state.add_tensor("half", half);
    state.add_tensor("only.here", here);
    const LoadedCheckpoint loaded = load_checkpoint(
        directory, state, mesh, {.allow_missing = true, .allow_unexpected = true, .cast = true});
    EXPECT_EQ(loaded.missing, std::vector<std::string>{"only.here"});
    EXPECT_EQ(loaded.unexpected, (std::vector<std::string>{"only.there", "plain", "w"}));
    EXPECT_EQ(half.sum().item<double>(), 0);
    EXPECT_EQ(full_tensor(here).sum().item<double>(), 24);
    EXPECT_EQ(loaded.values.at("epoch"), "1");
  });
}

// What a run goes on with is not dropped unheard; a value of the program's own is the program's to ask for.
TEST(CheckpointTest, WhatAnOptimizerMayLackIsNotMissing) {
  const std::string directory = new_directory("may_lack");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    StateDict nothing;
    nothing.add_tensor("model.w", zeros({4}, mesh, {Shard(0)}));
    save_checkpoint(directory, 1, nothing, mesh);
    torch::nn::Linear net(3, 2);
    distribute_module(*net, mesh, {});
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
    StateDict state;
    add_optimizer(state, optimizer, *net);
    const LoadedCheckpoint loaded =
        load_checkpoint(directory, state, mesh, {.allow_missing = true, .allow_unexpected = true});
    EXPECT_THAT(loaded.missing,
                UnorderedElementsAre("optimizer.weight.step", "optimizer.weight.exp_avg",
                                     "optimizer.weight.exp_avg_sq", "optimizer.bias.step",
                                     "optimizer.bias.exp_avg", "optimizer.bias.exp_avg_sq"));
  });
}

TEST(CheckpointTest, ValuesThatResumeARunAreUnexpectedWhereNobodyAsks) {
  const std::string directory = new_directory("resumes");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    StateDict state;
    state.add_tensor("w", ones({6, 4}, mesh, {Shard(0)}));
    add_random_state(state, mesh);
    state.add_value("counted_lately", {.get = [] { return std::string("1"); },
                                       .set = [](const std::string&) {},
                                       .is_optional = true});
    state.set_value("epoch", "3");
    save_checkpoint(directory, 1, state, mesh);
    StateDict other;
    const at::Tensor w = zeros({6, 4}, mesh, {Shard(0)});
    other.add_tensor("w", w);
    try {
      load_checkpoint(directory, other, mesh);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(error.status().message()),
                  ::testing::EndsWith("is of another state: unexpected: value random"));
    }
    EXPECT_EQ(full_tensor(w).sum().item<double>(), 0);
    const LoadedCheckpoint loaded =
        load_checkpoint(directory, other, mesh, {.allow_unexpected = true});
    EXPECT_EQ(loaded.unexpected, std::vector<std::string>{"value random"});
    EXPECT_EQ(loaded.values.at("epoch"), "3");
    EXPECT_EQ(full_tensor(w).sum().item<double>(), 24);
    add_random_state(other, mesh);
    EXPECT_TRUE(load_checkpoint(directory, other, mesh).unexpected.empty());
  });
}

// Moments that were kept with another step, or with none that can be known, are other moments.
TEST(CheckpointTest, MomentsWithoutTheirStepAreNotLoaded) {
  const std::string directory = new_directory("no_step");
  const auto save = [&](const std::vector<std::string>& moments, double step) {
    fs::remove_all(directory);
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      StateDict state;
      state.add_tensor("w", at::ones({6, 4}));
      state.add_tensor("plain", at::ones({3}));
      state.set_value("epoch", "1");
      state.add_tensor("model.weight", at::ones({2, 5}));
      for (const std::string& name : moments) {
        state.add_tensor("optimizer.weight." + name, at::ones({2, 5}));
      }
      if (step >= 0) state.add_tensor("optimizer.weight.step", at::full({}, step, at::kDouble));
      save_checkpoint(directory, 1, state, mesh);
    });
  };
  std::vector<std::shared_ptr<void>> keep;
  std::mutex mutex;
  const auto with = [&](const FusedOptimizer::Options& options) {
    return [&, options](const MeshPtr& mesh, StateDict& state) {
      const auto net =
          std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(5, 2).bias(false));
      distribute_module(*net, mesh, {{"weight", {{"dp", Shard(0)}}}});
      const auto optimizer = std::make_shared<FusedOptimizer>(net->parameters(), options);
      add_module(state, *net);
      add_optimizer(state, *optimizer, *net);
      const std::lock_guard lock(mutex);
      keep.push_back(net);
      keep.push_back(optimizer);
    };
  };
  const auto message = [&](const FusedOptimizer::Options& options) {
    return std::string(failure({{"dp", 2}}, directory, with(options)).message());
  };
  save({"exp_avg", "exp_avg_sq"}, -1);
  EXPECT_THAT(message(AdamWOptions{}), HasSubstr("missing: optimizer.weight.step"));
  // What cannot be a count of steps is refused before anything is changed.
  save({"exp_avg", "exp_avg_sq"}, 0x1p24 + 1);
  EXPECT_THAT(message(AdamWOptions{}),
              HasSubstr("'optimizer.weight.step' is 16777217; wanted a whole number from 0 to "
                        "16777216"));
  for (const double odd : {0.5, 1e300, std::numeric_limits<double>::infinity()}) {
    save({"exp_avg", "exp_avg_sq"}, odd);
    EXPECT_THAT(message(AdamWOptions{}), HasSubstr("wanted a whole number from 0"));
  }
  // What does not depend on the count may lack it, as in torch::optim::SGD.
  const auto loads = [&](const std::string& momentum, const FusedOptimizer::Options& options) {
    save({momentum}, -1);
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      StateDict state;
      with(options)(mesh, state);
      load_checkpoint(directory, state, mesh, {.allow_unexpected = true});
    });
  };
  loads("momentum_buffer", SgdOptions{.lr = 0.1, .momentum = 0.9});
  loads("exp_avg", LionOptions{});
}

TEST(CheckpointTest, WhatCannotBeWrittenIsRefusedBeforeAnythingIs) {
  const std::string directory = new_directory("unwritable");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    StateDict state;
    state.add_tensor("w", at::ones({6, 4}));
    state.add_tensor("plain", at::ones({3}));
    state.add_tensor("z", at::ones({4, 2}));
    state.set_value("epoch", "1");
    state.set_value("last", "1");
    save_checkpoint(directory, 1, state, mesh);
  });
  const auto message = [&](const std::function<at::Tensor()>& make, bool on_all_ranks) {
    return std::string(failure({{"dp", 2}}, directory, [&](const MeshPtr& mesh, StateDict& state) {
                         const bool is_odd = on_all_ranks || mesh->rank() == Rank(1);
                         state.add_tensor("z", is_odd ? make() : at::zeros({4, 2}));
                         state.set_value("last", "5");
                       }).message());
  };
  for (const bool on_all_ranks : {true, false}) {
    EXPECT_THAT(message([] { return at::zeros({1, 2}).expand({4, 2}); }, on_all_ranks),
                HasSubstr("'z' has elements that share memory"));
    EXPECT_THAT(message([] { return at::zeros({4, 2}, at::kMeta); }, on_all_ranks),
                HasSubstr("'z' has no memory"));
    EXPECT_THAT(message(
                    [] {
                      const c10::InferenceMode inference;
                      return at::zeros({4, 2});
                    },
                    on_all_ranks),
                HasSubstr("'z' was made in inference mode"));
  }
  // What nobody can know before is an error on all ranks all the same.
  std::mutex mutex;
  std::vector<std::string> told;
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    StateDict state;
    state.add_tensor("z", at::zeros({4, 2}));
    state.add_value("last", {.get = [] { return std::string("0"); },
                             .check = nullptr,
                             .set =
                                 [&](const std::string&) {
                                   if (mesh->rank() == Rank(1)) {
                                     throw Error(absl::InternalError("no such value"));
                                   }
                                 }});
    try {
      load_checkpoint(directory, state, mesh, {.allow_unexpected = true});
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      told.emplace_back(error.status().message());
    }
  });
  ASSERT_EQ(told.size(), 2u);
  for (const std::string& each : told) {
    EXPECT_THAT(each, AllOf(HasSubstr("rank 1: no such value"), HasSubstr("new values in part")));
  }
}

TEST(CheckpointTest, WhatIsNegatedIsSavedAsItIs) {
  const std::string directory = new_directory("negated");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    StateDict state;
    state.add_tensor("n", at::_neg_view(at::arange(3, at::kFloat)));
    save_checkpoint(directory, 1, state, mesh);
    StateDict again;
    const at::Tensor n = at::zeros({3});
    again.add_tensor("n", n);
    load_checkpoint(directory, again, mesh);
    EXPECT_TRUE(at::equal(n, -at::arange(3, at::kFloat)));
  });
}

// Copied past the cache where it can be: any length, from anywhere.
TEST(CheckpointTest, WhatIsLargeIsCopiedAsItIs) {
  const std::string directory = new_directory("large");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const at::Tensor all = at::arange(1'000'003, at::kFloat);
    const std::vector<at::Tensor> tensors = {all.clone(), all.clone().narrow(0, 1, 999'990),
                                             all.narrow(0, 0, 1'000'000).view({1000, 1000}).t(),
                                             at::_neg_view(all.clone()),
                                             all.to(at::kShort).narrow(0, 3, 1'000'000)};
    StateDict state, loaded;
    std::vector<at::Tensor> wanted, got;
    for (size_t i = 0; i < tensors.size(); ++i) {
      wanted.push_back(tensors[i].clone().contiguous());
      got.push_back(at::zeros(tensors[i].sizes(), tensors[i].scalar_type()));
      state.add_tensor("t" + std::to_string(i), tensors[i]);
      loaded.add_tensor("t" + std::to_string(i), got[i]);
    }
    Checkpointer checkpointer(directory, mesh);
    checkpointer.save_async(1, state);
    for (const at::Tensor& tensor : tensors) tensor.zero_();  // what comes after is not in it
    checkpointer.wait();
    load_checkpoint(directory, loaded, mesh, {.verify = true});
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << i;
  });
}

TEST(CheckpointTest, APartialIsNotLoaded) {
  const std::string directory = new_directory("partial");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    StateDict state;
    state.add_tensor("g", at::ones({2}));
    save_checkpoint(directory, 1, state, mesh);
    StateDict partial;
    partial.add_tensor("g", from_local(at::ones({2}), mesh, {Partial()}));
    try {
      load_checkpoint(directory, partial, mesh);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(error.status().message()),
                  HasSubstr("'g' lies [P(sum)]: a Partial is no value"));
    }
  });
}

TEST(CheckpointTest, RanksThatDifferAreAllTold) {
  const std::string directory = new_directory("differ");
  const auto all_fail = [&](const std::function<void(const MeshPtr&, int64_t)>& body,
                            absl::StatusCode code, const std::string& words) {
    on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
      absl::Status status;
      try {
        body(mesh, mesh->rank().value);
      } catch (const Error& error) {
        status = error.status();
      }
      EXPECT_TRUE(status.code() == code || status.code() == absl::StatusCode::kInvalidArgument)
          << status;
      if (status.code() == code) {
        EXPECT_THAT(std::string(status.message()), HasSubstr(words));
      }
    });
    EXPECT_TRUE(!fs::exists(directory) || list_checkpoints(directory)->empty());
  };
  using enum absl::StatusCode;
  all_fail(
      [&](const MeshPtr& mesh, int64_t rank) {
        StateDict state;
        state.add_tensor(rank == 2 ? "v" : "w", zeros({6}, mesh, {Shard(0)}));
        save_checkpoint(directory, 1, state, mesh);
      },
      kInvalidArgument, "is not the same on ranks");
  all_fail(
      [&](const MeshPtr& mesh, int64_t rank) {
        StateDict state;
        state.add_tensor("w", zeros({6}, mesh, {Shard(0)}));
        save_checkpoint(directory, 1 + rank / 2, state, mesh);
      },
      kInvalidArgument, "the step, an option or the number of tensors and values is not the same");
  all_fail(
      [&](const MeshPtr& mesh, int64_t rank) {
        StateDict state;
        state.add_tensor("w", zeros({6}, mesh, {Shard(0)}));
        state.set_value("epoch", "1");
        state.set_value("loss", rank == 1 ? "0.5" : "0.25");
        save_checkpoint(directory, 1, state, mesh);
      },
      kInvalidArgument, "value 'loss' is not the same on ranks 0 and 1");
  all_fail(
      [&](const MeshPtr& mesh, int64_t rank) {
        StateDict state;
        state.add_tensor("w", zeros({6}, mesh, {Shard(0)}));
        if (rank == 2) state.set_value("loss", "1");
        save_checkpoint(directory, 1, state, mesh);
      },
      kInvalidArgument, "is not the same on ranks");
  all_fail(
      [&](const MeshPtr& mesh, int64_t rank) {
        StateDict state;
        state.add_tensor("w", rank == 1 ? at::zeros({2}, at::kComplexFloat) : at::zeros({2}));
        save_checkpoint(directory, 1, state, mesh);
      },
      kInvalidArgument, "");
  all_fail(
      [&](const MeshPtr& mesh, int64_t) {
        StateDict state;
        state.add_tensor("g", from_local(at::ones({2}), mesh, {Partial()}));
        save_checkpoint(directory, 1, state, mesh);
      },
      kInvalidArgument, "redistribute it to Replicate or Shard first");
  all_fail([&](const MeshPtr& mesh, int64_t) { save_checkpoint(directory, -1, StateDict(), mesh); },
           kInvalidArgument, "step is -1");
  StateDict state;
  state.add_tensor("a", at::zeros({1}), {"b"});
  EXPECT_THROW(state.add_tensor("b", at::zeros({1})), Error);
  EXPECT_THROW(state.add_tensor("", at::zeros({1})), Error);
  EXPECT_THROW(state.add_tensor("c", at::Tensor()), Error);
  EXPECT_THROW(state.set_value("v", "{"), Error);
  EXPECT_THROW((void)state.value("v"), Error);
}

// Of which one had stepped when the other failed.
TEST(CheckpointTest, LoadingBringsRanksTogetherAgain) {
  const std::string directory = new_directory("together");
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    torch::nn::Linear model(3, 4);
    distribute_module(*model, mesh, {});
    StateDict state;
    add_module(state, *model);
    save_checkpoint(directory, 1, state, mesh);
    const at::Tensor before = full_tensor(model->weight).detach().clone();
    FusedOptimizer optimizer(model->parameters(), AdamWOptions{});
    if (mesh->coordinate()[0] == 1) {
      for (at::Tensor p : model->parameters()) p.mutable_grad() = at::ones_like(p);
      optimizer.step();
    }
    load_checkpoint(directory, state, mesh);
    EXPECT_TRUE(at::equal(to_local(model->weight.detach()), before));
    const at::Tensor x = distribute_tensor(at::ones({4, 3}), mesh, {Shard(0)});
    (void)model->forward(x).sum().item<float>();
  });
}

}  // namespace
}  // namespace shardweave

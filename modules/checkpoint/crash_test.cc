// Whatever fails, and whenever: the old checkpoint or the new one is there, whole, and the next save
// works.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <latch>
#include <mutex>
#include <optional>
#include <thread>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/status_exception.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/checkpoint/testing/faulty_file_system.h"

namespace shardweave {
namespace {

using testing::Fault;
using testing::FaultKind;
using testing::FaultyFileSystem;
using ::testing::HasSubstr;
using testing::on_mesh;
namespace fs = std::filesystem;

std::string new_directory(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/crash_" + name;
  fs::remove_all(path);
  return path;
}

Placements along_first(const MeshPtr& mesh, const Placement& placement) {
  Placements placements(static_cast<size_t>(mesh->mesh().ndim()), Replicate());
  placements[0] = placement;
  return placements;
}

// All elements are the step.
struct Model {
  explicit Model(const MeshPtr& mesh, double value = 0)
      : w(distribute_tensor(at::full({7, 5}, value), mesh, along_first(mesh, Shard(0)))),
        b(distribute_tensor(at::full({3}, value), mesh, along_first(mesh, Replicate()))) {
    state.add_tensor("w", w);
    state.add_tensor("b", b);
  }
  void set(double value) {
    const c10::AutoGradMode no_grad(false);
    w.fill_(value);
    b.fill_(value);
  }
  double value() const {
    const c10::AutoGradMode no_grad(false);
    const at::Tensor all = at::cat({full_tensor(w).flatten(), full_tensor(b)});
    EXPECT_TRUE((all == all[0]).all().item<bool>()) << "torn:\n" << all;
    return all[0].item<double>();
  }
  at::Tensor w, b;
  StateDict state;
};

absl::Status status_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.status();
  }
  return absl::OkStatus();
}

// The step of the newest checkpoint in `directory`, which is whole: every byte, and as it loads.
int64_t newest(const std::string& directory) {
  const auto steps = list_checkpoints(directory);
  if (!steps.ok() || steps->empty()) return 0;
  for (const int64_t step : *steps) {
    const absl::Status whole = verify_checkpoint(directory + "/" + checkpoint_name(step));
    EXPECT_TRUE(whole.ok()) << whole;
  }
  on_mesh({{"dp", 1}}, [&](const MeshPtr& mesh) {
    Model model(mesh);
    EXPECT_EQ(load_checkpoint(directory, model.state, mesh).step, steps->back());
    EXPECT_EQ(model.value(), static_cast<double>(steps->back()));
  });
  return steps->back();
}

// Saves step 1 well, then step 2 on a file system with this fault, from two ranks. Returns how many
// operations it took; `ok`: whether the save says that it went well.
int64_t save_with(const std::string& directory, const Fault& fault, bool async, bool* ok) {
  // Without gradients all is copied at once, with them beside training.
  const bool is_trained = async && fault.at % 2 == 1;
  fs::remove_all(directory);
  auto faulty = std::make_shared<FaultyFileSystem>(fault);
  std::mutex mutex;
  std::vector<absl::Status> statuses;
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model(mesh, 1);
    save_checkpoint(directory, 1, model.state, mesh);
    model.set(2);
    model.w.requires_grad_(is_trained);
    Checkpointer checkpointer(
        directory, mesh,
        {.keep_last = 1, .copy_beside_training = is_trained, .file_system = faulty});
    const absl::Status status = status_of([&] {
      if (!async) return checkpointer.save(2, model.state);
      checkpointer.save_async(2, model.state);
      checkpointer.wait_for_copy();
      model.set(3);  // what comes after is not in it
      checkpointer.wait();
    });
    const std::lock_guard lock(mutex);
    statuses.push_back(status);
  });
  // All ranks have heard the same.
  EXPECT_EQ(statuses.at(0), statuses.at(1));
  *ok = statuses[0].ok();
  if (fault.kind == FaultKind::kFail && !*ok) {
    EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("No space left on device"));
  }
  if (fault.kind == FaultKind::kPowerCut) faulty->cut_power();
  return faulty->operations();
}

TEST(CrashTest, EveryOperationMayFailOrBeTheLast) {
  const std::string directory = new_directory("every");
  bool ok = false;
  const int64_t operations = save_with(directory, {}, /*async=*/false, &ok);
  ASSERT_TRUE(ok);
  ASSERT_EQ(newest(directory), 2);
  ASSERT_GT(operations, 15);
  int old_ones = 0;
  int new_ones = 0;
  for (const bool async : {false, true}) {
    for (const FaultKind kind : {FaultKind::kFail, FaultKind::kStopDead, FaultKind::kPowerCut}) {
      if (async && kind != FaultKind::kStopDead) continue;  // the rest is the same
      for (int64_t at = 0; at < operations; ++at) {
        SCOPED_TRACE(::testing::Message() << "operation " << at << ", kind "
                                          << static_cast<int>(kind) << ", async " << async);
        save_with(directory, {.kind = kind, .at = at}, async, &ok);
        const int64_t found = newest(directory);
        EXPECT_TRUE(found == 1 || found == 2) << found;
        if (ok) {
          EXPECT_EQ(found, 2);
        }
        (found == 1 ? old_ones : new_ones) += 1;
        // Who comes next is not in the way of what was left.
        on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
          Model model(mesh, 5);
          save_checkpoint(directory, 5, model.state, mesh, {.keep_last = 1});
        });
        EXPECT_EQ(newest(directory), 5);
        std::vector<std::string> names;
        for (const auto& entry : fs::directory_iterator(directory)) {
          names.push_back(entry.path().filename());
        }
        EXPECT_THAT(names, ::testing::UnorderedElementsAre("latest", "lock", "step-000005"));
      }
    }
  }
  EXPECT_GT(old_ones, 20);
  EXPECT_GT(new_ones, 20);
}

TEST(CrashTest, KeepsTheLastOnes) {
  const std::string directory = new_directory("keep");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model(mesh);
    Checkpointer checkpointer(directory, mesh, {.keep_last = 2});
    for (const int64_t step : {10, 20, 30, 40}) {
      model.set(static_cast<double>(step));
      checkpointer.save_async(step, model.state);
    }
    checkpointer.wait();
    const auto steps = [&] { return *list_checkpoints(directory); };
    EXPECT_EQ(steps(), (std::vector<int64_t>{30, 40}));
    // One that goes back would be taken for older than what it has left.
    const absl::Status back = status_of([&] { checkpointer.save(35, model.state); });
    EXPECT_EQ(back.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(back.message()), HasSubstr("step-000040' is of a later step than 35"));
    const absl::Status again = status_of([&] { checkpointer.save(40, model.state); });
    EXPECT_EQ(again.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(std::string(again.message()), HasSubstr("is there already; remove it"));
    EXPECT_EQ(steps(), (std::vector<int64_t>{30, 40}));
  });
}

TEST(CrashTest, WhatDoesNotGoStopsNoSave) {
  const std::string directory = new_directory("stuck");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model(mesh);
    Checkpointer checkpointer(directory, mesh, {.keep_last = 1});
    checkpointer.save(1, model.state);
    if (mesh->rank() == Rank(0)) {
      fs::create_directories(directory + "/step-000001/tokenizer");
      fs::create_directories(directory + "/step-000000");  // another tool's
      std::ofstream(directory + "/step-000000/weights") << "theirs";
      fs::create_directories(directory + "/step-000050.tmp-1234");  // of a run that was killed
      std::ofstream(directory + "/step-000050.tmp-1234/rank-00000.safetensors") << "half";
      fs::create_directories(directory + "/step-000700");  // half of one that was removed by hand
      std::ofstream(directory + "/step-000700/rank-00000.safetensors") << "half";
      fs::create_directory_symlink(directory + "/step-000001", directory + "/step-000800");
      fs::create_directories(directory + "/step-000900");  // others' again
      std::ofstream(directory + "/step-000900/weights") << "theirs";
      fs::create_directories(directory + "/step-000901");
    }
    (void)full_tensor(model.w);
    checkpointer.save(2, model.state);
    model.set(3);
    checkpointer.save_async(3, model.state);
    checkpointer.wait();
    EXPECT_EQ(list_checkpoints(directory)->back(), 3);
    // They are in the way of saving their own steps alone.
    const absl::Status in_the_way = status_of([&] { checkpointer.save(700, model.state); });
    EXPECT_EQ(in_the_way.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(std::string(in_the_way.message()),
                HasSubstr("is no checkpoint, for it has no manifest"));
    // But where they have been checkpoints nobody goes on from the one before without having been told.
    for (const auto& reads : std::vector<std::function<void()>>{
             [&] { load_checkpoint(directory, model.state, mesh); },
             [&] { checkpointer.load(model.state); }, [&] { checkpointer.open(); },
             [&] { checkpointer.open(3); },
             [&] {
               if (const absl::Status its = verify_checkpoint(directory); !its.ok())
                 throw Error(its);
             }}) {
      const absl::Status told = status_of(reads);
      EXPECT_EQ(told.code(), absl::StatusCode::kDataLoss);
      EXPECT_THAT(
          std::string(told.message()),
          HasSubstr("step-000700' has files of a checkpoint and no manifest.json: not all "
                    "of it is there; 'step-000003' beside it is the newest of those before"));
    }
    const absl::Status itself =
        status_of([&] { load_checkpoint(directory + "/step-000700/", model.state, mesh); });
    EXPECT_EQ(itself.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(itself.message()),
                HasSubstr("'step-000003' beside it is the newest of those before"));
    model.set(0);
    EXPECT_EQ(load_checkpoint(directory + "/step-000003", model.state, mesh).step, 3);
    EXPECT_EQ(model.value(), 3);
  });
  fs::remove_all(directory + "/step-000700");
  EXPECT_EQ(newest(directory), 3);
  EXPECT_TRUE(verify_checkpoint(directory).ok());
  EXPECT_EQ(*list_checkpoints(directory), std::vector<int64_t>{3});
  EXPECT_TRUE(fs::exists(directory + "/step-000003"));
  EXPECT_FALSE(fs::exists(directory + "/step-000002"));
  EXPECT_FALSE(fs::exists(directory + "/step-000050.tmp-1234"));
  EXPECT_TRUE(fs::exists(directory + "/step-000000/weights"));
}

TEST(CrashTest, ANewDirectorySurvivesAPowerFailure) {
  const std::string directory = new_directory("new");
  auto faulty = std::make_shared<FaultyFileSystem>(
      Fault{.kind = FaultKind::kPowerCut, .at = int64_t{1} << 40});
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model(mesh, 1);
    save_checkpoint(directory + "/a/b", 1, model.state, mesh, {.file_system = faulty});
    save_checkpoint(directory + "/c/", 1, model.state, mesh, {.file_system = faulty});
  });
  faulty->cut_power();
  EXPECT_EQ(newest(directory + "/a/b"), 1);
  EXPECT_EQ(newest(directory + "/c"), 1);
}

TEST(CrashTest, WhatOneRankThrowsAllAreTold) {
  const std::string directory = new_directory("throws");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model(mesh, 1);
    model.state.add_value("number", {.get = [] { return std::string("nan"); }});
    Checkpointer checkpointer(directory, mesh);
    for (const bool async : {false, true}) {
      const absl::Status status = status_of([&] {
        if (!async) return checkpointer.save(1, model.state);
        checkpointer.save_async(1, model.state);
        checkpointer.wait();
      });
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("value 'number'"));
    }
    // A number that JSON would round.
    Model rounded(mesh, 1);
    rounded.state.add_value("large",
                            {.get = [] { return std::string("[1, 35399562948360463058]"); }});
    const absl::Status large = status_of([&] { checkpointer.save(1, rounded.state); });
    EXPECT_EQ(large.code(), absl::StatusCode::kInvalidArgument) << large;
    EXPECT_THAT(std::string(large.message()),
                HasSubstr("35399562948360463058 is a whole number of more than 64 bits"));
    // What can be written, and not be read.
    Model deep(mesh, 1);
    deep.state.set_value("deep", std::string(63, '[') + std::string(63, ']'));
    EXPECT_THAT(std::string(status_of([&] { checkpointer.save(2, deep.state); }).message()),
                HasSubstr("nested deeper"));
    deep.state.set_value("deep", std::string(60, '[') + std::string(60, ']'));
    checkpointer.save(2, deep.state);
    EXPECT_EQ(checkpointer.load(deep.state).step, 2);
  });
}

TEST(CrashTest, OfAPlainTensorRank0sIsSaved) {
  const std::string directory = new_directory("plain");
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    const auto mine = mesh->rank() == Rank(0) ? 0. : 1.;
    StateDict state;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 6; ++i) {
      // The last is large enough that ranks would share it.
      tensors.push_back(at::full({i < 5 ? 4 : 6 << 20}, mine));
      state.add_tensor("t" + std::to_string(i), tensors.back());
    }
    save_checkpoint(directory, 1, state, mesh);
    load_checkpoint(directory, state, mesh);
    for (const at::Tensor& tensor : tensors) EXPECT_TRUE((tensor == 0).all().item<bool>());
  });
}

TEST(CrashTest, AChangedManifestIsNoticed) {
  const std::string directory = new_directory("manifest");
  on_mesh({{"dp", 1}}, [&](const MeshPtr& mesh) {
    Model model(mesh, 1);
    model.state.set_value("offset", "12");
    save_checkpoint(directory, 1, model.state, mesh);
    const std::string path = directory + "/step-000001/manifest.json";
    std::ifstream in(path);
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    std::string changed = text;
    changed.replace(changed.find("\"offset\": 12"), 12, "\"offset\": 13");
    ASSERT_NE(changed, text);
    std::ofstream(path) << changed;
    EXPECT_EQ(verify_checkpoint(directory + "/step-000001").code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(status_of([&] { load_checkpoint(directory, model.state, mesh); }).code(),
              absl::StatusCode::kDataLoss);
    std::ofstream(path) << text;
    fs::rename(directory + "/step-000001", directory + "/step-000002");
    EXPECT_FALSE(verify_checkpoint(directory + "/step-000002").ok());
    fs::rename(directory + "/step-000002", directory + "/best");
    EXPECT_TRUE(verify_checkpoint(directory + "/best").ok());
  });
}

TEST(CrashTest, TwoRunsInOneDirectoryAreAnError) {
  const std::string directory = new_directory("two_runs");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model(mesh);
    auto first = std::make_unique<Checkpointer>(directory, mesh);
    first->save(1, model.state);
    Checkpointer second(directory, mesh);
    const absl::Status status = status_of([&] { second.save(2, model.state); });
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("another run saves into"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("process "));
    second.load(model.state);  // to read is nobody's business
    first.reset();
    (void)full_tensor(model.w);  // rank 0 has dropped its lock
    second.save(2, model.state);
  });
}

TEST(CrashTest, ErrorsOfTheBackgroundComeOutOfTheNextCall) {
  const std::string directory = new_directory("background");
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    Model model(mesh, 1);
    Checkpointer checkpointer(directory, mesh);
    checkpointer.save(1, model.state);
    checkpointer.save_async(1, model.state);  // is there already
    EXPECT_EQ(status_of([&] { checkpointer.save_async(2, model.state); }).code(),
              absl::StatusCode::kAlreadyExists);
    checkpointer.wait();  // the error has been told
    EXPECT_TRUE(checkpointer.save_async(2, model.state));
    checkpointer.wait();
    EXPECT_EQ(status_of([&] { checkpointer.save_async(-1, model.state); }).code(),
              absl::StatusCode::kInvalidArgument);
  });
  EXPECT_EQ(*list_checkpoints(directory), (std::vector<int64_t>{1, 2}));
  // A file where the directory should be.
  std::ofstream(directory + "_file") << "x";
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model(mesh, 1);
    const absl::Status status =
        status_of([&] { save_checkpoint(directory + "_file/x", 1, model.state, mesh); });
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr("Not a directory"));
    EXPECT_EQ(status_of([&] { save_checkpoint("", 1, model.state, mesh); }).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status_of([&] { Checkpointer(directory, mesh, {.keep_last = -1}); }).code(),
              absl::StatusCode::kInvalidArgument);
  });
  fs::remove(directory + "_file");
}

// The last of a run is not lost to one before it.
TEST(CrashTest, ASaveAfterOneThatFailedIsMade) {
  const std::string directory = new_directory("after_failed");
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    Model model(mesh, 1);
    Checkpointer checkpointer(directory, mesh);
    checkpointer.save(1, model.state);
    checkpointer.save_async(1, model.state);  // is there already
    model.set(2);
    EXPECT_EQ(status_of([&] { checkpointer.save(2, model.state); }), absl::OkStatus());
    checkpointer.wait();  // it has been told
    // Its own errors it throws.
    EXPECT_EQ(status_of([&] { checkpointer.save(2, model.state); }).code(),
              absl::StatusCode::kAlreadyExists);
    checkpointer.save_async(2, model.state);
    EXPECT_EQ(status_of([&] { checkpointer.load(model.state); }).code(),
              absl::StatusCode::kAlreadyExists);
  });
  EXPECT_EQ(newest(directory), 2);
}

// At the beginning of a run, not hours later.
TEST(CrashTest, WhatTheFirstSaveWouldMeetOpenMeets) {
  const std::string directory = new_directory("opened");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model(mesh, 1);
    const auto error_of = [&](const CheckpointOptions& options, std::optional<int64_t> done) {
      Checkpointer checkpointer(directory, mesh, options);
      const absl::Status status = status_of([&] { checkpointer.open(done); });
      (void)full_tensor(model.w);  // before the lock is dropped
      return status;
    };
    EXPECT_EQ(error_of({}, 0), absl::OkStatus());
    save_checkpoint(directory, 7, model.state, mesh);
    EXPECT_EQ(error_of({}, 7), absl::OkStatus());
    EXPECT_EQ(error_of({}, std::nullopt), absl::OkStatus());
    const absl::Status later = error_of({}, 6);
    EXPECT_EQ(later.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(later.message()), HasSubstr("is of a later step than 6"));
    // The directory and the lock are there, and nothing can be made in it.
    const auto full = std::make_shared<FaultyFileSystem>(Fault{.kind = FaultKind::kFail, .at = 0});
    EXPECT_EQ(error_of({.file_system = full}, 7).code(), absl::StatusCode::kResourceExhausted);
    Checkpointer first(directory, mesh);
    first.open();
    first.open(7);
    EXPECT_EQ(error_of({}, 7).code(), absl::StatusCode::kFailedPrecondition);
  });
  int64_t entries = 0;
  for (const auto& entry : fs::directory_iterator(directory)) {
    EXPECT_THAT(entry.path().string(), ::testing::Not(HasSubstr(".tmp-")));
    ++entries;
  }
  EXPECT_EQ(entries, 3);  // the checkpoint, the lock, latest
}

// Files of which nothing can be made until somebody says so.
class StuckFileSystem final : public FileSystem {
 public:
  explicit StuckFileSystem(std::latch& go_on) : go_on_(go_on) {}
  absl::StatusOr<std::unique_ptr<WritableFile>> create(const std::string& path) override {
    go_on_.wait();
    return posix_->create(path);
  }
  absl::Status create_directory(const std::string& path) override {
    return posix_->create_directory(path);
  }
  absl::StatusOr<std::unique_ptr<ReadableFile>> open(const std::string& path,
                                                     Symlinks symlinks) override {
    return posix_->open(path, symlinks);
  }
  absl::Status sync_directory(const std::string& path) override {
    return posix_->sync_directory(path);
  }
  absl::Status rename(const std::string& from, const std::string& to) override {
    return posix_->rename(from, to);
  }
  absl::StatusOr<std::vector<DirectoryEntry>> list(const std::string& path) override {
    return posix_->list(path);
  }
  absl::Status remove_file(const std::string& path) override { return posix_->remove_file(path); }
  absl::Status remove_directory(const std::string& path) override {
    return posix_->remove_directory(path);
  }
  absl::StatusOr<std::unique_ptr<FileLock>> lock(const std::string& path,
                                                 const std::string& holder) override {
    return posix_->lock(path, holder);
  }

 private:
  std::latch& go_on_;
  const std::shared_ptr<FileSystem> posix_ = posix_file_system();
};

// The rank that hangs does so in training and in its part of the checkpoint. One of the others notices, by
// a deadline on one dimension of the mesh; none waits for the checkpoint's.
TEST(CrashTest, WhoIsLeftByARankThatHangsEndsSoon) {
  const std::string directory = new_directory("hangs");
  constexpr int kRanks = 4;
  std::latch others_ended(kRanks - 1);
  WorldOptions options;
  options.timeout = absl::Seconds(2);
  const absl::Status status = run_ranks(
      kRanks,
      [&](World& world) -> absl::Status {
        at::set_num_threads(1);
        const MeshPtr mesh = value_or_throw(init_device_mesh(world, {{"dp", 2}, {"tp", 2}}));
        Model model(mesh, 1);
        (void)model.value();
        // Of which each rank has a piece to write.
        model.state.add_tensor("x",
                               distribute_tensor(at::ones({4, 4}), mesh, {Shard(0), Shard(1)}));
        const bool hangs = mesh->rank() == Rank(3);
        CheckpointOptions its = {.timeout = absl::Seconds(40)};
        if (hangs) its.file_system = std::make_shared<StuckFileSystem>(others_ended);
        std::optional<Checkpointer> checkpointer(std::in_place, directory, mesh, its);
        checkpointer->save_async(1, model.state);
        if (hangs) {
          others_ended.wait();
          checkpointer.reset();
          return absl::OkStatus();
        }
        if (mesh->rank() == Rank(1)) {
          EXPECT_EQ(status_of([&] { (void)full_tensor(model.w); }).code(),
                    absl::StatusCode::kDeadlineExceeded);
        }
        const absl::Time begun = absl::Now();
        checkpointer.reset();
        EXPECT_LT(absl::Now() - begun, absl::Seconds(20));
        others_ended.count_down();
        return absl::OkStatus();
      },
      options);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_FALSE(list_checkpoints(directory)->size() > 0);
}

TEST(CrashTest, AfterATimeOutTheNextSaveWorks) {
  const std::string directory = new_directory("late");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model(mesh, 1);
    CheckpointOptions options = {.timeout = absl::Milliseconds(200)};
    if (mesh->rank() == Rank(1)) {
      options.file_system =
          std::make_shared<FaultyFileSystem>(Fault{.kind = FaultKind::kLate, .at = 0});
    }
    Checkpointer checkpointer(directory, mesh, options);
    checkpointer.save_async(1, model.state);
    EXPECT_FALSE(status_of([&] { checkpointer.wait(); }).ok());
    (void)full_tensor(model.w);  // the late one is there
    model.set(2);
    EXPECT_TRUE(checkpointer.save_async(2, model.state));
    EXPECT_EQ(status_of([&] { checkpointer.wait(); }), absl::OkStatus());
    checkpointer.save(3, model.state);
  });
  EXPECT_EQ(*list_checkpoints(directory), (std::vector<int64_t>{2, 3}));
}

TEST(CrashTest, TrainingGoesOnBesideASave) {
  const std::string directory = new_directory("beside");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Model model(mesh);
    Checkpointer checkpointer(directory, mesh, {.when_busy = WhenBusy::kSkip});
    int saved = 0;
    for (int64_t step = 1; step <= 40; ++step) {
      model.set(static_cast<double>(step));
      saved += checkpointer.save_async(step, model.state) ? 1 : 0;
      for (int i = 0; i < 5; ++i) (void)full_tensor(model.w);  // the mesh is used meanwhile
    }
    checkpointer.wait();
    EXPECT_GE(saved, 1);
    if (mesh->rank() == Rank(0)) {
      EXPECT_EQ(static_cast<size_t>(saved), list_checkpoints(directory)->size());
    }
  });
  EXPECT_GT(newest(directory), 0);
  const auto steps = list_checkpoints(directory);
  for (const int64_t step : *steps) {
    on_mesh({{"dp", 1}}, [&](const MeshPtr& mesh) {
      Model model(mesh);
      load_checkpoint(directory + "/" + checkpoint_name(step), model.state, mesh);
      EXPECT_EQ(model.value(), static_cast<double>(step));
    });
  }
}

}  // namespace
}  // namespace shardweave

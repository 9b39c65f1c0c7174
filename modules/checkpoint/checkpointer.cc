#include "shardweave/modules/checkpoint/checkpointer.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "c10/util/Exception.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/modules/checkpoint/agree.h"
#include "shardweave/modules/checkpoint/snapshot.h"
#include "shardweave/modules/checkpoint/write_checkpoint.h"

namespace shardweave {

using namespace checkpoint_internal;
using dtensor_internal::Cause;
using dtensor_internal::MeshContext;

namespace {

// Copies on the thread that saves, until the one that trains finds out whether it was in time.
class CopyBeside {
 public:
  LateCopies& copies() { return copies_; }

  // Of the thread that saves; what the other one has found out.
  absl::Status run() {
    const absl::Status mine = status_of([&] {
      copies_.run();
      return absl::OkStatus();
    });
    std::unique_lock lock(mutex_);
    is_copied_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return verdict_.has_value(); });
    return mine.ok() ? *verdict_ : mine;
  }
  // Of the thread that trains; again: nothing.
  void wait() {
    std::unique_lock lock(mutex_);
    if (verdict_.has_value()) return;
    changed_.wait(lock, [&] { return is_copied_; });
    verdict_ = copies_.check();
    copies_ = {};
    changed_.notify_all();
  }

  // Of the thread that saves, when all ranks have.
  void all_have_waited() {
    const std::lock_guard lock(mutex_);
    have_all_waited_ = true;
    changed_.notify_all();
  }
  // Whether they have by then.
  bool wait_for_all(absl::Duration most) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, absl::ToChronoNanoseconds(most),
                             [&] { return have_all_waited_; });
  }

 private:
  LateCopies copies_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_copied_ = false, have_all_waited_ = false;
  std::optional<absl::Status> verdict_;
};

// Of who ends, with ranks that may be alive.
constexpr absl::Duration kPatience = absl::Seconds(30);

}  // namespace

class Checkpointer::State {
 public:
  State(std::string directory, const MeshPtr& mesh, const CheckpointOptions& options)
      : directory_(std::move(directory)), mesh_(mesh), options_(options) {
    if (mesh == nullptr) {
      throw Error("Checkpointer", absl::InvalidArgumentError("the mesh is null"));
    }
    if (directory_.empty()) {
      throw Error("Checkpointer", absl::InvalidArgumentError("the directory is \"\""));
    }
    if (options.keep_last < 0 || options.timeout <= absl::ZeroDuration()) {
      throw Error("Checkpointer", absl::InvalidArgumentError(
                                      str_cat("keep_last is ", options.keep_last, " and timeout ",
                                              absl::FormatDuration(options.timeout),
                                              "; wanted 0 or more, and more than 0")));
    }
    if (options_.file_system == nullptr) options_.file_system = posix_file_system();
    context_ = MeshContext::of(mesh);
  }
  ~State() {
    give_up_if_others_do_not_ask();
    give_up_if_broken();
    try {
      wait();
    } catch (const std::exception& error) {
      TORCH_WARN("a checkpoint was not saved, and nobody has asked: ", error.what());
    }
  }

  const std::string& directory() const { return directory_; }

  void open(std::optional<int64_t> done) {
    wait_together("Checkpointer");
    const absl::Status mine = status_of([&] {
      if (whole(*context_).rank() != 0) return absl::OkStatus();
      return open_directory(*options_.file_system, directory_, done, lock_);
    });
    const absl::Status status = agree(whole(*context_), mine, options_.timeout);
    if (!status.ok()) throw Error("Checkpointer", status);
  }

  void save(int64_t step, const StateDict& state, std::source_location where) {
    // One that has failed does not keep this one from the disk; but nothing is saved over a mesh that is
    // broken.
    const absl::Status earlier = settle();
    if (!earlier.ok()) {
      Communicator& comm = whole(*context_);
      if (!comm.health().ok()) throw Error("save_checkpoint", earlier);
      if (comm.rank() == 0) {
        TORCH_WARN("a checkpoint before that of step ", step,
                   " was not saved: ", std::string(earlier.message()));
      }
    }
    SaveRequest request = snapshot(step, state, nullptr, nullptr, "save_checkpoint", where);
    const absl::Status status =
        write_checkpoint(whole(*context_), options_.file_system, request, lock_, options_.timeout);
    if (!status.ok()) throw Error("save_checkpoint", status);
    warn_of(request.not_removed);
  }

  bool save_async(int64_t step, const StateDict& state, std::source_location where) {
    wait_for_copy();
    if (options_.when_busy == WhenBusy::kSkip) {
      int32_t busy = thread_.joinable() && !done_.load(std::memory_order_acquire) ? 1 : 0;
      throw_if_error(whole(*context_)
                         .all_reduce(Buffer::of(&busy, 1), Buffer::of(&busy, 1), ReduceOp::kMax,
                                     {.tag = "checkpoint"})
                         .wait());
      if (busy != 0) return false;
    }
    wait_together("save_async");
    const auto copy = options_.copy_beside_training ? std::make_shared<CopyBeside>() : nullptr;
    auto request = std::make_shared<SaveRequest>(snapshot(
        step, state, &memory_, copy != nullptr ? &copy->copies() : nullptr, "save_async", where));
    connect();
    done_.store(false, std::memory_order_relaxed);
    try {
      thread_ = std::thread([this, request, copy] {
        try {
          if (copy != nullptr) {
            status_ = agree(*comm_, copy->run(), longest());
            copy->all_have_waited();
          }
          if (status_.ok()) {
            status_ =
                write_checkpoint(*comm_, options_.file_system, *request, lock_, options_.timeout);
          }
          warn_of(request->not_removed);
        } catch (const std::exception& error) {
          status_ = absl::InternalError(error.what());
          comm_->abort(status_);  // the others wait for this rank
        }
        request->bytes.clear();
        done_.store(true, std::memory_order_release);
      });
    } catch (const std::system_error& error) {
      done_.store(true, std::memory_order_relaxed);
      const absl::Status status = absl::ResourceExhaustedError(
          str_cat("cannot start a thread to save with: ", std::string_view(error.what())));
      comm_->abort(status);  // the others' threads wait for this rank's
      throw Error("save_async", status);
    }
    copy_ = copy;
    return true;
  }

  LoadedCheckpoint load(StateDict& state, const LoadOptions& options, std::source_location where) {
    wait_together("load_checkpoint");
    LoadOptions with_files = options;
    if (with_files.file_system == nullptr) with_files.file_system = options_.file_system;
    return load_to(directory_, state, mesh_, with_files, memory_, options_.timeout, where);
  }

  void wait_for_copy() {
    if (copy_ != nullptr) copy_->wait();
  }

  void wait() {
    const absl::Status status = joined();
    if (!status.ok()) throw Error("save_async", status);
  }

  // As wait(), and throws on all ranks if on any: after a time-out some may have saved. Collective.
  void wait_together(const char* function) {
    const absl::Status mine = joined();
    const absl::Status all = agree(whole(*context_), mine, longest());
    if (!mine.ok()) throw Error("save_async", mine);
    if (!all.ok()) throw Error(function, all);
  }

 private:
  // The error of the save that was under way. Local.
  absl::Status joined() {
    wait_for_copy();
    if (!thread_.joinable()) return absl::OkStatus();
    thread_.join();
    copy_ = nullptr;
    return std::exchange(status_, absl::OkStatus());
  }

  // Of a rank that still writes what the others have given up, who wait for it on the mesh.
  absl::Duration longest() const { return std::max(options_.timeout, absl::Hours(1)); }

  // The error of the save that was under way, on any rank. Collective.
  absl::Status settle() {
    const absl::Status mine = joined();
    const absl::Status all = agree(whole(*context_), mine, longest());
    return mine.ok() ? all : mine;
  }

  // What they may never do: if this rank leaves by an exception they wait for it where they compute. Local.
  void give_up_if_others_do_not_ask() {
    if (copy_ == nullptr) return;
    copy_->wait();
    const absl::Duration most = std::uncaught_exceptions() > 0 ? absl::Seconds(1) : kPatience;
    if (copy_->wait_for_all(std::min(options_.timeout, most))) return;
    comm_->abort(absl::AbortedError(
        "a Checkpointer has gone before all ranks had called wait_for_copy() or wait()"));
  }

  // Who waits for a rank that hangs does not wait for its part of a checkpoint, too, which may be given an
  // hour: the threads' group is another than those that have told of it. Local.
  void give_up_if_broken() {
    if (!thread_.joinable()) return;
    absl::Status broken = mesh_->world()->health();
    for (const auto& comm : watched_) broken.Update(comm->health());
    if (broken.ok()) return;
    // After another error than a deadline all ranks may be alive, and the checkpoint nearly there.
    const absl::Time until = absl::IsDeadlineExceeded(broken)
                                 ? absl::InfinitePast()
                                 : absl::Now() + std::min(options_.timeout, kPatience);
    while (!done_.load(std::memory_order_acquire)) {
      if (absl::Now() >= until) return comm_->abort(broken);
      absl::SleepFor(absl::Milliseconds(10));
    }
  }

  // Sees to the threads' group: another if it is broken on any rank, as after a time-out.
  void connect() {
    Communicator& comm = whole(*context_);
    int32_t renew = comm_ == nullptr || !comm_->health().ok() ? 1 : 0;
    throw_if_error(comm.all_reduce(ConstBuffer::of(&renew, 1), Buffer::of(&renew, 1),
                                   ReduceOp::kMax, {.tag = "checkpoint"})
                       .wait());
    if (renew == 0) return;
    comm_ = nullptr;
    watch();
    absl::StatusOr<std::shared_ptr<Communicator>> made =
        mesh_->world()->subgroup(mesh_->mesh().ranks(), str_cat("checkpoint ", directory_));
    const absl::Status status = agree(comm, made.status(), longest());
    if (!status.ok()) throw Error("save_async", status);
    comm_ = *std::move(made);
  }

  // Those by which a rank of the mesh is noticed that hangs. As a program with DTensors on the mesh has
  // them all, hardly one is made for this. Collective.
  void watch() {
    if (!watched_.empty()) return;
    const DeviceMesh& mesh = mesh_->mesh();
    std::vector<std::shared_ptr<Communicator>> found;
    std::vector<int> dims;
    for (int d = 0; d < mesh.ndim(); ++d) {
      dims.push_back(d);
      if (mesh.size(d) > 1) found.push_back(value_or_throw(mesh_->communicator(d)));
    }
    if (mesh.ndim() > 1) found.push_back(value_or_throw(mesh_->communicator(dims)));
    watched_ = std::move(found);
  }

  static void warn_of(const absl::Status& not_removed) {
    if (not_removed.ok()) return;
    TORCH_WARN("the checkpoint is saved, but an older one could not be removed: ",
               std::string(not_removed.message()));
  }

  SaveRequest snapshot(int64_t step, const StateDict& state, std::shared_ptr<StagingMemory>* memory,
                       LateCopies* late, const char* function, std::source_location where) {
    SaveRequest request;
    request.directory = directory_;
    request.keep_last = options_.keep_last;
    try {
      take_snapshot(
          *context_, state, step, memory, late,
          str_cat(options_.keep_last, " ", options_.copy_beside_training, " ", directory_),
          {.name = function, .where = where}, request);
    } catch (const Error& error) {
      throw Error(function, error.status());
    }
    return request;
  }

  const std::string directory_;
  const MeshPtr mesh_;
  CheckpointOptions options_;
  std::shared_ptr<MeshContext> context_;
  std::unique_ptr<FileLock> lock_;      // rank 0's, from open() or the first save on
  std::shared_ptr<Communicator> comm_;  // the thread's; null: none so far
  std::vector<std::shared_ptr<Communicator>> watched_;  // the mesh's, once there is comm_
  std::shared_ptr<StagingMemory> memory_;               // of the last copy
  std::shared_ptr<CopyBeside> copy_;                    // of the thread; null: it was made at once
  std::thread thread_;
  std::atomic<bool> done_ = true;
  absl::Status status_;  // of the thread, once joined
};

Checkpointer::Checkpointer(std::string directory, const MeshPtr& mesh,
                           const CheckpointOptions& options)
    : state_(std::make_unique<State>(std::move(directory), mesh, options)) {}
Checkpointer::~Checkpointer() = default;

void Checkpointer::open(std::optional<int64_t> done) {
  state_->open(done);
}

void Checkpointer::save(int64_t step, const StateDict& state, std::source_location where) {
  state_->save(step, state, where);
}

bool Checkpointer::save_async(int64_t step, const StateDict& state, std::source_location where) {
  return state_->save_async(step, state, where);
}

void Checkpointer::wait_for_copy() {
  state_->wait_for_copy();
}

void Checkpointer::wait() {
  state_->wait();
}

LoadedCheckpoint Checkpointer::load(StateDict& state, const LoadOptions& options,
                                    std::source_location where) {
  return state_->load(state, options, where);
}

const std::string& Checkpointer::directory() const {
  return state_->directory();
}

void save_checkpoint(const std::string& directory, int64_t step, const StateDict& state,
                     const MeshPtr& mesh, const CheckpointOptions& options,
                     std::source_location where) {
  Checkpointer(directory, mesh, options).save(step, state, where);
}

}  // namespace shardweave

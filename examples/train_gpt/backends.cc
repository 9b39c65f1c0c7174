#include "backends.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <vector>

#include "ATen/DeviceAccelerator.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "shardweave/comm/rendezvous/rendezvous.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/load_cuda.h"
#include "shardweave/tools/launch/launcher.h"

namespace train_gpt {
namespace {

using shardweave::Buffer;
using shardweave::Communicator;
using shardweave::RendezvousInfo;
using shardweave::World;

using RankWork = std::function<absl::Status(World&, Activity&)>;

// Ranks are threads of this process.
int run_threads(const Backend& backend, const RankWork& rank) {
  const absl::Status status = shardweave::run_ranks(backend.num_ranks,
                                                    [&](World& world) {
                                                      Activity activity("starting");
                                                      return rank(world, activity);
                                                    },
                                                    {.timeout = backend.timeout});
  return status.ok() ? kDone : fail(backend.name, status);
}

// Joins with a GPU, which becomes this thread's current one.
absl::StatusOr<std::unique_ptr<World>> join_on_gpu(const Backend& backend,
                                                   const RendezvousInfo& info) {
  if (absl::Status status = shardweave::load_cuda(); !status.ok()) return status;
  shardweave::WorldOptions options = {.backend = backend.backend.empty() ? "nccl" : backend.backend,
                                      .timeout = backend.timeout};
  // Over NCCL that of the local rank, which joining finds out.
  if (options.backend == "gloo") {
    options.device = info.local_rank.value_or(info.rank) % at::accelerator::deviceCount();
  }
  absl::StatusOr<std::unique_ptr<World>> world = World::from_environment(options);
  if (!world.ok()) return world.status();
  const int device = options.device < 0 ? (*world)->local_rank() : options.device;
  if (absl::Status status = shardweave::load_cuda(device); !status.ok()) return status;
  return world;
}

// This process is one rank; a launcher has started it.
int run_process(const Backend& backend, const RendezvousInfo& info, const RankWork& rank) {
  const std::string who = absl::StrCat(backend.name, ", rank ", info.rank, " of ", info.world_size);
  if (backend.num_ranks != info.world_size) {
    return fail(
        who,
        absl::InvalidArgumentError(absl::StrCat("--mesh has ", backend.num_ranks, " ranks, but ",
                                                info.launcher, " has started ", info.world_size)),
        kUsage);
  }
  const auto activity = std::make_shared<Activity>("joining the other ranks");
  say_last_words(who, activity);
  absl::StatusOr<std::unique_ptr<World>> world =
      backend.on_gpus ? join_on_gpu(backend, info)
                      : World::from_environment({.timeout = backend.timeout});
  if (!world.ok()) return fail(who, world.status());
  const absl::Status status = rank(**world, *activity);
  if (status.ok()) return kDone;
  const int code = fail(who, status);
  (*world)->comm()->abort(status);
  return code;
}

// Starts this program once per rank.
int start_processes(const Backend& backend, int argc, char** argv) {
  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe")};
  command.insert(command.end(), argv + 1, argv + argc);
  const auto result = shardweave::launch(
      {.num_ranks = backend.num_ranks, .command = std::move(command), .prefix_output = false});
  if (!result.ok()) return fail(backend.name, result.status());
  if (!result->ok()) {
    std::fprintf(stderr, "%s: %s\n", backend.name.c_str(), result->summary().c_str());
  }
  return result->exit_code();
}

// FNV-1a.
uint64_t hash(std::string_view bytes, uint64_t seed = 0xcbf29ce484222325) {
  for (unsigned char c : bytes) seed = (seed ^ c) * 0x100000001b3;
  return seed;
}

}  // namespace

int fail(const std::string& who, const absl::Status& status, ExitCode code) {
  std::fprintf(stderr, "%s: %s\n", who.c_str(), status.ToString().c_str());
  return code;
}

int run_on_ranks(const Backend& backend, int argc, char** argv, const RankWork& rank) {
  if (backend.backend == "inproc") return run_threads(backend, rank);
  const absl::StatusOr<RendezvousInfo> launched =
      shardweave::detect_rendezvous(shardweave::Environment::of_process());
  if (launched.ok()) return run_process(backend, *launched, rank);
  if (!absl::IsNotFound(launched.status())) return fail(backend.name, launched.status());
  return backend.backend == "gloo" || backend.on_gpus ? start_processes(backend, argc, argv)
                                                      : run_threads(backend, rank);
}

absl::Status run_guarded(const Activity& activity, const std::function<absl::Status()>& work) {
  absl::Status status;
  try {
    status = work();
  } catch (const shardweave::Error& error) {
    status = error.status();
  } catch (const c10::Error& error) {
    status = absl::InternalError(error.what_without_backtrace());
  } catch (const std::exception& error) {
    status = absl::InternalError(error.what());
  }
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(activity.get(), ": ", std::string(status.message())));
}

absl::Status check_same_everywhere(Communicator& comm, const std::string& settings,
                                   std::string_view data, std::string_view what,
                                   std::string_view description) {
  uint64_t mine = hash(data, hash(settings));
  std::vector<uint64_t> all(comm.size());
  absl::Status status = comm.all_gather(Buffer::of(&mine, 1), Buffer::of(all.data(), comm.size()),
                                        {.tag = "settings"})
                            .wait();
  if (!status.ok()) return status;
  const auto other = std::find_if(all.begin(), all.end(), [&](uint64_t h) { return h != all[0]; });
  if (other == all.end()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("ranks 0 and ", other - all.begin(), " were started with different flags or ",
                   std::string(what), "; here: ", settings, ", ", std::string(description)));
}

}  // namespace train_gpt

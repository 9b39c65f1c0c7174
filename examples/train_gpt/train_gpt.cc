// Trains a byte-level GPT on a text, sharded over ranks that are threads or processes.
//
//   ./bazelw run //examples:train_gpt
//   ./bazelw run //examples:train_gpt -- --mesh=dp=1,tp=4 --backend=gloo --data=book.txt --check
//
// Here: the command line and the backends. The model is in model.cc, how it is sharded and trained
// in training.cc.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "activity.h"
#include "rank.h"
#include "settings.h"
#include "shardweave/comm/rendezvous/rendezvous.h"
#include "shardweave/comm/world.h"
#include "shardweave/tools/launch/launcher.h"

namespace train_gpt {
namespace {

using shardweave::RendezvousInfo;
using shardweave::World;

enum ExitCode { kDone = 0, kFailed = 1, kUsage = 2 };

int fail(const std::string& who, const absl::Status& status, ExitCode code = kFailed) {
  std::fprintf(stderr, "%s: %s\n", who.c_str(), status.ToString().c_str());
  return code;
}

// Ranks are threads of this process.
int run_threads(const Settings& settings) {
  const absl::Status status = shardweave::run_ranks(settings.num_ranks(),
                                                    [&](World& world) {
                                                      Activity activity("starting");
                                                      return run_rank(world, settings, activity);
                                                    },
                                                    {.timeout = settings.timeout});
  return status.ok() ? kDone : fail("train_gpt", status);
}

// This process is one rank; a launcher has started it.
int run_process(const Settings& settings, const RendezvousInfo& info) {
  const std::string who = absl::StrCat("train_gpt, rank ", info.rank, " of ", info.world_size);
  if (settings.num_ranks() != info.world_size) {
    return fail(
        who,
        absl::InvalidArgumentError(absl::StrCat("--mesh has ", settings.num_ranks(), " ranks, but ",
                                                info.launcher, " has started ", info.world_size)),
        kUsage);
  }
  const auto activity = std::make_shared<Activity>("joining the other ranks");
  say_last_words(who, activity);
  absl::StatusOr<std::unique_ptr<World>> world =
      World::from_environment({.timeout = settings.timeout});
  if (!world.ok()) return fail(who, world.status());
  const absl::Status status = run_rank(**world, settings, *activity);
  if (status.ok()) return kDone;
  const int code = fail(who, status);
  (*world)->comm()->abort(status);
  return code;
}

// Starts this program once per rank.
int start_processes(const Settings& settings, int argc, char** argv) {
  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe")};
  command.insert(command.end(), argv + 1, argv + argc);
  const auto result = shardweave::launch(
      {.num_ranks = settings.num_ranks(), .command = std::move(command), .prefix_output = false});
  if (!result.ok()) return fail("train_gpt", result.status());
  if (!result->ok()) std::fprintf(stderr, "train_gpt: %s\n", result->summary().c_str());
  return result->exit_code();
}

int run(int argc, char** argv) {
  absl::SetProgramUsageMessage("Trains a byte-level GPT on a text, sharded over several ranks.");
  const absl::StatusOr<Settings> settings = settings_from_flags(absl::ParseCommandLine(argc, argv));
  if (!settings.ok()) return fail("train_gpt", settings.status(), kUsage);
  // `bazel run` starts programs elsewhere; relative paths mean the user's directory.
  if (const char* directory = std::getenv("BUILD_WORKING_DIRECTORY")) {
    if (::chdir(directory) != 0) std::perror(directory);
  }
  if (settings->backend == "inproc") return run_threads(*settings);
  const absl::StatusOr<RendezvousInfo> launched =
      shardweave::detect_rendezvous(shardweave::Environment::of_process());
  if (launched.ok()) return run_process(*settings, *launched);
  if (!absl::IsNotFound(launched.status())) return fail("train_gpt", launched.status());
  return settings->backend == "gloo" ? start_processes(*settings, argc, argv)
                                     : run_threads(*settings);
}

}  // namespace
}  // namespace train_gpt

int main(int argc, char** argv) {
  return train_gpt::run(argc, argv);
}

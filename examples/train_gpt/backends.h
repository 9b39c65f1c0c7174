// Ranks as threads of a program or as processes, and their errors in one line.
//
//   return run_on_ranks({.name = "train_gpt", .num_ranks = 4, .backend = "", .timeout = timeout},
//                       argc, argv, [&](World& world, Activity& activity) {
//                         return run_guarded(activity, [&] { return work(world, activity); });
//                       });
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "activity.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/comm/world.h"
#include "shardweave/tools/working_directory/working_directory.h"

namespace train_gpt {

enum ExitCode { kDone = 0, kFailed = 1, kUsage = 2 };

// Says on stderr what failed, and returns `code`.
int fail(const std::string& who, const absl::Status& status, ExitCode code = kFailed);

using shardweave::enter_working_directory;

struct Backend {
  std::string name;  // of the program
  int num_ranks = 1;
  std::string backend;  // "inproc", "gloo", "nccl", or "": whichever fits the environment
  absl::Duration timeout;
  bool on_gpus = false;  // each rank has one, which is its thread's current device
};
// "inproc": threads of this process. "gloo", "nccl": processes; this one is a rank if a launcher has
// started it, else it starts itself once per rank, with the same arguments. On GPUs over "nccl" each
// rank has one of its own; over "gloo" ranks share those that there are. Returns the exit code.
int run_on_ranks(const Backend& backend, int argc, char** argv,
                 const std::function<absl::Status(shardweave::World&, Activity&)>& rank);

// `work`, whose exceptions become statuses; an error begins with what the rank was doing.
absl::Status run_guarded(const Activity& activity, const std::function<absl::Status()>& work);

// Ranks that were started with different flags or files would train on, wrongly. `what`: all that
// has to be the same ("texts"), and `description`, which is shown.
absl::Status check_same_everywhere(shardweave::Communicator& comm, const std::string& settings,
                                   std::string_view data, std::string_view what,
                                   std::string_view description);

}  // namespace train_gpt

// Starts the ranks of a program on this machine and sees them to their end.
//
//   auto result = launch({.num_ranks = 4, .command = {"train_gpt", "--steps=60"}});
//   if (!result.ok()) ...               // nothing was started: no such program, zero ranks
//   std::cerr << result->summary();     // "rank 2 (pid 4711) was killed by signal 9 (Killed) ..."
//   return result->exit_code();
//
// Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
// SHARDWEAVE_RUN_ID (new for each start) and, unless it is set, OMP_NUM_THREADS: the cores that this
// process may use (affinity, cgroup) divided by the ranks, which is said on stderr. The port is bound here before any rank starts; rank 0 inherits the listening socket
// as descriptor SHARDWEAVE_STORE_FD, so that nobody can take the port in between. comm/rendezvous
// reads all this. (A program that does not know the descriptor and would bind MASTER_PORT itself
// finds it taken.)
//
// The first rank that fails ends all others: they have a moment to notice by themselves, so that
// they can say what they were doing, then get SIGTERM. SIGINT, SIGTERM and SIGHUP are passed on to
// the ranks and end the launch (SIGINT and SIGHUP not if they were ignored before: nohup). Ranks that
// are to end have the grace period before they are killed; a second signal cuts it short. Nothing that a rank has started stays, even if this process is
// killed with SIGKILL: ranks lead process groups, which die with their ranks.
//
// Threads: blocks, and takes this process' signals meanwhile (other threads should have blocked
// them); one launch at a time. The ranks die with the calling thread.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace shardweave {

struct LaunchOptions {
  int num_ranks = 1;
  std::vector<std::string> command;  // program and arguments, the same for every rank
  // "[2] " before each line of output, coloured on a terminal. False: ranks write to this process'
  // own stdout and stderr.
  bool prefix_output = true;
  // How long the others have after the first failure until they get SIGTERM, and how long ranks
  // that were asked to end by a signal have until they get SIGKILL.
  absl::Duration notice = absl::Seconds(2);
  absl::Duration grace = absl::Seconds(5);
};

struct RankResult {
  pid_t pid = 0;
  int exit_code = 0;
  int signal = 0;  // that killed it, or 0
  absl::Duration duration;
  bool failed() const { return exit_code != 0 || signal != 0; }
};

struct LaunchResult {
  std::vector<RankResult> ranks;
  std::optional<int> first_failure;  // the rank that ended the others
  int interrupted_by = 0;            // the signal that this process got, or 0
  absl::Duration duration;

  bool ok() const { return !first_failure && interrupted_by == 0; }
  // 0; or the failed rank's exit code; or 128 + signal.
  int exit_code() const;
  // One sentence on how it ended.
  std::string summary() const;
  // One line: {"ranks":4,"exit_code":9,"seconds":1.5,"first_failure":2,"interrupted_by":0,
  // "results":[{"rank":0,"pid":4711,"exit_code":0,"signal":0,"seconds":1.4},...]}
  std::string to_json() const;
};

// Errors: InvalidArgument for options, NotFound or PermissionDenied if the program cannot be run,
// Unavailable if the system has no room; then no rank runs.
absl::StatusOr<LaunchResult> launch(const LaunchOptions& options);

}  // namespace shardweave

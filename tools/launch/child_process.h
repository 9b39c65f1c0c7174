// Starts a program as a child that cannot outlive its parent.
//
//   auto pid = start_child({.argv = {"train", "--steps=7"}, .environment = {"RANK=0"}});
//   kill(-*pid, SIGTERM);                    // the child and what it has started itself
//
// The child leads a process group of its own, reads from /dev/null, and the kernel kills it when
// the thread that started it ends (PR_SET_PDEATHSIG), however that happens.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace shardweave {

struct ChildProcess {
  std::vector<std::string> argv;         // argv[0] is looked up in PATH unless it has a slash
  std::vector<std::string> environment;  // all of it, "NAME=value"
  int output = -1;                       // what becomes its stdout and stderr; -1: the parent's
  int error = -1;
  int inherited = -1;  // a descriptor that it gets under the same number; -1: none
};

// Errors, after which there is no child: NotFound or PermissionDenied if the program cannot be run,
// Unavailable if the system has no room for a process.
absl::StatusOr<pid_t> start_child(const ChildProcess& child);

}  // namespace shardweave

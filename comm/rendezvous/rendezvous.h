// Where this rank stands among all ranks and where they meet, as the launcher's environment says
// it.
//
//   auto info = detect_rendezvous(Environment::of_process());
//   if (absl::IsNotFound(info.status())) ...        // no launcher started this process
//   info->launcher;                                 // "torchrun"
//   info->rank;                                     // 3
//
// A pure function of the environment: no files, no network, no names looked up. Known launchers,
// the first whose mark is set wins: tools/launch, torchrun, RANK and WORLD_SIZE set by hand (or by
// PyTorchJob), Open MPI, PMI (MPICH, Intel MPI), Slurm, PMIx, Kubernetes' indexed jobs. Their
// variables are a table, in launchers.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/comm/rendezvous/environment.h"

namespace shardweave {

// The most ranks that a run may have: a larger number is a mistake, and would cost memory for each
// rank before anybody came.
inline constexpr int kMaxWorldSize = 1 << 20;

// The place of the store. Either a file that all ranks can open, or a TCP address.
struct MeetingPoint {
  std::string file;  // of a file store; if not empty, the rest means nothing
  std::string host;
  uint16_t port = 0;
  bool launcher_serves = false;  // the launcher's own store listens there; else rank 0 serves
  std::optional<int>
      listen_fd;  // rank 0: a socket that listens on the port, inherited from the launcher
  // What host and port come from, for messages: "MASTER_ADDR and MASTER_PORT".
  std::string origin;
  friend bool operator==(const MeetingPoint&, const MeetingPoint&) = default;
};

// May also be filled in by hand, for a program that knows all this by itself.
struct RendezvousInfo {
  std::string launcher = "explicit arguments";
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank;        // among the ranks on this machine, if the launcher tells
  std::optional<int> local_world_size;  // how many those are, if the launcher tells
  // Names this start of the program, the same on all ranks: a store may have seen others.
  std::string run = "run";
  MeetingPoint meeting_point;
  friend bool operator==(const RendezvousInfo&, const RendezvousInfo&) = default;
};

// Errors: NotFound if no launcher is to be seen (the message lists what was looked for);
// InvalidArgument for a variable that is missing or ill-formed (names it, its value and what was
// wanted).
absl::StatusOr<RendezvousInfo> detect_rendezvous(const Environment& environment);

// InvalidArgument if the numbers contradict each other or there is nowhere to meet.
absl::Status validate(const RendezvousInfo& info);

}  // namespace shardweave

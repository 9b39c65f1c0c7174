// All ranks of a run meet in a store: the last thing that can go wrong before they talk to each
// other.
//
//   auto roster = check_in(*store, info, this_host(), absl::Minutes(5));     // on every rank
//   if (!roster.ok()) ...             // "ranks 2, 3 of 4 did not come to TCP store ..."
//   roster->local_rank(info.rank);    // its number among the ranks of its host
//
// O(1) requests per rank, O(world size) on rank 0, which waits for all and tells all what came of
// it: every rank gets the same answer.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardweave/comm/rendezvous/rendezvous.h"
#include "shardweave/comm/store/store.h"

namespace shardweave {

struct Roster {
  std::vector<std::string> hosts;  // of each rank
  std::vector<std::string> cpus;   // what each has said of its CPUs
  // How many ranks before this one are on the same host.
  int local_rank(int rank) const;
  // How many ranks are on the host of this one.
  int local_size(int rank) const;
  // What the ranks on the host of this one have said of their CPUs, this one too.
  std::vector<std::string> local_cpus(int rank) const;
};

// Keys begin with "shardweave/<info.run>/". Errors: DeadlineExceeded if a rank did not come (lists
// them), AlreadyExists if two processes say that they are the same rank, FailedPrecondition if
// ranks differ in the world size; what a rank has given to decline(); errors of the store. A rank
// that has waited for `patience` says on stderr, once, for whom. `cpus` is for the others to read;
// like `host`, one line without tabs.
absl::StatusOr<Roster> check_in(Store& store, const RendezvousInfo& info, const std::string& host,
                                absl::Duration timeout, absl::Duration patience = absl::Seconds(10),
                                const std::string& cpus = "");

// Instead of check_in(), of a rank that cannot join: the others, who wait for it, get `why` behind its
// number. Returns `why`, at once; of rank 0 when they have read it, or after five seconds.
absl::Status decline(Store& store, const RendezvousInfo& info, absl::Status why);

// The name of this machine, equal for ranks that share one.
std::string this_host();

}  // namespace shardweave

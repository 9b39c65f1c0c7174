// Connects the ranks of a group, each with each, through Gloo.
//
//   auto channels = connect_mesh(*store, "gloo/dp", group, {.interface = "eth1"}, deadline);
//   channels->of_rank[2].data.get();           // a connected, non-blocking TCP socket to rank 2
//
// Gloo finds the address of the interface, listens, and makes the connections; the ranks find each
// other's addresses in the store. Then the sockets are taken from Gloo, and it is gone again, with
// its threads: see gloo_backend.h for why.
//
// This is the only file that knows Gloo, in the version of May 2022.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/gloo/channel.h"
#include "shardweave/comm/store/store.h"

namespace shardweave::gloo_internal {

struct ConnectOptions {
  // Empty: loopback if all ranks are on one host, else where the host's name leads.
  std::string interface;
  // What must be equal on all ranks: no two builds talk to each other.
  std::string build;
  // Asked every 100 ms: why there is no sense in waiting any longer. `missing`, which costs a
  // request per rank, are the ranks that have not come (none: all have, and are being connected).
  // May be empty.
  using Missing = std::function<std::vector<int>()>;
  std::function<absl::Status(const Missing& missing)> watch;
  // After this time stderr says, once, who is waited for.
  absl::Duration patience = absl::Seconds(10);
  // This machine, as tests may have it: what ranks that share a loopback have in common, and the
  // name that leads to its address.
  std::string host;
  std::string host_name;
};

struct Channels {
  std::vector<Channel> of_rank;  // none at this rank's own place
  bool to_threads = false;       // some of the ranks are threads of one process
};

// All ranks of the group call, with the same prefix, which no other call ever uses; the keys that
// begin with it are removed in the end, unless something went wrong.
//
// Errors, on every rank within a second, with the rank that met them: InvalidArgument: no such
// interface; FailedPrecondition: the host's name leads nowhere, or to loopback where ranks are on
// several hosts; the ranks' builds differ; what `watch` returns. DeadlineExceeded names the ranks
// that did not come.
absl::StatusOr<Channels> connect_mesh(Store& store, std::string_view prefix, const GroupInfo& group,
                                      const ConnectOptions& options, Deadline deadline);

}  // namespace shardweave::gloo_internal

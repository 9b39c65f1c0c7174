// Connects the ranks of a group, each with each, through Gloo.
//
//   auto sockets = connect_mesh(*store, "gloo/dp", group, /*interface=*/"", deadline);
//   (*sockets)[2].get();                       // a connected, non-blocking TCP socket to rank 2
//
// Gloo finds the address of the interface, listens, and makes the connections; the ranks find each
// other's addresses in the store. Then the sockets are taken from Gloo, and it is gone again, with
// its threads: see gloo_backend.h for why.
//
// This is the only file that knows Gloo, in the version of May 2022.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/gloo/unique_fd.h"
#include "shardweave/comm/store/store.h"

namespace shardweave::gloo_internal {

// One socket per rank, none at this rank's own place. All ranks of the group call, with the same
// prefix, which no other call ever uses; the keys that begin with it are removed in the end. An
// empty interface is loopback if all ranks are on one host, else where the host's name leads.
//
// DeadlineExceeded names the ranks that did not come; InvalidArgument: no such interface.
absl::StatusOr<std::vector<UniqueFd>> connect_mesh(Store& store, std::string_view prefix,
                                                   const GroupInfo& group,
                                                   const std::string& interface, Deadline deadline);

}  // namespace shardweave::gloo_internal

// Joins the World that a launcher has started: what World::from_environment needs beyond //comm, in
// a target of its own because the TCP store is LibTorch's.
//
//   auto world = World::from_environment({.timeout = absl::Minutes(1)});
//   if (absl::IsNotFound(world.status())) ...              // no launcher started this process
//   (*world)->comm()->all_reduce(x, x, ReduceOp::kSum).wait();
//
// Which launchers and variables: comm/rendezvous/rendezvous.h.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardweave/comm/paired/paired.h"
#include "shardweave/comm/rendezvous/rendezvous.h"
#include "shardweave/comm/store/store.h"
#include "shardweave/comm/world.h"

namespace shardweave {

// The store where the ranks of `info` meet: rank 0 serves it unless the launcher does, the others
// wait for it. Errors of open_file_store() and open_c10d_store(), with the origin of the address.
absl::StatusOr<std::shared_ptr<Store>> open_store(const RendezvousInfo& info,
                                                  absl::Duration timeout);

// Joins the World of which `info` tells, in that store, and has LibTorch use world->num_threads()
// threads; the first rank of a machine says so on stderr. `connect_device`: as of join_world.h.
absl::StatusOr<std::unique_ptr<World>> join_world(const RendezvousInfo& info,
                                                  const WorldOptions& options = {},
                                                  ConnectDevice connect_device = nullptr);

}  // namespace shardweave

// A World is one rank's view of all ranks: who it is, and the communicator that reaches the others.
//
//   absl::Status s = run_ranks(4, [](World& world) -> absl::Status {     // a thread per rank, in this process
//     return world.comm()->barrier().wait();
//   });
//   auto world = World::from_environment({.backend = "gloo"});           // one process per rank, under a launcher
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardweave/comm/communicator.h"

namespace shardweave {

struct WorldOptions {
  std::string backend = "gloo";                   // of from_environment
  std::string interface;                          // network interface; empty: loopback when all ranks are on one host, else by host name
  absl::Duration timeout = absl::Minutes(5);      // default deadline of every collective and of the rendezvous
};

class World {
 public:
  World(std::shared_ptr<Communicator> comm);
  static absl::StatusOr<std::unique_ptr<World>> from_environment(const WorldOptions& options = {});
  int rank() const;
  int size() const;
  int local_rank() const;
  const std::shared_ptr<Communicator>& comm() const;
};

// Runs `body` on `num_ranks` threads over the inproc backend and joins them. If a body fails (a status or an exception), the world
// is aborted, so that every rank that waits for it gets an error that names the failed rank; the result is the first failure.
absl::Status run_ranks(int num_ranks, const std::function<absl::Status(World&)>& body, const WorldOptions& options = {});

}  // namespace shardweave

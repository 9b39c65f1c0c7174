// A World is one rank's view of all ranks: who it is, and the communicator that reaches the others.
//
//   absl::Status s = run_ranks(4, [](World& world) -> absl::Status {  // a thread per rank
//     return world.comm()->barrier().wait();
//   });
//   auto world = World::from_environment({.backend = "gloo"});  // in a process per rank
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardweave/comm/communicator.h"

namespace shardweave {

struct WorldOptions {
  // Of from_environment. "gloo", or "nccl": memory of GPUs by NCCL, that of the CPU by Gloo
  // (comm/nccl/nccl_backend.h). "gloo" takes memory of GPUs, too, if `device` is given: by way of the
  // host, so slowly, but for several processes on one GPU as well (comm/nccl/staged_backend.h).
  std::string backend = "gloo";
  // Network interface of from_environment; empty: loopback when all ranks are on one host, else by
  // host name.
  std::string interface;
  // Default deadline of every collective and of the rendezvous.
  absl::Duration timeout = absl::Minutes(5);
  // This rank's GPU, as CUDA numbers those that are visible. -1: with "nccl" that of the local rank, with
  // "gloo" none.
  int device = -1;
};

// Used by one thread at a time; cheap to move, not to be copied.
class World {
 public:
  // A rank whose launcher has said nothing else is the `local_rank`-th of its host.
  explicit World(std::shared_ptr<Communicator> comm) : World(comm, comm->rank(), comm->size()) {}
  World(std::shared_ptr<Communicator> comm, int local_rank, int local_size, int num_threads = 0)
      : comm_(std::move(comm)),
        local_rank_(local_rank),
        local_size_(local_size),
        num_threads_(num_threads) {}

  // As the launcher's environment says (rendezvous/). With Bazel depend on //comm/environment to
  // link this; what tools/install installs has it. LibTorch then uses num_threads() threads, unless it already uses fewer; who wants
  // another number sets OMP_NUM_THREADS, or calls at::set_num_threads afterwards.
  static absl::StatusOr<std::unique_ptr<World>> from_environment(const WorldOptions& options = {});

  int rank() const { return comm_->rank(); }
  int size() const { return comm_->size(); }
  // Among the ranks of this host, from 0.
  int local_rank() const { return local_rank_; }
  // How many ranks are on this host.
  int local_size() const { return local_size_; }
  // This rank's share of its machine's cores: how many threads its operators should use, so that
  // the ranks of a machine do not fight for it. from_environment() tells LibTorch. 0: as it is (the
  // user has set OMP_NUM_THREADS, or ranks are threads).
  int num_threads() const { return num_threads_; }
  const std::shared_ptr<Communicator>& comm() const { return comm_; }

  // What a higher layer keeps for this rank as long as the world lives (mesh/: the meshes made so
  // far); null at first. One layer uses it.
  std::shared_ptr<void>& extension() { return extension_; }

 private:
  std::shared_ptr<Communicator> comm_;
  int local_rank_;
  int local_size_;
  int num_threads_;
  std::shared_ptr<void> extension_;
};

// Runs `body` on `num_ranks` threads over the inproc backend and joins them. If a body fails (a
// status or an exception), the world is aborted, so that every rank that waits for it gets Aborted,
// which names the failed rank; a rank that waits for one whose body has ended well gets
// Unavailable. The result is the failure that came first, with the rank in front of its message.
// An exception that carries a status (status_exception.h; dtensor's Error) keeps its code; others
// are Internal.
absl::Status run_ranks(int num_ranks, const std::function<absl::Status(World&)>& body,
                       const WorldOptions& options = {});

// The same for a body that returns nothing, and fails by exceptions only.
template <typename Body>
  requires std::is_void_v<std::invoke_result_t<const Body&, World&>>
absl::Status run_ranks(int num_ranks, const Body& body, const WorldOptions& options = {}) {
  const std::function<absl::Status(World&)> with_status = [&body](World& world) {
    body(world);
    return absl::OkStatus();
  };
  return run_ranks(num_ranks, with_status, options);
}

}  // namespace shardweave

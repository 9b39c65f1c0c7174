// A Queue puts operations on a lane's stream in the order of their issue, as soon as NCCL takes them,
// and never waits for that: a communicator may still be connecting, or busy with the call before.
//
//   Queue queue(library, std::move(lane), group);
//   absl::Status s = queue.add(ticket, call);                       // after what is on call.stream
//   if (s.ok()) s = queue.advance(0, [&](auto ticket, auto stream) { return record(ticket, stream); });
//
// Calls of one group (Call::group) are one of NCCL's, which wants the same groups on all ranks: never
// what has piled up by chance. Not thread-safe; with the lane's device current.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/comm/nccl/lane.h"

namespace shardweave::nccl_internal {

class Queue {
 public:
  // Called for each operation when it is on the stream.
  using Launched = std::function<absl::Status(Backend::Ticket ticket, CudaStream stream)>;

  // `lane` is connected.
  Queue(std::shared_ptr<const Library> library, std::unique_ptr<Lane> lane, GroupInfo group)
      : library_(std::move(library)),
        lane_(std::move(lane)),
        group_(std::move(group)),
        state_(State::kReady) {}
  // Of the messages from this rank to `peer`, or of those from there. The two connect, once both have
  // a message for it: the sender makes the name, which goes by `names`.
  Queue(std::shared_ptr<const Library> library, std::unique_ptr<Lane> lane,
        std::shared_ptr<Communicator> names, int peer, bool sends);
  // Whoever brings the name writes to it.
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  absl::Status add(Backend::Ticket ticket, const Call& call);
  // But for the group of this number, which is not complete; 0: all are.
  absl::Status advance(uint64_t open_group, const Launched& launched);

  Lane& lane() { return *lane_; }

 private:
  enum class State { kUnnamed, kNamed, kConnecting, kReady, kBusy };
  // A call with its counts.
  struct Held {
    Backend::Ticket ticket;
    Call call;
    CudaEvent ready;
    std::vector<int64_t> in_counts, out_counts;
  };

  // Whether it got on.
  absl::StatusOr<bool> connect();
  // The first of held_, with those of its group.
  absl::Status launch_group();

  const std::shared_ptr<const Library> library_;
  const std::unique_ptr<Lane> lane_;
  const GroupInfo group_;
  State state_;

  const std::shared_ptr<Communicator> names_;
  const int peer_ = 0;
  const bool sends_ = false;
  NcclUniqueId id_ = {};
  Work name_;

  std::vector<Held> held_;                    // not given to NCCL yet
  std::vector<Backend::Ticket> in_progress_;  // given to it in the last call
  const char* last_call_ = "";
};

}  // namespace shardweave::nccl_internal

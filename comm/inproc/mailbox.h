// Mailboxes is where the sends and recvs of a group meet: a receiver's mailbox holds those that
// wait for their other side.
//
//   absl::StatusOr<uint64_t> ticket = mailboxes.post(rank, call);  // 0: done already; never waits
//   if (ticket.ok() && *ticket != 0) status = mailboxes.wait(rank, *ticket, deadline, patience);
//
// Whoever comes second copies from buffer to buffer, outside all locks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/inproc/group.h"
#include "shardweave/comm/patience.h"

namespace shardweave::inproc {

class Mailboxes {
 public:
  // Pending sends and recvs of one rank in one group; more are ResourceExhausted.
  static constexpr uint64_t kPosts = 1024;

  explicit Mailboxes(Group& group);

  absl::StatusOr<uint64_t> post(int rank, const Call& call);
  bool done(int rank, uint64_t ticket) const;
  absl::Status wait(int rank, uint64_t ticket, Deadline deadline, Patience patience);

  // Takes the rank's posts out of all mailboxes.
  void leave(int rank);

 private:
  // One send or recv. Written by its owner while free, read by the rank that matches it.
  struct alignas(64) Post {
    std::atomic<uint64_t> done{0};  // the last ticket that was done here
    std::atomic<uint64_t> said{0};  // the last that was said to be late
    uint64_t ticket = 0;            // the last that was given out
    int owner = 0;
    int message_tag = 0;
    std::byte* data = nullptr;
    CallSignature signature;
  };
  struct Rank {
    std::unique_ptr<Post[]> posts;  // made by the first call
    uint64_t cursor = 0;
    std::mutex mutex;
    std::vector<Post*> mailbox;  // sends to this rank and its recvs, oldest first; guarded by mutex
  };
  static bool is_send(const Post& post) { return post.signature.op == OpKind::kSend; }

  Post* free_post(Rank& rank);
  // Puts `mine` into the mailbox, or takes what it matches out.
  Post* match(Rank& receiver, Post* mine);
  absl::Status transfer(int rank, const Post& send, const Post& recv);

  Group& group_;
  std::vector<Rank> ranks_;
};

}  // namespace shardweave::inproc

// A Work is the handle of one asynchronous operation.
//
//   Work work = comm.all_gather(mine, all);       // issued; other computation may go on here
//   if (absl::Status s = work.wait(); !s.ok()) return s;
//   use(all);                                     // the data is there
//
// Done means, on a CPU: every byte that this rank asked for has arrived, and no rank reads or
// writes this rank's buffers any more, also when the operation failed. Until then the buffers must
// stay alive, and must not be written (not even read, if they are outputs).
//
// Cheap to copy. done() and wait() may be called by any thread, any number of times; once done, a
// Work gives the same answer for ever. A Work that is dropped is not cancelled.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"

namespace shardweave {

// Monotonic; time_point::max() is never.
using Deadline = std::chrono::steady_clock::time_point;

// What a Work that is not done asks. Implemented by those who issue work; one object may answer for
// many operations, which it tells apart by `ticket`.
class PendingWork {
 public:
  struct Token {
    uint64_t ticket = 0;
    uint64_t record = 0;  // its line in the flight record
    Deadline deadline = Deadline::max();
  };
  virtual ~PendingWork() = default;
  virtual bool done(const Token& token) = 0;
  virtual absl::Status wait(const Token& token) = 0;
};

class Work {
 public:
  Work() = default;                                                   // done and OK
  explicit Work(absl::Status result) : result_(std::move(result)) {}  // done
  Work(std::shared_ptr<PendingWork> pending, const PendingWork::Token& token)
      : pending_(std::move(pending)), token_(token) {}

  // Never blocks. May do a part of the operation's work. True also when the operation has failed,
  // or its deadline has passed.
  bool done() const { return pending_ == nullptr || pending_->done(token_); }

  // Whether it was done when it was made: known without asking who runs it.
  bool immediate() const { return pending_ == nullptr; }

  // Blocks until done or until the operation's deadline (counted from its issue) has passed.
  absl::Status wait() const { return pending_ == nullptr ? result_ : pending_->wait(token_); }

 private:
  absl::Status result_;
  std::shared_ptr<PendingWork> pending_;
  PendingWork::Token token_;
};

}  // namespace shardweave

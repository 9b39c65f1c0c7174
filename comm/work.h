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
// On a device it means the same, seen from the host: the device has run the operation. That is more
// than a program usually needs: work.wait_on(stream) lets the device wait, and the host goes on.
//
//   Work work = comm.all_reduce(x, x, ReduceOp::kSum, {.stream = stream});  // after what is on it
//   if (absl::Status s = work.wait_on(stream); !s.ok()) return s;           // not when it is done
//   use_on(stream, x);                                                      // finds the sum
//
// Cheap to copy. done() and wait() may be called by any thread, any number of times; once done, a
// Work gives the same answer for ever. A Work that is dropped is not cancelled.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "shardweave/comm/buffer.h"

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
  virtual absl::Status wait_on(const Token& token, DeviceStream) { return wait(token); }
};

class Work {
 public:
  Work() = default;                                                   // done and OK
  explicit Work(absl::Status result) : result_(std::move(result)) {}  // done
  Work(std::shared_ptr<PendingWork> pending, const PendingWork::Token& token)
      : pending_(std::move(pending)), token_(token) {}

  // Never waits for another rank. May do a part of the operation's work: of memory on a device that
  // goes by way of the host, the copy back, in the order of the stream. True also when the operation
  // has failed, or its deadline has passed.
  bool done() const { return pending_ == nullptr || pending_->done(token_); }

  // Whether it was done when it was made: known without asking who runs it.
  bool immediate() const { return pending_ == nullptr; }

  // Blocks until done or until the operation's deadline (counted from its issue) has passed.
  absl::Status wait() const { return pending_ == nullptr ? result_ : pending_->wait(token_); }

  // What is put on `stream` of the operation's device afterwards runs when the operation is done.
  // The host does not wait for the device, and so learns only of errors that are known by now; wait(),
  // done() and later operations tell the others. It does wait, until the operation's deadline, for the
  // device to have been given the operation: the first operations between ranks for the others to
  // issue theirs, a message to this rank itself for its other side here. So issue both sides before
  // waiting. (Of memory of the CPU: the same as wait().)
  absl::Status wait_on(DeviceStream stream) const {
    return pending_ == nullptr ? result_ : pending_->wait_on(token_, stream);
  }

 private:
  absl::Status result_;
  std::shared_ptr<PendingWork> pending_;
  PendingWork::Token token_;
};

}  // namespace shardweave

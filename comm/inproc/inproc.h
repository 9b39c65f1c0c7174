// The in-process backend: a rank is a thread, and ranks read and write each other's buffers
// directly.
//
//   InprocHub hub(4);
//   std::shared_ptr<Communicator> comm = hub.connect(2);     // on the thread of rank 2
//   comm->barrier().wait();                                  // others do the same with 0, 1, 3
//
// run_ranks() (world.h) does this and starts the threads. Waiting ranks stay awake for some
// microseconds and sleep then; with more ranks than cores they give way at once.
//
// A rank that has arrived depends on no other: the last to arrive, or whoever waits, moves the
// data. At most 64 collectives and 1024 sends and recvs of a rank can be pending in a group.
// Counts, sizes, roots and so on of all ranks are compared. A rank whose communicator is destroyed
// has left: those that wait for it get Unavailable.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "shardweave/comm/communicator.h"

namespace shardweave {

// The most ranks that one process may have: each is a thread.
inline constexpr int kMaxInprocRanks = 4096;

// The world of the ranks of one process, 1 to kMaxInprocRanks. Any thread may use it; communicators may outlive it.
class InprocHub {
 public:
  explicit InprocHub(int num_ranks);
  ~InprocHub();
  InprocHub(const InprocHub&) = delete;
  InprocHub& operator=(const InprocHub&) = delete;

  // The communicator of one rank over all ranks. nullptr if there is no such rank, or it has been
  // given out.
  std::shared_ptr<Communicator> connect(int rank, const CommunicatorOptions& options = {});
  // The same without the communicator, for backends that are built on this one.
  std::unique_ptr<Backend> make_backend(int rank);

  // The rank will take part in nothing more: ranks that wait for it, in any group, get Unavailable.
  void leave(int rank);
  // Breaks all groups, also those that are made later.
  void abort(const absl::Status& reason);

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace shardweave

// A Lane is an NCCL communicator with a stream of its own, on which its operations run in order.
//
//   Lane lane(library, give_up);
//   absl::Status s = lane.open();
//   if (s.ok()) s = lane.connect(id, /*ranks=*/4, rank, deadline);      // with the others
//   if (s.ok()) s = lane.follow(*lane.mark(callers_stream));            // what comes now runs after that
//   library->ncclAllReduce(..., lane.comm(), lane.stream());
//   if (s.ok()) s = lane.has_settled("ncclAllReduce").status();
//
// NCCL's calls do not block, but may go on after they have returned: until has_settled() nothing else
// is called, and what they put on the stream may not be there. One thread at a time, with the lane's
// device current.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/nccl/library.h"

namespace shardweave::nccl_internal {

class Lane {
 public:
  // Whoever settles gives up when `give_up` says why.
  using GiveUp = std::function<absl::Status()>;

  Lane(std::shared_ptr<const Library> library, GiveUp give_up)
      : library_(std::move(library)), give_up_(std::move(give_up)) {}
  // Aborts, if it is not closed.
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Makes the stream.
  absl::Status open();
  // All ranks call, and wait for each other.
  absl::Status connect(const NcclUniqueId& id, int ranks, int rank, Deadline deadline);
  // The same without waiting, for has_settled().
  absl::Status begin_to_connect(const NcclUniqueId& id, int ranks, int rank);

  NcclComm comm() const { return comm_; }
  CudaStream stream() const { return stream_; }

  // What is on `stream` by now. Then, just before what comes after it is put there, the lane's stream
  // is to wait for it.
  absl::StatusOr<CudaEvent> mark(DeviceStream stream);
  absl::Status follow(CudaEvent mark);
  // Whether the last call has come to its end, or its error.
  absl::StatusOr<bool> has_settled(const char* call);
  // Waits for that.
  absl::Status settle(const char* call, Deadline deadline);
  // What has gone wrong meanwhile.
  absl::Status asynchronous_error();

  // When nothing is under way: lets go of the communicator in an orderly way, or aborts.
  void close(Deadline deadline);
  // What is under way on the device ends. Waits for that.
  void abort();
  // Whoever takes the communicator aborts it; null if it is gone.
  NcclComm take() { return std::exchange(comm_, nullptr); }
  // Whether the device has run everything.
  bool is_idle() const;

 private:
  const std::shared_ptr<const Library> library_;
  const GiveUp give_up_;
  NcclComm comm_ = nullptr;
  CudaStream stream_ = nullptr;
  std::vector<CudaEvent> marks_;  // of which no stream has to wait any more
  std::vector<CudaEvent> all_marks_;
};

}  // namespace shardweave::nccl_internal

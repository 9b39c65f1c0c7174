// How the ranks of a group come together on their GPUs, over a communicator of the CPU.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/nccl/lane.h"
#include "shardweave/comm/nccl/nccl_options.h"

namespace shardweave::nccl_internal {

// Why a group has given up, if it has: the first reason. Any thread.
class Reason {
 public:
  void set(const absl::Status& why) {
    const std::lock_guard lock(mutex_);
    if (why_.ok()) why_ = retold(why);
    is_set_.store(true);
  }
  absl::Status get() const {
    if (!is_set_.load()) return absl::OkStatus();
    const std::lock_guard lock(mutex_);
    return retold(why_);
  }

 private:
  std::atomic<bool> is_set_{false};
  mutable std::mutex mutex_;
  absl::Status why_;
};

// OK if `device` is this rank's.
absl::Status check_device_is(Device device, int mine);

struct NcclConnection {
  std::shared_ptr<const Library> library;
  std::shared_ptr<Reason> reason;  // for which whoever settles gives up
  std::unique_ptr<Lane> lane;      // of collectives
};

// All ranks call. What fails on one fails on all: libraries that are missing or too old, no such device,
// two ranks that must not share one. Without NCCL processes may, threads of one process must not.
absl::StatusOr<std::shared_ptr<const Library>> load_on_all(const NcclOptions& options,
                                                           Library::Parts parts,
                                                           const GroupInfo& group,
                                                           Communicator& bootstrap);

// The same, and connects them.
absl::StatusOr<NcclConnection> connect_all(const NcclOptions& options, const GroupInfo& group,
                                           Communicator& bootstrap, Deadline deadline);

}  // namespace shardweave::nccl_internal

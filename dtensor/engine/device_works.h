// The collectives on a device for which the device waits and the host does not (tensor_work.h), until
// numbers reach the host: an error in flight must be there before the numbers that it has spoilt.
//
//   context.on_device.add(work);                    // each one that is issued
//   context.before_host_reads();                    // before .item(), and what else shows numbers
//
// Internal to dtensor/ and modules/.
#pragma once

#include <cstdint>
#include <deque>

#include "absl/status/status.h"
#include "shardweave/comm/work.h"

namespace shardweave::dtensor_internal {

class DeviceWorks {
 public:
  // Those that have run are let go of, but for their error.
  void add(const Work& work) {
    while (!works_.empty() && works_.front().done()) take_first();
    works_.push_back(work);
  }
  // Until the device has run them all, or one has failed: the first error there has been.
  absl::Status wait() {
    waits_ += works_.empty() ? 0 : 1;
    while (!works_.empty() && error_.ok()) take_first();
    return error_;
  }
  // What comes on `stream` runs after them all.
  absl::Status wait_on(DeviceStream stream) {
    for (const Work& work : works_) error_.Update(work.wait_on(stream));
    return error_;
  }
  // How often the host has waited so: once a step costs what the device could have done meanwhile.
  int64_t waits() const { return waits_; }

 private:
  void take_first() {
    error_.Update(works_.front().wait());
    works_.pop_front();
  }

  std::deque<Work> works_;
  absl::Status error_;
  int64_t waits_ = 0;
};

}  // namespace shardweave::dtensor_internal

// Collectives on tensors' memory, in LibTorch's order of things.
//
//   TensorWork work(context,
//                   comm.all_reduce(comm_buffer(x), comm_buffer(x), ReduceOp::kSum,
//                                   collective_options(context, x.device(), "all_reduce")),
//                   x.device());
//   if (absl::Status s = work.wait(); !s.ok()) return s;
//   y = x + 1;                                    // finds the sum
//
// On the CPU that is a Work: wait() is until the data is there. On a device LibTorch works on streams,
// ahead of which the host runs. The operation begins when the device has done what is on the thread's
// current stream when it is issued, and wait() puts it before what comes on the thread's current
// stream from then on; the host waits for no device. So whatever holds the memory may drop it after
// wait(), also under another current stream than when it was issued: LibTorch's allocators give memory
// that was made on a stream to nobody who works before that stream's later work. (Memory that was made
// on a third one: record_stream() of the local tensor, as everywhere in LibTorch.) Errors of the device
// come later, then: with the next collective, and before numbers reach the host (device_works.h).
//
// Streams are those of c10::Stream: nothing here links CUDA. Internal to dtensor/ and modules/.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "c10/core/Device.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/comm/work.h"

namespace shardweave::dtensor_internal {

class MeshContext;

// The stream that LibTorch works on now, in this thread, on `device`; none for the CPU.
DeviceStream current_stream(c10::Device device);

// Of a collective that the mesh is about now (About), on memory of `device`. `tag` is not copied.
CallOptions collective_options(const MeshContext& context, c10::Device device,
                               std::string_view tag);

class TensorWork {
 public:
  TensorWork() = default;  // done and OK
  TensorWork(MeshContext& context, Work work, c10::Device device);

  // Until LibTorch can use the memory in this thread; after an error nobody touches it any more.
  absl::Status wait() const { return device_.is_cpu() ? work_.wait() : wait_on_stream(); }
  // Whether the operation has run, also on the device.
  bool done() const { return work_.done(); }

 private:
  absl::Status wait_on_stream() const;

  Work work_;
  DeviceStream issued_on_;  // whose memory it uses
  c10::Device device_ = c10::kCPU;
};

}  // namespace shardweave::dtensor_internal

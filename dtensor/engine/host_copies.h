// Copies between a device and the host's memory that go on while both compute: for parameters that
// rest on the CPU and are used on a device (fsdp_unit.h).
//
//   const c10::Stream lane = copy_lane(device);       // beside those that compute
//   HostCopies copies(lane, gradients);
//   ...                                               // `gradients` may be dropped
//   copies.wait();
//   copies[0];                                        // has the numbers of gradients[0]
//
// Streams are those of c10::Stream: nothing here links CUDA. Internal to dtensor/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/types/span.h"
#include "c10/core/Device.h"
#include "c10/core/Event.h"
#include "c10/core/Stream.h"

namespace shardweave::dtensor_internal {

// Another stream of the device than those that LibTorch computes on by itself.
c10::Stream copy_lane(c10::Device device);

// Memory of the host that devices can copy from and to while the host goes on, where LibTorch has such
// (CUDA's pinned memory, in powers of two); else any, which is said once.
at::Tensor host_memory(int64_t numel, at::ScalarType dtype);

// What comes on `stream` sees what has come by now on this thread's current stream of its device.
void wait_for_current(const c10::Stream& stream);

// From the lane's device to the host.
class HostCopies {
 public:
  // Begins. Of what is on this thread's current stream by now; tensors of one dtype.
  HostCopies(c10::Stream lane, absl::Span<const at::Tensor> tensors);
  // Waits.
  ~HostCopies();
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  // Until all are there: the host waits.
  void wait();
  bool done() const { return !landed_.has_value(); }
  // Nobody looks at what is in it before wait().
  const at::Tensor& operator[](size_t i) const { return there_[i]; }

 private:
  std::vector<at::Tensor> there_;
  std::optional<c10::Event> landed_;  // none: all are there
};

// Gradients of `leaf`, on the CPU, are added where those of `device` are, by the thread that goes
// backward there: LibTorch would do it on the thread that has called backward(), beside the device's,
// and a mesh is used by one thread at a time. For as long as the leaf lives, whoever records it:
// operators, TorchScript, functions of the user's. They may come from the device or from the CPU.
void accumulate_beside(c10::Device device, const at::Tensor& leaf);

}  // namespace shardweave::dtensor_internal

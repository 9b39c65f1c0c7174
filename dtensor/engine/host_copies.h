// Copies between a device and the host's memory that go on while both compute: for parameters that
// rest on the CPU and are used on a device (fsdp_unit.h).
//
//   const c10::Stream lane = copy_lane(device);       // beside those that compute
//   HostCopies copies(lane);
//   grads[0] = copies.begin(gradient);                // memory of the host, filled later
//   ...
//   copies.wait();                                    // it is
//
// Streams are those of c10::Stream: nothing here links CUDA. Internal to dtensor/.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"
#include "c10/core/Event.h"
#include "c10/core/Stream.h"
#include "torch/csrc/autograd/edge.h"

namespace shardweave::dtensor_internal {

// Another stream of the device than those that LibTorch computes on by itself.
c10::Stream copy_lane(c10::Device device);

// Memory of the host that devices can copy from and to while the host goes on, where LibTorch has such
// (CUDA's pinned memory); else any.
at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType dtype);

// What comes on `stream` sees what has come by now on this thread's current stream of its device.
void wait_for_current(const c10::Stream& stream);

// From a device, of what is on this thread's current stream by then.
class HostCopies {
 public:
  explicit HostCopies(c10::Stream lane) : lane_(lane) {}
  ~HostCopies();
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  // Memory of the host; nobody reads it before wait(). `tensor` may be dropped.
  at::Tensor begin(const at::Tensor& tensor);
  // Until all are there: the host waits.
  void wait();
  bool done() const { return !landed_.has_value(); }

 private:
  const c10::Stream lane_;
  std::optional<c10::Event> landed_;  // the last one; none: nothing is under way
};

// Where gradients of `leaf`, on the CPU, go in a graph of `device`. LibTorch would add them up on the
// thread that has called backward(), while the device's thread goes on: this adds them on that one,
// for a mesh is used by one thread at a time.
torch::autograd::Edge accumulation_on(c10::Device device, const at::Tensor& leaf);

}  // namespace shardweave::dtensor_internal

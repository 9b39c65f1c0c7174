// The device axis of the conformance suite: a backend whose calls, of memory of the CPU as all cases
// have it, are run on copies in a device's memory.
//
//   auto there = on_device(std::move(backend_of_a_device), device);      // one TestDevice per rank
//   auto comm = Communicator::create(std::move(there));
//
// Each call is a program as users of streams write it: copies to the device on a stream of the
// caller; the operation, which begins after them; another stream's wait for it; copies back on that.
// The host waits for nothing before wait(), but that it waits for a message before it is brought back
// (its other side may come later): what is not ordered on the device gives wrong numbers.
#pragma once

#include <memory>

#include "shardweave/comm/backend.h"

namespace shardweave {

// What a test does with a device beside the backend.
class TestDevice {
 public:
  virtual ~TestDevice() = default;
  virtual Device device() const = 0;
  virtual DeviceStream make_stream() = 0;  // which lives as long as this
  virtual void* allocate(int64_t bytes) = 0;
  virtual void release(void* memory) = 0;
  // In the order of the stream; do not wait.
  virtual void copy_to_device(void* device, const void* host, int64_t bytes, DeviceStream s) = 0;
  virtual void copy_to_host(void* host, const void* device, int64_t bytes, DeviceStream s) = 0;
  // What the stream comes to when it has done what is on it by now.
  virtual uint64_t mark(DeviceStream s) = 0;
  virtual bool has_reached(uint64_t mark) = 0;
};

struct OnDeviceOptions {
  // Every so many collectives one stays on the CPU, so that both go on side by side; 0: none.
  int every_on_cpu = 0;
};

std::unique_ptr<Backend> on_device(std::unique_ptr<Backend> backend,
                                   std::shared_ptr<TestDevice> device,
                                   const OnDeviceOptions& options = {});

}  // namespace shardweave

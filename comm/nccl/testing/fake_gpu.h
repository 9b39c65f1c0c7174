// A machine with GPUs for tests, where there is none: libfake_gpu.so has the functions of the driver,
// of CUDA's runtime and of NCCL that comm/nccl uses.
//
//   FakeGpu& gpu = fake_gpu_of_tests();                // loads the library; stays loaded
//   gpu.reset({.devices = 4});
//   auto backend = connect_nccl({.device = rank, .libraries = fake_libraries()});
//   void* x = gpu.allocate(0, bytes);                  // an address that no host may touch
//
// Device memory lies at addresses where an access of the host is a segmentation fault; its contents
// are elsewhere. A stream is a thread, which works in order and late: whoever does not wait reads
// what was there before. NCCL's operations meet on those threads. As with the real one, ranks that
// differ or do not come are a hang, which only ncclCommAbort ends, which waits for its stream; nothing
// is compared. Nor do collectives meet that one rank has in one group and another has not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "shardweave/comm/buffer.h"
#include "shardweave/comm/nccl/nccl_options.h"

namespace shardweave {

struct FakeGpuScript {
  int devices = 8;
  int nccl_version = 22809;
  int runtime_version = 13000;
  int driver_version = 13000;
  // Streams begin each piece of work so much later, at most.
  int delay_microseconds = 100;
  // Calls of NCCL go on after they have returned, as those of communicators that do not block may.
  bool calls_go_on = true;
  // So many looks of ncclCommGetAsyncError, on this device (-1: all; on others one).
  int looks = 2;
  int slow_device = -1;
  // What an operation of NCCL takes at least.
  int operation_milliseconds = 0;
  // ncclCommAbort takes so long before it has any effect.
  int abort_milliseconds = 0;
  // A thread of somebody else captures a CUDA graph, in the mode that forbids others to look.
  bool foreign_capture = false;
  bool one_place = false;  // all devices are on the same bus

  // The `failing_after`-th call of this function from now, on this device (-1: any), and those after
  // it, answer `error`.
  std::string failing;
  int failing_after = 1;
  int failing_device = -1;
  int error = 1;

  // On this device,
  int faulty_device = -1;
  // this operation of NCCL (from 1, over all communicators) never ends, or
  int hanging_operation = 0;
  // is an asynchronous error, or
  int broken_operation = 0;
  // a communicator is an asynchronous error while it is made.
  bool broken_init = false;
};

// What a stream was given while it was captured.
class FakeGraph {
 public:
  virtual ~FakeGraph() = default;
};

class FakeGpu {
 public:
  virtual ~FakeGpu() = default;
  // A new machine. Nothing of the old one may be in use.
  virtual void reset(const FakeGpuScript& script) = 0;

  virtual void* allocate(int device, size_t bytes) = 0;
  virtual void release(void* memory) = 0;
  // Where its contents are, for a look when nothing is under way.
  virtual void* contents(const void* memory) = 0;

  // Runs `work` in the order of a stream of `device`, on the stream's thread; null: its default one.
  virtual void enqueue(int device, DeviceStream stream, std::function<void()> work) = 0;
  // Until a stream has done what is on it by now.
  virtual void synchronize(int device, DeviceStream stream) = 0;

  // As of CUDA graphs: what is put on a stream that is captured, and on those that wait for it from
  // then on, is kept instead of run. Errors are CUDA's numbers, 0: none. Whatever a capture forbids
  // (that the host waits, that a default stream joins, to wait for what is not captured) is an error,
  // and spoils it: end_capture() has null then, and where a stream that has joined was left behind.
  virtual int begin_capture(int device, DeviceStream stream) = 0;
  virtual std::shared_ptr<const FakeGraph> end_capture(int device, DeviceStream stream) = 0;
  virtual bool is_captured(int device, DeviceStream stream) = 0;
  // The device's forbidden wait of the host.
  virtual void spoil_capture(int device, DeviceStream stream) = 0;
  // What comes on `stream` runs after what is on `other`, as an event makes it.
  virtual int join(int device, DeviceStream stream, DeviceStream other) = 0;
  // In the order of the stream.
  virtual void replay(const std::shared_ptr<const FakeGraph>& graph, int device,
                      DeviceStream stream) = 0;

  // Events that nobody has destroyed; operations that a device runs; whether it has a context.
  virtual int events() = 0;
  virtual int running(int device) = 0;
  virtual bool has_context(int device) = 0;

  // Of a function by its name, since reset(). "ncclCommAbort blocks": one that waited in vain.
  virtual int64_t calls(const std::string& function) = 0;
  // Calls of this thread are the test's own: they are not counted and do not fail.
  virtual void exempt(bool own) = 0;
};

FakeGpu& fake_gpu_of_tests();
NcclLibraries fake_libraries();
// Of testonly libraries for mistakes: a shared library that has none of the functions.
std::string empty_library();

}  // namespace shardweave

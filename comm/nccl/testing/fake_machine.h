// What libfake_gpu.so has in common: devices, their memory, streams and events, and what the test has
// scripted.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "shardweave/comm/nccl/abi.h"
#include "shardweave/comm/nccl/testing/fake_gpu.h"

namespace shardweave::fake_gpu_internal {

using nccl_internal::CudaEvent;
using nccl_internal::CudaStream;

inline constexpr int kMaxDevices = 8;
inline constexpr size_t kDeviceBytes = size_t{256} << 20;

inline constexpr int kInvalidValue = 1;
inline constexpr int kInvalidDevice = 101;
inline constexpr int kInvalidHandle = 400;
inline constexpr int kCaptureUnsupported = 900;
inline constexpr int kCaptureIsolation = 905;
inline constexpr int kCaptureImplicit = 906;
inline constexpr int kCapturedEvent = 907;

// Done once, for all who wait.
class Mark {
 public:
  void set() {
    {
      const std::lock_guard lock(mutex_);
      is_set_ = true;
    }
    wake_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [&] { return is_set_; });
  }
  bool is_set() {
    const std::lock_guard lock(mutex_);
    return is_set_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool is_set_ = false;
};

class FakeStream;

// A capture, and then a graph.
class FakeCapture : public FakeGraph {
 public:
  // What each stream does, the first one's first; each runs beside the others.
  void replay() const;

  std::mutex mutex;
  // Guarded by mutex:
  struct Piece {
    std::function<void()> work;
    int sets = -1, waits_for = -1;  // a mark
  };
  std::vector<FakeStream*> streams;
  std::map<FakeStream*, std::vector<Piece>> pieces;
  int marks = 0;
  std::set<FakeStream*> left_behind;  // of these, with work that nobody waits for yet
  bool spoilt = false;
};

class FakeStream {
 public:
  FakeStream(int device, int delay_microseconds);
  ~FakeStream();
  FakeStream(const FakeStream&) = delete;
  FakeStream& operator=(const FakeStream&) = delete;

  int device() const { return device_; }
  // Runs it, or keeps it where the stream is captured.
  void add(std::function<void()> work);
  void run_later(std::function<void()> work);
  bool is_idle();
  std::shared_ptr<FakeCapture> capture();
  void set_capture(std::shared_ptr<FakeCapture> capture);
  // Until all that has been added by now has been done.
  void synchronize();

 private:
  void run();

  const int device_;
  const int delay_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> work_;
  std::shared_ptr<FakeCapture> capture_;  // guarded by mutex_, as are those before; null: none
  bool busy_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

struct FakeEvent {
  int device = 0;
  std::shared_ptr<Mark> mark;  // of the last record; null: none
  // It was recorded on a stream that was captured; null: it was not.
  std::shared_ptr<FakeCapture> capture;
  FakeStream* stream = nullptr;
  int capture_mark = -1;
};

class FakeMachine : public FakeGpu {
 public:
  static FakeMachine& get();

  void reset(const FakeGpuScript& script) override;
  void* allocate(int device, size_t bytes) override;
  void release(void* memory) override;
  void* contents(const void* memory) override;
  void enqueue(int device, DeviceStream stream, std::function<void()> work) override;
  void synchronize(int device, DeviceStream stream) override;
  int begin_capture(int device, DeviceStream stream) override;
  std::shared_ptr<const FakeGraph> end_capture(int device, DeviceStream stream) override;
  bool is_captured(int device, DeviceStream stream) override;
  void spoil_capture(int device, DeviceStream stream) override;
  int join(int device, DeviceStream stream, DeviceStream other) override;
  void replay(const std::shared_ptr<const FakeGraph>& graph, int device,
              DeviceStream stream) override;
  int events() override;
  int running(int device) override { return running_[device].load(); }
  bool has_context(int device) override { return contexts_[device].load(); }
  int64_t calls(const std::string& function) override;
  void exempt(bool own) override;

  FakeGpuScript script();
  // Counts a call; what it must answer, or 0.
  int enter(const char* function, int device);
  // On a device: whether this operation of NCCL is to hang or to break.
  int count_operation(int device);
  // Something that happened, for calls().
  void note(const std::string& what);
  void run_on(int device, int more) { running_[device] += more; }
  void make_context(int device) { contexts_[device] = true; }

  bool is_device_memory(const void* memory) const;
  int device_of(const void* memory) const;
  // Of either kind.
  std::byte* reach(const void* memory);

  int& current_device();
  // Of the calling thread: 0 where calls are forbidden that another thread's capture forbids.
  int& capture_mode();
  // Null: the current device's default stream. Null if there is none of that name.
  FakeStream* stream(CudaStream handle) { return stream(current_device(), handle); }
  FakeStream* stream(int device, CudaStream handle);
  CudaStream make_stream();
  bool destroy_stream(CudaStream handle);
  FakeEvent* event(CudaEvent handle);
  int record(FakeEvent& event, FakeStream& stream);
  int wait_for(FakeStream& stream, const FakeEvent& event);
  CudaEvent make_event();
  bool destroy_event(CudaEvent handle);

 private:
  FakeMachine();

  std::byte* addresses_ = nullptr;  // which cannot be touched
  std::byte* contents_ = nullptr;
  std::mutex mutex_;
  FakeGpuScript script_;
  std::map<std::string, int64_t> calls_;
  std::map<std::string, int64_t> calls_on_failing_device_;
  int operations_[kMaxDevices] = {};
  std::atomic<int> running_[kMaxDevices] = {};
  std::atomic<bool> contexts_[kMaxDevices] = {};
  std::map<size_t, size_t> pieces_[kMaxDevices];  // begin: size
  std::map<CudaStream, std::unique_ptr<FakeStream>> streams_;
  std::map<int, std::unique_ptr<FakeStream>> default_streams_;
  std::map<CudaEvent, std::unique_ptr<FakeEvent>> events_;
};

}  // namespace shardweave::fake_gpu_internal

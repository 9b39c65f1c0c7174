#include "shardweave/comm/nccl/testing/fake_device.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "shardweave/comm/nccl/library.h"

namespace shardweave {
namespace {

using nccl_internal::CudaEvent;
using nccl_internal::CudaStream;
using nccl_internal::CurrentDevice;
using nccl_internal::Library;

class OwnCalls {
 public:
  OwnCalls() { fake_gpu_of_tests().exempt(true); }
  ~OwnCalls() { fake_gpu_of_tests().exempt(false); }
  OwnCalls(const OwnCalls&) = delete;
  OwnCalls& operator=(const OwnCalls&) = delete;
};

class FakeDevice : public TestDevice {
 public:
  explicit FakeDevice(int index) : index_(index) {
    const OwnCalls own;
    library_ = *Library::load(fake_libraries());
  }
  ~FakeDevice() override {
    const OwnCalls own;
    for (CudaEvent event : events_) library_->cudaEventDestroy(event);
    for (CudaStream stream : streams_) library_->cudaStreamDestroy(stream);
  }

  Device device() const override { return {DeviceType::kCuda, index_}; }
  DeviceStream make_stream() override {
    const OwnCalls own;
    const CurrentDevice on(*library_, index_);
    CudaStream stream = nullptr;
    check(library_->cudaStreamCreateWithFlags(&stream, nccl_internal::kCudaStreamNonBlocking));
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
    return {stream};
  }
  void* allocate(int64_t bytes) override { return fake_gpu_of_tests().allocate(index_, bytes); }
  void release(void* memory) override { fake_gpu_of_tests().release(memory); }
  void copy_to_device(void* device, const void* host, int64_t bytes, DeviceStream s) override {
    const OwnCalls own;
    check(library_->cudaMemcpyAsync(device, host, bytes, nccl_internal::kCudaMemcpyHostToDevice,
                                    static_cast<CudaStream>(s.handle)));
  }
  void copy_to_host(void* host, const void* device, int64_t bytes, DeviceStream s) override {
    const OwnCalls own;
    check(library_->cudaMemcpyAsync(host, device, bytes, nccl_internal::kCudaMemcpyDeviceToHost,
                                    static_cast<CudaStream>(s.handle)));
  }
  uint64_t mark(DeviceStream s) override {
    const OwnCalls own;
    const CurrentDevice on(*library_, index_);
    CudaEvent event = nullptr;
    check(library_->cudaEventCreateWithFlags(&event, nccl_internal::kCudaEventDisableTiming));
    check(library_->cudaEventRecord(event, static_cast<CudaStream>(s.handle)));
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
    return events_.size();
  }
  bool has_reached(uint64_t mark) override {
    const OwnCalls own;
    CudaEvent event = nullptr;
    {
      const std::lock_guard lock(mutex_);
      event = events_[mark - 1];
    }
    return library_->cudaEventQuery(event) == nccl_internal::kCudaSuccess;
  }

 private:
  static void check(int error) {
    if (error == nccl_internal::kCudaSuccess) return;
    std::fprintf(stderr, "the fake answers %d\n", error);
    std::abort();
  }

  const int index_;
  std::shared_ptr<const Library> library_;
  std::mutex mutex_;
  std::vector<CudaEvent> events_;  // guarded by mutex_, as are
  std::vector<CudaStream> streams_;
};

}  // namespace

std::shared_ptr<TestDevice> fake_device(int index) {
  return std::make_shared<FakeDevice>(index);
}

}  // namespace shardweave

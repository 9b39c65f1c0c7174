// The driver and CUDA's runtime, as far as comm/nccl uses them.
#include <cstdio>
#include <cstring>
#include <utility>

#include "shardweave/comm/nccl/testing/fake_machine.h"

using namespace shardweave::nccl_internal;      // NOLINT: their names are NVIDIA's
using namespace shardweave::fake_gpu_internal;  // NOLINT

namespace {

FakeMachine& machine() {
  return FakeMachine::get();
}

}  // namespace

#define ENTER()                                                                     \
  if (const int scripted = machine().enter(__func__, machine().current_device())) { \
    return scripted;                                                                \
  }

extern "C" {

shardweave::FakeGpu* fake_gpu() {
  return &machine();
}

int cuInit(unsigned) {
  ENTER();
  return 0;
}

int cuDriverGetVersion(int* version) {
  ENTER();
  *version = machine().script().driver_version;
  return 0;
}

int cudaRuntimeGetVersion(int* version) {
  ENTER();
  *version = machine().script().runtime_version;
  return 0;
}

int cudaGetDeviceCount(int* count) {
  ENTER();
  *count = machine().script().devices;
  return 0;
}

int cudaGetDevice(int* device) {
  *device = machine().current_device();
  return 0;
}

int cudaSetDevice(int device) {
  if (const int scripted = machine().enter(__func__, device)) return scripted;
  if (device < 0 || device >= machine().script().devices) return kInvalidDevice;
  machine().current_device() = device;
  machine().make_context(device);  // as since CUDA 12
  return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  ENTER();
  *flags = 0;
  *active = machine().has_context(device) ? 1 : 0;
  return 0;
}

int cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, machine().capture_mode());
  return 0;
}

int cudaDeviceGetPCIBusId(char* id, int length, int device) {
  ENTER();
  std::snprintf(id, length, "0000:%02x:00.0", machine().script().one_place ? 1 : device + 1);
  return 0;
}

int cudaStreamCreateWithFlags(CudaStream* stream, unsigned) {
  ENTER();
  *stream = machine().make_stream();
  return 0;
}

int cudaStreamDestroy(CudaStream stream) {
  ENTER();
  return machine().destroy_stream(stream) ? 0 : kInvalidHandle;
}

int cudaStreamIsCapturing(CudaStream stream, int* state) {
  ENTER();
  FakeStream* const found = machine().stream(stream);
  if (found == nullptr) return kInvalidHandle;
  *state = found->capture() == nullptr ? 0 : 1;
  return 0;
}

int cudaStreamQuery(CudaStream stream) {
  ENTER();
  FakeStream* const found = machine().stream(stream);
  if (found == nullptr) return kInvalidHandle;
  if (found->capture() != nullptr) return kCaptureUnsupported;
  return found->is_idle() ? 0 : kCudaErrorNotReady;
}

int cudaStreamSynchronize(CudaStream stream) {
  ENTER();
  FakeStream* const found = machine().stream(stream);
  if (found == nullptr) return kInvalidHandle;
  if (const std::shared_ptr<FakeCapture> capture = found->capture()) {
    const std::lock_guard lock(capture->mutex);
    capture->spoilt = true;
    return kCaptureUnsupported;
  }
  found->synchronize();
  return 0;
}

int cudaStreamWaitEvent(CudaStream stream, CudaEvent event, unsigned) {
  ENTER();
  FakeStream* const on = machine().stream(stream);
  FakeEvent* const found = machine().event(event);
  if (on == nullptr || found == nullptr) return kInvalidHandle;
  return machine().wait_for(*on, *found);
}

int cudaEventCreateWithFlags(CudaEvent* event, unsigned) {
  ENTER();
  *event = machine().make_event();
  return 0;
}

int cudaEventRecord(CudaEvent event, CudaStream stream) {
  ENTER();
  FakeStream* const on = machine().stream(stream);
  FakeEvent* const found = machine().event(event);
  // Of two devices: the thread's current one was another when they were made.
  if (on == nullptr || found == nullptr || on->device() != found->device) return kInvalidHandle;
  return machine().record(*found, *on);
}

int cudaEventQuery(CudaEvent event) {
  ENTER();
  FakeEvent* const found = machine().event(event);
  if (found == nullptr) return kInvalidHandle;
  if (found->capture != nullptr) return kCapturedEvent;
  return found->mark == nullptr || found->mark->is_set() ? 0 : kCudaErrorNotReady;
}

int cudaEventDestroy(CudaEvent event) {
  ENTER();
  return machine().destroy_event(event) ? 0 : kInvalidHandle;
}

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, CudaStream stream) {
  ENTER();
  FakeStream* const on = machine().stream(stream);
  if (on == nullptr) return kInvalidHandle;
  if (machine().is_device_memory(to) != (kind != kCudaMemcpyDeviceToHost) ||
      machine().is_device_memory(from) != (kind != kCudaMemcpyHostToDevice)) {
    return kInvalidValue;
  }
  on->add([=] { std::memmove(machine().reach(to), machine().reach(from), bytes); });
  return 0;
}

const char* cudaGetErrorString(int error) {
  return error == kCudaErrorMemoryAllocation ? "out of memory" : "an error of the fake";
}

}  // extern "C"

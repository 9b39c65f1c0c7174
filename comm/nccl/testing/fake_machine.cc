#include "shardweave/comm/nccl/testing/fake_machine.h"

#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <utility>

namespace shardweave::fake_gpu_internal {

FakeStream::FakeStream(int device, int delay_microseconds)
    : device_(device), delay_(delay_microseconds), thread_([this] { run(); }) {}

FakeStream::~FakeStream() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void FakeStream::add(std::function<void()> work) {
  const std::shared_ptr<FakeCapture> captured = capture();
  if (captured == nullptr) return run_later(std::move(work));
  const std::lock_guard lock(captured->mutex);
  captured->pieces[this].push_back({std::move(work)});
  captured->left_behind.insert(this);
}

std::shared_ptr<FakeCapture> FakeStream::capture() {
  const std::lock_guard lock(mutex_);
  return capture_;
}

void FakeStream::set_capture(std::shared_ptr<FakeCapture> capture) {
  const std::lock_guard lock(mutex_);
  capture_ = std::move(capture);
}

void FakeStream::run_later(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  wake_.notify_all();
}

bool FakeStream::is_idle() {
  const std::lock_guard lock(mutex_);
  return work_.empty() && !busy_;
}

void FakeStream::synchronize() {
  auto mark = std::make_shared<Mark>();
  run_later([mark] { mark->set(); });
  mark->wait();
}

void FakeStream::run() {
  std::minstd_rand random(device_ + 1);
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || !work_.empty(); });
    if (work_.empty()) return;
    const std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    busy_ = true;
    lock.unlock();
    if (delay_ > 0 && random() % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % delay_));
    }
    work();
    lock.lock();
    busy_ = false;
  }
}

FakeMachine& FakeMachine::get() {
  static FakeMachine machine;
  return machine;
}

FakeMachine::FakeMachine() {
  const auto map = [](int protection) {
    void* const memory = ::mmap(nullptr, kMaxDevices * kDeviceBytes, protection,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    return static_cast<std::byte*>(memory);
  };
  addresses_ = map(PROT_NONE);
  contents_ = map(PROT_READ | PROT_WRITE);
}

void FakeMachine::reset(const FakeGpuScript& script) {
  std::unique_lock lock(mutex_);
  {
    // They end without the mutex, which what is left of their work may want.
    const auto streams = std::exchange(streams_, {});
    const auto default_streams = std::exchange(default_streams_, {});
    lock.unlock();
  }
  lock.lock();
  events_.clear();
  for (auto& pieces : pieces_) pieces.clear();
  for (int& count : operations_) count = 0;
  for (auto& has : contexts_) has = false;
  calls_.clear();
  calls_on_failing_device_.clear();
  script_ = script;
  for (int device = 0; device < script.devices; ++device) {
    default_streams_[device] = std::make_unique<FakeStream>(device, script.delay_microseconds);
  }
}

void* FakeMachine::allocate(int device, size_t bytes) {
  const std::lock_guard lock(mutex_);
  bytes = (bytes + 255) / 256 * 256 + 256;
  size_t begin = 0;
  for (const auto& [other, size] : pieces_[device]) {
    if (other - begin >= bytes) break;
    begin = other + size;
  }
  if (begin + bytes > kDeviceBytes) return nullptr;
  pieces_[device][begin] = bytes;
  return addresses_ + device * kDeviceBytes + begin;
}

void FakeMachine::release(void* memory) {
  const std::lock_guard lock(mutex_);
  const size_t offset = static_cast<std::byte*>(memory) - addresses_;
  pieces_[offset / kDeviceBytes].erase(offset % kDeviceBytes);
}

void* FakeMachine::contents(const void* memory) {
  return contents_ + (static_cast<const std::byte*>(memory) - addresses_);
}

int FakeMachine::begin_capture(int device, DeviceStream handle) {
  FakeStream* const stream = this->stream(device, static_cast<CudaStream>(handle.handle));
  if (handle.handle == nullptr || stream->capture() != nullptr) return kCaptureUnsupported;
  auto capture = std::make_shared<FakeCapture>();
  capture->streams.push_back(stream);
  stream->set_capture(std::move(capture));
  return 0;
}

std::shared_ptr<const FakeGraph> FakeMachine::end_capture(int device, DeviceStream handle) {
  FakeStream* const stream = this->stream(device, static_cast<CudaStream>(handle.handle));
  const std::shared_ptr<FakeCapture> capture = stream->capture();
  if (capture == nullptr) return nullptr;
  const std::lock_guard lock(capture->mutex);
  for (FakeStream* each : capture->streams) each->set_capture(nullptr);
  capture->left_behind.erase(stream);
  if (capture->spoilt || !capture->left_behind.empty()) return nullptr;
  return capture;
}

bool FakeMachine::is_captured(int device, DeviceStream handle) {
  FakeStream* const stream = this->stream(device, static_cast<CudaStream>(handle.handle));
  return stream != nullptr && stream->capture() != nullptr;
}

void FakeMachine::spoil_capture(int device, DeviceStream handle) {
  const std::shared_ptr<FakeCapture> capture =
      stream(device, static_cast<CudaStream>(handle.handle))->capture();
  if (capture == nullptr) return;
  const std::lock_guard lock(capture->mutex);
  capture->spoilt = true;
}

int FakeMachine::join(int device, DeviceStream handle, DeviceStream other) {
  FakeEvent event;
  event.device = device;
  const int error = record(event, *stream(device, static_cast<CudaStream>(other.handle)));
  if (error != 0) return error;
  return wait_for(*stream(device, static_cast<CudaStream>(handle.handle)), event);
}

void FakeMachine::replay(const std::shared_ptr<const FakeGraph>& graph, int device,
                         DeviceStream handle) {
  stream(device, static_cast<CudaStream>(handle.handle))->add([graph] {
    static_cast<const FakeCapture&>(*graph).replay();
  });
}

void FakeCapture::replay() const {
  std::vector<Mark> reached(marks);
  const auto run = [&](FakeStream* stream) {
    const auto found = pieces.find(stream);
    if (found == pieces.end()) return;
    for (const Piece& piece : found->second) {
      if (piece.waits_for >= 0) reached[piece.waits_for].wait();
      if (piece.work != nullptr) piece.work();
      if (piece.sets >= 0) reached[piece.sets].set();
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < streams.size(); ++i) threads.emplace_back(run, streams[i]);
  run(streams[0]);
  for (std::thread& thread : threads) thread.join();
}

int FakeMachine::record(FakeEvent& event, FakeStream& stream) {
  event.capture = stream.capture();
  event.stream = &stream;
  event.mark = nullptr;
  if (event.capture != nullptr) {
    const std::lock_guard lock(event.capture->mutex);
    event.capture_mark = event.capture->marks++;
    event.capture->pieces[&stream].push_back({.sets = event.capture_mark});
    return 0;
  }
  event.mark = std::make_shared<Mark>();
  stream.add([mark = event.mark] { mark->set(); });
  return 0;
}

int FakeMachine::wait_for(FakeStream& stream, const FakeEvent& event) {
  const std::shared_ptr<FakeCapture> here = stream.capture();
  if (event.capture == nullptr) {
    if (event.mark == nullptr) return 0;
    if (here == nullptr) {
      stream.add([mark = event.mark] { mark->wait(); });
      return 0;
    }
    const std::lock_guard lock(here->mutex);
    here->spoilt = true;
    return kCaptureIsolation;
  }
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [device, its] : default_streams_) {
      if (its.get() == &stream) return kCaptureImplicit;
    }
  }
  const std::lock_guard lock(event.capture->mutex);
  if (here != nullptr && here != event.capture) return kCaptureIsolation;
  if (here == nullptr) event.capture->streams.push_back(&stream);
  event.capture->pieces[&stream].push_back({.waits_for = event.capture_mark});
  event.capture->left_behind.erase(event.stream);
  // What waits has to be waited for in turn.
  if (event.stream != &stream) event.capture->left_behind.insert(&stream);
  if (here == nullptr) stream.set_capture(event.capture);
  return 0;
}

int FakeMachine::events() {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(events_.size());
}

void FakeMachine::note(const std::string& what) {
  const std::lock_guard lock(mutex_);
  ++calls_[what];
}

int64_t FakeMachine::calls(const std::string& function) {
  const std::lock_guard lock(mutex_);
  return calls_[function];
}

namespace {

thread_local bool is_exempt = false;

}  // namespace

void FakeMachine::exempt(bool own) {
  is_exempt = own;
}

FakeGpuScript FakeMachine::script() {
  const std::lock_guard lock(mutex_);
  return script_;
}

int FakeMachine::enter(const char* function, int device) {
  if (is_exempt) return 0;
  const std::lock_guard lock(mutex_);
  ++calls_[function];
  const std::string name = function;
  if (script_.foreign_capture && capture_mode() == 0 &&
      (name == "cudaEventQuery" || name == "cudaEventCreateWithFlags" ||
       name == "cudaStreamQuery")) {
    return kCaptureUnsupported;
  }
  if (script_.failing != function) return 0;
  if (script_.failing_device >= 0 && script_.failing_device != device) return 0;
  return ++calls_on_failing_device_[function] >= script_.failing_after ? script_.error : 0;
}

int FakeMachine::count_operation(int device) {
  const std::lock_guard lock(mutex_);
  return ++operations_[device];
}

bool FakeMachine::is_device_memory(const void* memory) const {
  const auto* at = static_cast<const std::byte*>(memory);
  return at >= addresses_ && at < addresses_ + kMaxDevices * kDeviceBytes;
}

int FakeMachine::device_of(const void* memory) const {
  return static_cast<int>((static_cast<const std::byte*>(memory) - addresses_) / kDeviceBytes);
}

std::byte* FakeMachine::reach(const void* memory) {
  return is_device_memory(memory) ? static_cast<std::byte*>(contents(memory))
                                  : static_cast<std::byte*>(const_cast<void*>(memory));
}

int& FakeMachine::current_device() {
  thread_local int device = 0;
  return device;
}

int& FakeMachine::capture_mode() {
  thread_local int mode = 0;
  return mode;
}

void FakeMachine::enqueue(int device, DeviceStream handle, std::function<void()> work) {
  stream(device, static_cast<CudaStream>(handle.handle))->add(std::move(work));
}

void FakeMachine::synchronize(int device, DeviceStream handle) {
  stream(device, static_cast<CudaStream>(handle.handle))->synchronize();
}

FakeStream* FakeMachine::stream(int device, CudaStream handle) {
  const std::lock_guard lock(mutex_);
  if (handle == nullptr) return default_streams_.at(device).get();
  const auto found = streams_.find(handle);
  return found == streams_.end() ? nullptr : found->second.get();
}

CudaStream FakeMachine::make_stream() {
  auto stream = std::make_unique<FakeStream>(current_device(), script().delay_microseconds);
  const auto handle = reinterpret_cast<CudaStream>(stream.get());
  const std::lock_guard lock(mutex_);
  streams_[handle] = std::move(stream);
  return handle;
}

bool FakeMachine::destroy_stream(CudaStream handle) {
  std::unique_ptr<FakeStream> stream;  // ends after the lock, as its work may want the mutex
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(handle);
  if (found == streams_.end()) return false;
  stream = std::move(found->second);
  streams_.erase(found);
  return true;
}

FakeEvent* FakeMachine::event(CudaEvent handle) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(handle);
  return found == events_.end() ? nullptr : found->second.get();
}

CudaEvent FakeMachine::make_event() {
  auto event = std::make_unique<FakeEvent>();
  event->device = current_device();
  const auto handle = reinterpret_cast<CudaEvent>(event.get());
  const std::lock_guard lock(mutex_);
  events_[handle] = std::move(event);
  return handle;
}

bool FakeMachine::destroy_event(CudaEvent handle) {
  const std::lock_guard lock(mutex_);
  return events_.erase(handle) != 0;
}

}  // namespace shardweave::fake_gpu_internal

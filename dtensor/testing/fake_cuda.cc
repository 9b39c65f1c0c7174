#include "shardweave/dtensor/testing/fake_cuda.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>

#include "ATen/ATen.h"
#include "ATen/EmptyTensor.h"
#include "ATen/ExpandUtils.h"
#include "ATen/Parallel.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/detail/CUDAHooksInterface.h"
#include "ATen/native/transformers/attention.h"
#include "ATen/native/transformers/sdp_utils_cpp.h"
#include "absl/strings/match.h"
#include "c10/core/Allocator.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/impl/DeviceGuardImplInterface.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "gtest/gtest.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/nccl/nccl_backend.h"
#include "shardweave/comm/nccl/testing/fake_device.h"
#include "shardweave/comm/status_exception.h"
#include "shardweave/comm/world.h"
#include "torch/library.h"

namespace shardweave::testing {
namespace {

using c10::IValue;

constexpr int kDevices = 8;

FakeGpu& gpu() {
  return fake_gpu_of_tests();
}

// --- devices and streams -------------------------------------------------------------------------

thread_local c10::DeviceIndex device_here = 0;
thread_local c10::StreamId streams_here[kDevices] = {};  // 0: the default one; else a handle
std::atomic<int64_t> waits[kDevices];  // of the host for this device, by all threads

// Whoever looks for one that should not be sets a breakpoint here.
[[gnu::noinline]] void host_waits_for(c10::DeviceIndex device) {
  ++waits[device];
}

DeviceStream handle_of(c10::StreamId id) {
  return {reinterpret_cast<void*>(id)};
}
DeviceStream stream_here(c10::DeviceIndex device) {
  return handle_of(streams_here[device]);
}

// Its work comes after what is on the stream now.
void enqueue(c10::DeviceIndex device, std::function<void()> work) {
  gpu().enqueue(device, stream_here(device), std::move(work));
}

bool is_captured(c10::DeviceIndex device) {
  return gpu().is_captured(device, stream_here(device));
}

[[noreturn]] void refuse_in_capture(c10::DeviceIndex device, DeviceStream stream) {
  gpu().spoil_capture(device, stream);
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (of the fake)");
}

class FakeGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  struct Event {
    std::shared_future<void> done;
    std::optional<DeviceStream> captured;  // recorded there, while it was
  };

  FakeGuard() = default;
  explicit FakeGuard(c10::DeviceType) {}
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::Device before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, device_here}; }
  void setDevice(c10::Device d) const override {
    if (d.has_index()) device_here = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { setDevice(d); }
  c10::Stream getStream(c10::Device d) const override {
    const c10::DeviceIndex index = d.has_index() ? d.index() : device_here;
    return c10::Stream(c10::Stream::UNSAFE, {c10::kCUDA, index}, streams_here[index]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, {c10::kCUDA, d.has_index() ? d.index() : device_here});
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    const c10::DeviceIndex index = d.has_index() ? d.index() : device_here;
    static std::mutex mutex;
    static auto& devices = *new std::vector<std::shared_ptr<TestDevice>>(kDevices);
    const std::lock_guard lock(mutex);
    if (devices[index] == nullptr) devices[index] = fake_device(index);
    return c10::Stream(c10::Stream::UNSAFE, {c10::kCUDA, index},
                       reinterpret_cast<c10::StreamId>(devices[index]->make_stream().handle));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return getNewStream(d, 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const c10::Stream before = getStream(s.device());
    streams_here[s.device_index()] = s.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override {
    return handle_of(s.id()).handle;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    const auto done = std::make_shared<std::promise<void>>();
    if (*event == nullptr) *event = new Event();
    auto& its = *static_cast<Event*>(*event);
    its = {done->get_future().share(), std::nullopt};
    if (gpu().is_captured(s.device_index(), handle_of(s.id()))) {
      its.captured = handle_of(s.id());
      return;
    }
    gpu().enqueue(s.device_index(), handle_of(s.id()), [done] { done->set_value(); });
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event == nullptr) return;
    const auto& its = *static_cast<Event*>(event);
    const DeviceStream stream = handle_of(s.id());
    if (its.captured.has_value()) {
      TORCH_CHECK(gpu().join(s.device_index(), stream, *its.captured) == 0,
                  "CUDA error: a stream may not wait for one that is being captured (of the fake)");
      return;
    }
    if (gpu().is_captured(s.device_index(), stream)) refuse_in_capture(s.device_index(), stream);
    gpu().enqueue(s.device_index(), stream, [done = its.done] { done.wait(); });
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->done.wait_for(std::chrono::seconds(0)) ==
                                   std::future_status::ready;
  }
  void synchronizeEvent(void* event) const override {
    host_waits_for(device_here);
    if (event != nullptr) static_cast<Event*>(event)->done.wait();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeStream(const c10::Stream& s) const override {
    const DeviceStream stream = handle_of(s.id());
    if (gpu().is_captured(s.device_index(), stream)) refuse_in_capture(s.device_index(), stream);
    host_waits_for(s.device_index());
    gpu().synchronize(s.device_index(), handle_of(s.id()));
  }
  bool queryStream(const c10::Stream& s) const override {
    synchronizeStream(s);
    return true;
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    synchronizeStream(getStream({c10::kCUDA, device}));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override;
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard);

// Memory of the host that is copied from and to late, in the order of a stream.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const memory = bytes == 0 ? nullptr : ::operator new(bytes, std::align_val_t(64));
    return {memory, memory, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  static bool has_made(const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.storage().data_ptr().get_deleter() == &release;
  }

 private:
  static void release(void* memory) { ::operator delete(memory, std::align_val_t(64)); }
};

PinnedAllocator pinned_allocator;

// What LibTorch asks where it wants to know whether there is a GPU.
struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return device_here; }
  c10::DeviceIndex getCurrentDevice() const override { return device_here; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

}  // namespace
}  // namespace shardweave::testing

namespace at {
using CUDAHooks = shardweave::testing::FakeHooks;  // by this name LibTorch looks for it
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace shardweave::testing {
namespace {

// --- memory --------------------------------------------------------------------------------------

struct Piece {
  void* memory;
  c10::DeviceIndex device;
  DeviceStream stream;               // where it was made
  std::vector<DeviceStream> others;  // that use it, too
};

// What is allocated in a capture is the graph's. What dies in it is another's in it, as soon as it is
// asked for: pieces of one size.
struct CapturedPiece {
  std::shared_ptr<void> memory;
  size_t bytes;
  bool used = true;
};
std::mutex of_captures_mutex;
std::vector<std::shared_ptr<CapturedPiece>> of_captures[kDevices];  // guarded by it

void* captured_memory(c10::DeviceIndex device, size_t bytes,
                      std::shared_ptr<CapturedPiece>& piece) {
  const std::lock_guard lock(of_captures_mutex);
  auto& pieces = of_captures[device];
  const auto free = std::find_if(pieces.begin(), pieces.end(), [&](const auto& its) {
    return !its->used && its->bytes == bytes;
  });
  if (free != pieces.end()) {
    piece = *free;
    piece->used = true;
  } else if (void* const memory = gpu().allocate(device, bytes)) {
    piece = std::make_shared<CapturedPiece>();
    piece->memory.reset(memory, [](void* m) { gpu().release(m); });
    piece->bytes = bytes;
    pieces.push_back(piece);
  }
  return piece == nullptr ? nullptr : piece->memory.get();
}
void release_captured(void* context) {
  const std::unique_ptr<std::shared_ptr<CapturedPiece>> piece(
      static_cast<std::shared_ptr<CapturedPiece>*>(context));
  const std::lock_guard lock(of_captures_mutex);
  (*piece)->used = false;
}

class FakeAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::kCUDA, device_here);
    if (bytes == 0) return {nullptr, device};
    const bool captures = is_captured(device_here);
    std::shared_ptr<CapturedPiece> piece;
    void* const memory =
        captures ? captured_memory(device_here, bytes, piece) : gpu().allocate(device_here, bytes);
    TORCH_CHECK(memory != nullptr, "CUDA out of memory (of the fake): ", bytes, " bytes");
    if (captures) {
      return {memory, new std::shared_ptr<CapturedPiece>(piece), &release_captured, device};
    }
    return {memory, new Piece{memory, device_here, stream_here(device_here)}, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "the fake's allocator copies nothing");
  }

  // Reused by what comes later on its stream, when the others are there, too.
  static void release(void* context) {
    const std::unique_ptr<Piece> piece(static_cast<Piece*>(context));
    const std::shared_ptr<void> last(piece->memory, [](void* memory) { gpu().release(memory); });
    for (const DeviceStream& stream : piece->others) {
      gpu().enqueue(piece->device, stream, [last] {});
    }
    gpu().enqueue(piece->device, piece->stream, [last] {});
  }
};

void FakeGuard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const {
  if (data.get_deleter() != &FakeAllocator::release) return;  // a graph's, or none
  auto& piece = *static_cast<Piece*>(data.get_context());
  const DeviceStream stream = handle_of(s.id());
  if (stream != piece.stream) piece.others.push_back(stream);
}

FakeAllocator allocator;
REGISTER_ALLOCATOR(c10::kCUDA, &allocator);

}  // namespace
}  // namespace shardweave::testing

// LibTorch's graphs, of which a program finds the members by their names (dtensor/cuda/graph.h).
enum cudaStreamCaptureMode : int {};

namespace at::cuda {

struct __attribute__((visibility("default"))) CUDAGraph {
  explicit CUDAGraph(bool keep_graph);
  ~CUDAGraph();
  void capture_begin(std::pair<unsigned long long, unsigned long long> pool,
                     cudaStreamCaptureMode mode);
  void capture_end();
  void replay();

  std::shared_ptr<const shardweave::FakeGraph> graph;
  std::vector<std::shared_ptr<shardweave::testing::CapturedPiece>> memory;
};

CUDAGraph::CUDAGraph(bool /*keep_graph*/) {}
CUDAGraph::~CUDAGraph() = default;

void CUDAGraph::capture_begin(std::pair<unsigned long long, unsigned long long> /*pool*/,
                              cudaStreamCaptureMode /*mode*/) {
  using namespace shardweave::testing;
  TORCH_CHECK(gpu().begin_capture(device_here, stream_here(device_here)) == 0,
              "CUDA graphs must be captured on a non-default stream (of the fake)");
}

void CUDAGraph::capture_end() {
  using namespace shardweave::testing;
  graph = gpu().end_capture(device_here, stream_here(device_here));
  {
    const std::lock_guard lock(of_captures_mutex);
    memory = std::exchange(of_captures[device_here], {});
  }
  TORCH_CHECK(graph != nullptr,
              "CUDA error: operation failed due to a previous error during capture (of the fake)");
}

void CUDAGraph::replay() {
  using namespace shardweave::testing;
  gpu().replay(graph, device_here, stream_here(device_here));
}

}  // namespace at::cuda

namespace shardweave::testing {
namespace {

c10::DispatchKeySet cuda_keys() {
  return c10::DispatchKeySet(c10::DispatchKey::CUDA);
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic(sizes, &allocator, cuda_keys(), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard on(device);
  return at::detail::empty_strided_generic(sizes, strides, &allocator, cuda_keys(),
                                           c10::dtype_or_default(dtype));
}

// --- operators -----------------------------------------------------------------------------------

// The same memory, as the host reaches it. When the stream is there, not before.
at::Tensor reached(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  void* const memory = storage.mutable_data();
  at::Tensor bytes = memory == nullptr
                         ? at::empty({0}, at::kByte)
                         : at::from_blob(gpu().contents(memory),
                                         {static_cast<int64_t>(storage.nbytes())}, at::kByte);
  at::Tensor result = at::empty({0}, at::TensorOptions(tensor.scalar_type()));
  c10::TensorImpl* const impl = result.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(bytes.storage());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

// Of a temporary on the host, in the order of the stream.
void write_later(const at::Tensor& device, const at::Tensor& value) {
  if (value.numel() == 0) return;
  // Memory of the device that another tensor gets meanwhile is written no earlier than that.
  enqueue(device.device().index(), [to = reached(device), from = value.contiguous()] {
    const c10::InferenceMode no_autograd;
    to.copy_(from);
  });
}

at::Tensor uploaded(const at::Tensor& value, c10::Device device) {
  const at::Tensor result =
      empty_strided(value.sizes(), value.strides(), value.scalar_type(), {}, device, {});
  if (value.is_conj()) result._set_conj(true);
  if (value.is_neg()) result._set_neg(true);
  write_later(result, value);
  return result;
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes,
                          std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  const int64_t bytes =
      (impl->storage_offset() + c10::multiply_integers(sizes)) * self.element_size();
  c10::StorageImpl* const storage = self.storage().unsafeGetStorageImpl();
  if (static_cast<int64_t>(storage->nbytes()) < bytes) {
    const c10::DeviceGuard on(self.device());
    c10::DataPtr larger = allocator.allocate(bytes);
    if (storage->nbytes() > 0) {
      enqueue(self.device().index(),
              [from = gpu().contents(storage->data()), to = gpu().contents(larger.get()),
               n = storage->nbytes()] { std::memcpy(to, from, n); });
    }
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_(at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef sizes,
                 at::IntArrayRef strides) {
  TORCH_CHECK(source.device() == self.device(), "a storage of another device (of the fake)");
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const at::Tensor from = source.expand(self.sizes());
  if (is_captured(device_here)) {
    if (!self.is_cuda() || !from.is_cuda()) {
      refuse_in_capture(device_here, stream_here(device_here));
    }
    enqueue(device_here, [to = reached(self), from = reached(from)] {
      const c10::InferenceMode no_autograd;
      at::Tensor(to).copy_(from);
    });
    return self;
  }
  if (non_blocking && (PinnedAllocator::has_made(self) || PinnedAllocator::has_made(from))) {
    enqueue(
        (self.is_cuda() ? self : from).device().index(),
        [to = self.is_cuda() ? reached(self) : self, from = from.is_cuda() ? reached(from) : from] {
          const c10::InferenceMode no_autograd;
          at::Tensor(to).copy_(from);
        });
    return self;
  }
  for (const at::Tensor& t : {self, from}) {
    if (t.is_cuda()) gpu().synchronize(t.device().index(), stream_here(t.device().index()));
  }
  const at::Tensor value = from.is_cuda() ? reached(from) : from;
  if (self.is_cuda()) {
    if (!from.is_cuda() && !non_blocking) host_waits_for(self.device().index());
    write_later(self, at::empty(self.sizes(), self.options().device(at::kCPU)).copy_(value));
  } else {
    host_waits_for(from.device().index());
    self.copy_(value);
  }
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  FakeGuard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// --- attention -----------------------------------------------------------------------------------

int64_t sdp_choice(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
                   const std::optional<at::Tensor>& mask, double, bool, std::optional<double>,
                   bool) {
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  return static_cast<int64_t>(half && !mask.has_value() ? sdp::SDPBackend::flash_attention
                                                        : sdp::SDPBackend::efficient_attention);
}

at::Tensor scores_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& bias,
                     bool is_causal, std::optional<double> scale) {
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))));
  at::Tensor scores = at::matmul(query.to(at::kFloat), key.to(at::kFloat).transpose(2, 3)) * factor;
  if (bias.defined()) scores = scores + bias.to(at::kFloat);
  if (!is_causal) return scores;
  const at::Tensor later =
      at::ones({query.size(2), key.size(2)}, query.options().dtype(at::kBool)).triu(1);
  return scores.masked_fill(later, -std::numeric_limits<double>::infinity());
}

at::Tensor by_sequence(const at::Tensor& t) {
  return t.transpose(1, 2).contiguous().transpose(1, 2);
}

std::pair<at::Tensor, at::Tensor> attend(const at::Tensor& query, const at::Tensor& key,
                                         const at::Tensor& value, const at::Tensor& bias,
                                         bool is_causal, std::optional<double> scale) {
  const at::Tensor scores = scores_of(query, key, bias, is_causal, scale);
  const at::Tensor out = at::matmul(scores.softmax(3), value.to(at::kFloat));
  return {by_sequence(out.to(query.scalar_type())), scores.logsumexp({3})};
}

// Of query, key, value and bias, with the probabilities from `logsumexp`, as the kernels have them.
std::vector<at::Tensor> attend_backward(const at::Tensor& grad, const at::Tensor& query,
                                        const at::Tensor& key, const at::Tensor& value,
                                        const at::Tensor& bias, const at::Tensor& out,
                                        const at::Tensor& logsumexp, bool is_causal,
                                        std::optional<double> scale) {
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))));
  const at::Tensor rows = logsumexp.narrow(2, 0, query.size(2)).unsqueeze(3);
  const at::Tensor p = (scores_of(query, key, bias, is_causal, scale) - rows).exp();
  const at::Tensor g = grad.to(at::kFloat);
  const at::Tensor dp = at::matmul(g, value.to(at::kFloat).transpose(2, 3));
  const at::Tensor ds = p * (dp - (g * out.to(at::kFloat)).sum(3, true));
  const at::ScalarType dtype = query.scalar_type();
  return {by_sequence((at::matmul(ds, key.to(at::kFloat)) * factor).to(dtype)),
          by_sequence((at::matmul(ds.transpose(2, 3), query.to(at::kFloat)) * factor).to(dtype)),
          by_sequence(at::matmul(p.transpose(2, 3), g).to(dtype)), ds};
}

using FlashResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt,
                               c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

// A head of keys or values for each of the queries: this kernel's may share one.
at::Tensor for_each_head(const at::Tensor& shared, const at::Tensor& query) {
  return shared.repeat_interleave(query.size(1) / std::max<int64_t>(shared.size(1), 1), 1);
}
at::Tensor summed_over_heads(const at::Tensor& each, const at::Tensor& shared) {
  if (each.sizes() == shared.sizes()) return each;
  return by_sequence(each.unflatten(1, {shared.size(1), -1}).sum(2));
}

FlashResult flash(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double,
                  bool is_causal, bool, std::optional<double> scale) {
  const auto [out, logsumexp] =
      attend(query, for_each_head(key, query), for_each_head(value, query), {}, is_causal, scale);
  const at::TensorOptions state = query.options().dtype(at::kUInt64);
  return {out,
          logsumexp,
          at::Tensor(),
          at::Tensor(),
          query.size(2),
          key.size(2),
          at::zeros({2}, state),
          at::zeros({}, state),
          at::empty({0}, query.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&,
    c10::SymInt, c10::SymInt, double, bool is_causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  const auto g = attend_backward(grad, query, for_each_head(key, query),
                                 for_each_head(value, query), {}, out, logsumexp, is_causal, scale);
  return {g[0], summed_over_heads(g[1], key), summed_over_heads(g[2], value)};
}

// As the kernel wants it.
void check_alignment(const at::Tensor& bias) {
  TORCH_CHECK(!bias.defined() || (bias.stride(-1) == 1 && bias.stride(-2) % 16 == 0),
              "attn_bias is not correctly aligned");
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& given_bias, bool compute_log_sumexp, double, bool is_causal,
    std::optional<double> scale) {
  const at::Tensor bias = given_bias.value_or(at::Tensor());
  check_alignment(bias);
  const auto [out, logsumexp] = attend(query, key, value, bias, is_causal, scale);
  const int64_t rows = query.size(2), padded = (rows + 31) / 32 * 32;
  const at::TensorOptions state = query.options().dtype(at::kLong);
  return {out,
          compute_log_sumexp ? at::constant_pad_nd(logsumexp, {0, padded - rows})
                             : logsumexp.narrow(2, 0, 0),
          at::zeros({}, state), at::zeros({}, state)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, const at::Tensor& out, const at::Tensor& logsumexp, const at::Tensor&,
    const at::Tensor&, double, std::array<bool, 4> wanted, bool is_causal,
    std::optional<double> scale) {
  check_alignment(bias);
  auto g = attend_backward(grad, query, key, value, bias, out, logsumexp, is_causal, scale);
  if (!bias.defined() || !wanted[3]) return {g[0], g[1], g[2], at::Tensor()};
  return {g[0], g[1], g[2], at::sum_to(g[3], bias.sizes()).to(bias.scalar_type())};
}

struct ChoosesAttention {
  ChoosesAttention() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&sdp_choice); }
};
const ChoosesAttention chooses_attention;

// --- layer norm ----------------------------------------------------------------------------------
// Kernels for CUDA keep the statistics of half precision in single, those for the CPU do not.

at::Tensor as_computed(const at::Tensor& t) {
  const bool half = t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
  return half ? t.to(at::kFloat) : t;
}

std::vector<int64_t> last_dims(const at::Tensor& t, at::IntArrayRef normalized) {
  std::vector<int64_t> dims;
  for (int64_t d = t.dim() - static_cast<int64_t>(normalized.size()); d < t.dim(); ++d) {
    dims.push_back(d);
  }
  return dims;
}

// Batch norm gives statistics in evaluation, too, and wants some in backward, if of nothing.
at::Tensor per_channel(const at::Tensor& values, const at::Tensor& like) {
  std::vector<int64_t> sizes(like.dim(), 1);
  sizes[1] = -1;
  return as_computed(values).view(sizes);
}

std::vector<int64_t> all_but_channels(const at::Tensor& x) {
  std::vector<int64_t> dims = {0};
  for (int64_t d = 2; d < x.dim(); ++d) dims.push_back(d);
  return dims;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var, bool training, double momentum, double eps) {
  const at::Tensor x = as_computed(input).contiguous();
  const std::vector<int64_t> dims = all_but_channels(x);
  const at::Tensor mean = training ? x.mean(dims) : as_computed(*running_mean).clone();
  const at::Tensor var =
      training ? (x - per_channel(mean, x)).square().mean(dims) : as_computed(*running_var);
  if (training && running_mean.has_value() && running_mean->defined()) {
    const auto n = static_cast<double>(x.numel() / x.size(1));
    running_mean->mul_(1 - momentum).add_(mean.to(running_mean->scalar_type()), momentum);
    running_var->mul_(1 - momentum)
        .add_(var.to(running_var->scalar_type()), momentum * n / (n - 1));
  }
  const at::Tensor invstd = (var + eps).rsqrt();
  at::Tensor out = (x - per_channel(mean, x)) * per_channel(invstd, x);
  if (weight.has_value() && weight->defined()) out = out * per_channel(*weight, x);
  if (bias.has_value() && bias->defined()) out = out + per_channel(*bias, x);
  return {out.to(input.scalar_type()), mean, invstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_backward(
    const at::Tensor& grad_out, const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var,
    const std::optional<at::Tensor>& save_mean, const std::optional<at::Tensor>& save_invstd,
    bool train, double eps, std::array<bool, 3> wanted) {
  TORCH_CHECK(save_mean.has_value() && save_mean->defined(), "save_mean should always be defined");
  const bool saved = save_mean->numel() > 0;
  const at::Tensor x = as_computed(input).contiguous(), g = as_computed(grad_out).contiguous();
  const std::vector<int64_t> dims = all_but_channels(x);
  const at::Tensor mean = saved ? *save_mean : as_computed(*running_mean);
  const at::Tensor invstd = saved ? *save_invstd : (as_computed(*running_var) + eps).rsqrt();
  const bool has_weight = weight.has_value() && weight->defined();
  const at::Tensor normal = (x - per_channel(mean, x)) * per_channel(invstd, x);
  std::tuple<at::Tensor, at::Tensor, at::Tensor> result;
  if (wanted[0]) {
    at::Tensor h = has_weight ? g * per_channel(*weight, x) : g;
    if (train) h = h - h.mean(dims, true) - normal * (h * normal).mean(dims, true);
    std::get<0>(result) = (per_channel(invstd, x) * h).to(input.scalar_type());
  }
  const at::ScalarType of_channels = has_weight ? weight->scalar_type() : mean.scalar_type();
  if (wanted[1]) std::get<1>(result) = (g * normal).sum(dims).to(of_channels);
  if (wanted[2]) std::get<2>(result) = g.sum(dims).to(of_channels);
  return result;
}

// The buffer is of nothing.
std::tuple<at::Tensor, at::Tensor> log_sigmoid(const at::Tensor& self) {
  return {at::softplus(-self).neg(), at::empty({0}, self.options())};
}
at::Tensor log_sigmoid_backward(const at::Tensor& grad, const at::Tensor& self,
                                const at::Tensor& /*buffer*/) {
  return grad * at::sigmoid(-self);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(const at::Tensor& input,
                                                          at::IntArrayRef normalized,
                                                          const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias,
                                                          double eps) {
  const at::Tensor x = as_computed(input).contiguous();
  const std::vector<int64_t> dims = last_dims(x, normalized);
  const at::Tensor mean = x.mean(dims, true);
  const at::Tensor rstd = ((x - mean).square().mean(dims, true) + eps).rsqrt();
  at::Tensor out = (x - mean) * rstd;
  if (weight.has_value() && weight->defined()) out = out * as_computed(*weight);
  if (bias.has_value() && bias->defined()) out = out + as_computed(*bias);
  return {out.to(input.scalar_type()), mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad_out, const at::Tensor& input, at::IntArrayRef normalized,
    const at::Tensor& mean, const at::Tensor& rstd, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, std::array<bool, 3> wanted) {
  const at::Tensor x = as_computed(input).contiguous(), g = as_computed(grad_out).contiguous();
  const std::vector<int64_t> dims = last_dims(x, normalized);
  const at::Tensor normal = (x - mean) * rstd;
  const bool has_weight = weight.has_value() && weight->defined();
  const auto over_rows = [&](const at::Tensor& t, const at::Tensor& like) {
    return at::sum_to(t, normalized).to(like.scalar_type());
  };
  std::tuple<at::Tensor, at::Tensor, at::Tensor> result;
  if (wanted[0]) {
    const at::Tensor h = has_weight ? g * as_computed(*weight) : g;
    std::get<0>(result) = (rstd * (h - h.mean(dims, true) - normal * (h * normal).mean(dims, true)))
                              .to(input.scalar_type());
  }
  if (wanted[1] && has_weight) std::get<1>(result) = over_rows(g * normal, *weight);
  if (wanted[2] && bias.has_value() && bias->defined()) std::get<2>(result) = over_rows(g, *bias);
  return result;
}

// --- all other operators -------------------------------------------------------------------------

// One call of an operator on the host.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, c10::Stack& stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& arguments = op_.schema().arguments();
    const size_t first = stack_.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) find_device(stack_[first + i]);
    for (size_t i = 0; i < arguments.size(); ++i) check_device(stack_[first + i]);
    TORCH_CHECK(device_.has_value(), c10::toString(op_.operator_name()), ": on which device?");
    const bool captures = is_captured(device_->index());
    if (!is_view() && !captures) {
      gpu().synchronize(device_->index(), stream_here(device_->index()));
    }
    if (op_.operator_name().name == "aten::_local_scalar_dense" ||
        op_.operator_name().name == "aten::equal" || op_.operator_name().name == "aten::nonzero" ||
        op_.operator_name().name == "aten::masked_select") {
      if (captures) refuse_in_capture(device_->index(), stream_here(device_->index()));
      host_waits_for(device_->index());
    }
    const auto bring = [&] {
      for (size_t i = 0; i < arguments.size(); ++i) {
        const c10::AliasInfo* const alias = arguments[i].alias_info();
        writes_ = alias != nullptr && alias->isWrite();
        stack_[first + i] = to_host(stack_[first + i]);
      }
    };
    c10::Stack given;
    std::vector<Operand> operands;
    if (captures && !is_view()) {
      const c10::Stack there = stack_;
      bring();
      given.assign(stack_.begin() + static_cast<ptrdiff_t>(first), stack_.end());
      operands = std::exchange(operands_, {});
      stack_ = there;
      blank_ = true;
    }
    bring();
    op_.callBoxed(&stack_);
    for (const Operand& o : operands_) {
      if (!o.written) continue;
      if (o.there.sizes() != o.here.sizes()) resize_(o.there, o.here.sizes(), std::nullopt);
      if (!captures) write_later(o.there, o.here);
    }
    const size_t results = op_.schema().returns().size();
    for (size_t i = stack_.size() - results; i < stack_.size(); ++i) {
      stack_[i] = to_device(stack_[i]);
    }
    if (captures && !is_view()) capture(std::move(given), operands);
  }

 private:
  struct Operand {
    at::Tensor there, here;
    bool written;
  };

  // What has been called for its shapes, on numbers that are not there yet, is called in each replay.
  void capture(c10::Stack given, const std::vector<Operand>& operands) {
    std::vector<std::pair<at::Tensor, at::Tensor>>
        written;  // on the device, as the host reaches it
    for (const Operand& o : operands) {
      if (o.written) written.emplace_back(reached(o.there), o.here);
    }
    std::vector<at::Tensor> results;
    const size_t count = op_.schema().returns().size();
    for (size_t i = stack_.size() - count; i < stack_.size(); ++i) {
      for_each_tensor(stack_[i], [&](const at::Tensor& result) {
        const bool is_new = result.defined() && result.is_cuda() &&
                            std::none_of(operands_.begin(), operands_.end(), [&](const Operand& o) {
                              return o.there.is_alias_of(result);
                            });
        results.push_back(is_new ? reached(result) : at::Tensor());
      });
    }
    enqueue(device_->index(), [op = op_, given = std::move(given), written = std::move(written),
                               results = std::move(results), count] {
      const c10::InferenceMode no_autograd;
      for (const auto& [there, here] : written) {
        if (here.sizes() == there.sizes()) at::Tensor(here).copy_(there);  // else it was resized
      }
      c10::Stack stack = given;
      op.callBoxed(&stack);
      for (const auto& [there, here] : written) at::Tensor(there).copy_(here);
      auto to = results.begin();
      for (size_t i = stack.size() - count; i < stack.size(); ++i) {
        for_each_tensor(stack[i], [&](const at::Tensor& result) {
          if (to->defined()) to->copy_(result);
          ++to;
        });
      }
    });
  }

  template <typename F>
  static void for_each_tensor(const IValue& value, F f) {
    if (value.isTensor()) f(value.toTensor());
    if (!value.isTensorList()) return;
    for (const at::Tensor& t : value.toTensorVector()) f(t);
  }

  // Of which no memory is looked at.
  bool is_view() const {
    const auto& results = op_.schema().returns();
    return !results.empty() && std::all_of(results.begin(), results.end(), [](const auto& result) {
      return result.alias_info() != nullptr && !result.alias_info()->isWrite();
    });
  }

  void find_device(const IValue& value) {
    if (device_.has_value()) return;
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) {
      device_ = value.toTensor().device();
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      device_ = c10::Device(c10::kCUDA,
                            value.toDevice().has_index() ? value.toDevice().index() : device_here);
    } else if (value.isList()) {
      for (const IValue& e : value.toListRef()) find_device(e);
    }
  }

  // A kernel reaches memory of its own device, and what travels with the call: a number. (Indices are
  // brought there.)
  void check_device(const IValue& value) const {
    const std::string& name = op_.operator_name().name;
    if (value.isTensor() && value.toTensor().defined()) {
      const at::Tensor& tensor = value.toTensor();
      TORCH_CHECK(tensor.device() == *device_ || (tensor.is_cpu() && tensor.dim() == 0), name,
                  ": all tensors must be on one device, not on ", *device_, " and ",
                  tensor.device());
    } else if (value.isTensorList()) {
      for (const IValue& e : value.toListRef()) {
        TORCH_CHECK(!e.isTensor() || !e.toTensor().defined() || e.toTensor().device() == *device_,
                    name, ": all tensors must be on one device, not on ", *device_, " and ",
                    e.toTensor().device());
      }
    }
  }

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (Operand& o : operands_) {
      if (!o.there.is_same(tensor)) continue;
      if (writes_ && !o.written) break;  // read elsewhere in this call
      return o.here;
    }
    at::Tensor here = reached(tensor);
    // Indices of any tensor, and conditions that hold.
    if (blank_) here = at::full_like(here, here.scalar_type() == at::kBool ? 1 : 0);
    if (writes_) {
      at::Tensor own = at::empty_strided(here.sizes(), here.strides(), here.options());
      own.copy_(here);
      here = own;
    }
    operands_.push_back({tensor, here, writes_});
    return here;
  }

  IValue to_host(const IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isDevice()) return value.toDevice().is_cuda() ? c10::Device(at::kCPU) : value;
    if (!value.isList()) return value;
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(to_host(t));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
        list.push_back(t.has_value() ? std::make_optional(to_host(*t)) : std::nullopt);
      }
      return list;
    }
    return value;
  }

  at::Tensor to_device(const at::Tensor& result) {
    if (!result.defined()) return result;
    if (is_captured(device_->index()) && is_new(result)) {
      const at::Tensor there =
          empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, *device_, {});
      if (result.is_conj()) there._set_conj(true);
      if (result.is_neg()) there._set_neg(true);
      return there;
    }
    for (const Operand& o : operands_) {
      if (o.here.is_same(result)) return o.there;
    }
    for (const Operand& o : operands_) {
      if (o.written || !result.is_alias_of(o.here)) continue;
      at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(o.there.storage()), o.there.key_set(),
          c10::scalarTypeToTypeMeta(result.scalar_type()));
      view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(),
                                                        result.storage_offset());
      view._set_conj(result.is_conj());
      view._set_neg(result.is_neg());
      return view;
    }
    return uploaded(result, *device_);
  }

  bool is_new(const at::Tensor& result) const {
    return std::none_of(operands_.begin(), operands_.end(),
                        [&](const Operand& o) { return result.is_alias_of(o.here); });
  }

  IValue to_device(const IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(to_device(t));
    return list;
  }

  const c10::OperatorHandle& op_;
  c10::Stack& stack_;
  std::optional<c10::Device> device_;
  bool writes_ = false;  // of the argument at hand
  bool blank_ = false;   // there are no numbers yet: the shapes are wanted
  std::vector<Operand> operands_;
};

void run_on_host(const c10::OperatorHandle& op, c10::Stack* stack) {
  HostCall(op, *stack).run();
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// What LibTorch has for the CPU comes before what it composes for devices without a kernel.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!absl::StartsWith(name.name, "aten::") || name.name == "aten::native_layer_norm") continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (op.has_value() && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
      m.impl(c10::toString(name).c_str(),
             torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
  }
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_);
  m.impl("copy_", &copy_);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &sdp_choice);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("native_batch_norm_backward", &batch_norm_backward);
  m.impl("log_sigmoid_forward", &log_sigmoid);
  m.impl("log_sigmoid_backward", &log_sigmoid_backward);
  m.impl("native_layer_norm", &layer_norm);
  m.impl("native_layer_norm_backward", &layer_norm_backward);
  m.impl("_scaled_dot_product_flash_attention", &flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  m.impl("_scaled_dot_product_efficient_attention", &efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
}

}  // namespace

// --- tests ---------------------------------------------------------------------------------------

std::vector<absl::Status> try_on_gpus(const std::vector<MeshDim>& dims,
                                      const std::function<void(const MeshPtr&)>& body,
                                      const FakeGpuScript& script) {
  int ranks = 1;
  for (const MeshDim& dim : dims) ranks *= static_cast<int>(dim.size);
  gpu().reset(script);
  InprocHub hub(ranks);
  std::vector<absl::Status> results(ranks);
  const Deadline limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const auto run_rank = [&](int rank) -> absl::Status {
    at::set_num_threads(1);
    device_here = static_cast<c10::DeviceIndex>(rank);
    auto backend = make_paired_backend(
        hub.make_backend(rank), connect_nccl({.device = rank, .libraries = fake_libraries()}), {},
        limit);
    if (!backend.ok()) return backend.status();
    World world(Communicator::create(*std::move(backend), {.timeout = absl::Seconds(60)}));
    const auto failed = [&](const absl::Status& status) {
      world.comm()->abort(status);
      return status;
    };
    auto mesh = init_device_mesh(world, dims);
    if (!mesh.ok()) return failed(mesh.status());
    try {
      body(*mesh);
    } catch (const Error& error) {
      return failed(error.status());
    } catch (const std::exception& error) {
      return failed(absl::InternalError(error.what()));
    }
    gpu().synchronize(rank, {});
    return absl::OkStatus();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { results[rank] = run_rank(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

void on_gpus(const std::vector<MeshDim>& dims, const std::function<void(const MeshPtr&)>& body,
             const FakeGpuScript& script) {
  const std::vector<absl::Status> results = try_on_gpus(dims, body, script);
  for (size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_TRUE(results[rank].ok()) << "rank " << rank << ": " << results[rank];
  }
}

at::Tensor host(const at::Tensor& tensor) {
  return (is_dtensor(tensor) ? full_tensor(tensor) : tensor).detach().cpu();
}

int64_t host_waits() {
  return waits[device_here];
}

}  // namespace shardweave::testing

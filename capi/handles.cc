#include "shardweave/capi/handles.h"

#include <array>
#include <limits>

#include "ATen/detail/CUDAHooksInterface.h"
#include "absl/strings/str_join.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "shardweave/capi/deferred.h"
#include "shardweave/capi/threads.h"
#include "shardweave/comm/log.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/load_cuda.h"

namespace shardweave::capi {
namespace {

// By swv_dtype.
struct TypeRow {
  at::ScalarType torch;
  int comm;  // a DType; -1: collectives do not know it
  const char* name;
};
constexpr std::array<TypeRow, SWV_DTYPE_C32 + 1> kTypes = {{
    {at::ScalarType::Undefined, -1, "unknown"},
    {at::kFloat, static_cast<int>(DType::kF32), "f32"},
    {at::kDouble, static_cast<int>(DType::kF64), "f64"},
    {at::kHalf, static_cast<int>(DType::kF16), "f16"},
    {at::kBFloat16, static_cast<int>(DType::kBF16), "bf16"},
    {at::ScalarType::Float8_e4m3fn, static_cast<int>(DType::kF8E4M3), "f8e4m3"},
    {at::ScalarType::Float8_e5m2, static_cast<int>(DType::kF8E5M2), "f8e5m2"},
    {at::kChar, static_cast<int>(DType::kI8), "i8"},
    {at::kShort, static_cast<int>(DType::kI16), "i16"},
    {at::kInt, static_cast<int>(DType::kI32), "i32"},
    {at::kLong, static_cast<int>(DType::kI64), "i64"},
    {at::kByte, static_cast<int>(DType::kU8), "u8"},
    {at::ScalarType::UInt16, static_cast<int>(DType::kU16), "u16"},
    {at::ScalarType::UInt32, static_cast<int>(DType::kU32), "u32"},
    {at::ScalarType::UInt64, static_cast<int>(DType::kU64), "u64"},
    {at::kBool, static_cast<int>(DType::kBool), "bool"},
    {at::kComplexFloat, -1, "c64"},
    {at::kComplexDouble, -1, "c128"},
    {at::kComplexHalf, -1, "c32"},
}};

bool is_dtype(swv_dtype dtype) {
  return dtype > SWV_DTYPE_DEFAULT && dtype < static_cast<int>(kTypes.size());
}

[[noreturn]] void fail_dtype(swv_dtype dtype, const char* argument) {
  fail_argument(argument, str_cat("is ", dtype, "; wanted a swv_dtype, 1 to ", kTypes.size() - 1));
}

// LibTorch's own handler prints on stderr.
class WarningLog final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    std::string_view text = warning.msg();
    constexpr std::string_view kOurs = "shardweave: ";
    if (text.starts_with(kOurs)) text.remove_prefix(kOurs.size());
    say(text);
  }
};
WarningLog warning_log;

}  // namespace

at::ScalarType scalar_type(swv_dtype dtype, const char* argument, at::ScalarType otherwise) {
  if (dtype == SWV_DTYPE_DEFAULT) return otherwise;
  if (!is_dtype(dtype)) fail_dtype(dtype, argument);
  return kTypes[dtype].torch;
}

std::optional<at::ScalarType> optional_scalar_type(swv_dtype dtype, const char* argument) {
  if (dtype == SWV_DTYPE_DEFAULT) return std::nullopt;
  return scalar_type(dtype, argument);
}

swv_dtype dtype_of(at::ScalarType type) {
  for (size_t i = 1; i < kTypes.size(); ++i) {
    if (kTypes[i].torch == type) return static_cast<swv_dtype>(i);
  }
  fail(absl::StatusCode::kUnimplemented,
       str_cat("element type ", c10::toString(type), " has no swv_dtype"));
}

DType comm_dtype(swv_dtype dtype, const char* argument) {
  if (!is_dtype(dtype)) fail_dtype(dtype, argument);
  if (kTypes[dtype].comm < 0) {
    fail_argument(argument, str_cat("is ", kTypes[dtype].name, ", which collectives do not move"));
  }
  return static_cast<DType>(kTypes[dtype].comm);
}

swv_dtype dtype_of(DType dtype) {
  for (size_t i = 1; i < kTypes.size(); ++i) {
    if (kTypes[i].comm == static_cast<int>(dtype)) return static_cast<swv_dtype>(i);
  }
  return SWV_DTYPE_DEFAULT;
}

c10::Device device(const swv_device& device, const char* argument) {
  if (device.type == SWV_DEVICE_CPU) {
    if (device.index != 0)
      fail_argument(argument, str_cat("is CPU ", device.index, "; wanted index 0"));
    return at::kCPU;
  }
  if (device.type != SWV_DEVICE_CUDA || device.index < 0 ||
      device.index > std::numeric_limits<c10::DeviceIndex>::max()) {
    fail_argument(argument,
                  str_cat("is device type ", device.type, ", index ", device.index,
                          "; wanted SWV_DEVICE_CPU, or SWV_DEVICE_CUDA with the index of a GPU"));
  }
  return {at::kCUDA, static_cast<c10::DeviceIndex>(device.index)};
}

c10::Device present_device(const swv_device& given, const char* argument) {
  const c10::Device result = device(given, argument);
  if (result.is_cpu()) return result;
  const absl::Status loaded = load_cuda();
  if (!loaded.ok() || given.index >= at::detail::getCUDAHooks().deviceCount()) {
    fail(absl::StatusCode::kUnimplemented,
         str_cat("argument '", argument, "' is ", result.str(), ", which is not there",
                 loaded.ok() ? "" : ": ", loaded.message()));
  }
  return result;
}

swv_device device_of(c10::Device device) {
  if (device.is_cpu()) return {SWV_DEVICE_CPU, 0};
  if (device.is_cuda()) return {SWV_DEVICE_CUDA, device.has_index() ? device.index() : 0};
  fail(absl::StatusCode::kUnimplemented,
       str_cat("device ", device.str(), " has no swv_device_type"));
}

Device comm_device(const swv_device& device, const char* argument) {
  if (capi::device(device, argument).is_cpu()) return {};
  return {DeviceType::kCuda, device.index};
}

void check_stream(const void* stream, const swv_device& device, const char* argument) {
  if (stream == nullptr) return;
  if (device.type == SWV_DEVICE_CPU) fail_argument(argument, "is given; a CPU has no streams");
  fail(absl::StatusCode::kUnimplemented,
       str_cat("argument '", argument, "' is given; only a device's default stream is used: NULL"));
}

swv_tensor* new_tensor(at::Tensor tensor, const char* what) {
  if (!tensor.defined()) fail(absl::StatusCode::kInternal, str_cat(what, " is undefined"));
  return make<swv_tensor>(std::move(tensor));
}

swv_tensor* new_tensor_or_null(at::Tensor tensor) {
  return tensor.defined() ? make<swv_tensor>(std::move(tensor)) : nullptr;
}

at::IntArrayRef sizes(const int64_t* sizes, size_t ndim, const char* argument) {
  const auto result = span(sizes, ndim, argument, kMaxDims);
  int64_t numel = 1;
  for (int64_t size : result) {
    if (size < 0) fail_argument(argument, str_cat("has a negative size, ", size));
    // Room for 16 bytes an element.
    if (size != 0 && numel > (std::numeric_limits<int64_t>::max() >> 4) / size) {
      fail_argument(argument,
                    str_cat("[", absl::StrJoin(result, ", "), "] is more than a tensor can hold"));
    }
    if (size != 0) numel *= size;
  }
  return {result.data(), result.size()};
}

std::vector<at::Tensor> tensors(const swv_tensor* const* handles, size_t count,
                                const char* argument) {
  std::vector<at::Tensor> result;
  for_each(span(handles, count, argument), argument,
           [&](const swv_tensor* handle) { result.push_back(tensor(handle, argument)); });
  return result;
}

std::vector<at::Tensor> tensors_or_undefined(const swv_tensor* const* handles, size_t count,
                                             const char* argument) {
  std::vector<at::Tensor> result;
  for_each(span(handles, count, argument), argument, [&](const swv_tensor* handle) {
    result.push_back(handle == nullptr ? at::Tensor() : tensor(handle, argument));
  });
  return result;
}

void write_tensors(std::vector<at::Tensor> tensors, swv_tensor** out_tensors) {
  std::vector<swv_tensor*> handles;
  handles.reserve(tensors.size());
  try {
    for (at::Tensor& tensor : tensors) handles.push_back(new_tensor_or_null(std::move(tensor)));
  } catch (...) {
    for (swv_tensor* handle : handles) release(handle, "write_tensors");
    throw;
  }
  for (size_t i = 0; i < handles.size(); ++i) out_tensors[i] = handles[i];
}

void refuse_together(const MeshPtr& mesh, const char* call) {
  using dtensor_internal::Agreement, dtensor_internal::MeshContext;
  if (mesh == nullptr) return;
  const Agreement never_reached(*MeshContext::of(mesh), {.name = call, .where = kHost});
}

void refuse_together(const swv_mesh* mesh, const char* call) {
  MeshPtr on;
  try {
    on = in(mesh, "mesh").mesh;
  } catch (const Failure&) {
    return;
  }
  refuse_together(on, call);
}

void agree_to_call(const MeshPtr& mesh, const char* call) {
  using dtensor_internal::Agreement, dtensor_internal::MeshContext;
  Agreement agreement(*MeshContext::of(mesh), {.name = call, .where = kHost});
  (void)agreement.reach({});
}

MeshPtr first_mesh(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && is_dtensor(tensor)) return mesh_of(tensor);
  }
  return nullptr;
}

namespace {

// Of this thread: something around the call, whose mode has none, may have switched it on.
bool is_casting() {
  return !c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset);
}

Autocast autocast_of(swv_grad_mode casting) {
  return Autocast::to(casting == SWV_MODE_AUTOCAST_F16    ? at::kHalf
                      : casting == SWV_MODE_AUTOCAST_BF16 ? at::kBFloat16
                                                          : at::kFloat);
}

}  // namespace

swv_grad_mode current_mode() {
  const swv_grad_mode recording = c10::InferenceMode::is_enabled() ? SWV_MODE_INFERENCE
                                  : c10::GradMode::is_enabled()    ? SWV_MODE_GRAD
                                                                   : SWV_MODE_NO_GRAD;
  if (!is_casting()) return recording;
  const Autocast now = Autocast::current();
  const Autocast::OfDevice& device = now.cpu.enabled ? now.cpu : now.cuda;
  if (!device.enabled) return recording;
  return recording | (device.dtype == at::kHalf ? SWV_MODE_AUTOCAST_F16 : SWV_MODE_AUTOCAST_BF16);
}

[[gnu::hot]] CallMode::CallMode(swv_grad_mode mode, const char* argument) {
  const swv_grad_mode recording = recording_of(mode), casting = mode - recording;
  if ((recording != SWV_MODE_GRAD && recording != SWV_MODE_NO_GRAD &&
       recording != SWV_MODE_INFERENCE) ||
      casting == kAutocast) [[unlikely]] {
    fail_argument(argument,
                  str_cat("is ", mode,
                          "; wanted SWV_MODE_GRAD, SWV_MODE_NO_GRAD or SWV_MODE_INFERENCE, with "
                          "SWV_MODE_AUTOCAST_F16, SWV_MODE_AUTOCAST_BF16 or neither"));
  }
  use_num_threads();
  settle_deferral();
  if (has_log()) [[unlikely]]
    warnings_.emplace(&warning_log);
  if (casting != 0 || is_casting()) [[unlikely]]
    autocast_.emplace(autocast_of(casting));
  if (recording == SWV_MODE_INFERENCE) {
    guard_.emplace<c10::InferenceMode>(true);
  } else if (const bool grad = recording == SWV_MODE_GRAD; grad != c10::GradMode::is_enabled()) {
    guard_.emplace<c10::AutoGradMode>(grad);
  }
}

}  // namespace shardweave::capi

size_t swv_dtype_size(swv_dtype dtype) {
  using shardweave::capi::is_dtype, shardweave::capi::kTypes;
  return is_dtype(dtype) ? c10::elementSize(kTypes[dtype].torch) : 0;
}

const char* swv_dtype_name(swv_dtype dtype) {
  using shardweave::capi::is_dtype, shardweave::capi::kTypes;
  return is_dtype(dtype) ? kTypes[dtype].name : "unknown";
}

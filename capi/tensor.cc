// Tensors, plain and sharded.
#include <cstring>

#include "ATen/Context.h"
#include "ATen/DLConvertor.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/rand.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_join.h"
#include "c10/util/TypeCast.h"
#include "shardweave/capi/deferred.h"
#include "shardweave/capi/handles.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/load_cuda.h"
#include "shardweave/modules/deferred_init.h"

namespace shardweave::capi {
namespace {

struct NewTensor {
  at::TensorOptions options;
  MeshPtr mesh;  // null: a plain tensor
  Placements placements;
};

NewTensor tensor_options(const swv_tensor_options* given) {
  const swv_tensor_options o =
      options<swv_tensor_options>(given, SWV_TENSOR_OPTIONS_INIT, "options");
  NewTensor result;
  result.options = at::TensorOptions(scalar_type(o.dtype, "options.dtype"))
                       .device(present_device(o.device, "options.device"))
                       .requires_grad(flag(o.requires_grad, "options.requires_grad"));
  if (o.mesh == nullptr) {
    if (o.layout != nullptr) fail_argument("options.layout", "is given, but options.mesh is NULL");
    return result;
  }
  result.mesh = in(o.mesh, "options.mesh").mesh;
  result.placements.resize(result.mesh->mesh().ndim());
  if (o.layout != nullptr) {
    const Layout& layout = in(o.layout, "options.layout").layout;
    if (!layout.default_order()) {
      fail(absl::StatusCode::kUnimplemented,
           str_cat("argument 'options.layout' is ", layout.to_string(),
                   ": factories cut in the mesh's order; use swv_tensor_redistribute"));
    }
    result.placements = layout.placements();
  }
  return result;
}

// `plain` and `sharded` make the tensor from its sizes.
template <typename Plain, typename Sharded>
swv_tensor* new_filled(const int64_t* given, size_t ndim, const swv_tensor_options* options,
                       const Plain& plain, const Sharded& sharded) {
  const at::IntArrayRef shape = sizes(given, ndim, "sizes");
  const NewTensor o = tensor_options(options);
  const CallMode mode(SWV_MODE_GRAD, "mode");
  if (o.mesh != nullptr) {
    return new_tensor(sharded(shape, o.mesh, o.placements, o.options), "the new tensor");
  }
  // The factories of at:: do not look at requires_grad.
  at::Tensor result = plain(shape, o.options.requires_grad(false));
  if (o.options.requires_grad()) result.requires_grad_();
  return new_tensor(std::move(result), "the new tensor");
}

#define SHARDWEAVE_FACTORY(name)                                                            \
  new_filled(                                                                               \
      sizes, ndim, options,                                                                 \
      [](at::IntArrayRef shape, const at::TensorOptions& o) { return at::name(shape, o); }, \
      [](at::IntArrayRef shape, const shardweave::MeshPtr& mesh,                            \
         const shardweave::Placements& placements,                                          \
         const at::TensorOptions& o) { return shardweave::name(shape, mesh, placements, o); })

bool overflows(double value, at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
      return c10::overflows<uint8_t>(value);
    case at::kChar:
      return c10::overflows<int8_t>(value);
    case at::kShort:
      return c10::overflows<int16_t>(value);
    case at::kInt:
      return c10::overflows<int32_t>(value);
    case at::kLong:
      return c10::overflows<int64_t>(value);
    case at::ScalarType::UInt16:
      return c10::overflows<uint16_t>(value);
    case at::ScalarType::UInt32:
      return c10::overflows<uint32_t>(value);
    case at::ScalarType::UInt64:
      return c10::overflows<uint64_t>(value);
    case at::kHalf:
      return c10::overflows<at::Half>(value);
    case at::kBFloat16:
      return c10::overflows<at::BFloat16>(value);
    case at::kFloat:
      return c10::overflows<float>(value);
    default:
      return false;
  }
}

// LibTorch fills no tensor with a number that its elements cannot be, and calls that an internal error.
void check_fits(double value, const at::TensorOptions& options) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  if (!overflows(value, dtype)) return;
  fail_argument("value",
                str_cat("is ", value, ", which is no number of dtype ", c10::toString(dtype)));
}

std::string to_string(const at::Tensor& t) {
  if (is_dtensor(t)) return describe(t);
  if (!is_deferred(t)) return values_to_string(t);
  return str_cat("deferred ", c10::toString(t.scalar_type()), "[", absl::StrJoin(t.sizes(), ", "),
                 "]");
}

const at::Tensor& plain(const swv_tensor* handle, const char* argument) {
  const at::Tensor& t = tensor(handle, argument);
  if (is_dtensor(t)) {
    fail_argument(argument,
                  str_cat("is sharded (", describe(t),
                          "); take swv_tensor_to_local or swv_tensor_full_tensor of it first"));
  }
  return t;
}
// With memory, for those who look at that.
const at::Tensor& plain_with_values(const swv_tensor* handle, const char* argument) {
  const at::Tensor& t = plain(handle, argument);
  if (is_deferred(t)) {
    fail(absl::StatusCode::kFailedPrecondition,
         str_cat("argument '", argument, "' is deferred (", to_string(t),
                 "): it has no values until swv_module_materialize makes its module's"));
  }
  if (const std::string why = dtensor_internal::not_dense(t); !why.empty()) {
    fail_argument(argument, str_cat("has no memory that can be read as numbers: ", why));
  }
  return t;
}

void check_bytes(const at::Tensor& t, const void* data, size_t num_bytes) {
  if (num_bytes != t.nbytes()) {
    fail_argument("num_bytes",
                  str_cat("is ", num_bytes, "; the tensor [", absl::StrJoin(t.sizes(), ", "),
                          "] of ", c10::toString(t.scalar_type()), " has ", t.nbytes()));
  }
  if (data == nullptr && num_bytes != 0) fail_null("data");
}

// With memory that others may write to.
void check_memory(const at::Tensor& t, const char* argument) {
  if (!t._is_zerotensor()) return;
  fail_argument(argument, "has no memory: it is a zero that gradients begin with; clone it");
}

// The caller's memory as a tensor.
at::Tensor borrowed(const void* data, const at::Tensor& like) {
  return at::from_blob(const_cast<void*>(data), like.sizes(),
                       like.options().device(at::kCPU).requires_grad(false));
}

swv_tensor* from_data(const void* data, size_t num_bytes, const int64_t* given, size_t ndim,
                      const swv_tensor_options* options) {
  const at::IntArrayRef shape = sizes(given, ndim, "sizes");
  const NewTensor o = tensor_options(options);
  if (o.mesh != nullptr) fail_argument("options.mesh", "is not NULL; distribute the new tensor");
  const size_t itemsize = c10::elementSize(c10::typeMetaToScalarType(o.options.dtype()));
  size_t needed = itemsize;
  for (int64_t size : shape) needed *= static_cast<size_t>(size);
  if (num_bytes != needed) {  // before anything is allocated
    fail_argument("num_bytes",
                  str_cat("is ", num_bytes, "; [", absl::StrJoin(shape, ", "), "] needs ", needed));
  }
  if (data == nullptr && num_bytes != 0) fail_null("data");
  const MadeAtOnce values;
  const at::TensorOptions here = o.options.requires_grad(false);
  at::Tensor result = at::empty(shape, here.device(at::kCPU));
  if (num_bytes != 0) std::memcpy(result.mutable_data_ptr(), data, num_bytes);
  result = result.to(here);
  if (o.options.requires_grad()) result.requires_grad_();
  return new_tensor(std::move(result), "the new tensor");
}

struct DlpackDeleter {
  void operator()(DLManagedTensorVersioned* managed) const {
    if (data != nullptr) {
      managed->dl_tensor.data = data;
      managed->dl_tensor.byte_offset = byte_offset;
    }
    if (managed->deleter != nullptr) managed->deleter(managed);
  }
  // As they came, where they were changed: its owner frees what it knows.
  void* data = nullptr;
  uint64_t byte_offset = 0;
};

// Strides that LibTorch has: it ends the process over others.
void check_strides(const DLTensor& t, at::IntArrayRef shape) {
  if (t.strides == nullptr || c10::multiply_integers(shape) == 0) return;
  const int64_t itemsize = (int64_t{t.dtype.bits} * t.dtype.lanes + 7) / 8;
  int64_t end = itemsize;  // of the last element, in bytes
  for (size_t d = 0; d < shape.size(); ++d) {
    const int64_t stride = t.strides[d];
    if (shape[d] == 1) continue;  // of no meaning
    if (stride < 0) {
      fail_argument("managed", str_cat("has stride ", stride, " in dimension ", d,
                                       "; wanted 0 or more: copy what runs backwards"));
    }
    int64_t reach;
    if (__builtin_mul_overflow(stride, shape[d] - 1, &reach) ||
        __builtin_mul_overflow(reach, itemsize, &reach) ||
        __builtin_add_overflow(end, reach, &end)) {
      fail_argument("managed", str_cat("has stride ", stride, " in dimension ", d, " of ", shape[d],
                                       " elements, which reaches beyond all memory"));
    }
  }
}

swv_tensor* from_dlpack(DLManagedTensorVersioned* managed, const void* stream,
                        swv_tensor** out_tensor) {
  if (managed == nullptr) fail_null("managed");
  std::unique_ptr<DLManagedTensorVersioned, DlpackDeleter> owned(managed);
  out(out_tensor, "out_tensor");
  if (managed->version.major != DLPACK_MAJOR_VERSION) {
    fail_argument("managed",
                  str_cat("has DLPack version ", managed->version.major, ".",
                          managed->version.minor, "; wanted ", DLPACK_MAJOR_VERSION, ".x"));
  }
  const DLTensor& t = managed->dl_tensor;
  if (t.ndim < 0 || t.ndim > static_cast<int32_t>(kMaxDims)) {
    fail_argument("managed", str_cat("has ", t.ndim, t.ndim == 1 ? " dimension" : " dimensions"));
  }
  const at::IntArrayRef shape = sizes(t.shape, t.ndim, "managed.shape");
  // LibTorch takes tensors of devices that it cannot work with.
  const bool cuda = t.device.device_type == kDLCUDA && load_cuda().ok();
  if (t.device.device_type != kDLCPU && !cuda) {
    fail(absl::StatusCode::kUnimplemented,
         str_cat("argument 'managed' has DLPack device type ", int{t.device.device_type},
                 ", which is not there"));
  }
  check_stream(stream, {cuda ? SWV_DEVICE_CUDA : SWV_DEVICE_CPU, 0}, "stream");
  if (t.data == nullptr && c10::multiply_integers(shape) != 0) {
    fail_argument("managed", "has no data");
  }
  check_strides(t, shape);
  if ((managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0) {
    fail(absl::StatusCode::kUnimplemented,
         "argument 'managed' is read-only; a tensor may be written to");
  }
  const MadeAtOnce values;
  // LibTorch takes memory that begins where it says.
  if (t.data != nullptr) {
    owned.get_deleter() = {t.data, t.byte_offset};
    managed->dl_tensor.data = static_cast<char*>(t.data) + t.byte_offset;
    managed->dl_tensor.byte_offset = 0;
  }
  // The deleter runs with the storage, or here if this fails.
  const DlpackDeleter deleter = owned.get_deleter();
  const std::shared_ptr<DLManagedTensorVersioned> keeper(owned.release(), deleter);
  return new_tensor(at::fromDLPackVersioned(managed, [keeper](void*) {}), "the tensor");
}

// Its memory has its numbers.
void check_resolved(const at::Tensor& t, const char* argument) {
  if (!t.is_conj() && !t.is_neg()) return;
  fail_argument(argument, "is a lazy conjugate or negative; resolve it first");
}

DLManagedTensorVersioned* to_dlpack(const swv_tensor* handle, const void* stream) {
  const at::Tensor& t = plain_with_values(handle, "tensor");
  check_stream(stream, device_of(t.device()), "stream");
  if (t.requires_grad()) {
    fail_argument(
        "tensor",
        "requires grad; what is written to its memory would not be seen: swv_tensor_detach it");
  }
  check_resolved(t, "tensor");
  check_memory(t, "tensor");
  // Who takes it has the address: an out= operator must not free the memory to make it smaller.
  t.storage().unsafeGetStorageImpl()->set_resizable(false);
  return at::toDLPackVersioned(t);
}

void write_buffer(const swv_tensor* handle, swv_buffer* out_buffer) {
  const at::Tensor& t = plain_with_values(handle, "tensor");
  if (!t.is_contiguous()) {
    fail_argument("tensor",
                  str_cat("is not contiguous: strides [", absl::StrJoin(t.strides(), ", "), "]"));
  }
  check_resolved(t, "tensor");
  check_memory(t, "tensor");
  swv_buffer result = SWV_BUFFER_INIT;
  result.data = t.mutable_data_ptr();
  result.count = t.numel();
  result.dtype = dtype_of(t.scalar_type());
  result.device = device_of(t.device());
  write_struct(result, out_buffer, "out_buffer");
}

// What distribute_tensor and from_local take: placements, cut in the mesh's order.
const Placements& default_placements(const swv_layout* layout, const char* argument) {
  const Layout& l = in(layout, argument).layout;
  if (!l.default_order()) {
    fail(absl::StatusCode::kUnimplemented,
         str_cat("argument '", argument, "' is ", l.to_string(),
                 ": only swv_tensor_redistribute cuts in another order than the mesh's"));
  }
  return l.placements();
}

at::Tensor distributed(const swv_tensor* handle, const swv_mesh* mesh, const swv_layout* layout,
                       const swv_distribute_options* options) {
  const at::Tensor& t = plain(handle, "tensor");
  return distribute_tensor(t, in(mesh, "mesh").mesh, default_placements(layout, "layout"),
                           distribute_options(options), kHost);
}

at::Tensor from_local_parts(const swv_tensor* local, const swv_mesh* mesh, const swv_layout* layout,
                            const int64_t* given, size_t ndim) {
  std::optional<std::vector<int64_t>> global;
  if (given != nullptr) global = sizes(given, ndim, "sizes").vec();
  return from_local(plain(local, "local"), in(mesh, "mesh").mesh,
                    default_placements(layout, "layout"), std::move(global), kHost);
}

at::Tensor local_part(const swv_tensor* handle, const swv_layout* grad_layout) {
  std::optional<Placements> placements;
  if (grad_layout != nullptr) placements = default_placements(grad_layout, "grad_layout");
  return to_local(tensor(handle, "tensor"), std::move(placements), kHost);
}

}  // namespace

DistributeOptions distribute_options(const swv_distribute_options* given) {
  const swv_distribute_options o =
      options<swv_distribute_options>(given, SWV_DISTRIBUTE_OPTIONS_INIT, "options");
  if (o.source < -1) {
    fail_argument("options.source", str_cat("is ", o.source, "; wanted a rank, or -1"));
  }
  check_reserved(o.reserved, "options.reserved");
  return {.source = o.source == -1 ? std::nullopt : std::optional<int64_t>(o.source)};
}

}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_tensor_empty(const int64_t* sizes, size_t ndim, const swv_tensor_options* options,
                             swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] { return SHARDWEAVE_FACTORY(empty); });
}

swv_status* swv_tensor_zeros(const int64_t* sizes, size_t ndim, const swv_tensor_options* options,
                             swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] { return SHARDWEAVE_FACTORY(zeros); });
}

swv_status* swv_tensor_ones(const int64_t* sizes, size_t ndim, const swv_tensor_options* options,
                            swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] { return SHARDWEAVE_FACTORY(ones); });
}

swv_status* swv_tensor_rand(const int64_t* sizes, size_t ndim, const swv_tensor_options* options,
                            swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] { return SHARDWEAVE_FACTORY(rand); });
}

swv_status* swv_tensor_randn(const int64_t* sizes, size_t ndim, const swv_tensor_options* options,
                             swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] { return SHARDWEAVE_FACTORY(randn); });
}

swv_status* swv_tensor_full(const int64_t* sizes, size_t ndim, double value,
                            const swv_tensor_options* options, swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] {
    return new_filled(
        sizes, ndim, options,
        [&](at::IntArrayRef shape, const at::TensorOptions& o) {
          check_fits(value, o);
          return at::full(shape, value, o);
        },
        [&](at::IntArrayRef shape, const shardweave::MeshPtr& mesh,
            const shardweave::Placements& placements, const at::TensorOptions& o) {
          check_fits(value, o);
          return shardweave::full(shape, value, mesh, placements, o);
        });
  });
}

swv_status* swv_tensor_from_data(const void* data, size_t num_bytes, const int64_t* sizes,
                                 size_t ndim, const swv_tensor_options* options,
                                 swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor",
                 [&] { return from_data(data, num_bytes, sizes, ndim, options); });
}

swv_status* swv_tensor_from_dlpack(DLManagedTensorVersioned* managed, void* stream,
                                   swv_tensor** out_tensor) {
  return guarded(__func__, [&] {
    swv_tensor* result = from_dlpack(managed, stream, out_tensor);
    *out_tensor = result;
  });
}

swv_status* swv_tensor_to_dlpack(swv_tensor* tensor, void* stream,
                                 DLManagedTensorVersioned** out_managed) {
  return guarded(__func__, out_managed, "out_managed", [&] { return to_dlpack(tensor, stream); });
}

swv_status* swv_tensor_share(const swv_tensor* tensor, swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor",
                 [&] { return make<swv_tensor>(in(tensor, "tensor").tensor); });
}

[[gnu::hot]] void swv_tensor_free(swv_tensor* tensor) {
  release(tensor, __func__);
}

swv_status* swv_tensor_is_same(const swv_tensor* a, const swv_tensor* b, swv_bool* out_is_same) {
  return guarded(__func__, out_is_same, "out_is_same",
                 [&] { return in(a, "a").tensor.is_same(in(b, "b").tensor); });
}

swv_status* swv_tensor_ndim(const swv_tensor* tensor, int32_t* out_ndim) {
  return guarded(__func__, out_ndim, "out_ndim", [&] { return in(tensor, "tensor").tensor.dim(); });
}

[[gnu::hot]] swv_status* swv_tensor_numel(const swv_tensor* tensor, int64_t* out_numel) {
  return guarded(__func__, out_numel, "out_numel",
                 [&] { return in(tensor, "tensor").tensor.numel(); });
}

swv_status* swv_tensor_sizes(const swv_tensor* tensor, int64_t* sizes, size_t capacity,
                             size_t* out_count) {
  return guarded(__func__, [&] {
    copy_out(in(tensor, "tensor").tensor.sizes(), sizes, capacity, out_count, "sizes");
  });
}

swv_status* swv_tensor_strides(const swv_tensor* tensor, int64_t* strides, size_t capacity,
                               size_t* out_count) {
  return guarded(__func__, [&] {
    copy_out(in(tensor, "tensor").tensor.strides(), strides, capacity, out_count, "strides");
  });
}

swv_status* swv_tensor_dtype(const swv_tensor* tensor, swv_dtype* out_dtype) {
  return guarded(__func__, out_dtype, "out_dtype",
                 [&] { return dtype_of(in(tensor, "tensor").tensor.scalar_type()); });
}

swv_status* swv_tensor_device(const swv_tensor* tensor, swv_device* out_device) {
  return guarded(__func__, out_device, "out_device",
                 [&] { return device_of(in(tensor, "tensor").tensor.device()); });
}

swv_status* swv_tensor_is_sharded(const swv_tensor* tensor, swv_bool* out_is_sharded) {
  return guarded(__func__, out_is_sharded, "out_is_sharded",
                 [&] { return shardweave::is_dtensor(in(tensor, "tensor").tensor); });
}

swv_status* swv_tensor_to_string(const swv_tensor* tensor, swv_string** out_text) {
  return guarded(__func__, out_text, "out_text", [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    return new_string(to_string(in(tensor, "tensor").tensor));
  });
}

swv_status* swv_tensor_values_to_string(const swv_tensor* tensor, swv_string** out_text) {
  return guarded(__func__, out_text, "out_text", [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    return new_string(shardweave::values_to_string(in(tensor, "tensor").tensor, kHost));
  });
}

swv_status* swv_tensor_copy_to_host(const swv_tensor* tensor, void* data, size_t num_bytes) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    const at::Tensor& t = plain_with_values(tensor, "tensor");
    const MadeAtOnce values;
    check_bytes(t, data, num_bytes);
    if (num_bytes != 0) borrowed(data, t).copy_(t);
  });
}

swv_status* swv_tensor_copy_from_host(swv_tensor* tensor, const void* data, size_t num_bytes) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    const at::Tensor& t = plain_with_values(tensor, "tensor");
    const MadeAtOnce values;
    check_bytes(t, data, num_bytes);
    if (num_bytes != 0) t.copy_(borrowed(data, t));
  });
}

swv_status* swv_tensor_buffer(const swv_tensor* tensor, swv_buffer* out_buffer) {
  return guarded(__func__, [&] { write_buffer(tensor, out_buffer); });
}

swv_status* swv_tensor_distribute(const swv_tensor* tensor, const swv_mesh* mesh,
                                  const swv_layout* layout, const swv_distribute_options* options,
                                  swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] {
    const CallMode mode(SWV_MODE_GRAD, "mode");
    return new_tensor(distributed(tensor, mesh, layout, options), "the new tensor");
  });
}

swv_status* swv_tensor_from_local(const swv_tensor* local, const swv_mesh* mesh,
                                  const swv_layout* layout, const int64_t* sizes, size_t ndim,
                                  swv_grad_mode mode, swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] {
    const CallMode call_mode(mode, "mode");
    return new_tensor(from_local_parts(local, mesh, layout, sizes, ndim), "the new tensor");
  });
}

swv_status* swv_tensor_to_local(const swv_tensor* tensor, const swv_layout* grad_layout,
                                swv_grad_mode mode, swv_tensor** out_local) {
  return guarded(__func__, out_local, "out_local", [&] {
    const CallMode call_mode(mode, "mode");
    return new_tensor(local_part(tensor, grad_layout), "the local part");
  });
}

swv_status* swv_tensor_redistribute(const swv_tensor* tensor, const swv_layout* layout,
                                    swv_grad_mode mode, swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] {
    const CallMode call_mode(mode, "mode");
    return new_tensor(
        shardweave::redistribute(in(tensor, "tensor").tensor, in(layout, "layout").layout, kHost),
        "the new tensor");
  });
}

swv_status* swv_tensor_full_tensor(const swv_tensor* tensor, swv_grad_mode mode,
                                   swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] {
    const CallMode call_mode(mode, "mode");
    const at::Tensor& t = in(tensor, "tensor").tensor;
    return new_tensor(shardweave::is_dtensor(t) ? shardweave::full_tensor(t, kHost) : t,
                      "the new tensor");
  });
}

swv_status* swv_tensor_layout(const swv_tensor* tensor, swv_layout** out_layout) {
  return guarded(__func__, out_layout, "out_layout", [&] {
    return make<swv_layout>(shardweave::layout_of(in(tensor, "tensor").tensor));
  });
}

swv_status* swv_tensor_mesh(const swv_tensor* tensor, swv_mesh** out_mesh) {
  return guarded(__func__, out_mesh, "out_mesh",
                 [&] { return make<swv_mesh>(shardweave::mesh_of(in(tensor, "tensor").tensor)); });
}

swv_status* swv_seed(uint64_t seed) {
  return guarded(__func__, [&] { at::manual_seed(seed); });
}

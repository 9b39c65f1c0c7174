#include "shardweave/dtensor/tensor_impl.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/InferenceMode.h"
#include "c10/core/Storage.h"
#include "shardweave/dtensor/detour.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/mesh_context.h"
#include "torch/library.h"

namespace shardweave::dtensor_internal {
namespace {

// Those of autocast too, which TensorImpl's constructor adds by itself.
c10::DispatchKeySet keys_for(c10::Device device) {
  const c10::DispatchKeySet keys(
      {c10::DispatchKey::Fake, c10::DispatchKey::ADInplaceOrView,
       device.is_cuda() ? c10::DispatchKey::AutogradCUDA : c10::DispatchKey::AutogradCPU});
  return keys | c10::getAutocastRelatedKeySetFromBackend(keys.highestBackendKey());
}

// What LibTorch says to those who ask for memory: data_ptr(), accessors, printing, torch::save.
constexpr char kNoMemory[] = "a DTensor has no memory here: to_local() or full_tensor()";

class DTensorImpl final : public c10::TensorImpl {
 public:
  DTensorImpl(c10::Device device, caffe2::TypeMeta dtype, c10::intrusive_ptr<DTensorMeta> meta)
      : TensorImpl(keys_for(device), dtype, device) {
    set_storage_access_should_throw();
    set_backend_meta(std::move(meta));
    extra_meta_->custom_data_ptr_error_msg_ = kNoMemory;
  }
  // "Cannot access storage of ..."
  const char* tensorimpl_type_name() const override { return kNoMemory; }
};

// Reaches the protected parts of a TensorImpl that somebody else made.
struct Access : c10::TensorImpl {
  static auto keys() { return &Access::key_set_; }
};

}  // namespace

DTensorMeta& checked_meta(const at::Tensor& tensor, const char* function) {
  if (tensor.defined() && is_dtensor(tensor.unsafeGetTensorImpl())) {
    freshen(meta_of(tensor), function);
    return meta_of(tensor);
  }
  throw Error(absl::InvalidArgumentError(absl::StrCat(
      function, ": wanted a DTensor, got ",
      tensor.defined()
          ? absl::StrCat("a plain tensor of shape [", absl::StrJoin(tensor.sizes(), ", "), "]")
          : std::string("an undefined tensor"))));
}

at::Tensor wrap(at::Tensor local, SpecRef spec, std::shared_ptr<MeshContext> context) {
  const Spec& s = *spec;
  auto impl = c10::make_intrusive<DTensorImpl>(
      s.device, c10::scalarTypeToTypeMeta(s.dtype),
      c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec), std::move(context)));
  impl->set_sizes_and_strides(array(s.sizes), array(s.strides));
  return at::Tensor(std::move(impl));
}

at::Tensor wrap_view(at::Tensor local, SpecRef spec, std::shared_ptr<MeshContext> context,
                     bool base_is_inference) {
  if (base_is_inference || !c10::InferenceMode::is_enabled()) [[likely]] {
    return wrap(std::move(local), std::move(spec), std::move(context));
  }
  const c10::InferenceMode normal(false);
  return wrap(std::move(local), std::move(spec), std::move(context));
}

void convert_in_place(const at::Tensor& tensor, at::Tensor local, SpecRef spec,
                      std::shared_ptr<MeshContext> context) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->release_storage_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  impl->set_storage_offset(0);
  impl->set_sizes_and_strides(array(spec->sizes), array(spec->strides));
  c10::DispatchKeySet keys = keys_for(spec->device);
  // It has no version counter and no history.
  if (impl->is_inference()) keys = keys - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  impl->*Access::keys() = keys;
  impl->set_backend_meta(
      c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec), std::move(context)));
}

}  // namespace shardweave::dtensor_internal

namespace {

// set_data() asks this first: module->clone() and module->to() put DTensors where the new module has
// plain tensors.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const c10::TensorImpl* impl = from.unsafeGetTensorImpl();
  const bool takes_dtensor = shardweave::dtensor_internal::is_dtensor(impl) &&
                             self.layout() == at::kStrided &&
                             self.device().type() == from.device().type();
  return takes_dtensor ||
         self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(impl->key_set());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

#include "shardweave/dtensor/tensor_impl.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/Storage.h"
#include "shardweave/dtensor/detour.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/mesh_context.h"

namespace shardweave {
namespace {

c10::DispatchKeySet keys_for(c10::Device device) {
  return c10::DispatchKeySet(
      {c10::DispatchKey::Fake, c10::DispatchKey::ADInplaceOrView,
       device.is_cuda() ? c10::DispatchKey::AutogradCUDA : c10::DispatchKey::AutogradCPU});
}

class DTensorImpl final : public c10::TensorImpl {
 public:
  DTensorImpl(c10::Device device, caffe2::TypeMeta dtype)
      : TensorImpl(keys_for(device), dtype, device) {
    set_storage_access_should_throw();
  }
};

// Reaches the protected parts of a TensorImpl that somebody else made.
struct Access : c10::TensorImpl {
  static auto keys() { return &Access::key_set_; }
  static auto storage_member() { return &Access::storage_; }
  static auto throw_on_storage() { return &Access::set_storage_access_should_throw; }
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
  auto impl =
      c10::make_intrusive<DTensorImpl>(spec->device, c10::scalarTypeToTypeMeta(spec->dtype));
  impl->set_sizes_and_strides(c10::IntArrayRef(spec->sizes.data(), spec->sizes.size()),
                              c10::IntArrayRef(spec->strides.data(), spec->strides.size()));
  impl->set_backend_meta(
      c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec), std::move(context)));
  return at::Tensor(std::move(impl));
}

void convert_in_place(const at::Tensor& tensor, at::Tensor local, SpecRef spec,
                      std::shared_ptr<MeshContext> context) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->*Access::storage_member() = c10::Storage();  // none, as has_storage() then says
  impl->set_storage_offset(0);
  impl->set_sizes_and_strides(c10::IntArrayRef(spec->sizes.data(), spec->sizes.size()),
                              c10::IntArrayRef(spec->strides.data(), spec->strides.size()));
  // One of inference mode has no version counter and no history: nor has what it becomes.
  const bool inference = impl->is_inference();
  impl->*Access::keys() = keys_for(spec->device);
  if (inference) {
    impl->*Access::keys() =
        keys_for(spec->device) - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  }
  (impl->*Access::throw_on_storage())();
  impl->set_backend_meta(
      c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec), std::move(context)));
}

}  // namespace shardweave

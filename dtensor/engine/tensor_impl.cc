#include "shardweave/dtensor/engine/tensor_impl.h"

#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/InferenceMode.h"
#include "c10/core/Storage.h"
#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/error.h"
#include "torch/library.h"

namespace shardweave::dtensor_internal {
namespace {

// What LibTorch says to those who ask for memory: data_ptr(), accessors, printing; and torch::save,
// storage(), as "Cannot access storage of ...".
#define SHARDWEAVE_INSTEAD                                                                  \
  ": take its local part, to_local(), or the full tensor, full_tensor() (to print it: "     \
  "values_to_string(), on all ranks; to save a module or an optimizer: a Checkpointer, or " \
  "torch::save of a copy of the module that is not distributed)"
constexpr char kNoMemory[] = "a DTensor has no memory here" SHARDWEAVE_INSTEAD;
constexpr char kNoStorage[] = "a DTensor, which has none" SHARDWEAVE_INSTEAD;
#undef SHARDWEAVE_INSTEAD

// Reaches the protected parts of a TensorImpl that somebody else made.
struct Access : c10::TensorImpl {
  static auto keys() { return &Access::key_set_; }
};

}  // namespace

// Those of autocast too, which TensorImpl's constructor adds by itself.
c10::DispatchKeySet keys_for(c10::Device device) {
  const auto keys = [](c10::DispatchKey autograd) {
    const c10::DispatchKeySet set(
        {c10::DispatchKey::Fake, c10::DispatchKey::ADInplaceOrView, autograd});
    return set | c10::getAutocastRelatedKeySetFromBackend(set.highestBackendKey());
  };
  static const c10::DispatchKeySet cpu = keys(c10::DispatchKey::AutogradCPU);
  static const c10::DispatchKeySet cuda = keys(c10::DispatchKey::AutogradCUDA);
  return device.is_cuda() ? cuda : cpu;
}

void set_keys(c10::TensorImpl& impl, c10::DispatchKeySet keys) {
  impl.*Access::keys() = keys;
}

DTensorImpl::DTensorImpl(LocalPart&& part, SpecRef&& spec, std::shared_ptr<MeshContext>&& context)
    : TensorImpl(keys_for(spec->device), c10::scalarTypeToTypeMeta(spec->dtype), spec->device),
      meta_(std::move(part), std::move(spec), std::move(context)) {
  copy_generic_tensor_metadata(meta_.spec->shape.unsafeGetTensorImpl(), this);
  set_storage_access_should_throw();
}

DTensorImpl::~DTensorImpl() {
  extra_meta_.reset();  // before meta_, which it refers to
}

bool DTensorImpl::has_storage() const {
  auto* self = const_cast<DTensorImpl*>(this);
  if (self->get_backend_meta() == nullptr) {
    self->set_backend_meta(
        c10::intrusive_ptr<c10::BackendMeta>::unsafe_adapt_non_heap_allocated(&self->meta_, 1));
    extra_meta_->custom_data_ptr_error_msg_ = kNoMemory;
  }
  return TensorImpl::has_storage();
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version, bool allow_metadata_change) const {
  has_storage();
  return TensorImpl::shallow_copy_and_detach(version, allow_metadata_change);
}
c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version, bool allow_metadata_change) const {
  has_storage();
  return TensorImpl::shallow_copy_and_detach(std::move(version), allow_metadata_change);
}

void DTensorImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& other) {
  other->has_storage();
  TensorImpl::shallow_copy_from(other);
  meta_.family.reset();  // before the context, which it counts in
  meta_ = DTensorMeta(LocalPart(), {}, {});
}

void DTensorImpl::release_resources() {
  meta_of(this).shared.reset();
  TensorImpl::release_resources();
}

const char* DTensorImpl::tensorimpl_type_name() const {
  return kNoStorage;
}

void hand_out(DTensorMeta& meta) {
  if (meta.family == nullptr) meta.family = std::make_shared<ViewFamily>();
  meta.family->handed_out = true;
  meta.shared.reset();
}

void follow_resize(c10::TensorImpl* impl) {
  const DTensorMeta& meta = meta_of(impl);
  const Spec& old = *meta.spec;
  if (!impl->unsafe_storage() && impl->sizes() == array(old.sizes)) return;
  if (meta.family != nullptr && meta.family->resting != nullptr) {
    impl->release_storage_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
    impl->set_sizes_and_strides(array(old.sizes), array(old.strides));
    throw Error(absl::FailedPreconditionError(
        absl::StrCat("a parameter of fully_shard() cannot be resized: ", old.to_string())));
  }
  const std::shared_ptr<MeshContext> context = meta.context;
  const Dims sizes(impl->sizes().begin(), impl->sizes().end());
  const Dims strides(impl->strides().begin(), impl->strides().end());
  // Cut as it was, where that can be.
  Placements placements = old.layout.placements();
  for (Placement& p : placements) {
    if (p.is_partial() || (p.is_shard() && p.dim() >= static_cast<int>(sizes.size()))) {
      p = Replicate();
    }
  }
  Layout layout = value_or_throw(Layout::create(std::move(placements), old.layout.order()));
  if (!validate(layout, context->mesh().shape(), sizes).ok()) {
    layout = Layout(Placements(context->mesh().ndim()));
  }
  SpecRef spec = context->intern(layout, sizes, strides, old.dtype, old.device);
  // The same on all ranks, in case that the operator fails before it writes.
  const c10::InferenceMode as_it_is(impl->is_inference());
  at::Tensor part = at::zeros(array(spec->local_sizes), at::device(old.device).dtype(old.dtype));
  convert_in_place(
      at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(impl)),
      std::move(part), std::move(spec), context);
}

DTensorMeta& checked_meta(const at::Tensor& tensor, const char* function) {
  if (tensor.defined() && is_dtensor(tensor.unsafeGetTensorImpl())) {
    return synchronise(tensor.unsafeGetTensorImpl(), function);
  }
  throw Error(function,
              absl::InvalidArgumentError(absl::StrCat(
                  "wanted a DTensor, got ",
                  tensor.defined() ? absl::StrCat("a plain tensor of shape [",
                                                  absl::StrJoin(tensor.sizes(), ", "), "]")
                                   : std::string("an undefined tensor"))));
}

at::Tensor wrap(LocalPart part, SpecRef spec, std::shared_ptr<MeshContext> context) {
  auto impl =
      c10::make_intrusive<DTensorImpl>(std::move(part), std::move(spec), std::move(context));
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
  const bool was_dtensor = is_dtensor(impl);
  impl->release_storage_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  impl->set_storage_offset(0);
  impl->set_sizes_and_strides(array(spec->sizes), array(spec->strides));
  c10::DispatchKeySet keys = keys_for(spec->device);
  // It has no version counter and no history.
  if (impl->is_inference()) keys = keys - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  set_keys(*impl, keys);
  if (was_dtensor) {
    const uint64_t provenance = meta_of(impl).provenance;
    meta_of(impl) = DTensorMeta(LocalPart(std::move(local)), std::move(spec), std::move(context));
    meta_of(impl).provenance = provenance;
  } else {
    impl->set_backend_meta(c10::make_intrusive<DTensorMeta>(LocalPart(std::move(local)),
                                                            std::move(spec), std::move(context)));
  }
}

}  // namespace shardweave::dtensor_internal

namespace {

// set_data() asks this first: module->clone() and module->to() put DTensors where the new module has
// plain tensors.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const c10::TensorImpl* impl = from.unsafeGetTensorImpl();
  from.has_storage();  // the copy says what this one would
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
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

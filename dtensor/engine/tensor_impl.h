// How a DTensor is an at::Tensor: a TensorImpl with the global sizes and strides, no storage, and a
// DTensorMeta that holds the local tensor and the spec. Internal to dtensor/.
//
// Its key set is {Fake, Autograd<device>, ADInplaceOrView}: autograd works as on any tensor, and
// below it the boxed fallback for DispatchKey::Fake (dispatch.cc) sees every operator.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/TensorImpl.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/local_part.h"
#include "shardweave/dtensor/spec.h"
#include "torch/csrc/autograd/variable.h"

namespace shardweave::dtensor_internal {

using shardweave::is_dtensor;

// Where the elements of a tensor begin, as they would on one device. Two members of a ViewFamily
// with one place, dtype, sizes and strides have the same elements, whatever their parts are: views
// on one rank, copies on another, empty on a third. So all ranks say alike whether two are one.
struct Place {
  // Of several that a family may have: a copy that was brought for a view is one.
  int64_t memory = 0;
  int64_t begin = 0;  // in it, in elements
  friend bool operator==(const Place&, const Place&) = default;
};

// A tensor that was brought elsewhere (remembered.h).
struct RememberedForm {
  SpecRef source_spec;  // as it lies,
  SpecRef spec;         // and as it was brought
  at::Tensor local;
};
// Bytes that a counter counts for as long as this is there.
class CountedBytes {
 public:
  CountedBytes(int64_t& total, const at::Tensor& tensor)
      : counted_(&total, Uncount{static_cast<int64_t>(tensor.nbytes())}) {
    total += static_cast<int64_t>(tensor.nbytes());
  }

 private:
  struct Uncount {
    int64_t bytes;
    void operator()(int64_t* total) const { *total -= bytes; }
  };
  std::unique_ptr<int64_t, Uncount> counted_;
};

struct Remembered {
  Remembered(Place place_in, const at::Tensor& source, RememberedForm form_in,
             uint64_t generation_in, int64_t& bytes)
      : place(place_in),
        versions(source.unsafeGetTensorImpl()->version_counter()),
        version(versions.current_version()),
        form(std::move(form_in)),
        generation(generation_in),
        counted(bytes, form.local) {}

  // With the generation of the mesh now.
  bool is_current(uint64_t now) const {
    return versions.current_version() == version && generation == now;
  }

  Place place;                    // of what it was made of,
  c10::VariableVersion versions;  // whose local part has been written so often
  uint32_t version;               // then
  RememberedForm form;
  // As views with the dimensions in another order have it, worked out when they first ask: nothing that
  // anybody could tell from its absence, so that a rank alone may ask.
  mutable std::vector<RememberedForm> permuted;
  uint64_t generation;  // of the mesh (mesh_context.h), then
  CountedBytes counted;
};

struct Multiple;        // multiple.h
struct ForwardLayouts;  // forward_plan.h
struct SharedInput;     // forward_plan.h
struct PlanOrigin;      // members.h
struct Resting;         // fsdp_unit.h

// A tensor and its views (detour.h), and what all of them share.
struct ViewFamily {
  int64_t writes = 0;         // to any of them
  uint64_t last_written = 0;  // where what was written last comes from (provenance.h)
  std::string fqn;            // of the parameter that they are, as distribute_module() found it,
  SpecRef parameter;          // and as that laid it out
  bool said_unsharded = false;
  // The user has had a local part (to_local(), from_local()), and may write it unseen by any version
  // that all ranks know.
  bool handed_out = false;
  std::shared_ptr<const PlanOrigin> origin;       // where a plan said so
  std::shared_ptr<const ForwardLayouts> forward;  // what a plan says of its module (forward_plan.h)
  std::shared_ptr<const Resting> resting;         // null: no unit has the parameter
  std::vector<Remembered> remembered;
  // A rank that alone takes a view may have more: they are compared for equality.
  int64_t memories = 1;

  // For a member that has its elements with none of those so far, as far as anybody knows.
  Place new_place() { return {memories++}; }
};
struct Detour;  // detour.h

struct DTensorMeta final : c10::BackendMeta {
  DTensorMeta(LocalPart part_in, SpecRef spec_in, std::shared_ptr<MeshContext> context_in)
      : part(std::move(part_in)), spec(std::move(spec_in)), context(std::move(context_in)) {}

  // A shallow copy of a tensor (variable_data(), set_data()) has its own sizes and layout, and the
  // same data.
  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>& /*self*/) const override {
    if (family == nullptr) family = std::make_shared<ViewFamily>();
    auto copy = c10::make_intrusive<DTensorMeta>(part, spec, context);
    copy->family = family;
    copy->place = place;
    copy->detour = detour;
    copy->provenance = provenance;
    copy->provenance_writes = provenance_writes;
    return copy;
  }

  // Goes to other memory. Views and copies stay where they are.
  void move_to(at::Tensor local) {
    part = LocalPart(std::move(local));
    if (family == nullptr) return;
    place = family->new_place();
    family->remembered.clear();
    multiple.reset();
  }

  // Sets where the value comes from.
  void came_from(uint64_t provenance_in) {
    provenance = provenance_in;
    provenance_writes = family == nullptr ? 0 : family->writes;
  }

  // This rank's part: never requires grad, never a DTensor.
  const at::Tensor& local() const { return part.get(); }

  LocalPart part;
  SpecRef spec;
  uint64_t provenance = 0;                // of the value (provenance.h), after so many
  mutable int64_t provenance_writes = 0;  // writes to the family
  std::shared_ptr<MeshContext> context;   // keeps the mesh alive
  // Shared with all views and shallow copies of it; null: there are none.
  mutable std::shared_ptr<ViewFamily> family;
  Place place;                           // in the family
  std::shared_ptr<const Detour> detour;  // null: no view, or one that aliases its base
  // Of this very tensor, and no copy's: autograd saves copies of results, and what was brought leads
  // back to what has saved them.
  std::shared_ptr<SharedInput> shared;
  // The same: a gradient that autograd keeps is a copy, and a rank alone may make one. Null: it is no
  // multiple.
  mutable std::shared_ptr<const Multiple> multiple;
};

// The FQN of the parameter that a tensor or its base is; "": none, or unknown.
inline std::string_view parameter_of(const DTensorMeta& meta) {
  return meta.family == nullptr ? std::string_view() : std::string_view(meta.family->fqn);
}

inline c10::IntArrayRef array(const Dims& dims) {
  return c10::IntArrayRef(dims.data(), dims.size());
}

// From now on somebody else may write the tensor's part, or that of a view or copy of it.
void hand_out(DTensorMeta& meta);

// What operators make. Its meta is part of it: no allocation more for each DTensor. Copies
// (variable_data(), set_data()) and tensors that were converted where they stand are LibTorch's own
// kind, and have theirs as BackendMeta.
class DTensorImpl final : public c10::TensorImpl {
 public:
  DTensorImpl(LocalPart&& part, SpecRef&& spec, std::shared_ptr<MeshContext>&& context);
  ~DTensorImpl() override;

  DTensorMeta& meta() { return meta_; }

  // LibTorch asks this before it wants memory, and before it copies: what it then needs to find, the
  // meta and what to say to whoever wants memory, is put where it looks.
  bool has_storage() const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_metadata_change) const override;
  // set_data(): from here on it has a meta of its own.
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& other) override;
  // Weak references are left.
  void release_resources() override;
  // "Cannot access storage of ..."
  const char* tensorimpl_type_name() const override;

 private:
  DTensorMeta meta_;
};

// Of a TensorImpl that somebody else made, too.
void set_keys(c10::TensorImpl& impl, c10::DispatchKeySet keys);
// Of a DTensor with its part on a device.
c10::DispatchKeySet keys_for(c10::Device device);

inline bool is_dtensor(const c10::TensorImpl* impl) {
  return impl->key_set().has(c10::DispatchKey::Fake);
}
// A parameter is a leaf of autograd's graph that requires grad.
inline bool is_parameter(const c10::TensorImpl* impl) {
  const auto* autograd = static_cast<const torch::autograd::AutogradMeta*>(impl->autograd_meta());
  return autograd != nullptr && autograd->requires_grad_ && autograd->grad_fn_ == nullptr;
}
inline DTensorMeta& meta_of(c10::TensorImpl* impl) {
  if (c10::BackendMeta* meta = impl->get_backend_meta()) return *static_cast<DTensorMeta*>(meta);
  return static_cast<DTensorImpl*>(impl)->meta();
}
inline DTensorMeta& meta_of(const at::Tensor& tensor) {
  return meta_of(tensor.unsafeGetTensorImpl());
}

// LibTorch's operators that are made of others resize their out= past the dispatcher
// (at::native::resize_output): the TensorImpl has other sizes than the DTensor, and memory of its own.
// The DTensor follows, with a new part of zeros, before an operator or a public function takes it. Views
// of it keep the elements that they had. Throws Error (FailedPrecondition) for a parameter of
// fully_shard(), which stays as it was.
void follow_resize(c10::TensorImpl* impl);
inline bool may_be_resized(const c10::TensorImpl* impl) {
  return static_cast<bool>(impl->unsafe_storage()) || impl->numel() == 0;
}

// What a function of the public interface works on: up to date (detour.h). Throws Error
// (InvalidArgument) that names `function` for a plain or undefined tensor.
DTensorMeta& checked_meta(const at::Tensor& tensor, const char* function);

// A new DTensor. `part` must have spec->local_sizes, once it is there.
at::Tensor wrap(LocalPart part, SpecRef spec, std::shared_ptr<MeshContext> context);
inline at::Tensor wrap(at::Tensor local, SpecRef spec, std::shared_ptr<MeshContext> context) {
  return wrap(LocalPart(std::move(local)), std::move(spec), std::move(context));
}
// A view of `base`: in inference mode it is an inference tensor only if `base` is one.
at::Tensor wrap_view(at::Tensor local, SpecRef spec, std::shared_ptr<MeshContext> context,
                     bool base_is_inference);

// Turns a plain tensor into a DTensor where it stands: every handle to it (a module's members, an
// optimizer's list, a TorchScript module) sees the DTensor. requires_grad and leaf state stay.
void convert_in_place(const at::Tensor& tensor, at::Tensor local, SpecRef spec,
                      std::shared_ptr<MeshContext> context);

}  // namespace shardweave::dtensor_internal

// What was brought elsewhere for one operator, and is kept for the next: a Partial that has been
// reduced, a weight that has been gathered.
//
//   x [P] ─ pow ─ needs [R]: one all-reduce, remembered with x
//         ─ mul ─ needs [R]: that one
//         ─ add ─ may have x as it is, or as it is remembered, whichever costs less
//
// A tensor's layout is not changed by this: the user sees what it was. A tensor, its views and its
// shallow copies (a ViewFamily, tensor_impl.h) share what is remembered; autograd's saved tensors are
// among them, so that backward gathers no weight again. It lives as long as they do, and is dropped
// when one of them is written. What is read through a view that only permutes dimensions, or of a
// Partial that only changes its shape, is found, too, however unequal the parts of ranks are.
//
// All ranks remember the same, for all run the same operators. A write to a local part (to_local())
// by an operator ends it as well, on the ranks that write; let all ranks do that, or none. A write
// through an address is not seen. What is found is decided by specs and places (tensor_impl.h), as
// all ranks know them: local parts may be views on one rank and copies on another where ranks have
// unequal parts. For the same reason a part that had to be copied counts its writes with those that
// are views.
//
// Internal to dtensor/.
#pragma once

#include <optional>

#include "ATen/core/Tensor.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/engine/cache.h"
#include "shardweave/dtensor/engine/multiple.h"
#include "shardweave/dtensor/engine/tensor_impl.h"

namespace shardweave::dtensor_internal {

// Where the cuts of a tensor come from: those of a leaf that requires grad are a weight's.
inline CutOrigins origins_of(const c10::TensorImpl* impl) {
  const CutOrigins& origins = meta_of(const_cast<c10::TensorImpl*>(impl)).spec->origins;
  if (origins.data == 0 || !is_parameter(impl)) return origins;
  return {.data = 0, .weight = origins.data | origins.weight};
}

// Whether two of one place have the same elements, in the same or another order of dimensions.
bool is_permutation(const Spec& a, const Spec& b);

// Whether what one is brought to is found by the other, too: they are one tensor, or views of all its
// elements with the dimensions in another order. As all ranks know it.
inline bool have_same_elements(const DTensorMeta& a, const DTensorMeta& b) {
  return &a == &b || (a.family != nullptr && a.family == b.family && a.place == b.place &&
                      is_permutation(*a.spec, *b.spec));
}

// The form of this very handle, a shallow copy of it, or a view that lies as it does or only permutes
// dimensions, that is remembered; null: none.
// Several: the latest, or the one that lies like `spec`.
const RememberedForm* find_remembered(const DTensorMeta& meta, const Spec* spec = nullptr);
// The same for who makes views: of a form they would be copies, which is not worth it for a sum that is
// remembered in parts, nor for what lies in memory as another view has it.
const RememberedForm* find_remembered_for_view(const DTensorMeta& meta);

// What an operator decides by: where the tensor, or the sum that it is a multiple of, has been brought;
// null: nowhere. Nothing is kept of having asked.
inline const SpecRef* remembered_spec(const DTensorMeta& meta, bool for_view) {
  if (meta.family == nullptr) [[likely]]
    return nullptr;
  if (!meta.family->remembered.empty()) {
    const RememberedForm* form = for_view ? find_remembered_for_view(meta) : find_remembered(meta);
    if (form != nullptr) return &form->spec;
  }
  return meta.multiple == nullptr ? nullptr : spec_of_sum(meta, for_view);
}

// The part that it has there; nullopt: it is not remembered so.
std::optional<at::Tensor> remembered_part(const DTensorMeta& meta, const Spec& spec);

// The local part of the tensor in `target`, as it or one of its views is remembered.
std::optional<at::Tensor> recall(const DTensorMeta& meta, const Spec& target);

// Whether it is worth it: for a Partial that is reduced, for what is cut in another way, and for what
// is gathered of a cut that operators made (query, key and value want all columns of a product with a
// weight that is cut); for a weight, which lives long, while autograd records, as backward will need
// it again. Data that is gathered is not kept: whoever cuts a batch or a sequence wants the memory.
Remember worth_remembering(const Layout& from, const CutOrigins& origins, const Layout& target);

inline bool is_kept(Remember worth) {
  return worth == Remember::kAlways ||
         (worth == Remember::kWhileRecording && c10::GradMode::is_enabled());
}

// What a tensor of `spec` at `place` is remembered as by `kept`; null: that is none of its.
const RememberedForm* form_of(const Remembered& kept, const Place& place, const SpecRef& spec,
                              uint64_t generation);
// A view of such a form would be one of a copy of some of it.
bool is_sum_in_parts(const Layout& layout, const Layout& form);

// `local`: what run_plan() made of the tensor; from here on nobody writes it.
void remember(const DTensorMeta& meta, SpecRef target, at::Tensor local);
// The same of a member at `place`, whose part `source` is.
void remember(ViewFamily& family, const Place& place, const at::Tensor& source, RememberedForm form,
              MeshContext& context);

}  // namespace shardweave::dtensor_internal

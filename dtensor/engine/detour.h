// Views that had to be made by communication. select(0, i) of a tensor that is cut along dimension 0
// is a view of a copy, brought here for it: it has a Detour. It behaves as a view all the same:
//
//   check_writable(meta, op);      // before an operator writes to a DTensor
//   sync_view(meta, op);             // before it is read or written: brings the copy again, if need be
//   ... meta.local() is written ...
//   written(meta, op);             // takes the copy back to where it came from
//
// A tensor and all its views count the writes to any of them, so that a copy knows when it is out of
// date. sync_view() and written() are collective over the mesh, and do the same on every rank.
// Internal to dtensor/.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "ATen/core/Tensor.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/engine/tensor_impl.h"

namespace shardweave::dtensor_internal {

struct Detour {
  at::Tensor moved;  // the copy, which the view's local tensor aliases; undefined: nothing does
  SpecRef moved_spec;
  at::Tensor base;  // its local tensor
  SpecRef base_spec;
  std::shared_ptr<const Detour> next;  // of the base
  mutable int64_t seen = 0;            // the family's writes that are in the copy
};

// Throws Error (FailedPrecondition) if what is written would not reach the base.
void check_writable(const DTensorMeta& meta, std::string_view op);

// Throws Error (FailedPrecondition) if the copy is out of date and cannot be brought again, or a
// strict scope forbids it.
void bring_again(const DTensorMeta& meta, std::string_view op);
inline void sync_view(const DTensorMeta& meta, std::string_view op) {
  if (meta.detour != nullptr) bring_again(meta, op);
}

// What everybody does first with a DTensor: its meta, up to date.
inline DTensorMeta& synchronise(c10::TensorImpl* impl, std::string_view op) {
  if (may_be_resized(impl)) [[unlikely]]
    follow_resize(impl);
  DTensorMeta& meta = meta_of(impl);
  sync_view(meta, op);
  return meta;
}

// Throws Error (FailedPrecondition) if of `tensors`, which are about to be written together, two are
// views of one tensor and one of them is a copy: going back it would undo what the other has written.
void check_written_together(absl::Span<const at::Tensor> tensors, std::string_view op);

void sync_written_views(const DTensorMeta& meta, std::string_view op);
inline void written(const DTensorMeta& meta, std::string_view op) {
  if (meta.family != nullptr) sync_written_views(meta, op);
}

}  // namespace shardweave::dtensor_internal

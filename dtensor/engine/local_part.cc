#include "shardweave/dtensor/engine/local_part.h"

#include <utility>

#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"

namespace shardweave::dtensor_internal {

void LocalPart::bring() const {
  tensor_ = source_->bring();
  if (source_->state() == State::kReady) source_.reset();
}

at::Tensor part_to_write(const at::Tensor& tensor, std::string_view who) {
  if (is_dtensor(tensor)) check_writable(meta_of(tensor), who);
  if (const Resting* resting = resting_of(tensor)) resting->unit->settle();
  return part_to_read(tensor, who);
}

at::Tensor part_to_read(const at::Tensor& tensor, std::string_view who) {
  if (!is_dtensor(tensor)) return tensor;
  const DTensorMeta& meta = meta_of(tensor);
  sync_view(meta, who);
  return meta.local();
}

void part_written(const at::Tensor& tensor, std::string_view who, uint64_t by) {
  const auto bump = [](const at::Tensor& t) {
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  };
  bump(tensor);
  if (!is_dtensor(tensor)) return;
  DTensorMeta& meta = meta_of(tensor);
  bump(meta.local());
  if (by != 0) meta.came_from(mix(provenance_of(meta), by));
  written(meta, who);
}

void part_replaced(const at::Tensor& tensor, std::string_view who, uint64_t from) {
  if (is_dtensor(tensor)) meta_of(tensor).came_from(from);
  part_written(tensor, who);
}

at::Tensor lying_as(const at::Tensor& tensor, at::Tensor part) {
  if (!is_dtensor(tensor)) return part;
  const DTensorMeta& meta = meta_of(tensor);
  SpecRef spec = meta.context->intern(meta.spec->layout, meta.spec->sizes,
                                      contiguous_strides(meta.spec->sizes), part.scalar_type(),
                                      part.device(), meta.spec->origins);
  return wrap(std::move(part), std::move(spec), meta.context);
}

}  // namespace shardweave::dtensor_internal

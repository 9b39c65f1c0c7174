#include "shardweave/dtensor/engine/detour.h"

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/error.h"

namespace shardweave::dtensor_internal {
namespace {

[[noreturn]] void refuse(const DTensorMeta& meta, std::string_view op, std::string_view what) {
  const std::string text = absl::StrCat(std::string(what), ": ", meta.spec->to_string());
  // The operator belongs to what went wrong; a function of ours is only called so in C++.
  if (op.find("::") == std::string_view::npos) throw Error(op, absl::FailedPreconditionError(text));
  throw Error(absl::FailedPreconditionError(absl::StrCat(std::string(op), ": ", text)));
}

// The plan from one end of a detour to the other, allowed and counted.
PlanRef plan_along(const DTensorMeta& meta, const SpecRef& from, const SpecRef& to,
                   std::string_view op) {
  PlanRef plan = plan_for(*meta.context, from, to);
  if (plan->is_local) return plan;
  if (meta.context->decisions.strict_depth > 0) {
    refuse(meta, op,
           "the strict scope refuses the communication that a view of another rank's "
           "elements needs; redistribute the original so that views of it lie where they are used, "
           "or make them outside of the scope");
  }
  ++meta.context->observation.counters.implicit_redistributions;
  return plan;
}

void bring(const DTensorMeta& meta, const Detour& detour, std::string_view op) {
  if (detour.seen == meta.family->writes) return;
  if (!detour.moved.defined()) {
    refuse(meta, op,
           "reads a copy where a view was asked for, and the original has been written since; make "
           "the view again");
  }
  const FsdpState* fsdp = meta.context->gradients.fsdp.get();
  if (fsdp != nullptr && detour.base.has_storage() &&
      fsdp->unit_of(detour.base.storage().unsafeGetStorageImpl()) != nullptr) {
    refuse(meta, op,
           "reads a view of a parameter of fully_shard() that was written since; make the view "
           "again");
  }
  if (detour.next != nullptr) bring(meta, *detour.next, op);
  const PlanRef plan = plan_along(meta, detour.base_spec, detour.moved_spec, op);
  detour.moved.copy_(
      run_plan(*meta.context, *plan, detour.base, detour.base_spec->sizes, {.name = op}));
  detour.seen = meta.family->writes;
}

}  // namespace

void check_writable(const DTensorMeta& meta, std::string_view op) {
  if (meta.part.state() == LocalPart::State::kGatheredOnUse) {
    refuse(meta, op,
           "writes to a view of a parameter that is fully sharded, which is gathered for each use; "
           "write to the parameter itself");
  }
  if (meta.family != nullptr && meta.family->resting != nullptr &&
      meta.family->resting->unit->is_read_only()) {
    refuse(meta, op,
           "writes to a parameter that is summoned to be read (FullParams); ask for "
           "writeback, or write after that scope");
  }
  bool leads_back = true;
  for (const Detour* d = meta.detour.get(); d != nullptr; d = d->next.get()) {
    leads_back &= d->moved.defined();
  }
  if (leads_back) return;
  refuse(meta, op,
         "writes to a view of a DTensor that is a copy, so that the original would not change; "
         "write to the original, or through views that slices, select, transpose and diagonal() "
         "make of it; or to a clone()");
}

void check_written_together(absl::Span<const at::Tensor> tensors, std::string_view op) {
  if (tensors.size() < 2) return;
  struct Seen {
    int views = 0;
    const DTensorMeta* copy = nullptr;
  };
  absl::flat_hash_map<const ViewFamily*, Seen> families;
  for (const at::Tensor& tensor : tensors) {
    if (!is_dtensor(tensor) || meta_of(tensor).family == nullptr) continue;
    const DTensorMeta& meta = meta_of(tensor);
    Seen& seen = families[meta.family.get()];
    ++seen.views;
    if (meta.detour != nullptr) seen.copy = &meta;
    if (seen.views > 1 && seen.copy != nullptr) {
      refuse(*seen.copy, op,
             "writes together two views of one DTensor, of which one is a copy of another rank's "
             "elements; write them one after the other");
    }
  }
}

void bring_again(const DTensorMeta& meta, std::string_view op) {
  if (meta.family != nullptr) bring(meta, *meta.detour, op);
}

void sync_written_views(const DTensorMeta& meta, std::string_view op) {
  meta.provenance_writes = ++meta.family->writes;
  meta.family->last_written = meta.provenance;
  meta.family->remembered.clear();
  for (const Detour* d = meta.detour.get(); d != nullptr; d = d->next.get()) {
    const PlanRef plan = plan_along(meta, d->moved_spec, d->base_spec, op);
    d->base.copy_(run_plan(*meta.context, *plan, d->moved, d->base_spec->sizes, {.name = op}));
    if (!d->base.is_inference()) d->base.unsafeGetTensorImpl()->bump_version();
    d->seen = meta.family->writes;
  }
}

}  // namespace shardweave::dtensor_internal

// Units whose parameters are whole for a while, to be read and written (FullParams).

#include <algorithm>
#include <numeric>

#include "ATen/core/LegacyTypeDispatch.h"
#include "ATen/ops/empty.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/engine/tensor_work.h"

namespace shardweave::dtensor_internal {
namespace {

constexpr std::string_view kSummon = "FullParams";

at::Tensor memory_of(const FlatRow& row) {
  const Spec& kept = *row[0].kept;
  return at::empty({row.numel()}, at::TensorOptions(kept.dtype).device(kept.device));
}

}  // namespace

// The parts that rest are there, and nobody reads them.
void FsdpUnit::come_to_rest() {
  if (!shard_.defined()) pack();
  settle();
}

SpecRef FsdpUnit::whole_spec(size_t index) const {
  const FlatRow::Place& place = row_[index];
  if (!is_cast() && !is_elsewhere()) return place.whole;
  return context_->intern(place.whole->layout, place.whole->sizes, place.whole->strides,
                          place.kept->dtype, place.kept->device, place.whole->origins);
}

std::vector<std::pair<std::string, at::Tensor>> FsdpUnit::whole_parameters(
    const at::Tensor& flat) const {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].alive.expired()) continue;
    result.emplace_back(parameter_name(i), flat.defined() ? row_.whole_of(flat, i) : at::Tensor());
  }
  return result;
}

void FsdpUnit::summon(bool read_only) {
  if (summoned_ == nullptr) {
    const c10::InferenceMode normal(false);  // which counts versions
    const c10::AutoGradMode no_grad(false);
    come_to_rest();
    at::Tensor flat = memory_of(row_);
    if (is_alone()) {
      flat.copy_(shard_);
    } else {
      const Cause cause = {.name = kSummon, .where = options_.where};
      throw_if_error(row_.all_gather(shard_, flat, provenance(), cause,
                                     [this](size_t i) { return parameter_name(i); })
                         .wait());
    }
    FsdpCounters& counters = state_->counters;
    counters.gathered_bytes += static_cast<int64_t>(flat.nbytes());
    counters.peak_gathered_bytes = std::max(counters.peak_gathered_bytes, counters.gathered_bytes);
    // Nothing fails from here on.
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor tensor = parameters_[i].tensor();
      if (!tensor.defined()) continue;
      DTensorMeta& meta = meta_of(tensor);
      meta.move_to(row_.whole_of(flat, i));
      meta.spec = whole_spec(i);
      meta.family->parameter = meta.spec;
    }
    summoned_ = std::make_unique<Summoned>();
    summoned_->flat = std::move(flat);
  }
  ++summoned_->scopes;
  if (read_only) ++summoned_->readers;
}

void FsdpUnit::dismiss(bool read_only, bool keeps) {
  if (read_only) --summoned_->readers;
  summoned_->keeps |= keeps;
  if (--summoned_->scopes > 0) return;
  const std::unique_ptr<Summoned> summoned = std::move(summoned_);
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  if (summoned->keeps) {
    let_go();  // Whoever gathers next hears why.
    const at::AutoDispatchBelowADInplaceOrView no_count;
    shard_.copy_(summoned->flat.narrow(0, row_.kept_begin(), row_.kept()));
    shard_.unsafeGetTensorImpl()->bump_version();  // what is full is not fresh any more
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor tensor = parameters_[i].tensor();
    if (!tensor.defined()) continue;
    const at::Tensor place = row_.kept_of(shard_, i);
    place.unsafeGetTensorImpl()->set_version_counter(
        shard_.unsafeGetTensorImpl()->version_counter());
    DTensorMeta& meta = meta_of(tensor);
    meta.move_to(place);
    meta.spec = row_[i].kept;
    meta.family->parameter = meta.spec;
    // Autograd, which may have saved it. (Writes may have come past operators.)
    if (summoned->keeps && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
  state_->counters.gathered_bytes -= static_cast<int64_t>(summoned->flat.nbytes());
}

at::Tensor FsdpUnit::gather_to(int64_t rank) {
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  come_to_rest();
  const int64_t me = context_->coordinate()[static_cast<size_t>(mesh_dim())];
  const at::Tensor flat = me == rank ? memory_of(row_) : at::Tensor();
  if (me == rank) flat.narrow(0, row_.kept_begin(), row_.kept()).copy_(shard_);
  exchange(rank, flat, shard_, /*to_rank=*/true);
  return flat;
}

void FsdpUnit::scatter_from(int64_t rank, const at::Tensor& flat) {
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  come_to_rest();
  const int64_t me = context_->coordinate()[static_cast<size_t>(mesh_dim())];
  // Not into what rests: a rank that fails leaves it as it was.
  const at::Tensor arriving = me == rank ? at::Tensor() : at::empty_like(shard_);
  exchange(rank, flat, arriving, /*to_rank=*/false);
  const at::AutoDispatchBelowADInplaceOrView no_count;
  shard_.copy_(me == rank ? flat.narrow(0, row_.kept_begin(), row_.kept()) : arriving);
  shard_.unsafeGetTensorImpl()->bump_version();
  for (const Parameter& p : parameters_) {
    const at::Tensor tensor = p.tensor();
    if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    if (tensor.defined()) meta_of(tensor).family->remembered.clear();
  }
}

// Stretches of the others, to or from the rank that has `flat`.
void FsdpUnit::exchange(int64_t rank, const at::Tensor& flat, const at::Tensor& stretch,
                        bool to_rank) {
  if (is_alone()) return;
  const std::vector<int64_t>& counts = row_.counts();
  const auto element = static_cast<int64_t>(shard_.element_size());
  const int64_t numel = row_.numel();
  const int dim = mesh_dim();
  const Cause cause = {.name = kSummon, .where = options_.where};
  const CollectiveSpan span(*context_, cause, [&]() -> Sending {
    std::vector<std::string> names;
    for (size_t i = 0; i < parameters_.size(); ++i) names.push_back(parameter_name(i));
    const int64_t others = numel - counts[static_cast<size_t>(rank)];
    return {to_rank ? "gather" : "scatter",
            absl::MakeConstSpan(&dim, 1),
            flat.defined() != to_rank ? (flat.defined() ? others : row_.kept()) * element : 0,
            shard_.scalar_type(),
            absl::MakeConstSpan(&numel, 1),
            Layout(),
            Layout(),
            std::move(names)};
  });
  Communicator& comm = context_->communicator(dim);
  const About about(*context_, provenance());
  const CallOptions options = collective_options(*context_, shard_.device(), kSummon);
  Coalescing group(comm);
  if (!flat.defined()) {
    if (stretch.numel() > 0) {
      const auto peer = static_cast<int>(rank);
      to_rank ? comm.send(comm_buffer(stretch), peer, 0, options)
              : comm.recv(comm_buffer(stretch), peer, 0, options);
    }
  } else {
    int64_t begin = 0;
    for (size_t r = 0; r < counts.size(); ++r) {
      const at::Tensor its = flat.narrow(0, begin, counts[r]);
      begin += counts[r];
      if (static_cast<int64_t>(r) == rank || counts[r] == 0) continue;
      const auto peer = static_cast<int>(r);
      to_rank ? comm.recv(comm_buffer(its), peer, 0, options)
              : comm.send(comm_buffer(its), peer, 0, options);
    }
  }
  throw_if_error(TensorWork(*context_, group.finish(), shard_.device()).wait());
}

}  // namespace shardweave::dtensor_internal

#include "shardweave/dtensor/engine/fsdp_unit.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "shardweave/comm/backend.h"
#include "shardweave/dtensor/engine/deferred.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "torch/csrc/autograd/variable.h"

namespace shardweave::dtensor_internal {
namespace {

c10::Stream stream_here(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Of a tensor that wants no gradient, too: it may, later.
void add_hook(const at::Tensor& tensor, std::function<at::TensorBase(const at::TensorBase&)> hook) {
  auto& hooks = torch::autograd::impl::materialize_autograd_meta(tensor)->cpp_hooks_list_;
  if (hooks == nullptr) torch::autograd::impl::create_cpp_hook(tensor);
  hooks->push_back(std::move(hook));
}

// "fully_shard layers.3"; of a long name its end, for a call's tag is cut.
std::string subject_of(std::string_view name) {
  constexpr size_t kLongest = sizeof(CallSignature::tag) - sizeof(kFullyShard) - 1;
  if (name.empty()) return kFullyShard;
  if (name.size() <= kLongest) return absl::StrCat(kFullyShard, " ", std::string(name));
  return absl::StrCat(kFullyShard, " ..", std::string(name.substr(name.size() - kLongest + 2)));
}

}  // namespace

FsdpUnit::FsdpUnit(std::string name, FlatRow row, const Options& options)
    : name_(std::move(name)),
      subject_(subject_of(name_)),
      row_(std::move(row)),
      context_(row_.context()),
      state_(context_->gradients.fsdp),
      options_(options) {}

std::shared_ptr<FsdpUnit> FsdpUnit::create(std::string name,
                                           const std::vector<at::Tensor>& parameters,
                                           const std::vector<Layout>& layouts, int mesh_dim,
                                           const Options& options, const EqualSegments* segments) {
  const std::shared_ptr<MeshContext> context = meta_of(parameters[0]).context;
  if (context->gradients.fsdp == nullptr)
    context->gradients.fsdp = std::make_shared<FsdpState>(*context);
  std::vector<SpecRef> used;
  for (const at::Tensor& tensor : parameters) {
    const Spec& spec = *meta_of(tensor).spec;
    used.push_back(context->intern(spec.layout, spec.sizes, spec.strides,
                                   options.param_dtype.value_or(spec.dtype),
                                   options.compute_device.value_or(spec.device), spec.origins));
  }
  const Spec& first = *meta_of(parameters[0]).spec;
  const EqualSegments uneven;
  const EqualSegments& how = segments == nullptr ? uneven : *segments;
  std::shared_ptr<FsdpUnit> unit(new FsdpUnit(
      std::move(name),
      FlatRow(context, mesh_dim, used, layouts, first.dtype, first.device, how.begins, how.segment),
      options));
  unit->state_->units_.push_back(unit.get());
  if (options.reshard_ranks > 0) unit->state_->neighbours(mesh_dim, options.reshard_ranks);
  const c10::InferenceMode normal(false);  // which records gradients
  const c10::AutoGradMode no_grad(false);
  bool deferred = false;
  unit->parameters_.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i];
    const SpecRef& resting = unit->row_[i].kept;
    DTensorMeta& meta = meta_of(tensor);
    Parameter& p = unit->parameters_.emplace_back();
    p.unit = unit.get();
    p.impl = tensor.unsafeGetTensorImpl();
    if (meta.family == nullptr) meta.family = std::make_shared<ViewFamily>();
    meta.family->remembered.clear();
    p.family = meta.family;
    if (is_deferred(tensor)) {
      deferred = true;
      meta.spec = resting;
    } else {
      if (tensor.grad().defined() && is_dtensor(tensor.grad())) {
        tensor.mutable_grad() = redistributed(tensor.grad(), layouts[i], unit->cause());
      }
      // The cut takes of what is there: nothing moves.
      const Placement& cut = layouts[i][mesh_dim];
      const int64_t me = context->coordinate()[static_cast<size_t>(mesh_dim)];
      at::Tensor part = meta.local();
      const int64_t rows = resting->local_sizes[static_cast<size_t>(cut.dim())];
      if (part.size(cut.dim()) != rows) {
        part = part.narrow(cut.dim(), rows == 0 ? 0 : cut.ragged_begin(me), rows);
      }
      meta.move_to(part.clone());
      meta.spec = resting;
    }
    meta.family->parameter = resting;
    meta.family->resting = std::make_shared<const Resting>(Resting{unit, i, resting});
    set_keys(*tensor.unsafeGetTensorImpl(), tensor.key_set().add(kTouched));
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    const auto alive = std::make_shared<const char>();
    p.alive = alive;
    // A gradient that has not come through the unit's node: TorchScript's own graphs.
    add_hook(tensor, [weak = std::weak_ptr<FsdpUnit>(unit), i, alive](const at::TensorBase& grad) {
      const std::shared_ptr<FsdpUnit> its = weak.lock();
      return its == nullptr ? grad : its->resting_gradient(i, at::Tensor(grad));
    });
    if (unit->is_elsewhere()) accumulate_beside(unit->row_[i].whole->device, tensor);
  }
  if (!deferred) unit->pack();
  return unit;
}

at::Tensor FsdpUnit::Parameter::tensor() const {
  if (alive.expired()) return {};
  return at::Tensor(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
}

FsdpUnit::~FsdpUnit() {
  let_go();
  sending_.reset();
  drop_part();
  if (is_allocated_) state_->counters.gathered_bytes -= flat_bytes();
  state_->forget(*this);
}

int64_t FsdpUnit::flat_bytes() const {
  return row_.numel() * static_cast<int64_t>(c10::elementSize(row_[0].whole->dtype));
}

std::string FsdpUnit::parameter_name(size_t index) const {
  const std::shared_ptr<ViewFamily> family = parameters_[index].family.lock();
  return family == nullptr ? std::string() : family->fqn;
}

// Of what they are made of together.
uint64_t FsdpUnit::provenance() const {
  uint64_t provenance = 0;
  for (const Parameter& p : parameters_) {
    const at::Tensor tensor = p.tensor();
    if (tensor.defined()) provenance = mix(provenance, provenance_of(meta_of(tensor)));
  }
  return provenance;
}

void FsdpUnit::pack_if_made() {
  const bool is_made = std::all_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) {
    const at::Tensor tensor = p.tensor();
    return !tensor.defined() || meta_of(tensor).part.state() != LocalPart::State::kDeferred;
  });
  if (is_made && !shard_.defined()) pack();
}

// The parts that rest become one row; the flat buffer gets its places, and no memory.
void FsdpUnit::pack() {
  const c10::InferenceMode normal(false);  // which records gradients
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> tensors;
  for (const Parameter& p : parameters_) {
    tensors.push_back(p.tensor());
    if (tensors.back().defined()) meta_of(tensors.back()).local();  // or it is not made yet
  }
  const auto memory = [](int64_t numel, const Spec& spec) {
    return at::empty({numel}, at::TensorOptions(spec.dtype).device(spec.device));
  };
  const at::Tensor shard = is_elsewhere() ? host_memory({row_.kept()}, row_[0].kept->dtype)
                                          : memory(row_.kept(), *row_[0].kept);
  if (row_.is_equal()) shard.zero_();  // what is between tensors travels, too
  // Where this runs below ADInplaceOrView, too: is_fresh() goes by it.
  const auto counted_with = [](const at::Tensor& place, const at::Tensor& whole) {
    place.unsafeGetTensorImpl()->set_version_counter(
        whole.unsafeGetTensorImpl()->version_counter());
  };
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!tensors[i].defined()) continue;
    const at::Tensor place = row_.kept_of(shard, i);
    counted_with(place, shard);
    DTensorMeta& meta = meta_of(tensors[i]);
    place.copy_(meta.local());
    meta.move_to(place);
  }
  shard_ = shard;
  if (is_at_hand()) {
    flat_ = shard_;
    is_full_ = true;
  } else {
    flat_ = memory(row_.numel(), *row_[0].whole);
    state_->buffers_[flat_.storage().unsafeGetStorageImpl()] = this;
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].local = row_.whole_of(flat_, i);
    counted_with(parameters_[i].local, flat_);
  }
  gathered_version_ = shard_._version();
  if (!is_full_) {
    is_allocated_ = true;
    state_->counters.gathered_bytes += flat_bytes();
    reshard();
  }
}

void FsdpUnit::begin_gather() {
  if (!shard_.defined()) pack();  // says what is not made
  gathered_version_ = shard_._version();
  if (is_at_hand()) return;
  if (is_elsewhere() && context_->captures.under_way != nullptr) {
    throw Error(absl::FailedPreconditionError(
        "parameters that rest on the CPU are copied from there by the host: a step that uses them "
        "cannot be captured"));
  }
  // Not finish(), whose sums along other mesh dimensions have their place in the order of collectives: what
  // is sent still is a matter of time, and differs between ranks.
  if (sending_ != nullptr) std::shared_ptr<UnitGradients>(sending_)->give_up();
  for (const Parameter& p : parameters_) {  // made of what was there before
    if (const auto family = p.family.lock()) family->remembered.clear();
  }
  c10::StorageImpl* storage = flat_.storage().unsafeGetStorageImpl();
  if (!is_allocated_) {
    const auto bytes = static_cast<size_t>(flat_bytes());
    const c10::DeviceGuard on(flat_.device());
    storage->set_data_ptr_noswap(storage->allocator()->allocate(bytes));
    storage->set_nbytes(bytes);
    is_allocated_ = true;
    FsdpCounters& counters = state_->counters;
    counters.gathered_bytes += flat_bytes();
    counters.peak_gathered_bytes = std::max(counters.peak_gathered_bytes, counters.gathered_bytes);
  }
  is_full_ = false;
  if (part_.defined() && part_version_ == shard_._version()) {
    ++state_->counters.gathers;
    under_way_.emplace(gather_from_neighbours());
    is_begun_ = true;
    return;
  }
  drop_part();
  std::optional<c10::StreamGuard> beside;
  if (const std::optional<c10::Stream> lane = this->lane(FsdpState::Way::kToDevice)) {
    wait_for_current(*lane);  // for what has used the memory
    beside.emplace(*lane);
    keep_for_stream(flat_);
  }
  at::Tensor stretch = shard_;
  if (is_cast() || is_elsewhere()) {  // where it belongs
    stretch = flat_.narrow(0, row_.kept_begin(), row_.kept());
    bring_stretch(stretch);
  }
  if (is_elsewhere()) {
    read_.emplace(flat_.device().type());
    read_->record(beside->current_stream());
  }
  if (is_alone() && !is_elsewhere()) {
    is_full_ = true;
    note_filled();
    return;
  }
  ++state_->counters.gathers;
  if (!is_alone()) {
    under_way_.emplace(row_.all_gather(stretch, flat_, provenance(), cause(),
                                       [this](size_t i) { return parameter_name(i); }));
  }
  is_begun_ = true;
}

// What casts on a device needs memory there.
void FsdpUnit::bring_stretch(const at::Tensor& to) const {
  constexpr int64_t kPiece = 1 << 24;
  const at::AutoDispatchBelowADInplaceOrView is_no_write;
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  if (!is_elsewhere() || !is_cast()) {
    to.copy_(shard_, /*non_blocking=*/true);
    return;
  }
  for (int64_t begin = 0; begin < to.numel(); begin += kPiece) {
    const int64_t numel = std::min(kPiece, to.numel() - begin);
    const at::Tensor from = shard_.narrow(0, begin, numel);
    to.narrow(0, begin, numel).copy_(from.to(to.device(), /*non_blocking=*/true));
  }
}

void FsdpUnit::finish_gather() {
  if (!is_begun_) return;
  is_begun_ = false;
  absl::Status status = under_way_.has_value() ? under_way_->wait() : absl::OkStatus();
  under_way_.reset();
  throw_if_error(std::move(status));
  if (read_.has_value()) read_->block(stream_here(flat_.device()));
  is_full_ = true;
  note_filled();
  // Who has a parameter's part may write it at any time.
  const bool is_handed_out =
      read_.has_value() &&
      std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) {
        const std::shared_ptr<ViewFamily> family = p.family.lock();
        return family != nullptr && family->handed_out;
      });
  if (is_handed_out) wait_for_read();
}

// Nobody reads what rests any more, whatever came of it.
void FsdpUnit::let_go() {
  under_way_.reset();  // waits
  is_begun_ = false;
  wait_for_read();
}

// Of the host: errors are for those who use the device next.
void FsdpUnit::wait_for_read() {
  try {
    if (read_.has_value()) read_->synchronize();
  } catch (const c10::Error&) {
  }
  read_.reset();
}

std::optional<c10::Stream> FsdpUnit::lane(FsdpState::Way way) const {
  if (!is_elsewhere()) return std::nullopt;
  return state_->lane(row_[0].whole->device, way);
}

void FsdpUnit::note_filled() {
  if (flat_.is_cpu()) return;
  const c10::Stream here = stream_here(flat_.device());
  if (!filled_.has_value()) filled_.emplace(flat_.device().type());
  filled_->record(here);
  may_read_ = {here};
  keep_for_stream(flat_);
}

// Whoever has made the streams wait for each other cannot know which of them has gathered.
void FsdpUnit::join_stream() {
  const c10::Stream here = stream_here(flat_.device());
  if (std::find(may_read_.begin(), may_read_.end(), here) != may_read_.end()) return;
  filled_->block(here);
  may_read_.push_back(here);
  keep_for_stream(flat_);
}

// Its memory, also when it is let go of: until the current stream has done what is on it by then.
void FsdpUnit::keep_for_stream(const at::Tensor& tensor) const {
  if (tensor.is_cpu()) return;
  const c10::impl::VirtualGuardImpl device(tensor.device().type());
  device.recordDataPtrOnStream(tensor.storage().data_ptr(), device.getStream(tensor.device()));
}

void FsdpUnit::make_full() {
  finish_gather();
  if (shard_.defined() && is_full_ && is_fresh()) return;
  begin_gather();
  finish_gather();
}

void FsdpUnit::settle() {
  finish_gather();
  wait_for_read();
}

void FsdpUnit::reshard(bool keeps_part) {
  if (is_at_hand()) return;
  finish_gather();
  if (options_.reshard_ranks > 0) keeps_part&& is_full_&& is_fresh() ? keep_part() : drop_part();
  is_full_ = false;
  if (!is_allocated_ || sending_ != nullptr) return;  // when they are sent
  is_allocated_ = false;
  state_->counters.gathered_bytes -= flat_bytes();
  keep_for_stream(flat_);
  c10::StorageImpl* storage = flat_.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, flat_.device()));
  storage->set_nbytes(0);
  // What was brought elsewhere of a whole parameter is as large.
  for (const Parameter& p : parameters_) {
    if (const auto family = p.family.lock()) family->remembered.clear();
  }
}

}  // namespace shardweave::dtensor_internal

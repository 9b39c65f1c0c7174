#include "shardweave/dtensor/engine/fsdp_unit.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/deferred.h"
#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/functions/accumulate_grad.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/csrc/autograd/variable.h"

namespace shardweave::dtensor_internal {
namespace {

using c10::IValue;
using torch::autograd::variable_list;

constexpr c10::DispatchKey kTouched = c10::DispatchKey::DeferredInit;
constexpr char kFullyShard[] = "fully_shard";

c10::Stream stream_here(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

bool in_backward_now() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

[[noreturn]] void moved(const at::Tensor& tensor, std::string_view how) {
  throw Error(kFullyShard, absl::FailedPreconditionError(absl::StrCat(
                               "the parameter '", std::string(parameter_of(meta_of(tensor))),
                               "' rests in its unit's memory, and ", std::string(how),
                               "; do that before the module is fully sharded")));
}

// Of a tensor that wants no gradient, too: it may, later.
void add_hook(const at::Tensor& tensor, std::function<at::TensorBase(const at::TensorBase&)> hook) {
  auto& hooks = torch::autograd::impl::materialize_autograd_meta(tensor)->cpp_hooks_list_;
  if (hooks == nullptr) torch::autograd::impl::create_cpp_hook(tensor);
  hooks->push_back(std::move(hook));
}

// One node for a unit in a graph: it runs when the gradients of all of its parameters are there.
class FullyShardBackward final : public torch::autograd::Node {
 public:
  // As early as an accumulation: so that gradients that are whole do not wait.
  explicit FullyShardBackward(std::shared_ptr<FsdpUnit> unit)
      : Node(UINT64_MAX), unit_(std::move(unit)) {}
  variable_list apply(variable_list&& grads) override {
    return unit_->reduce(std::move(grads), *this);
  }
  std::string name() const override { return "FullyShardBackward"; }

 private:
  const std::shared_ptr<FsdpUnit> unit_;
};

// A view of a unit's flat buffer.
class ViewOfUnit final : public LocalPart::Source {
 public:
  ViewOfUnit(std::shared_ptr<FsdpUnit> unit, at::Tensor view)
      : unit_(std::move(unit)), view_(std::move(view)) {}
  LocalPart::State state() const override { return LocalPart::State::kGatheredOnUse; }
  const at::Tensor& bring() override {
    unit_->touch();
    return view_;
  }

 private:
  const std::shared_ptr<FsdpUnit> unit_;
  const at::Tensor view_;
};

// What is copied to the host.
class OnItsWay final : public LocalPart::Source {
 public:
  OnItsWay(std::shared_ptr<HostCopies> copies, size_t index, std::shared_ptr<MeshContext> context)
      : copies_(std::move(copies)), index_(index), context_(std::move(context)) {}
  LocalPart::State state() const override {
    return copies_->done() ? LocalPart::State::kReady : LocalPart::State::kUnderWay;
  }
  const at::Tensor& bring() override {
    if (!copies_->done()) {
      context_->before_host_reads();  // or they may be what an error has left
      copies_->wait();
    }
    return (*copies_)[index_];
  }

 private:
  const std::shared_ptr<HostCopies> copies_;
  const size_t index_;
  const std::shared_ptr<MeshContext> context_;
};

// Operators that take a parameter as it rests, whatever else they take.
bool works_at_rest(std::string_view name) {
  constexpr std::string_view kNames[] = {
      "detach",       "alias",     "_has_compatible_shallow_copy_type",
      "is_same_size", "_version",  "requires_grad_",
      "retain_grad",  "is_leaf",   "output_nr",
      "data",         "is_pinned", "lift_fresh",
  };
  constexpr std::string_view kBeginnings[] = {"_foreach_",      "_fused_adam", "_fused_sgd",
                                              "_fused_adagrad", "_amp_",       "new_"};
  constexpr std::string_view kAten = "aten::";
  if (!name.starts_with(kAten)) return false;
  name.remove_prefix(kAten.size());
  return name.ends_with("_like") ||
         std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames) ||
         std::any_of(std::begin(kBeginnings), std::end(kBeginnings),
                     [&](std::string_view b) { return name.starts_with(b); });
}

// Whether the backward that runs adds to a gradient there: it does not where autograd::grad() has asked
// for gradients, or backward() for those of other inputs.
bool is_accumulated(const torch::autograd::Node* accumulation) {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (info == nullptr || info->empty()) return accumulation != nullptr;
  const auto it =
      info->find(const_cast<torch::autograd::Node*>(accumulation));  // NOLINT: it is a key
  return it != info->end() && it->second.needed_;
}

// Whether it adds to any gradient.
bool is_accumulating() {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  return info == nullptr || std::none_of(info->begin(), info->end(), [](const auto& item) {
           return item.second.captures_ != nullptr;
         });
}

// Whether hooks look at the parameter's gradient, beside the unit's own.
bool has_hooks(const at::Tensor& parameter) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  return meta != nullptr && meta->cpp_hooks_list_ != nullptr && meta->cpp_hooks_list_->size() > 1;
}

// A gradient that FullyShardNoSync has left whole.
bool is_unsent(const at::Tensor& grad, const Spec& kept) {
  return grad.defined() && is_dtensor(grad) && !grad.requires_grad() &&
         meta_of(grad).spec->layout != kept.layout;
}

// Of operators that write: those that give a tensor another shape, or other memory.
bool reshapes_in_place(std::string_view name) {
  constexpr std::string_view kNames[] = {
      "aten::resize_",   "aten::resize_as_",  "aten::set_",       "aten::t_",
      "aten::squeeze_",  "aten::unsqueeze_",  "aten::transpose_", "aten::swapaxes_",
      "aten::swapdims_", "aten::as_strided_",
  };
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

// `to()` that gives the parameter itself, or a copy of it elsewhere: module->to() asks for that.
bool keeps_dtype(const c10::OperatorHandle& op, absl::Span<const IValue> args, const Spec& spec) {
  if (op.operator_name().name != "aten::to") return false;
  for (size_t i = 0; i < args.size(); ++i) {
    if (op.schema().arguments()[i].name() == "dtype" && args[i].isInt() &&
        args[i].toScalarType() != spec.dtype) {
      return false;
    }
  }
  return true;
}

// A parameter or a buffer, and no input.
bool is_member(const at::Tensor& tensor) {
  if (!is_dtensor(tensor.unsafeGetTensorImpl())) return false;
  const DTensorMeta& meta = meta_of(tensor);
  return meta.family != nullptr && meta.family->parameter != nullptr;
}

bool makes_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& r) {
    return r.alias_info() != nullptr && !r.alias_info()->isWrite();
  });
}

template <typename F>
void for_each_of(const IValue& arg, F f) {
  if (arg.isTensor()) f(arg.toTensor());
  if (!arg.isTensorList()) return;
  for (const at::Tensor& tensor : arg.toTensorVector()) f(tensor);
}

// What a call does with the parameters that rest among its arguments.
enum class Use : uint8_t { kNotThere, kAtRest, kWhole };

Use use_in(const c10::OperatorHandle& op, absl::Span<const IValue> args) {
  const c10::FunctionSchema& schema = op.schema();
  const Resting* first = nullptr;
  for (size_t i = 0; i < args.size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    bool writes_it = false;
    for_each_of(args[i], [&](const at::Tensor& tensor) {
      const Resting* its = written ? in_unit(tensor) : resting_of(tensor);
      if (its == nullptr) return;
      if (first == nullptr) first = its;
      if (!written) return;
      writes_it = true;
      if (reshapes_in_place(op.operator_name().name)) {
        moved(tensor, absl::StrCat(op.operator_name().name, " would give it another place"));
      }
      its->unit->settle();
    });
    if (writes_it) return Use::kAtRest;
  }
  if (first == nullptr) return Use::kNotThere;
  // What set_data() asks before it does so.
  if (op.operator_name().name == "aten::_has_compatible_shallow_copy_type" && args[1].isTensor()) {
    check_stays(args[0].toTensor(), args[1].toTensor());
  }
  if (works_at_rest(op.operator_name().name) || keeps_dtype(op, args, *first->spec)) {
    return Use::kAtRest;
  }
  bool alone = true, with_its_like = false;
  for (const IValue& arg : args) {
    for_each_of(arg, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || resting_of(tensor) != nullptr) return;
      if (is_dtensor(tensor.unsafeGetTensorImpl())) {
        const Spec& spec = *meta_of(tensor).spec;
        with_its_like |= spec.layout == first->spec->layout && spec.sizes == first->spec->sizes;
        alone = false;
      } else {
        alone &= tensor.dim() == 0;
      }
    });
  }
  // An optimizer's: `grad.add(parameter, weight_decay)`, or a copy of it.
  if (with_its_like) return Use::kAtRest;
  const bool copies = alone && !c10::GradMode::is_enabled() && !makes_view(schema);
  return copies ? Use::kAtRest : Use::kWhole;
}

// What is recorded of parameters that rest on the CPU would go backward there, beside the device that
// uses them.
void check_stays_on_device(const c10::OperatorHandle& op, absl::Span<const IValue> args) {
  if (!c10::GradMode::is_enabled() || works_at_rest(op.operator_name().name) ||
      op.operator_name().name == "aten::to" || op.schema().is_mutable()) {
    return;
  }
  for (const IValue& arg : args) {
    for_each_of(arg, [&](const at::Tensor& tensor) {
      const Resting* resting = resting_of(tensor);
      if (resting == nullptr || !tensor.requires_grad()) return;
      const std::optional<c10::Device>& device = resting->unit->options().compute_device;
      if (!device.has_value()) return;
      throw Error(op.operator_name().name,
                  absl::FailedPreconditionError(absl::StrCat(
                      "the parameter '", std::string(parameter_of(meta_of(tensor))),
                      "' rests on the CPU and is used on ", device->str(),
                      ": gradients are recorded there, with tensors that are on it too; this one "
                      "lies beside the parameter, as it rests")));
    });
  }
}

// While parameters are summoned, what is recorded of them would save what is gone afterwards.
void check_not_recorded(const c10::OperatorHandle& op, absl::Span<const IValue> args) {
  if (!c10::GradMode::is_enabled()) return;
  for (const IValue& arg : args) {
    for_each_of(arg, [&](const at::Tensor& tensor) {
      const Resting* known = known_to_rest(tensor);
      if (known == nullptr || !known->unit->is_summoned() || !tensor.requires_grad() ||
          resting_of(tensor) != nullptr || in_unit(tensor) == nullptr ||
          works_at_rest(op.operator_name().name)) {
        return;
      }
      throw Error(op.operator_name().name,
                  absl::FailedPreconditionError(absl::StrCat(
                      "the parameter '", std::string(parameter_of(meta_of(tensor))),
                      "' is summoned (FullParams), to be read and written; gradients "
                      "are recorded after that scope, and in it operators run without")));
    });
  }
}

}  // namespace

// --- the order of units --------------------------------------------------------------------------

FsdpState::UnitsBefore FsdpState::before_next() const {
  return {before_, current_, in_backward_ || c10::GradMode::is_enabled()};
}

void FsdpState::learn(FsdpUnit& unit) {
  const auto [it, is_new] = next_.try_emplace(before_next(), Guess{&unit});
  Guess& guess = it->second;
  if (!is_new) guess = {&unit, guess.unit == &unit};
}

FsdpUnit* FsdpState::guessed() const {
  const auto it = next_.find(before_next());
  return it != next_.end() && it->second.sure ? it->second.unit : nullptr;
}

void FsdpState::touch(FsdpUnit& unit) {
  const bool in_backward = in_backward_now();
  if (in_backward) end_with_backward();
  // A step has ended: what comes next is to be gathered when the optimizer has written it.
  const bool begins_anew = in_backward_ && !in_backward;
  in_backward_ = in_backward;
  FsdpUnit* guess = nullptr;
  if (current_ != &unit || begins_anew) {
    // Gradients of the unit before travel while this one computes. Those of the one before that have
    // had their time, and there are three units in memory: this, the next, and what travels.
    finish_gradients(in_backward ? 1 : 0);
    if (current_ != nullptr && current_ != &unit &&
        (in_backward || current_->options_.reshard_after_forward)) {
      leaving_.push_back(current_);
      current_->is_to_keep_part_ = !in_backward && c10::GradMode::is_enabled();
    }
    if (begins_anew) current_ = before_ = nullptr;
    learn(unit);
    if (ahead_ != nullptr && ahead_ != &unit) {
      ++counters.wrong_prefetches;
      leaving_.push_back(ahead_);
      ahead_->is_to_keep_part_ = ahead_->part_.defined();
    }
    ahead_ = nullptr;
    before_ = current_;
    current_ = &unit;
    guess = guessed();
  }
  const int64_t now = context_.observation.counters.operators;
  std::erase_if(leaving_, [&](FsdpUnit* other) {
    if (other == &unit) return true;
    if (other == guess || other->last_use_ == now) return false;
    other->reshard(other->is_to_keep_part_);
    return true;
  });
  unit.make_full();
  // What is summoned is not met, and the end of its scope is no place for an error of a gather.
  const bool is_to_copy = guess != nullptr && (!guess->is_alone() || guess->is_elsewhere());
  if (!is_to_copy || guess == &unit || guess->is_full_ || guess->is_summoned() ||
      guess->is_begun_) {
    return;
  }
  guess->begin_gather();
  ahead_ = guess;
  ++counters.prefetches;
}

// Nobody touches a unit when a backward has ended. One within another (checkpoint()) is not its end.
void FsdpState::end_with_backward() {
  if (!backward_.expired()) return;
  const auto lives_as_long = std::make_shared<const char>();
  backward_ = lives_as_long;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [weak = weak_from_this(), lives_as_long, accumulates = is_accumulating()] {
        const std::shared_ptr<FsdpState> state = weak.lock();
        if (state == nullptr) return;
        state->backward_.reset();
        if (state->ahead_ != nullptr) {
          state->leaving_.push_back(std::exchange(state->ahead_, nullptr));
        }
        if (state->current_ != nullptr) state->current_->reshard();
        for (FsdpUnit* unit : std::exchange(state->leaving_, {})) unit->reshard();
        state->finish_gradients(0);
        if (accumulates && state->no_sync == 0) state->send_held();  // of what it has not met
      });
}

void FsdpState::finish_gradients(size_t but_the_last) {
  while (sending_.size() > but_the_last) {
    const std::shared_ptr<UnitGradients> oldest = sending_.front().lock();
    sending_.pop_front();
    if (oldest != nullptr) oldest->finish();
  }
}

void FsdpState::send_held() {
  for (FsdpUnit* unit : units_) unit->send_held();
  finish_gradients(0);
}

void FsdpState::give_up_sent() {
  for (const std::weak_ptr<UnitGradients>& each : sending_) {
    if (const std::shared_ptr<UnitGradients> gradients = each.lock()) gradients->give_up_if_sent();
  }
}

void FsdpState::wait_for_sent() {
  for (const std::weak_ptr<UnitGradients>& each : sending_) {
    if (const std::shared_ptr<UnitGradients> gradients = each.lock()) gradients->give_up();
  }
}

void FsdpState::reshard() {
  ahead_ = nullptr;
  leaving_.clear();
  for (FsdpUnit* unit : units_) unit->reshard();
}

void FsdpState::forget(FsdpUnit& unit) {
  if (unit.flat_.defined()) buffers_.erase(unit.flat_.storage().unsafeGetStorageImpl());
  std::erase(units_, &unit);
  std::erase(leaving_, &unit);
  for (FsdpUnit** known : {&current_, &before_, &ahead_}) {
    if (*known == &unit) *known = nullptr;
  }
  absl::erase_if(next_, [&](const auto& item) {
    return item.first.two == &unit || item.first.one == &unit || item.second.unit == &unit;
  });
}

c10::Stream FsdpState::lane(c10::Device device, Way way) {
  for (const auto& [its, lane] : lanes_) {
    if (its == way && lane.device() == device) return lane;
  }
  return lanes_.emplace_back(way, copy_lane(device)).second;
}

// --- a unit --------------------------------------------------------------------------------------

FsdpUnit::FsdpUnit(std::string name, FlatRow row, const Options& options)
    : name_(std::move(name)),
      row_(std::move(row)),
      context_(row_.context()),
      state_(context_->fsdp),
      options_(options) {}

std::shared_ptr<FsdpUnit> FsdpUnit::create(std::string name,
                                           const std::vector<at::Tensor>& parameters,
                                           const std::vector<Layout>& layouts, int mesh_dim,
                                           const Options& options, const EqualSegments* segments) {
  const std::shared_ptr<MeshContext> context = meta_of(parameters[0]).context;
  if (context->fsdp == nullptr) context->fsdp = std::make_shared<FsdpState>(*context);
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
  if (is_elsewhere() && context_->capture != nullptr) {
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

std::shared_ptr<torch::autograd::Node> FsdpUnit::node(size_t index, const at::Tensor& handle) {
  const bool is_copy = !parameters_[index].tensor().is_same(handle);
  const int graph_task = torch::autograd::get_current_graph_task_id();
  std::shared_ptr<torch::autograd::Node> node = is_copy ? nullptr : node_.lock();
  if (node != nullptr && node->next_edge(index).is_valid()) return node;
  // An edge calls the hooks of its parameter, with a gradient or without: there is one only to what
  // is used.
  if (is_copy && is_elsewhere() && handle.is_leaf()) {
    accumulate_beside(row_[index].whole->device, handle);
  }
  const torch::autograd::Edge edge = torch::autograd::impl::gradient_edge(handle);
  // Not to a node of a graph that is going backward now, which has counted its edges.
  if (node != nullptr && graph_task == node_made_in_) {
    // Not set_next_edge(), which wants to be called before others know the node: all edges here lead
    // to accumulations, and none changes how far it is from the leaves.
    node->next_edges()[index] = edge;
    return node;
  }
  node = std::shared_ptr<torch::autograd::Node>(new FullyShardBackward(shared_from_this()),
                                                torch::autograd::deleteNode);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    node->add_next_edge(i == index ? edge : torch::autograd::Edge());
    const Spec& used = *row_[i].whole;
    node->add_input_metadata(at::TensorOptions(used.dtype).device(used.device),
                             c10::fromIntArrayRefSlow(array(used.sizes)),
                             /*is_tensor_subclass=*/false, /*is_nested=*/false, used.dtype);
  }
  if (!is_copy) {
    node_ = node;
    node_made_in_ = graph_task;
  }
  return node;
}

at::Tensor FsdpUnit::used(size_t index, const at::Tensor& handle) {
  Parameter& p = parameters_[index];
  const DTensorMeta& meta = meta_of(handle);
  if (shard_.defined() && !meta.local().is_alias_of(shard_)) {
    moved(handle, "its data has been replaced");
  }
  at::Tensor result;
  {
    const c10::InferenceMode normal(false);
    result = wrap(LocalPart(std::shared_ptr<LocalPart::Source>(shared_from_this(), &p)),
                  row_[index].whole, context_);
  }
  DTensorMeta& its = meta_of(result);
  its.family = meta.family;
  its.place = meta.place;
  its.came_from(provenance_of(meta));
  c10::TensorImpl* impl = result.unsafeGetTensorImpl();
  // A write to the parameter after it was saved for backward is one to this.
  if (!handle.is_inference()) {
    impl->set_version_counter(handle.unsafeGetTensorImpl()->version_counter());
  }
  if (meta.family->forward != nullptr) set_keys(*impl, impl->key_set().add(kTouched));
  if (c10::GradMode::is_enabled() && handle.requires_grad()) {
    torch::autograd::impl::set_gradient_edge(result,
                                             {node(index, handle), static_cast<uint32_t>(index)});
  }
  return result;
}

// --- gradients -----------------------------------------------------------------------------------

// Whether a gradient that is for this node stays whole: one that is asked for (autograd::grad()) does not.
bool FsdpUnit::holds(const torch::autograd::Node* accumulation) const {
  return state_->no_sync > 0 && !is_elsewhere() && !c10::GradMode::is_enabled() &&
         is_accumulated(accumulation);
}

at::Tensor FsdpUnit::resting_gradient(size_t index, const at::Tensor& grad) {
  if (!grad.defined()) return grad;
  const Spec& kept = *row_[index].kept;
  if (in_backward_now()) state_->end_with_backward();
  if (state_->no_sync > 0) {
    const at::Tensor parameter = parameters_[index].tensor();
    if (holds(torch::autograd::impl::try_get_grad_accumulator(parameter).get()) &&
        (!parameter.grad().defined() || is_unsent(parameter.grad(), kept))) {
      return as_dtensor(grad, context_).to(kept.dtype);
    }
  }
  // On the CPU those of several would be branches, for another thread than the device's.
  if (is_elsewhere() && c10::GradMode::is_enabled()) {
    throw Error(kFullyShard, absl::UnimplementedError(absl::StrCat(
                                 "gradients of gradients (create_graph) of the parameter '",
                                 parameter_name(index), "', which rests on the CPU and is used on ",
                                 row_[index].whole->device.str())));
  }
  at::Tensor there = as_dtensor(grad, context_);
  const bool has_arrived = meta_of(there).spec->layout == kept.layout;
  if (has_arrived && there.scalar_type() == kept.dtype) return there;
  there = there.to(reduce_dtype());
  if (!has_arrived) {
    there = c10::GradMode::is_enabled() ? redistribute(there, kept.layout, options_.where)
                                        : redistributed(there, kept.layout, cause());
  }
  return there.to(kept.dtype);
}

// Gradients are packed where the parameters were, or in place of them: nobody needs those any more.
at::Tensor FsdpUnit::gradient_buffer(int64_t numel, const at::TensorOptions& options) {
  is_full_ = false;
  if (has_room_for(options)) return flat_.narrow(0, 0, numel);
  reshard();
  at::Tensor buffer = at::empty({numel}, options);
  FsdpCounters& counters = state_->counters;
  counters.gathered_bytes += static_cast<int64_t>(buffer.nbytes());
  counters.peak_gathered_bytes = std::max(counters.peak_gathered_bytes, counters.gathered_bytes);
  return buffer;
}

// Those that it takes become undefined; null: none.
std::shared_ptr<UnitGradients> FsdpUnit::send(variable_list& grads) {
  state_->finish_gradients(1);
  // Those of the unit before have had this one's whole backward. Now that its own gradients are there
  // beside it, they would be a fourth unit in memory.
  state_->wait_for_sent();
  finish_gather();
  if (sending_ != nullptr) std::shared_ptr<UnitGradients>(sending_)->give_up();
  bool from_flat = false;
  int64_t bytes = 0;
  auto gradients = std::make_shared<UnitGradients>(
      row_, grads, reduce_dtype(),
      [&](int64_t numel, const at::TensorOptions& options) {
        from_flat = has_room_for(options);
        at::Tensor buffer = gradient_buffer(numel, options);
        bytes = static_cast<int64_t>(buffer.nbytes());
        return buffer;
      },
      lane(FsdpState::Way::kToHost), cause(), [this](size_t i) { return parameter_name(i); });
  if (gradients->taken().empty()) return nullptr;
  ++state_->counters.reduce_scatters;
  state_->sending_.push_back(gradients);
  if (in_backward_now()) state_->end_with_backward();
  if (from_flat) {
    sending_ = gradients;
    gradients->when_sent(
        [weak = weak_from_this()] {
          const std::shared_ptr<FsdpUnit> unit = weak.lock();
          if (unit == nullptr) return;
          unit->sending_.reset();
          unit->reshard();
        },
        /*early=*/true);
  } else {
    gradients->when_sent(
        [weak = std::weak_ptr<FsdpState>(state_), bytes] {
          const std::shared_ptr<FsdpState> state = weak.lock();
          if (state != nullptr) state->counters.gathered_bytes -= bytes;
        },
        /*early=*/false);  // it is kept until then
  }
  return gradients;
}

// Of gradients on the device, to the CPU.
void FsdpUnit::begin_copies(variable_list& grads) {
  std::vector<size_t> from;
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) continue;
    from.push_back(i);
    parts.push_back(meta_of(grads[i]).local());
  }
  const auto copies = std::make_shared<HostCopies>(
      state_->lane(row_[0].whole->device, FsdpState::Way::kToHost), parts);
  for (size_t k = 0; k < from.size(); ++k) {
    at::Tensor& grad = grads[from[k]];
    const DTensorMeta& meta = meta_of(grad);
    const Spec& has = *meta.spec;
    at::Tensor there = wrap(
        LocalPart(std::make_shared<OnItsWay>(copies, k, context_)),
        context_->intern(has.layout, has.sizes, has.strides, has.dtype, row_[from[k]].kept->device),
        context_);
    meta_of(there).came_from(provenance_of(meta));
    grad = std::move(there);
  }
}

variable_list FsdpUnit::reduce(variable_list&& grads, const torch::autograd::Node& node) {
  // What is used from now on is of another graph.
  node_.reset();
  state_->end_with_backward();
  if (c10::GradMode::is_enabled()) {  // gradients of these are wanted
    variable_list result(parameters_.size());
    for (size_t i = 0; i < grads.size(); ++i) result[i] = resting_gradient(i, grads[i]);
    return result;
  }
  for (at::Tensor& grad : grads) {
    if (grad.defined()) grad = as_dtensor(grad, context_);
  }
  if (state_->no_sync > 0) {
    variable_list held = hold(grads, node);
    if (std::any_of(grads.begin(), grads.end(), [](const at::Tensor& g) { return g.defined(); })) {
      grads = bring_to_rest(std::move(grads));
    } else {
      reshard();
    }
    for (size_t i = 0; i < held.size(); ++i) {
      if (held[i].defined()) grads[i] = std::move(held[i]);
    }
    return std::move(grads);
  }
  std::vector<at::Tensor> with_held = add_held(grads, node);
  variable_list result = bring_to_rest(std::move(grads));
  // Not before: a backward that fails leaves what was there.
  for (at::Tensor& leaf : with_held) leaf.mutable_grad().reset();
  return result;
}

namespace {

// What adds to a gradient behind this edge, if this backward does. Null: it is another node.
const torch::autograd::AccumulateGrad* accumulation_of(const torch::autograd::Edge& edge) {
  if (!is_accumulated(edge.function.get())) return nullptr;
  return dynamic_cast<const torch::autograd::AccumulateGrad*>(edge.function.get());
}

}  // namespace

// Takes those that are to stay whole: not where a gradient is that has been sent. In memory of their own,
// for autograd keeps them and adds to them in place.
variable_list FsdpUnit::hold(variable_list& grads, const torch::autograd::Node& node) {
  variable_list held(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto* accumulation = accumulation_of(node.next_edge(i));
    if (!grads[i].defined() || accumulation == nullptr || !holds(accumulation)) continue;
    const at::Tensor& there = accumulation->variable.grad();
    if (there.defined() && !is_unsent(there, *row_[i].kept)) continue;
    const DTensorMeta& meta = meta_of(grads[i]);
    const bool is_of_unit = meta.part.state() == LocalPart::State::kGatheredOnUse;
    if (const at::Tensor& local = meta.local(); is_of_unit || local.storage().use_count() > 1) {
      at::Tensor copy = wrap(local.clone(), meta.spec, context_);
      meta_of(copy).came_from(provenance_of(meta));
      grads[i] = std::move(copy);
    }
    held[i] = with_dtype(std::exchange(grads[i], {}), row_[i].kept->dtype);
  }
  return held;
}

// What was held, to the gradients of this backward: then one reduction brings both. Of which leaves it is.
std::vector<at::Tensor> FsdpUnit::add_held(variable_list& grads,
                                           const torch::autograd::Node& node) {
  std::vector<at::Tensor> leaves;
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto* accumulation = accumulation_of(node.next_edge(i));
    if (accumulation == nullptr) continue;
    const at::Tensor& held = accumulation->variable.grad();
    // Hooks have seen what is held; it goes its own way, at the end.
    if (!is_unsent(held, *row_[i].kept) || has_hooks(accumulation->variable)) continue;
    grads[i] = grads[i].defined() ? held + grads[i] : held;
    leaves.push_back(accumulation->variable);
  }
  return leaves;
}

void FsdpUnit::send_held() {
  if (is_summoned()) return;
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  variable_list held(parameters_.size());
  bool is_any = false;
  for (size_t i = 0; i < held.size(); ++i) {
    const at::Tensor parameter = parameters_[i].tensor();
    if (!parameter.defined() || !is_unsent(parameter.grad(), *row_[i].kept)) continue;
    held[i] = parameter.grad();
    is_any = true;
  }
  if (!is_any) return;
  const variable_list sent = bring_to_rest(std::move(held));
  for (size_t i = 0; i < sent.size(); ++i) {
    if (sent[i].defined()) parameters_[i].tensor().mutable_grad() = sent[i];
  }
}

// Gradients, as DTensors, to where the parameters rest.
variable_list FsdpUnit::bring_to_rest(variable_list&& grads) {
  variable_list result = std::move(grads);
  std::vector<Layout> layouts;
  for (size_t i = 0; i < result.size(); ++i) layouts.push_back(row_[i].kept->layout);
  const std::shared_ptr<UnitGradients> gradients = send(result);
  reshard();
  // What it has not taken.
  const auto become = [&](at::ScalarType dtype) {
    for (at::Tensor& grad : result) {
      if (grad.defined()) grad = with_dtype(grad, dtype);
    }
  };
  become(reduce_dtype());
  bring_to(result, layouts, cause());
  become(row_[0].kept->dtype);
  if (is_elsewhere()) begin_copies(result);
  if (gradients != nullptr) {
    for (const size_t i : gradients->taken()) result[i] = gradients->arriving(i);
  }
  return result;
}

// --- operators -----------------------------------------------------------------------------------

std::optional<at::ScalarType> use_parameters(const c10::OperatorHandle& op, c10::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const absl::Span<IValue> args =
      absl::MakeSpan(*stack).subspan(stack->size() - schema.arguments().size());
  check_not_recorded(op, args);
  const Use use = use_in(op, args);
  if (use == Use::kAtRest) {
    check_stays_on_device(op, args);
    return std::nullopt;
  }
  const FsdpUnit* unit = nullptr;  // of the first
  for (const IValue& arg : args) {
    for_each_of(arg, [&](const at::Tensor& tensor) {
      const Resting* resting = known_to_rest(tensor);
      if (unit == nullptr && resting != nullptr) unit = resting->unit.get();
    });
  }
  if (unit == nullptr || (use == Use::kNotThere && !unit->casts())) return std::nullopt;
  const FsdpUnit::Options& options = unit->options();
  bool has_input = false;
  const auto in_use = [&](const at::Tensor& tensor) {
    at::Tensor result = tensor;
    if (const Resting* resting = resting_of(tensor)) {
      result = resting->unit->used(resting->index, tensor);
    } else if (known_to_rest(tensor) == nullptr) {
      if (!tensor.defined() || tensor.dim() == 0 || is_member(tensor)) return result;
      has_input = true;
    }
    const at::ScalarType dtype = options.param_dtype.value_or(result.scalar_type());
    const bool casts = dtype != result.scalar_type() && is_castable(result.scalar_type());
    return casts ? result.to(dtype) : result;
  };
  for (size_t i = 0; i < args.size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) continue;
    IValue& arg = args[i];
    if (arg.isTensor()) {
      arg = in_use(arg.toTensor());
    } else if (arg.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : arg.toTensorVector()) list.push_back(in_use(tensor));
      arg = std::move(list);
    }
  }
  const bool gives_views = makes_view(schema) || schema.is_mutable();
  return has_input && !gives_views ? options.output_dtype : std::nullopt;
}

void follow_resting(const IValue& result) {
  for_each_of(result, [](const at::Tensor& tensor) {
    const Resting* known = known_to_rest(tensor);
    if (known == nullptr || (resting_of(tensor) == nullptr && !known->unit->casts())) return;
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    set_keys(*impl, impl->key_set().add(kTouched));
  });
}

void check_stays(const at::Tensor& target, const at::Tensor& source) {
  if (in_unit(target) == nullptr) return;
  if (source.defined() && is_dtensor(source.unsafeGetTensorImpl())) {  // by itself
    const DTensorMeta &has = meta_of(target), &given = meta_of(source);
    if (given.family == has.family && given.spec == has.spec) return;
  }
  moved(target,
        "its data would be replaced (module->to(), set_data(), torch::load(): load a file into a "
        "plain model, and copy from that)");
}

void follow_unit(const FsdpState& state, DTensorMeta& result) {
  const at::Tensor& local = result.part.get();
  if (!local.defined() || !local.has_storage()) return;
  FsdpUnit* unit = state.unit_of(local.storage().unsafeGetStorageImpl());
  if (unit == nullptr) return;
  result.part = LocalPart(std::make_shared<ViewOfUnit>(unit->shared_from_this(), local));
}

}  // namespace shardweave::dtensor_internal

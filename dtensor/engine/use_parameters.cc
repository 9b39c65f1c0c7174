// Operators that meet parameters that rest.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/forward_plan.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "torch/csrc/autograd/variable.h"

namespace shardweave::dtensor_internal {
namespace {

using c10::IValue;

[[noreturn]] void moved(const at::Tensor& tensor, std::string_view how) {
  throw Error(kFullyShard, absl::FailedPreconditionError(absl::StrCat(
                               "the parameter '", std::string(parameter_of(meta_of(tensor))),
                               "' rests in its unit's memory, and ", std::string(how),
                               "; do that before the module is fully sharded")));
}

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

// Of operators that write: those that give a tensor another shape, or other memory.
bool reshapes_in_place(std::string_view name) {
  constexpr std::string_view kNames[] = {
      "aten::resize_",   "aten::resize_as_",  "aten::set_",       "aten::t_",
      "aten::squeeze_",  "aten::unsqueeze_",  "aten::transpose_", "aten::swapaxes_",
      "aten::swapdims_", "aten::as_strided_",
  };
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

// `to()` that gives the parameter itself, or a copy of it elsewhere: module->to() asks for that. Not the
// dtype in which it rests, where a forward asks for that and operators see another: a router that
// computes in float32 what all others do in bfloat16.
bool keeps_dtype(const c10::OperatorHandle& op, absl::Span<const IValue> args,
                 const Resting& resting) {
  if (op.operator_name().name != "aten::to") return false;
  const at::ScalarType kept = resting.spec->dtype;
  const at::ScalarType seen = resting.unit->options().param_dtype.value_or(kept);
  std::optional<at::ScalarType> asked;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& name = op.schema().arguments()[i].name();
    if (name == "dtype" && args[i].isInt()) asked = args[i].toScalarType();
    if (name == "other" && args[i].isTensor()) asked = args[i].toTensor().scalar_type();
  }
  if (!asked.has_value()) return true;
  const at::Tensor& self = args[0].toTensor();
  return asked == kept &&
         (seen == kept || !is_training() || resting_of(self) == nullptr || !self.requires_grad());
}

// `p.detach().clone()`: an average of weights begins so, or what is to be restored.
bool copies_detached(const c10::OperatorHandle& op, absl::Span<const IValue> args) {
  if (op.operator_name().name != "aten::clone") return false;
  const at::Tensor& tensor = args[0].toTensor();
  const Resting* resting = resting_of(tensor);
  return resting != nullptr && !tensor.requires_grad() &&
         !resting->unit->is_parameter(resting->index, tensor);
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
  if (arg.isTensorList()) {
    for (const at::Tensor& tensor : arg.toTensorVector()) f(tensor);
  }
  if (arg.isOptionalTensorList()) {  // index()'s
    for (const std::optional<at::Tensor>& tensor : arg.toOptionalTensorVector()) {
      if (tensor.has_value()) f(*tensor);
    }
  }
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
  if (works_at_rest(op.operator_name().name) || keeps_dtype(op, args, *first) ||
      copies_detached(op, args)) {
    return Use::kAtRest;
  }
  bool alone = true, with_its_like = false, with_members = true, is_rounded = false;
  for (const IValue& arg : args) {
    for_each_of(arg, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (const Resting* its = resting_of(tensor)) {
        const FsdpUnit::Options& options = its->unit->options();
        is_rounded |= options.param_dtype.value_or(its->spec->dtype) != its->spec->dtype;
        with_members &= !options.compute_device.has_value();
        return;
      }
      if (is_dtensor(tensor.unsafeGetTensorImpl())) {
        const Spec& spec = *meta_of(tensor).spec;
        with_its_like |= spec.layout == first->spec->layout && spec.sizes == first->spec->sizes;
        with_members &= is_member(tensor);
        alone = false;
      } else {
        with_members &= tensor.dim() == 0;
        alone &= tensor.dim() == 0;
      }
    });
  }
  // An optimizer's: `grad.add(parameter, weight_decay)`, or a copy of it.
  if (with_its_like) return Use::kAtRest;
  if (is_training() || makes_view(schema)) return Use::kWhole;
  // An average of weights in a buffer, or in parameters that do not rest: `teacher.lerp_(parameter, 0.1)`
  // is of numbers that mixed precision has not rounded. (Where it rounds none the unit is gathered.)
  const bool averages = is_rounded && with_members && schema.is_mutable();
  return alone || averages ? Use::kAtRest : Use::kWhole;
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

at::Tensor FsdpUnit::used(size_t index, const at::Tensor& handle) {
  // Here, not where it is gathered, which a backward within this one (checkpoint()) may not need: its end
  // is not this one's.
  if (FsdpState::in_backward_now()) state_->end_with_backward();
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
  const bool is_conversion = op.operator_name().name == "aten::to";
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
    if (is_conversion && i > 0) continue;  // to(other): what is asked for
    IValue& arg = args[i];
    if (arg.isTensor()) {
      arg = in_use(arg.toTensor());
    } else if (arg.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : arg.toTensorVector()) list.push_back(in_use(tensor));
      arg = std::move(list);
    } else if (arg.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : arg.toOptionalTensorVector()) {
        list.push_back(tensor.has_value() ? std::optional(in_use(*tensor)) : std::nullopt);
      }
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

#include "shardweave/dtensor/engine/forward_plan.h"

#include <algorithm>
#include <utility>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "c10/core/GradMode.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "c10/util/Exception.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/deferred.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/library.h"

namespace shardweave::dtensor_internal {
namespace {

using c10::IValue;

constexpr c10::DispatchKey kObserved = c10::DispatchKey::DeferredInit;

// Operators that are a layer's: they take an input and a weight. Of all others that a weight takes
// part in (weight decay, a norm, printing) nobody can say what a plan would mean for them.
constexpr std::string_view kLayers[] = {
    "_convolution",
    "einsum",
    "_fused_rms_norm",
    "addmm",
    "addmv",
    "baddbmm",
    "batch_norm",
    "bilinear",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
    "embedding",
    "embedding_bag",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "matmul",
    "mm",
    "mul",
    "mv",
    "native_batch_norm",
    "native_group_norm",
    "native_layer_norm",
    "prelu",
    "rms_norm",
};

constexpr std::string_view kAtenPrefix = "aten::";

// "aten::linear".
bool is_torch_layer(std::string_view name) {
  if (!name.starts_with(kAtenPrefix)) return false;
  name.remove_prefix(kAtenPrefix.size());
  return std::find(std::begin(kLayers), std::end(kLayers), name) != std::end(kLayers);
}

bool is_layer(const c10::OperatorHandle& op, const MeshContext& context) {
  return context.decisions.is_plugged_in(op.operator_name()) ||
         is_torch_layer(op.operator_name().name);
}

// Whether it can be in the forward of a layer's module that the plan speaks of.
bool is_forward_of(const ForwardLayouts& layouts, const c10::OperatorHandle& op) {
  if (!layouts.looks_up.has_value()) return true;
  std::string_view name = op.operator_name().name;
  if (!name.starts_with(kAtenPrefix)) return true;  // plugged in
  name.remove_prefix(kAtenPrefix.size());
  return *layouts.looks_up == name.starts_with("embedding");
}

bool is_observed(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kObserved);
}

// The first weight among the arguments that a plan speaks of.
at::Tensor weight_in(absl::Span<const IValue> args) {
  const auto is_weight = [](const at::Tensor& tensor) {
    if (!is_observed(tensor)) return false;
    const DTensorMeta& meta = meta_of(tensor);
    return meta.family != nullptr && meta.family->forward != nullptr;
  };
  for (const IValue& arg : args) {
    if (arg.isTensor() && is_weight(arg.toTensor())) return arg.toTensor();
    if (!arg.isTensorList()) continue;
    for (const at::Tensor& tensor : arg.toTensorVector()) {
      if (is_weight(tensor)) return tensor;
    }
  }
  return {};
}

// The FQN of the module that has it as a parameter or buffer, or has what it is a view of.
std::optional<std::string_view> owner_of(const at::Tensor& tensor) {
  if (!is_dtensor(tensor.unsafeGetTensorImpl())) return std::nullopt;
  const DTensorMeta& meta = meta_of(tensor);
  if (meta.family == nullptr || meta.family->fqn.empty()) return std::nullopt;
  const std::string_view fqn = meta.family->fqn;
  return fqn.substr(0, fqn.rfind('.') == std::string_view::npos ? 0 : fqn.rfind('.'));
}

// A member of the module whose weight is observed, and so no input of it.
bool is_member(const at::Tensor& tensor, std::string_view module) {
  const std::optional<std::string_view> owner = owner_of(tensor);
  return owner.has_value() && *owner == module;
}

// Autograd's own operators, on weights that it has saved.
bool in_backward_of_an_operator() {
  return torch::autograd::get_current_graph_task_id() != -1 &&
         dynamic_cast<const RunsForward*>(torch::autograd::get_current_node().get()) == nullptr;
}

// Results that are views of an argument, not an argument that was written.
bool makes_views(const c10::FunctionSchema& schema) {
  if (schema.name() == "aten::detach") return true;
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& r) {
    return r.alias_info() != nullptr && !r.alias_info()->isWrite();
  });
}

// Of an operator that makes views: whether they are of `weight`, and not of an input that is brought
// into its shape or type (x.view_as(weight), x.to(weight)).
bool makes_views_of(const at::Tensor& weight, absl::Span<const IValue> args) {
  return !args.empty() && args[0].isTensor() && args[0].toTensor().is_same(weight);
}

// `tensor`, made of `family`'s weight (a view of it, or a cast), is observed as that is.
void observe(const at::Tensor& tensor, const ViewFamily& family) {
  if (!tensor.defined() || !is_dtensor(tensor.unsafeGetTensorImpl())) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  DTensorMeta& meta = meta_of(impl);
  if (meta.family == nullptr) meta.family = std::make_shared<ViewFamily>();
  meta.family->fqn = family.fqn;
  meta.family->forward = family.forward;
  set_keys(*impl, impl->key_set().add(kObserved));
}

void observe(const IValue& value, const ViewFamily& family) {
  if (value.isTensor()) observe(value.toTensor(), family);
  if (!value.isTensorList()) return;
  for (const at::Tensor& tensor : value.toTensorVector()) observe(tensor, family);
}

// Of a parameter that rests, copies of the handle do so, too.
void follow_results(const c10::FunctionSchema& schema, const c10::Stack& stack) {
  for (size_t i = stack.size() - schema.returns().size(); i < stack.size(); ++i) {
    follow_resting(stack[i]);
  }
}

// Whether anything that is no number comes from outside of the module.
bool has_input(absl::Span<const IValue> args, std::string_view module) {
  const auto is_input = [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.dim() > 0 && !is_member(tensor, module);
  };
  return std::any_of(args.begin(), args.end(), [&](const IValue& arg) {
    if (arg.isTensor()) return is_input(arg.toTensor());
    if (arg.isOptionalTensorList()) {
      const std::vector<std::optional<at::Tensor>> tensors = arg.toOptionalTensorVector();
      return std::any_of(tensors.begin(), tensors.end(), [&](const auto& tensor) {
        return tensor.has_value() && is_input(*tensor);
      });
    }
    if (!arg.isTensorList()) return false;
    const std::vector<at::Tensor> tensors = arg.toTensorVector();
    return std::any_of(tensors.begin(), tensors.end(), is_input);
  });
}

// What the plan says of the value with this index and name; null: nothing.
const ForwardLayouts::Value* value_of(const ForwardLayouts& layouts, Direction direction, int index,
                                      std::string_view name) {
  const auto& values = direction == Direction::kInput ? layouts.inputs : layouts.outputs;
  for (const ForwardLayouts::Value& value : values) {
    const int* at = std::get_if<int>(&value.slot);
    if (at != nullptr ? *at == index : std::get<std::string>(value.slot) == name) return &value;
  }
  return nullptr;
}

// `tensor` where the plan wants it: as it was brought there for a sibling, if it was. Nobody but
// operators of layers sees the result, and those do not write it.
at::Tensor laid_out_input(const std::shared_ptr<const ForwardLayouts>& layouts, int index,
                          std::string_view name, const at::Tensor& tensor,
                          const std::shared_ptr<MeshContext>& context) {
  const auto lay_out = [&] {
    return laid_out(*layouts, Direction::kInput, index, name, tensor, context);
  };
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  DTensorMeta* meta = is_dtensor(impl) ? &meta_of(impl) : nullptr;
  if (const std::shared_ptr<SharedInput> last = layouts->shared_last->lock();
      last != nullptr && (meta == nullptr || meta->shared != last)) {
    last->brought.reset();  // they have had it
  }
  const ForwardLayouts::Value* value = value_of(*layouts, Direction::kInput, index, name);
  // What is brought of a leaf that requires grad would lead back to it.
  if (layouts->siblings < 2 || index != 0 || value == nullptr || meta == nullptr ||
      tensor.is_inference() || is_parameter(impl)) {
    return lay_out();
  }
  if (meta->family != nullptr && meta->family->handed_out) {
    meta->shared.reset();
    return lay_out();
  }
  std::shared_ptr<SharedInput> shared = std::exchange(meta->shared, nullptr);
  const auto version = static_cast<uint32_t>(tensor._version());
  const int64_t writes = meta->family == nullptr ? 0 : meta->family->writes;
  const bool recorded = c10::GradMode::is_enabled() && tensor.requires_grad();
  if (shared != nullptr && shared->brought.defined() && shared->version == version &&
      shared->writes == writes && shared->target == value->target &&
      shared->brought.requires_grad() == recorded &&
      std::find(shared->readers.begin(), shared->readers.end(), layouts) ==
          shared->readers.end()) {  // else it is another forward
    value->met = true;
    shared->readers.push_back(layouts);
    if (shared->readers.size() < layouts->siblings) meta->shared = shared;
    return shared->brought;
  }
  shared.reset();  // before there is another
  at::Tensor brought = lay_out();
  if (!brought.is_same(tensor)) {
    auto sharing = std::make_shared<SharedInput>(SharedInput{.brought = brought,
                                                             .version = version,
                                                             .writes = writes,
                                                             .target = value->target,
                                                             .readers = {layouts}});
    *layouts->shared_last = sharing;
    meta_of(impl).shared = std::move(sharing);
  }
  return brought;
}

std::vector<std::string> unmet(const ForwardLayouts& layouts) {
  std::vector<std::string> names;
  for (const auto* values : {&layouts.inputs, &layouts.outputs}) {
    for (const ForwardLayouts::Value& value : *values) {
      if (!value.met) names.push_back(absl::StrCat("'", value.name, "'"));
    }
  }
  return names;
}

// On the first rank, and once.
void warn_of_unmet(const ForwardLayouts& layouts, const DTensorMeta& weight,
                   const std::vector<std::string>& names) {
  if (std::exchange(layouts.said, true)) return;
  const Coordinate& at = weight.context->coordinate();
  if (std::any_of(at.begin(), at.end(), [](int64_t c) { return c != 0; })) return;
  const std::string parameter(parameter_of(weight));
  const std::string why =
      layouts.passed_by.empty()
          ? absl::StrCat("no layer's operator with '", parameter, "' has such a value")
          : absl::StrCat("'", parameter, "' was met in ", layouts.passed_by,
                         ", which is no layer's operator");
  c10::warn(c10::Warning(
      c10::UserWarning(), c10::SourceLocation{"parallelize_module", __FILE__, __LINE__},
      absl::StrCat("shardweave: the plan's ", absl::StrJoin(names, ", "),
                   names.size() == 1 ? " has" : " have", " not been applied: ", why,
                   "; make its module as Hooked<Impl> (hooked.h), or redistribute in its forward"),
      /*verbatim=*/false));
}

// The weight takes part in an operator for which a plan means nothing. Where that happens again,
// and still nothing has been met, a step has gone by.
void note_passed_by(const c10::OperatorHandle& op, const at::Tensor& weight,
                    const ForwardLayouts& layouts) {
  if (layouts.said) return;
  const std::vector<std::string> names = unmet(layouts);
  if (names.size() != layouts.inputs.size() + layouts.outputs.size()) return;
  if (layouts.passed_by.empty()) {
    layouts.passed_by = op.operator_name().name;
  } else if (layouts.passed_by == op.operator_name().name) {
    warn_of_unmet(layouts, meta_of(weight), names);
  }
}

void run_layer(const c10::OperatorHandle& op, const std::shared_ptr<const ForwardLayouts>& layouts,
               std::string_view module, const std::shared_ptr<MeshContext>& context,
               c10::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const absl::Span<IValue> args =
      absl::MakeSpan(*stack).subspan(stack->size() - schema.arguments().size());
  int index = 0;
  const auto lay_out = [&](const at::Tensor& tensor, size_t arg) {
    if (!tensor.defined() || is_member(tensor, module)) return tensor;
    return laid_out_input(layouts, index++, schema.arguments()[arg].name(), tensor, context);
  };
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].isTensor()) {
      args[i] = lay_out(args[i].toTensor(), i);
    } else if (args[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : args[i].toTensorVector()) list.push_back(lay_out(tensor, i));
      args[i] = std::move(list);
    }
  }
  op.callBoxed(stack);
  const absl::Span<IValue> results =
      absl::MakeSpan(*stack).subspan(stack->size() - schema.returns().size());
  index = 0;
  for (IValue& result : results) {
    if (!result.isTensor() || !result.toTensor().defined()) continue;
    result = laid_out(*layouts, Direction::kOutput, index++, "", result.toTensor(), context);
  }
}

void cast_results(const c10::FunctionSchema& schema, at::ScalarType dtype, c10::Stack* stack) {
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    IValue& result = (*stack)[i];
    if (!result.isTensor() || !result.toTensor().defined()) continue;
    if (is_castable(result.toTensor().scalar_type())) result = result.toTensor().to(dtype);
  }
}

// With the parameters that it uses.
void run_observed(const c10::OperatorHandle& op, c10::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const absl::Span<const IValue> args =
      absl::MakeConstSpan(*stack).subspan(stack->size() - schema.arguments().size());
  const at::Tensor weight = weight_in(args);  // held: the operator may end the last handle
  if (!weight.defined()) {
    op.callBoxed(stack);
    if (makes_views(schema)) follow_results(schema, *stack);
    return;
  }
  const std::shared_ptr<ViewFamily> family = meta_of(weight).family;
  if (schema.is_mutable() || in_backward_of_an_operator()) {
    op.callBoxed(stack);
    return;
  }
  if (makes_views(schema)) {
    const bool of_weight = makes_views_of(weight, args);
    op.callBoxed(stack);
    if (!of_weight) return;
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
      observe((*stack)[i], *family);
    }
    return;
  }
  const std::string module(owner_of(weight).value_or(""));
  const bool layer = is_layer(op, *meta_of(weight).context) && is_forward_of(*family->forward, op);
  if (!layer || !has_input(args, module)) {
    if (!layer && has_input(args, module)) note_passed_by(op, weight, *family->forward);
    op.callBoxed(stack);
    return;
  }
  const std::shared_ptr<const ForwardLayouts> layouts = family->forward;
  const std::shared_ptr<MeshContext> context = meta_of(weight).context;
  run_layer(op, layouts, module, context, stack);
}

void dispatch_observed(const c10::OperatorHandle& op, c10::Stack* stack) {
  if (record_deferred(op, stack)) return;
  const c10::impl::ExcludeDispatchKeyGuard no_longer(kObserved);
  const c10::FunctionSchema& schema = op.schema();
  const absl::Span<const IValue> args =
      absl::MakeConstSpan(*stack).subspan(stack->size() - schema.arguments().size());
  // Its data is replaced (module->to()), and with that what it knew; it stays the module's.
  if (schema.name() == "aten::set_data" || schema.name() == "aten::set_") {
    const at::Tensor target = args[0].toTensor();
    if (args.size() > 1 && args[1].isTensor()) check_stays(target, args[1].toTensor());
    if (schema.name() == "aten::set_data" && in_unit(target) != nullptr) {  // by itself
      torch::jit::drop(*stack, schema.arguments().size());
      return;
    }
    const std::shared_ptr<ViewFamily> family =
        is_observed(target) ? meta_of(target).family : std::shared_ptr<ViewFamily>();
    op.callBoxed(stack);
    if (family != nullptr) {
      const bool is_parameter = family->parameter != nullptr;
      observe(target, *family);
      DTensorMeta& meta = meta_of(target);
      if (is_parameter && meta.family->parameter == nullptr) meta.family->parameter = meta.spec;
    }
    return;
  }
  const std::optional<at::ScalarType> output = use_parameters(op, stack);
  run_observed(op, stack);
  if (output.has_value() && !in_backward_of_an_operator()) cast_results(schema, *output, stack);
}

bool takes_tensors(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) return true;
  if (const auto optional = type->cast<c10::OptionalType>()) {
    return takes_tensors(optional->getElementType());
  }
  const auto list = type->cast<c10::ListType>();
  return list != nullptr && takes_tensors(list->getElementType());
}

Layout layout_of_target(const ForwardTarget& target, const Layout& now, int dims) {
  Placements placements = now.placements();
  for (size_t i = 0; i < placements.size(); ++i) {
    if (target.placements[i].has_value()) placements[i] = *target.placements[i];
  }
  Layout wanted = value_or_throw(
      Layout::create(std::move(placements), target.order.empty() ? now.order() : target.order));
  return value_or_throw(with_dims_of(wanted, dims));
}

}  // namespace

thread_local int RecordedLater::depth_ = 0;

bool is_training() {
  return c10::GradMode::is_enabled() || RecordedLater::is_so();
}

std::set<std::string> layer_arguments() {
  std::set<std::string> names;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.starts_with(kAtenPrefix) && !is_torch_layer(name.name)) continue;
    const std::optional<c10::OperatorHandle> op = dispatcher.findSchema(name);
    if (!op.has_value()) continue;
    for (const c10::Argument& argument : op->schema().arguments()) {
      if (!argument.is_out() && takes_tensors(argument.type())) names.insert(argument.name());
    }
  }
  return names;
}

at::Tensor laid_out(const ForwardLayouts& layouts, Direction direction, int index,
                    std::string_view name, const at::Tensor& tensor,
                    const std::shared_ptr<MeshContext>& context) {
  const ForwardLayouts::Value* value = value_of(layouts, direction, index, name);
  if (value == nullptr || !tensor.defined()) return tensor;
  value->met = true;
  try {
    const MeshPtr mesh(context, &context->connected_mesh());
    at::Tensor on_mesh = tensor;
    if (!is_dtensor(tensor.unsafeGetTensorImpl())) {
      if (const std::string why = not_dense(tensor); !why.empty()) {
        throw Error(absl::InvalidArgumentError(why));
      }
      // Compared with the other ranks' at once where this value first is one, later with others.
      PlainTensors& plain = context->plain_tensors;
      const uint64_t place = absl::HashOf(std::string_view(value->name), tensor.scalar_type());
      const bool is_new = !plain.has_met_at(place);
      plain.meet_at(place);
      plain.put_off({}, tensor);
      if (is_new) settle_plain_tensors(*context);
      on_mesh = from_local(tensor, mesh, Placements(mesh->mesh().ndim()), tensor.sizes().vec(),
                           kNoSource);
    } else if (meta_of(tensor).context != context) {
      throw Error(absl::InvalidArgumentError(absl::StrCat("the tensor lies on another mesh, ",
                                                          describe(tensor), "; the plan's is ",
                                                          context->mesh().to_string())));
    }
    const Layout now = layout_of(on_mesh);
    const Layout wanted = layout_of_target(value->target, now, static_cast<int>(on_mesh.dim()));
    return wanted == now ? on_mesh : redistribute(on_mesh, wanted, layouts.where);
  } catch (const Error& error) {
    throw Error(absl::Status(
        error.status().code(),
        absl::StrCat("the plan's '", value->name, "': ", std::string(error.status().message()))));
  }
}

void observe_forward(const at::Tensor& member, std::shared_ptr<const ForwardLayouts> layouts) {
  const DTensorMeta& meta = meta_of(member);
  if (meta.family == nullptr) meta.family = std::make_shared<ViewFamily>();
  meta.family->forward = std::move(layouts);
  observe(member, *std::shared_ptr<ViewFamily>(meta.family));
}

void warn_of_unmet_plan(const at::Tensor& weight) {
  const DTensorMeta& meta = meta_of(weight);
  if (meta.family == nullptr || meta.family->forward == nullptr || meta.family->forward->said)
    return;
  const std::vector<std::string> names = unmet(*meta.family->forward);
  if (!names.empty()) warn_of_unmet(*meta.family->forward, meta, names);
}

}  // namespace shardweave::dtensor_internal

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<
             &shardweave::dtensor_internal::dispatch_observed>());
}

#include "shardweave/dtensor/engine/forward_plan.h"

#include <algorithm>
#include <utility>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/adopt.h"
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

bool is_layer(const c10::OperatorHandle& op) {
  constexpr std::string_view kAten = "aten::";
  std::string_view name = op.operator_name().name;
  if (!name.starts_with(kAten)) return false;
  name.remove_prefix(kAten.size());
  return std::find(std::begin(kLayers), std::end(kLayers), name) != std::end(kLayers);
}

bool is_observed(const IValue& value) {
  return value.isTensor() && value.toTensor().key_set().has(kObserved);
}

// A parameter or buffer of a module, or a view of one.
bool belongs_to_module(const at::Tensor& tensor) {
  if (!is_dtensor(tensor.unsafeGetTensorImpl())) return false;
  const DTensorMeta& meta = meta_of(tensor);
  return meta.family != nullptr && !meta.family->fqn.empty();
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

struct Access : c10::TensorImpl {
  static auto keys() { return &Access::key_set_; }
};

void mark(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_dtensor(tensor.unsafeGetTensorImpl())) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->*Access::keys() = impl->key_set().add(kObserved);
}

void mark(const IValue& value) {
  if (value.isTensor()) mark(value.toTensor());
  if (!value.isTensorList()) return;
  for (const at::Tensor& tensor : value.toTensorVector()) mark(tensor);
}

void run_layer(const c10::OperatorHandle& op, const ForwardLayouts& layouts,
               const std::shared_ptr<MeshContext>& context, c10::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const absl::Span<IValue> args =
      absl::MakeSpan(*stack).subspan(stack->size() - schema.arguments().size());
  int index = 0;
  for (size_t i = 0; i < args.size(); ++i) {
    if (!args[i].isTensor() || !args[i].toTensor().defined()) continue;
    if (belongs_to_module(args[i].toTensor())) continue;
    args[i] = laid_out(layouts, Direction::kInput, index++, schema.arguments()[i].name(),
                       args[i].toTensor(), context);
  }
  op.callBoxed(stack);
  const absl::Span<IValue> results =
      absl::MakeSpan(*stack).subspan(stack->size() - schema.returns().size());
  index = 0;
  for (IValue& result : results) {
    if (!result.isTensor() || !result.toTensor().defined()) continue;
    result = laid_out(layouts, Direction::kOutput, index++, "", result.toTensor(), context);
  }
}

void dispatch_observed(const c10::OperatorHandle& op, c10::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_longer(kObserved);
  const c10::FunctionSchema& schema = op.schema();
  const absl::Span<const IValue> args =
      absl::MakeConstSpan(*stack).subspan(stack->size() - schema.arguments().size());
  const auto weight = std::find_if(args.begin(), args.end(), is_observed);
  if (weight == args.end() || schema.is_mutable() || in_backward_of_an_operator()) {
    op.callBoxed(stack);
    return;
  }
  if (makes_views(schema)) {
    op.callBoxed(stack);
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
      mark((*stack)[i]);
    }
    return;
  }
  const DTensorMeta& meta = meta_of(weight->toTensor());
  // The operator may end the weight's last handle.
  const std::shared_ptr<const ForwardLayouts> layouts =
      meta.family == nullptr ? nullptr : meta.family->forward;
  if (layouts == nullptr || !is_layer(op)) {
    op.callBoxed(stack);
    return;
  }
  run_layer(op, *layouts, std::shared_ptr<MeshContext>(meta.context), stack);
}

Layout layout_of_target(const ForwardTarget& target, const Layout& now) {
  Placements placements = now.placements();
  for (size_t i = 0; i < placements.size(); ++i) {
    if (target.placements[i].has_value()) placements[i] = *target.placements[i];
  }
  return value_or_throw(Layout::create(std::move(placements), target.order));
}

}  // namespace

at::Tensor laid_out(const ForwardLayouts& layouts, Direction direction, int index,
                    std::string_view name, const at::Tensor& tensor,
                    const std::shared_ptr<MeshContext>& context) {
  const auto& values = direction == Direction::kInput ? layouts.inputs : layouts.outputs;
  const auto value =
      std::find_if(values.begin(), values.end(), [&](const ForwardLayouts::Value& v) {
        const int* at = std::get_if<int>(&v.slot);
        return at != nullptr ? *at == index : std::get<std::string>(v.slot) == name;
      });
  if (value == values.end() || !tensor.defined()) return tensor;
  try {
    const MeshPtr mesh(context, &context->connected_mesh());
    at::Tensor on_mesh = tensor;
    if (!is_dtensor(tensor.unsafeGetTensorImpl())) {
      if (const std::string why = not_dense(tensor); !why.empty()) {
        throw Error(absl::InvalidArgumentError(why));
      }
      context->plain_tensors.put_off({}, tensor);
      on_mesh = from_local(tensor, mesh, Placements(mesh->mesh().ndim()), tensor.sizes().vec());
    }
    const Layout now = layout_of(on_mesh);
    const Layout wanted = layout_of_target(value->target, now);
    return wanted == now ? on_mesh : redistribute(on_mesh, wanted);
  } catch (const Error& error) {
    throw Error(absl::Status(
        error.status().code(),
        absl::StrCat("the plan's '", value->name, "': ", std::string(error.status().message()))));
  }
}

void observe_forward(const at::Tensor& weight, std::shared_ptr<const ForwardLayouts> layouts) {
  const DTensorMeta& meta = meta_of(weight);
  if (meta.family == nullptr) meta.family = std::make_shared<ViewFamily>();
  meta.family->forward = std::move(layouts);
  mark(weight);
}

}  // namespace shardweave::dtensor_internal

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<
             &shardweave::dtensor_internal::dispatch_observed>());
}

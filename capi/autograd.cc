// Gradients, and functions of the host with derivatives of their own.
#include <algorithm>

#include "ATen/ExpandUtils.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "shardweave/capi/callbacks.h"
#include "shardweave/capi/frozen.h"
#include "shardweave/capi/handles.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/activation_checkpoint.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/custom_class.h"

namespace shardweave::capi {
namespace {

using dtensor_internal::MeshContext;

// --- backward ------------------------------------------------------------------------------------

struct BackwardOptions {
  bool retain_graph;
  bool create_graph;
  bool allow_unused;
};

BackwardOptions backward_options(const swv_backward_options* given) {
  const swv_backward_options o =
      options<swv_backward_options>(given, SWV_BACKWARD_OPTIONS_INIT, "options");
  const bool create = flag(o.create_graph, "options.create_graph");
  return {flag(o.retain_graph, "options.retain_graph") || create, create,
          flag(o.allow_unused, "options.allow_unused")};
}

// Null: it is plain.
std::shared_ptr<MeshContext> mesh_of(const at::Tensor& t) {
  return is_dtensor(t) ? dtensor_internal::meta_of(t).context : nullptr;
}

// The gradient of what lies on a mesh lies there, too: a plain one is the same on all ranks, which are
// compared when a value leaves the mesh.
at::Tensor gradient_on(const std::shared_ptr<MeshContext>& mesh, const at::Tensor& grad) {
  if (mesh == nullptr || !grad.defined() || is_dtensor(grad)) return grad;
  return dtensor_internal::as_dtensor(grad, mesh);
}

void backward(const swv_tensor* handle, const swv_tensor* gradient,
              const swv_backward_options* options) {
  const at::Tensor& t = tensor(handle, "tensor");
  const BackwardOptions o = backward_options(options);
  const at::Tensor with = gradient == nullptr ? at::Tensor() : tensor(gradient, "gradient");
  const CallMode mode(SWV_MODE_GRAD, "mode");
  torch::autograd::backward({t}, {gradient_on(mesh_of(t), with)}, o.retain_graph, o.create_graph);
}

void gradients(const swv_tensor* const* outputs, size_t num_outputs,
               const swv_tensor* const* inputs, size_t num_inputs,
               const swv_tensor* const* grad_outputs, const swv_backward_options* options,
               swv_tensor** out_grads) {
  if (num_inputs != 0) out(out_grads, "out_grads");
  if (num_outputs == 0) fail_argument("num_outputs", "is 0; wanted 1 or more");
  if (num_inputs == 0) fail_argument("num_inputs", "is 0; wanted 1 or more");
  const BackwardOptions o = backward_options(options);
  const std::vector<at::Tensor> of = tensors(outputs, num_outputs, "outputs");
  std::vector<at::Tensor> with(num_outputs);
  if (grad_outputs != nullptr)
    with = tensors_or_undefined(grad_outputs, num_outputs, "grad_outputs");
  const std::vector<at::Tensor> by = tensors(inputs, num_inputs, "inputs");
  const CallMode mode(SWV_MODE_GRAD, "mode");
  for (size_t i = 0; i < num_outputs; ++i) with[i] = gradient_on(mesh_of(of[i]), with[i]);
  write_tensors(torch::autograd::grad(of, by, with, o.retain_graph, o.create_graph, o.allow_unused),
                out_grads);
}

void set_grad(const swv_tensor* handle, const swv_tensor* grad) {
  const at::Tensor& t = tensor(handle, "tensor");
  if (grad == nullptr) {
    t.mutable_grad() = at::Tensor();
    return;
  }
  const at::Tensor& g = tensor(grad, "grad");
  if (g.sizes() != t.sizes() || g.scalar_type() != t.scalar_type() ||
      is_dtensor(g) != is_dtensor(t)) {
    fail_argument("grad", "differs from the tensor in its sizes, dtype, or in being sharded");
  }
  t.mutable_grad() = g;
}

// --- functions of the host -----------------------------------------------------------------------

// Drops the user data when nothing needs it any more.
class HostFunction : public torch::CustomClassHolder {
 public:
  explicit HostFunction(const swv_function& function)
      : function_(function), name_(function.name == nullptr ? "function" : function.name) {}
  ~HostFunction() override {
    if (function_.drop != nullptr) function_.drop(function_.user_data);
  }
  const swv_function& operator*() const { return function_; }
  const std::string& name() const { return name_; }

 private:
  const swv_function function_;
  const std::string name_;
};
// Drops the user data of what nothing has taken, for want of memory or because it is wrong.
struct Drop {
  const swv_function* function;
  ~Drop() {
    if (function != nullptr && function->drop != nullptr) function->drop(function->user_data);
  }
};
using HostFunctionPtr = c10::intrusive_ptr<HostFunction>;

// Of the inputs of a call: null where one is plain.
struct InputMeshes : torch::CustomClassHolder {
  std::vector<std::shared_ptr<MeshContext>> of;
};

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct HostNode : torch::autograd::Function<HostNode> {
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs,
                               const HostFunctionPtr& function, size_t num_outputs) {
    const Borrowed borrowed(inputs.vec());
    Written outputs(num_outputs, borrowed);
    const CallContext context({.is_forward = true});
    const swv_function& f = **function;
    const swv_function_call call = function_call(context.get(), borrowed, outputs);
    const std::string its = str_cat(function->name(), ".forward");
    throw_if_failed(f.forward(f.user_data, &call), its);
    variable_list result = outputs.take("outputs");
    check_written(result, its);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(context.get()->saved);
    ctx->saved_data["function"] = c10::IValue::make_capsule(function);
    c10::List<std::vector<int64_t>> sizes;
    for (const at::Tensor& input : inputs) {
      sizes.push_back(input.is_nested() ? std::vector<int64_t>{-1} : input.sizes().vec());
    }
    ctx->saved_data["input_sizes"] = sizes;
    auto meshes = c10::make_intrusive<InputMeshes>();
    for (const at::Tensor& input : inputs) meshes->of.push_back(mesh_of(input));
    ctx->saved_data["input_meshes"] = c10::IValue::make_capsule(std::move(meshes));
    return result;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto function =
        c10::static_intrusive_pointer_cast<HostFunction>(ctx->saved_data["function"].toCapsule());
    const swv_function& f = **function;
    if (f.backward == nullptr) {
      fail(absl::StatusCode::kUnimplemented, str_cat(function->name(), " has no backward"));
    }
    const c10::IValue& sizes = ctx->saved_data["input_sizes"];
    const size_t num_inputs = sizes.toListRef().size();
    const Borrowed borrowed(grads);
    Written written(num_inputs, borrowed);
    const CallContext context({.saved = ctx->get_saved_variables()});
    const swv_function_call call = function_call(context.get(), borrowed, written);
    const std::string its = str_cat(function->name(), ".backward");
    throw_if_failed(f.backward(f.user_data, &call), its);
    variable_list result = written.take("outputs");
    const auto meshes = c10::static_intrusive_pointer_cast<InputMeshes>(
        ctx->saved_data["input_meshes"].toCapsule());
    for (size_t i = 0; i < num_inputs; ++i) {
      const std::vector<int64_t> wanted = sizes.toListRef()[i].toIntVector();
      if (!result[i].defined() || !ctx->needs_input_grad(i) || wanted == std::vector<int64_t>{-1}) {
        continue;
      }
      // What is larger autograd sums up.
      if (at::is_expandable_to(wanted, result[i].sizes())) continue;
      fail(absl::StatusCode::kInvalidArgument,
           str_cat(its, ": outputs[", i, "] has shape [", absl::StrJoin(result[i].sizes(), ", "),
                   "]; wanted that of the input, [", absl::StrJoin(wanted, ", "), "]"));
    }
    for (size_t i = 0; i < num_inputs; ++i) {
      if (ctx->needs_input_grad(i)) result[i] = gradient_on(meshes->of[i], result[i]);
    }
    result.resize(num_inputs + 2);  // the function and the number of outputs have none
    return result;
  }
};

HostFunctionPtr host_function(const swv_function* given) {
  const swv_function f =
      known_options<swv_function>(out(given, "function"), SWV_FUNCTION_INIT, "function");
  Drop drop{&f};
  check_options(*given, f, "function");
  auto owned = c10::make_intrusive<HostFunction>(f);
  drop.function = nullptr;
  text_or(f.name, "", "function.name");
  if (f.forward == nullptr) fail_null("function.forward");
  return owned;
}

void check_outputs(swv_tensor** out_outputs, size_t num_outputs) {
  if (num_outputs == 0 || num_outputs > 1024) {
    fail_argument("num_outputs", str_cat("is ", num_outputs, "; wanted 1 to 1024"));
  }
  out(out_outputs, "out_outputs");
}

void apply(const swv_function* function, swv_grad_mode mode, const swv_tensor* const* inputs,
           size_t num_inputs, swv_tensor** out_outputs, size_t num_outputs) {
  const HostFunctionPtr owned = host_function(function);
  check_outputs(out_outputs, num_outputs);
  const std::vector<at::Tensor> given = tensors(inputs, num_inputs, "inputs");
  const CallMode call_mode(mode, "mode");
  write_tensors(HostNode::apply(at::TensorList(given), owned, num_outputs), out_outputs);
}

void check_is_function(const swv_function_context& context) {
  if (context.original != nullptr) {
    fail_argument("context", "is of a patch, which has no backward of its own to save for");
  }
}

// --- activation checkpointing --------------------------------------------------------------------

// A part of the host's forward, whose user data it drops at its end.
class HostSegment {
 public:
  explicit HostSegment(const swv_segment& segment)
      : segment_(segment), name_(segment.name == nullptr ? "segment" : segment.name) {}
  ~HostSegment() {
    if (segment_.drop != nullptr) segment_.drop(segment_.user_data);
  }
  HostSegment(const HostSegment&) = delete;
  HostSegment& operator=(const HostSegment&) = delete;

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, size_t num_outputs) const {
    const Borrowed borrowed(inputs);
    Written outputs(num_outputs, borrowed);
    const swv_function_call call = function_call(nullptr, borrowed, outputs);
    // Recorded only when it runs for its gradients.
    const std::string its =
        str_cat(name_, recording_of(call.mode) == SWV_MODE_GRAD ? ".forward, run again in backward"
                                                                : ".forward");
    throw_if_failed(segment_.forward(segment_.user_data, &call), its);
    std::vector<at::Tensor> result = outputs.take("outputs");
    check_written(result, its);
    return result;
  }

 private:
  const swv_segment segment_;
  const std::string name_;
};

void checkpoint(const swv_segment* segment, swv_grad_mode mode, const swv_tensor* const* inputs,
                size_t num_inputs, swv_tensor** out_outputs, size_t num_outputs) {
  const swv_segment s =
      known_options<swv_segment>(out(segment, "segment"), SWV_SEGMENT_INIT, "segment");
  const auto owned = std::make_shared<const HostSegment>(s);
  check_options(*segment, s, "segment");
  text_or(s.name, "", "segment.name");
  if (s.forward == nullptr) fail_null("segment.forward");
  check_outputs(out_outputs, num_outputs);
  const std::vector<at::Tensor> given = tensors(inputs, num_inputs, "inputs");
  const CallMode call_mode(mode, "mode");
  write_tensors(shardweave::checkpoint(
                    [owned, num_outputs](const std::vector<at::Tensor>& again) {
                      return owned->run(again, num_outputs);
                    },
                    given),
                out_outputs);
}

void clear_requires_grad(const at::Tensor& tensor) {
  tensor.requires_grad_(false);
  set_frozen(tensor, false);
}

void set_requires_grad(const at::Tensor& tensor, bool requires_grad) {
  tensor.requires_grad_(requires_grad);
  set_frozen(tensor, !requires_grad);
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_tensor_requires_grad(const swv_tensor* tensor, swv_bool* out_requires_grad) {
  return guarded(__func__, out_requires_grad, "out_requires_grad",
                 [&] { return in(tensor, "tensor").tensor.requires_grad(); });
}

swv_status* swv_tensor_set_requires_grad(swv_tensor* tensor, swv_bool requires_grad) {
  return guarded(__func__, [&] {
    set_requires_grad(in(tensor, "tensor").tensor, flag(requires_grad, "requires_grad"));
  });
}

swv_status* swv_tensor_clear_requires_grad(swv_tensor* tensor) {
  return guarded(__func__, [&] { clear_requires_grad(in(tensor, "tensor").tensor); });
}

swv_status* swv_tensor_is_leaf(const swv_tensor* tensor, swv_bool* out_is_leaf) {
  return guarded(__func__, out_is_leaf, "out_is_leaf",
                 [&] { return in(tensor, "tensor").tensor.is_leaf(); });
}

swv_status* swv_tensor_detach(const swv_tensor* tensor, swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] {
    const CallMode mode(SWV_MODE_GRAD, "mode");
    return new_tensor(in(tensor, "tensor").tensor.detach(), "the new tensor");
  });
}

swv_status* swv_tensor_grad(const swv_tensor* tensor, swv_tensor** out_grad) {
  return guarded(__func__, out_grad, "out_grad",
                 [&] { return new_tensor_or_null(in(tensor, "tensor").tensor.mutable_grad()); });
}

swv_status* swv_tensor_set_grad(swv_tensor* tensor, const swv_tensor* grad) {
  return guarded(__func__, [&] { set_grad(tensor, grad); });
}

swv_status* swv_tensor_backward(const swv_tensor* tensor, const swv_tensor* gradient,
                                const swv_backward_options* options) {
  return guarded(__func__, [&] { backward(tensor, gradient, options); });
}

swv_status* swv_gradients(const swv_tensor* const* outputs, size_t num_outputs,
                          const swv_tensor* const* inputs, size_t num_inputs,
                          const swv_tensor* const* grad_outputs,
                          const swv_backward_options* options, swv_tensor** out_grads) {
  return guarded(__func__, [&] {
    gradients(outputs, num_outputs, inputs, num_inputs, grad_outputs, options, out_grads);
  });
}

swv_status* swv_function_apply(const swv_function* function, swv_grad_mode mode,
                               const swv_tensor* const* inputs, size_t num_inputs,
                               swv_tensor** out_outputs, size_t num_outputs) {
  return guarded(__func__,
                 [&] { apply(function, mode, inputs, num_inputs, out_outputs, num_outputs); });
}

swv_status* swv_checkpoint(const swv_segment* segment, swv_grad_mode mode,
                           const swv_tensor* const* inputs, size_t num_inputs,
                           swv_tensor** out_outputs, size_t num_outputs) {
  return guarded(__func__,
                 [&] { checkpoint(segment, mode, inputs, num_inputs, out_outputs, num_outputs); });
}

swv_status* swv_function_context_save(swv_function_context* context, const swv_tensor* const* given,
                                      size_t num_tensors) {
  return guarded(__func__, [&] {
    swv_function_context& c = in(context, "context");
    check_is_function(c);
    if (!c.is_forward) fail_argument("context", "is of a backward; save in forward");
    c.saved = tensors(given, num_tensors, "tensors");
  });
}

swv_status* swv_function_context_saved(const swv_function_context* context, size_t index,
                                       swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] {
    const swv_function_context& c = in(context, "context");
    check_is_function(c);
    if (c.is_forward)
      fail_argument("context", "is of a forward; what was saved is there in backward");
    if (index >= c.saved.size()) {
      fail(absl::StatusCode::kOutOfRange,
           str_cat("argument 'index' is ", index, " of ", c.saved.size(), " saved tensors"));
    }
    return new_tensor(c.saved[index], "the saved tensor");
  });
}

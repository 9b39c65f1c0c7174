#include "shardweave/dtensor/rules/common.h"

#include <algorithm>

#include "ATen/ops/add.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/empty_strided.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/arguments.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/multiple.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/remembered.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/error.h"

namespace shardweave::dtensor_internal {
namespace {

c10::IntArrayRef ref(const Dims& dims) {
  return c10::IntArrayRef(dims.data(), dims.size());
}

at::Tensor meta(const TensorInfo& info) {
  return at::empty_strided(ref(info.sizes), ref(info.strides),
                           at::TensorOptions(info.dtype).device(at::kMeta));
}

TensorInfo info_of(const at::Tensor& tensor) {
  TensorInfo info;
  info.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  info.strides.assign(tensor.strides().begin(), tensor.strides().end());
  info.dtype = tensor.scalar_type();
  info.defined = true;
  return info;
}

}  // namespace

TensorInfo contiguous_info(Dims sizes, at::ScalarType dtype) {
  TensorInfo info;
  info.strides = contiguous_strides(sizes);
  info.sizes = std::move(sizes);
  info.dtype = dtype;
  info.defined = true;
  return info;
}

TensorInfo like_info(const TensorInfo& like) {
  return info_of(at::empty_like(meta(like)));
}

void like_input(OpCall& call) {
  call.outputs.push_back(like_info(call.input(0)));
}

void contiguous_like_input(OpCall& call) {
  const TensorInfo& self = call.input("self");
  call.outputs.push_back(contiguous_info(self.sizes, self.dtype));
}

void no_outputs(OpCall& /*call*/) {}

namespace {

TensorInfo broadcast_info_of(absl::Span<const TensorInfo* const> inputs) {
  at::Tensor result = meta(*inputs[0]);
  for (const TensorInfo* input : inputs.subspan(1)) result = at::add(result, meta(*input));
  TensorInfo info = info_of(result);
  info.dtype = inputs[0]->dtype;
  return info;
}

}  // namespace

TensorInfo broadcast_info(const OpCall& call, std::initializer_list<std::string_view> inputs) {
  std::vector<const TensorInfo*> infos;
  for (std::string_view name : inputs) infos.push_back(&call.input(name));
  return broadcast_info_of(infos);
}

TensorInfo broadcast_info(const OpCall& call) {
  std::vector<const TensorInfo*> infos;
  for (const TensorInfo& input : call.inputs) infos.push_back(&input);
  return broadcast_info_of(infos);
}

Dims broadcast_sizes(absl::Span<const Dims> shapes) {
  Dims result;
  for (const Dims& shape : shapes) {
    while (result.size() < shape.size()) result.insert(result.begin(), 1);
    const size_t shift = result.size() - shape.size();
    for (size_t d = 0; d < shape.size(); ++d) {
      if (shape[d] != 1) result[shift + d] = shape[d];
    }
  }
  return result;
}

// --- reductions ----------------------------------------------------------------------------------

ReducedDims::ReducedDims(const OpCall& call) : reduced_(call.input(0).ndim(), false) {
  if (call.has_arg("dim")) {
    for (int dim : call.dims_arg("dim", ndim())) {
      if (dim < ndim()) reduced_[dim] = true;  // a 0-dim tensor takes dim 0
    }
  } else {
    reduced_.assign(ndim(), true);
  }
  keep_ = call.has_arg("keepdim") && call.bool_arg("keepdim");
}

int ReducedDims::in_output(int dim, int output_ndim) const {
  if (output_ndim == ndim()) return dim;
  return dim - static_cast<int>(std::count(reduced_.begin(), reduced_.begin() + dim, true));
}

Dims ReducedDims::sizes(const TensorInfo& input) const {
  Dims result;
  for (int d = 0; d < ndim(); ++d) {
    if (!reduced_[d]) {
      result.push_back(input.sizes[d]);
    } else if (keep_) {
      result.push_back(1);
    }
  }
  return result;
}

ShardedRule along_dim() {
  return sharded([](const OpCall& call, Strategies& out) {
    const ReducedDims dims(call);
    for (int d = 0; d < dims.ndim(); ++d) {
      if (dims.contains(d)) continue;
      out.add(std::vector<Placement>(call.num_inputs(), Shard(d)),
              {Shard(dims.in_output(d, call.output().ndim()))});
    }
  });
}

// --- batches -------------------------------------------------------------------------------------

bool cast_commutes(ReduceOp op, at::ScalarType from, at::ScalarType to) {
  if (from == to) return true;
  if (op == ReduceOp::kProduct) return false;
  from = c10::toRealValueType(from);
  to = c10::toRealValueType(to);
  if (from == to) return true;
  if (to == at::kBool) return false;  // 1 and -1 are both true, and 0 together
  // Of 8 bits nothing is reduced over ranks.
  if (c10::isFloatingType(to) && c10::elementSize(to) == 1) return false;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: {
      // True and true are one, or two. Integers wrap around.
      const bool wraps =
          c10::isIntegralType(from, /*includeBool=*/true) && c10::elementSize(from) < 8;
      // Digits after the point may add up.
      return !wraps && (c10::isFloatingType(to) || !c10::isFloatingType(from));
    }
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return c10::isFloatingType(to);  // rounding keeps the order; infinity as an integer does not
    case ReduceOp::kProduct:
      return false;
  }
  return false;
}

void pass_partials(const OpCall& call, Strategies& out, absl::Span<const ReduceOp> ops) {
  for (ReduceOp op : ops) {
    out.add(std::vector<Placement>(call.num_inputs(), Partial(op)), {Partial(op)});
  }
}

std::vector<Placement> cuts_of(const OpCall& call, DimsByName dims) {
  std::vector<Placement> cuts = {Shard(0)};
  for (const auto& [name, dim] : dims) {
    const Placement now = call.placement(name);
    if (!now.is_shard(dim)) continue;
    const Placement cut = now.with_dim(0);
    if (std::find(cuts.begin(), cuts.end(), cut) == cuts.end()) cuts.push_back(cut);
  }
  return cuts;
}

ShardedRule over_batches(Batches batches) {
  return sharded([batches = std::move(batches)](const OpCall& call, Strategies& out) {
    auto inner = [](const std::vector<int>& numbers, int i) {
      return numbers.size() == 1 ? numbers[0] : numbers.at(i);
    };
    const int num_batches = call.input(0).ndim() - inner(batches.inputs, 0);
    // Of what is empty as a whole a part may be emptier still, which kernels refuse on some ranks only.
    const Dims& sizes = call.input(0).sizes;
    const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    for (int d = 0; d < num_batches; ++d) {
      if (is_empty && sizes[d] != 0) continue;
      bool fits = true;
      auto cut = [&](const std::vector<TensorInfo>& infos, const std::vector<int>& numbers) {
        std::vector<Placement> placements;
        for (size_t i = 0; i < infos.size(); ++i) {
          const int k = inner(numbers, static_cast<int>(i));
          // Results that were not asked for are vectors of nothing.
          const bool nothing = infos[i].ndim() == 1 && infos[i].sizes[0] == 0;
          placements.push_back(k == Batches::kWhole || nothing ? Replicate() : Shard(d));
          if (!infos[i].defined || k == Batches::kWhole || nothing) continue;
          // Batches that broadcast are not cut.
          fits &= infos[i].ndim() - k == num_batches && infos[i].sizes[d] == call.input(0).sizes[d];
        }
        return placements;
      };
      std::vector<Placement> inputs = cut(call.inputs, batches.inputs);
      std::vector<Placement> outputs = cut(call.outputs, batches.outputs);
      if (fits) out.add(std::move(inputs), std::move(outputs), zeros_if_empty);
    }
    if (batches.linear_in_first) out.add_linear({{call.op->schema().arguments()[0].name()}});
  });
}

// --- arguments on a stack ------------------------------------------------------------------------

BoxedCall::BoxedCall(const c10::OperatorHandle& op, c10::Stack& stack)
    : op_(op), stack_(stack), base_(stack.size() - op.schema().arguments().size()) {}

at::Tensor BoxedCall::tensor(std::string_view name) {
  const c10::IValue& value = (*this)[name];
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

at::Tensor BoxedCall::dtensor(std::string_view name) {
  at::Tensor given = tensor(name);
  if (!given.defined() || is_dtensor(given)) return given;
  for (size_t i = base_; i < stack_.size(); ++i) {
    if (!stack_[i].isTensor() || !is_dtensor(stack_[i].toTensor())) continue;
    return adopted(op_, static_cast<size_t>(index(name)), given,
                   meta_of(stack_[i].toTensor()).context);
  }
  return given;
}

bool BoxedCall::flag(std::string_view name) {
  return has(name) && (*this)[name].toBool();
}

const Spec& BoxedCall::spec(const LocalCall& call, std::string_view name) const {
  const auto is_tensor = [](const c10::TypePtr& type) {
    return type->isSubtypeOf(*c10::OptionalType::ofTensor());
  };
  const int arg = index(name);
  size_t flat = 0;
  for (int i = 0; i < arg; ++i) {
    const c10::IValue& v = stack_[base_ + i];
    if (is_tensor(op_.schema().arguments()[i].type())) {
      ++flat;
    } else if (v.isList() && is_tensor(v.toList().elementType())) {
      flat += v.toListRef().size();
    }
  }
  return *call.inputs[flat];
}

std::vector<int64_t> BoxedCall::dims() {
  if (!has("dim")) return {};
  const c10::IValue& value = (*this)["dim"];
  if (value.isInt()) return {value.toInt()};
  return value.isNone() ? std::vector<int64_t>() : value.toIntVector();
}

namespace {

// An out= argument with the result in it. A plain one becomes a DTensor where it stands, as
// adopt_equal() has it; what was in it is not read.
at::Tensor into_out(const at::Tensor& out, const at::Tensor& result) {
  if (out.sizes() != result.sizes()) out.resize_(result.sizes());
  if (!is_dtensor(out) && is_dtensor(result)) {
    const std::shared_ptr<MeshContext> context = meta_of(result).context;
    convert_in_place(out, out.detach(), replicated_spec(*context, out), context);
  }
  return out.copy_(result);
}

}  // namespace

void BoxedCall::finish(std::initializer_list<at::Tensor> results) {
  std::vector<at::Tensor> outs;
  const auto& arguments = op_.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].is_out()) outs.push_back(stack_[base_ + i].toTensor());
  }
  stack_.resize(base_);
  size_t k = 0;
  for (const at::Tensor& result : results) {
    if (outs.empty()) {
      stack_.emplace_back(result);
    } else {
      stack_.emplace_back(into_out(outs[k++], result));
    }
  }
}

void BoxedCall::finish_list(std::vector<at::Tensor> results) {
  stack_.resize(base_);
  stack_.emplace_back(std::move(results));
}

void decomposed(const c10::OperatorHandle& op, c10::Stack& stack) {
  for (c10::DispatchKey key : {c10::DispatchKey::CompositeExplicitAutograd,
                               c10::DispatchKey::CompositeExplicitAutogradNonFunctional}) {
    if (op.hasKernelForDispatchKey(key)) return op.callBoxedForDispatchKey(key, stack);
  }
  throw Error(absl::InternalError(
      absl::StrCat(c10::toString(op.operator_name()), " is no composite of other operators")));
}

namespace {

// `tensor` is what a composite of `op` has made of `of`, or that itself.
at::Tensor move(const c10::OperatorHandle& op, const at::Tensor& tensor, const Layout& layout,
                std::string_view argument, const Spec& of, bool is_argument) {
  DTensorMeta& meta = meta_of(tensor);
  if (meta.spec->layout == layout) return tensor;
  MeshContext& context = *meta.context;
  SpecRef target = context.with_layout(*meta.spec, layout);
  if (std::optional<at::Tensor> kept = recall(meta, *target)) {
    ++context.observation.counters.remembered_uses;
    return wrap(*std::move(kept), std::move(target), meta.context);
  }
  PlanRef plan = plan_for(context, meta.spec, target);
  at::Tensor from = tensor;
  if (const SpecRef* kept = remembered_spec(meta, /*for_view=*/false)) {
    const SpecRef spec = *kept;
    PlanRef shorter = plan_for(context, spec, target);
    if (shorter->plan.cost() < plan->plan.cost()) {
      ++context.observation.counters.remembered_uses;
      from = wrap(remembered_part(meta, *spec).value(), spec, meta.context);
      meta_of(from).came_from(provenance_of(meta));
      plan = std::move(shorter);
    }
  }
  if (!plan->is_local) {
    if (context.decisions.strict_depth > 0) {
      const std::string module = context.observation.modules.current();
      fail(op, absl::StatusCode::kFailedPrecondition,
           absl::StrCat("needs communication that the strict scope refuses",
                        module.empty() ? "" : absl::StrCat(" in module '", module, "'"), ": ",
                        std::string(argument), " of ", of.to_string(), ": ", meta.spec->to_string(),
                        " -> ", layout.to_string(), " (", plan->plan.bytes(), " bytes); ",
                        is_argument ? absl::StrCat("write ", advised_call(argument, layout),
                                                   " in front of it")
                                    : "it always does so: let it run outside of the scope"));
    }
    ++context.observation.counters.implicit_redistributions;
  }
  const auto bring = [&](const at::Tensor& it) {
    return redistributed(it, layout, {.name = op.operator_name().name, .argument = argument});
  };
  const CutOrigins origins = origins_of(tensor.unsafeGetTensorImpl());
  const bool is_shared =
      !plan->is_local && is_kept(worth_remembering(meta.spec->layout, origins, layout));
  if (auto multiple = is_shared && from.is_same(tensor) ? multiple_of(meta) : nullptr) {
    at::Tensor local = bring_by_sum(meta, std::move(multiple), target, [&](const at::Tensor& sum) {
      const at::Tensor it = wrap(sum, meta.spec, meta.context);
      meta_of(it).came_from(provenance_of(meta));
      return meta_of(bring(it)).local();
    });
    return wrap(std::move(local), std::move(target), meta.context);
  }
  const at::Tensor result = bring(from);
  if (is_shared) remember(meta, std::move(target), meta_of(result).local());
  return result;
}

}  // namespace

at::Tensor move_input(const c10::OperatorHandle& op, const at::Tensor& tensor, const Layout& layout,
                      std::string_view argument) {
  if (!is_dtensor(tensor)) return tensor;  // adopted by the next operator
  return move(op, tensor, layout, argument, *meta_of(tensor).spec, /*is_argument=*/true);
}

at::Tensor reduce_over_ranks(const c10::OperatorHandle& op, const at::Tensor& like,
                             at::Tensor local, Placements placements, const Dims& sizes) {
  const DTensorMeta& meta = meta_of(like);
  const std::vector<int>& order = meta.spec->layout.order();
  Placements whole = placements;
  for (Placement& p : whole) {
    if (p.is_partial()) p = Replicate();
  }
  SpecRef spec =
      meta.context->intern(value_or_throw(Layout::create(std::move(placements), order)), sizes,
                           contiguous_strides(sizes), local.scalar_type(), meta.spec->device);
  const at::Tensor partial = wrap(std::move(local), std::move(spec), meta.context);
  return move(op, partial, value_or_throw(Layout::create(std::move(whole), order)), "reduction",
              *meta.spec, /*is_argument=*/false);
}

bool is_on_gpu(const TensorInfo& input) {
  return input.spec != nullptr && input.spec->device.is_cuda();
}

void zeros_if_empty(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  const size_t base = stack.size() - op.schema().arguments().size();
  c10::TensorOptions options;
  bool empty = false;
  // What is empty as a whole is for the operator itself.
  const auto is_whole = [](const SpecRef& input) { return input == nullptr || input->numel() > 0; };
  const bool cut = std::all_of(call.inputs.begin(), call.inputs.end(), is_whole);
  const auto& arguments = op.schema().arguments();
  for (size_t i = base; i < stack.size(); ++i) {
    if (!stack[i].isTensor() || !stack[i].toTensor().defined()) continue;
    if (arguments[i - base].is_out()) continue;
    options = stack[i].toTensor().options();
    empty |= stack[i].toTensor().numel() == 0;
  }
  if (!empty || !cut) {
    op.callBoxed(stack);
    return;
  }
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].is_out()) outs.push_back(stack[base + i].toTensor());
  }
  stack.resize(base);
  for (size_t k = 0; k < call.outputs.size(); ++k) {
    const SpecRef& output = call.outputs[k];
    if (output == nullptr) {
      stack.emplace_back(at::Tensor());
    } else if (outs.empty()) {
      stack.emplace_back(at::zeros(ref(output->local_sizes), options.dtype(output->dtype)));
    } else {
      if (outs[k].sizes() != ref(output->local_sizes)) outs[k].resize_(ref(output->local_sizes));
      stack.emplace_back(outs[k].zero_());
    }
  }
}

}  // namespace shardweave::dtensor_internal

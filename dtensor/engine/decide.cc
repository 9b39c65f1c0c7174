#include "shardweave/dtensor/engine/decide.h"

#include "ATen/ops/empty.h"
#include "ATen/ops/empty_strided.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/dtensor/engine/arguments.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/remembered.h"
#include "shardweave/dtensor/engine/tensor_impl.h"

namespace shardweave::dtensor_internal {
namespace {

using c10::IValue;

TensorInfo info_of(c10::TensorImpl* impl) {
  TensorInfo info;
  if (!defined(impl)) return info;
  info.defined = true;
  info.dtype = c10::typeMetaToScalarType(impl->dtype());
  info.sizes.assign(impl->sizes().begin(), impl->sizes().end());
  info.strides.assign(impl->strides().begin(), impl->strides().end());
  if (!is_dtensor(impl)) return info;
  const DTensorMeta& meta = meta_of(impl);
  info.spec = meta.spec;
  info.origins = origins_of(impl);
  if (const Remembered* kept = remembered_form(meta)) info.remembered = kept->spec;
  return info;
}

// A plain tensor with the global shape and no data: on `device` meta, or one element seen
// everywhere.
at::Tensor stand_in(c10::TensorImpl* impl, c10::DeviceType device) {
  if (!defined(impl)) return {};
  // A number stays one: operators take it next to tensors of any device.
  if (!is_dtensor(impl) && impl->is_wrapped_number()) {
    return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(impl));
  }
  const auto options = at::TensorOptions(impl->dtype()).device(device);
  return device == at::kMeta ? at::empty_strided(impl->sizes(), impl->strides(), options)
                             : at::zeros({}, options).expand(impl->sizes());
}

// The results of a call with stand-ins for all tensors.
c10::Stack call_with_stand_ins(const c10::OperatorHandle& op, const OpInfo& info,
                               absl::Span<const IValue> args, c10::DeviceType device) {
  c10::Stack stack;
  for (size_t i = 0; i < args.size(); ++i) {
    const IValue& v = args[i];
    if (info.args[i] == ArgKind::kTensor) {
      stack.push_back(v.isTensor() ? IValue(stand_in(v.unsafeToTensorImpl(), device)) : v);
    } else if (info.args[i] == ArgKind::kTensorList && v.isList()) {
      c10::impl::GenericList list(v.toList().elementType());
      for (const IValue& e : v.toListRef()) {
        list.push_back(e.isTensor() ? IValue(stand_in(e.unsafeToTensorImpl(), device)) : e);
      }
      stack.emplace_back(std::move(list));
    } else if (v.isDevice()) {
      stack.emplace_back(c10::Device(device));
    } else {
      stack.push_back(v);
    }
  }
  // Of an operator with several out= arguments the boxed call returns references into the stack,
  // after it has emptied it.
  const c10::Stack kept = stack;
  op.callBoxed(stack);
  return stack;
}

// Shapes, strides and dtypes of the results, from the operator's kernel for meta tensors. Errors of
// shape or type come from there, as LibTorch words them, on all ranks and before anything is sent.
void infer_outputs(const c10::OperatorHandle& op, const OpInfo& info, const ShardedRule& rule,
                   absl::Span<const IValue> args, OpCall& call) {
  const ShardedRule::Options& options = rule.options();
  if (options.shapes && !(options.shapes_only_if_no_meta && info.has_meta_kernel)) {
    options.shapes(call);
    return;
  }
  if (!info.has_meta_kernel) {
    fail(op, absl::StatusCode::kInternal,
         "the sharding rule has no shape function and the operator no kernel for meta tensors");
  }
  const c10::Stack stack = call_with_stand_ins(op, info, args, at::kMeta);
  auto add = [&](const IValue& v) {
    call.outputs.push_back(info_of(v.isTensor() ? v.unsafeToTensorImpl() : nullptr));
  };
  for (const IValue& v : stack) {
    if (v.isList()) {
      for (const IValue& e : v.toListRef()) add(e);
    } else {
      add(v);
    }
  }
}

std::optional<int> flat_input_of(const OpCall& call, int arg, int element = -1) {
  // Inputs are in the order of the arguments, a list's elements one after the other.
  const auto first = std::lower_bound(call.input_arg.begin(), call.input_arg.end(), arg);
  const auto i = first - call.input_arg.begin() + std::max(element, 0);
  if (i >= call.num_inputs() || call.input_arg[i] != arg || call.input_element[i] != element) {
    return std::nullopt;
  }
  return static_cast<int>(i);
}

// Calls f(element, impl) for every tensor that `write` writes; element is -1 outside of lists.
template <typename F>
void for_each_written(const OpInfo::Write& write, absl::Span<const IValue> args, F f) {
  if (!write.is_list) {
    f(-1, args[write.arg].unsafeToTensorImpl());
    return;
  }
  int element = 0;
  for (const IValue& e : args[write.arg].toListRef()) f(element++, e.unsafeToTensorImpl());
}

SpecRef output_spec(MeshContext& context, const TensorInfo& info, const Layout& layout,
                    c10::Device device, CutOrigins origins = {}) {
  return context.intern(layout, info.sizes, info.strides, info.dtype, device, origins);
}

// What is made of data that is cut, and stays cut, is data; what is made of a weight alone is one.
CutOrigins origins_of_results(const OpCall& call, const std::vector<Layout>& inputs) {
  CutOrigins origins;
  int tensors = 0;
  for (int i = 0; i < call.num_inputs(); ++i) {
    const TensorInfo& input = call.input(i);
    if (!input.defined || input.is_scalar()) continue;
    ++tensors;
    for (int m = 0; m < std::min(inputs[i].mesh_ndim(), 64); ++m) {
      if (!inputs[i][m].is_shard()) continue;
      origins.data |= input.origins.data & (uint64_t{1} << m);
      origins.weight |= input.origins.weight & (uint64_t{1} << m);
    }
  }
  if (tensors > 1) origins.weight = 0;
  origins.data &= ~origins.weight;
  return origins;
}

// True if a cut of those that `cuts` names, a bit for each mesh dimension, is no longer there.
bool gives_up_cut(const Layout& from, uint64_t cuts, const Layout& to) {
  for (int m = 0; m < std::min(from.mesh_ndim(), 64); ++m) {
    if ((cuts >> m & 1) != 0 && from[m].is_shard() && from[m] != to[m]) return true;
  }
  return false;
}

// Records that input i has to become `layout`, if it is not already.
void change_input(MeshContext& context, const OpCall& call, int i, const Layout& layout,
                  c10::Device device, CacheEntry& entry) {
  const TensorInfo& input = call.input(i);
  SpecRef from = input.spec;
  if (!input.defined) {
    entry.inputs.emplace_back();
    return;
  }
  if (from == nullptr) {  // a plain scalar: as good as replicated
    if (layout.is_replicated()) {
      entry.inputs.emplace_back();
      return;
    }
    from = output_spec(context, input, Layout(Placements(context.mesh().ndim())), device);
  }
  if (from->layout == layout) {
    entry.inputs.push_back(std::move(from));
    return;
  }
  InputChange change{i, call.input_arg[i], context.with_layout(*from, layout), nullptr};
  change.plan = plan_for(context, from, change.target);
  if (input.remembered != nullptr) {
    PlanRef plan = plan_for(context, input.remembered, change.target);
    if (plan->plan.cost() < change.plan->plan.cost()) {
      change.from = input.remembered;
      change.plan = std::move(plan);
    }
  }
  if (change.from == nullptr && !change.plan->is_local) {
    change.remember = worth_remembering(from->layout, input.origins, layout);
    change.unshards_weight = gives_up_cut(from->layout, input.origins.weight, layout);
  }
  entry.communicates |= !change.plan->is_local;
  entry.inputs.push_back(change.target);
  entry.input_changes.push_back(std::move(change));
}

}  // namespace

void check_one_mesh(const c10::OperatorHandle& op, const OpInfo& info, MeshContext& context,
                    absl::Span<const IValue> args) {
  for_each_tensor(info, args, [&](size_t arg, c10::TensorImpl* impl) {
    if (!defined(impl) || !is_dtensor(impl)) return;
    const MeshContext* other = meta_of(impl).spec->context;
    if (other != &context) {
      fail(op, absl::StatusCode::kInvalidArgument,
           absl::StrCat(
               "argument '", op.schema().arguments()[arg].name(), "' lies on ",
               other->mesh().to_string(), ", another argument on ", context.mesh().to_string(),
               meta_of(impl).context->connected_mesh().rank() != context.connected_mesh().rank()
                   ? absl::StrCat(" (as another rank has it: they are tensors of the ranks ",
                                  meta_of(impl).context->connected_mesh().rank().value, " and ",
                                  context.connected_mesh().rank().value, ")")
               : other->mesh() == context.mesh() ? " (an equal mesh, but made separately)"
                                                 : "",
               "; all DTensors of an operator must be on one mesh"));
    }
  });
}

void check_call(const c10::OperatorHandle& op, const OpInfo& info, absl::Span<const IValue> args) {
  if (info.rule == nullptr) {
    if (!info.checks_on_meta) return;
    try {
      call_with_stand_ins(op, info, args, at::kMeta);
    } catch (const c10::NotImplementedError&) {
      // Its results depend on values: it says nothing about its arguments.
    }
  } else if (info.rule->is_refused({op, args})) {
    call_with_stand_ins(op, info, args, at::kCPU);
  }
}

OpCall make_call(const c10::OperatorHandle& op, const OpInfo& info, absl::Span<const IValue> args) {
  OpCall call;
  call.op = &op;
  call.args = args;
  int element = 0;
  for_each_tensor(info, args, [&](size_t arg, c10::TensorImpl* impl) {
    if (info.is_out[arg]) return;
    const bool first = call.input_arg.empty() || call.input_arg.back() != static_cast<int>(arg);
    element = first ? 0 : element + 1;
    call.inputs.push_back(info_of(impl));
    call.input_arg.push_back(static_cast<int>(arg));
    call.input_element.push_back(info.args[arg] == ArgKind::kTensorList ? element : -1);
  });
  return call;
}

std::unique_ptr<CacheEntry> decide(const c10::OperatorHandle& op, const OpInfo& info,
                                   MeshContext& context, absl::Span<const IValue> args,
                                   Weighed* weighed) {
  check_one_mesh(op, info, context, args);
  check_call(op, info, args);
  auto entry = std::make_unique<CacheEntry>();
  OpCall call = make_call(op, info, args);
  c10::Device device = at::kCPU;
  for (const TensorInfo& input : call.inputs) {
    if (input.spec != nullptr) device = input.spec->device;
  }
  const Layout replicated{Placements(context.mesh().ndim())};

  const ShardedRule* rule = info.rule == nullptr ? nullptr : info.rule->sharded({op, args});
  if (rule == nullptr) {
    entry->gathered = true;
    for (int i = 0; i < call.num_inputs(); ++i)
      change_input(context, call, i, replicated, device, *entry);
    for (const OpInfo::Write& write : info.writes) {
      for_each_written(write, args, [&](int element, c10::TensorImpl* impl) {
        if (!is_dtensor(impl)) return;  // a plain scalar: each rank writes its own
        const SpecRef& spec = meta_of(impl).spec;
        CacheEntry::Written written{write.arg, element, write.output,
                                    spec,      {},      spec->layout.is_replicated()};
        if (!written.direct) {
          written.plan = plan_for(context, context.with_layout(*spec, replicated), spec);
          entry->communicates |= !written.plan->is_local;
        }
        entry->written.push_back(std::move(written));
      });
    }
    return entry;
  }

  infer_outputs(op, info, *rule, args, call);
  std::optional<int> written_input;
  for (const OpInfo::Write& write : info.writes) {
    if (!write.is_out && !info.changes_shape && !write.is_list) {
      written_input = flat_input_of(call, write.arg);
    }
  }
  Decision decision = rule->options().per_element
                          ? propagate_elements(context, call, *rule)
                          : propagate(context, call, *rule, written_input, weighed);
  entry->kernel = decision.kernel;
  for (int i = 0; i < call.num_inputs(); ++i) {
    change_input(context, call, i, decision.inputs[i], device, *entry);
  }
  const CutOrigins origins = origins_of_results(call, decision.inputs);
  for (int k = 0; k < call.num_outputs(); ++k) {
    entry->outputs.push_back(
        call.output(k).defined
            ? output_spec(context, call.output(k), decision.outputs[k], device, origins)
            : SpecRef());
    if (decision.outputs[k] == decision.results[k]) continue;
    const SpecRef& left = entry->outputs[k];
    const SpecRef target =
        output_spec(context, call.output(k), decision.results[k], device, origins);
    entry->output_changes.push_back({k, target, plan_for(context, left, target)});
    entry->communicates |= !entry->output_changes.back().plan->is_local;
  }
  const std::string& size = rule->options().size_arg;
  if (!size.empty() && call.has_arg(size) && !call.arg(size).isNone()) {
    entry->arg_changes.push_back({call.arguments().index(size),
                                  IValue(c10::IntArrayRef(array(entry->outputs[0]->local_sizes)))});
  }
  for (const OpInfo::Write& write : info.writes) {
    for_each_written(write, args, [&](int element, c10::TensorImpl* impl) {
      const std::optional<int> input = flat_input_of(call, write.arg, element);
      if (!is_dtensor(impl)) return;  // a plain scalar: each rank writes its own
      const SpecRef& spec = meta_of(impl).spec;
      const SpecRef& result =
          write.output >= 0 ? entry->outputs[write.output] : entry->inputs[*input];
      if (info.changes_shape) {
        entry->written.push_back({write.arg, element, write.output, result, {}, true});
        return;
      }
      if (spec->sizes != result->sizes && write.is_out) {
        CacheEntry::Written written{write.arg, element, write.output, {}, {}, false, true};
        written.spec = context.intern(result->layout, result->sizes, result->strides, spec->dtype,
                                      spec->device);
        entry->written.push_back(std::move(written));
        return;
      }
      if (spec->sizes != result->sizes) {
        fail(op, absl::StatusCode::kInvalidArgument,
             absl::StrCat("the result has shape [", absl::StrJoin(result->sizes, ", "),
                          "], the tensor it is written to [", absl::StrJoin(spec->sizes, ", "),
                          "]"));
      }
      CacheEntry::Written written{write.arg, element, write.output, spec, {}, false};
      written.direct = result->layout == spec->layout &&
                       (write.is_out || entry->inputs[*input]->layout == spec->layout);
      if (!written.direct) {
        written.plan = plan_for(context, context.with_layout(*spec, result->layout), spec);
        entry->communicates |= !written.plan->is_local;
      }
      entry->written.push_back(std::move(written));
    });
  }
  return entry;
}

}  // namespace shardweave::dtensor_internal

#include "shardweave/dtensor/engine/decide.h"

#include "ATen/EmptyTensor.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/dtensor/engine/arguments.h"
#include "shardweave/dtensor/engine/multiple.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/remembered.h"
#include "shardweave/dtensor/engine/tensor_impl.h"

namespace shardweave::dtensor_internal {
namespace {

using c10::IValue;

TensorInfo info_of(c10::TensorImpl* impl, bool for_view) {
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
  if (const SpecRef* kept = remembered_spec(meta, for_view)) info.remembered = *kept;
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
  if (device == at::kMeta) {  // past the dispatcher, which takes longer than the rest
    return at::Tensor(at::detail::empty_strided_meta(impl->sizes(), impl->strides(),
                                                     c10::typeMetaToScalarType(impl->dtype())));
  }
  return at::zeros({}, at::TensorOptions(impl->dtype()).device(device)).expand(impl->sizes());
}

// The results of a call with stand-ins for all tensors.
c10::Stack call_with_stand_ins(const c10::OperatorHandle& op, const OpInfo& info,
                               absl::Span<const IValue> args, c10::DeviceType device) {
  c10::Stack stack;
  stack.reserve(std::max<size_t>(args.size(), info.num_returns));
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
  const c10::Stack kept = info.writes.size() > 1 ? stack : c10::Stack();
  op.callBoxed(stack);
  return stack;
}

// The dimension that `v` counts, from the end when negative; none that `ndim` dimensions have: -1.
int dim_of(const IValue& v, int ndim) {
  const int64_t dim = v.toInt() < 0 ? v.toInt() + ndim : v.toInt();
  return dim < 0 || dim >= ndim ? -1 : static_cast<int>(dim);
}

bool viewed(const TensorInfo& self, const IValue& size, TensorInfo& out) {
  int64_t left = self.numel();
  if (left == 0 || self.strides != contiguous_strides(self.sizes)) return false;
  out.sizes.clear();
  for (const IValue& v : size.toListRef()) {
    const int64_t s = v.toInt();
    if (s < 1 || left % s != 0) return false;
    left /= s;
    out.sizes.push_back(s);
  }
  out.strides = contiguous_strides(out.sizes);
  return left == 1;
}

bool transposed(const IValue& dim0, const IValue& dim1, TensorInfo& out) {
  const int a = dim_of(dim0, out.ndim()), b = dim_of(dim1, out.ndim());
  if (a < 0 || b < 0) return false;
  std::swap(out.sizes[a], out.sizes[b]);
  std::swap(out.strides[a], out.strides[b]);
  return true;
}

bool permuted(const TensorInfo& self, const IValue& dims, TensorInfo& out) {
  const auto list = dims.toListRef();
  if (static_cast<int>(list.size()) != self.ndim() || self.ndim() > 64) return false;
  uint64_t seen = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    const int d = dim_of(list[i], self.ndim());
    if (d < 0 || (seen >> d & 1) != 0) return false;
    seen |= uint64_t{1} << d;
    out.sizes[i] = self.sizes[d];
    out.strides[i] = self.strides[d];
  }
  return true;
}

// The views that most programs are full of, where they are what they mostly are. False: anything else,
// errors included, which the kernel for meta tensors knows.
bool infer_view(const c10::OperatorHandle& op, absl::Span<const IValue> args, OpCall& call) {
  const c10::OperatorName& name = op.operator_name();
  if (call.num_inputs() != 1 || !call.input(0).defined) return false;
  const TensorInfo& self = call.input(0);
  TensorInfo out;
  out.sizes = self.sizes;
  out.strides = self.strides;
  out.dtype = self.dtype;
  out.defined = true;
  if ((name.name == "aten::view" && name.overload_name.empty()) ||
      name.name == "aten::_unsafe_view") {
    if (!viewed(self, args[1], out)) return false;
  } else if (name.name == "aten::transpose" && name.overload_name == "int") {
    if (!transposed(args[1], args[2], out)) return false;
  } else if (name.name == "aten::t") {
    if (self.ndim() != 2 || !transposed(IValue(0), IValue(1), out)) return false;
  } else if (name.name == "aten::permute") {
    if (!permuted(self, args[1], out)) return false;
  } else if (name.name != "aten::detach" && name.name != "aten::alias") {
    return false;
  }
  call.outputs.push_back(std::move(out));
  return true;
}

// Where a view that LibTorch's kernel has made of a stand-in begins in it (Place). One that sees
// other values there (as another dtype, as conjugates) has elements of its own.
std::optional<int64_t> begin_of(const c10::OperatorHandle& op, const TensorInfo& self,
                                const c10::TensorImpl* view) {
  const bool same_values =
      c10::typeMetaToScalarType(view->dtype()) == self.dtype && !view->is_conj() && !view->is_neg();
  if (!same_values || op.operator_name().getNamespace() != "aten") return std::nullopt;
  return view->storage_offset();
}

// Shapes, strides and dtypes of the results, from the operator's kernel for meta tensors. Errors of
// shape or type come from there, as LibTorch words them, on all ranks and before anything is sent.
void infer_outputs(const c10::OperatorHandle& op, const OpInfo& info, const ShardedRule& rule,
                   absl::Span<const IValue> args, OpCall& call,
                   std::vector<std::optional<int64_t>>& begins) {
  const ShardedRule::Options& options = rule.options();
  if (options.shapes && !(options.shapes_only_if_no_meta && info.has_meta_kernel)) {
    options.shapes(call);
    return;
  }
  if (!info.has_meta_kernel) {
    fail(op, absl::StatusCode::kInternal,
         "the sharding rule has no shape function and the operator no kernel for meta tensors");
  }
  const bool views = info.makes_view();
  if (infer_view(op, args, call)) {
    if (views) begins.emplace_back(0);
    return;
  }
  const c10::Stack stack = call_with_stand_ins(op, info, args, at::kMeta);
  auto add = [&](const IValue& v) {
    c10::TensorImpl* impl = v.isTensor() ? v.unsafeToTensorImpl() : nullptr;
    call.outputs.push_back(info_of(impl, views));
    if (views) begins.push_back(defined(impl) ? begin_of(op, call.input(0), impl) : std::nullopt);
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

// The mesh dimensions along which a Partial becomes something else, a bit for each.
uint64_t reduced(const TensorInfo& input, const Spec& target) {
  uint64_t bits = 0;
  for (int m = 0; input.spec != nullptr && m < std::min(target.layout.mesh_ndim(), 64); ++m) {
    const bool is = input.spec->layout[m].is_partial() && !target.layout[m].is_partial();
    bits |= uint64_t{is} << m;
  }
  return bits;
}

// The mesh dimensions along which a layout is cut, a bit for each.
uint64_t cuts_of(const Layout& layout) {
  uint64_t bits = 0;
  for (int m = 0; m < std::min(layout.mesh_ndim(), 64); ++m) {
    bits |= uint64_t{layout[m].is_shard()} << m;
  }
  return bits;
}

// What is made of data that is cut, and stays cut or is summed, is data, as are the parts that ranks
// make with indices that were cut and are whole for it (StrategyWeigher); what is made of a weight
// alone is one.
CutOrigins origins_of_results(const OpCall& call, const std::vector<SpecRef>& inputs,
                              const std::vector<Layout>& outputs) {
  CutOrigins origins;
  int tensors = 0;
  uint64_t indices_cut = 0, inputs_cut = 0, outputs_cut = 0;
  for (const Layout& output : outputs) outputs_cut |= cuts_of(output);
  for (int i = 0; i < call.num_inputs(); ++i) {
    const TensorInfo& input = call.input(i);
    if (!input.defined || input.is_scalar()) continue;
    ++tensors;
    if (inputs[i] == nullptr) continue;
    inputs_cut |= cuts_of(inputs[i]->layout);
    if (input.spec != nullptr && c10::isIntegralType(input.dtype, /*includeBool=*/true)) {
      indices_cut |= input.origins.data & cuts_of(input.spec->layout);
    }
    const CutOrigins kept = of_cuts(input.origins, inputs[i]->layout);
    origins.data |= kept.data & ~reduced(input, *inputs[i]);
    origins.weight |= kept.weight;
  }
  if (tensors > 1) origins.weight = 0;
  origins.data |= indices_cut & ~inputs_cut & outputs_cut;
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

// Records that input i has to become `target`, if it is not that already. Null: it is None, or a plain
// number, as good as replicated.
void change_input(MeshContext& context, const OpCall& call, int i, SpecRef target,
                  CacheEntry& entry) {
  const TensorInfo& input = call.input(i);
  entry.inputs.push_back(target);
  if (target == nullptr || target == input.spec) return;
  const SpecRef from =
      input.spec != nullptr
          ? input.spec
          : context.with_layout(*target, Layout(Placements(context.mesh().ndim())));
  InputChange change{i, call.input_arg[i], std::move(target), nullptr};
  change.plan = plan_for(context, from, change.target);
  if (input.remembered != nullptr) {
    PlanRef plan = plan_for(context, input.remembered, change.target);
    if (plan->plan.cost() < change.plan->plan.cost()) {
      change.from = input.remembered;
      change.plan = std::move(plan);
    }
  }
  if (!change.plan->is_local) {
    change.remember = worth_remembering(from->layout, input.origins, change.target->layout);
    change.unshards_weight =
        change.from == nullptr &&
        gives_up_cut(from->layout, input.origins.weight, change.target->layout);
  }
  entry.communicates |= !change.plan->is_local;
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
  size_t count = 0;
  for_each_tensor(info, args, [&](size_t arg, c10::TensorImpl*) { count += !info.is_out[arg]; });
  call.inputs.reserve(count);
  call.input_arg.reserve(count);
  call.input_element.reserve(count);
  int element = 0;
  const DTensorMeta* last = nullptr;
  for_each_tensor(info, args, [&](size_t arg, c10::TensorImpl* impl) {
    const DTensorMeta* const meta = defined(impl) && is_dtensor(impl) ? &meta_of(impl) : nullptr;
    const DTensorMeta* const before = meta == nullptr ? last : std::exchange(last, meta);
    if (info.is_out[arg]) return;
    const bool first = call.input_arg.empty() || call.input_arg.back() != static_cast<int>(arg);
    element = first ? 0 : element + 1;
    call.inputs.push_back(info_of(impl, info.makes_view()));
    call.inputs.back().is_last_again =
        meta != nullptr && before != nullptr && have_same_elements(*before, *meta);
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
  entry->inputs.reserve(call.inputs.size());

  const ShardedRule* rule = info.rule == nullptr ? nullptr : info.rule->sharded({op, args});
  if (rule == nullptr) {
    entry->gathered = true;
    const Layout replicated{Placements(context.mesh().ndim())};
    for (int i = 0; i < call.num_inputs(); ++i) {
      const SpecRef& spec = call.input(i).spec;
      change_input(context, call, i,
                   spec == nullptr ? SpecRef() : context.with_layout(*spec, replicated), *entry);
    }
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

  infer_outputs(op, info, *rule, args, call, entry->begins);
  std::optional<int> written_input;
  for (const OpInfo::Write& write : info.writes) {
    if (write.is_out || info.changes_shape || write.is_list || write.output != 0) continue;
    const std::optional<int> input = flat_input_of(call, write.arg);
    // Another shape is refused below.
    if (input.has_value() && call.output().sizes == call.input(*input).sizes) written_input = input;
  }
  Decision decision = rule->options().per_element
                          ? propagate_elements(context, call, *rule)
                          : propagate(context, call, *rule, written_input, weighed);
  entry->kernel = decision.kernel;
  const CutOrigins origins = origins_of_results(call, decision.inputs, decision.outputs);
  c10::Device device = at::kCPU;
  for (int i = 0; i < call.num_inputs(); ++i) {
    if (call.input(i).spec != nullptr) device = call.input(i).spec->device;
    change_input(context, call, i, std::move(decision.inputs[i]), *entry);
  }
  // With the inputs, unless the call says where.
  if (call.has_arg("device") && call.arg("device").isDevice())
    device = call.arg("device").toDevice();
  entry->outputs.reserve(call.outputs.size());
  for (int k = 0; k < call.num_outputs(); ++k) {
    const TensorInfo& output = call.output(k);
    const auto spec_in = [&](const Layout& layout) {
      return context.intern(layout, output.sizes, output.strides, output.dtype, device, origins);
    };
    entry->outputs.push_back(output.defined ? spec_in(decision.outputs[k]) : SpecRef());
    if (decision.results.empty() || decision.outputs[k] == decision.results[k]) continue;
    const SpecRef target = spec_in(decision.results[k]);
    entry->output_changes.push_back({k, target, plan_for(context, entry->outputs[k], target)});
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
  entry->makes_multiple = makes_multiple(call, *entry);
  return entry;
}

}  // namespace shardweave::dtensor_internal

#include "shardweave/dtensor/dispatch.h"

#include <bit>

#include "ATen/core/LegacyTypeDispatch.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_strided.h"
#include "ATen/ops/zeros.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/dtensor/observer.h"
#include "shardweave/dtensor/propagate.h"
#include "shardweave/dtensor/redistribute.h"
#include "shardweave/dtensor/tensor_impl.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/library.h"

namespace shardweave {
namespace {

using c10::IValue;
using ArgKind = OpInfo::ArgKind;

c10::IntArrayRef array(const Dims& dims) {
  return c10::IntArrayRef(dims.data(), dims.size());
}

std::string name_of(const c10::OperatorHandle& op) {
  return c10::toString(op.operator_name());
}

[[noreturn]] void fail(const c10::OperatorHandle& op, absl::StatusCode code,
                       const std::string& what) {
  throw Error(absl::Status(code, absl::StrCat(name_of(op), ": ", what)));
}

// --- arguments -----------------------------------------------------------------------------------

// Calls f(tensor impl or null) for every tensor among the arguments: None gives null.
template <typename F>
void for_each_tensor(const OpInfo& info, absl::Span<const IValue> args, F f) {
  for (size_t i = 0; i < args.size(); ++i) {
    const IValue& v = args[i];
    if (info.args[i] == ArgKind::kTensor) {
      f(i, v.isTensor() ? v.unsafeToTensorImpl() : nullptr);
    } else if (info.args[i] == ArgKind::kTensorList && v.isList()) {
      for (const IValue& e : v.toListRef()) f(i, e.isTensor() ? e.unsafeToTensorImpl() : nullptr);
    }
  }
}

bool defined(const c10::TensorImpl* impl) {
  return impl != nullptr && impl != c10::UndefinedTensorImpl::singleton();
}

const std::shared_ptr<MeshContext>& find_context(const c10::OperatorHandle& op,
                                                 absl::Span<const IValue> args) {
  for (const IValue& v : args) {
    if (v.isTensor()) {
      c10::TensorImpl* impl = v.unsafeToTensorImpl();
      if (defined(impl) && is_dtensor(impl)) return meta_of(impl).context;
    } else if (v.isList()) {
      for (const IValue& e : v.toListRef()) {
        if (!e.isTensor()) break;
        c10::TensorImpl* impl = e.unsafeToTensorImpl();
        if (defined(impl) && is_dtensor(impl)) return meta_of(impl).context;
      }
    }
  }
  fail(op, absl::StatusCode::kInternal, "dispatched to DTensor without a DTensor argument");
}

[[noreturn]] void mixed(const c10::OperatorHandle& op, size_t arg, const c10::TensorImpl* plain,
                        const char* why) {
  fail(op, absl::StatusCode::kInvalidArgument,
       absl::StrCat("argument '", op.schema().arguments()[arg].name(),
                    "' is a plain tensor of shape [", absl::StrJoin(plain->sizes(), ", "),
                    "] among DTensors that ", why, "; make it one with distribute_tensor()"));
}

SpecRef replicated_spec(MeshContext& context, const at::Tensor& local) {
  const auto sizes = local.sizes();
  const auto strides = local.strides();
  return context.intern(Layout(Placements(context.mesh().ndim())), {sizes.data(), sizes.size()},
                        {strides.data(), strides.size()}, local.scalar_type(), local.device());
}

bool writes(const OpInfo& info, size_t arg) {
  for (const OpInfo::Write& write : info.writes) {
    if (write.arg == static_cast<int>(arg)) return true;
  }
  return false;
}

// Formulas of derivatives make plain tensors here and there (at::zeros(sizes, grad.options()), then
// scatter_): the same on every rank, so they count as replicated.
void adopt_in_backward(const OpInfo& info, const std::shared_ptr<MeshContext>& context,
                       absl::Span<IValue> args) {
  for (size_t i = 0; i < args.size(); ++i) {
    if (info.args[i] != ArgKind::kTensor || !args[i].isTensor()) continue;
    const at::Tensor& plain = args[i].toTensor();
    if (!plain.defined() || is_dtensor(plain.unsafeGetTensorImpl())) continue;
    if (plain.dim() == 0 && !writes(info, i)) continue;
    // In place: the formula goes on with its own handle.
    convert_in_place(plain, plain.detach(), replicated_spec(*context, plain), context);
  }
}

// Of shape and elements; the same on every rank.
uint64_t checksum(const at::Tensor& plain) {
  const at::Tensor contiguous = plain.detach().resolve_conj().resolve_neg().contiguous();
  uint64_t sum = 0xcbf29ce484222325;  // FNV-1a
  auto add = [&](uint64_t value) { sum = (sum ^ value) * 0x100000001b3; };
  add(static_cast<uint64_t>(plain.scalar_type()));
  for (int64_t size : plain.sizes()) add(static_cast<uint64_t>(size));
  const auto* bytes = static_cast<const unsigned char*>(contiguous.const_data_ptr());
  for (size_t i = 0; i < contiguous.nbytes(); ++i) add(bytes[i]);
  return sum;
}

// Plain tensors that an operator reads next to DTensors (masks and weights that LibTorch's
// composite operators make, a user's constants) count as replicated if they are the same on every
// rank, which costs a small collective to find out.
void adopt_equal(const c10::OperatorHandle& op, const OpInfo& info,
                 const std::shared_ptr<MeshContext>& context, absl::Span<IValue> args) {
  std::vector<uint64_t> sums;
  auto adopted = [&](size_t i, const IValue& value) -> IValue {
    if (!value.isTensor()) return value;
    const at::Tensor& plain = value.toTensor();
    if (!plain.defined() || plain.dim() == 0 || is_dtensor(plain.unsafeGetTensorImpl())) {
      return value;
    }
    const c10::TensorImpl* impl = plain.unsafeGetTensorImpl();
    if (info.is_out[i] &&
        plain.numel() == 0) {  // to be filled, as LibTorch's out= forms do with buffers
      convert_in_place(plain, plain.detach(), replicated_spec(*context, plain), context);
      return value;
    }
    if (writes(info, i)) mixed(op, i, impl, "the operator writes to");
    if (plain.requires_grad()) mixed(op, i, impl, "requires grad");
    if (plain.layout() != at::kStrided) mixed(op, i, impl, "is not dense");
    sums.push_back(checksum(plain));
    return wrap(plain.detach(), replicated_spec(*context, plain), context);
  };
  size_t first = args.size();
  for (size_t i = 0; i < args.size(); ++i) {
    if (info.args[i] == ArgKind::kTensor) {
      args[i] = adopted(i, args[i]);
    } else if (info.args[i] == ArgKind::kTensorList && args[i].isList()) {
      c10::impl::GenericList list(args[i].toList().elementType());
      for (const IValue& e : args[i].toListRef()) list.push_back(adopted(i, e));
      args[i] = std::move(list);
    }
    if (!sums.empty()) first = std::min(first, i);
  }
  if (sums.empty() || context->mesh().size() == 1) return;
  if (context->strict_depth > 0) {
    fail(op, absl::StatusCode::kFailedPrecondition,
         absl::StrCat(
             "argument '", op.schema().arguments()[first].name(),
             "' is a plain tensor among DTensors, which the strict scope refuses: that it is "
             "the same on all ranks takes communication to find out"));
  }
  std::vector<int> all_dims;
  for (int m = 0; m < context->mesh().ndim(); ++m) all_dims.push_back(m);
  Communicator& comm = context->communicator(all_dims);
  const auto count = static_cast<int64_t>(sums.size());
  std::vector<uint64_t> all(sums.size() * comm.size());
  const Cause cause{.name = op.operator_name().name,
                    .argument = op.schema().arguments()[first].name()};
  const CollectiveSpan span(*context, cause, [&]() -> Sending {
    return {"all_gather",
            all_dims,
            (comm.size() - 1) * count * 8,
            at::kLong,
            absl::MakeConstSpan(&count, 1),
            Layout(),
            Layout()};
  });
  throw_if_error(comm.all_gather(Buffer::of(sums.data(), count),
                                 Buffer::of(all.data(), static_cast<int64_t>(all.size())),
                                 {.timeout = absl::ZeroDuration(), .tag = cause.name})
                     .wait());
  for (size_t k = 0; k < all.size(); ++k) {
    if (all[k] != all[k % sums.size()]) {
      fail(op, absl::StatusCode::kInvalidArgument,
           absl::StrCat(
               "argument '", op.schema().arguments()[first].name(),
               "' or a later one is a plain tensor among DTensors that differs from rank to "
               "rank; make it a DTensor with from_local()"));
    }
  }
}

// --- cache key -----------------------------------------------------------------------------------

constexpr uint64_t kNone = 0x9e3779b97f4a7c15;
constexpr uint64_t kScalar = 0xc2b2ae3d27d4eb4f;
constexpr uint64_t kList = 0x165667b19e3779f9;
constexpr uint64_t kOther = 0x27d4eb2f165667c5;

void add_value(const IValue& v, CacheKey& key) {
  if (v.isInt()) {
    key.push_back(static_cast<uint64_t>(v.toInt()));
  } else if (v.isBool()) {
    key.push_back(kOther);
    key.push_back(v.toBool());
  } else if (v.isNone()) {
    key.push_back(kNone);
  } else if (v.isList()) {
    auto list = v.toListRef();
    key.push_back(kList + list.size());
    for (const IValue& e : list) add_value(e, key);
  } else if (v.isDouble()) {
    key.push_back(kOther + 1);
    key.push_back(std::bit_cast<uint64_t>(v.toDouble()));
  } else if (v.isComplexDouble()) {
    key.push_back(kOther + 5);
    key.push_back(std::bit_cast<uint64_t>(v.toComplexDouble().real()));
    key.push_back(std::bit_cast<uint64_t>(v.toComplexDouble().imag()));
  } else if (v.isDevice()) {
    key.push_back(kOther + 2);
    key.push_back(std::hash<c10::Device>()(v.toDevice()));
  } else if (v.isString()) {
    key.push_back(kOther + 3);
    key.push_back(absl::HashOf(v.toStringView()));
  } else {
    key.push_back(kOther + 4);
    key.push_back(IValue::hash(v));
  }
}

// False for a plain tensor, unless it is a scalar.
bool add_tensor(c10::TensorImpl* impl, CacheKey& key) {
  if (!defined(impl)) {
    key.push_back(kNone);
  } else if (is_dtensor(impl)) {
    key.push_back(reinterpret_cast<uint64_t>(meta_of(impl).spec.get()));
  } else {
    if (impl->dim() != 0) return false;
    key.push_back(kScalar + 2 * static_cast<uint64_t>(c10::typeMetaToScalarType(impl->dtype())) +
                  impl->is_wrapped_number());
  }
  return true;
}

// What a Scalar says about the dtype of the result: 2 and 2.5 are not the same to an integer
// tensor.
uint64_t scalar_kind(const IValue& v) {
  return v.isDouble() ? 0 : v.isInt() ? 1 : v.isBool() ? 2 : v.isComplexDouble() ? 3 : kNone;
}

// False if there is a plain tensor.
bool make_key(const OpInfo& info, absl::Span<const IValue> args, CacheKey& key) {
  key.push_back(reinterpret_cast<uint64_t>(&info));
  for (size_t i = 0; i < args.size(); ++i) {
    const IValue& v = args[i];
    switch (info.args[i]) {
      case ArgKind::kTensor:
        if (!add_tensor(v.isTensor() ? v.unsafeToTensorImpl() : nullptr, key)) return false;
        break;
      case ArgKind::kTensorList:
        if (!v.isList()) {
          key.push_back(kNone);
          break;
        }
        key.push_back(kList + v.toListRef().size());
        for (const IValue& e : v.toListRef()) {
          if (!add_tensor(e.isTensor() ? e.unsafeToTensorImpl() : nullptr, key)) return false;
        }
        break;
      case ArgKind::kKeyed:
        add_value(v, key);
        break;
      case ArgKind::kScalar:
        key.push_back(scalar_kind(v));
        break;
      case ArgKind::kUnkeyed:
        break;
    }
  }
  return true;
}

// --- miss: decide
// ---------------------------------------------------------------------------------

TensorInfo info_of(c10::TensorImpl* impl) {
  TensorInfo info;
  if (!defined(impl)) return info;
  info.defined = true;
  info.dtype = c10::typeMetaToScalarType(impl->dtype());
  info.sizes.assign(impl->sizes().begin(), impl->sizes().end());
  info.strides.assign(impl->strides().begin(), impl->strides().end());
  if (is_dtensor(impl)) info.spec = meta_of(impl).spec;
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

// LibTorch's error for a call that it refuses, before anything is sent.
void check_call(const c10::OperatorHandle& op, const OpInfo& info, absl::Span<const IValue> args) {
  if (info.rule == nullptr) {
    if (info.checks_on_meta) call_with_stand_ins(op, info, args, at::kMeta);
  } else if (info.rule->refused != nullptr && info.rule->refused(op, args)) {
    call_with_stand_ins(op, info, args, at::kCPU);
  }
}

// Shapes, strides and dtypes of the results, from the operator's kernel for meta tensors. Errors of
// shape or type come from there, as LibTorch words them, on all ranks and before anything is sent.
void infer_outputs(const c10::OperatorHandle& op, const OpInfo& info, absl::Span<const IValue> args,
                   OpCall& call) {
  if (info.rule->shape_function) {
    info.rule->shape_function(call);
    return;
  }
  if (!info.has_meta_kernel) {
    if (info.rule->shape_function_without_meta) {
      info.rule->shape_function_without_meta(call);
      return;
    }
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
               other->mesh() == context.mesh() ? " (an equal mesh, but made separately)" : "",
               "; all DTensors of an operator must be on one mesh"));
    }
  });
}

std::optional<int> flat_input_of(const OpCall& call, int arg, int element = -1) {
  for (int i = 0; i < call.num_inputs(); ++i) {
    if (call.input_arg[i] == arg && call.input_element[i] == element) return i;
  }
  return std::nullopt;
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
                    c10::Device device) {
  return context.intern(layout, info.sizes, info.strides, info.dtype, device);
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
  InputChange change{i, call.input_arg[i], context.with_layout(*from, layout),
                     plan_for(context, *from, layout)};
  entry.communicates |= !change.plan.is_local();
  entry.inputs.push_back(change.target);
  entry.input_changes.push_back(std::move(change));
}

[[noreturn]] void plain_written(const c10::OperatorHandle& op) {
  fail(op, absl::StatusCode::kInvalidArgument, "writes DTensors into a plain tensor");
}

std::unique_ptr<CacheEntry> decide(const c10::OperatorHandle& op, const OpInfo& info,
                                   MeshContext& context, absl::Span<const IValue> args,
                                   Weighed* weighed = nullptr) {
  check_one_mesh(op, info, context, args);
  check_call(op, info, args);
  auto entry = std::make_unique<CacheEntry>();
  OpCall call = make_call(op, info, args);
  c10::Device device = at::kCPU;
  for (const TensorInfo& input : call.inputs) {
    if (input.spec != nullptr) device = input.spec->device;
  }
  const Layout replicated{Placements(context.mesh().ndim())};

  if (info.rule == nullptr) {
    entry->gathered = true;
    for (int i = 0; i < call.num_inputs(); ++i)
      change_input(context, call, i, replicated, device, *entry);
    for (const OpInfo::Write& write : info.writes) {
      for_each_written(write, args, [&](int element, c10::TensorImpl* impl) {
        if (!is_dtensor(impl)) {
          if (write.is_out || impl->dim() != 0) plain_written(op);
          return;  // a plain scalar: each rank writes its own
        }
        const SpecRef& spec = meta_of(impl).spec;
        CacheEntry::Written written{write.arg, element, write.output,
                                    spec,      {},      spec->layout.is_replicated()};
        if (!written.direct) {
          written.plan = plan_for(context, *context.with_layout(*spec, replicated), spec->layout);
          entry->communicates |= !written.plan.is_local();
        }
        entry->written.push_back(std::move(written));
      });
    }
    return entry;
  }

  infer_outputs(op, info, args, call);
  std::optional<int> written_input;
  for (const OpInfo::Write& write : info.writes) {
    if (!write.is_out && !info.changes_shape && !write.is_list) {
      written_input = flat_input_of(call, write.arg);
    }
  }
  Decision decision = info.rule->each_element
                          ? propagate_elements(context, call, *info.rule)
                          : propagate(context, call, *info.rule, written_input, weighed);
  entry->kernel = decision.kernel;
  for (int i = 0; i < call.num_inputs(); ++i) {
    change_input(context, call, i, decision.inputs[i], device, *entry);
  }
  for (int k = 0; k < call.num_outputs(); ++k) {
    entry->outputs.push_back(call.output(k).defined
                                 ? output_spec(context, call.output(k), decision.outputs[k], device)
                                 : SpecRef());
  }
  for (const std::string& name : info.rule->size_args) {
    const int arg = call.arg_index(name);
    if (arg < 0 || args[arg].isNone()) continue;
    entry->arg_changes.push_back(
        {arg, IValue(c10::IntArrayRef(array(entry->outputs[0]->local_sizes)))});
  }
  for (const OpInfo::Write& write : info.writes) {
    for_each_written(write, args, [&](int element, c10::TensorImpl* impl) {
      const std::optional<int> input = flat_input_of(call, write.arg, element);
      if (!is_dtensor(impl)) {
        if (write.is_out || impl->dim() != 0) plain_written(op);
        return;  // a plain scalar: each rank writes its own
      }
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
        written.plan = plan_for(context, *context.with_layout(*spec, result->layout), spec->layout);
        entry->communicates |= !written.plan.is_local();
      }
      entry->written.push_back(std::move(written));
    });
  }
  return entry;
}

// --- run
// ------------------------------------------------------------------------------------------

[[noreturn]] void refuse_implicit(const c10::OperatorHandle& op, const CacheEntry& entry,
                                  const MeshContext& context, const OpCall& call) {
  std::string changes;
  for (const InputChange& change : entry.input_changes) {
    if (change.plan.is_local()) continue;
    absl::StrAppend(&changes, changes.empty() ? "" : "; ", "argument '",
                    op.schema().arguments()[change.arg].name(), "' ",
                    call.input(change.input).spec->to_string(), " -> ",
                    change.target->layout.to_string(), " (", change.plan.bytes(), " bytes)");
  }
  for (const CacheEntry::Written& written : entry.written) {
    if (written.plan.is_local()) continue;
    absl::StrAppend(&changes, changes.empty() ? "" : "; ", "result back to ",
                    written.spec->layout.to_string(), " (", written.plan.bytes(), " bytes)");
  }
  const std::string module = context.modules.current();
  fail(
      op, absl::StatusCode::kFailedPrecondition,
      absl::StrCat("needs communication that the strict scope refuses",
                   module.empty() ? "" : absl::StrCat(" in module '", module, "'"), ": ", changes));
}

// Says once per operator that it has no rule.
void note_gathered(const c10::OperatorHandle& op, MeshContext& context) {
  ++context.counters.gathered_operators;
  if (!context.warned.insert(name_of(op)).second) return;
  for (int64_t c : context.coordinate()) {
    if (c != 0) return;
  }
  TORCH_WARN("shardweave: ", name_of(op),
             " has no sharding rule; its inputs are gathered on every rank");
}

// A local result of an operator without a rule: the same on all ranks.
at::Tensor wrap_replicated(const std::shared_ptr<MeshContext>& context, at::Tensor local) {
  SpecRef spec = replicated_spec(*context, local);
  return wrap(std::move(local), std::move(spec), context);
}

class Runner {
 public:
  Runner(const c10::OperatorHandle& op, const OpInfo& info, const CacheEntry& entry,
         const std::shared_ptr<MeshContext>& context, c10::Stack* stack, size_t base)
      : op_(op), info_(info), entry_(entry), context_(context), stack_(stack), base_(base) {}

  void run() {
    keep_written();
    replace_inputs();
    for (const ArgChange& change : entry_.arg_changes) (*stack_)[base_ + change.arg] = change.value;
    for (Kept& k : kept_) k.local = written_arg(*k.written);
    if (entry_.kernel != nullptr) {
      entry_.kernel(op_, *stack_, {entry_.inputs, entry_.outputs});
    } else {
      op_.callBoxed(stack_);
    }
    finish_written();
    context_->counters.implicit_redistributions += static_cast<int64_t>(detoured_.size());
    for (const auto& detour : detoured_) write_back(*context_, *detour, op_.operator_name().name);
    wrap_outputs();
  }

 private:
  struct Kept {
    const CacheEntry::Written* written;
    at::Tensor handle;  // the DTensor that the operator writes
    at::Tensor local;   // what the local operator got for it
  };

  // What now stands where the operator writes.
  at::Tensor written_arg(const CacheEntry::Written& written) const {
    const IValue& v = (*stack_)[base_ + written.arg];
    return written.element < 0 ? v.toTensor() : v.toListRef()[written.element].toTensor();
  }

  void keep_written() {
    for (const CacheEntry::Written& written : entry_.written) {
      at::Tensor handle = written_arg(written);
      if (const auto& detour = meta_of(handle).detour; detour != nullptr) {
        if (!detour->moved.defined()) refuse_write(handle);
        detoured_.push_back(detour);
      }
      if (written.direct && written.output < 0 && !info_.changes_shape && !entry_.gathered)
        continue;
      kept_.push_back({&written, std::move(handle), {}});
    }
  }

  [[noreturn]] void refuse_write(const at::Tensor& handle) {
    fail(op_, absl::StatusCode::kFailedPrecondition,
         absl::StrCat(
             "writes to a view of a DTensor that had to be made by communication, so that the "
             "original would not change: ",
             meta_of(handle).spec->to_string(), "; clone() it first"));
  }

  at::Tensor changed(const InputChange& change, const at::Tensor& local) {
    if (!change.plan.is_local()) ++context_->counters.implicit_redistributions;
    at::Tensor result = run_plan(*context_, change.plan, local, change.target->sizes,
                                 {.name = op_.operator_name().name,
                                  .argument = op_.schema().arguments()[change.arg].name()});
    if (local.dim() == 0 && local.unsafeGetTensorImpl()->is_wrapped_number()) {
      if (result.is_same(local)) return result;
      result.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    // The operator may write into it.
    if (result.is_same(local) && !entry_.written.empty()) result = result.clone();
    return result;
  }

  // The local tensor for one flat input; advances over entry_.input_changes.
  at::Tensor local_of(c10::TensorImpl* impl, const IValue& value) {
    const int i = next_input_++;
    if (!defined(impl)) return {};
    const bool sharded = is_dtensor(impl);
    if (next_change_ < entry_.input_changes.size() &&
        entry_.input_changes[next_change_].input == i) {
      const InputChange& change = entry_.input_changes[next_change_++];
      at::Tensor moved = changed(change, sharded ? meta_of(impl).local : value.toTensor());
      if (info_.is_view && sharded && detour_ == nullptr) {
        const DTensorMeta& base = meta_of(impl);
        detour_ = std::make_shared<const Detour>(
            Detour{moved, change.target, base.local, base.spec, base.detour});
      }
      return moved;
    }
    if (info_.is_view && sharded && detour_ == nullptr) {
      detour_ = meta_of(impl).detour;
      if (entry_.kernel != nullptr) source_ = meta_of(impl).local;
    }
    return sharded ? meta_of(impl).local : value.toTensor();
  }

  void replace_inputs() {
    for (size_t i = 0; i < info_.args.size(); ++i) {
      IValue& v = (*stack_)[base_ + i];
      if (info_.args[i] == ArgKind::kTensor) {
        if (info_.is_out[i]) {
          v = out_arg(i, -1, v);
        } else if (v.isTensor()) {
          v = local_of(v.unsafeToTensorImpl(), v);
        } else {
          ++next_input_;
        }
      } else if (info_.args[i] == ArgKind::kTensorList && v.isList()) {
        c10::impl::GenericList list(v.toList().elementType());
        list.reserve(v.toListRef().size());
        for (const IValue& e : v.toListRef()) {
          if (info_.is_out[i]) {
            list.push_back(out_arg(i, static_cast<int>(list.size()), e));
          } else if (e.isTensor()) {
            list.push_back(IValue(local_of(e.unsafeToTensorImpl(), e)));
          } else {
            ++next_input_;
            list.push_back(e);
          }
        }
        v = std::move(list);
      }
    }
  }

  // The local tensor that an out= operator writes instead of `v`.
  IValue out_arg(size_t arg, int element, const IValue& v) const {
    const DTensorMeta& meta = meta_of(v.unsafeToTensorImpl());
    for (const CacheEntry::Written& written : entry_.written) {
      if (written.arg != static_cast<int>(arg) || written.element != element) continue;
      if (written.direct) continue;
      // Of the size of the result: some operators do not resize.
      const bool known = !entry_.gathered && written.output >= 0;
      const Dims& sizes = known ? entry_.outputs[written.output]->local_sizes : meta.spec->sizes;
      return at::empty(array(sizes), meta.local.options());
    }
    return meta.local;
  }

  void finish_written() {
    for (Kept& k : kept_) {
      DTensorMeta& meta = meta_of(k.handle);
      if (info_.changes_shape) {
        meta.spec = k.written->spec;
        meta.local =
            k.local;  // perhaps not the same: the operator may have worked on a copy brought here
        if (!entry_.input_changes.empty() && k.handle.is_view()) {
          meta.detour = std::make_shared<const Detour>();
        }
        k.handle.unsafeGetTensorImpl()->set_sizes_and_strides(array(meta.spec->sizes),
                                                              array(meta.spec->strides));
        continue;
      }
      if (k.written->becomes) {
        convert_in_place(k.handle, std::move(k.local), k.written->spec, context_);
        continue;
      }
      if (entry_.gathered &&
          k.local.sizes() != array(meta.spec->sizes)) {  // an out= of another shape
        SpecRef spec = replicated_spec(*context_, k.local);
        convert_in_place(k.handle, std::move(k.local), std::move(spec), context_);
        continue;
      }
      if (k.written->direct) continue;
      if (!k.written->plan.is_local()) ++context_->counters.implicit_redistributions;
      meta.local.copy_(run_plan(*context_, k.written->plan, k.local, meta.spec->sizes,
                                {.name = op_.operator_name().name, .argument = "result"}));
    }
  }

  at::Tensor wrapped(at::Tensor local, size_t flat) {
    if (!local.defined()) return local;
    if (entry_.gathered) {
      at::Tensor result = wrap_replicated(context_, std::move(local));
      follow_base(result);
      return result;
    }
    const SpecRef& spec = entry_.outputs[flat];
    if (spec == nullptr || local.sizes() != array(spec->local_sizes) ||
        local.scalar_type() != spec->dtype) {
      fail(op_, absl::StatusCode::kInternal,
           absl::StrCat("the local result ", flat, " is ", c10::toString(local.scalar_type()),
                        " of shape [", absl::StrJoin(local.sizes(), ", "),
                        "], the sharding rule promised ",
                        spec == nullptr ? "none"
                                        : absl::StrCat(c10::toString(spec->dtype), " [",
                                                       absl::StrJoin(spec->local_sizes, ", "),
                                                       "] of ", spec->to_string())));
    }
    at::Tensor result = wrap(std::move(local), spec, context_);
    follow_base(result);
    return result;
  }

  // A view of something that was brought here first remembers where that came from.
  void follow_base(const at::Tensor& result) const {
    if (!info_.is_view) return;
    DTensorMeta& meta = meta_of(result);
    meta.detour = detour_;
    const at::Tensor& source = detour_ != nullptr ? detour_->moved : source_;
    if (source.defined() && meta.local.defined() && !meta.local.is_alias_of(source)) {
      meta.detour = std::make_shared<const Detour>();
    }
  }

  void wrap_outputs() {
    size_t flat = 0;
    const size_t first = stack_->size() - info_.num_returns;
    for (int r = 0; r < info_.num_returns; ++r) {
      IValue& v = (*stack_)[first + r];
      if (const Kept* k = kept_for(r)) {
        v = k->handle;
        ++flat;
      } else if (v.isTensor()) {
        v = wrapped(std::move(v).toTensor(), flat++);
      } else if (v.isTensorList()) {
        c10::List<at::Tensor> list;
        for (at::Tensor& t : v.toTensorVector()) list.push_back(wrapped(std::move(t), flat++));
        v = std::move(list);
      }
    }
  }

  const Kept* kept_for(int output) const {
    for (const Kept& k : kept_) {
      if (k.written->output == output) return &k;
    }
    return nullptr;
  }

  const c10::OperatorHandle& op_;
  const OpInfo& info_;
  const CacheEntry& entry_;
  const std::shared_ptr<MeshContext>& context_;
  c10::Stack* const stack_;
  const size_t base_;
  absl::InlinedVector<Kept, 1> kept_;
  int next_input_ = 0;
  size_t next_change_ = 0;
  std::shared_ptr<const Detour> detour_;                 // of a view's base, or made here
  at::Tensor source_;                                    // what a view's kernel may have copied
  std::vector<std::shared_ptr<const Detour>> detoured_;  // of written views
};

bool is_composed(const c10::OperatorHandle& op, const OpInfo& info, absl::Span<const IValue> args) {
  const Rule* rule = info.rule;
  if (rule == nullptr || rule->composite == nullptr) return false;
  return rule->composite_condition == nullptr || rule->composite_condition(op, args);
}

}  // namespace

std::optional<Decided> decide_only(const c10::OperatorHandle& op, absl::Span<const IValue> args) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  MeshContext& context = *find_context(op, args);
  const OpInfo& info = context.op_info(op);
  if (is_composed(op, info, args) || info.decompose) return std::nullopt;
  CacheKey key;
  if (!make_key(info, args, key)) {
    fail(op, absl::StatusCode::kInvalidArgument, "a plain tensor among DTensors has no layout");
  }
  OpCall call = make_call(op, info, args);
  Decided decided{&context, nullptr, std::move(call.inputs), std::move(call.input_arg), {}};
  decided.entry = decide(op, info, context, args, &decided.weighed);
  return decided;
}

void dispatch(const c10::OperatorHandle& op, c10::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const size_t num_args = op.schema().arguments().size();
  const size_t base = stack->size() - num_args;
  auto args = absl::MakeSpan(*stack).subspan(base);
  // A copy: the arguments that hold it are replaced while the operator runs.
  const std::shared_ptr<MeshContext> context = find_context(op, args);
  const OpInfo& info = context->op_info(op);
  ++context->counters.operators;
  if (torch::autograd::get_current_graph_task_id() != -1) adopt_in_backward(info, context, args);
  const OperatorSpan span(*context, op, args);
  if (is_composed(op, info, args)) {
    check_call(op, info, args);
    info.rule->composite(op, *stack);
    return;
  }
  if (info.decompose) {
    op.callBoxedForDispatchKey(info.composite_key, *stack);
    return;
  }
  if (info.is_random && info.rule == nullptr) {
    fail(op, absl::StatusCode::kUnimplemented,
         "this random operator has no rule; its numbers would differ from rank to rank");
  }

  CacheKey key;
  if (!make_key(info, args, key)) {
    adopt_equal(op, info, context, args);
    key.clear();
    make_key(info, args, key);
  }
  const uint64_t hash = absl::HashOf(absl::MakeConstSpan(key));
  const CacheEntry* entry = context->cache.find(hash, key);
  if (entry == nullptr) {
    ++context->counters.cache_misses;
    std::unique_ptr<CacheEntry> made = decide(op, info, *context, args);
    made->key = std::move(key);
    entry = context->cache.insert(hash, std::move(made));
  }
  if (entry->gathered) note_gathered(op, *context);
  if (entry->communicates && context->strict_depth > 0) {
    refuse_implicit(op, *entry, *context, make_call(op, info, args));
  }
  Runner(op, info, *entry, context, stack, base).run();
}

}  // namespace shardweave

TORCH_LIBRARY_IMPL(_, Fake, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&shardweave::dispatch>());
}

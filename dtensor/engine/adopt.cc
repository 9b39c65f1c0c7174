#include "shardweave/dtensor/engine/adopt.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "ATen/core/NamedTensor.h"
#include "absl/algorithm/container.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "c10/util/Type.h"
#include "shardweave/dtensor/engine/arguments.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/remembered.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/graph_task.h"

namespace shardweave::dtensor_internal {
namespace {

using c10::IValue;

[[noreturn]] void mixed(const c10::OperatorHandle& op, size_t arg, const at::Tensor& plain,
                        const std::string& why) {
  fail(op, absl::StatusCode::kInvalidArgument,
       absl::StrCat("argument '", op.schema().arguments()[arg].name(),
                    "' is a plain tensor of shape [", absl::StrJoin(plain.sizes(), ", "),
                    "] among DTensors, and ", why));
}

// A gradient of a plain tensor would be a DTensor: nobody asks for one without recording.
void check_can_mix(const c10::OperatorHandle& op, size_t arg, const at::Tensor& plain) {
  if (plain.requires_grad() && c10::GradMode::is_enabled()) {
    mixed(op, arg, plain, "it requires grad; distribute it");
  }
  const std::string why = not_dense(plain);
  if (!why.empty()) mixed(op, arg, plain, why);
}

bool writes(const OpInfo& info, size_t arg) {
  for (const OpInfo::Write& write : info.writes) {
    if (write.arg == static_cast<int>(arg)) return true;
  }
  return false;
}

// "aten::mul.Tensor: argument 'other'"
std::string described(const PlainTensors::Use& use) {
  if (!use.op.has_value()) return "a gradient, or a module's input that its plan lays out,";
  return absl::StrCat(name_of(*use.op), ": argument '",
                      use.op->schema().arguments()[use.arg].name(), "'");
}

bool is_written(const PlainTensors::Use& use) {
  if (!use.op.has_value()) return false;
  const c10::AliasInfo* alias = use.op->schema().arguments()[use.arg].alias_info();
  return alias != nullptr && alias->isWrite();
}

constexpr char kMakeOne[] =
    "make one DTensor of the ranks' parts (from_local), or draw random numbers as one DTensor "
    "(randn with the mesh, randn_like)";

std::string difference_of(const PlainTensors::Use& use) {
  return absl::StrCat(
      described(use), " is a plain tensor among DTensors that differs from rank to rank; ",
      kMakeOne,
      is_written(use)
          ? " (if it is the state of an optimizer that made a step before the parameters "
            "were distributed: make the optimizer after that)"
          : "");
}

Cause cause_of(const PlainTensors::Use& use) {
  if (!use.op.has_value()) return {.name = "a plain gradient"};
  return {.name = use.op->operator_name().name,
          .argument = use.op->schema().arguments()[use.arg].name()};
}

// Compares the checksums of plain tensors, which are those of arguments `of`, with the other ranks'.
void compare_now(const c10::OperatorHandle& op, const std::vector<size_t>& of, MeshContext& context,
                 const std::vector<uint64_t>& sums) {
  if (context.decisions.strict_depth > 0) {
    fail(op, absl::StatusCode::kFailedPrecondition,
         absl::StrCat(
             "argument '", op.schema().arguments()[of[0]].name(),
             "' is a plain tensor among DTensors, which the strict scope refuses: that it is "
             "the same on all ranks takes communication to find out; distribute it before, "
             "replicated and without a source, or call the operator once before the scope"));
  }
  if (auto difference = first_difference(context, sums, cause_of({op, of[0]}))) {
    throw Error(absl::InvalidArgumentError(difference_of({op, of[difference->index]})));
  }
}

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

bool is_number(const at::Tensor& plain) {
  return plain.dim() == 0;
}

constexpr size_t kMaxPlaces = 4096;
constexpr size_t kMaxRuns = 256;

uint64_t followed_by(uint64_t sum, uint64_t next) {
  return checksum(sum, {reinterpret_cast<const char*>(&next), sizeof(next)});
}

}  // namespace

std::string not_dense(const at::Tensor& plain) {
  if (plain.layout() != at::kStrided) {
    std::ostringstream layout;
    layout << plain.layout();
    return absl::StrCat("it is not dense, but ", layout.str());
  }
  if (plain.is_quantized()) return "it is not dense, but quantized";
  if (plain.is_nested()) return "it is not dense, but nested";
  return "";
}

SpecRef replicated_spec(MeshContext& context, const at::Tensor& local) {
  const auto sizes = local.sizes();
  const auto strides = local.strides();
  return context.intern(Layout(Placements(context.mesh().ndim())), {sizes.data(), sizes.size()},
                        {strides.data(), strides.size()}, local.scalar_type(), local.device());
}

// Not on one rank, which has nobody to compare with; nor while a step is captured, when there is
// nothing in it yet: called before, it was compared.
bool is_read_for_comparison(const MeshContext& context, const at::Tensor& plain) {
  return context.mesh().size() > 1 && (context.captures.under_way == nullptr || plain.is_cpu());
}

at::Tensor as_dtensor(const at::Tensor& grad, const std::shared_ptr<MeshContext>& context) {
  if (is_dtensor(grad.unsafeGetTensorImpl())) return grad;
  // A formula's zero without memory (of a sign, for one). Collectives read memory.
  if (grad._is_zerotensor()) return as_dtensor(grad.clone(), context);
  if (is_read_for_comparison(*context, grad)) context->plain_tensors.put_off({}, grad);
  if (c10::GradMode::is_enabled() && grad.requires_grad()) {  // its derivative may be asked for
    return from_local(grad, MeshPtr(context, &context->connected_mesh()),
                      Placements(context->mesh().ndim()), grad.sizes().vec());
  }
  return wrap(grad.detach(), replicated_spec(*context, grad), context);
}

void PlainTensors::meet_at(uint64_t place) {
  if (places_.size() == kMaxPlaces) places_.clear();
  places_.insert(place);
}

void PlainTensors::put_off(const Use& use, const at::Tensor& plain) {
  if (failure_.empty()) put_off_.add(use, checksum(plain));
}

void PlainTensors::PutOff::add(const Use& use, uint64_t sum) {
  if (count++ % run_length != 0) {
    runs.back().last = use;
    runs.back().sum = followed_by(runs.back().sum, sum);
    return;
  }
  if (runs.size() == kMaxRuns) {  // each two become one
    for (size_t i = 0; i < kMaxRuns / 2; ++i) {
      const Run &a = runs[2 * i], &b = runs[2 * i + 1];
      runs[i] = {a.first, b.last, followed_by(a.sum, b.sum)};
    }
    runs.resize(kMaxRuns / 2);
    run_length *= 2;
  }
  runs.push_back({use, use, sum});
}

void settle_plain_tensors(MeshContext& context) {
  PlainTensors& plain = context.plain_tensors;
  if (!plain.failure_.empty()) {
    throw Error(absl::FailedPreconditionError(
        absl::StrCat("no value leaves this mesh any more, for it may differ from rank to rank: ",
                     plain.failure_)));
  }
  PlainTensors::PutOff& put_off = plain.put_off_;
  if (put_off.count == 0) return;
  const Cause cause = cause_of(put_off.runs[0].first);
  uint64_t all = static_cast<uint64_t>(put_off.count);
  for (const PlainTensors::Run& run : put_off.runs) all = followed_by(all, run.sum);
  if (!first_difference(context, {all}, cause).has_value()) {
    put_off = {};
    return;
  }
  // All ranks know, and look for the first.
  std::vector<uint64_t> sums = {static_cast<uint64_t>(put_off.count)};
  for (const PlainTensors::Run& run : put_off.runs) sums.push_back(run.sum);
  sums.resize(1 + kMaxRuns);
  const std::optional<Difference> difference = first_difference(context, sums, cause);
  if (!difference.has_value()) {
    plain.failure_ = "plain tensors among DTensors differ from rank to rank";
  } else if (difference->index == 0) {
    plain.failure_ =
        absl::StrCat("ranks ", difference->ranks[0], " and ", difference->ranks[1],
                     " have not used equally many plain tensors among DTensors (this one ",
                     put_off.count, ", the last in ", described(put_off.runs.back().last), ")");
  } else {
    const PlainTensors::Run& run = put_off.runs[difference->index - 1];
    plain.failure_ =
        put_off.run_length == 1
            ? difference_of(run.first)
            : absl::StrCat("one of ", put_off.run_length,
                           " plain tensors among DTensors, used one after the other from \"",
                           described(run.first), "\" to \"", described(run.last),
                           "\", differs from rank to rank; ", kMakeOne);
  }
  put_off = {};
  throw Error(absl::InvalidArgumentError(plain.failure_));
}

namespace {

// A formula of LibTorch's runs: it writes only what it has made, and makes the same on every rank. Not
// so a user's function or hook, which may write what others hold, on some of the ranks. (Hooks run for
// a node as well, but only its formula runs without names, Node::operator().)
bool in_formula() {
  const auto node = torch::autograd::get_current_node();
  return node != nullptr && !at::NamesMode::is_enabled() &&
         std::string_view(c10::demangle(typeid(*node).name()))
             .starts_with("torch::autograd::generated::");
}

// All its memory is its own.
bool is_alone(const at::Tensor& t) {
  const bool sharded = is_dtensor(t.unsafeGetTensorImpl());
  const at::Tensor& memory = sharded ? meta_of(t).local() : t;
  return !t.is_view() && memory.has_storage() && memory.storage().use_count() == 1 &&
         memory.is_contiguous() && !(sharded && meta_of(t).family != nullptr);
}

bool any_is_cut(const OpInfo& info, absl::Span<const IValue> args) {
  bool any = false;
  for_each_tensor(info, args, [&](size_t, c10::TensorImpl* impl) {
    any |= defined(impl) && is_dtensor(impl) &&
           absl::c_any_of(meta_of(impl).spec->layout.placements(),
                          [](const Placement& p) { return p.is_shard(); });
  });
  return any;
}

// Of a whole tensor that is about to be written: cut along the mesh dimensions along which what it is
// written beside is cut, in the same dimension of the same size, and data where that is.
struct Beside {
  Layout layout;
  CutOrigins origins;
};
Beside layout_beside(const MeshContext& context, const at::Tensor& whole, const OpInfo& info,
                     absl::Span<const IValue> args) {
  Placements placements(context.mesh().ndim());
  std::vector<int> order = Layout(placements).order();
  std::vector<bool> differs(placements.size());
  CutOrigins origins;
  for_each_tensor(info, args, [&](size_t, c10::TensorImpl* impl) {
    if (!defined(impl) || !is_dtensor(impl)) return;
    const Spec& beside = *meta_of(impl).spec;
    if (beside.context != &context) return;  // refused later
    origins.data |= origins_of(impl).data;
    for (int m = 0; m < beside.layout.mesh_ndim(); ++m) {
      const Placement& p = beside.layout[m];
      if (!p.is_shard()) continue;
      const bool fits = p.kind() == PlacementKind::kShard && beside.ndim() == whole.dim() &&
                        beside.sizes[p.dim()] == whole.size(p.dim());
      differs[m] = differs[m] || !fits || (placements[m].is_shard() && placements[m] != p);
      placements[m] = p;
      order = beside.layout.order();
    }
  });
  for (size_t m = 0; m < placements.size(); ++m) {
    if (differs[m]) placements[m] = Replicate();
  }
  return {value_or_throw(Layout::create(std::move(placements), std::move(order))), origins};
}

// Calls replacement(i, v) for each plain tensor v of argument i that stands in the place of a DTensor:
// all but numbers that are read.
template <typename Replacement>
void replace_plain(const OpInfo& info, absl::Span<IValue> args, const Replacement& replacement) {
  const auto replaced = [&](size_t i, const IValue& value) -> IValue {
    if (!value.isTensor()) return value;
    const at::Tensor& plain = value.toTensor();
    if (!plain.defined() || is_dtensor(plain.unsafeGetTensorImpl())) return value;
    if (is_number(plain) && !info.is_out[i]) return value;
    return replacement(i, value);
  };
  for (size_t i = 0; i < args.size(); ++i) {
    if (info.args[i] == ArgKind::kTensor) {
      args[i] = replaced(i, args[i]);
    } else if (info.args[i] == ArgKind::kTensorList && args[i].isList()) {
      c10::impl::GenericList list(args[i].toList().elementType());
      for (const IValue& e : args[i].toListRef()) list.push_back(replaced(i, e));
      args[i] = std::move(list);
    }
  }
}

// Whether what is in an argument that is written is lost: an out= argument, what is copied over.
bool is_overwritten(const c10::OperatorHandle& op, const OpInfo& info, size_t i) {
  return info.is_out[i] || (i == 0 && (op.operator_name().name == "aten::copy_" ||
                                       op.operator_name().name == "aten::fill_"));
}

}  // namespace

void adopt_written(const c10::OperatorHandle& op, const OpInfo& info,
                   const std::shared_ptr<MeshContext>& context, absl::Span<IValue> args) {
  if (!in_backward()) return;
  for (const OpInfo::Write& write : info.writes) {
    if (write.is_list || !args[write.arg].isTensor()) continue;
    const at::Tensor& written = args[write.arg].toTensor();
    if (!written.defined()) continue;
    const bool sharded = is_dtensor(written.unsafeGetTensorImpl());
    if (sharded && (!meta_of(written).spec->layout.is_replicated() || !any_is_cut(info, args)))
      continue;
    if (!sharded && !is_overwritten(op, info, static_cast<size_t>(write.arg))) {
      context->plain_tensors.put_off({op, static_cast<size_t>(write.arg)}, written);
    }
    const Beside beside = layout_beside(*context, written, info, args);
    if (beside.layout.is_replicated() || !in_formula() || !is_alone(written)) {
      if (!sharded) {
        convert_in_place(written, written.detach(), replicated_spec(*context, written), context);
      }
      continue;
    }
    const at::Tensor whole =
        sharded ? written : wrap(written.detach(), replicated_spec(*context, written), context);
    const at::Tensor cut = redistributed(
        whole, beside.layout,
        {.name = op.operator_name().name, .argument = op.schema().arguments()[write.arg].name()});
    at::Tensor part = meta_of(cut).local().clone(at::MemoryFormat::Contiguous);
    const Spec& spec = *meta_of(cut).spec;
    const SpecRef with_origins = context->intern(spec.layout, spec.sizes, spec.strides, spec.dtype,
                                                 spec.device, beside.origins);
    if (sharded) {
      meta_of(written).part = LocalPart(std::move(part));
      meta_of(written).spec = with_origins;
    } else {
      convert_in_place(written, std::move(part), with_origins, context);
    }
  }
}

void adopt_equal(const c10::OperatorHandle& op, const OpInfo& info,
                 const std::shared_ptr<MeshContext>& context, absl::Span<IValue> args) {
  const bool later = in_backward();
  std::vector<uint64_t> sums;  // to be compared now
  std::vector<size_t> of;      // the arguments that these are of
  std::vector<uint64_t> new_places;
  std::vector<at::Tensor> becoming;  // DTensors where they stand, for the operator writes to them
  replace_plain(info, args, [&](size_t i, const IValue& value) -> IValue {
    const at::Tensor& plain = value.toTensor();
    check_can_mix(op, i, plain);
    SpecRef spec = replicated_spec(*context, plain);
    // Not its shape: ranks that have different ones shall do the same all the same.
    const uint64_t place = absl::HashOf(&op.operator_name(), i, static_cast<int>(spec->dtype));
    const bool is_known = later || context->plain_tensors.has_met_at(place);
    if (is_overwritten(op, info, i)) {
      // Memory of ranks, with nothing in it that anybody reads.
    } else if (!is_read_for_comparison(*context, plain)) {
      if (context->mesh().size() > 1 && !is_known) {
        throw Error(absl::FailedPreconditionError(absl::StrCat(
            op.operator_name().name, ": argument '", op.schema().arguments()[i].name(),
            "' is a plain tensor that the ranks have not compared yet, in a step that is captured: "
            "take a step before, or distribute it")));
      }
    } else if (is_known) {
      context->plain_tensors.put_off({op, i}, plain);
    } else {
      sums.push_back(checksum(plain));
      of.push_back(i);
      new_places.push_back(place);
    }
    if (!writes(info, i)) return wrap(plain.detach(), std::move(spec), context);
    becoming.push_back(plain);
    return value;
  });
  if (!sums.empty() && context->mesh().size() > 1) compare_now(op, of, *context, sums);
  for (const uint64_t place : new_places) context->plain_tensors.meet_at(place);
  for (const at::Tensor& plain : becoming) {
    convert_in_place(plain, plain.detach(), replicated_spec(*context, plain), context);
  }
}

std::vector<IValue> taken_as_equal(const c10::OperatorHandle& op, const OpInfo& info,
                                   const std::shared_ptr<MeshContext>& context,
                                   absl::Span<const IValue> args) {
  std::vector<IValue> result(args.begin(), args.end());
  replace_plain(info, absl::MakeSpan(result), [&](size_t i, const IValue& value) -> IValue {
    const at::Tensor& plain = value.toTensor();
    check_can_mix(op, i, plain);
    return wrap(plain.detach(), replicated_spec(*context, plain), context);
  });
  return result;
}

at::Tensor adopted(const c10::OperatorHandle& op, size_t arg, const at::Tensor& plain,
                   const std::shared_ptr<MeshContext>& context) {
  check_can_mix(op, arg, plain);
  if (is_read_for_comparison(*context, plain)) context->plain_tensors.put_off({op, arg}, plain);
  return wrap(plain.detach(), replicated_spec(*context, plain), context);
}

void put_off_numbers(const c10::OperatorHandle& op, const OpInfo& info, MeshContext& context,
                     absl::Span<const IValue> args) {
  bool leaves = false;
  auto look = [&](size_t i, const IValue& value) {
    if (!value.isTensor()) return;
    const at::Tensor& plain = value.toTensor();
    if (!plain.defined() || is_dtensor(plain.unsafeGetTensorImpl()) ||
        plain.unsafeGetTensorImpl()->is_wrapped_number()) {
      return;
    }
    check_can_mix(op, i, plain);
    if (writes(info, i)) {
      leaves = true;
    } else {
      if (is_read_for_comparison(context, plain)) context.plain_tensors.put_off({op, i}, plain);
    }
  };
  for (size_t i = 0; i < args.size(); ++i) {
    if (info.args[i] == ArgKind::kTensor) {
      look(i, args[i]);
    } else if (info.args[i] == ArgKind::kTensorList && args[i].isList()) {
      for (const IValue& e : args[i].toListRef()) look(i, e);
    }
  }
  if (leaves) settle_plain_tensors(context);
}

}  // namespace shardweave::dtensor_internal

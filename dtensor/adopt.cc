#include "shardweave/dtensor/adopt.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/arguments.h"
#include "shardweave/dtensor/checksum.h"
#include "shardweave/dtensor/mesh_context.h"
#include "shardweave/dtensor/tensor_impl.h"
#include "torch/csrc/autograd/graph_task.h"

namespace shardweave::dtensor_internal {
namespace {

using c10::IValue;

[[noreturn]] void mixed(const c10::OperatorHandle& op, size_t arg, const at::Tensor& plain,
                        const char* why) {
  fail(op, absl::StatusCode::kInvalidArgument,
       absl::StrCat("argument '", op.schema().arguments()[arg].name(),
                    "' is a plain tensor of shape [", absl::StrJoin(plain.sizes(), ", "),
                    "] among DTensors, and ", why, "; distribute it"));
}

// A gradient of a plain tensor would be a DTensor: nobody asks for one without recording.
void check_can_mix(const c10::OperatorHandle& op, size_t arg, const at::Tensor& plain) {
  if (plain.requires_grad() && c10::GradMode::is_enabled()) {
    mixed(op, arg, plain, "it requires grad");
  }
  if (plain.layout() != at::kStrided) mixed(op, arg, plain, "it is not dense");
}

bool writes(const OpInfo& info, size_t arg) {
  for (const OpInfo::Write& write : info.writes) {
    if (write.arg == static_cast<int>(arg)) return true;
  }
  return false;
}

[[noreturn]] void differs(const PlainTensors::Use& use) {
  const std::string what = "that differs from rank to rank; make one DTensor of the ranks' parts";
  if (!use.op.has_value()) {
    throw Error(absl::InvalidArgumentError(
        absl::StrCat("a gradient is a plain tensor among DTensors ", what)));
  }
  fail(*use.op, absl::StatusCode::kInvalidArgument,
       absl::StrCat("argument '", use.op->schema().arguments()[use.arg].name(),
                    "' is a plain tensor among DTensors ", what));
}

Cause cause_of(const PlainTensors::Use& use) {
  if (!use.op.has_value()) return {.name = "a plain gradient"};
  return {.name = use.op->operator_name().name,
          .argument = use.op->schema().arguments()[use.arg].name()};
}

// Compares the checksums of plain tensors, which are those of arguments `of`, with the other ranks'.
void compare_now(const c10::OperatorHandle& op, const std::vector<size_t>& of, MeshContext& context,
                 const std::vector<uint64_t>& sums) {
  if (context.strict_depth > 0) {
    fail(op, absl::StatusCode::kFailedPrecondition,
         absl::StrCat(
             "argument '", op.schema().arguments()[of[0]].name(),
             "' is a plain tensor among DTensors, which the strict scope refuses: that it is "
             "the same on all ranks takes communication to find out"));
  }
  if (auto difference = first_difference(context, sums, cause_of({op, of[0]}))) {
    differs({op, of[difference->index]});
  }
}

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

bool is_number(const at::Tensor& plain) {
  return plain.dim() == 0;
}

constexpr size_t kMaxMet = 1024;
// Of those that are put off, as many are told apart.
constexpr size_t kMaxTold = 256;

}  // namespace

SpecRef replicated_spec(MeshContext& context, const at::Tensor& local) {
  const auto sizes = local.sizes();
  const auto strides = local.strides();
  return context.intern(Layout(Placements(context.mesh().ndim())), {sizes.data(), sizes.size()},
                        {strides.data(), strides.size()}, local.scalar_type(), local.device());
}

at::Tensor as_dtensor(const at::Tensor& grad, const std::shared_ptr<MeshContext>& context) {
  if (is_dtensor(grad.unsafeGetTensorImpl())) return grad;
  context->plain_tensors.put_off({}, grad);
  if (c10::GradMode::is_enabled() && grad.requires_grad()) {  // its derivative may be asked for
    return from_local(grad, MeshPtr(context, &context->connected_mesh()),
                      Placements(context->mesh().ndim()), grad.sizes().vec());
  }
  return wrap(grad.detach(), replicated_spec(*context, grad), context);
}

bool PlainTensors::met(const at::Tensor& plain) const {
  return plain.has_storage() && met_.contains(plain.storage().unsafeGetStorageImpl());
}

void PlainTensors::meet(const at::Tensor& plain) {
  if (!plain.has_storage() || met(plain)) return;
  met_.insert(plain.storage().unsafeGetStorageImpl());
  order_.emplace_back(plain.storage().unsafeGetStorageImpl(), plain.storage().getWeakStorageImpl());
  if (order_.size() <= kMaxMet) return;
  met_.erase(order_.front().first);
  order_.pop_front();
}

void PlainTensors::put_off(const Use& use, const at::Tensor& plain) {
  const uint64_t sum = checksum(plain);
  const char* const bytes = reinterpret_cast<const char*>(&sum);
  put_off_.sum = checksum(put_off_.sum + 1, {bytes, sizeof(sum)});
  if (put_off_.sums.size() == kMaxTold) return;
  put_off_.sums.push_back(sum);
  put_off_.uses.push_back(use);
}

void settle_plain_tensors(MeshContext& context) {
  if (context.plain_tensors.put_off_.sums.empty()) return;
  PlainTensors::PutOff all = std::exchange(context.plain_tensors.put_off_, {});
  const Cause cause = cause_of(all.uses[0]);
  if (!first_difference(context, {all.sum}, cause).has_value()) return;
  // All ranks know, and look for the first.
  all.sums.resize(kMaxTold);
  const std::optional<Difference> difference = first_difference(context, all.sums, cause);
  const bool told = difference.has_value() && difference->index < all.uses.size();
  differs(told ? all.uses[difference->index] : all.uses.back());
}

void adopt_written(const c10::OperatorHandle& op, const OpInfo& info,
                   const std::shared_ptr<MeshContext>& context, absl::Span<IValue> args) {
  for (const OpInfo::Write& write : info.writes) {
    if (write.is_list || !args[write.arg].isTensor()) continue;
    const at::Tensor& plain = args[write.arg].toTensor();
    if (!plain.defined() || is_dtensor(plain.unsafeGetTensorImpl()) || !in_backward()) continue;
    if (!write.is_out) {
      context->plain_tensors.put_off({op, static_cast<size_t>(write.arg)}, plain);
    }
    convert_in_place(plain, plain.detach(), replicated_spec(*context, plain), context);
  }
}

void adopt_equal(const c10::OperatorHandle& op, const OpInfo& info,
                 const std::shared_ptr<MeshContext>& context, absl::Span<IValue> args) {
  const bool later = in_backward();
  std::vector<uint64_t> sums;  // to be compared now
  std::vector<size_t> of;      // the arguments that these are of
  std::vector<at::Tensor> first_met;
  std::vector<at::Tensor> becoming;  // DTensors where they stand, for the operator writes to them
  auto adopted = [&](size_t i, const IValue& value) -> IValue {
    if (!value.isTensor()) return value;
    const at::Tensor& plain = value.toTensor();
    if (!plain.defined() || is_dtensor(plain.unsafeGetTensorImpl())) return value;
    if (is_number(plain) && !info.is_out[i]) return value;
    check_can_mix(op, i, plain);
    if (info.is_out[i]) {
      // What is in it is lost.
    } else if (later || context->plain_tensors.met(plain)) {
      context->plain_tensors.put_off({op, i}, plain);
    } else {
      sums.push_back(checksum(plain));
      of.push_back(i);
      first_met.push_back(plain);
    }
    if (!writes(info, i)) return wrap(plain.detach(), replicated_spec(*context, plain), context);
    becoming.push_back(plain);
    return value;
  };
  for (size_t i = 0; i < args.size(); ++i) {
    if (info.args[i] == ArgKind::kTensor) {
      args[i] = adopted(i, args[i]);
    } else if (info.args[i] == ArgKind::kTensorList && args[i].isList()) {
      c10::impl::GenericList list(args[i].toList().elementType());
      for (const IValue& e : args[i].toListRef()) list.push_back(adopted(i, e));
      args[i] = std::move(list);
    }
  }
  if (!sums.empty() && context->mesh().size() > 1) compare_now(op, of, *context, sums);
  for (const at::Tensor& plain : first_met) context->plain_tensors.meet(plain);
  for (const at::Tensor& plain : becoming) {
    convert_in_place(plain, plain.detach(), replicated_spec(*context, plain), context);
  }
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
      context.plain_tensors.put_off({op, i}, plain);
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

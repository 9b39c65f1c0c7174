#include "shardweave/dtensor/adopt.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/arguments.h"
#include "shardweave/dtensor/checksum.h"
#include "shardweave/dtensor/mesh_context.h"
#include "shardweave/dtensor/tensor_impl.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/graph_task.h"

namespace shardweave::dtensor_internal {
namespace {

using c10::IValue;

[[noreturn]] void mixed(const c10::OperatorHandle& op, size_t arg, const at::Tensor& plain,
                        const char* why) {
  fail(op, absl::StatusCode::kInvalidArgument,
       absl::StrCat("argument '", op.schema().arguments()[arg].name(),
                    "' is a plain tensor of shape [", absl::StrJoin(plain.sizes(), ", "),
                    "] among DTensors, and ", why, "; make it a DTensor with distribute_tensor()"));
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

[[noreturn]] void differs(const c10::OperatorHandle& op, size_t arg) {
  fail(op, absl::StatusCode::kInvalidArgument,
       absl::StrCat("argument '", op.schema().arguments()[arg].name(),
                    "' is a plain tensor among DTensors that differs from rank to rank; make it a "
                    "DTensor with from_local()"));
}

// Compares the checksums of plain tensors, which are those of arguments `of`, with the other ranks'.
void check_equal(const c10::OperatorHandle& op, const std::vector<size_t>& of, MeshContext& context,
                 const std::vector<uint64_t>& sums) {
  const std::string& name = op.schema().arguments()[of[0]].name();
  if (context.strict_depth > 0) {
    fail(op, absl::StatusCode::kFailedPrecondition,
         absl::StrCat(
             "argument '", name,
             "' is a plain tensor among DTensors, which the strict scope refuses: that it is "
             "the same on all ranks takes communication to find out"));
  }
  const Cause cause{.name = op.operator_name().name, .argument = name};
  if (auto difference = first_difference(context, sums, cause)) differs(op, of[difference->index]);
}

// A tensor without a version counter may be written unseen.
bool has_version(c10::TensorImpl* impl) {
  return !impl->is_inference();
}

constexpr size_t kMaxPutOff = 256;

}  // namespace

SpecRef replicated_spec(MeshContext& context, const at::Tensor& local) {
  const auto sizes = local.sizes();
  const auto strides = local.strides();
  return context.intern(Layout(Placements(context.mesh().ndim())), {sizes.data(), sizes.size()},
                        {strides.data(), strides.size()}, local.scalar_type(), local.device());
}

at::Tensor as_dtensor(const at::Tensor& grad, const std::shared_ptr<MeshContext>& context) {
  if (is_dtensor(grad.unsafeGetTensorImpl())) return grad;
  if (c10::GradMode::is_enabled() && grad.requires_grad()) {  // its derivative may be asked for
    return from_local(grad, MeshPtr(context, &context->connected_mesh()),
                      Placements(context->mesh().ndim()), grad.sizes().vec());
  }
  return wrap(grad.detach(), replicated_spec(*context, grad), context);
}

bool EqualTensors::contains(c10::TensorImpl* impl) const {
  const auto found = states_.find(impl);
  return found != states_.end() && has_version(impl) &&
         found->second.version == impl->version_counter().current_version();
}

void EqualTensors::add(const at::Tensor& plain) {
  c10::TensorImpl* impl = plain.unsafeGetTensorImpl();
  if (!has_version(impl)) return;
  states_.insert_or_assign(impl, State{decltype(State::alive)(plain.getIntrusivePtr()),
                                       impl->version_counter().current_version(), num_added_});
  order_.emplace_back(impl, num_added_++);
  while (order_.size() > capacity_) {
    const auto [oldest, added] = order_.front();
    order_.pop_front();
    const auto found = states_.find(oldest);
    if (found->second.added == added) states_.erase(found);
  }
}

void settle_numbers(MeshContext& context) {
  if (context.plain_tensors.put_off.empty()) return;
  const std::vector<PlainTensors::Number> numbers =
      std::exchange(context.plain_tensors.put_off, {});
  if (context.mesh().size() == 1) return;
  std::vector<uint64_t> sums;
  for (const PlainTensors::Number& number : numbers) sums.push_back(number.sum);
  const PlainTensors::Number& first = numbers[0];
  const Cause cause{.name = first.op.operator_name().name,
                    .argument = first.op.schema().arguments()[first.arg].name()};
  if (auto difference = first_difference(context, sums, cause)) {
    const PlainTensors::Number& number = numbers[difference->index];
    differs(number.op, number.arg);
  }
}

bool in_formula() {
  if (torch::autograd::get_current_graph_task_id() == -1) return false;
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return false;
  // Its hooks run as part of the node.
  if (!node->pre_hooks().empty() || !node->post_hooks().empty() ||
      !node->tensor_pre_hooks().empty() || node->tensor_post_acc_grad_hooks() != nullptr) {
    return false;
  }
  if (node->is_traceable()) return true;
  // LibTorch's other nodes (AccumulateGrad, CopySlices, ...), but not a user's Function.
  const torch::autograd::Node& of = *node;
  const std::string_view type = typeid(of).name();
  return type.starts_with("N5torch8autograd") && type.find("CppNode") == std::string_view::npos;
}

void adopt_written(const OpInfo& info, const std::shared_ptr<MeshContext>& context,
                   absl::Span<IValue> args) {
  for (const OpInfo::Write& write : info.writes) {
    if (write.is_list || !args[write.arg].isTensor()) continue;
    const at::Tensor& plain = args[write.arg].toTensor();
    if (!plain.defined() || is_dtensor(plain.unsafeGetTensorImpl()) || !in_formula()) continue;
    convert_in_place(plain, plain.detach(), replicated_spec(*context, plain), context);
  }
}

void adopt_equal(const c10::OperatorHandle& op, const OpInfo& info,
                 const std::shared_ptr<MeshContext>& context, absl::Span<IValue> args) {
  const bool trusted = in_formula();
  std::vector<uint64_t> sums;
  std::vector<size_t> of;            // the arguments that these are of
  std::vector<at::Tensor> compared;  // whose sums these are
  std::vector<at::Tensor> becoming;  // DTensors where they stand, for the operator writes to them
  auto adopted = [&](size_t i, const IValue& value) -> IValue {
    if (!value.isTensor()) return value;
    const at::Tensor& plain = value.toTensor();
    if (!plain.defined() || is_dtensor(plain.unsafeGetTensorImpl())) return value;
    if (plain.dim() == 0 && !info.is_out[i]) return value;
    check_can_mix(op, i, plain);
    // What is in an out= argument is lost.
    if (!trusted && !info.is_out[i] &&
        !context->plain_tensors.equal.contains(plain.unsafeGetTensorImpl())) {
      sums.push_back(checksum(plain));
      of.push_back(i);
      compared.push_back(plain);
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
  if (!sums.empty() && context->mesh().size() > 1) check_equal(op, of, *context, sums);
  for (const at::Tensor& plain : compared) context->plain_tensors.equal.add(plain);
  for (const at::Tensor& plain : becoming) {
    convert_in_place(plain, plain.detach(), replicated_spec(*context, plain), context);
  }
}

void put_off_numbers(const c10::OperatorHandle& op, const OpInfo& info, MeshContext& context,
                     absl::Span<const IValue> args) {
  if (in_formula()) return;
  auto look = [&](size_t i, const IValue& value) {
    if (!value.isTensor()) return;
    const at::Tensor& plain = value.toTensor();
    if (!plain.defined() || is_dtensor(plain.unsafeGetTensorImpl()) ||
        plain.unsafeGetTensorImpl()->is_wrapped_number()) {
      return;
    }
    check_can_mix(op, i, plain);
    PlainTensors& known = context.plain_tensors;
    if (known.numbers.contains(plain.unsafeGetTensorImpl())) return;
    known.numbers.add(plain);
    known.put_off.push_back({op, i, checksum(plain)});
  };
  for (size_t i = 0; i < args.size(); ++i) {
    if (info.args[i] == ArgKind::kTensor) {
      look(i, args[i]);
    } else if (info.args[i] == ArgKind::kTensorList && args[i].isList()) {
      for (const IValue& e : args[i].toListRef()) look(i, e);
    }
  }
  if (context.plain_tensors.put_off.size() >= kMaxPutOff) settle_numbers(context);
}

}  // namespace shardweave::dtensor_internal

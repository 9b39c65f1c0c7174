#include "shardweave/dtensor/adopt.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/arguments.h"
#include "shardweave/dtensor/observer.h"
#include "shardweave/dtensor/tensor_impl.h"

namespace shardweave {
namespace {

using c10::IValue;

[[noreturn]] void mixed(const c10::OperatorHandle& op, size_t arg, const at::Tensor& plain,
                        const char* why) {
  fail(op, absl::StatusCode::kInvalidArgument,
       absl::StrCat("argument '", op.schema().arguments()[arg].name(),
                    "' is a plain tensor of shape [", absl::StrJoin(plain.sizes(), ", "),
                    "] among DTensors, and ", why, "; make it a DTensor with distribute_tensor()"));
}

bool writes(const OpInfo& info, size_t arg) {
  for (const OpInfo::Write& write : info.writes) {
    if (write.arg == static_cast<int>(arg)) return true;
  }
  return false;
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

// Compares the checksums of plain tensors, of which the first is that of argument `first`, with the
// other ranks'.
void check_equal(const c10::OperatorHandle& op, size_t first, MeshContext& context,
                 std::vector<uint64_t> sums) {
  if (context.strict_depth > 0) {
    fail(op, absl::StatusCode::kFailedPrecondition,
         absl::StrCat(
             "argument '", op.schema().arguments()[first].name(),
             "' is a plain tensor among DTensors, which the strict scope refuses: that it is "
             "the same on all ranks takes communication to find out"));
  }
  std::vector<int> all_dims;
  for (int m = 0; m < context.mesh().ndim(); ++m) all_dims.push_back(m);
  Communicator& comm = context.communicator(all_dims);
  const auto count = static_cast<int64_t>(sums.size());
  std::vector<uint64_t> all(sums.size() * comm.size());
  const Cause cause{.name = op.operator_name().name,
                    .argument = op.schema().arguments()[first].name()};
  const CollectiveSpan span(context, cause, [&]() -> Sending {
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

void adopt_equal(const c10::OperatorHandle& op, const OpInfo& info,
                 const std::shared_ptr<MeshContext>& context, absl::Span<IValue> args) {
  std::vector<uint64_t> sums;
  std::vector<at::Tensor> becoming;  // DTensors where they stand, for the operator writes to them
  auto adopted = [&](size_t i, const IValue& value) -> IValue {
    if (!value.isTensor()) return value;
    const at::Tensor& plain = value.toTensor();
    if (!plain.defined() || is_dtensor(plain.unsafeGetTensorImpl())) return value;
    if (plain.dim() == 0 && !info.is_out[i]) return value;
    if (plain.requires_grad()) mixed(op, i, plain, "it requires grad");
    if (plain.layout() != at::kStrided) mixed(op, i, plain, "it is not dense");
    if (!info.is_out[i]) sums.push_back(checksum(plain));  // what is in an out= argument is lost
    if (!writes(info, i)) return wrap(plain.detach(), replicated_spec(*context, plain), context);
    becoming.push_back(plain);
    return value;
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
  if (!sums.empty() && context->mesh().size() > 1)
    check_equal(op, first, *context, std::move(sums));
  for (const at::Tensor& plain : becoming) {
    convert_in_place(plain, plain.detach(), replicated_spec(*context, plain), context);
  }
}

}  // namespace shardweave

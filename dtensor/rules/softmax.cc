// softmax, log_softmax and their gradients: every line along "dim" for itself. Lines that are cut
// stay so: a maximum and a sum of each go around, backward a sum.
#include <limits>
#include <utility>

#include "ATen/OpMathType.h"
#include "ATen/ops/amax.h"
#include "ATen/ops/full.h"
#include "ATen/ops/sum.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/remembered.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// Gradients are linear in the incoming one.
ShardedRule gradient_along_dim() {
  return sharded([lines = along_dim()](const OpCall& call, Strategies& out) {
    lines(call, out);
    out.add_linear({{"grad_output"}});
  });
}

void safe_softmax_shape(OpCall& call) {
  const c10::IValue& dtype = call.arg("dtype");
  const TensorInfo& self = call.input("self");
  call.outputs.push_back(
      contiguous_info(self.sizes, dtype.isNone() ? self.dtype : dtype.toScalarType()));
}

// --- lines that are cut --------------------------------------------------------------------------

// A maximum is one of values: a sum is taken as it has been reduced (remembered.h), if it has.
const Layout& reduced_layout(const DTensorMeta& meta) {
  const Layout& layout = meta.spec->layout;
  if (!layout.has_partial()) return layout;
  const SpecRef* kept = remembered_spec(meta, /*for_view=*/false);
  return kept == nullptr || (*kept)->layout.has_partial() ? layout : (*kept)->layout;
}
at::Tensor reduced(const c10::OperatorHandle& op, const at::Tensor& tensor,
                   std::string_view argument) {
  return move_input(op, tensor, gradient_layout(reduced_layout(meta_of(tensor))), argument);
}

// Whether a line of `tensor` lies on several ranks.
bool cuts_lines(const at::Tensor& tensor, int64_t dim) {
  if (!is_dtensor(tensor)) return false;
  const DTensorMeta& meta = meta_of(tensor);
  const Spec& spec = *meta.spec;
  const int64_t along = dim < 0 ? dim + spec.ndim() : dim;
  if (spec.numel() == 0 || !c10::isFloatingType(spec.dtype)) return false;
  const Layout& layout = reduced_layout(meta);
  for (int m = 0; m < layout.mesh_ndim(); ++m) {
    if (layout[m].is_shard(static_cast<int>(along)) && meta.context->mesh().size(m) > 1) {
      return true;
    }
  }
  return false;
}

// LibTorch's kernels for CPUs refuse half_to_float.
bool cuts_lines_forward(const Arguments& args) {
  const at::Tensor& self = args.tensor("self");
  if (!cuts_lines(self, args["dim"].toInt())) return false;
  return !args.has("half_to_float") || !args["half_to_float"].toBool() || self.is_cuda();
}

bool cuts_lines_backward(const Arguments& args) {
  const at::Tensor& grad = args.tensor("grad_output");
  const at::Tensor& output = args.tensor("output");
  return cuts_lines(output, args["dim"].toInt()) && is_dtensor(grad) &&
         grad.sizes() == output.sizes();
}

// The lines of `tensor` along `dim`, each of which several ranks have a part of.
class CutLines {
 public:
  CutLines(const c10::OperatorHandle& op, at::Tensor tensor, int64_t dim)
      : op_(op), tensor_(std::move(tensor)), dim_(dim < 0 ? dim + tensor_.dim() : dim) {}

  // This rank's part, with the digits that LibTorch's kernels count with.
  at::Tensor local(const at::Tensor& tensor) const {
    const at::Tensor& part = meta_of(tensor).local();
    return part.to(at::toOpMathType(part.scalar_type())).contiguous();
  }

  at::Tensor max(const at::Tensor& part) const {
    if (part.size(dim_) > 0) return all(at::amax(part, dim_, /*keepdim=*/true), ReduceOp::kMax);
    std::vector<int64_t> sizes = part.sizes().vec();
    sizes[dim_] = 1;
    const double none = -std::numeric_limits<double>::infinity();
    return all(at::full(sizes, none, part.options()), ReduceOp::kMax);
  }
  at::Tensor sum(const at::Tensor& part) const {
    return all(at::sum(part, dim_, /*keepdim=*/true), ReduceOp::kSum);
  }

  // A tensor of this rank's `part`, contiguous and cut as the lines are.
  at::Tensor of(const at::Tensor& part, at::ScalarType dtype) const {
    const DTensorMeta& meta = meta_of(tensor_);
    SpecRef spec = meta.context->intern(meta.spec->layout, meta.spec->sizes,
                                        contiguous_strides(meta.spec->sizes), dtype,
                                        meta.spec->device, meta.spec->origins);
    return wrap(part.to(dtype), std::move(spec), meta.context);
  }

 private:
  at::Tensor all(at::Tensor of_part, ReduceOp reduce) const {
    const Spec& spec = *meta_of(tensor_).spec;
    Placements placements = spec.layout.placements();
    for (Placement& p : placements) {
      if (p.is_shard(static_cast<int>(dim_))) p = Partial(reduce);
    }
    Dims sizes = spec.sizes;
    sizes[dim_] = 1;
    return meta_of(
               reduce_over_ranks(op_, tensor_, std::move(of_part), std::move(placements), sizes))
        .local();
  }

  const c10::OperatorHandle& op_;
  const at::Tensor tensor_;
  const int64_t dim_;
};

enum class Form : uint8_t { kSoftmax, kLogSoftmax, kSafeSoftmax };

template <Form form>
void softmax_of_cut_lines(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = reduced(op, call.tensor("self"), "self");
  const CutLines lines(op, self, call["dim"].toInt());
  at::ScalarType dtype = self.scalar_type();
  if (call.flag("half_to_float")) dtype = at::kFloat;
  at::Tensor x = lines.local(self);
  if (form == Form::kSafeSoftmax && !call["dtype"].isNone()) {
    dtype = call["dtype"].toScalarType();
    x = x.to(at::toOpMathType(dtype));
  }
  const at::Tensor max = lines.max(x);
  at::Tensor result = x.sub(max);
  if (form == Form::kLogSoftmax) {
    // First the one, then the other: their sum has lost the digits of the smaller.
    result.sub_(lines.sum(result.exp()).log_());
  } else {
    result.exp_();
    result.div_(lines.sum(result));
  }
  if (form == Form::kSafeSoftmax) {
    result.masked_fill_(max.eq(-std::numeric_limits<double>::infinity()), 0);
  }
  call.finish({lines.of(result, dtype)});
}

template <Form form>
void softmax_backward_of_cut_lines(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor output = reduced(op, call.tensor("output"), "output");
  const at::Tensor grad =
      move_input(op, call.tensor("grad_output"), layout_of(output), "grad_output");
  const CutLines lines(op, output, call["dim"].toInt());
  const at::Tensor g = lines.local(grad);
  const at::Tensor y = lines.local(output);
  at::Tensor result;
  if (form == Form::kLogSoftmax) {
    result = g.sub(y.exp().mul_(lines.sum(g)));
  } else {
    result = g.sub(lines.sum(g.mul(y))).mul_(y);
  }
  call.finish({lines.of(result, call["input_dtype"].toScalarType())});
}

// --- masked softmax ------------------------------------------------------------------------------

// [B, H, L, S] with a mask of the same shape (mask_type 2 or none given), of shape [L, S] (0) or,
// for keys that are padding, [B, S] (1). The softmax dimension may only be the last one.
void masked_softmax(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const c10::IValue& type = call.arg("mask_type");
  const int64_t mask_type = type.isNone() ? 2 : type.toInt();
  const bool same_shape = call.input("mask").sizes == self.sizes;
  const c10::IValue& dim = call.arg("dim");
  const int along = dim.isNone() ? self.ndim() - 1 : self.wrap_dim(dim.toInt());
  for (int d = 0; d < self.ndim(); ++d) {
    if (d == along) continue;
    const bool with_mask = (mask_type == 2 && same_shape) || (mask_type == 1 && d == 0);
    // (With padding LibTorch's kernel for GPUs wants an even number of heads.)
    const bool for_all =
        (mask_type == 0 && d < 2) || (mask_type == 1 && d == 1 && !is_on_gpu(self));
    // LibTorch's kernel for GPUs divides by the number of elements.
    if (with_mask) out.add({{"self", Shard(d)}, {"mask", Shard(d)}}, {Shard(d)}, zeros_if_empty);
    if (for_all) out.add({{"self", Shard(d)}}, {Shard(d)}, zeros_if_empty);
  }
}

void masked_softmax_backward(const OpCall& call, Strategies& out) {
  const TensorInfo& grad = call.input("grad_output");
  const c10::IValue& dim = call.arg("dim");
  const int along = dim.isNone() ? grad.ndim() - 1 : grad.wrap_dim(dim.toInt());
  for (int d = 0; d < grad.ndim(); ++d) {
    if (d == along) continue;
    out.add({{"grad_output", Shard(d)}, {"output", Shard(d)}, {"mask", Shard(d)}}, {Shard(d)});
  }
}

}  // namespace

void add_softmax_rules(RuleTable& table) {
  table.add("aten::_softmax",
            along_dim().when(cuts_lines_forward, composed(softmax_of_cut_lines<Form::kSoftmax>)));
  table.add(
      "aten::_log_softmax",
      along_dim().when(cuts_lines_forward, composed(softmax_of_cut_lines<Form::kLogSoftmax>)));
  table.add("aten::_softmax_backward_data",
            gradient_along_dim().when(cuts_lines_backward,
                                      composed(softmax_backward_of_cut_lines<Form::kSoftmax>)));
  table.add("aten::_log_softmax_backward_data",
            gradient_along_dim().when(cuts_lines_backward,
                                      composed(softmax_backward_of_cut_lines<Form::kLogSoftmax>)));
  table.add("aten::_safe_softmax",
            along_dim()
                .shapes(safe_softmax_shape)
                .when(cuts_lines_forward, composed(softmax_of_cut_lines<Form::kSafeSoftmax>)));
  table.add("aten::_masked_softmax", sharded(masked_softmax).shapes(like_input));
  table.add("aten::_masked_softmax_backward", sharded(masked_softmax_backward).shapes(like_input));
}

}  // namespace shardweave::dtensor_internal

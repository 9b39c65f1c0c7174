// Losses. A mean over shards is their sum over the global count, whatever the sizes of the shards.
#include "ATen/ExpandUtils.h"
#include "ATen/OpMathType.h"
#include "ATen/core/Reduction.h"
#include "ATen/ops/_assert_async.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full_like.h"
#include "ATen/ops/nll_loss2d_forward.h"
#include "ATen/ops/nll_loss_forward.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/sum.h"
#include "ATen/ops/where.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"
#include "shardweave/dtensor/rules/rows.h"

namespace shardweave::dtensor_internal {
namespace {

// --- elementwise losses --------------------------------------------------------------------------

std::vector<Dims> shapes_of(absl::Span<const SpecRef> specs) {
  std::vector<Dims> shapes;
  for (const SpecRef& spec : specs) {
    if (spec != nullptr) shapes.push_back(spec->sizes);
  }
  return shapes;
}

double global_count(absl::Span<const SpecRef> specs) {
  double count = 1;
  for (int64_t size : broadcast_sizes(shapes_of(specs))) count *= static_cast<double>(size);
  return count;
}

// Elements of the shard first, so that half precision is summed in single, as the operators do.
void mean_loss_of_shard(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::ScalarType dtype = call.outputs[0]->dtype;
  c10::Stack arguments = boxed.arguments();
  BoxedCall inner(op, arguments);
  inner["reduction"] = static_cast<int64_t>(at::Reduction::None);
  if (inner.has("out")) {
    const auto sizes = at::infer_size(inner.tensor("self").sizes(), inner.tensor("target").sizes());
    inner["out"] = at::empty(sizes, inner.tensor("out").options());
  }
  inner.run();
  const at::Tensor elements = arguments.back().toTensor();
  const double count = global_count(call.inputs);
  boxed.finish({at::sum(elements, at::toOpMathType(dtype)).div_(count).to(dtype)});
}

// LibTorch's binary_cross_entropy puts its elements into out= before it reduces them, which has to be of
// their shape.
void elements_beside_out(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall&) {
  BoxedCall boxed(op, stack);
  if (!boxed.has("out") || boxed["reduction"].toInt() == at::Reduction::None) return boxed.run();
  c10::Stack arguments = boxed.arguments();
  BoxedCall inner(op, arguments);
  const at::Tensor out = boxed.tensor("out");
  const auto sizes = at::infer_size(boxed.tensor("self").sizes(), boxed.tensor("target").sizes());
  inner["out"] = at::empty(sizes, out.options());
  inner.run();
  boxed.finish({out.copy_(arguments.back().toTensor())});
}

// The gradient of the sum, with the count in the incoming gradient. (LibTorch's is of the elements of
// self, also where that is repeated, which it warns about.)
void mean_loss_backward_of_shard(const c10::OperatorHandle& op, c10::Stack& stack,
                                 const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const auto count = static_cast<double>(boxed.spec(call, "self").numel());
  boxed["grad_output"] = boxed.tensor("grad_output").div(count);
  boxed["reduction"] = static_cast<int64_t>(at::Reduction::Sum);
  boxed.run();
}

// What scores, targets and weights broadcast to.
Dims broadcast_shape(absl::Span<const TensorInfo> inputs) {
  std::vector<Dims> shapes;
  for (const TensorInfo& input : inputs) {
    if (input.defined) shapes.push_back(input.sizes);
  }
  return broadcast_sizes(shapes);
}

// self, target, weights that broadcast.
void elementwise_loss(const OpCall& call, Strategies& out) {
  const int64_t reduction = call.int_arg("reduction");
  const Dims shape = broadcast_shape(call.inputs);
  for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
    out.add(broadcast_cuts(call, shape, d),
            {reduction == at::Reduction::None ? Shard(d) : Partial()},
            reduction == at::Reduction::Mean ? mean_loss_of_shard : nullptr);
  }
}

// The same with grad_output before them -> gradient of self. Linear in grad_output, which has the
// shape of the result.
void elementwise_loss_backward(const OpCall& call, Strategies& out) {
  const int64_t reduction = call.int_arg("reduction");
  const int grad = call.input_index("grad_output");
  const Dims shape = broadcast_shape(absl::MakeConstSpan(call.inputs).subspan(grad + 1));
  for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
    std::vector<Placement> inputs = broadcast_cuts(call, shape, d);
    const bool per_element = call.input(grad).ndim() == static_cast<int>(shape.size());
    inputs[grad] = per_element ? Shard(d) : Replicate();
    out.add(std::move(inputs), {Shard(d)},
            reduction == at::Reduction::Mean ? mean_loss_backward_of_shard : nullptr);
  }
  out.add_linear({{"grad_output"}});
}

void elementwise_loss_shape(OpCall& call) {
  call.outputs.push_back(call.int_arg("reduction") == at::Reduction::None
                             ? broadcast_info(call, {"self", "target"})
                             : contiguous_info({}, call.input("self").dtype));
}

// Of the shape that self and target broadcast to; autograd sums it where self was repeated.
void broadcast_gradient(OpCall& call) {
  const TensorInfo shape = broadcast_info(call, {"self", "target"});
  call.outputs.push_back(contiguous_info(shape.sizes, call.input("self").dtype));
}

void dense_gradient(OpCall& call) {
  call.outputs.push_back(like_info(call.input("self")));
}

// --- negative log likelihood ---------------------------------------------------------------------
// self is [C], [N, C] or [N, C, H, W], target has the same without the classes. Each rank counts
// the targets whose class it has: with classes that are cut, the losses are a Partial sum.

Placement of_target(int self_dim) {
  return Shard(self_dim == 0 ? 0 : self_dim - 1);
}

int class_dim(int64_t ndim) {
  return ndim == 1 ? 0 : 1;
}

// As LibTorch's kernels refuse it; on a GPU without waiting for it, as there.
void check_targets(const at::Tensor& target, const at::Tensor& ignored, int64_t classes) {
  const at::Tensor bad =
      target.lt(0).logical_or_(target.ge(classes)).logical_and_(ignored.logical_not());
  if (!bad.is_cpu()) {
    at::_assert_async(bad.any().logical_not_());
    return;
  }
  if (!bad.any().item().toBool()) return;
  TORCH_CHECK_INDEX(false, "Target ", target.masked_select(bad)[0].item().toLong(),
                    " is out of bounds.");
}

// The targets become places among this rank's classes; those of other ranks are ignored.
void localize_targets(BoxedCall& boxed, const Spec& self) {
  constexpr int64_t kElsewhere = -1;
  const at::Tensor target = boxed.tensor("target").to(at::kLong);
  const int dim = class_dim(self.ndim());
  const at::Tensor ignored = target.eq(boxed["ignore_index"].toInt());
  check_targets(target, ignored, self.sizes[dim]);
  const HeldRows held = held_slices(target, self, dim);
  at::Tensor local = at::full_like(target, kElsewhere);
  if (held.here.defined()) {
    local = at::where(held.here.logical_and(ignored.logical_not()), held.local, local);
  }
  boxed["target"] = std::move(local);
  boxed["ignore_index"] = kElsewhere;
}

void nll_loss_of_classes(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  localize_targets(boxed, boxed.spec(call, "self"));
  zeros_if_empty(op, stack, call);
}

// The loss and the total weight. The mean of one is that of all if that has all.
void nll_loss(const OpCall& call, Strategies& out) {
  const int64_t reduction = call.int_arg("reduction");
  if (reduction == at::Reduction::Mean) return;
  const int ndim = call.input("self").ndim();
  // Losses of their own have no total, but for a single one.
  const bool per_element = reduction == at::Reduction::None && ndim > 1;
  const Placement total = per_element ? Replicate() : Partial();
  for (int d = 0; d < ndim; ++d) {
    if (d == class_dim(ndim)) {
      out.add({{"self", Shard(d)}, {"weight", Shard(0)}}, {Partial(), total}, nll_loss_of_classes);
    } else {
      out.add({{"self", Shard(d)}, {"target", of_target(d)}},
              {per_element ? of_target(d) : Partial(), total});
    }
  }
}

// The gradient of self. total_weight is the global one, so that a shard needs no more; only a mean
// reads it.
void nll_loss_backward(const OpCall& call, Strategies& out) {
  const int ndim = call.input("self").ndim();
  const int64_t reduction = call.int_arg("reduction");
  const bool per_element = reduction == at::Reduction::None && ndim > 1;
  std::vector<Placement> totals = {Replicate()};
  if (reduction != at::Reduction::Mean) totals.push_back(Partial());
  for (const Placement& total : totals) {
    for (int d = 0; d < ndim; ++d) {
      if (d == class_dim(ndim)) {
        out.add({{"self", Shard(d)}, {"weight", Shard(0)}, {"total_weight", total}}, {Shard(d)},
                nll_loss_of_classes);
      } else {
        out.add({{"grad_output", per_element ? of_target(d) : Replicate()},
                 {"self", Shard(d)},
                 {"target", of_target(d)},
                 {"total_weight", total}},
                {Shard(d)});
      }
    }
    if (total.is_partial()) out.add({{"total_weight", total}}, {Replicate()});
    for (ReduceOp op : kLinearOps) {
      out.add({{"grad_output", Partial(op)}, {"total_weight", total}}, {Partial(op)});
    }
  }
}

// The mean over a batch that is spread out needs the sum of all weights, not those of the shard.
bool is_spread_mean(const Arguments& args) {
  if (args["reduction"].toInt() != at::Reduction::Mean) return false;
  for (const char* name : {"self", "target"}) {
    const at::Tensor& tensor = args.tensor(name);
    if (is_dtensor(tensor) && !layout_of(tensor).is_replicated()) return true;
  }
  return false;
}

template <auto forward>
void mean_nll_loss(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::ScalarType dtype = call.tensor("self").scalar_type();
  // Half precision is summed in single, as one device sums.
  const at::Tensor self = call.tensor("self").to(at::toOpMathType(dtype));
  const at::Tensor weight = call.tensor("weight");
  auto [sum, total] = forward(
      self, call.tensor("target"),
      weight.defined() ? std::optional<at::Tensor>(weight.to(self.scalar_type())) : std::nullopt,
      at::Reduction::Sum, call["ignore_index"].toInt());
  // Backward needs the total, too: both are reduced once, as one.
  const Layout& layout = layout_of(total);
  if (layout.has_partial() && layout_of(sum) == layout) {
    const at::Tensor both = redistribute(at::stack({sum, total}), Placements(layout.mesh_ndim()));
    sum = both[0];
    total = both[1].clone();
  } else if (layout.has_partial()) {
    total = redistribute(total, Placements(layout.mesh_ndim()));
  }
  call.finish({sum.div(total).to(dtype), total.to(dtype)});
}

void nll_loss2d_shapes(OpCall& call) {
  const at::ScalarType dtype = call.input("self").dtype;
  const bool per_element = call.int_arg("reduction") == at::Reduction::None;
  call.outputs = {contiguous_info(per_element ? call.input("target").sizes : Dims(), dtype),
                  contiguous_info({}, dtype)};
}

bool is_not_one_target_each(const Arguments& args) {
  const at::Tensor& self = args.tensor("self");
  const at::Tensor& target = args.tensor("target");
  return self.dim() == 0 || target.dim() != self.dim() - 1 ||
         (self.dim() == 2 && target.size(0) != self.size(0));
}

}  // namespace

void add_loss_rules(RuleTable& table) {
  const ShardedRule loss = sharded(elementwise_loss);
  const ShardedRule gradient = sharded(elementwise_loss_backward);
  table.add({"aten::mse_loss", "aten::smooth_l1_loss", "aten::soft_margin_loss"}, loss);
  table.add({"aten::huber_loss", "aten::binary_cross_entropy_with_logits"},
            ShardedRule(loss).shapes(elementwise_loss_shape));
  table.add("aten::binary_cross_entropy",
            ShardedRule(loss).shapes(elementwise_loss_shape).runs(elements_beside_out));
  table.add(
      {"aten::mse_loss_backward", "aten::smooth_l1_loss_backward", "aten::huber_loss_backward"},
      ShardedRule(gradient).shapes(broadcast_gradient));
  table.add({"aten::binary_cross_entropy_backward", "aten::soft_margin_loss_backward"},
            ShardedRule(gradient).shapes(dense_gradient));

  table.add("aten::nll_loss_forward",
            sharded(nll_loss)
                .when(is_spread_mean, composed(mean_nll_loss<at::nll_loss_forward>))
                .refuses(is_not_one_target_each));
  table.add("aten::nll_loss_backward", sharded(nll_loss_backward));
  table.add("aten::nll_loss2d_forward",
            sharded(nll_loss)
                .shapes(nll_loss2d_shapes)
                .when(is_spread_mean, composed(mean_nll_loss<at::nll_loss2d_forward>)));
  table.add("aten::nll_loss2d_backward", sharded(nll_loss_backward).shapes(contiguous_like_input));
}

}  // namespace shardweave::dtensor_internal

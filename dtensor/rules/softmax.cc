// softmax, log_softmax and their gradients: every line along "dim" for itself.
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// Gradients are linear in the incoming gradient (input 0).
Rule gradient_along_dim() {
  Rule rule = along_dim();
  return Rule([lines = std::move(rule.function)](const OpCall& call, Strategies& out) {
    lines(call, out);
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
      out.add({Partial(op), Replicate()}, {Partial(op)});
    }
  });
}

void safe_softmax_shape(OpCall& call) {
  const c10::IValue& dtype = call.arg("dtype");
  call.outputs.push_back(contiguous_info(
      call.input(0).sizes, dtype.isNone() ? call.input(0).dtype : dtype.toScalarType()));
}

// [B, H, L, S] with a mask of the same shape (mask_type 2 or none given), of shape [L, S] (0) or,
// for keys that are padding, [B, S] (1). The softmax dimension may only be the last one.
void masked_softmax(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const TensorInfo& mask = call.input(1);
  const c10::IValue& type = call.arg("mask_type");
  const int64_t mask_type = type.isNone() ? 2 : type.toInt();
  const c10::IValue& dim = call.arg("dim");
  const int along = dim.isNone() ? self.ndim() - 1 : self.wrap_dim(dim.toInt());
  for (int d = 0; d < self.ndim(); ++d) {
    if (d == along) continue;
    if (mask_type == 2 && mask.sizes == self.sizes) out.add({Shard(d), Shard(d)}, {Shard(d)});
    if (mask_type == 0 && d < 2) out.add({Shard(d), Replicate()}, {Shard(d)});
    if (mask_type == 1 && d == 0) out.add({Shard(0), Shard(0)}, {Shard(0)});
    if (mask_type == 1 && d == 1) out.add({Shard(1), Replicate()}, {Shard(1)});
  }
}

void masked_softmax_backward(const OpCall& call, Strategies& out) {
  const TensorInfo& grad = call.input(0);
  const c10::IValue& dim = call.arg("dim");
  const int along = dim.isNone() ? grad.ndim() - 1 : grad.wrap_dim(dim.toInt());
  for (int d = 0; d < grad.ndim(); ++d) {
    if (d != along) out.add({Shard(d), Shard(d), Shard(d)}, {Shard(d)});
  }
}

void like_input(OpCall& call) {
  call.outputs.push_back(like_info(call.input(0)));
}

}  // namespace

void add_softmax_rules(RuleTable& table) {
  table.add({"aten::_softmax", "aten::_log_softmax"}, along_dim());
  table.add({"aten::_softmax_backward_data", "aten::_log_softmax_backward_data"},
            gradient_along_dim());
  table.add("aten::_safe_softmax", along_dim().shapes(safe_softmax_shape));
  table.add("aten::_masked_softmax", Rule(masked_softmax).shapes(like_input));
  table.add("aten::_masked_softmax_backward", Rule(masked_softmax_backward).shapes(like_input));
}

}  // namespace shardweave::dtensor_internal

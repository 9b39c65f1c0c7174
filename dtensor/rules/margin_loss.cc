// Margin losses of classes: each line of N x C for itself. A mean over shards is their sum over the
// global number of lines.
#include <vector>

#include "ATen/core/Reduction.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// The sum over this shard, or the gradient of the sum, over the number of lines.
void mean_of_lines(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const bool backward = boxed.has("grad_output");
  const auto lines = static_cast<double>(boxed.spec(call, "self").sizes[0]);
  boxed["reduction"] = static_cast<int64_t>(at::Reduction::Sum);
  if (backward) boxed["grad_output"] = boxed.tensor("grad_output").div(lines);
  zeros_if_empty(op, stack, call);
  if (!backward) stack[stack.size() - call.outputs.size()].toTensor().div_(lines);
}

// `cut`: the inputs that have a line (or a number) for each line of scores.
void add_lines(const OpCall& call, Strategies& out, InputPlacements cut,
               std::vector<Placement> outputs) {
  if (call.input("self").ndim() != 2) return;  // one line
  const bool mean = call.int_arg("reduction") == at::Reduction::Mean;
  out.add(cut, std::move(outputs), mean ? mean_of_lines : zeros_if_empty);
}

bool is_per_line(const OpCall& call) {
  return call.int_arg("reduction") == at::Reduction::None;
}

// self [N, C], target [N] or [N, C], weight [C] -> loss[, which classes are targets]
void loss(const OpCall& call, Strategies& out) {
  std::vector<Placement> outputs = {is_per_line(call) ? Shard(0) : Partial()};
  if (call.num_outputs() == 2) outputs.push_back(Shard(0));
  add_lines(call, out, {{"self", Shard(0)}, {"target", Shard(0)}}, std::move(outputs));
}

// The same with grad_output before them. Linear in that.
void loss_backward(const OpCall& call, Strategies& out) {
  const Placement grad = is_per_line(call) ? Shard(0) : Replicate();
  if (call.has_arg("is_target")) {  // [N, C]
    add_lines(
        call, out,
        {{"grad_output", grad}, {"self", Shard(0)}, {"target", Shard(0)}, {"is_target", Shard(0)}},
        {Shard(0)});
  } else {
    add_lines(call, out, {{"grad_output", grad}, {"self", Shard(0)}, {"target", Shard(0)}},
              {Shard(0)});
  }
  out.add_linear({{"grad_output"}});
}

// A number for each target, where there may be several.
void loss_shape(OpCall& call) {
  const bool per_line = is_per_line(call) && call.input("target").ndim() > 0;
  const Dims sizes = per_line ? Dims{call.input("target").sizes[0]} : Dims();
  call.outputs.push_back(contiguous_info(sizes, call.input("self").dtype));
}

void multilabel_loss_shapes(OpCall& call) {
  const bool per_line = is_per_line(call) && call.input("target").ndim() == 2;
  const Dims sizes = per_line ? Dims{call.input("target").sizes[0]} : Dims();
  call.outputs.push_back(contiguous_info(sizes, call.input("self").dtype));
  call.outputs.push_back(contiguous_info(call.input("target").sizes, call.input("self").dtype));
}

void gradient_shape(OpCall& call) {
  call.outputs.push_back(contiguous_info(call.input("self").sizes, call.input("self").dtype));
}

// Other shapes than the kernels take: they say so.
bool has_other_lines(const Arguments& args) {
  const at::Tensor& self = args.tensor("self");
  const at::Tensor& target = args.tensor("target");
  if (self.dim() < 1 || self.dim() > 2) return true;
  if (args.op().schema().name() == "aten::multi_margin_loss") {
    return target.numel() != (self.dim() == 2 ? self.size(0) : 1);
  }
  return target.sizes() != self.sizes();
}

}  // namespace

void add_margin_loss_rules(RuleTable& table) {
  table.add("aten::multi_margin_loss", sharded(loss).shapes(loss_shape).refuses(has_other_lines));
  table.add("aten::multilabel_margin_loss_forward",
            sharded(loss).shapes(multilabel_loss_shapes).refuses(has_other_lines));
  table.add({"aten::multi_margin_loss_backward", "aten::multilabel_margin_loss_backward"},
            sharded(loss_backward).shapes(gradient_shape));
}

}  // namespace shardweave::dtensor_internal

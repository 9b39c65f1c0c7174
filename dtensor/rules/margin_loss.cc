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
  const bool backward = op.schema().arguments()[0].name() == "grad_output";
  const auto lines = static_cast<double>(call.inputs[backward ? 1 : 0]->sizes[0]);
  BoxedCall boxed(op, stack);
  boxed["reduction"] = static_cast<int64_t>(at::Reduction::Sum);
  if (backward) boxed["grad_output"] = boxed.tensor("grad_output").div(lines);
  zeros_if_empty(op, stack, call);
  if (!backward) stack[stack.size() - call.outputs.size()].toTensor().div_(lines);
}

// `first`: where the scores are. `lines`: of the inputs, which have a line (or a number) for each of
// theirs; all others are whole.
void add_lines(const OpCall& call, Strategies& out, int first, const std::vector<int>& lines,
               std::vector<Placement> outputs) {
  if (call.input(first).ndim() != 2) return;  // one line
  std::vector<Placement> inputs(call.num_inputs(), Replicate());
  for (int i : lines) inputs[i] = Shard(0);
  const bool mean = call.int_arg("reduction") == at::Reduction::Mean;
  out.add(std::move(inputs), std::move(outputs), mean ? mean_of_lines : zeros_if_empty);
}

bool is_per_line(const OpCall& call) {
  return call.int_arg("reduction") == at::Reduction::None;
}

// self [N, C], target [N] or [N, C], weight [C] -> loss[, which classes are targets]
void loss(const OpCall& call, Strategies& out) {
  std::vector<Placement> outputs = {is_per_line(call) ? Shard(0) : Partial()};
  if (call.num_outputs() == 2) outputs.push_back(Shard(0));
  add_lines(call, out, 0, {0, 1}, std::move(outputs));
}

// grad_output, self, target, then weight [C] or is_target [N, C]. Linear in grad_output.
void loss_backward(const OpCall& call, Strategies& out) {
  std::vector<int> lines = {1, 2};
  if (is_per_line(call)) lines.push_back(0);
  if (call.arg_index("is_target") >= 0) lines.push_back(3);
  add_lines(call, out, 1, lines, {Shard(0)});
  for (ReduceOp op : kLinearOps) {
    std::vector<Placement> inputs(call.num_inputs(), Replicate());
    inputs[0] = Partial(op);
    out.add(std::move(inputs), {Partial(op)});
  }
}

// A number for each target, where there may be several.
void loss_shape(OpCall& call) {
  const bool per_line = is_per_line(call) && call.input(1).ndim() > 0;
  const Dims sizes = per_line ? Dims{call.input(1).sizes[0]} : Dims();
  call.outputs.push_back(contiguous_info(sizes, call.input(0).dtype));
}

void multilabel_loss_shapes(OpCall& call) {
  const bool per_line = is_per_line(call) && call.input(1).ndim() == 2;
  const Dims sizes = per_line ? Dims{call.input(1).sizes[0]} : Dims();
  call.outputs.push_back(contiguous_info(sizes, call.input(0).dtype));
  call.outputs.push_back(contiguous_info(call.input(1).sizes, call.input(0).dtype));
}

void gradient_shape(OpCall& call) {
  call.outputs.push_back(contiguous_info(call.input(1).sizes, call.input(1).dtype));
}

// Other shapes than the kernels take: they say so.
bool has_other_lines(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args) {
  const at::Tensor& self = args[0].toTensor();
  const at::Tensor& target = args[1].toTensor();
  if (self.dim() < 1 || self.dim() > 2) return true;
  if (op.schema().name() == "aten::multi_margin_loss") {
    return target.numel() != (self.dim() == 2 ? self.size(0) : 1);
  }
  return target.sizes() != self.sizes();
}

}  // namespace

void add_margin_loss_rules(RuleTable& table) {
  table.add("aten::multi_margin_loss", Rule(loss).shapes(loss_shape).refuses(has_other_lines));
  table.add("aten::multilabel_margin_loss_forward",
            Rule(loss).shapes(multilabel_loss_shapes).refuses(has_other_lines));
  table.add({"aten::multi_margin_loss_backward", "aten::multilabel_margin_loss_backward"},
            Rule(loss_backward).shapes(gradient_shape));
}

}  // namespace shardweave::dtensor_internal

// A layer of an LSTM as oneDNN runs it, which is LibTorch's way for single precision on CPUs.
// Sequences of a batch are independent; the recurrence needs whole weights.
//
// Its fourth result is oneDNN's scratch, of a size that only it knows: no layout describes that. It
// is left empty, and backward runs the layer's forward on the local parts once more.
#include <tuple>
#include <utility>

#include "ATen/ops/mkldnn_rnn_layer.h"
#include "ATen/ops/zeros.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// Inputs are [step, sequence, feature]; states end with [sequence, feature].
constexpr int kSequence = 1;
int sequence_of_state(const TensorInfo& state) {
  return state.ndim() - 2;
}

void layer_of_part(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  if (boxed.tensor("input").numel() == 0) return zeros_if_empty(op, stack, call);
  const c10::AutoGradMode no_scratch(false);  // which oneDNN leaves while gradients are recorded
  c10::Stack results = boxed.arguments();
  op.callBoxed(&results);
  const at::Tensor scratch = at::zeros({call.outputs[3]->local_sizes[0]}, at::kByte);
  boxed.finish({results[0].toTensor(), results[1].toTensor(), results[2].toTensor(), scratch});
}

void layer(const OpCall& call, Strategies& out) {
  const Placement state = Shard(sequence_of_state(call.input(5)));
  out.add({Shard(kSequence), Replicate(), Replicate(), Replicate(), Replicate(), state, state},
          {Shard(kSequence), state, state, Shard(0)});
}

void layer_shapes(OpCall& call) {
  const TensorInfo &input = call.input(0), &hx = call.input(5), &cx = call.input(6);
  call.outputs.push_back(contiguous_info(
      {input.sizes[0], input.sizes[kSequence], call.int_arg("hidden_size")}, input.dtype));
  call.outputs.push_back(contiguous_info(hx.sizes, hx.dtype));
  call.outputs.push_back(contiguous_info(cx.sizes, cx.dtype));
  call.outputs.push_back(contiguous_info({input.sizes[kSequence]}, at::kByte));
}

void backward_of_part(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  if (boxed.tensor("input").numel() == 0) return zeros_if_empty(op, stack, call);
  const c10::AutoGradMode with_scratch(true);
  boxed["workspace"] = std::get<3>(at::mkldnn_rnn_layer(
      boxed.tensor("input"), boxed.tensor("weight1"), boxed.tensor("weight2"),
      boxed.tensor("weight3"), boxed.tensor("weight4"), boxed.tensor("hx_"), boxed.tensor("cx_tmp"),
      boxed.flag("reverse"), boxed["batch_sizes"].toIntVector(), boxed["mode"].toInt(),
      boxed["hidden_size"].toInt(), boxed["num_layers"].toInt(), boxed.flag("has_biases"),
      boxed.flag("bidirectional"), boxed.flag("batch_first"),
      /*train=*/true));
  boxed.run();
}

// input, 4 weights, hx, cx, output, hy, cy, their gradients, scratch -> gradients of the first 7.
void layer_backward(const OpCall& call, Strategies& out) {
  const Placement data = Shard(kSequence), state = Shard(sequence_of_state(call.input(5)));
  const Placement whole = Replicate(), sum = Partial();
  out.add({data, whole, whole, whole, whole, state, state, data, state, state, data, state, state,
           Shard(0)},
          {data, sum, sum, sum, sum, state, state});
}

void layer_backward_shapes(OpCall& call) {
  for (int i = 0; i < 7; ++i) {
    // A layer without biases is given zeros of another shape.
    const bool bias = i == 3 || i == 4;
    const Dims sizes = bias ? Dims{call.input(1).sizes[0]} : call.input(i).sizes;
    call.outputs.push_back(contiguous_info(sizes, call.input(i).dtype));
  }
}

// For every element of a gate a product with the input and one with the state.
double layer_flops(const OpCall& call) {
  const double elements = static_cast<double>(call.input(0).sizes[0]) *
                          static_cast<double>(call.input(0).sizes[kSequence]);
  return 2 * elements * static_cast<double>(call.input(1).numel() + call.input(2).numel());
}

}  // namespace

void add_recurrent_rules(RuleTable& table) {
  table.add("aten::mkldnn_rnn_layer",
            Rule(layer).shapes(layer_shapes).runs(layer_of_part).flops(layer_flops));
  table.add("aten::mkldnn_rnn_layer_backward",
            Rule(layer_backward)
                .shapes(layer_backward_shapes)
                .runs(backward_of_part)
                .flops([](const OpCall& call) { return 3 * layer_flops(call); }));
}

}  // namespace shardweave::dtensor_internal

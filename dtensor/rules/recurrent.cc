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
  const Placement state = Shard(sequence_of_state(call.input("hx_")));
  out.add({{"input", Shard(kSequence)}, {"hx_", state}, {"cx_", state}},
          {Shard(kSequence), state, state, Shard(0)});
}

void layer_shapes(OpCall& call) {
  const TensorInfo &input = call.input("input"), &hx = call.input("hx_"), &cx = call.input("cx_");
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
  // Those of 16 bits come in 32, which autograd would make of them what they are gradients of.
  const size_t first = stack.size() - call.outputs.size();
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    c10::IValue& result = stack[first + i];
    result = result.toTensor().to(call.outputs[i]->dtype);
  }
}

// Gradients of the input, the 4 weights, hx and cx.
void layer_backward(const OpCall& call, Strategies& out) {
  const Placement data = Shard(kSequence), state = Shard(sequence_of_state(call.input("hx_")));
  const Placement sum = Partial();
  out.add({{"input", data},
           {"hx_", state},
           {"cx_tmp", state},
           {"output", data},
           {"hy_", state},
           {"cy_", state},
           {"grad_output", data},
           {"grad_hy", state},
           {"grad_cy", state},
           {"workspace", Shard(0)}},
          {data, sum, sum, sum, sum, state, state});
}

void layer_backward_shapes(OpCall& call) {
  for (const char* name : {"input", "weight1", "weight2", "weight3", "weight4", "hx_", "cx_tmp"}) {
    const TensorInfo& of = call.input(name);
    // A layer without biases is given zeros of another shape.
    const std::string_view argument = name;
    const bool bias = argument == "weight3" || argument == "weight4";
    const Dims sizes = bias ? Dims{call.input("weight1").sizes[0]} : of.sizes;
    call.outputs.push_back(contiguous_info(sizes, of.dtype));
  }
}

// For every element of a gate a product with the input and one with the state.
double layer_flops(const OpCall& call, std::string_view of_input, std::string_view of_state) {
  const Dims& sizes = call.input("input").sizes;
  const double elements = static_cast<double>(sizes[0]) * static_cast<double>(sizes[kSequence]);
  return 2 * elements *
         static_cast<double>(call.input(of_input).numel() + call.input(of_state).numel());
}
double layer_forward_flops(const OpCall& call) {
  return layer_flops(call, "weight0", "weight1");
}
double layer_backward_flops(const OpCall& call) {
  return 3 * layer_flops(call, "weight1", "weight2");
}

}  // namespace

void add_recurrent_rules(RuleTable& table) {
  table.add("aten::mkldnn_rnn_layer",
            sharded(layer).shapes(layer_shapes).runs(layer_of_part).flops(layer_forward_flops));
  table.add("aten::mkldnn_rnn_layer_backward", sharded(layer_backward)
                                                   .shapes(layer_backward_shapes)
                                                   .runs(backward_of_part)
                                                   .flops(layer_backward_flops));
}

}  // namespace shardweave::dtensor_internal

// Convolution: cut the batch (dimension 0 of the input) or the output channels (dimension 0 of the weight). Spatial cuts would
// need a halo; such inputs are brought to one of these first.
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave {
namespace {

// An int[] argument for `n` spatial dimensions; one element stands for all.
std::vector<int64_t> spatial(const OpCall& call, std::string_view name, size_t n) {
  std::vector<int64_t> values = call.arg(name).toIntVector();
  if (values.size() == 1) values.resize(n, values[0]);
  return values;
}

// convolution(input [N, C, ...], weight [O, C / groups, ...] or transposed [C, O / groups, ...], ...)
void convolution_shape(OpCall& call) {
  const TensorInfo& input = call.input(0);
  const TensorInfo& weight = call.input(1);
  const size_t n = static_cast<size_t>(input.ndim()) - 2;
  const std::vector<int64_t> stride = spatial(call, "stride", n),
                             padding = spatial(call, "padding", n),
                             dilation = spatial(call, "dilation", n),
                             output_padding = spatial(call, "output_padding", n);
  const bool transposed = call.bool_arg("transposed");
  Dims sizes = {input.sizes[0],
                transposed ? weight.sizes[1] * call.int_arg("groups") : weight.sizes[0]};
  for (size_t i = 0; i < n; ++i) {
    const int64_t kernel = dilation[i] * (weight.sizes[i + 2] - 1) + 1;
    sizes.push_back(transposed ? (input.sizes[i + 2] - 1) * stride[i] - 2 * padding[i] + kernel +
                                     output_padding[i]
                               : (input.sizes[i + 2] + 2 * padding[i] - kernel) / stride[i] + 1);
  }
  call.outputs.push_back(contiguous_info(std::move(sizes), input.dtype));
}

void convolution(const OpCall& call, Strategies& out) {
  const bool has_bias = call.input(2).defined;
  if (!call.may_be_empty(0, 0)) out.add({Shard(0), Replicate(), Replicate()}, {Shard(0)});
  if (!call.bool_arg("transposed") && call.int_arg("groups") == 1 && !call.may_be_empty(1, 0)) {
    out.add({Replicate(), Shard(0), has_bias ? Shard(0) : Replicate()}, {Shard(1)});
  }
}

// convolution_backward(grad [N, O, ...], input [N, C, ...], weight, ...) -> gradients of input, weight, bias
void convolution_backward_shape(OpCall& call) {
  const c10::List<bool> mask = call.arg("output_mask").toBoolList();
  for (int i = 0; i < 3; ++i) {
    TensorInfo info;
    if (mask[i]) {
      info = i < 2 ? call.input(i + 1)
                   : contiguous_info({call.input(0).sizes[1]}, call.input(0).dtype);
      if (i < 2) info = contiguous_info(info.sizes, info.dtype);
    }
    call.outputs.push_back(std::move(info));
  }
}

void convolution_backward(const OpCall& call, Strategies& out) {
  if (!call.may_be_empty(0, 0)) {
    out.add({Shard(0), Shard(0), Replicate()}, {Shard(0), Partial(), Partial()});
  }
  if (!call.bool_arg("transposed") && call.int_arg("groups") == 1 && !call.may_be_empty(2, 0)) {
    out.add({Shard(1), Replicate(), Shard(0)}, {Partial(), Shard(0), Shard(0)});
  }
}

}  // namespace

void add_convolution_rules(RuleTable& table) {
  table.add("aten::convolution", Rule(convolution).shapes(convolution_shape));
  table.add("aten::convolution_backward",
            Rule(convolution_backward).shapes(convolution_backward_shape));
}

}  // namespace shardweave

// Convolution: cut the batch (dimension 0 of the input), the channels of the result, those of the
// input (then the result is a Partial sum), or whole groups. Spatial cuts need a halo, unless
// windows do not overlap; inputs that are cut so are brought to one of these first.
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// An int[] argument for `n` spatial dimensions; one element stands for all.
std::vector<int64_t> spatial(const OpCall& call, std::string_view name, size_t n) {
  std::vector<int64_t> values = call.arg(name).toIntVector();
  if (values.size() == 1) values.resize(n, values[0]);
  return values;
}

// convolution(input [N, C, ...], weight [O, C / groups, ...] or transposed [C, O / groups, ...],
// ...)
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

// Whether cutting spatial dimension `i` of the image cuts no window: windows that do not overlap
// (patches, or single pixels), and pieces that consist of whole windows.
bool cuts_no_window(const OpCall& call, int image, int weight, int i) {
  const TensorInfo& input = call.input(image);
  const size_t n = static_cast<size_t>(input.ndim()) - 2;
  const int d = i + 2;
  const int64_t stride = spatial(call, "stride", n)[i];
  if (call.bool_arg("transposed") || call.input(weight).sizes[d] != stride ||
      spatial(call, "padding", n)[i] != 0 || spatial(call, "dilation", n)[i] != 1) {
    return false;
  }
  if (call.may_be_empty(image, d)) return false;
  for (int64_t size : call.sizes_so_far(image, d)) {
    const int64_t piece = (size + call.num_ranks - 1) / call.num_ranks;
    // What the last rank has must be a window at least, as the rest is nobody's.
    const int64_t last = size - piece * (call.num_ranks - 1);
    if (piece % stride != 0 || last < stride) return false;
  }
  return true;
}

// Whole groups on every rank, by all mesh dimensions that cut the channels together.
bool whole_groups(const OpCall& call, int image) {
  return call.int_arg("groups") % call.pieces(image, 1) == 0;
}

// Channels of whole groups: the number of groups becomes the local one.
void convolution_of_groups(const c10::OperatorHandle& op, c10::Stack& stack,
                           const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const int image = boxed.has("grad_output") ? 1 : 0;
  const Spec& spec = *call.inputs[image];
  boxed["groups"] = boxed["groups"].toInt() * spec.local_sizes[1] / spec.sizes[1];
  boxed.run();
}

// input, weight, bias
void convolution(const OpCall& call, Strategies& out) {
  const Placement channels_of_bias = call.input(2).defined ? Shard(0) : Replicate();
  const bool transposed = call.bool_arg("transposed");
  const int out_channels = transposed ? 1 : 0;  // of the weight
  if (!call.may_be_empty(0, 0)) out.add({Shard(0), Replicate(), Replicate()}, {Shard(0)});
  if (call.int_arg("groups") == 1) {
    if (!call.may_be_empty(1, out_channels)) {
      out.add({Replicate(), Shard(out_channels), channels_of_bias}, {Shard(1)});
    }
    // A sum over the input's channels; the bias is added once.
    if (!call.may_be_empty(0, 1)) {
      out.add({Shard(1), Shard(1 - out_channels), Partial()}, {Partial()});
    }
  } else if (whole_groups(call, 0)) {
    out.add({Shard(1), Shard(0), channels_of_bias}, {Shard(1)}, convolution_of_groups);
  }
  for (int i = 0; i < call.input(0).ndim() - 2; ++i) {
    if (cuts_no_window(call, 0, 1, i)) {
      out.add({Shard(i + 2), Replicate(), Replicate()}, {Shard(i + 2)});
    }
  }
  for (ReduceOp op : kLinearOps) {
    out.add({Partial(op), Replicate(), Partial(op)}, {Partial(op)});
    out.add({Replicate(), Partial(op), Partial(op)}, {Partial(op)});
  }
}

// convolution_backward(grad [N, O, ...], input [N, C, ...], weight, ...) -> gradients of input,
// weight, bias
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

// The gradient of the bias needs only that of the result.
void convolution_backward(const OpCall& call, Strategies& out) {
  const bool transposed = call.bool_arg("transposed");
  const int out_channels = transposed ? 1 : 0;
  if (!call.may_be_empty(0, 0)) {
    out.add({Shard(0), Shard(0), Replicate()}, {Shard(0), Partial(), Partial()});
  }
  if (call.int_arg("groups") == 1) {
    if (!call.may_be_empty(2, out_channels)) {
      out.add({Shard(1), Replicate(), Shard(out_channels)},
              {Partial(), Shard(out_channels), Shard(0)});
    }
    if (!call.may_be_empty(1, 1)) {
      out.add({Replicate(), Shard(1), Shard(1 - out_channels)},
              {Shard(1), Shard(1 - out_channels), Replicate()});
    }
  } else if (whole_groups(call, 1)) {
    out.add({Shard(1), Shard(1), Shard(0)}, {Shard(1), Shard(0), Shard(0)}, convolution_of_groups);
  }
  for (int i = 0; i < call.input(1).ndim() - 2; ++i) {
    if (cuts_no_window(call, 1, 2, i)) {
      out.add({Shard(i + 2), Shard(i + 2), Replicate()}, {Shard(i + 2), Partial(), Partial()});
    }
  }
  for (ReduceOp op : kLinearOps) {
    out.add({Partial(op), Replicate(), Replicate()}, {Partial(op), Partial(op), Partial(op)});
  }
}

// Each element of the output, or of a transposed convolution's input, meets one filter.
double convolution_flops(const OpCall& call, const TensorInfo& image, const TensorInfo& result,
                         const TensorInfo& weight) {
  const bool transposed = call.bool_arg("transposed");
  const auto filter = static_cast<double>(weight.numel()) /
                      static_cast<double>(std::max<int64_t>(weight.sizes[0], 1));
  return 2 * filter * static_cast<double>((transposed ? image : result).numel());
}
double forward_flops(const OpCall& call) {
  return convolution_flops(call, call.input(0), call.output(0), call.input(1));
}
// As much again for each of the two gradients.
double backward_flops(const OpCall& call) {
  const double one = convolution_flops(call, call.input(1), call.input(0), call.input(2));
  return one * (call.output(0).defined + call.output(1).defined);
}

}  // namespace

void add_convolution_rules(RuleTable& table) {
  table.add("aten::convolution",
            Rule(convolution).shapes(convolution_shape).flops(forward_flops).chunks_only());
  table.add("aten::convolution_backward", Rule(convolution_backward)
                                              .shapes(convolution_backward_shape)
                                              .flops(backward_flops)
                                              .chunks_only());
}

}  // namespace shardweave::dtensor_internal

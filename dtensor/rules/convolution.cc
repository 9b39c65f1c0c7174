// Convolution: cut the batch (dimension 0 of the input), the channels of the result, those of the
// input (then the result is a Partial sum), or whole groups. Spatial cuts need a halo, unless
// windows do not overlap; inputs that are cut so are brought to one of these first.
#include <algorithm>
#include <initializer_list>
#include <vector>

#include "ATen/ops/zeros.h"
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
  const TensorInfo& input = call.input("input");
  const TensorInfo& weight = call.input("weight");
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
bool cuts_no_window(const OpCall& call, int i) {
  const TensorInfo& input = call.input("input");
  const size_t n = static_cast<size_t>(input.ndim()) - 2;
  const int d = i + 2;
  const int64_t stride = spatial(call, "stride", n)[i];
  if (call.bool_arg("transposed") || call.input("weight").sizes[d] != stride ||
      spatial(call, "padding", n)[i] != 0 || spatial(call, "dilation", n)[i] != 1) {
    return false;
  }
  if (call.may_be_empty(input, d)) return false;
  for (int64_t size : call.sizes_so_far(input, d)) {
    const int64_t piece = (size + call.num_ranks - 1) / call.num_ranks;
    // What the last rank has must be a window at least, as the rest is nobody's.
    const int64_t last = size - piece * (call.num_ranks - 1);
    if (piece % stride != 0 || last < stride) return false;
  }
  return true;
}

// Whole groups on every rank, by all mesh dimensions that cut the channels together.
bool whole_groups(const OpCall& call) {
  return call.int_arg("groups") % call.pieces(call.input("input"), 1) == 0;
}

// Channels of whole groups: the number of groups becomes the local one.
void count_local_groups(BoxedCall& boxed, const LocalCall& call) {
  const int64_t groups = boxed["groups"].toInt();
  const Spec& input = boxed.spec(call, "input");
  if (groups == 1 || input.sizes[1] == 0) return;
  boxed["groups"] = groups * input.local_sizes[1] / input.sizes[1];
}

// Whether this rank has no samples, or none of the channels. What is empty as a whole is for
// LibTorch.
bool has_nothing(BoxedCall& boxed, const LocalCall& call,
                 std::initializer_list<const char*> tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const char* name) {
    return boxed.tensor(name).numel() == 0 && boxed.spec(call, name).numel() > 0;
  });
}

at::Tensor zeros_of(const SpecRef& spec, const at::Tensor& like) {
  if (spec == nullptr) return {};
  const Dims& sizes = spec->local_sizes;
  return at::zeros({sizes.data(), sizes.size()}, like.options().dtype(spec->dtype));
}

// A sum over no channels is 0, to which the bias is added.
void convolution_of_shard(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  count_local_groups(boxed, call);
  if (!has_nothing(boxed, call, {"input", "weight"})) return boxed.run();
  at::Tensor result = zeros_of(call.outputs[0], boxed.tensor("input"));
  if (const at::Tensor bias = boxed.tensor("bias"); bias.defined()) {
    std::vector<int64_t> per_channel(result.dim(), 1);
    per_channel[1] = bias.numel();
    result.add_(bias.view(per_channel));
  }
  boxed.finish({result});
}

void convolution(const OpCall& call, Strategies& out) {
  const TensorInfo& input = call.input("input");
  const int out_channels = call.bool_arg("transposed") ? 1 : 0;  // of the weight
  for (const Placement& batch : cuts_of(call, {{"input", 0}})) {
    out.add({{"input", batch}}, {batch});
  }
  if (call.int_arg("groups") == 1) {
    for (const Placement& cut : cuts_of(call, {{"weight", out_channels}})) {
      out.add({{"weight", cut.with_dim(out_channels)}, {"bias", cut}}, {cut.with_dim(1)});
    }
    // A sum over the input's channels; the bias is added once.
    for (const Placement& cut : cuts_of(call, {{"input", 1}, {"weight", 1 - out_channels}})) {
      out.add({{"input", cut.with_dim(1)},
               {"weight", cut.with_dim(1 - out_channels)},
               {"bias", Partial()}},
              {Partial()});
    }
  } else if (whole_groups(call)) {
    out.add({{"input", Shard(1)}, {"weight", Shard(0)}, {"bias", Shard(0)}}, {Shard(1)});
  }
  for (int i = 0; i < input.ndim() - 2; ++i) {
    if (cuts_no_window(call, i)) out.add({{"input", Shard(i + 2)}}, {Shard(i + 2)});
  }
  out.add_linear({{"input", "bias"}, {"weight", "bias"}});
}

// convolution_backward(grad [N, O, ...], input [N, C, ...], weight, ...) -> gradients of input,
// weight, bias
void convolution_backward_shape(OpCall& call) {
  const c10::List<bool> mask = call.arg("output_mask").toBoolList();
  for (const char* name : {"input", "weight"}) {
    const TensorInfo& of = call.input(name);
    call.outputs.push_back(mask[call.outputs.size()] ? contiguous_info(of.sizes, of.dtype)
                                                     : TensorInfo());
  }
  const TensorInfo& grad = call.input("grad_output");
  call.outputs.push_back(mask[2] ? contiguous_info({grad.sizes[1]}, grad.dtype) : TensorInfo());
}

// The gradient of the bias needs only that of the result.
void convolution_backward_of_shard(const c10::OperatorHandle& op, c10::Stack& stack,
                                   const LocalCall& call) {
  BoxedCall boxed(op, stack);
  count_local_groups(boxed, call);
  if (!has_nothing(boxed, call, {"grad_output", "input", "weight"})) return boxed.run();
  const at::Tensor grad = boxed.tensor("grad_output");
  at::Tensor bias;
  if (call.outputs[2] != nullptr) {
    std::vector<int64_t> all_but_channels = {0};
    for (int64_t d = 2; d < grad.dim(); ++d) all_but_channels.push_back(d);
    bias = grad.sum(all_but_channels);
  }
  boxed.finish({zeros_of(call.outputs[0], grad), zeros_of(call.outputs[1], grad), bias});
}

void convolution_backward(const OpCall& call, Strategies& out) {
  const TensorInfo& input = call.input("input");
  const int out_channels = call.bool_arg("transposed") ? 1 : 0;
  for (const Placement& batch : cuts_of(call, {{"grad_output", 0}, {"input", 0}})) {
    out.add({{"grad_output", batch}, {"input", batch}}, {batch, Partial(), Partial()});
  }
  if (call.int_arg("groups") == 1) {
    for (const Placement& cut : cuts_of(call, {{"grad_output", 1}, {"weight", out_channels}})) {
      out.add({{"grad_output", cut.with_dim(1)}, {"weight", cut.with_dim(out_channels)}},
              {Partial(), cut.with_dim(out_channels), cut});
    }
    for (const Placement& cut : cuts_of(call, {{"input", 1}, {"weight", 1 - out_channels}})) {
      out.add({{"input", cut.with_dim(1)}, {"weight", cut.with_dim(1 - out_channels)}},
              {cut.with_dim(1), cut.with_dim(1 - out_channels), Replicate()});
    }
  } else if (whole_groups(call)) {
    out.add({{"grad_output", Shard(1)}, {"input", Shard(1)}, {"weight", Shard(0)}},
            {Shard(1), Shard(0), Shard(0)});
  }
  for (int i = 0; i < input.ndim() - 2; ++i) {
    if (!cuts_no_window(call, i)) continue;
    out.add({{"grad_output", Shard(i + 2)}, {"input", Shard(i + 2)}},
            {Shard(i + 2), Partial(), Partial()});
  }
  out.add_linear({{"grad_output"}});
}

// Each element of the output, or of a transposed convolution's input, meets one filter.
double convolution_flops(const OpCall& call, const TensorInfo& image, const TensorInfo& result) {
  const TensorInfo& weight = call.input("weight");
  const bool transposed = call.bool_arg("transposed");
  const auto filter = static_cast<double>(weight.numel()) /
                      static_cast<double>(std::max<int64_t>(weight.sizes[0], 1));
  return 2 * filter * static_cast<double>((transposed ? image : result).numel());
}
double convolution_forward_flops(const OpCall& call) {
  return convolution_flops(call, call.input("input"), call.output(0));
}
// As much again for each of the two gradients.
double convolution_backward_flops(const OpCall& call) {
  const double one = convolution_flops(call, call.input("input"), call.input("grad_output"));
  return one * (call.output(0).defined + call.output(1).defined);
}

}  // namespace

void add_convolution_rules(RuleTable& table) {
  table.add("aten::convolution", sharded(convolution)
                                     .shapes(convolution_shape)
                                     .flops(convolution_forward_flops)
                                     .chunks_only()
                                     .runs(convolution_of_shard));
  table.add("aten::convolution_backward", sharded(convolution_backward)
                                              .shapes(convolution_backward_shape)
                                              .flops(convolution_backward_flops)
                                              .chunks_only()
                                              .runs(convolution_backward_of_shard));
}

}  // namespace shardweave::dtensor_internal

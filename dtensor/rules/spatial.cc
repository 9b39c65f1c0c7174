// Images: pooling, interpolation, padding, sampling. Batches and channels are independent; pixels
// would need their neighbours.
#include <algorithm>
#include <tuple>
#include <vector>

#include "ATen/ops/max_pool1d_with_indices.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// --- shapes, for operators without a kernel for meta tensors -------------------------------------

// An int[] argument, where one number stands for all; `otherwise` if it is empty.
std::vector<int64_t> numbers(const OpCall& call, std::string_view name, int count,
                             std::vector<int64_t> otherwise = {}) {
  std::vector<int64_t> values = call.arg(name).toIntVector();
  if (values.empty()) values = std::move(otherwise);
  if (values.size() == 1) values.resize(count, values[0]);
  return values;
}

// The last dimensions become "output_size".
void output_size_shape(OpCall& call) {
  const std::vector<int64_t> last = call.arg("output_size").toIntVector();
  Dims sizes = call.input("self").sizes;
  for (size_t i = 0; i < last.size(); ++i) sizes[sizes.size() - last.size() + i] = last[i];
  call.outputs.push_back(contiguous_info(std::move(sizes), call.input("self").dtype));
}

// max_pool3d_with_indices: values and positions.
void max_pool3d_shapes(OpCall& call) {
  constexpr int kDims = 3;
  const std::vector<int64_t> kernel = numbers(call, "kernel_size", kDims);
  const std::vector<int64_t> stride = numbers(call, "stride", kDims, kernel);
  const std::vector<int64_t> padding = numbers(call, "padding", kDims);
  const std::vector<int64_t> dilation = numbers(call, "dilation", kDims);
  const bool ceil = call.bool_arg("ceil_mode");
  Dims sizes = call.input("self").sizes;
  for (int i = 0; i < kDims; ++i) {
    int64_t& size = sizes[sizes.size() - kDims + i];
    const int64_t room = size + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1;
    int64_t windows = (room + (ceil ? stride[i] - 1 : 0)) / stride[i] + 1;
    // The last window begins inside the image or its left padding.
    if (ceil && (windows - 1) * stride[i] >= size + padding[i]) --windows;
    size = windows;
  }
  call.outputs = {contiguous_info(sizes, call.input("self").dtype),
                  contiguous_info(sizes, at::kLong)};
}

// "padding": of the last dimension first.
void padded_shape(OpCall& call) {
  const std::vector<int64_t> padding = call.arg("padding").toIntVector();
  Dims sizes = call.input("self").sizes;
  for (size_t i = 0; i < padding.size() / 2; ++i) {
    sizes[sizes.size() - 1 - i] += padding[2 * i] + padding[2 * i + 1];
  }
  call.outputs.push_back(contiguous_info(std::move(sizes), call.input("self").dtype));
}

// input [N, C, ...], grid [N, ..., 2 or 3]
void sampled_shape(OpCall& call) {
  const TensorInfo& input = call.input("input");
  const Dims& grid = call.input("grid").sizes;
  Dims sizes = {input.sizes[0], input.sizes[1]};
  sizes.insert(sizes.end(), grid.begin() + 1, grid.end() - 1);
  call.outputs.push_back(contiguous_info(std::move(sizes), input.dtype));
}

void sampled_gradient_shapes(OpCall& call) {
  const auto mask = call.arg("output_mask").toBoolList();
  const TensorInfo& input = call.input("input");
  const TensorInfo& grid = call.input("grid");
  call.outputs = {mask[0] ? contiguous_info(input.sizes, input.dtype) : TensorInfo(),
                  contiguous_info(grid.sizes, grid.dtype)};
}

// im2col: the windows [N, C * window, how many] of images [N, C, H, W]; N may be missing.
void windows_shape(OpCall& call) {
  constexpr int kDims = 2;
  const std::vector<int64_t> kernel = numbers(call, "kernel_size", kDims);
  const std::vector<int64_t> dilation = numbers(call, "dilation", kDims);
  const std::vector<int64_t> padding = numbers(call, "padding", kDims);
  const std::vector<int64_t> stride = numbers(call, "stride", kDims);
  const Dims& images = call.input("self").sizes;
  int64_t windows = 1;
  for (int i = 0; i < kDims; ++i) {
    const int64_t size = images[images.size() - kDims + i];
    windows *= (size + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) / stride[i] + 1;
  }
  Dims sizes(images.begin(), images.end() - kDims);
  sizes.back() *= kernel[0] * kernel[1];
  sizes.push_back(windows);
  call.outputs.push_back(contiguous_info(std::move(sizes), call.input("self").dtype));
}

// col2im: back again.
void images_shape(OpCall& call) {
  const std::vector<int64_t> kernel = numbers(call, "kernel_size", 2);
  Dims sizes = call.input("self").sizes;
  sizes.pop_back();
  sizes.back() /= kernel[0] * kernel[1];
  for (int64_t size : numbers(call, "output_size", 2)) sizes.push_back(size);
  call.outputs.push_back(contiguous_info(std::move(sizes), call.input("self").dtype));
}

// --- rules ---------------------------------------------------------------------------------------

// Linear in the image, or in the incoming gradient.
ShardedRule linear(int inner) {
  return over_batches({{inner}, {inner}, /*linear_in_first=*/true});
}

// Linear in the incoming gradient alone: of the image only the shape counts.
ShardedRule backward(int inner) {
  return linear(inner).only_shape_of({"self"});
}

// Every number of the result is one of the image.
ShardedRule moved(int inner) {
  return sharded([linear = linear(inner)](const OpCall& call, Strategies& out) {
    linear(call, out);
    pass_partials(call, out, {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct});
  });
}

// im2col and col2im: a channel is as many rows of windows as a window has pixels, so that whole
// channels may be cut, where all cuts of them are equally large.
void windows(const OpCall& call, Strategies& out) {
  const std::vector<int64_t> kernel = numbers(call, "kernel_size", 2);
  const bool from_windows = call.has_arg("output_size");
  const TensorInfo& self = call.input("self");
  const int channels = self.ndim() - (from_windows ? 2 : 3);
  for (int d = 0; d < channels; ++d) out.add({Shard(d)}, {Shard(d)}, zeros_if_empty);
  int64_t pieces = call.cuts(self, channels);
  if (!call.placement("self").is_shard(channels)) pieces *= call.num_ranks;
  const int64_t window = from_windows ? kernel[0] * kernel[1] : 1;
  if (self.sizes[channels] / window % pieces == 0) out.add({Shard(channels)}, {Shard(channels)});
  pass_partials(call, out, kLinearOps);
  if (!from_windows) pass_partials(call, out, {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct});
}

// Channels are exchanged with one another.
void channel_shuffle(const OpCall& call, Strategies& out) {
  for (int d = 0; d < call.input("self").ndim(); ++d) {
    if (d != 1) out.add({Shard(d)}, {Shard(d)}, zeros_if_empty);
  }
  pass_partials(call, out, kAllReduceOps);
}

// LibTorch says what is wrong with them.
bool are_no_images(const Arguments& args) {
  const at::Tensor& self = args.tensor("self");
  const bool windows = args.has("output_size");
  const int64_t ndim = self.dim() + (windows ? 1 : 0);
  if (ndim != 3 && ndim != 4) return true;
  const auto any_below = [&](const char* name, int64_t least) {
    const std::vector<int64_t> values = args[name].toIntVector();
    return std::any_of(values.begin(), values.end(), [&](int64_t value) { return value < least; });
  };
  if (any_below("kernel_size", 1) || any_below("dilation", 1) || any_below("padding", 0) ||
      any_below("stride", 1) || self.numel() == 0) {
    return true;
  }
  // Windows that fit nowhere.
  for (size_t i = 0; !windows && i < 2; ++i) {
    const auto number = [&](const char* name) {
      const std::vector<int64_t> values = args[name].toIntVector();
      return values[values.size() == 1 ? 0 : i];
    };
    const int64_t room = self.size(-2 + static_cast<int64_t>(i)) + 2 * number("padding");
    if (room < number("dilation") * (number("kernel_size") - 1) + 1) return true;
  }
  return false;
}

bool has_no_channels(const Arguments& args) {
  return args.tensor("self").dim() < 3;
}

// One grid for all channels.
void grid_sampler(const OpCall& call, Strategies& out) {
  out.add({{"input", Shard(0)}, {"grid", Shard(0)}}, {Shard(0)}, zeros_if_empty);
  out.add({{"input", Shard(1)}}, {Shard(1)}, zeros_if_empty);
  // Positions of the result.
  for (int d = 2; d < call.output().ndim(); ++d) {
    out.add({{"grid", Shard(d - 1)}}, {Shard(d)}, zeros_if_empty);
  }
  out.add_linear({{"input"}});
}

// Gradients of input and grid.
void grid_sampler_backward(const OpCall& call, Strategies& out) {
  out.add({{"grad_output", Shard(0)}, {"input", Shard(0)}, {"grid", Shard(0)}},
          {Shard(0), Shard(0)}, zeros_if_empty);
  out.add({{"grad_output", Shard(1)}, {"input", Shard(1)}}, {Shard(1), Partial()}, zeros_if_empty);
  for (int d = 2; d < call.input("grad_output").ndim(); ++d) {
    out.add({{"grad_output", Shard(d)}, {"grid", Shard(d - 1)}}, {Partial(), Shard(d - 1)},
            zeros_if_empty);
  }
  out.add_linear({{"grad_output"}});
}

// LibTorch's own would read memory where nothing is to be differentiated (memory_paths.cc).
void max_pool1d(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  call.finish({std::get<0>(at::max_pool1d_with_indices(
      call.tensor("self"), call["kernel_size"].toIntVector(), call["stride"].toIntVector(),
      call["padding"].toIntVector(), call["dilation"].toIntVector(), call.flag("ceil_mode")))});
}

}  // namespace

void add_spatial_rules(RuleTable& table) {
  // --- pooling ---
  table.add("aten::avg_pool2d", linear(2));
  table.add("aten::avg_pool3d", linear(3));
  table.add("aten::avg_pool2d_backward", backward(2));
  table.add("aten::avg_pool3d_backward", backward(3));
  table.add("aten::_adaptive_avg_pool2d", linear(2).shapes(output_size_shape));
  table.add("aten::_adaptive_avg_pool3d", linear(3).shapes(output_size_shape));
  table.add("aten::_adaptive_avg_pool2d_backward", backward(2).shapes(contiguous_like_input));
  table.add("aten::_adaptive_avg_pool3d_backward", backward(3).shapes(contiguous_like_input));
  table.add({"aten::max_pool2d_with_indices", "aten::adaptive_max_pool2d"},
            over_batches({{2}, {2}}));
  table.add("aten::max_pool1d", composed(max_pool1d));
  table.add("aten::max_pool3d_with_indices", over_batches({{3}, {3}}).shapes(max_pool3d_shapes));
  table.add("aten::adaptive_max_pool3d", over_batches({{3}, {3}}));
  table.add({"aten::max_pool2d_with_indices_backward", "aten::adaptive_max_pool2d_backward",
             "aten::fractional_max_pool2d_backward"},
            backward(2));
  table.add("aten::adaptive_max_pool3d_backward", backward(3));
  table.add({"aten::max_pool3d_with_indices_backward", "aten::fractional_max_pool3d_backward"},
            backward(3).shapes(contiguous_like_input));
  // The samples are one pair or triple of numbers for each image.
  table.add("aten::fractional_max_pool2d", over_batches({{2, 1}, {2}}));
  table.add("aten::fractional_max_pool3d", over_batches({{3, 1}, {3}}));
  table.add("aten::max_unpool2d", linear(2).shapes(output_size_shape));
  table.add("aten::max_unpool3d", linear(3).shapes(output_size_shape));

  // --- interpolation ---
  table.add({"aten::upsample_nearest1d", "aten::_upsample_nearest_exact1d"}, moved(1));
  table.add({"aten::upsample_nearest2d", "aten::_upsample_nearest_exact2d"}, moved(2));
  table.add({"aten::upsample_nearest3d", "aten::_upsample_nearest_exact3d"}, moved(3));
  table.add("aten::upsample_linear1d", linear(1));
  table.add({"aten::upsample_bicubic2d", "aten::upsample_bilinear2d",
             "aten::_upsample_bicubic2d_aa", "aten::_upsample_bilinear2d_aa"},
            linear(2));
  table.add("aten::upsample_trilinear3d", linear(3));
  table.add({"aten::upsample_linear1d_backward", "aten::upsample_nearest1d_backward",
             "aten::_upsample_nearest_exact1d_backward"},
            linear(1).size_arg("input_size"));
  table.add({"aten::upsample_bicubic2d_backward", "aten::upsample_bilinear2d_backward",
             "aten::upsample_nearest2d_backward", "aten::_upsample_nearest_exact2d_backward",
             "aten::_upsample_bicubic2d_aa_backward", "aten::_upsample_bilinear2d_aa_backward"},
            linear(2).size_arg("input_size"));
  table.add({"aten::upsample_nearest3d_backward", "aten::upsample_trilinear3d_backward",
             "aten::_upsample_nearest_exact3d_backward"},
            linear(3).size_arg("input_size"));

  // --- padding with what is there ---
  table.add({"aten::reflection_pad1d", "aten::replication_pad1d"}, moved(1));
  table.add({"aten::reflection_pad2d", "aten::replication_pad2d"}, moved(2).shapes(padded_shape));
  table.add({"aten::reflection_pad3d", "aten::replication_pad3d"}, moved(3));
  table.add({"aten::reflection_pad1d_backward", "aten::replication_pad1d_backward"},
            backward(1).shapes(contiguous_like_input));
  table.add({"aten::reflection_pad2d_backward", "aten::replication_pad2d_backward"},
            backward(2).shapes(contiguous_like_input));
  table.add({"aten::reflection_pad3d_backward", "aten::replication_pad3d_backward"},
            backward(3).shapes(contiguous_like_input));

  // --- positions ---
  table.add({"aten::grid_sampler_2d", "aten::grid_sampler_3d"},
            sharded(grid_sampler).shapes(sampled_shape));
  table.add({"aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward"},
            sharded(grid_sampler_backward).shapes(sampled_gradient_shapes));

  // --- channels and pixels ---
  table.add({"aten::pixel_shuffle", "aten::pixel_unshuffle"}, moved(3));
  table.add("aten::native_channel_shuffle", moved(3).shapes(like_input));
  table.add("aten::channel_shuffle",
            sharded(channel_shuffle).shapes(like_input).refuses(has_no_channels));
  table.add("aten::im2col",
            sharded(windows).shapes(windows_shape).chunks_only().refuses(are_no_images));
  table.add("aten::col2im",
            sharded(windows).shapes(images_shape).chunks_only().refuses(are_no_images));
}

}  // namespace shardweave::dtensor_internal

// Images: convolution, pooling, interpolation, padding, sampling.
#include "shardweave/dtensor/testing/samples/families.h"

namespace shardweave::testing {
namespace {

Sample conv(std::vector<int64_t> input, std::vector<int64_t> weight, bool bias, int64_t stride,
            int64_t padding, int64_t groups = 1, bool transposed = false) {
  const int64_t channels = transposed ? weight[1] * groups : weight[0];
  const size_t n = input.size() - 2;
  const auto all = [n](int64_t value) { return ints(std::vector<int64_t>(n, value)); };
  return {"aten::convolution",
          {in(std::move(input)), in(std::move(weight)), bias ? in({channels}) : none()},
          {{"stride", all(stride)},
           {"padding", all(padding)},
           {"dilation", all(1)},
           {"transposed", transposed},
           {"output_padding", all(0)},
           {"groups", groups}}};
}

// Its derivative, by input, weight and bias; `output`: the shape of the result.
Sample conv_backward(std::vector<int64_t> output, std::vector<int64_t> input,
                     std::vector<int64_t> weight, int64_t stride, int64_t padding,
                     int64_t groups = 1, bool transposed = false) {
  const std::vector<int64_t> bias = {output[1]};
  Sample sample = conv(input, weight, false, stride, padding, groups, transposed);
  sample.op = "aten::convolution_backward";
  sample.operands = {in(std::move(output)), in(std::move(input)), in(std::move(weight))};
  sample.attributes.emplace_back("bias_sizes", ints(bias));
  sample.attributes.emplace_back("output_mask", flags({true, true, true}));
  return sample;
}

}  // namespace

std::vector<Sample> spatial_samples() {
  std::vector<Sample> samples;
  // --- convolution ---
  append(
      samples,
      {conv({5, 4, 7}, {6, 4, 3}, true, 1, 1), conv({5, 4, 6, 7}, {6, 4, 3, 3}, false, 2, 1),
       conv({5, 4, 8, 6}, {3, 4, 2, 2}, true, 2, 0),  // patches
       conv({5, 4, 7, 5}, {3, 4, 1, 1}, true, 1, 0), conv({5, 4, 7}, {8, 1, 3}, true, 1, 1, 4),
       conv({5, 4, 7}, {4, 3, 3}, true, 2, 1, 1, true),
       conv({3, 2, 4, 3, 5}, {3, 2, 2, 2, 2}, true, 1, 0),
       // Groups that one mesh dimension may cut, and not all of them together.
       conv({1, 6, 1}, {24, 1, 1}, false, 1, 0, 6), conv({5, 6, 4}, {12, 1, 3}, true, 1, 1, 6),
       conv({4, 12, 3}, {12, 2, 2}, true, 1, 0, 6, true), conv({6, 2, 16}, {4, 2, 2}, true, 2, 0),
       conv_backward({1, 24, 1}, {1, 6, 1}, {24, 1, 1}, 1, 0, 6),
       conv_backward({5, 12, 4}, {5, 6, 4}, {12, 1, 3}, 1, 1, 6),
       conv_backward({4, 12, 4}, {4, 12, 3}, {12, 2, 2}, 1, 0, 6, true),
       conv_backward({6, 4, 8}, {6, 2, 16}, {4, 2, 2}, 2, 0),
       conv_backward({5, 6, 7}, {5, 4, 7}, {6, 4, 3}, 1, 1)});

  // --- pooling ---
  const Operand lines = in({5, 3, 8});
  const Operand images = in({5, 3, 6, 8});
  const Operand volumes = in({3, 2, 4, 6, 4});
  append(
      samples,
      {
          {"aten::avg_pool2d", {images}, {{"kernel_size", ints({2, 3})}, {"stride", ints({2, 2})}}},
          {"aten::avg_pool3d", {volumes}, {{"kernel_size", ints({2, 2, 2})}}},
          {"aten::_adaptive_avg_pool2d", {images}, {{"output_size", ints({2, 3})}}},
          {"aten::_adaptive_avg_pool3d", {volumes}, {{"output_size", ints({2, 3, 2})}}},
          {"aten::max_pool2d_with_indices",
           {images},
           {{"kernel_size", ints({2, 3})}, {"stride", 2}}},
          {"aten::max_pool3d_with_indices",
           {volumes},
           {{"kernel_size", ints({2, 2, 3})}, {"stride", ints({2, 1, 2})}, {"ceil_mode", true}}},
          {"aten::adaptive_max_pool2d", {images}, {{"output_size", ints({2, 3})}}},
          {"aten::adaptive_max_pool3d", {volumes}, {{"output_size", ints({2, 3, 2})}}},
          {"aten::fractional_max_pool2d",
           {images, in({5, 3, 2}).uniform(0, 1).constant()},
           {{"kernel_size", ints({2, 2})}, {"output_size", ints({3, 4})}}},
          {"aten::fractional_max_pool3d",
           {volumes, in({3, 2, 3}).uniform(0, 1).constant()},
           {{"kernel_size", ints({2, 2, 2})}, {"output_size", ints({2, 3, 2})}}},
          {"aten::avg_pool2d_backward",
           {in({5, 3, 3, 4}), images},
           {{"kernel_size", ints({2, 2})},
            {"stride", ints({2, 2})},
            {"padding", ints({0, 0})},
            {"ceil_mode", false},
            {"count_include_pad", true}}},
          {"aten::_adaptive_avg_pool2d_backward", {in({5, 3, 2, 3}), images}},
          {"aten::_adaptive_avg_pool3d_backward", {in({3, 2, 2, 3, 2}), volumes}},
      });

  // --- windows ---
  const Operand channels = in({5, 4, 6, 3});
  const std::vector<std::pair<std::string, c10::IValue>> window = {{"kernel_size", ints({2, 3})},
                                                                   {"dilation", ints({1, 2})},
                                                                   {"padding", ints({0, 1})},
                                                                   {"stride", ints({2, 1})}};
  auto back = window;
  back.emplace_back("output_size", ints({6, 8}));
  append(samples, {{"aten::im2col", {images}, window},
                   {"aten::im2col", {in({4, 6, 8})}, window},
                   {"aten::col2im", {in({5, 24, 18})}, back},
                   {"aten::col2im", {in({18, 18})}, back},
                   {"aten::channel_shuffle", {channels}, {{"groups", 2}}}});

  // --- interpolation ---
  append(samples, each({"aten::upsample_linear1d"},
                       {"", {lines}, {{"output_size", ints({11})}, {"align_corners", false}}}));
  append(samples, each({"aten::upsample_nearest1d", "aten::_upsample_nearest_exact1d"},
                       {"", {lines}, {{"output_size", ints({11})}}}));
  append(samples, each({"aten::upsample_bicubic2d", "aten::upsample_bilinear2d",
                        "aten::_upsample_bicubic2d_aa", "aten::_upsample_bilinear2d_aa"},
                       {"", {images}, {{"output_size", ints({4, 11})}, {"align_corners", false}}}));
  append(samples, each({"aten::upsample_nearest2d", "aten::_upsample_nearest_exact2d"},
                       {"", {images}, {{"output_size", ints({4, 11})}}}));
  append(samples, {{"aten::upsample_trilinear3d",
                    {volumes},
                    {{"output_size", ints({5, 7, 3})}, {"align_corners", true}}}});
  append(samples, each({"aten::upsample_nearest3d", "aten::_upsample_nearest_exact3d"},
                       {"", {volumes}, {{"output_size", ints({5, 7, 3})}}}));
  append(samples, {{"aten::upsample_nearest2d_backward",
                    {in({5, 3, 4, 11})},
                    {{"output_size", ints({4, 11})}, {"input_size", ints({5, 3, 6, 8})}}},
                   {"aten::upsample_bilinear2d_backward",
                    {in({5, 3, 4, 11})},
                    {{"output_size", ints({4, 11})},
                     {"input_size", ints({5, 3, 6, 8})},
                     {"align_corners", false}}}});

  // --- padding ---
  append(samples, each({"aten::reflection_pad1d", "aten::replication_pad1d"},
                       {"", {lines}, {{"padding", ints({1, 2})}}}));
  append(samples, each({"aten::reflection_pad2d", "aten::replication_pad2d"},
                       {"", {images}, {{"padding", ints({1, 2, 0, 3})}}}));
  append(samples, each({"aten::reflection_pad3d", "aten::replication_pad3d"},
                       {"", {volumes}, {{"padding", ints({1, 2, 0, 3, 1, 1})}}}));

  // --- sampling, channels and pixels ---
  append(samples, {
                      {"aten::grid_sampler_2d",
                       {images, in({5, 4, 3, 2}).uniform(-0.9, 0.9)},
                       {{"interpolation_mode", 0}, {"padding_mode", 0}, {"align_corners", false}}},
                      {"aten::grid_sampler_3d",
                       {volumes, in({3, 2, 4, 3, 3}).uniform(-0.9, 0.9)},
                       {{"interpolation_mode", 0}, {"padding_mode", 0}, {"align_corners", false}}},
                      {"aten::pixel_shuffle", {in({5, 8, 3, 2})}, {{"upscale_factor", 2}}},
                      {"aten::pixel_unshuffle", {in({5, 2, 6, 4})}, {{"downscale_factor", 2}}},
                      {"aten::native_channel_shuffle", {in({5, 6, 2, 3})}, {{"groups", 3}}},
                  });
  return samples;
}

}  // namespace shardweave::testing

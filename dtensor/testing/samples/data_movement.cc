// Joining, cutting, padding, copying, and tensors made like others.
#include "shardweave/dtensor/testing/samples/families.h"

namespace shardweave::testing {

std::vector<Sample> data_movement_samples() {
  std::vector<Sample> samples;
  const Operand x = in({7, 5});
  const Operand cube = in({4, 3, 5});
  append(samples,
         {
             {"aten::cat", {list({in({4, 3}), in({2, 3})})}, {{"dim", 0}}},
             {"aten::cat", {list({in({5, 2}), in({5, 3}), in({0}).constant()})}, {{"dim", 1}}},
             {"aten::stack", {list({in({5, 3}), in({5, 3})})}, {{"dim", 1}}},
             {"aten::stack", {list({in({5, 3}), in({5, 3}).flags()})}, {{"dim", 1}}},
             {"aten::cat", {list({in({4, 3}).flags(), in({2, 3})})}, {{"dim", 0}}},
             {"aten::_stack", {list({in({5, 3}), in({5, 3})})}, {{"dim", -1}}},
             {"aten::unsafe_split.Tensor", {in({7, 3})}, {{"split_size", 3}}},
             {"aten::unsafe_split_with_sizes",
              {in({5, 6})},
              {{"split_sizes", ints({1, 3, 2})}, {"dim", 1}}},
             {"aten::slice_scatter", {x, in({3, 5})}, {{"start", 1}, {"end", 4}}},
             {"aten::select_scatter", {cube, in({4, 5})}, {{"dim", 1}, {"index", 2}}},
             {"aten::diagonal_scatter", {in({4, 5, 3}), in({3, 4})}, {{"dim1", 0}, {"dim2", 1}}},
             {"aten::slice_backward",
              {in({3, 5})},
              {{"input_sizes", ints({7, 5})}, {"dim", 0}, {"start", 1}, {"end", 4}, {"step", 1}}},
             {"aten::select_backward",
              {in({4, 5})},
              {{"input_sizes", ints({4, 3, 5})}, {"dim", 1}, {"index", 2}}},
             {"aten::diagonal_backward",
              {in({5, 3})},
              {{"input_sizes", ints({4, 5, 3})}, {"offset", 0}, {"dim1", 0}, {"dim2", 2}}},
             {"aten::unfold_backward",
              {in({4, 3, 2, 2})},
              {{"input_sizes", ints({4, 3, 5})}, {"dim", 2}, {"size", 2}, {"step", 2}}},
             {"aten::flip", {cube}, {{"dims", ints({0, -1})}}},
             {"aten::roll", {cube}, {{"shifts", ints({2})}, {"dims", ints({1})}}},
             {"aten::roll", {x}, {{"shifts", ints({3})}}},
             {"aten::tril", {cube}, {{"diagonal", 1}}},
             {"aten::triu", {x}},
             {"aten::repeat", {x}, {{"repeats", ints({2, 1, 3})}}},
             {"aten::constant_pad_nd", {x}, {{"pad", ints({1, 2})}, {"value", 0}}},
             {"aten::constant_pad_nd", {cube}, {{"pad", ints({0, 0, 1, 2})}, {"value", 1.5}}},
             {"aten::trace", {in({7, 5})}},
             {"aten::glu", {in({7, 6})}, {{"dim", 1}}},
             {"aten::glu_backward", {in({7, 3}), in({7, 6})}, {{"dim", 1}}},
         });
  append(samples,
         {{"aten::diag_embed", {cube}},
          {"aten::diag_embed", {cube}, {{"offset", 1}, {"dim1", 0}, {"dim2", 2}}},
          {"aten::diag_embed", {in({5})}, {{"offset", -2}}},
          {"aten::diagonal_scatter", {cube, in({3, 4})}, {{"dim1", 0}, {"dim2", -1}}},
          {"aten::block_diag", {list({in({4, 3}), in({2, 5})})}},
          {"aten::rot90", {cube}},
          {"aten::rot90", {cube}, {{"k", 2}, {"dims", ints({2, 0})}}},
          {"aten::linspace.Tensor_Tensor", {in({}), in({})}, {{"steps", 5}}, 1e-5},
          {"aten::linspace.Tensor_Scalar",
           {in({})},
           {{"end", 2.5}, {"steps", 4}, {"dtype", at::kDouble}}},
          {"aten::linspace.Scalar_Tensor", {in({})}, {{"start", 2.5}, {"steps", 1}}, 1e-5},
          {"aten::logspace.Tensor_Tensor", {in({}), in({})}, {{"steps", 5}}, 1e-5},
          {"aten::logspace.Tensor_Scalar", {in({})}, {{"end", 1.5}, {"steps", 4}}, 1e-5},
          {"aten::logspace.Scalar_Tensor", {in({})}, {{"start", 2.5}, {"steps", 3}}, 1e-5}});
  append(samples, each({"aten::clone", "aten::_to_copy"}, {"", {x}}));
  // No gradient: lift returns its argument, and LibTorch makes that its own history.
  samples.push_back({"aten::lift", {in({7, 5}).constant()}});
  append(samples,
         {
             {"aten::_to_copy", {x}, {{"dtype", at::kFloat}}, 1e-5},
             {"aten::_to_copy", {in({7, 5}).integers(0, 9)}, {{"dtype", at::kDouble}}},
             {"aten::_to_copy", {x}, {{"dtype", at::kLong}}},
             {"aten::_to_copy", {in({7, 5}).flags()}, {{"dtype", at::kDouble}}},
             {"aten::_to_copy", {in({7, 5}).complex()}, {{"dtype", at::kComplexFloat}}, 1e-5},
             {"aten::copy", {x, in({5})}},
             {"aten::copy_", {x, in({7, 5})}},
             {"aten::fill.Scalar", {x}, {{"value", 2.5}}},
             {"aten::fill.Tensor", {x, in({})}},
             {"aten::fill_.Scalar", {x}, {{"value", 2.5}}},
             {"aten::zero", {x}},
             {"aten::zero_", {x}},
             {"aten::full_like", {x}, {{"fill_value", 3.5}}},
             {"aten::ones_like", {x}},
             {"aten::zeros_like", {x}},
             {"aten::new_full", {x}, {{"size", ints({7, 5})}, {"fill_value", 3.5}}},
             {"aten::new_full", {x}, {{"size", ints({3})}, {"fill_value", 3.5}}},
             {"aten::new_ones", {x}, {{"size", ints({7, 5})}}},
             {"aten::new_zeros", {x}, {{"size", ints({3, 2})}}},
         });
  Sample made{"aten::empty_like", {x}};
  made.values = false;
  samples.push_back(made);
  made = {"aten::new_empty", {x}, {{"size", ints({7, 5})}}};
  made.values = false;
  samples.push_back(made);
  made = {"aten::new_empty_strided", {x}, {{"size", ints({7, 5})}, {"stride", ints({1, 7})}}};
  made.values = false;
  samples.push_back(made);
  return samples;
}

}  // namespace shardweave::testing

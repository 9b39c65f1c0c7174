// Reading and writing by index, embedding, search.
#include "shardweave/dtensor/testing/samples/families.h"

namespace shardweave::testing {

std::vector<Sample> indexing_samples() {
  const Operand x = in({7, 5});
  const Operand cube = in({4, 3, 5});
  const Operand rows = in({6}).integers(0, 4);
  std::vector<Sample> samples = {
      {"aten::gather", {x, in({4, 5}).integers(0, 7)}, {{"dim", 0}}},
      {"aten::gather", {x, in({7, 3}).integers(0, 5)}, {{"dim", 1}}},
      {"aten::scatter.src", {x, in({1, 5}).integers(0, 7), in({1, 5})}, {{"dim", 0}}},
      {"aten::scatter.value", {x, in({4, 5}).integers(0, 7)}, {{"dim", 0}, {"value", 2.5}}},
      {"aten::scatter.reduce",
       {x, in({4, 5}).integers(0, 7), in({4, 5})},
       {{"dim", 0}, {"reduce", "add"}}},
      {"aten::scatter_add", {x, in({4, 5}).integers(0, 7), in({4, 5})}, {{"dim", 0}}},
      {"aten::scatter_add", {x, in({7, 3}).integers(0, 5), in({7, 3})}, {{"dim", 1}}},
      {"aten::scatter_reduce.two",
       {x, in({4, 5}).integers(0, 7), in({4, 5})},
       {{"dim", 0}, {"reduce", "amax"}}},
      {"aten::index_select", {cube, rows}, {{"dim", 0}}},
      {"aten::index_select", {cube, in({6}).integers(0, 5)}, {{"dim", -1}}},
      {"aten::index_add", {cube, rows, in({6, 3, 5})}, {{"dim", 0}, {"alpha", 0.5}}},
      {"aten::index_copy", {cube, in({1}).integers(0, 4), in({1, 3, 5})}, {{"dim", 0}}},
      {"aten::index_fill.int_Scalar", {cube, rows}, {{"dim", 0}, {"value", 2.5}}},
      {"aten::index_fill.int_Tensor", {cube, rows, in({})}, {{"dim", 0}}},
      {"aten::index_reduce", {cube, rows, in({6, 3, 5})}, {{"dim", 0}, {"reduce", "amax"}}},
      {"aten::index.Tensor", {cube, list({rows})}},
      {"aten::index.Tensor", {cube, list({none(), in({2, 6}).integers(0, 3)})}},
      {"aten::index.Tensor", {cube, list({rows, none(), in({6}).integers(0, 5)})}},
      {"aten::_unsafe_index.Tensor", {cube, list({rows, in({6}).integers(0, 3)})}},
      {"aten::index_put", {cube, list({in({1}).integers(0, 4)}), in({3, 5})}},
      {"aten::index_put", {cube, list({rows}), in({6, 3, 5})}, {{"accumulate", true}}},
      {"aten::index_put",
       {cube, list({none(), in({6}).integers(0, 3)}), in({4, 6, 1})},
       {{"accumulate", true}}},
      {"aten::_unsafe_index_put", {cube, list({rows}), in({6, 3, 5})}, {{"accumulate", true}}},
      {"aten::_index_put_impl", {cube, list({rows}), in({6, 3, 5})}, {{"accumulate", true}}},
      {"aten::masked_scatter", {x, in({7, 5}).flags(), in({35})}},
      {"aten::take", {x, in({4, 3}).integers(0, 35)}},
      {"aten::put", {x, in({1}).integers(0, 35), in({1})}},
      {"aten::put", {x, in({6}).integers(0, 35), in({6})}, {{"accumulate", true}}},
      {"aten::bucketize.Tensor", {x, in({6}).sorted().constant()}},
      {"aten::searchsorted.Tensor", {in({4, 6}).sorted().constant(), in({4, 5})}},
      {"aten::searchsorted.Tensor", {in({6}).sorted().constant(), in({4, 5})}},
      {"aten::isin.Tensor_Tensor", {in({7, 5}).integers(0, 9), in({3}).integers(0, 9)}},
      {"aten::isin.Tensor_Scalar", {in({7, 5}).integers(0, 9)}, {{"test_element", 3}}},
      {"aten::nonzero", {in({7, 5}).integers(0, 3)}},
      {"aten::nonzero", {in({7, 5}).flags()}},
      {"aten::nonzero_static", {in({7, 5}).integers(0, 3)}, {{"size", 9}}},
      {"aten::masked_select", {x, in({7, 5}).flags()}},
      {"aten::masked_select", {x, in({5}).flags()}},
      {"aten::_unique", {in({7, 5}).integers(0, 9)}},
      {"aten::_unique2",
       {in({7, 5}).integers(0, 9)},
       {{"return_inverse", true}, {"return_counts", true}}},
      {"aten::unique_dim", {in({7, 2}).integers(0, 2)}, {{"dim", 0}, {"return_inverse", true}}},
      {"aten::unique_consecutive", {in({7}).integers(0, 2)}, {{"return_counts", true}}},
      {"aten::unique_dim_consecutive", {in({7, 2}).integers(0, 2)}, {{"dim", 0}}},
      {"aten::repeat_interleave.Tensor", {in({7}).integers(0, 4)}},
      {"aten::repeat_interleave.self_int", {cube}, {{"repeats", 3}, {"dim", 1}}},
      {"aten::repeat_interleave.self_Tensor", {x, in({7}).integers(0, 4)}, {{"dim", 0}}},
      {"aten::embedding", {in({7, 5}), in({4, 3}).integers(0, 7)}},
      {"aten::embedding_dense_backward",
       {in({4, 3, 5}), in({4, 3}).integers(0, 7)},
       {{"num_weights", 7}, {"padding_idx", 2}, {"scale_grad_by_freq", false}}},
      {"aten::embedding_renorm",
       {in({7, 5}), in({4, 3}).integers(0, 6)},
       {{"max_norm", 0.8}, {"norm_type", 2.0}}},
      {"aten::masked_scatter_backward",
       {x, in({7, 5}).flags()},
       {{"sizes", std::vector<int64_t>{4, 9}}}},
  };
  return samples;
}

}  // namespace shardweave::testing

// Products of matrices and vectors, attention.
#include "shardweave/dtensor/testing/samples/families.h"

namespace shardweave::testing {

std::vector<Sample> matmul_samples() {
  const auto attributes = [](bool causal) {
    return std::vector<std::pair<std::string, c10::IValue>>{{"is_causal", causal}};
  };
  return {
      {"aten::mm", {in({7, 4}), in({4, 5})}},
      {"aten::mm", {in({3, 4}).transposed(), in({4, 5})}},
      {"aten::mm", {in({7, 4}).complex(), in({4, 5}).complex()}},
      {"aten::mm", {in({7, 4}).integers(0, 9), in({4, 5}).integers(0, 9)}},
      {"aten::bmm", {in({3, 5, 4}), in({3, 4, 2})}},
      {"aten::mv", {in({7, 4}), in({4})}},
      {"aten::dot", {in({7}), in({7})}},
      {"aten::vdot", {in({7}), in({7})}},
      {"aten::addmm", {in({5}), in({7, 4}), in({4, 5})}, {{"beta", 0.5}, {"alpha", 2.0}}},
      {"aten::addmm", {in({7, 5}), in({7, 4}), in({4, 5})}},
      {"aten::_addmm_activation", {in({5}), in({7, 4}), in({4, 5})}},
      {"aten::_addmm_activation", {in({5}), in({7, 4}), in({4, 5})}, {{"use_gelu", true}}},
      {"aten::addbmm", {in({5, 2}), in({3, 5, 4}), in({3, 4, 2})}},
      {"aten::baddbmm", {in({3, 5, 2}), in({3, 5, 4}), in({3, 4, 2})}},
      {"aten::baddbmm", {in({5, 1}), in({3, 5, 4}), in({3, 4, 2})}, {{"beta", 0.5}}},
      {"aten::addmv", {in({7}), in({7, 4}), in({4})}},
      {"aten::addr", {in({7, 5}), in({7}), in({5})}},
      {"aten::_trilinear",
       {in({7, 5}), in({3, 5, 4}), in({7, 4})},
       {{"expand1", ints({1, 3})},
        {"expand2", ints({0})},
        {"expand3", ints({1, 2})},
        {"sumdim", ints({2, 3})}}},
      {"aten::_trilinear",
       {in({7, 5}), in({7, 1}), in({5})},
       {{"expand1", ints({})},
        {"expand2", ints({})},
        {"expand3", ints({0})},
        {"sumdim", ints({1})},
        {"unroll_dim", 0}}},
      // An addend of one element, and ranks without rows or columns. (Not of addbmm: in place LibTorch
      // gives it another shape.)
      {"aten::addmv", {in({1}), in({4, 3}), in({3})}},
      {"aten::addmv", {in({}), in({4, 3}), in({3})}},
      {"aten::addmm", {in({1}), in({4, 3}), in({3, 4})}},
      {"aten::addmm", {in({1, 1}), in({4, 3}), in({3, 4})}},
      {"aten::_addmm_activation", {in({1}), in({4, 3}), in({3, 4})}},
      {"aten::baddbmm", {in({1, 1, 1}), in({4, 4, 3}), in({4, 3, 4})}},
      {"aten::addr", {in({1, 1}), in({4}), in({4})}},
      {"aten::addr", {in({1}), in({4}), in({1})}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
       {in({3, 2, 5, 4}), in({3, 2, 6, 4}), in({3, 2, 6, 4})}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
       {in({3, 2, 5, 4}), in({3, 2, 5, 4}), in({3, 2, 5, 4})},
       attributes(true)},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
       {in({3, 2, 5, 4}), in({3, 2, 6, 4}), in({3, 2, 6, 4}), in({5, 6}).constant()}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
       {in({3, 2, 5, 4}), in({3, 2, 6, 4}), in({3, 2, 6, 4}), in({3, 2, 5, 6}).constant()}},
  };
}

}  // namespace shardweave::testing

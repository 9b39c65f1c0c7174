// Views, and the same as copies.
#include "shardweave/dtensor/testing/samples/families.h"

namespace shardweave::testing {

std::vector<Sample> view_samples() {
  std::vector<Sample> samples;
  const Operand cube = in({4, 3, 5});
  append(samples, each({"aten::alias", "aten::detach", "aten::alias_copy", "aten::detach_copy"},
                       {"", {cube}}));
  // No gradient: lift_fresh returns its argument, and LibTorch makes that its own history.
  samples.push_back({"aten::lift_fresh", {in({4, 3, 5}).constant()}});
  for (const char* copy : {"", "_copy"}) {
    const auto op = [copy](const std::string& name, const std::string& overload = "") {
      return "aten::" + name + copy + overload;
    };
    append(
        samples,
        {
            {op("permute"), {cube}, {{"dims", ints({2, 0, 1})}}},
            {op("transpose", ".int"), {cube}, {{"dim0", 0}, {"dim1", -1}}},
            {op("t"), {in({7, 5})}},
            {op("unsqueeze"), {cube}, {{"dim", 1}}},
            {op("squeeze"), {in({1, 5, 1})}},
            {op("squeeze", ".dim"), {in({1, 5, 1})}, {{"dim", 0}}},
            {op("squeeze", ".dims"), {in({1, 5, 1})}, {{"dim", ints({0, 1})}}},
            {op("expand"), {in({1, 5})}, {{"size", ints({3, 4, 5})}}},
            {op("diagonal"), {in({4, 3, 5})}, {{"offset", 1}, {"dim1", 0}, {"dim2", 2}}},
            {op("unfold"), {cube}, {{"dimension", 2}, {"size", 2}, {"step", 2}}},
            {op("select", ".int"), {cube}, {{"dim", 1}, {"index", 2}}},
            {op("slice", ".Tensor"), {cube}, {{"dim", 2}, {"start", 1}, {"end", 5}, {"step", 2}}},
            {op("slice", ".Tensor"), {cube}, {{"dim", 0}, {"start", 0}, {"end", 99}}},
            {op("split", ".Tensor"), {in({7, 3})}, {{"split_size", 3}}},
            {op("split_with_sizes"), {in({5, 6})}, {{"split_sizes", ints({1, 3, 2})}, {"dim", 1}}},
            {op("unbind", ".int"), {in({3, 4})}, {{"dim", 1}}},
            {op("view"), {cube}, {{"size", ints({12, 5})}}},
            {op("view"), {cube}, {{"size", ints({4, 15})}}},
            {op("view"), {in({6, 5})}, {{"size", ints({2, 3, 5})}}},
            {op("view"), {in({6, 5})}, {{"size", ints({6, 5, 1})}}},
            {op("view", ".dtype"), {in({7, 5})}, {{"dtype", at::kLong}}},
            {op("view", ".dtype"), {in({7, 5})}, {{"dtype", at::kInt}}},
            {op("view_as_real"), {in({7, 5}).complex()}},
            {op("view_as_complex"), {in({7, 5, 2})}},
            {op("as_strided"), {in({7, 5})}, {{"size", ints({3, 4})}, {"stride", ints({5, 1})}}},
        });
  }
  append(samples,
         {{"aten::_unsafe_view", {cube}, {{"size", ints({12, 5})}}},
          {"aten::_reshape_alias", {cube}, {{"size", ints({12, 5})}, {"stride", ints({5, 1})}}},
          {"aten::_conj", {in({7, 5}).complex()}},
          {"aten::_neg_view", {in({7, 5})}},
          {"aten::resolve_conj", {in({7, 5}).complex()}},
          {"aten::real", {in({7, 5}).complex()}},
          {"aten::imag", {in({7, 5}).complex()}}});
  return samples;
}

}  // namespace shardweave::testing

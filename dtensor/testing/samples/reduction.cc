// Reductions, scans, and what works along one dimension.
#include "shardweave/dtensor/testing/samples/families.h"

namespace shardweave::testing {

std::vector<Sample> reduction_samples() {
  std::vector<Sample> samples;
  const Operand x = in({7, 5});
  const Operand cube = in({4, 3, 5});

  append(samples, each({"aten::sum",
                        "aten::nansum",
                        "aten::mean",
                        "aten::prod",
                        "aten::max",
                        "aten::min",
                        "aten::any",
                        "aten::all",
                        "aten::count_nonzero",
                        "aten::argmax",
                        "aten::argmin",
                        "aten::amax",
                        "aten::amin",
                        "aten::aminmax",
                        "aten::median",
                        "aten::nanmedian",
                        "aten::norm.Scalar",
                        "aten::linalg_vector_norm",
                        "aten::var.correction",
                        "aten::std.correction",
                        "aten::var_mean.correction",
                        "aten::std_mean.correction"},
                       {"", {x}}));
  append(samples, each({"aten::sum", "aten::prod", "aten::max", "aten::amin", "aten::any",
                        "aten::all", "aten::count_nonzero"},
                       {"", {in({7, 5}).integers(-2, 4)}}));
  append(samples, each({"aten::any", "aten::all", "aten::sum"}, {"", {in({7, 5}).flags()}}));
  append(samples, each({"aten::sum", "aten::mean", "aten::prod"}, {"", {in({5, 3}).complex()}}));

  // Along one dimension, kept or not.
  const std::vector<std::string> along_one = {
      "aten::prod.dim_int",  "aten::any.dim", "aten::all.dim", "aten::argmax",
      "aten::argmin",        "aten::max.dim", "aten::min.dim", "aten::median.dim",
      "aten::nanmedian.dim", "aten::mode",    "aten::aminmax"};
  append(samples, each(along_one, {"", {cube}, {{"dim", 0}, {"keepdim", false}}}));
  append(samples, each(along_one, {"", {cube}, {{"dim", -2}, {"keepdim", true}}}));
  append(samples, {{"aten::kthvalue", {cube}, {{"k", 2}, {"dim", 1}}},
                   {"aten::count_nonzero.dim_IntList", {cube}, {{"dim", ints({1})}}}});
  // Along several.
  const std::vector<std::string> along_several = {"aten::sum.dim_IntList",
                                                  "aten::nansum",
                                                  "aten::mean.dim",
                                                  "aten::amax",
                                                  "aten::amin",
                                                  "aten::any.dims",
                                                  "aten::all.dims",
                                                  "aten::linalg_vector_norm",
                                                  "aten::logsumexp",
                                                  "aten::var.correction",
                                                  "aten::std.correction",
                                                  "aten::var_mean.correction",
                                                  "aten::std_mean.correction"};
  append(samples, each(along_several, {"", {cube}, {{"dim", ints({1})}}}));
  append(samples, each(along_several, {"", {cube}, {{"dim", ints({0, 2})}, {"keepdim", true}}}));
  for (const double p : {0.0, 1.0, 3.0}) {
    append(samples, {{"aten::linalg_vector_norm", {cube}, {{"ord", p}, {"dim", ints({1})}}},
                     {"aten::norm.ScalarOpt_dim", {cube}, {{"p", p}, {"dim", ints({0})}}}});
  }

  // --- scans and sorts ---
  const std::vector<std::string> scans = {"aten::cumsum", "aten::cumprod", "aten::logcumsumexp",
                                          "aten::cummax", "aten::cummin"};
  append(samples, each(scans, {"", {cube}, {{"dim", 0}}}));
  append(samples, each(scans, {"", {cube}, {{"dim", -1}}}));
  append(samples, {{"aten::sort", {cube}, {{"dim", 1}}},
                   {"aten::sort.stable", {cube}, {{"dim", 0}, {"stable", true}}},
                   {"aten::topk", {cube}, {{"k", 2}, {"dim", 1}}},
                   {"aten::topk", {cube}, {{"k", 3}, {"dim", -1}, {"largest", false}}}});
  append(samples, each({"aten::median", "aten::nanmedian"}, {"", {x}}));
  append(samples, {{"aten::histc", {x}, {{"bins", 4}}},
                   {"aten::histc", {x}, {{"bins", 4}, {"min", 1}, {"max", 1}}},
                   {"aten::bincount", {in({7}).integers(0, 9)}},
                   {"aten::bincount", {in({7}).integers(0, 9), in({7}).constant()}},
                   {"aten::bincount", {in({7}).integers(0, 9)}, {{"minlength", 12}}}});
  // --- histograms ---
  const c10::IValue range = std::vector<double>{-1, 1.5};
  const c10::IValue ranges = std::vector<double>{-1, 1.5, -2, 2};
  const Operand weight = in({7, 5}).constant();
  for (const bool density : {false, true}) {
    append(samples, {{"aten::histogram.bin_ct", {x}, {{"bins", 4}, {"density", density}}},
                     {"aten::histogram.bin_ct",
                      {x, weight},
                      {{"bins", 4}, {"range", range}, {"density", density}}},
                     {"aten::histogram.bins_tensor", {x, in({4}).sorted()}, {{"density", density}}},
                     {"aten::_histogramdd_bin_edges",
                      {in({7, 2})},
                      {{"bins", ints({3, 4})}, {"density", density}}},
                     {"aten::_histogramdd_bin_edges",
                      {in({7, 2})},
                      {{"bins", ints({3, 4})}, {"range", ranges}}},
                     {"aten::_histogramdd_from_bin_cts",
                      {in({7, 2})},
                      {{"bins", ints({3, 4})}, {"density", density}}},
                     {"aten::_histogramdd_from_bin_cts",
                      {in({7, 2}), in({7}).constant()},
                      {{"bins", ints({3, 4})}, {"range", ranges}, {"density", density}}},
                     {"aten::_histogramdd_from_bin_tensors",
                      {in({7, 2}), list({in({4}).sorted(), in({5}).sorted()})},
                      {{"density", density}}}});
  }
  // --- segments ---
  const Operand twos = in({3, 2}).integers(2, 3);
  for (const char* reduce : {"sum", "mean", "max"}) {
    append(samples,
           {{"aten::segment_reduce", {in({3, 4, 5}), twos}, {{"reduce", reduce}, {"axis", 1}}},
            {"aten::segment_reduce",
             {in({4, 5}), in({2}).integers(2, 3)},
             {{"reduce", reduce}, {"unsafe", true}}},
            {"aten::_segment_reduce_backward",
             {in({3, 2, 5}), in({3, 2, 5}), in({3, 4, 5}), twos},
             {{"reduce", reduce}, {"axis", 1}}}});
  }
  append(samples, {{"aten::histc", {x}, {{"bins", 4}, {"min", -1}, {"max", 1}}},
                   {"aten::renorm", {cube}, {{"p", 2}, {"dim", 1}, {"maxnorm", 1.5}}}});

  // --- softmax ---
  append(samples, each({"aten::_softmax", "aten::_log_softmax"},
                       {"", {cube}, {{"dim", 1}, {"half_to_float", false}}}));
  append(samples, each({"aten::_softmax_backward_data", "aten::_log_softmax_backward_data"},
                       {"",
                        {cube, in({4, 3, 5}).uniform(0.1, 0.4)},
                        {{"dim", 1}, {"input_dtype", at::kDouble}}}));
  append(samples, {{"aten::_safe_softmax", {cube}, {{"dim", 2}}}});
  for (const int64_t type : {0, 1, 2}) {
    const std::vector<int64_t> mask = type == 0   ? std::vector<int64_t>{5, 5}
                                      : type == 1 ? std::vector<int64_t>{3, 5}
                                                  : std::vector<int64_t>{3, 2, 5, 5};
    append(
        samples,
        {{"aten::_masked_softmax", {in({3, 2, 5, 5}), in(mask).flags()}, {{"mask_type", type}}}});
  }
  append(samples,
         {{"aten::_masked_softmax_backward",
           {in({3, 2, 4, 5}), in({3, 2, 4, 5}).uniform(0.1, 0.4), in({3, 2, 4, 5}).flags()}}});
  return samples;
}

}  // namespace shardweave::testing

// Losses and their gradients, with every kind of reduction.
#include "shardweave/dtensor/testing/samples/families.h"

namespace shardweave::testing {

std::vector<Sample> loss_samples() {
  std::vector<Sample> samples;
  const Operand x = in({7, 5});
  const Operand probability = in({7, 5}).uniform(0.1, 0.9);
  const Operand target = in({7, 5}).uniform(0.1, 0.9).constant();
  for (const int64_t reduction : {0, 1, 2}) {  // none, mean, sum
    const Operand grad = reduction == 0 ? in({7, 5}) : in({});
    const Operand grad_of_lines = reduction == 0 ? in({7}) : in({});
    const Operand labels = in({7, 5}).integers(-1, 5);
    append(
        samples,
        {{"aten::multi_margin_loss",
          {x, in({7}).integers(0, 5), in({5}).uniform(0.5, 2).constant()},
          {{"reduction", reduction}, {"p", 2}}},
         {"aten::multi_margin_loss", {in({5}), in({1}).integers(0, 5)}, {{"reduction", reduction}}},
         {"aten::multi_margin_loss_backward",
          {grad_of_lines, x, in({7}).integers(0, 5)},
          {{"reduction", reduction}, {"p", 1}, {"margin", 0.5}}},
         {"aten::multilabel_margin_loss_forward", {x, labels}, {{"reduction", reduction}}},
         {"aten::multilabel_margin_loss_backward",
          {grad_of_lines, x, labels, in({7, 5}).uniform(0, 1).constant()},
          {{"reduction", reduction}}}});
    append(samples, each({"aten::mse_loss", "aten::smooth_l1_loss", "aten::soft_margin_loss",
                          "aten::huber_loss", "aten::binary_cross_entropy",
                          "aten::binary_cross_entropy_with_logits"},
                         {"", {probability, target}, {{"reduction", reduction}}}));
    append(samples, each({"aten::mse_loss_backward", "aten::binary_cross_entropy_backward",
                          "aten::soft_margin_loss_backward"},
                         {"", {grad, probability, target}, {{"reduction", reduction}}}));
    append(samples, {{"aten::smooth_l1_loss_backward",
                      {grad, x, target},
                      {{"reduction", reduction}, {"beta", 1.0}}},
                     {"aten::huber_loss_backward",
                      {grad, x, target},
                      {{"reduction", reduction}, {"delta", 1.0}}}});
    append(samples, {{"aten::nll_loss_forward",
                      {x, in({7}).integers(0, 5), in({5}).uniform(0.5, 2).constant()},
                      {{"reduction", reduction}, {"ignore_index", 2}}},
                     {"aten::nll_loss2d_forward",
                      {in({3, 4, 2, 5}), in({3, 2, 5}).integers(0, 4)},
                      {{"reduction", reduction}, {"ignore_index", -100}},
                      1e-9,
                      true,
                      true,
                      reduction == 0 ? std::vector<size_t>{1} : std::vector<size_t>{}},
                     {"aten::nll_loss_backward",
                      {reduction == 0 ? in({7}) : in({}), x, in({7}).integers(0, 5), none(),
                       in({}).uniform(6, 7).constant()},
                      {{"reduction", reduction}, {"ignore_index", 2}}},
                     {"aten::nll_loss2d_backward",
                      {reduction == 0 ? in({3, 2, 5}) : in({}), in({3, 4, 2, 5}),
                       in({3, 2, 5}).integers(0, 4), none(), in({}).uniform(6, 7).constant()},
                      {{"reduction", reduction}, {"ignore_index", -100}}}});
  }
  return samples;
}

}  // namespace shardweave::testing

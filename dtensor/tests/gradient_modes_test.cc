// Some operators of LibTorch take another path where nothing is to be differentiated (in inference
// mode, under no_grad, for inputs that do not require grad): every path gives the numbers of one
// device.
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/op_check.h"

namespace shardweave {
namespace {

using testing::in;
using testing::Input;
using testing::on_mesh;
using testing::Tensors;

struct Case {
  std::string name;
  std::vector<Input> inputs;
  std::function<Tensors(const Tensors&)> run;
};

enum class Mode { kRequiresGrad, kPlain, kNoGrad, kInference };
constexpr Mode kModes[] = {Mode::kRequiresGrad, Mode::kPlain, Mode::kNoGrad, Mode::kInference};
constexpr const char* kModeNames[] = {"requires_grad", "plain", "no_grad", "inference"};

std::string first_line(const std::exception& error) {
  const std::string what = error.what();
  return what.substr(0, what.find('\n'));
}

// In every mode, with the first input replicated and cut along each of its dimensions.
void check_modes(const std::vector<Case>& cases) {
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    for (const Case& c : cases) {
      for (const Mode mode : kModes) {
        for (int d = -1; d < static_cast<int>(c.inputs[0].sizes().size()); ++d) {
          const std::string where =
              absl::StrCat(c.name, ", ", kModeNames[static_cast<int>(mode)], ", first input ",
                           d < 0 ? Replicate().to_string() : Shard(d).to_string());
          Tensors whole;
          for (size_t i = 0; i < c.inputs.size(); ++i) whole.push_back(c.inputs[i].make(i + 1));
          try {
            const Tensors want = c.run(whole);
            std::optional<c10::InferenceMode> inference;
            std::optional<at::NoGradGuard> no_grad;
            if (mode == Mode::kInference) inference.emplace();
            if (mode == Mode::kNoGrad) no_grad.emplace();
            Tensors inputs;
            for (size_t i = 0; i < whole.size(); ++i) {
              const Placement p = i == 0 && d >= 0 ? Shard(d) : Replicate();
              inputs.push_back(
                  distribute_tensor(whole[i], mesh, Placements{p}, {.source = std::nullopt}));
              if (mode != Mode::kPlain && mode != Mode::kInference && c.inputs[i].has_gradient()) {
                inputs.back().requires_grad_();
              }
            }
            const Tensors got = c.run(inputs);
            ASSERT_EQ(got.size(), want.size()) << where;
            for (size_t k = 0; k < got.size(); ++k) {
              ASSERT_TRUE(is_dtensor(got[k])) << where;
              const at::Tensor all = full_tensor(got[k]).detach();
              ASSERT_EQ(all.sizes(), want[k].sizes()) << where;
              EXPECT_TRUE(at::allclose(all, want[k], 1e-6, 1e-6, /*equal_nan=*/true)) << where;
            }
          } catch (const std::exception& error) {
            ADD_FAILURE() << where << ": " << first_line(error);
          }
        }
      }
    }
  });
}

TEST(GradientModesTest, Pooling) {
  const Input lines = in({4, 2, 9}), images = in({4, 2, 6, 8}), volumes = in({2, 2, 4, 6, 4});
  check_modes({
      {"max_pool1d",
       {lines},
       [](const Tensors& x) { return Tensors{at::max_pool1d(x[0], 3, 2, 1)}; }},
      {"max_pool1d of one line of channels",
       {in({4, 9})},
       [](const Tensors& x) { return Tensors{at::max_pool1d(x[0], 2)}; }},
      {"max_pool1d, dilated, ceil",
       {lines},
       [](const Tensors& x) { return Tensors{at::max_pool1d(x[0], 2, 2, 0, 2, true)}; }},
      {"max_pool1d_with_indices",
       {lines},
       [](const Tensors& x) {
         auto [y, i] = at::max_pool1d_with_indices(x[0], 3, 2, 1);
         return Tensors{y, i};
       }},
      {"max_pool2d", {images}, [](const Tensors& x) { return Tensors{at::max_pool2d(x[0], 2)}; }},
      {"max_pool3d", {volumes}, [](const Tensors& x) { return Tensors{at::max_pool3d(x[0], 2)}; }},
      {"avg_pool1d",
       {lines},
       [](const Tensors& x) { return Tensors{at::avg_pool1d(x[0], 3, 2, 1)}; }},
      {"avg_pool2d", {images}, [](const Tensors& x) { return Tensors{at::avg_pool2d(x[0], 2)}; }},
      {"avg_pool3d", {volumes}, [](const Tensors& x) { return Tensors{at::avg_pool3d(x[0], 2)}; }},
      {"adaptive_avg_pool1d",
       {lines},
       [](const Tensors& x) { return Tensors{at::adaptive_avg_pool1d(x[0], 4)}; }},
      {"adaptive_avg_pool2d",
       {images},
       [](const Tensors& x) { return Tensors{at::adaptive_avg_pool2d(x[0], {2, 3})}; }},
      {"adaptive_avg_pool2d to one",
       {images},
       [](const Tensors& x) { return Tensors{at::adaptive_avg_pool2d(x[0], {1, 1})}; }},
      {"adaptive_avg_pool3d",
       {volumes},
       [](const Tensors& x) { return Tensors{at::adaptive_avg_pool3d(x[0], {2, 3, 2})}; }},
      {"adaptive_max_pool1d",
       {lines},
       [](const Tensors& x) { return Tensors{std::get<0>(at::adaptive_max_pool1d(x[0], 4))}; }},
      {"adaptive_max_pool2d",
       {images},
       [](const Tensors& x) {
         return Tensors{std::get<0>(at::adaptive_max_pool2d(x[0], {2, 3}))};
       }},
      {"adaptive_max_pool3d",
       {volumes},
       [](const Tensors& x) {
         return Tensors{std::get<0>(at::adaptive_max_pool3d(x[0], {2, 3, 2}))};
       }},
  });
}

TEST(GradientModesTest, Convolution) {
  check_modes({
      {"conv1d",
       {in({4, 2, 9}), in({6, 2, 3}), in({6})},
       [](const Tensors& x) { return Tensors{at::conv1d(x[0], x[1], x[2], 1, 1)}; }},
      {"conv1d, same",
       {in({4, 2, 9}), in({6, 2, 4})},
       [](const Tensors& x) { return Tensors{at::conv1d(x[0], x[1], {}, 1, "same")}; }},
      {"conv2d",
       {in({4, 2, 6, 8}), in({6, 2, 3, 3}), in({6})},
       [](const Tensors& x) { return Tensors{at::conv2d(x[0], x[1], x[2], 1, 1)}; }},
      {"conv2d of one image",
       {in({2, 6, 8}), in({6, 2, 3, 3})},
       [](const Tensors& x) { return Tensors{at::conv2d(x[0], x[1])}; }},
      {"conv2d of groups",
       {in({4, 2, 6, 8}), in({6, 1, 3, 3})},
       [](const Tensors& x) { return Tensors{at::conv2d(x[0], x[1], {}, 1, 1, 1, 2)}; }},
      {"conv3d",
       {in({2, 2, 4, 6, 4}), in({3, 2, 2, 2, 2})},
       [](const Tensors& x) { return Tensors{at::conv3d(x[0], x[1])}; }},
      {"conv_transpose1d",
       {in({4, 2, 5}), in({2, 3, 3})},
       [](const Tensors& x) { return Tensors{at::conv_transpose1d(x[0], x[1], {}, 2)}; }},
      {"conv_transpose2d",
       {in({4, 2, 3, 4}), in({2, 3, 3, 3}), in({3})},
       [](const Tensors& x) { return Tensors{at::conv_transpose2d(x[0], x[1], x[2], 2)}; }},
      {"conv_tbc",
       {in({5, 4, 2}), in({3, 2, 6}), in({6})},
       [](const Tensors& x) { return Tensors{at::conv_tbc(x[0], x[1], x[2], 1)}; }},
  });
}

TEST(GradientModesTest, Normalization) {
  const Input whole = in({4, 6, 5}), channels = in({6}), var = in({6}).uniform(0.5, 2).constant();
  check_modes({
      {"batch_norm",
       {whole, channels, channels, in({6}).constant(), var},
       [](const Tensors& x) {
         return Tensors{
             at::batch_norm(x[0], x[1], x[2], x[3].clone(), x[4].clone(), true, 0.1, 1e-5, false)};
       }},
      {"batch_norm in eval",
       {whole, channels, channels, in({6}).constant(), var},
       [](const Tensors& x) {
         return Tensors{at::batch_norm(x[0], x[1], x[2], x[3], x[4], false, 0.1, 1e-5, true)};
       }},
      {"instance_norm",
       {whole, channels, channels},
       [](const Tensors& x) {
         return Tensors{at::instance_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, false)};
       }},
      {"group_norm",
       {whole, channels, channels},
       [](const Tensors& x) { return Tensors{at::group_norm(x[0], 3, x[1], x[2])}; }},
      {"layer_norm",
       {whole, in({5}), in({5})},
       [](const Tensors& x) { return Tensors{at::layer_norm(x[0], {5}, x[1], x[2])}; }},
      {"rms_norm",
       {whole, in({5})},
       [](const Tensors& x) { return Tensors{at::rms_norm(x[0], {5}, x[1])}; }},
      {"weight_norm",
       {in({4, 3}), in({4, 1})},
       [](const Tensors& x) { return Tensors{at::_weight_norm(x[0], x[1], 0)}; }},
      {"cosine_similarity",
       {in({4, 6}), in({4, 6})},
       [](const Tensors& x) { return Tensors{at::cosine_similarity(x[0], x[1])}; }},
  });
}

TEST(GradientModesTest, Recurrent) {
  const std::vector<Input> lstm = {in({5, 4, 3}), in({1, 4, 2}), in({1, 4, 2}), in({8, 3}),
                                   in({8, 2}),    in({8}),       in({8})};
  const std::vector<Input> gru = {in({5, 4, 3}), in({1, 4, 2}), in({6, 3}),
                                  in({6, 2}),    in({6}),       in({6})};
  const std::vector<Input> rnn = {in({5, 4, 3}), in({1, 4, 2}), in({2, 3}),
                                  in({2, 2}),    in({2}),       in({2})};
  check_modes({
      {"lstm", lstm,
       [](const Tensors& x) {
         auto [y, h, c] = at::lstm(x[0], {x[1], x[2]}, {x[3], x[4], x[5], x[6]}, true, 1, 0.0,
                                   false, false, false);
         return Tensors{y, h, c};
       }},
      {"lstm_cell",
       {in({4, 3}), in({4, 2}), in({4, 2}), in({8, 3}), in({8, 2}), in({8}), in({8})},
       [](const Tensors& x) {
         auto [h, c] = at::lstm_cell(x[0], {x[1], x[2]}, x[3], x[4], x[5], x[6]);
         return Tensors{h, c};
       }},
      {"gru", gru,
       [](const Tensors& x) {
         auto [y, h] =
             at::gru(x[0], x[1], {x[2], x[3], x[4], x[5]}, true, 1, 0.0, false, false, false);
         return Tensors{y, h};
       }},
      {"rnn_tanh", rnn,
       [](const Tensors& x) {
         auto [y, h] =
             at::rnn_tanh(x[0], x[1], {x[2], x[3], x[4], x[5]}, true, 1, 0.0, false, false, false);
         return Tensors{y, h};
       }},
  });
}

TEST(GradientModesTest, ProductsAndAttention) {
  const Input q = in({2, 4, 5, 8});
  check_modes({
      {"linear",
       {in({4, 3, 5}), in({2, 5}), in({2})},
       [](const Tensors& x) { return Tensors{at::linear(x[0], x[1], x[2])}; }},
      {"linear of one row",
       {in({6}), in({2, 6}), in({2})},
       [](const Tensors& x) { return Tensors{at::linear(x[0], x[1], x[2])}; }},
      {"matmul",
       {in({4, 3, 5}), in({5, 2})},
       [](const Tensors& x) { return Tensors{at::matmul(x[0], x[1])}; }},
      {"bilinear",
       {in({4, 3}), in({4, 2}), in({5, 3, 2}), in({5})},
       [](const Tensors& x) { return Tensors{at::bilinear(x[0], x[1], x[2], x[3])}; }},
      {"einsum",
       {in({4, 3, 5}), in({5, 2})},
       [](const Tensors& x) { return Tensors{at::einsum("abk,kc->abc", {x[0], x[1]})}; }},
      {"sdpa",
       {q, q, q},
       [](const Tensors& x) {
         return Tensors{at::scaled_dot_product_attention(x[0], x[1], x[2])};
       }},
      {"sdpa, causal",
       {q, q, q},
       [](const Tensors& x) {
         return Tensors{at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true)};
       }},
      {"sdpa, mask",
       {q, q, q, in({5, 5}).constant()},
       [](const Tensors& x) {
         return Tensors{at::scaled_dot_product_attention(x[0], x[1], x[2], x[3])};
       }},
      {"sdpa, gqa",
       {q, in({2, 2, 5, 8}), in({2, 2, 5, 8})},
       [](const Tensors& x) {
         return Tensors{
             at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, false, {}, true)};
       }},
      {"embedding",
       {in({7, 4}), in({4, 3}).integers(0, 7)},
       [](const Tensors& x) { return Tensors{at::embedding(x[0], x[1])}; }},
  });
}

TEST(GradientModesTest, OtherComposites) {
  const Input matrix = in({4, 6});
  check_modes({
      {"one_hot",
       {in({4, 3}).integers(0, 5)},
       [](const Tensors& x) { return Tensors{at::one_hot(x[0], 5)}; }},
      {"one_hot, classes found",
       {in({4, 3}).integers(0, 5)},
       [](const Tensors& x) { return Tensors{at::one_hot(x[0])}; }},
      {"matrix_rank",
       {in({4, 3, 3}).positive_definite()},
       [](const Tensors& x) { return Tensors{at::linalg_matrix_rank(x[0], 1e-3, false)}; }},
      {"matrix_rank of tensors",
       {in({4, 3, 3}).positive_definite(), in({4}).uniform(0.1, 0.2).constant(),
        in({4}).uniform(0.1, 0.2).constant()},
       [](const Tensors& x) { return Tensors{at::linalg_matrix_rank(x[0], x[1], x[2], false)}; }},
      {"pinv", {in({4, 3, 2})}, [](const Tensors& x) { return Tensors{at::linalg_pinv(x[0])}; }},
      {"dropout in eval",
       {matrix},
       [](const Tensors& x) { return Tensors{at::dropout(x[0], 0.5, false)}; }},
      {"prelu", {matrix, in({6})}, [](const Tensors& x) { return Tensors{at::prelu(x[0], x[1])}; }},
      {"pad",
       {in({4, 3, 6})},
       [](const Tensors& x) { return Tensors{at::pad(x[0], {1, 2}, "reflect")}; }},
      {"pad with a number",
       {matrix},
       [](const Tensors& x) { return Tensors{at::pad(x[0], {1, 2}, "constant", 3.0)}; }},
      {"cross_entropy",
       {matrix, in({4}).integers(0, 6)},
       [](const Tensors& x) { return Tensors{at::cross_entropy_loss(x[0], x[1])}; }},
      {"var", {matrix}, [](const Tensors& x) { return Tensors{x[0].var(1), x[0].std(0)}; }},
      {"norm",
       {matrix},
       [](const Tensors& x) {
         return Tensors{x[0].norm(), at::linalg_norm(x[0]), at::linalg_norm(x[0], "nuc")};
       }},
      {"meshgrid",
       {in({4}), in({6})},
       [](const Tensors& x) { return Tensors(at::meshgrid({x[0], x[1]}, "ij")); }},
      {"tensor_split", {matrix}, [](const Tensors& x) { return Tensors(x[0].tensor_split(3, 1)); }},
      {"chunk", {matrix}, [](const Tensors& x) { return Tensors(x[0].chunk(3, 1)); }},
      {"reshape",
       {matrix},
       [](const Tensors& x) {
         return Tensors{x[0].reshape({8, 3}), x[0].flatten(), x[0].unflatten(1, {2, 3})};
       }},
      {"tile",
       {matrix},
       [](const Tensors& x) { return Tensors{x[0].tile({2, 1}), x[0].repeat_interleave(2, 0)}; }},
      {"diff", {matrix}, [](const Tensors& x) { return Tensors{x[0].diff()}; }},
      {"quantile", {matrix}, [](const Tensors& x) { return Tensors{x[0].quantile(0.5, 1)}; }},
      {"cdist",
       {in({4, 3}), in({5, 3})},
       [](const Tensors& x) { return Tensors{at::cdist(x[0], x[1])}; }},
      {"ctc_loss",
       {in({6, 4, 5}).uniform(-3, -1), in({4, 3}).integers(1, 5)},
       [](const Tensors& x) {
         return Tensors{
             at::ctc_loss(x[0], x[1], std::vector<int64_t>(4, 6), std::vector<int64_t>(4, 3))};
       }},
  });
}

}  // namespace
}  // namespace shardweave

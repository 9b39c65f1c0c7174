// Fewer samples than ranks: a batch that is cut stays cut, and ranks without a sample have nothing to
// do. Values and gradients as on one rank.
#include <algorithm>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/observe/explain.h"
#include "shardweave/dtensor/testing/expect_comms.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/nn/functional/upsampling.h"

namespace shardweave {
namespace {

namespace F = torch::nn::functional;
using testing::on_mesh;

at::Tensor numbers(at::IntArrayRef sizes, double phase = 0) {
  int64_t n = 1;
  for (const int64_t size : sizes) n *= size;
  return at::sin(at::arange(n, at::kDouble) * 1.3 + phase).view(sizes);
}

struct Case {
  const char* name;
  std::vector<int64_t> sample;                // shape of one
  std::vector<std::vector<int64_t>> weights;  // whole on every rank
  std::function<at::Tensor(const at::Tensor& x, const std::vector<at::Tensor>& w)> run;
  int64_t collectives = 0;  // in forward, and as many in backward
};

using Weights = const std::vector<at::Tensor>&;

std::vector<Case> cases(int64_t samples) {
  const std::vector<int64_t> image = {4, 6, 6};
  return {
      {"conv1d",
       {4, 7},
       {{6, 4, 3}, {6}},
       [](const at::Tensor& x, Weights w) { return at::conv1d(x, w[0], w[1], 1, 1); }},
      {"conv2d",
       image,
       {{6, 4, 3, 3}, {6}},
       [](const at::Tensor& x, Weights w) { return at::conv2d(x, w[0], w[1], 1, 1); }},
      {"conv2d of groups",
       image,
       {{6, 2, 3, 3}, {6}},
       [](const at::Tensor& x, Weights w) { return at::conv2d(x, w[0], w[1], 2, 1, 1, 2); }},
      {"conv2d of patches",
       image,
       {{5, 4, 2, 2}},
       [](const at::Tensor& x, Weights w) { return at::conv2d(x, w[0], {}, 2); }},
      {"conv3d",
       {2, 3, 4, 5},
       {{3, 2, 2, 2, 2}, {3}},
       [](const at::Tensor& x, Weights w) { return at::conv3d(x, w[0], w[1]); }},
      {"conv_transpose2d",
       image,
       {{4, 3, 2, 2}, {3}},
       [](const at::Tensor& x, Weights w) { return at::conv_transpose2d(x, w[0], w[1], 2); }},
      {"max_pool2d", image, {}, [](const at::Tensor& x, Weights) { return at::max_pool2d(x, 2); }},
      {"max_pool1d", {4, 6}, {}, [](const at::Tensor& x, Weights) { return at::max_pool1d(x, 2); }},
      {"max_pool3d",
       {2, 4, 4, 4},
       {},
       [](const at::Tensor& x, Weights) { return at::max_pool3d(x, 2); }},
      {"avg_pool2d", image, {}, [](const at::Tensor& x, Weights) { return at::avg_pool2d(x, 3); }},
      {"avg_pool1d", {4, 6}, {}, [](const at::Tensor& x, Weights) { return at::avg_pool1d(x, 2); }},
      {"adaptive_avg_pool2d",
       image,
       {},
       [](const at::Tensor& x, Weights) { return at::adaptive_avg_pool2d(x, {2, 3}); }},
      {"adaptive_avg_pool2d of one",
       image,
       {},
       [](const at::Tensor& x, Weights) { return at::adaptive_avg_pool2d(x, {1, 1}); }},
      {"adaptive_max_pool2d",
       image,
       {},
       [](const at::Tensor& x, Weights) {
         return std::get<0>(at::adaptive_max_pool2d(x, {2, 3}));
       }},
      {"interpolate, nearest",
       image,
       {},
       [](const at::Tensor& x, Weights) {
         return F::interpolate(x, F::InterpolateFuncOptions()
                                      .scale_factor(std::vector<double>{2, 2})
                                      .mode(torch::kNearest));
       }},
      {"interpolate, bilinear",
       image,
       {},
       [](const at::Tensor& x, Weights) {
         return F::interpolate(x, F::InterpolateFuncOptions()
                                      .size(std::vector<int64_t>{9, 5})
                                      .mode(torch::kBilinear)
                                      .align_corners(false));
       }},
      {"interpolate, bicubic",
       image,
       {},
       [](const at::Tensor& x, Weights) {
         return F::interpolate(x, F::InterpolateFuncOptions()
                                      .size(std::vector<int64_t>{9, 5})
                                      .mode(torch::kBicubic)
                                      .align_corners(true));
       }},
      {"reflection_pad2d",
       image,
       {},
       [](const at::Tensor& x, Weights) { return at::reflection_pad2d(x, {1, 2, 2, 1}); }},
      {"replication_pad2d",
       image,
       {},
       [](const at::Tensor& x, Weights) { return at::replication_pad2d(x, {1, 2, 2, 1}); }},
      {"constant_pad",
       image,
       {},
       [](const at::Tensor& x, Weights) { return at::constant_pad_nd(x, {1, 2, 2, 1}, 3); }},
      {"batch_norm in training",
       image,
       {{4}, {4}},
       [](const at::Tensor& x, Weights w) {
         return at::batch_norm(x, w[0], w[1], {}, {}, true, 0.1, 1e-5, false);
       },
       1},
      {"batch_norm in eval",
       image,
       {{4}, {4}},
       [](const at::Tensor& x, Weights w) {
         return at::batch_norm(x, w[0], w[1], w[0].detach(), w[1].detach().square() + 1, false, 0.1,
                               1e-5, false);
       }},
      {"instance_norm",
       image,
       {{4}, {4}},
       [](const at::Tensor& x, Weights w) {
         return at::instance_norm(x, w[0], w[1], {}, {}, true, 0.1, 1e-5, false);
       },
       // To LibTorch it is a batch norm of one sample, which one sample is already.
       samples == 1 ? 1 : 0},
      {"group_norm",
       image,
       {{4}, {4}},
       [](const at::Tensor& x, Weights w) { return at::group_norm(x, 2, w[0], w[1]); }},
      {"layer_norm",
       {5, 6},
       {{6}, {6}},
       [](const at::Tensor& x, Weights w) { return at::layer_norm(x, {6}, w[0], w[1]); }},
      {"softmax", {5, 6}, {}, [](const at::Tensor& x, Weights) { return at::softmax(x, -1); }},
      {"linear",
       {5, 6},
       {{3, 6}, {3}},
       [](const at::Tensor& x, Weights w) { return at::linear(x, w[0], w[1]); }},
      {"linear of rows",
       {6},
       {{3, 6}, {3}},
       [](const at::Tensor& x, Weights w) { return at::linear(x, w[0], w[1]); }},
      {"flatten", image, {}, [](const at::Tensor& x, Weights) { return at::flatten(x, 1) * 2; }},
      {"attention",
       {2, 5, 4},
       {},
       [](const at::Tensor& x, Weights) { return at::scaled_dot_product_attention(x, x, x); }},
      {"bmm", {5, 5}, {}, [](const at::Tensor& x, Weights) { return at::bmm(x, x); }},
      {"pixel_shuffle",
       image,
       {},
       [](const at::Tensor& x, Weights) { return at::pixel_shuffle(x, 2) * 3; }},
      {"unfold",
       image,
       {},
       [](const at::Tensor& x, Weights) {
         return at::im2col(x, {2, 2}, {1, 1}, {0, 0}, {1, 1}) * 2;
       }},
      {"cumsum", {5, 6}, {}, [](const at::Tensor& x, Weights) { return at::cumsum(x, 1); }},
      {"grid_sampler",
       {2, 3, 2},
       {},
       [](const at::Tensor& x, Weights) {
         return at::grid_sampler(x.transpose(1, 3), x, 0, 0, false);
       }},
      {"cat", {5, 6}, {}, [](const at::Tensor& x, Weights) { return at::cat({x, x * 2}, 1); }},
      {"lstm cell",
       {6},
       {{8, 6}, {8, 2}},
       [](const at::Tensor& x, Weights w) {
         const at::Tensor h = x.narrow(1, 0, 2);
         return std::get<0>(at::lstm_cell(x, {h, h}, w[0], w[1]));
       }},
  };
}

void check(const Case& c, int64_t ranks, int64_t samples) {
  const std::string what = absl::StrCat(c.name, ", ", samples, " on ", ranks, " ranks");
  std::vector<int64_t> sizes = c.sample;
  sizes.insert(sizes.begin(), samples);
  const auto run = [&](const std::function<at::Tensor(const at::Tensor&, bool batch)>& here) {
    const at::Tensor x = here(numbers(sizes), true).requires_grad_();
    std::vector<at::Tensor> weights;
    for (const std::vector<int64_t>& shape : c.weights) {
      weights.push_back(
          here(numbers(shape, static_cast<double>(weights.size()) + 1), false).requires_grad_());
    }
    return std::make_tuple(x, weights, c.run(x, weights));
  };
  const auto [x, weights, y] = run([](const at::Tensor& t, bool) { return t; });
  const at::Tensor grad = numbers(y.sizes(), 0.5);
  y.backward(grad);
  on_mesh({{"dp", ranks}}, [&, &x = x, &weights = weights, &y = y](const MeshPtr& mesh) {
    CommTrace trace(mesh);
    const auto [dx, dw, dy] = run([&](const at::Tensor& t, bool batch) {
      at::Tensor there = distribute_tensor(t.detach(), mesh, {batch ? Shard(0) : Replicate()},
                                           {.source = std::nullopt});
      return there;
    });
    EXPECT_EQ(static_cast<int64_t>(trace.events().size()), c.collectives) << what << "\n"
                                                                          << trace.to_string();
    EXPECT_EQ(layout_of(dy), Layout({Shard(0)})) << what;
    EXPECT_TRUE(at::allclose(full_tensor(dy).detach(), y.detach())) << what;
    trace.clear();
    dy.backward(distribute_tensor(grad, mesh, {Shard(0)}, {.source = std::nullopt}));
    EXPECT_EQ(static_cast<int64_t>(trace.events().size()), c.collectives) << what << "\n"
                                                                          << trace.to_string();
    EXPECT_TRUE(at::allclose(full_tensor(dx.grad()), x.grad())) << what;
    for (size_t i = 0; i < weights.size(); ++i) {
      EXPECT_TRUE(at::allclose(full_tensor(dw[i].grad()), weights[i].grad()))
          << what << ", weight " << i;
    }
  });
}

TEST(EmptyPartsTest, OneSampleOnTwoRanks) {
  for (const Case& c : cases(1)) check(c, 2, 1);
}

TEST(EmptyPartsTest, ThreeSamplesOnFourRanks) {
  for (const Case& c : cases(3)) check(c, 4, 3);
}

// The sum over no channels is 0, to which the bias is added where it is; its gradient is the same on
// every rank.
TEST(EmptyPartsTest, FewerChannelsThanRanks) {
  struct Cut {
    Placement input, weight, bias;
  };
  for (const bool transposed : {false, true}) {
    const at::Tensor x = numbers({3, 2, 5, 5}).requires_grad_();
    const at::Tensor w = numbers({2, 2, 3, 3}, 1).requires_grad_();
    const at::Tensor b = numbers({2}, 2).requires_grad_();
    const auto run = [&](const at::Tensor& input, const at::Tensor& weight,
                         const at::Tensor& bias) {
      return at::convolution(input, weight, bias, 1, 1, 1, transposed, 0, 1);
    };
    const at::Tensor y = run(x, w, b);
    const at::Tensor grad = numbers(y.sizes(), 0.5);
    y.backward(grad);
    const int of_outputs = transposed ? 1 : 0;
    for (const Cut& cut : std::vector<Cut>{
             {Replicate(), Shard(of_outputs), Shard(0)},
             {Shard(1), Shard(1 - of_outputs), Partial()},
             {Shard(1), Shard(1 - of_outputs), Replicate()},
         }) {
      SCOPED_TRACE(to_string(Placements{cut.input, cut.weight, cut.bias}));
      on_mesh({{"tp", 3}}, [&](const MeshPtr& mesh) {
        const at::Tensor dx = testing::scattered(x.detach(), mesh, {cut.input}).requires_grad_();
        const at::Tensor dw = testing::scattered(w.detach(), mesh, {cut.weight}).requires_grad_();
        const at::Tensor db = testing::scattered(b.detach(), mesh, {cut.bias}).requires_grad_();
        const CommTrace trace(mesh);
        const at::Tensor dy = run(dx, dw, db);
        EXPECT_COMMS(trace, {});
        EXPECT_TRUE(at::allclose(full_tensor(dy).detach(), y.detach()));
        dy.backward(distribute_tensor(grad, mesh, {Replicate()}, {.source = std::nullopt}));
        EXPECT_TRUE(at::allclose(full_tensor(dx.grad()), x.grad()));
        EXPECT_TRUE(at::allclose(full_tensor(dw.grad()), w.grad()));
        EXPECT_TRUE(at::allclose(full_tensor(db.grad()), b.grad()));
      });
    }
  }
}

TEST(EmptyPartsTest, TwoMeshDimensions) {
  const at::Tensor x = numbers({3, 4, 5, 5}).requires_grad_();
  const at::Tensor w = numbers({4, 2, 3, 3}, 1).requires_grad_();
  const at::Tensor y = at::conv2d(x, w, {}, 1, 1, 1, 2);
  const at::Tensor grad = numbers(y.sizes(), 0.5);
  y.backward(grad);
  on_mesh({{"dp", 4}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    const at::Tensor dx =
        distribute_tensor(x.detach(), mesh, {Shard(0), Shard(1)}).requires_grad_();
    const at::Tensor dw =
        distribute_tensor(w.detach(), mesh, {Replicate(), Shard(0)}).requires_grad_();
    const CommTrace trace(mesh);
    const at::Tensor dy = at::conv2d(dx, dw, {}, 1, 1, 1, 2);
    EXPECT_COMMS(trace, {});
    EXPECT_TRUE(at::allclose(full_tensor(dy).detach(), y.detach()));
    dy.backward(distribute_tensor(grad, mesh, {Shard(0), Shard(1)}));
    EXPECT_TRUE(at::allclose(full_tensor(dx.grad()), x.grad()));
    EXPECT_TRUE(at::allclose(full_tensor(dw.grad()), w.grad()));
  });
}

// No images at all, cut along channels of which some ranks have none: the kernel takes the whole, but
// not no channels.
TEST(EmptyPartsTest, NoImages) {
  const at::Tensor x = numbers({0, 1, 4, 5, 4});
  on_mesh({{"x", 3}}, [&](const MeshPtr& mesh) {
    const at::Tensor y = at::avg_pool3d(distribute_tensor(x, mesh, {Shard(1)}), {2, 2, 2});
    EXPECT_EQ(full_tensor(y).sizes(), at::avg_pool3d(x, {2, 2, 2}).sizes());
  });
}

// linalg_lstsq's residuals are real numbers, also on a rank that has no matrices, and where there are none.
TEST(EmptyPartsTest, ResidualsAreReal) {
  const at::Tensor a =
      at::complex(numbers({3, 3, 3}), numbers({3, 3, 3}, 1)) + 2 * at::eye(3, at::kComplexDouble);
  const at::Tensor b = at::complex(numbers({3, 3, 3}, 2), numbers({3, 3, 3}, 3));
  const auto [solution, residuals, rank, values] = at::linalg_lstsq(a, b);
  const at::Tensor lost = std::get<1>(at::linalg_lstsq(a.narrow(2, 0, 2), b, std::nullopt, "gels"));
  on_mesh({{"x", 2}, {"y", 2}},
          [&, &solution = solution, &residuals = residuals, &values = values](const MeshPtr& mesh) {
            const std::vector<Placement> cut = {Shard(0), Shard(0)};
            const auto [got, others, of_rank, of_values] =
                at::linalg_lstsq(distribute_tensor(a, mesh, cut), distribute_tensor(b, mesh, cut));
            EXPECT_TRUE(at::allclose(full_tensor(got), solution));
            EXPECT_EQ(full_tensor(others).numel(), 0);
            EXPECT_EQ(others.scalar_type(), residuals.scalar_type());
            EXPECT_EQ(of_values.scalar_type(), values.scalar_type());
            const auto [solved, left, rank_of, values_of] =
                at::linalg_lstsq(distribute_tensor(a, mesh, cut).narrow(2, 0, 2),
                                 distribute_tensor(b, mesh, cut), std::nullopt, "gels");
            EXPECT_TRUE(at::allclose(full_tensor(left), lost));
            EXPECT_EQ(left.scalar_type(), lost.scalar_type());
          });
}

TEST(EmptyPartsTest, ExplainOffersTheCut) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = empty({1, 4, 6, 6}, mesh, {Shard(0)}, at::kMeta);
    const at::Tensor w = empty({5, 4, 3, 3}, mesh, {Replicate()}, at::kMeta);
    const std::vector<int64_t> one = {1, 1}, none = {0, 0};
    const Explanation e = explain("aten::convolution",
                                  {x, w, c10::IValue(), one, none, one, false, none, int64_t{1}});
    EXPECT_EQ(e.dims[0].options[e.dims[0].chosen].inputs[0], Shard(0)) << e.to_string();
    EXPECT_EQ(e.bytes(), 0);
  });
}

}  // namespace
}  // namespace shardweave

// Normalization and losses on shards against one device.
#include <array>
#include <optional>
#include <tuple>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/cost_model.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/op_check.h"
#include "torch/library.h"

namespace shardweave {
namespace {

using testing::check_ops;
using testing::in;
using testing::on_mesh;
using testing::OpCase;
using testing::Tensors;

TEST(NormRulesTest, LayerNorm) {
  check_ops({
      {"layer_norm",
       {in({3, 7, 5}), in({5}), in({5})},
       [](const Tensors& x) { return Tensors{at::layer_norm(x[0], {5}, x[1], x[2])}; }},
      {"layer_norm of two dims",
       {in({7, 3, 5}), in({3, 5}), in({3, 5})},
       [](const Tensors& x) { return Tensors{at::layer_norm(x[0], {3, 5}, x[1], x[2])}; }},
      {"layer_norm of all dims",
       {in({3, 5}), in({3, 5})},
       [](const Tensors& x) { return Tensors{at::layer_norm(x[0], {3, 5}, x[1])}; }},
      {"layer_norm without weights",
       {in({7, 5})},
       [](const Tensors& x) { return Tensors{at::layer_norm(x[0], {5})}; }},
      {"layer_norm of a transposed",
       {in({7, 3, 5}).transposed(), in({5}), in({5})},
       [](const Tensors& x) { return Tensors{at::layer_norm(x[0], {5}, x[1], x[2])}; }},
      {"layer_norm with statistics",
       {in({7, 5}), in({5}), in({5})},
       [](const Tensors& x) {
         auto [output, mean, rstd] = at::native_layer_norm(x[0], {5}, x[1], x[2], 1e-5);
         return Tensors{output, mean, rstd};
       },
       false},
      {"layer_norm of halves",
       {in({7, 8}).dtype(at::kBFloat16), in({8}).dtype(at::kFloat), in({8}).dtype(at::kFloat)},
       [](const Tensors& x) {
         auto [output, mean, rstd] = at::native_layer_norm(x[0], {8}, x[1], x[2], 1e-5);
         return Tensors{output, mean, rstd};
       },
       false,
       3e-2},
      {"rms_norm",
       {in({7, 5}), in({5})},
       [](const Tensors& x) { return Tensors{at::rms_norm(x[0], {5}, x[1])}; }},
      {"rms_norm, fused",  // autograd takes it apart on CPUs
       {in({7, 3, 5}), in({5})},
       [](const Tensors& x) {
         const at::AutoDispatchBelowADInplaceOrView below;
         auto [output, rstd] = at::_fused_rms_norm(x[0], {5}, x[1], 1e-6);
         return Tensors{output, rstd};
       },
       false},
      {"rms_norm, fused, of halves",
       {in({7, 5}).dtype(at::kBFloat16), in({5}).dtype(at::kFloat)},
       [](const Tensors& x) {
         const at::AutoDispatchBelowADInplaceOrView below;
         auto [output, rstd] = at::_fused_rms_norm(x[0], {5}, x[1], 1e-6);
         return Tensors{output, rstd};
       },
       false,
       3e-2},
  });
}

// LibTorch has it for GPUs; this is its formula, so that its rule can be tried on CPUs.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& grad_out, const at::Tensor& input, at::IntArrayRef normalized_shape,
    const at::Tensor& rstd, const std::optional<at::Tensor>& weight, std::array<bool, 2>) {
  TORCH_CHECK(normalized_shape.size() == 1);
  const at::Tensor normal = input * rstd;
  const at::Tensor g = grad_out * *weight;
  return {rstd * (g - normal * (g * normal).mean(-1, /*keepdim=*/true)),
          (grad_out * normal).flatten(0, -2).sum(0)};
}
TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_fused_rms_norm_backward", rms_norm_backward);
}

// It is linear in the gradient, which may be a Partial sum.
TEST(NormRulesTest, RmsNormBackward) {
  const auto run = [](const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor rstd = std::get<1>(at::_fused_rms_norm(x, {5}, weight, 1e-6));
    auto [of_x, of_weight] = at::_fused_rms_norm_backward(grad, x, {5}, rstd, weight, {true, true});
    return Tensors{of_x, of_weight};
  };
  // The formula is what autograd finds.
  const at::Tensor x = at::arange(35, at::kDouble).view({7, 5}).sin().requires_grad_();
  const at::Tensor weight = at::arange(1, 6, at::kDouble).requires_grad_();
  const at::Tensor grad = at::arange(35, at::kDouble).view({7, 5}).cos();
  at::rms_norm(x, {5}, weight, 1e-6).backward(grad);
  const Tensors plain = run(grad, x.detach(), weight.detach());
  EXPECT_TRUE(at::allclose(plain[0], x.grad(), 1e-9, 1e-12));
  EXPECT_TRUE(at::allclose(plain[1], weight.grad(), 1e-9, 1e-12));

  check_ops({{"rms_norm, fused, backward",
              {in({3, 7, 5}), in({3, 7, 5}), in({5})},
              [&](const Tensors& t) { return run(t[0], t[1], t[2]); },
              false}});
  on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    const at::Tensor dx = distribute_tensor(x.detach(), mesh, {Shard(0), Replicate()});
    const at::Tensor dw = distribute_tensor(weight.detach(), mesh, {Replicate(), Replicate()});
    const at::Tensor dg = testing::scattered(grad, mesh, {Shard(0), Partial()});
    // Two results would owe a reduction each; it takes links that cost nothing to leave them so.
    for (const bool free : {false, true}) {
      CostModel model;
      model.links.resize(2);
      if (free) model.links[1].latency = 0;
      set_cost_model(mesh, model);
      const CommTrace trace(mesh);
      const Tensors got = run(dg, dx, dw);
      EXPECT_EQ(trace.events().size(), free ? 0u : 1u) << trace.to_string();
      EXPECT_EQ(trace.bytes(), free ? 0 : 2 * (20 - 10) * 8);  // the larger of the two parts
      EXPECT_EQ(layout_of(got[0]).to_string(), free ? "[S(0), P(sum)]" : "[S(0), R]");
      EXPECT_EQ(layout_of(got[1]).to_string(), free ? "[P(sum), P(sum)]" : "[P(sum), R]");
      EXPECT_TRUE(at::allclose(full_tensor(got[0]), plain[0], 1e-9, 1e-12));
      EXPECT_TRUE(at::allclose(full_tensor(got[1]), plain[1], 1e-9, 1e-12));
    }
  });
}

// As autograd takes it apart on CPUs: the gradient may be a sum, too.
TEST(NormRulesTest, RmsNormOfAPartialGradient) {
  const at::Tensor whole = at::arange(35, at::kDouble).view({7, 5}).sin().requires_grad_();
  const at::Tensor scale = at::arange(1, 6, at::kDouble).requires_grad_();
  const at::Tensor grad = at::arange(35, at::kDouble).view({7, 5}).cos();
  at::rms_norm(whole, {5}, scale, 1e-6).backward(grad);
  on_mesh({{"tp", 3}}, [&](const MeshPtr& mesh) {
    at::Tensor x =
        distribute_tensor(whole.detach(), mesh, Placements{Replicate()}).requires_grad_();
    at::Tensor weight =
        distribute_tensor(scale.detach(), mesh, Placements{Replicate()}).requires_grad_();
    const at::Tensor y = at::rms_norm(x, {5}, weight, 1e-6);
    const CommTrace trace(mesh);
    y.backward(testing::scattered(grad, mesh, {Partial()}));
    // Reduced once, at most; not once for each of the operators that it goes through.
    EXPECT_LE(trace.events().size(), 1u) << trace.to_string();
    EXPECT_TRUE(at::allclose(full_tensor(x.grad()), whole.grad(), 1e-9, 1e-12));
    EXPECT_TRUE(at::allclose(full_tensor(weight.grad()), scale.grad(), 1e-9, 1e-12));
  });
}

TEST(NormRulesTest, GroupNorm) {
  check_ops({
      {"group_norm",
       {in({3, 8, 5}), in({8}), in({8})},
       [](const Tensors& x) { return Tensors{at::group_norm(x[0], 4, x[1], x[2])}; }},
      {"group_norm of groups that do not divide",
       {in({5, 6, 2, 2}), in({6}), in({6})},
       [](const Tensors& x) { return Tensors{at::group_norm(x[0], 3, x[1], x[2])}; }},
      {"group_norm without weights",
       {in({3, 8, 5})},
       [](const Tensors& x) { return Tensors{at::group_norm(x[0], 8)}; }},
      {"group_norm with statistics",
       {in({3, 8, 5}), in({8}), in({8})},
       [](const Tensors& x) {
         auto [output, mean, rstd] = at::native_group_norm(x[0], x[1], x[2], 3, 8, 5, 4, 1e-5);
         return Tensors{output, mean, rstd};
       },
       false},
  });
}

TEST(NormRulesTest, BatchNormIsOverTheWholeBatch) {
  auto batch_norm = [](bool training) {
    return [training](const Tensors& x) {
      at::Tensor mean = x[3].clone(), var = x[4].clone();
      at::Tensor y = at::batch_norm(x[0], x[1], x[2], mean, var, training, 0.1, 1e-5, false);
      return Tensors{y, mean, var};
    };
  };
  check_ops({
      {"batch_norm",
       {in({7, 3, 2}), in({3}), in({3}), in({3}).constant(), in({3}).uniform(1, 2).constant()},
       batch_norm(true),
       true,
       1e-8},
      {"batch_norm in evaluation",
       {in({7, 3, 2}), in({3}), in({3}), in({3}).constant(), in({3}).uniform(1, 2).constant()},
       batch_norm(false),
       true,
       1e-8},
      {"batch_norm of images",
       {in({5, 3, 2, 2}), in({3}), in({3}), in({3}).constant(), in({3}).uniform(1, 2).constant()},
       batch_norm(true),
       true,
       1e-8},
      {"batch_norm of halves",
       {in({9, 3, 4}).dtype(at::kBFloat16), in({3}).dtype(at::kFloat), in({3}).dtype(at::kFloat)},
       [](const Tensors& x) {
         return Tensors{at::batch_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, false)};
       },
       false,
       5e-2},
      {"batch_norm without weights",
       {in({7, 3})},
       [](const Tensors& x) {
         return Tensors{at::batch_norm(x[0], {}, {}, {}, {}, true, 0.1, 1e-5, false)};
       },
       true,
       1e-8},
  });
}

// Rows stay where they are, and the gradient of the weight is a Partial sum.
TEST(NormRulesTest, RmsNormOfABatchSendsNothing) {
  on_mesh({{"dp", 3}}, [](const MeshPtr& mesh) {
    at::Tensor x = distribute_tensor(at::arange(35, at::kDouble).view({7, 5}).sin(), mesh,
                                     Placements{Shard(0)})
                       .requires_grad_();
    at::Tensor weight = distribute_tensor(at::ones({5}, at::kDouble), mesh, Placements{Replicate()})
                            .requires_grad_();
    CommTrace trace(mesh);
    at::rms_norm(x, {5}, weight).sum().backward();
    EXPECT_EQ(trace.events().size(), 0u);
    EXPECT_EQ(layout_of(x.grad()).to_string(), "[S(0)]");
    EXPECT_EQ(layout_of(weight.grad()).to_string(), "[P(sum)]");
  });
}

// A mean of 1000 with a deviation of 1, of which single precision has 3e-5: sums of squares around 0
// would have nothing left of it.
TEST(NormRulesTest, BatchNormKeepsTheDigitsOfLargeMeans) {
  at::Tensor x = at::arange(6 * 3 * 5, at::kDouble).view({6, 3, 5}).mul(0.7).sin().add(1000);
  for (at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    x = x.to(dtype);
    const auto whole = at::native_batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5);
    const at::Tensor y = std::get<0>(whole), mean = std::get<1>(whole);
    const at::Tensor exact =
        at::var(x.to(at::kDouble), at::IntArrayRef({0, 2}), /*unbiased=*/false).add(1e-5).rsqrt();
    for (const std::vector<MeshDim>& dims : testing::small_meshes()) {
      on_mesh(dims, [&](const MeshPtr& mesh) {
        for (int d : {0, 1, 2}) {
          Placements placements(dims.size(), Shard(0));
          placements.back() = Shard(d);
          const at::Tensor dx = distribute_tensor(x, mesh, placements);
          const auto [dy, dmean, dinvstd] =
              at::native_batch_norm(dx, {}, {}, {}, {}, true, 0.1, 1e-5);
          EXPECT_EQ(layout_of(dy), layout_of(dx));
          EXPECT_TRUE(at::allclose(full_tensor(dmean), mean, 1e-6, 0));
          EXPECT_TRUE(at::allclose(full_tensor(dinvstd).to(at::kDouble), exact, 1e-6, 0));
          EXPECT_TRUE(at::allclose(full_tensor(dy), y, 0, dtype == at::kFloat ? 4e-4 : 1e-8));
        }
      });
    }
  }
}

TEST(NormRulesTest, BatchNormSendsItsStatisticsOnce) {
  for (const Placements& placements :
       {Placements{Shard(0), Shard(0)}, Placements{Shard(0), Shard(1)},
        Placements{Shard(0), Shard(2)}, Placements{Replicate(), RaggedShard(0, {5, 0})}}) {
    on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
      const auto parameter = [&](double value) {
        return distribute_tensor(at::full({4}, value, at::kDouble), mesh,
                                 Placements{Replicate(), Replicate()});
      };
      at::Tensor x = at::arange(5 * 4 * 6, at::kDouble).view({5, 4, 6}).sin();
      at::Tensor dx = distribute_tensor(x, mesh, placements).requires_grad_();
      at::Tensor weight = parameter(2).requires_grad_();
      at::Tensor bias = parameter(1).requires_grad_();
      const at::Tensor mean = parameter(0), var = parameter(1);
      const at::Tensor grad = distribute_tensor(x.cos(), mesh, placements);
      CommTrace forward(mesh);
      const at::Tensor y = at::batch_norm(dx, weight, bias, mean, var, true, 0.1, 1e-5, false);
      // Running statistics that are whole need those of channels that are cut.
      const bool channels = placements[1] == Shard(1);
      EXPECT_EQ(forward.events().size(), channels ? 3u : 1u);
      EXPECT_THAT(forward.events()[0].collective, "all_reduce");
      CommTrace backward(mesh);
      y.backward(grad);
      EXPECT_EQ(backward.events()[0].collective, "all_reduce");
      EXPECT_EQ(backward.events().size(), 1u);
      const at::Tensor evaluated =
          at::batch_norm(dx, weight, bias, mean, var, false, 0.1, 1e-5, false);
      for (const at::Tensor& leaf : {dx, weight, bias}) leaf.mutable_grad() = at::Tensor();
      CommTrace none(mesh);
      evaluated.backward(grad);
      EXPECT_EQ(none.events().size(), 0u);
    });
  }
}

// What LibTorch calls for images on GPUs.
TEST(NormRulesTest, BatchNormInCudnnsForm) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    for (const Placements& placements :
         {Placements{Shard(0), Replicate()}, Placements{Shard(0), Shard(1)}}) {
      const at::Tensor image = at::arange(5 * 4 * 6, at::kDouble).view({5, 4, 6}).sin();
      at::Tensor x = image.clone().requires_grad_();
      at::Tensor dx = distribute_tensor(image, mesh, placements).requires_grad_();
      at::Tensor w = at::arange(1.0, 5.0, at::kDouble).requires_grad_();
      at::Tensor b = at::arange(4, at::kDouble).requires_grad_();
      const auto whole = [&](const at::Tensor& t) {
        return distribute_tensor(t.detach(), mesh, Placements(2));
      };
      at::Tensor dw = whole(w).requires_grad_(), db = whole(b).requires_grad_();
      const at::Tensor mean = at::zeros({4}, at::kDouble), var = at::ones({4}, at::kDouble);
      // Cut as plans that say "everything" cut them.
      const at::Tensor dmean = distribute_tensor(mean, mesh, Placements{Shard(0), Replicate()});
      const at::Tensor dvar = distribute_tensor(var, mesh, Placements{Shard(0), Replicate()});
      const at::Tensor y = std::get<0>(at::native_batch_norm(x, w, b, mean, var, true, 0.1, 1e-5));
      const at::Tensor dy =
          std::get<0>(at::cudnn_batch_norm(dx, dw, db, dmean, dvar, true, 0.1, 1e-5));
      EXPECT_EQ(layout_of(dy).placements(), placements);
      EXPECT_TRUE(at::allclose(full_tensor(dy), y));
      EXPECT_TRUE(at::allclose(full_tensor(dmean), mean));
      EXPECT_TRUE(at::allclose(full_tensor(dvar), var));
      y.backward(image.cos());
      dy.backward(distribute_tensor(image.cos(), mesh, placements));
      EXPECT_TRUE(at::allclose(full_tensor(dx.grad()), x.grad()));
      EXPECT_TRUE(at::allclose(full_tensor(dw.grad()), w.grad()));
      EXPECT_TRUE(at::allclose(full_tensor(db.grad()), b.grad()));
    }
  });
}

// A plain batch beside distributed weights, as every other operator takes it.
TEST(NormRulesTest, BatchNormOfAPlainBatch) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = at::arange(5 * 4, at::kDouble).view({5, 4}).sin();
    const at::Tensor w = at::arange(1.0, 5.0, at::kDouble);
    const at::Tensor dw = distribute_tensor(w, mesh, Placements{Shard(0)}).requires_grad_();
    const at::Tensor y = at::batch_norm(x, w, {}, {}, {}, true, 0.1, 1e-5, false);
    const at::Tensor dy = at::batch_norm(x, dw, {}, {}, {}, true, 0.1, 1e-5, false);
    EXPECT_TRUE(at::allclose(full_tensor(dy), y));
    dy.sum().backward();
    EXPECT_TRUE(dw.grad().defined());
  });
}

// Frames of a video in a net of images: batches that are strided or ragged stay so.
TEST(NormRulesTest, ImagesOfBatchesThatAreCutOtherwise) {
  for (const Placement& batch : {Placement(StridedShard(0, 2)), RaggedShard(0, {3, 0, 5})}) {
    on_mesh({{"x", 3}}, [&](const MeshPtr& mesh) {
      const auto whole = [&](const at::Tensor& t) {
        return distribute_tensor(t, mesh, Placements{Replicate()});
      };
      const at::Tensor image = at::arange(8 * 4 * 25, at::kDouble).view({8, 4, 5, 5}).sin();
      const at::Tensor filter = at::arange(4 * 4 * 9, at::kDouble).view({4, 4, 3, 3}).cos();
      at::Tensor x = image.clone().requires_grad_();
      at::Tensor f = filter.clone().requires_grad_();
      at::Tensor dx = redistribute(whole(image), {batch}).detach().requires_grad_();
      at::Tensor df = whole(filter).requires_grad_();
      const at::Tensor y = at::group_norm(at::conv2d(x, f), 2);
      const CommTrace trace(mesh);
      const at::Tensor dy = at::group_norm(at::conv2d(dx, df), 2);
      EXPECT_EQ(layout_of(dy)[0], batch);
      EXPECT_EQ(trace.events().size(), 0u);
      EXPECT_TRUE(at::allclose(full_tensor(dy), y));
      y.pow(3).sum().backward();
      dy.pow(3).sum().backward();
      EXPECT_EQ(layout_of(dx.grad())[0], batch);
      EXPECT_TRUE(at::allclose(full_tensor(dx.grad()), x.grad()));
      EXPECT_TRUE(at::allclose(full_tensor(df.grad()), f.grad()));
    });
  }
}

TEST(LossRulesTest, NegativeLogLikelihood) {
  std::vector<OpCase> cases;
  for (int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    cases.push_back({absl::StrCat("nll_loss ", reduction),
                     {in({7, 5}), in({7}).integers(0, 5)},
                     [reduction](const Tensors& x) {
                       return Tensors{at::nll_loss(x[0], x[1], {}, reduction)};
                     }});
    cases.push_back({absl::StrCat("nll_loss with weights and ignored ", reduction),
                     {in({7, 5}), in({7}).integers(0, 5), in({5}).uniform(1, 2).constant()},
                     [reduction](const Tensors& x) {
                       return Tensors{at::nll_loss(x[0], x[1], x[2], reduction, 3)};
                     }});
    cases.push_back(
        {absl::StrCat("nll_loss2d ", reduction),
         {in({3, 5, 2, 4}), in({3, 2, 4}).integers(0, 5), in({5}).uniform(1, 2).constant()},
         [reduction](const Tensors& x) {
           return Tensors{at::nll_loss2d(x[0], x[1], x[2], reduction, 1)};
         }});
    cases.push_back({absl::StrCat("nll_loss of one ", reduction),
                     {in({5}), in({}).integers(0, 5)},
                     [reduction](const Tensors& x) {
                       return Tensors{at::nll_loss(x[0], x[1], {}, reduction)};
                     }});
  }
  cases.push_back({"cross_entropy", {in({7, 5}), in({7}).integers(0, 5)}, [](const Tensors& x) {
                     return Tensors{at::cross_entropy_loss(x[0], x[1])};
                   }});
  cases.push_back({"cross_entropy of images",
                   {in({3, 5, 4}), in({3, 4}).integers(0, 5)},
                   [](const Tensors& x) { return Tensors{at::cross_entropy_loss(x[0], x[1])}; }});
  cases.push_back({"cross_entropy smoothed",
                   {in({7, 5}), in({7}).integers(0, 5), in({5}).uniform(1, 2).constant()},
                   [](const Tensors& x) {
                     return Tensors{
                         at::cross_entropy_loss(x[0], x[1], x[2], at::Reduction::Mean, 2, 0.1)};
                   }});
  cases.push_back({"cross_entropy of probabilities",
                   {in({7, 5}), in({7, 5}).uniform(0, 1)},
                   [](const Tensors& x) { return Tensors{at::cross_entropy_loss(x[0], x[1])}; }});
  testing::check_ops(cases);
}

// A shard whose targets are all ignored has no mean of its own.
TEST(LossRulesTest, AShardOfIgnoredTargetsCountsNothing) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = at::arange(12.0).view({4, 3});
    const at::Tensor y = at::tensor({-100, -100, 1, 2}, at::kLong);
    at::Tensor dx = distribute_tensor(x, mesh, Placements{Shard(0)}).requires_grad_();
    const at::Tensor dy = distribute_tensor(y, mesh, Placements{Shard(0)});
    const at::Tensor loss = at::nll_loss(dx, dy);
    EXPECT_DOUBLE_EQ(full_tensor(loss).item<double>(), at::nll_loss(x, y).item<double>());
    loss.backward();
    EXPECT_DOUBLE_EQ(full_tensor(dx.grad()).sum().item<double>(), -1);
    EXPECT_EQ(layout_of(dx.grad()).to_string(), "[S(0)]");
  });
}

TEST(LossRulesTest, ElementwiseLosses) {
  std::vector<OpCase> cases;
  auto add = [&](std::string name, std::vector<testing::Input> inputs,
                 std::function<at::Tensor(const Tensors&, int64_t)> loss) {
    for (int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
      cases.push_back({absl::StrCat(name, " ", reduction), inputs,
                       [=](const Tensors& x) { return Tensors{loss(x, reduction)}; }});
    }
  };
  add("mse_loss", {in({7, 5}), in({7, 5})},
      [](const Tensors& x, int64_t r) { return at::mse_loss(x[0], x[1], r); });
  add("mse_loss of a transposed", {in({7, 5}).transposed(), in({7, 5}).transposed()},
      [](const Tensors& x, int64_t r) { return at::mse_loss(x[0], x[1], r); });
  add("mse_loss of a column", {in({7, 1}), in({7, 5})},
      [](const Tensors& x, int64_t r) { return at::mse_loss(x[0], x[1], r); });
  add("smooth_l1_loss of a row", {in({7, 5}), in({5})},
      [](const Tensors& x, int64_t r) { return at::smooth_l1_loss(x[0], x[1], r, 0.7); });
  add("huber_loss of a column", {in({7, 1}), in({7, 5})},
      [](const Tensors& x, int64_t r) { return at::huber_loss(x[0], x[1], r, 0.7); });
  add("l1_loss", {in({7, 5}), in({7, 5})},
      [](const Tensors& x, int64_t r) { return at::l1_loss(x[0], x[1], r); });
  add("smooth_l1_loss", {in({7, 5}), in({7, 5})},
      [](const Tensors& x, int64_t r) { return at::smooth_l1_loss(x[0], x[1], r, 0.7); });
  add("huber_loss", {in({7, 5}), in({7, 5})},
      [](const Tensors& x, int64_t r) { return at::huber_loss(x[0], x[1], r, 0.7); });
  add("huber_loss of a transposed", {in({7, 5}).transposed(), in({7, 5})},
      [](const Tensors& x, int64_t r) { return at::huber_loss(x[0], x[1], r, 0.7); });
  add("binary_cross_entropy", {in({7, 5}).uniform(0.1, 0.9), in({7, 5}).uniform(0, 1)},
      [](const Tensors& x, int64_t r) { return at::binary_cross_entropy(x[0], x[1], {}, r); });
  add("binary_cross_entropy with weights",
      {in({7, 5}).uniform(0.1, 0.9), in({7, 5}).uniform(0, 1).constant(), in({5}).constant()},
      [](const Tensors& x, int64_t r) { return at::binary_cross_entropy(x[0], x[1], x[2], r); });
  add("binary_cross_entropy_with_logits",
      {in({7, 5}), in({7, 5}).uniform(0, 1), in({7, 1}).constant(), in({5}).constant()},
      [](const Tensors& x, int64_t r) {
        return at::binary_cross_entropy_with_logits(x[0], x[1], x[2], x[3], r);
      });
  add("soft_margin_loss", {in({7, 5}), in({7, 5}).constant()},
      [](const Tensors& x, int64_t r) { return at::soft_margin_loss(x[0], x[1], r); });
  add("kl_div", {in({7, 5}), in({7, 5}).uniform(0, 1)},
      [](const Tensors& x, int64_t r) { return at::kl_div(x[0], x[1], r); });
  add("cosine_embedding_loss", {in({7, 5}), in({7, 5}), in({7}).flags()},
      [](const Tensors& x, int64_t r) {
        const at::Tensor sign = x[2].to(at::kDouble).mul(2).sub(1);
        return at::cosine_embedding_loss(x[0], x[1], sign, 0.1, r);
      });
  cases.push_back({"mse_loss of halves",
                   {in({50, 7}).uniform(200, 255).dtype(at::kHalf),
                    in({50, 7}).uniform(-5, 5).dtype(at::kHalf)},
                   [](const Tensors& x) { return Tensors{at::mse_loss(x[0], x[1])}; },
                   false,
                   3e-2});
  cases.push_back({"huber_loss out",
                   {in({7, 5}), in({7, 5})},
                   [](const Tensors& x) {
                     at::Tensor out = x[0].detach().sum();
                     at::huber_loss_out(out, x[0].detach(), x[1].detach());
                     return Tensors{out};
                   },
                   false});
  testing::check_ops(cases);
}

}  // namespace
}  // namespace shardweave

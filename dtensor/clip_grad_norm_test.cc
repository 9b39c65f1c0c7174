// Each tensor counts once, autograd and views see the clipping, and neither function takes more time
// per gradient when there are more of them. Numbers over meshes and layouts: known_mistakes_test.cc.
#include "shardweave/dtensor/clip_grad_norm.h"

#include <cmath>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;

at::Tensor with_gradient(at::Tensor parameter, at::Tensor grad) {
  parameter.requires_grad_();
  parameter.mutable_grad() = std::move(grad);
  return parameter;
}

TEST(ClipGradNormTest, ATensorThatIsGivenTwiceCountsOnce) {
  at::Tensor plain = with_gradient(at::zeros({4}), at::ones({4}));
  EXPECT_NEAR(clip_grad_norm({plain, plain}, 1.0), 2, 1e-12);
  EXPECT_TRUE(at::allclose(plain.grad(), at::full({4}, 0.5)));
  for (const Placement& p : {Placement(Replicate()), Placement(Shard(0)), Placement(Partial())}) {
    on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
      at::Tensor w = with_gradient(zeros({4}, mesh, {Replicate()}),
                                   testing::scattered(at::ones({4}), mesh, {p}));
      EXPECT_NEAR(clip_grad_norm({w, w}, 1.0), 2, 1e-12);
      EXPECT_TRUE(at::allclose(full_tensor(w.grad()), at::full({4}, 0.5)))
          << to_string(Placements{p});
    });
  }
}

TEST(ClipGradNormTest, AGradientOfTwoParametersCountsTwiceAndIsScaledOnce) {
  const at::Tensor grad = at::ones({2});
  const at::Tensor a = with_gradient(at::zeros({2}), grad);
  const at::Tensor b = with_gradient(at::zeros({2}), grad);
  EXPECT_NEAR(clip_grad_norm({a, b}, 1.0), 2, 1e-12);
  EXPECT_TRUE(at::allclose(grad, at::full({2}, 0.5)));
}

TEST(ClipGradNormTest, ALargestNormThatIsNoneIsAnErrorBeforeAnythingChanges) {
  const at::Tensor w = with_gradient(at::zeros({2}), at::ones({2}));
  for (const double max_norm : {-1.0, -0.5, std::nan(""), -HUGE_VAL}) {
    try {
      clip_grad_norm({w}, max_norm);
      ADD_FAILURE() << max_norm;
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("clip_grad_norm: max_norm is "));
    }
    EXPECT_TRUE(at::equal(w.grad(), at::ones({2})));
  }
  clip_grad_norm({w}, HUGE_VAL);
  EXPECT_TRUE(at::equal(w.grad(), at::ones({2})));
  clip_grad_norm({w}, 0);
  EXPECT_TRUE(at::equal(w.grad(), at::zeros({2})));
}

// Ranks that clip to other norms would scale one gradient by different factors.
TEST(ClipGradNormTest, AnotherLargestNormOnARankIsAnError) {
  const absl::Status status = testing::try_on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor w = distribute_tensor(at::ones({4}), mesh, {Shard(0)}).requires_grad_();
    w.square().sum().backward();
    clip_grad_norm({w}, mesh->coordinate()[0] == 0 ? 1.0 : 2.0);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

// Or of which one alone clips, to the norm's own type.
TEST(ClipGradNormTest, ARankThatAloneClipsIsHeardOf) {
  const absl::Status status = testing::try_on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor w = distribute_tensor(at::ones({4}), mesh, {Replicate()}).requires_grad_();
    w.mutable_grad() = distribute_tensor(at::full({4}, 100.0f), mesh, {Replicate()});
    if (mesh->coordinate()[0] == 1) clip_grad_norm({w}, 2.0);
    const at::Tensor x = distribute_tensor(at::ones({2, 4}), mesh, {Shard(0)});
    (void)x.mv(w.grad()).sum().item<float>();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

TEST(ClipGradNormTest, WithoutANumberForTheNormNoGradientStaysAsItWas) {
  const at::Tensor bad = with_gradient(at::zeros({2}), at::full({2}, std::nan("")));
  const at::Tensor large = with_gradient(at::zeros({2}), at::full({2}, 1e8));
  // Where nothing is to be clipped it is only measured.
  EXPECT_TRUE(std::isnan(clip_grad_norm({bad, large}, HUGE_VAL)));
  EXPECT_TRUE(at::equal(large.grad(), at::full({2}, 1e8)));
  EXPECT_TRUE(std::isnan(clip_grad_norm({bad, large}, 1.0)));
  EXPECT_TRUE(at::all(at::isnan(large.grad())).item<bool>());
}

// What was made in inference mode has no version that could be told: not even that of an ordinary
// tensor's part, once that mode is over.
TEST(ClipGradNormTest, OfGradientsThatWereMadeInInferenceMode) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor local = at::ones({2});
    at::Tensor w = zeros({4}, mesh, {Shard(0)});
    {
      const c10::InferenceMode inference;
      w.mutable_grad() = from_local(local, mesh, {Shard(0)}, std::vector<int64_t>{4});
      EXPECT_NEAR(clip_grad_norm({w}, 1.0), 2, 1e-6);
    }
    EXPECT_TRUE(w.grad().is_inference());
    EXPECT_NEAR(clip_grad_norm({w}, 0.5), 1, 1e-6);
    EXPECT_TRUE(at::allclose(full_tensor(w.grad()), at::full({4}, 0.25)));
  });
}

TEST(ClipGradNormTest, AutogradAndViewsSeeTheClipping) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    for (const bool is_partial : {false, true}) {
      const Placements placements = {is_partial ? Placement(Partial()) : Placement(Shard(0))};
      at::Tensor w = with_gradient(zeros({4, 4}, mesh, {Shard(0)}),
                                   testing::scattered(at::ones({4, 4}), mesh, placements));
      const at::Tensor view = w.grad().view({16});
      const at::Tensor row = w.grad().select(0, 3);  // of the last rank: a copy on the others
      const at::Tensor x = zeros({4, 4}, mesh, {Shard(0)}).requires_grad_();
      const at::Tensor uses = (x * w.grad()).sum();  // keeps the gradient for backward
      const auto version = w.grad()._version();
      EXPECT_NEAR(clip_grad_norm({w}, 2.0), 4, 1e-9);
      EXPECT_GT(w.grad()._version(), version);
      EXPECT_TRUE(at::allclose(full_tensor(view), at::full({16}, 0.5)));
      EXPECT_TRUE(at::allclose(full_tensor(row), at::full({4}, 0.5)));
      EXPECT_THROW(uses.backward(), c10::Error);
    }
  });
}

// The last row of a tensor, as a gradient: a copy on all ranks but one, which has to be brought
// again, and whose change has to go back.
TEST(ClipGradNormTest, AGradientThatIsAViewOfAnotherRanksElements) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor all = distribute_tensor(at::zeros({4, 4}), mesh, Placements{Shard(0)});
    const at::Tensor w = with_gradient(zeros({4}, mesh, {Replicate()}), all.select(0, 3));
    all.fill_(1);
    EXPECT_NEAR(clip_grad_norm({w}, 1.0), 2, 1e-9);
    at::Tensor want = at::ones({4, 4});
    want.select(0, 3).fill_(0.5);
    EXPECT_TRUE(at::allclose(full_tensor(all), want));
  });
}

// No operator goes through the dispatcher, and there is one message, besides those for buckets of
// Partials.
TEST(ClipGradNormTest, CostsNoOperatorsAndOneCollective) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < 60; ++i) {
      const Placements layouts[] = {{Shard(0), Replicate()},
                                    {Replicate(), Shard(0)},
                                    {Shard(0), Shard(1)},
                                    {Replicate(), Replicate()}};
      parameters.push_back(with_gradient(zeros({4, 4 + i % 7}, mesh, layouts[i % 4]),
                                         ones({4, 4 + i % 7}, mesh, layouts[i % 4])));
    }
    const DispatchCounters before = dispatch_counters(mesh);
    {
      CommTrace trace(mesh);
      double elements = 0;
      for (const at::Tensor& p : parameters) elements += static_cast<double>(p.numel());
      EXPECT_NEAR(clip_grad_norm(parameters, 0.1), std::sqrt(elements), 1e-9);
      EXPECT_EQ(trace.events().size(), 1u);
    }
    EXPECT_EQ(dispatch_counters(mesh).operators, before.operators);
    for (int i = 0; i < 60; ++i) {
      parameters[i].mutable_grad() =
          testing::scattered(at::ones({4, 4 + i % 7}), mesh, {Partial(), Replicate()});
    }
    CommTrace trace(mesh);
    clip_grad_norm(parameters, 1e9);
    EXPECT_EQ(trace.events().size(), 1u);
  });
}

}  // namespace
}  // namespace shardweave

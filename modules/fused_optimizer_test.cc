// The numbers are those of torch::optim on one device, for every layout; uneven, empty and
// non-contiguous parts included.
#include "shardweave/modules/fused_optimizer.h"

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/optim/adamw.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

using testing::on_mesh;

constexpr int kSteps = 4;

at::Tensor start() {
  return at::arange(35, at::kFloat).reshape({7, 5}) / 17 - 1;
}
// Of step s, the same on every rank.
at::Tensor gradient(int s) {
  return at::sin(at::arange(35, at::kFloat).reshape({7, 5}) * (s + 1));
}

// What torch::optim makes of the parameter.
template <typename Optimizer, typename Options>
at::Tensor wanted(const Options& options) {
  at::Tensor w = start().requires_grad_();
  Optimizer optimizer({w}, options);
  for (int s = 0; s < kSteps; ++s) {
    w.mutable_grad() = gradient(s);
    optimizer.step();
  }
  return w.detach();
}

void expect_same_on_all_layouts(const FusedOptimizer::Options& options, const at::Tensor& wanted) {
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"x", 3}}, {{"x", 2}, {"y", 2}}, {{"x", 8}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      for (const Placements& placements : testing::all_layouts(mesh->mesh().ndim(), 2, false)) {
        at::Tensor w = distribute_tensor(start(), mesh, placements).requires_grad_();
        FusedOptimizer optimizer({w}, options);
        for (int s = 0; s < kSteps; ++s) {
          w.mutable_grad() = distribute_tensor(gradient(s), mesh, placements);
          optimizer.step();
        }
        EXPECT_TRUE(at::allclose(full_tensor(w.detach()), wanted, 1e-5, 1e-6))
            << to_string(placements);
      }
    });
  }
}

TEST(FusedOptimizerTest, AdamW) {
  for (const bool amsgrad : {false, true}) {
    const at::Tensor w = wanted<torch::optim::AdamW>(
        torch::optim::AdamWOptions(0.1).weight_decay(0.05).betas({0.8, 0.95}).amsgrad(amsgrad));
    expect_same_on_all_layouts(
        AdamWOptions{
            .lr = 0.1, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.05, .amsgrad = amsgrad},
        w);
  }
}

TEST(FusedOptimizerTest, Sgd) {
  expect_same_on_all_layouts(SgdOptions{.lr = 0.1},
                             wanted<torch::optim::SGD>(torch::optim::SGDOptions(0.1)));
  expect_same_on_all_layouts(
      SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true},
      wanted<torch::optim::SGD>(
          torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.05).nesterov(true)));
  expect_same_on_all_layouts(
      SgdOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.5},
      wanted<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.5)));
}

TEST(FusedOptimizerTest, ParametersThatAreNotContiguousAndOtherDtypes) {
  at::Tensor w = start().t().contiguous().t().requires_grad_();
  at::Tensor d = start().to(at::kDouble).requires_grad_();
  at::Tensor untouched = start().requires_grad_();
  ASSERT_FALSE(w.is_contiguous());
  FusedOptimizer optimizer({w, untouched, d}, AdamWOptions{.lr = 0.1});
  for (int s = 0; s < kSteps; ++s) {
    w.mutable_grad() = gradient(s).t().contiguous().t();
    d.mutable_grad() = gradient(s).to(at::kDouble);
    optimizer.step();
  }
  const at::Tensor expected = wanted<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1));
  EXPECT_TRUE(at::allclose(w.detach(), expected, 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(d.detach().to(at::kFloat), expected, 1e-5, 1e-6));
  EXPECT_TRUE(at::equal(untouched.detach(), start()));
  EXPECT_FALSE(optimizer.state(1, "exp_avg").defined());
  EXPECT_EQ(optimizer.state(0, "step").item<float>(), kSteps);
  optimizer.zero_grad();
  EXPECT_FALSE(w.grad().defined());
}

TEST(FusedOptimizerTest, TheStateLiesAsItsParameterAndSharesMemory) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor w = distribute_tensor(start(), mesh, Placements{Shard(0)}).requires_grad_();
    FusedOptimizer optimizer({w}, AdamWOptions{});
    w.mutable_grad() = distribute_tensor(gradient(0), mesh, Placements{Shard(0)});
    optimizer.step();
    const at::Tensor state = optimizer.state(0, "exp_avg");
    EXPECT_EQ(layout_of(state), layout_of(w));
    EXPECT_EQ(to_local(state).data_ptr(), to_local(optimizer.state(0, "exp_avg")).data_ptr());
    EXPECT_THROW(optimizer.state(0, "momentum_buffer"), Error);
    EXPECT_THROW(optimizer.state(1, "step"), Error);
  });
}

TEST(FusedOptimizerTest, AGradientThatWaitsForItsReductionIsRefusedBeforeAnythingChanges) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor a = distribute_tensor(start(), mesh, Placements{Shard(0)}).requires_grad_();
    at::Tensor b = distribute_tensor(start(), mesh, Placements{Replicate()}).requires_grad_();
    a.mutable_grad() = distribute_tensor(gradient(0), mesh, Placements{Shard(0)});
    b.mutable_grad() = from_local(gradient(0), mesh, Placements{Partial()});
    FusedOptimizer optimizer({a, b}, SgdOptions{});
    try {
      optimizer.step();
      ADD_FAILURE() << "took a Partial gradient";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_NE(std::string(error.what_without_backtrace())
                    .find("parameter 1 lies [R], its gradient [P(sum)]; call finish_grad_sync()"),
                std::string::npos)
          << error.what_without_backtrace();
    }
    EXPECT_TRUE(at::equal(full_tensor(a.detach()), start()));
  });
}

TEST(FusedOptimizerTest, RefusesWhatItCannotOptimize) {
  const at::Tensor w = start().requires_grad_();
  const auto refused = [](std::vector<at::Tensor> parameters, FusedOptimizer::Options options,
                          const std::string& part) {
    try {
      FusedOptimizer optimizer(std::move(parameters), options);
      ADD_FAILURE() << "took it: " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what_without_backtrace()).find(part), std::string::npos)
          << error.what_without_backtrace();
    }
  };
  refused({w * 2}, SgdOptions{}, "parameter 0 is no leaf");
  refused({w, at::zeros({3}, at::kLong)}, SgdOptions{}, "parameter 1 is of type Long");
  refused({at::Tensor()}, SgdOptions{}, "parameter 0 is undefined");
  refused({w, w}, SgdOptions{}, "parameters 0 and 1 are the same");
  refused({w}, SgdOptions{.lr = -1}, "lr is -1");
  refused({w}, SgdOptions{.momentum = std::nan("")}, "momentum is nan");
  refused({w}, SgdOptions{.nesterov = true}, "nesterov is 1");
  refused({w}, AdamWOptions{.beta1 = 1}, "beta1 is 1");
  refused({w}, AdamWOptions{.beta2 = -0.1}, "beta2 is -0.1");
  FusedOptimizer optimizer({w}, AdamWOptions{.lr = 0.5});
  EXPECT_EQ(optimizer.lr(), 0.5);
  EXPECT_THROW(optimizer.set_lr(-1), Error);
  optimizer.set_lr(0.25);
  EXPECT_EQ(optimizer.lr(), 0.25);
}

}  // namespace
}  // namespace shardweave

// The numbers are those of torch::optim on one device, for every layout; uneven, empty and
// non-contiguous parts included.
#include "shardweave/modules/optim/fused_optimizer.h"

#include <algorithm>
#include <functional>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/optim/adam.h"
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

// Ranks that step with other numbers, or more often, would have parameters that differ: the next collective
// about those says so.
TEST(FusedOptimizerTest, RanksThatStepOtherwiseHearOfIt) {
  using Stray = void (*)(FusedOptimizer&);
  const std::pair<const char*, Stray> cases[] = {
      {"lr", [](FusedOptimizer& o) { o.set_lr(0.2); }},
      {"twice", [](FusedOptimizer& o) { o.step(); }},
      {"alike", [](FusedOptimizer& o) { o.set_lr(0.1); }},
  };
  for (const FusedOptimizer::Options& options : std::initializer_list<FusedOptimizer::Options>{
           SgdOptions{.lr = 0.1}, AdamWOptions{.lr = 0.1}, AdamOptions{.lr = 0.1},
           LionOptions{.lr = 0.1}}) {
    for (const auto& [name, stray] : cases) {
      SCOPED_TRACE(name);
      const absl::Status status =
          testing::try_on_mesh({{"x", 2}}, [&, stray = stray](const MeshPtr& mesh) {
            at::Tensor w =
                distribute_tensor(start(), mesh, Placements{Replicate()}).requires_grad_();
            FusedOptimizer optimizer({w}, options);
            w.mutable_grad() = distribute_tensor(gradient(0), mesh, Placements{Replicate()});
            if (mesh->coordinate()[0] == 1) stray(optimizer);
            optimizer.step();
            const at::Tensor x = distribute_tensor(at::ones({4, 7}), mesh, {Shard(0)});
            (void)x.mm(w.detach()).sum().item<float>();
          });
      if (std::string_view(name) == "alike") {
        EXPECT_TRUE(status.ok()) << status;
      } else {
        EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      }
    }
  }
}

// Where a gradient is a rank's own (of a local part, which some have used and others have not) nobody says
// that they differ.
TEST(FusedOptimizerTest, RanksMayStepWhatTheyAloneHaveUsed) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor w = distribute_tensor(start(), mesh, {Shard(0)}).requires_grad_();
    FusedOptimizer optimizer({w}, SgdOptions{.lr = 0.1});
    for (int step = 0; step < 2; ++step) {
      if (mesh->coordinate()[0] == 1) to_local(w).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
      (void)w.detach().sum().item<float>();
    }
    const at::Tensor whole = full_tensor(w.detach());
    EXPECT_TRUE(at::allclose(whole.slice(0, 4), start().slice(0, 4) - 0.2));
    EXPECT_TRUE(at::equal(whole.slice(0, 0, 4), start().slice(0, 0, 4)));
  });
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

TEST(FusedOptimizerTest, Adam) {
  for (const bool amsgrad : {false, true}) {
    const at::Tensor w = wanted<torch::optim::Adam>(
        torch::optim::AdamOptions(0.1).weight_decay(0.05).betas({0.8, 0.95}).amsgrad(amsgrad));
    expect_same_on_all_layouts(
        AdamOptions{
            .lr = 0.1, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.05, .amsgrad = amsgrad},
        w);
  }
}

// LibTorch has none: the paper's algorithm 2, in double precision. What is only a sign is the same in
// single precision unless the sum is next to 0, which these are not.
TEST(FusedOptimizerTest, Lion) {
  const LionOptions options = {.lr = 0.1, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.05};
  at::Tensor w = start().to(at::kDouble), momentum = at::zeros_like(w);
  for (int s = 0; s < kSteps; ++s) {
    const at::Tensor g = gradient(s).to(at::kDouble);
    const at::Tensor direction = options.beta1 * momentum + (1 - options.beta1) * g;
    ASSERT_GT(at::where(direction == 0, 1, direction.abs()).min().item<double>(), 1e-6);
    w = w - options.lr * (direction.sign() + options.weight_decay * w);
    momentum = options.beta2 * momentum + (1 - options.beta2) * g;
  }
  expect_same_on_all_layouts(options, w.to(at::kFloat));
  FusedOptimizer optimizer({start().requires_grad_()}, options);
  EXPECT_EQ(optimizer.state_names(), (std::vector<std::string_view>{"step", "exp_avg"}));
  EXPECT_THROW(optimizer.state(0, "exp_avg_sq"), Error);
  EXPECT_THROW(FusedOptimizer({start()}, LionOptions{.beta2 = 1}), Error);
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
  EXPECT_EQ(optimizer.state(1, "step").item<float>(), 0);
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

// Layouts have an order of cuts, which placements do not.
TEST(FusedOptimizerTest, TheStateKeepsTheOrderOfTheCuts) {
  on_mesh({{"x", 2}, {"y", 3}}, [](const MeshPtr& mesh) {
    const Layout inner_first = *Layout::create({Shard(0), Shard(0)}, {1, 0});
    at::Tensor w =
        redistribute(distribute_tensor(start(), mesh, Placements{Shard(0), Shard(0)}), inner_first)
            .detach()
            .requires_grad_();
    w.mutable_grad() = redistribute(
        distribute_tensor(gradient(0), mesh, Placements{Shard(0), Shard(0)}), inner_first);
    FusedOptimizer optimizer({w}, SgdOptions{.momentum = 0.9});
    optimizer.step();
    const at::Tensor momentum = optimizer.state(0, "momentum_buffer");
    EXPECT_EQ(layout_of(momentum), inner_first);
    EXPECT_TRUE(at::equal(full_tensor(momentum), gradient(0)));  // of the first step
  });
}

// What torch::optim does to them.
TEST(FusedOptimizerTest, AParameterThatIsGivenTwiceIsOne) {
  const at::Tensor expected = wanted<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1));
  const auto check = [&](const at::Tensor& w, const at::Tensor& other,
                         const std::function<at::Tensor(int)>& grad) {
    FusedOptimizer optimizer({w, other, w}, AdamWOptions{.lr = 0.1});
    EXPECT_EQ(optimizer.parameters().size(), 3u);
    for (int s = 0; s < kSteps; ++s) {
      w.mutable_grad() = grad(s);
      optimizer.step();
    }
    EXPECT_EQ(optimizer.state(0, "step").item<float>(), kSteps);
    EXPECT_EQ(optimizer.state(2, "step").item<float>(), kSteps);
    EXPECT_EQ(optimizer.state(1, "step").item<float>(), 0);
    optimizer.set_state(2, "step", at::scalar_tensor(7));
    EXPECT_EQ(optimizer.state(0, "step").item<float>(), 7);
  };
  const at::Tensor w = start().requires_grad_();
  check(w, start().requires_grad_(), gradient);
  EXPECT_TRUE(at::allclose(w.detach(), expected, 1e-5, 1e-6));
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    const at::Tensor d = distribute_tensor(start(), mesh, Placements{Shard(1)}).requires_grad_();
    check(d, zeros({3}, mesh, {Shard(0)}).requires_grad_(),
          [&](int s) { return distribute_tensor(gradient(s), mesh, Placements{Shard(1)}); });
    EXPECT_TRUE(at::allclose(full_tensor(d.detach()), expected, 1e-5, 1e-6));
  });
}

TEST(FusedOptimizerTest, AutogradNoticesThatASavedParameterWasStepped) {
  const auto check = [](const at::Tensor& w, const at::Tensor& grad,
                        const FusedOptimizer::Options& options) {
    const at::Tensor loss = (w * w).sum();  // saves w
    const auto version = w._version();
    w.mutable_grad() = grad;
    FusedOptimizer optimizer({w}, options);
    optimizer.step();
    EXPECT_GT(w._version(), version);
    try {
      loss.backward();
      ADD_FAILURE() << "computed a gradient of the stepped parameter";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("modified by an inplace operation"),
                std::string::npos)
          << error.what();
    }
  };
  for (const FusedOptimizer::Options& options :
       {FusedOptimizer::Options(SgdOptions{}), FusedOptimizer::Options(AdamWOptions{})}) {
    check(start().requires_grad_(), gradient(0), options);
    check(start().t().contiguous().t().requires_grad_(), gradient(0), options);
    on_mesh({{"x", 8}}, [&](const MeshPtr& mesh) {  // the last rank has no element
      const Placements rows = {Shard(0)};
      check(distribute_tensor(start(), mesh, rows).requires_grad_(),
            distribute_tensor(gradient(0), mesh, rows), options);
      // A local part that somebody saved.
      const at::Tensor w = distribute_tensor(start(), mesh, rows).requires_grad_();
      const at::Tensor local = to_local(w);
      const auto version = local._version();
      w.mutable_grad() = distribute_tensor(gradient(0), mesh, rows);
      FusedOptimizer({w}, options).step();
      EXPECT_GT(local._version(), version);
    });
  }
}

// Views that are copies, on some ranks, learn of a step; a parameter that is one takes it back.
TEST(FusedOptimizerTest, ViewsOfAParameterSeeTheStep) {
  const at::Tensor stepped = start() - 0.5 * gradient(0);
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    const Placements rows = {Shard(0)};
    const at::Tensor w = distribute_tensor(start(), mesh, rows).requires_grad_();
    const at::Tensor row = w.detach().select(0, 6);
    const at::Tensor flat = w.detach().view({35});
    w.mutable_grad() = distribute_tensor(gradient(0), mesh, rows);
    FusedOptimizer({w}, SgdOptions{.lr = 0.5}).step();
    EXPECT_TRUE(at::allclose(full_tensor(row), stepped.select(0, 6)));
    EXPECT_TRUE(at::allclose(full_tensor(flat), stepped.view({35})));

    const at::Tensor all = distribute_tensor(at::zeros({7, 5}), mesh, rows);
    const at::Tensor leaf = all.select(0, 6).requires_grad_();
    all.copy_(distribute_tensor(start(), mesh, rows));
    leaf.mutable_grad() =
        redistribute(distribute_tensor(gradient(0).select(0, 6), mesh, Placements{Replicate()}),
                     layout_of(leaf));
    FusedOptimizer({leaf}, SgdOptions{.lr = 0.5}).step();
    EXPECT_TRUE(at::allclose(full_tensor(all.select(0, 6)), stepped.select(0, 6)));
    EXPECT_TRUE(at::equal(full_tensor(all.select(0, 5)), start().select(0, 5)));
  });
}

// The same numbers as a run without a break, which ends after step `at` and goes on in another
// optimizer. Names may be set in any order.
void expect_resumes(const FusedOptimizer::Options& options) {
  on_mesh({{"x", 2}, {"y", 2}}, [&](const MeshPtr& mesh) {
    const Placements layouts[] = {{Shard(0), Shard(1)}, {Replicate(), Shard(0)}};
    const auto gradients = [&](FusedOptimizer& optimizer, int s) {
      optimizer.parameters()[0].mutable_grad() = distribute_tensor(gradient(s), mesh, layouts[0]);
      optimizer.parameters()[1].mutable_grad() = gradient(s + 1);
      optimizer.step();
    };
    const auto fresh = [&] {
      return std::vector<at::Tensor>{distribute_tensor(start(), mesh, layouts[0]).requires_grad_(),
                                     start().requires_grad_()};
    };
    const std::vector<at::Tensor> unbroken = fresh();
    FusedOptimizer whole(unbroken, options);
    for (int s = 0; s < kSteps; ++s) gradients(whole, s);
    for (int at = 0; at <= kSteps; ++at) {
      for (const bool backwards : {false, true}) {
        const std::vector<at::Tensor> parameters = fresh();
        FusedOptimizer first(parameters, options);
        for (int s = 0; s < at; ++s) gradients(first, s);
        FusedOptimizer second(parameters, options);
        std::vector<std::string_view> names = first.state_names();
        if (backwards) std::reverse(names.begin(), names.end());
        for (size_t i = 0; i < parameters.size(); ++i) {
          for (const std::string_view name : names) {
            at::Tensor saved = first.state(i, name).clone();
            // From a file that knew other layouts and types.
            if (is_dtensor(saved)) saved = redistribute(saved, layouts[1]).to(at::kDouble);
            second.set_state(i, name, saved);
            EXPECT_EQ(is_dtensor(second.state(i, name)), is_dtensor(saved));
          }
        }
        for (int s = at; s < kSteps; ++s) gradients(second, s);
        EXPECT_TRUE(
            at::equal(full_tensor(parameters[0].detach()), full_tensor(unbroken[0].detach())))
            << "after step " << at;
        EXPECT_TRUE(at::equal(parameters[1].detach(), unbroken[1].detach())) << "after step " << at;
      }
    }
  });
}

TEST(FusedOptimizerTest, ResumesFromTheStateThatWasSaved) {
  expect_resumes(SgdOptions{.lr = 0.1});
  expect_resumes(SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true});
  expect_resumes(SgdOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.5});
  for (const bool amsgrad : {false, true}) {
    expect_resumes(AdamWOptions{.lr = 0.1, .beta1 = 0.8, .beta2 = 0.95, .amsgrad = amsgrad});
  }
}

// torch::optim::SGD keeps no step: a buffer that is set is one to go on from.
TEST(FusedOptimizerTest, AMomentumBufferAloneIsGoneOnFrom) {
  at::Tensor w = start().requires_grad_();
  torch::optim::SGD sgd({w}, torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.5));
  at::Tensor v = start().requires_grad_();
  FusedOptimizer fused({v}, SgdOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.5});
  for (int s = 0; s < 2; ++s) {
    w.mutable_grad() = gradient(s);
    sgd.step();
    if (s == 0) {
      const at::NoGradGuard no_grad;
      v.copy_(w);
      fused.set_state(0, "momentum_buffer", gradient(0));
    }
  }
  v.mutable_grad() = gradient(1);
  fused.step();
  EXPECT_TRUE(at::allclose(v.detach(), w.detach(), 1e-5, 1e-6));
}

// Saved and loaded once more before the next step, in any order; or written where it is.
TEST(FusedOptimizerTest, AMomentumBufferSurvivesAnotherSave) {
  enum class How { kSavedAgain, kSavedAgainBackwards, kWritten, kWrittenAndSaved };
  for (const double dampening : {0.0, 0.5}) {
    const SgdOptions options = {.lr = 0.1, .momentum = 0.9, .dampening = dampening};
    at::Tensor w = start().requires_grad_();
    torch::optim::SGD sgd({w}, torch::optim::SGDOptions(0.1).momentum(0.9).dampening(dampening));
    w.mutable_grad() = gradient(0);
    sgd.step();
    const at::Tensor half = w.detach().clone();
    w.mutable_grad() = gradient(1);
    sgd.step();
    for (const How how :
         {How::kSavedAgain, How::kSavedAgainBackwards, How::kWritten, How::kWrittenAndSaved}) {
      const bool is_written = how == How::kWritten || how == How::kWrittenAndSaved;
      if (is_written && dampening != 0) continue;  // it would have to be known for a second step
      at::Tensor v = half.clone().requires_grad_();
      FusedOptimizer first({v}, options), second({v}, options);
      if (is_written) {
        first.state(0, "momentum_buffer").copy_(gradient(0));
      } else {
        first.set_state(0, "momentum_buffer", gradient(0));
      }
      if (how != How::kWritten) {
        std::vector<std::string_view> names = first.state_names();
        if (how == How::kSavedAgainBackwards) std::reverse(names.begin(), names.end());
        for (const std::string_view name : names) {
          second.set_state(0, name, first.state(0, name).clone());
        }
      }
      v.mutable_grad() = gradient(1);
      (how == How::kWritten ? first : second).step();
      EXPECT_TRUE(at::allclose(v.detach(), w.detach(), 1e-5, 1e-6))
          << static_cast<int>(how) << " " << dampening;
    }
  }
}

TEST(FusedOptimizerTest, TheStateIsThereBeforeTheFirstStep) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor w = distribute_tensor(start(), mesh, Placements{Shard(0)}).requires_grad_();
    FusedOptimizer optimizer({w, start().requires_grad_()}, AdamWOptions{.amsgrad = true});
    EXPECT_EQ(optimizer.state_names(),
              (std::vector<std::string_view>{"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}));
    for (const char* name : {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}) {
      const at::Tensor state = optimizer.state(0, name);
      EXPECT_EQ(layout_of(state), layout_of(w));
      EXPECT_FALSE(state.requires_grad());
      EXPECT_TRUE(at::equal(full_tensor(state), at::zeros({7, 5})));
      EXPECT_TRUE(at::equal(optimizer.state(1, name), at::zeros({7, 5})));
    }
    EXPECT_EQ(optimizer.state(0, "step").item<float>(), 0);
    // Writing to it writes the state.
    optimizer.state(0, "exp_avg").fill_(3);
    EXPECT_TRUE(at::equal(full_tensor(optimizer.state(0, "exp_avg")), at::full({7, 5}, 3.)));
    FusedOptimizer plain({w}, SgdOptions{});
    EXPECT_EQ(plain.state_names(), std::vector<std::string_view>{"step"});
    EXPECT_FALSE(plain.state(0, "momentum_buffer").defined());
  });
}

TEST(FusedOptimizerTest, RefusesAStateThatDoesNotFit) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Placements rows = {Shard(0)};
    const at::Tensor w = distribute_tensor(start(), mesh, rows).requires_grad_();
    FusedOptimizer optimizer({w, start().requires_grad_()}, AdamWOptions{});
    const auto refused = [&](size_t i, const char* name, const at::Tensor& value,
                             absl::StatusCode code, const std::string& part) {
      try {
        optimizer.set_state(i, name, value);
        ADD_FAILURE() << "took it: " << part;
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), code);
        EXPECT_NE(std::string(error.what_without_backtrace()).find(part), std::string::npos)
            << error.what_without_backtrace();
      }
    };
    constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
    refused(0, "exp_avg", start(), kInvalid,
            "'exp_avg' of parameter 0 lies [S(0)]; got a plain tensor: distribute it");
    refused(0, "exp_avg", zeros({5, 7}, mesh, rows), kInvalid, "has shape [7, 5]; got [5, 7]");
    refused(0, "exp_avg", zeros({7, 5}, mesh, rows, at::kLong), kInvalid, "got Long");
    refused(0, "exp_avg", at::Tensor(), kInvalid, "undefined");
    refused(0, "max_exp_avg_sq", w.detach(), kInvalid, "is not used with these options");
    refused(0, "momentum_buffer", w.detach(), absl::StatusCode::kNotFound, "there are step");
    refused(1, "exp_avg", w.detach(), kInvalid, "is plain; got a DTensor: take the full tensor");
    refused(2, "exp_avg", w.detach(), absl::StatusCode::kOutOfRange, "parameter 2 of 2");
    refused(0, "step", at::ones({2}), kInvalid, "one number; got shape [2]");
    refused(0, "step", at::scalar_tensor(-1), kInvalid, "is -1; wanted a whole number");
    refused(0, "step", at::scalar_tensor(std::nan("")), kInvalid, "is nan");
    optimizer.set_state(0, "step", at::scalar_tensor(3, at::kLong));
    EXPECT_EQ(optimizer.state(0, "step").item<float>(), 3);
    EXPECT_TRUE(at::equal(full_tensor(optimizer.state(0, "exp_avg")), at::zeros({7, 5})));
  });
}

// What one rank refuses, and what differs, is an error on all of them, and the state as before.
TEST(FusedOptimizerTest, RanksSetTheSameState) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor w = distribute_tensor(start(), mesh, {Shard(0)}).requires_grad_();
    FusedOptimizer optimizer({w}, AdamWOptions{});
    const bool is_one = mesh->rank().value == 1;
    const auto refused = [&](const char* name, const at::Tensor& value, const char* part) {
      try {
        optimizer.set_state(0, name, value);
        ADD_FAILURE() << "took it: " << part;
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
        EXPECT_NE(std::string(error.what_without_backtrace()).find(part), std::string::npos)
            << error.what_without_backtrace();
      }
      EXPECT_EQ(optimizer.state(0, "step").item<float>(), 0);
      EXPECT_TRUE(at::equal(full_tensor(optimizer.state(0, "exp_avg")), at::zeros({7, 5})));
    };
    refused("step", at::scalar_tensor(is_one ? 100 : 0), "ranks 0 and 1 set another state");
    refused(is_one ? "exp_avg" : "exp_avg_sq", zeros({7, 5}, mesh, {Shard(0)}), "ranks 0 and 1");
    refused("exp_avg", zeros({7, 5}, mesh, {Shard(is_one ? 1 : 0)}), "ranks 0 and 1");
    refused("exp_avg", zeros({is_one ? 5 : 7, 5}, mesh, {Shard(1)}),
            is_one ? "has shape [7, 5]; got [5, 5]" : "refused on other ranks");
    try {
      optimizer.set_state(is_one ? 1 : 0, "exp_avg", zeros({7, 5}, mesh, {Shard(0)}));
      ADD_FAILURE() << "took another parameter's";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(),
                is_one ? absl::StatusCode::kOutOfRange : absl::StatusCode::kInvalidArgument);
    }
    optimizer.set_state(0, "exp_avg", ones({7, 5}, mesh, {Shard(1)}));
    EXPECT_TRUE(at::equal(full_tensor(optimizer.state(0, "exp_avg")), at::ones({7, 5})));
  });
}

TEST(FusedOptimizerTest, AParameterThatIsDistributedAfterItsStateWasMadeIsRefused) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    // The local parts have one shape, and other rows.
    const Placements before = {Shard(0), Replicate()};
    const Placements after = {Replicate(), Shard(0)};
    at::Tensor w = distribute_tensor(start().slice(0, 0, 6), mesh, before).requires_grad_();
    FusedOptimizer optimizer({w}, AdamWOptions{});
    optimizer.state(0, "exp_avg");
    w.set_data(distribute_tensor(start().slice(0, 0, 6), mesh, after));
    w.mutable_grad() = distribute_tensor(start().slice(0, 0, 6), mesh, after);
    try {
      optimizer.step();
      ADD_FAILURE() << "stepped with another part's state";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_NE(std::string(error.what_without_backtrace())
                    .find("parameter 0 lies [R, S(0)], its state [S(0), R]"),
                std::string::npos)
          << error.what_without_backtrace();
    }
  });
}

// The kernels would write past the end of its state.
TEST(FusedOptimizerTest, AParameterThatHasAnotherShapeOrDtypeThanItsStateIsRefused) {
  for (const at::Tensor& now :
       {at::ones({1 << 16}), at::ones({2}), at::ones({4}).to(at::kDouble)}) {
    at::Tensor other = at::ones({3}).requires_grad_();
    at::Tensor w = at::ones({4}).requires_grad_();
    FusedOptimizer optimizer({other, w}, AdamWOptions{});
    const auto step = [&] {
      other.mutable_grad() = at::ones_like(other);
      w.mutable_grad() = at::ones_like(w);
      optimizer.step();
    };
    step();
    const at::Tensor before = other.detach().clone();
    w.mutable_grad().reset();
    w.set_data(now);
    try {
      step();
      ADD_FAILURE() << "stepped with another parameter's state";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_NE(std::string(error.what_without_backtrace()).find("parameter 1 has shape ["),
                std::string::npos)
          << error.what_without_backtrace();
    }
    EXPECT_TRUE(at::equal(other, before));
    EXPECT_EQ(optimizer.state(0, "step").item<double>(), 1);
  }
  // Without any there is nothing that could not fit.
  at::Tensor w = at::ones({4}).requires_grad_();
  FusedOptimizer optimizer({w}, SgdOptions{.lr = 1});
  for (const at::Tensor& now : {at::ones({4}), at::ones({2}), at::ones({2}).to(at::kDouble)}) {
    w.mutable_grad().reset();
    w.set_data(now);
    w.mutable_grad() = at::ones_like(w);
    optimizer.step();
    EXPECT_TRUE(at::equal(w, at::zeros_like(w)));
  }
}

// Gradients that the kernels would read past, or read as something else.
TEST(FusedOptimizerTest, RefusesGradientsThatDoNotFit) {
  const auto refused = [](const at::Tensor& w, const at::Tensor& grad, const std::string& part) {
    FusedOptimizer optimizer({w}, SgdOptions{});
    w.mutable_grad() = grad;
    try {
      optimizer.step();
      ADD_FAILURE() << "took it: " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_NE(std::string(error.what_without_backtrace()).find(part), std::string::npos)
          << error.what_without_backtrace();
    }
  };
  refused(start().requires_grad_(), at::ones({3}), "has shape [7, 5], its gradient [3]");
  refused(start().requires_grad_(), start().to_sparse(), "has a sparse gradient");
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    refused(zeros({7, 5}, mesh, {Shard(0)}).requires_grad_(), zeros({7}, mesh, {Shard(0)}),
            "has shape [7, 5], its gradient [7]");
  });
}

// Past the dispatcher, from the first step on.
TEST(FusedOptimizerTest, AStepCallsNoOperatorOnDTensors) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < 40; ++i) {
      const Placements placements = {Shard(i % 2), i % 3 == 0 ? Placement(Replicate()) : Shard(0)};
      parameters.push_back(zeros({7, 5 + i}, mesh, placements).requires_grad_());
      parameters.back().mutable_grad() = ones({7, 5 + i}, mesh, placements);
    }
    FusedOptimizer optimizer(parameters, AdamWOptions{});
    const DispatchCounters before = dispatch_counters(mesh);
    for (int s = 0; s < 2; ++s) optimizer.step();
    EXPECT_EQ(dispatch_counters(mesh), before);
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
                    .find("parameter 1 lies [R], its gradient [P(sum)]; the gradients are to be "
                          "synchronized before the step (finish_grad_sync() does that)"),
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

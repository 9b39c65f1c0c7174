// The numbers are those of torch.optim.Adafactor's documented algorithm in double precision, wherever
// rows and columns are cut.
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/optim/fused_optimizer.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;

using Sizes = std::vector<int64_t>;
constexpr int kSteps = 20;

at::Tensor start(at::IntArrayRef sizes) {
  return at::sin(at::arange(c10::multiply_integers(sizes), at::kDouble) * 0.7 + 1).view(sizes);
}
at::Tensor gradient(at::IntArrayRef sizes, int step) {
  const at::Tensor wave = at::cos(at::arange(c10::multiply_integers(sizes), at::kDouble) * 1.3);
  return (wave * (1 + 0.5 * step) + 0.1 * step).view(sizes);
}

// https://docs.pytorch.org/docs/stable/generated/torch.optim.Adafactor.html
struct Oracle {
  at::Tensor w, rows, columns, variance;
  AdafactorOptions o;
  int t = 0;

  double rms(const at::Tensor& x) { return std::sqrt(x.square().mean().item<double>()); }
  void step(const at::Tensor& g) {
    ++t;
    const double keeps = 1 - std::pow(t, o.beta2_decay);
    const double rho = std::min(o.lr, 1 / std::sqrt(t));
    const double alpha = std::max(o.eps2, rms(w)) * rho;
    const double eps1 = o.eps1.value_or(std::ldexp(1, -52));
    w = w - o.lr * o.weight_decay * w;
    at::Tensor squares;
    if (g.dim() > 1) {
      const auto mix = [&](at::Tensor& mean, const at::Tensor& now) {
        mean = mean.defined() ? keeps * mean + (1 - keeps) * now : (1 - keeps) * now;
      };
      mix(rows, g.square().mean(-1, true));
      mix(columns, g.square().mean(-2, true));
      squares = rows.matmul(columns) / rows.mean(-2, true).clamp_min(eps1);
    } else {
      const at::Tensor old = variance.defined() ? variance : at::zeros_like(g);
      squares = variance = keeps * old + (1 - keeps) * g.square();
    }
    const at::Tensor update = g / squares.clamp_min(eps1 * eps1).sqrt();
    w = w - alpha / std::max(1.0, rms(update) / o.clip_threshold) * update;
  }
};

const AdafactorOptions kOptions = {.lr = 0.1, .clip_threshold = 0.8, .weight_decay = 0.05};

at::Tensor wanted(at::IntArrayRef sizes, const AdafactorOptions& options, int steps = kSteps) {
  Oracle oracle{.w = start(sizes), .o = options};
  for (int s = 0; s < steps; ++s) oracle.step(gradient(sizes, s));
  return oracle.w;
}

// From one layout, given to each rank.
using Lay = std::function<at::Tensor(const at::Tensor&, const MeshPtr&)>;
void expect_wanted(at::IntArrayRef sizes, const AdafactorOptions& options, const MeshPtr& mesh,
                   const Lay& lay, const std::string& what) {
  at::Tensor w = lay(start(sizes), mesh).detach().requires_grad_();
  FusedOptimizer optimizer({w}, options);
  for (int s = 0; s < kSteps; ++s) {
    w.mutable_grad() = lay(gradient(sizes, s), mesh);
    optimizer.step();
  }
  EXPECT_TRUE(at::allclose(full_tensor(w.detach()), wanted(sizes, options), 1e-9, 1e-12)) << what;
}

TEST(AdafactorTest, OnOneDevice) {
  for (const Sizes& sizes : {Sizes{7, 5}, {5}, {3, 4, 5}, {1, 6}}) {
    for (const AdafactorOptions& options :
         {AdafactorOptions{}, kOptions, {.lr = 2, .eps1 = 0.3, .eps2 = 0.7}}) {
      at::Tensor w = start(sizes).requires_grad_();
      at::Tensor single = start(sizes).to(at::kFloat).requires_grad_();
      FusedOptimizer optimizer({w, single}, options);
      for (int s = 0; s < kSteps; ++s) {
        w.mutable_grad() = gradient(sizes, s);
        single.mutable_grad() = gradient(sizes, s).to(at::kFloat);
        optimizer.step();
      }
      const at::Tensor expected = wanted(sizes, options);
      EXPECT_TRUE(at::allclose(w.detach(), expected, 1e-9, 1e-12)) << at::IntArrayRef(sizes);
      EXPECT_TRUE(at::allclose(single.detach().to(at::kDouble), expected, 1e-4, 1e-5))
          << at::IntArrayRef(sizes);
    }
  }
}

TEST(AdafactorTest, OnEveryLayout) {
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"x", 2}}, {{"x", 3}}, {{"x", 2}, {"y", 2}}, {{"x", 8}}}) {
    on_mesh(dims, [](const MeshPtr& mesh) {
      for (const Sizes& sizes : {Sizes{7, 5}, {5}, {3, 4, 5}}) {
        const int ndim = static_cast<int>(sizes.size());
        for (const Placements& p : testing::all_layouts(mesh->mesh().ndim(), ndim, false)) {
          const Lay lay = [&](const at::Tensor& t, const MeshPtr& m) {
            return distribute_tensor(t, m, p, {.source = std::nullopt});
          };
          expect_wanted(sizes, kOptions, mesh, lay, to_string(p));
        }
      }
    });
  }
}

TEST(AdafactorTest, WithRaggedRowsAndAnOrderOfCuts) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const auto laid = [](const Layout& layout) {
      return [layout](const at::Tensor& t, const MeshPtr& m) {
        return redistribute(distribute_tensor(t, m, {}, {.source = std::nullopt}), layout);
      };
    };
    const std::vector<Layout> layouts = {
        Layout({RaggedShard(0, {6, 1}), Shard(1)}),
        Layout({RaggedShard(0, {0, 7}), Replicate()}),
        Layout({Shard(1), RaggedShard(1, {3, 0})}),
        Layout({Shard(0), RaggedShard(0, {1, 3})}),
        *Layout::create({Shard(0), Shard(0)}, {1, 0}),
        *Layout::create({Shard(1), Shard(1)}, {1, 0}),
    };
    for (const Layout& layout : layouts) {
      if (layout[1].kind() == PlacementKind::kRaggedShard) {
        expect_wanted({8, 6}, kOptions, mesh, laid(layout), layout.to_string());
      } else {
        expect_wanted({7, 5}, kOptions, mesh, laid(layout), layout.to_string());
      }
    }
  });
}

// Means of 32 bits: later steps are not lost in them.
TEST(AdafactorTest, OfNumbersOf16Bits) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      for (const Placements& p : testing::all_layouts(2, 2, false)) {
        at::Tensor whole = start({7, 5}).to(dtype).requires_grad_();
        at::Tensor w = distribute_tensor(start({7, 5}).to(dtype), mesh, p).requires_grad_();
        FusedOptimizer optimizer({whole, w}, kOptions);
        for (int s = 0; s < 5; ++s) {
          whole.mutable_grad() = gradient({7, 5}, s).to(dtype);
          w.mutable_grad() = distribute_tensor(gradient({7, 5}, s).to(dtype), mesh, p);
          optimizer.step();
        }
        EXPECT_EQ(optimizer.state(1, "row_var").scalar_type(), at::kFloat);
        EXPECT_EQ(w.scalar_type(), dtype);
        const at::Tensor got = full_tensor(w.detach()).to(at::kDouble);
        EXPECT_TRUE(at::allclose(got, whole.detach().to(at::kDouble), 0.02, 0.01)) << to_string(p);
        EXPECT_TRUE(at::allclose(got, wanted({7, 5}, kOptions, 5), 0.1, 0.05)) << to_string(p);
      }
    }
  });
}

// However many parameters there are: two rounds of one all-reduce for each mesh dimension, and no
// operator on DTensors.
TEST(AdafactorTest, SendsTwiceAlongEachMeshDimension) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < 30; ++i) {
      const Placements layouts[] = {{Shard(0), Replicate()},
                                    {Replicate(), Shard(1)},
                                    {Shard(0), Shard(1)},
                                    {Replicate(), Replicate()},
                                    {Shard(0), Shard(0)}};
      parameters.push_back(zeros({7, 5 + i}, mesh, layouts[i % 5]).requires_grad_());
      parameters.back().mutable_grad() = ones({7, 5 + i}, mesh, layouts[i % 5]);
    }
    FusedOptimizer optimizer(parameters, kOptions);
    const DispatchCounters before = dispatch_counters(mesh);
    for (int s = 0; s < 2; ++s) {
      CommTrace trace(mesh);
      optimizer.step();
      std::vector<std::string> sent;
      for (const CommEvent& event : trace.events()) {
        EXPECT_FALSE(event.implicit);
        if (!event.is_check) sent.push_back(event.collective + " " + event.mesh_dims.at(0));
        EXPECT_EQ(event.mesh_dims.size(), event.is_check ? 2u : 1u);
      }
      EXPECT_EQ(sent, (std::vector<std::string>{"all_reduce x", "all_reduce y", "all_reduce x",
                                                "all_reduce y"}));
      EXPECT_EQ(trace.events().size(), 5u);  // and one comparison
    }
    EXPECT_EQ(dispatch_counters(mesh), before);
    // What is whole on every rank needs nobody.
    at::Tensor w = zeros({7, 5}, mesh, {Replicate(), Replicate()}).requires_grad_();
    w.mutable_grad() = ones({7, 5}, mesh, {Replicate(), Replicate()});
    CommTrace trace(mesh);
    FusedOptimizer({w}, kOptions).step();
    EXPECT_TRUE(trace.events().empty());
  });
}

TEST(AdafactorTest, ItsStateLiesAsRowsAndColumnsAndResumes) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const Placements p = {Shard(0), Shard(1)};
    const auto fresh = [&] {
      return std::vector<at::Tensor>{
          distribute_tensor(start({7, 5}), mesh, p).requires_grad_(),
          distribute_tensor(start({5}), mesh, {{"x", Shard(0)}}).requires_grad_(),
          start({3, 2}).requires_grad_()};
    };
    const auto step = [&](FusedOptimizer& optimizer, int s) {
      const std::vector<at::Tensor>& w = optimizer.parameters();
      w[0].mutable_grad() = distribute_tensor(gradient({7, 5}, s), mesh, p);
      w[1].mutable_grad() = distribute_tensor(gradient({5}, s), mesh, {{"x", Shard(0)}});
      w[2].mutable_grad() = gradient({3, 2}, s);
      optimizer.step();
    };
    using Names = std::vector<std::string_view>;
    FusedOptimizer unbroken(fresh(), kOptions), first(fresh(), kOptions);
    EXPECT_EQ(first.state_names(0), (Names{"step", "row_var", "col_var"}));
    EXPECT_EQ(first.state_names(1), (Names{"step", "variance"}));
    EXPECT_EQ(first.state_names(), (Names{"step", "row_var", "col_var", "variance"}));
    EXPECT_EQ(layout_of(first.state(0, "row_var")), Layout({Shard(0), Replicate()}));
    EXPECT_EQ(layout_of(first.state(0, "col_var")), Layout({Replicate(), Shard(1)}));
    EXPECT_EQ(first.state(0, "row_var").sizes(), at::IntArrayRef({7, 1}));
    EXPECT_EQ(first.state(2, "col_var").sizes(), at::IntArrayRef({1, 2}));
    EXPECT_FALSE(first.state(0, "variance").defined());
    EXPECT_THROW(first.state(0, "exp_avg"), Error);
    for (int s = 0; s < 4; ++s) step(unbroken, s);
    for (int s = 0; s < 2; ++s) step(first, s);
    FusedOptimizer second(first.parameters(), kOptions);
    for (size_t i = 0; i < 3; ++i) {
      for (const std::string_view name : first.state_names(i)) {
        at::Tensor saved = first.state(i, name).clone();
        if (is_dtensor(saved)) saved = redistribute(saved, NamedPlacements());
        second.set_state(i, name, saved);
      }
    }
    for (int s = 2; s < 4; ++s) step(second, s);
    for (size_t i = 0; i < 3; ++i) {
      const auto whole = [](const at::Tensor& t) { return is_dtensor(t) ? full_tensor(t) : t; };
      EXPECT_TRUE(at::equal(whole(second.parameters()[i].detach()),
                            whole(unbroken.parameters()[i].detach())));
    }
    EXPECT_THROW(second.set_state(0, "row_var", zeros({7, 5}, mesh, p)), Error);
  });
}

// Every rank hears of it, nothing has changed, and the mesh is as good as before.
TEST(AdafactorTest, WhatOneRankDoesOtherwiseIsAnErrorOnAll) {
  const auto refused = [](const std::function<void(FusedOptimizer&, bool)>& otherwise,
                          const std::string& part, absl::StatusCode on_one) {
    on_mesh({{"x", 2}, {"y", 2}}, [&](const MeshPtr& mesh) {
      const Placements p = {Shard(0), Shard(1)};
      const bool is_one = mesh->coordinate()[0] == 1 && mesh->coordinate()[1] == 0;
      const at::Tensor a = distribute_tensor(start({7, 5}), mesh, p).requires_grad_();
      const at::Tensor b = distribute_tensor(start({5, 3}), mesh, p).requires_grad_();
      FusedOptimizer optimizer({a, b}, kOptions);
      a.mutable_grad() = distribute_tensor(gradient({7, 5}, 0), mesh, p);
      b.mutable_grad() = distribute_tensor(gradient({5, 3}, 0), mesh, p);
      otherwise(optimizer, is_one);
      try {
        optimizer.step();
        ADD_FAILURE() << "stepped: " << part;
      } catch (const Error& error) {
        if (on_one == absl::StatusCode::kInvalidArgument || is_one) {
          EXPECT_EQ(error.status().code(), on_one);
          EXPECT_THAT(error.what_without_backtrace(), HasSubstr(part));
        } else {
          EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
          EXPECT_THAT(error.what_without_backtrace(), HasSubstr("refused on other ranks"));
        }
      }
      EXPECT_TRUE(at::equal(full_tensor(a.detach()), start({7, 5})));
      EXPECT_TRUE(at::equal(full_tensor(b.detach()), start({5, 3})));
    });
  };
  refused(
      [](FusedOptimizer& o, bool is_one) {
        if (is_one) o.zero_grad();
      },
      "parameter 0 is not stepped alike on ranks", absl::StatusCode::kInvalidArgument);
  refused(
      [](FusedOptimizer& o, bool is_one) {
        if (is_one) o.set_lr(0.5);
      },
      "or options or steps differ", absl::StatusCode::kInvalidArgument);
  refused(
      [](FusedOptimizer& o, bool is_one) {
        if (is_one) optim_internal::put_state(o, 1, "step", at::scalar_tensor(3));
      },
      "parameter 1 is not stepped alike", absl::StatusCode::kInvalidArgument);
  refused(
      [](FusedOptimizer& o, bool is_one) {
        if (!is_one) return;
        const at::Tensor& b = o.parameters()[1];
        b.mutable_grad() = from_local(at::ones({5, 3}), mesh_of(b), {Replicate(), Partial()},
                                      std::vector<int64_t>{5, 3});
      },
      "parameter 1 lies [S(0), S(1)], its gradient [R, P(sum)]",
      absl::StatusCode::kFailedPrecondition);
}

TEST(AdafactorTest, RefusesOptionsOutOfRange) {
  const auto refused = [](const AdafactorOptions& options, const std::string& part) {
    try {
      FusedOptimizer optimizer({start({2, 2}).requires_grad_()}, options);
      ADD_FAILURE() << "took it: " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr(part));
    }
  };
  refused({.lr = -1}, "lr is -1");
  refused({.lr = std::numeric_limits<double>::infinity()}, "lr is inf; wanted a finite number");
  refused({.beta2_decay = 0}, "beta2_decay is 0; wanted less than 0");
  refused({.eps1 = -1}, "eps1 is -1");
  refused({.eps2 = std::nan("")}, "eps2 is nan");
  refused({.clip_threshold = 0}, "clip_threshold is 0");
  refused({.weight_decay = -1}, "weight_decay is -1");
}

}  // namespace
}  // namespace shardweave

// The numbers are those of torch.optim.Muon's documented algorithm, wherever matrices are cut; each
// is made orthogonal by one rank of those that have parts of it.
#include "shardweave/modules/optim/muon.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>
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
  const at::Tensor n = at::arange(c10::multiply_integers(sizes), at::kDouble);
  return at::cos(n * (1.3 + 0.1 * step) + n * n).view(sizes);
}

// https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html, in double precision.
at::Tensor wanted(at::IntArrayRef sizes, const MuonOptions& o, int steps = kSteps) {
  at::Tensor w = start(sizes), buffer = at::zeros_like(w);
  for (int s = 0; s < steps; ++s) {
    const at::Tensor g = gradient(sizes, s);
    buffer = o.momentum * buffer + (1 - o.momentum) * g;
    at::Tensor x = o.nesterov ? (1 - o.momentum) * g + o.momentum * buffer : buffer;
    const bool is_tall = sizes[0] > sizes[1];
    if (is_tall) x = x.t();
    x = x / std::max(x.norm().item<double>(), o.eps);
    for (int i = 0; i < o.ns_steps; ++i) {
      const at::Tensor a = x.matmul(x.t());
      x = o.ns_a * x + (o.ns_b * a + o.ns_c * a.matmul(a)).matmul(x);
    }
    if (is_tall) x = x.t();
    const auto rows = static_cast<double>(sizes[0]), columns = static_cast<double>(sizes[1]);
    const double scale = o.lr_scale == MuonLrScale::kOriginal
                             ? std::sqrt(std::max(1.0, rows / columns))
                             : 0.2 * std::sqrt(std::max(rows, columns));
    w = w * (1 - o.lr * o.weight_decay) - o.lr * scale * x;
  }
  return w;
}

const MuonOptions kOptions = {.lr = 0.05, .weight_decay = 0.2, .ns_dtype = at::kDouble};

using Lay = std::function<at::Tensor(const at::Tensor&)>;
at::Tensor stepped(at::IntArrayRef sizes, const MuonOptions& options, const Lay& lay,
                   at::ScalarType dtype = at::kDouble) {
  at::Tensor w = lay(start(sizes).to(dtype)).detach().requires_grad_();
  FusedOptimizer optimizer({w}, options);
  for (int s = 0; s < kSteps; ++s) {
    w.mutable_grad() = lay(gradient(sizes, s).to(dtype));
    optimizer.step();
  }
  return w.detach();
}

TEST(MuonTest, OnOneDevice) {
  for (const Sizes& sizes : {Sizes{7, 5}, {5, 7}, {4, 4}, {1, 6}}) {
    for (const MuonOptions& options :
         {kOptions,
          MuonOptions{.lr = 0.05, .momentum = 0.5, .nesterov = false, .ns_dtype = at::kDouble},
          MuonOptions{.lr = 0.05,
                      .ns_steps = 3,
                      .ns_a = 3,
                      .ns_b = -3.2,
                      .ns_c = 1.2,
                      .lr_scale = MuonLrScale::kMatchRmsAdamW,
                      .ns_dtype = at::kDouble}}) {
      const at::Tensor got = stepped(sizes, options, [](const at::Tensor& t) { return t; });
      EXPECT_TRUE(at::allclose(got, wanted(sizes, options), 1e-9, 1e-9)) << at::IntArrayRef(sizes);
    }
    // As it is by default: the iteration in bfloat16, the parameter in float32.
    const MuonOptions options = {.lr = 0.05, .weight_decay = 0.2};
    const at::Tensor got =
        stepped(sizes, options, [](const at::Tensor& t) { return t; }, at::kFloat);
    EXPECT_EQ(got.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::allclose(got.to(at::kDouble), wanted(sizes, options), 0, 0.15))
        << at::IntArrayRef(sizes);
  }
}

// On all layouts the formula's numbers; and, since the matrix is whole where it is worked on, the
// bits of one device where momentum has those, bfloat16 included.
TEST(MuonTest, OnEveryLayout) {
  const Lay plain = [](const at::Tensor& t) { return t; };
  const MuonOptions narrow = {.lr = 0.05};
  for (const Sizes& sizes : {Sizes{7, 5}, {5, 8}}) {
    const at::Tensor expected = wanted(sizes, kOptions);
    const at::Tensor on_one = stepped(sizes, narrow, plain, at::kFloat);
    for (const std::vector<MeshDim>& dims :
         {std::vector<MeshDim>{{"x", 2}}, {{"x", 3}}, {{"x", 2}, {"y", 2}}, {{"x", 8}}}) {
      on_mesh(dims, [&](const MeshPtr& mesh) {
        std::vector<Layout> layouts;
        for (const Placements& p : testing::all_layouts(mesh->mesh().ndim(), 2, false)) {
          layouts.emplace_back(p);
        }
        if (dims.size() == 2) {
          layouts.push_back(*Layout::create({Shard(0), Shard(0)}, {1, 0}));
          layouts.push_back(Layout({RaggedShard(0, {sizes[0] - 1, 1}), Shard(1)}));
          layouts.push_back(Layout({RaggedShard(0, {0, sizes[0]}), Replicate()}));
          layouts.push_back(Layout({Shard(1), StridedShard(0, 2)}));
        }
        for (const Layout& layout : layouts) {
          const Lay lay = [&](const at::Tensor& t) {
            return redistribute(distribute_tensor(t, mesh, {}, {.source = std::nullopt}), layout);
          };
          EXPECT_TRUE(
              at::allclose(full_tensor(stepped(sizes, kOptions, lay)), expected, 1e-9, 1e-9))
              << layout;
          EXPECT_TRUE(at::equal(full_tensor(stepped(sizes, narrow, lay, at::kFloat)), on_one))
              << layout;
        }
      });
    }
  }
}

TEST(MuonTest, OwnersHaveAboutAsMuchToDo) {
  using optim_internal::muon_owners;
  using Matrices = std::vector<std::array<int64_t, 2>>;
  EXPECT_EQ(muon_owners(Matrices{{64, 64}}, 4), std::vector<int>({0}));
  EXPECT_EQ(muon_owners(Matrices{{8, 8}, {8, 8}, {8, 8}, {16, 16}}, 2),
            std::vector<int>({1, 1, 1, 0}));
  EXPECT_EQ(muon_owners(Matrices{}, 3), std::vector<int>());
  Matrices sizes;
  for (int64_t i = 0; i < 200; ++i) sizes.push_back({64 + i * 37 % 512, 64 + i * 91 % 1024});
  const std::vector<int> owners = muon_owners(sizes, 7);
  std::vector<double> load(7, 0);
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto small = static_cast<double>(std::min(sizes[i][0], sizes[i][1]));
    const auto large = static_cast<double>(std::max(sizes[i][0], sizes[i][1]));
    load[static_cast<size_t>(owners[i])] += small * small * (2 * large + small);
  }
  const auto [least, most] = std::minmax_element(load.begin(), load.end());
  EXPECT_LT(*most, 1.01 * *least);
}

// However many matrices: there and back. As many all-to-alls as there are sets of mesh dimensions over
// which matrices are cut, twice, and what is sent are the parts in the iteration's dtype.
TEST(MuonTest, SendsTwiceForAllThatIsCutAlike) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const auto sent = [&](const std::vector<Placements>& layouts) {
      std::vector<at::Tensor> parameters;
      for (int i = 0; i < 24; ++i) {
        const Placements& p = layouts[i % layouts.size()];
        parameters.push_back(zeros({8, 4 + 4 * i}, mesh, p).requires_grad_());
        parameters.back().mutable_grad() = ones({8, 4 + 4 * i}, mesh, p);
      }
      FusedOptimizer optimizer(parameters, MuonOptions{});
      const DispatchCounters before = dispatch_counters(mesh);
      CommTrace trace(mesh);
      optimizer.step();
      EXPECT_EQ(dispatch_counters(mesh), before);
      int64_t all_to_alls = 0, bytes = 0;
      for (const CommEvent& event : trace.events()) {
        if (event.is_check) continue;
        EXPECT_EQ(event.collective, "all_to_all");
        EXPECT_EQ(event.dtype, at::kBFloat16);
        ++all_to_alls;
        bytes += event.bytes;
      }
      return std::pair(all_to_alls, bytes);
    };
    EXPECT_EQ(sent({{Replicate(), Replicate()}}).first, 0);
    EXPECT_EQ(sent({{Shard(0), Shard(1)}, {Shard(1), Shard(0)}}).first, 2);
    EXPECT_EQ(sent({{Shard(0), Replicate()}, {Replicate(), Shard(0)}, {Shard(0), Shard(0)}}).first,
              6);
    // Half of the parts of 24 matrices go to the other rank of two, and half of the results come back.
    const auto [calls, bytes] = sent({{Shard(0), Replicate()}});
    EXPECT_EQ(calls, 2);
    int64_t numel = 0;
    for (int i = 0; i < 24; ++i) numel += int64_t{8} * (4 + 4 * i);
    EXPECT_NEAR(static_cast<double>(bytes), static_cast<double>(numel / 2 * 2), 0.1 * numel);
  });
}

TEST(MuonTest, ResumesFromItsMomentum) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const auto lay = [&](const at::Tensor& t) {
      return distribute_tensor(t, mesh, Placements{Shard(0)});
    };
    const auto step = [&](FusedOptimizer& optimizer, int s) {
      optimizer.parameters()[0].mutable_grad() = lay(gradient({7, 5}, s));
      optimizer.step();
    };
    FusedOptimizer unbroken({lay(start({7, 5})).requires_grad_()}, kOptions);
    FusedOptimizer first({lay(start({7, 5})).requires_grad_()}, kOptions);
    EXPECT_EQ(first.state_names(0), (std::vector<std::string_view>{"step", "momentum_buffer"}));
    EXPECT_EQ(layout_of(first.state(0, "momentum_buffer")), Layout({Shard(0)}));
    for (int s = 0; s < 4; ++s) step(unbroken, s);
    for (int s = 0; s < 2; ++s) step(first, s);
    FusedOptimizer second(first.parameters(), kOptions);
    for (const std::string_view name : first.state_names(0)) {
      second.set_state(0, name, first.state(0, name).clone());
    }
    for (int s = 2; s < 4; ++s) step(second, s);
    EXPECT_TRUE(at::equal(full_tensor(second.parameters()[0].detach()),
                          full_tensor(unbroken.parameters()[0].detach())));
  });
}

TEST(MuonTest, RanksThatStepOtherwiseHearOfIt) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const Placements p = {Replicate(), Shard(0)};
    const at::Tensor w = distribute_tensor(start({7, 5}), mesh, p).requires_grad_();
    FusedOptimizer optimizer({w}, kOptions);
    const bool is_one = mesh->coordinate()[0] == 1 && mesh->coordinate()[1] == 0;
    if (!is_one)
      w.mutable_grad() = distribute_tensor(gradient({7, 5}, 0), mesh, p, {.source = std::nullopt});
    try {
      optimizer.step();
      ADD_FAILURE() << "stepped";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr("parameter 0 is not stepped alike"));
    }
    EXPECT_TRUE(at::equal(full_tensor(w.detach()), start({7, 5})));
  });
}

// To look at a state makes it, on that rank alone; Adafactor's, too.
TEST(MuonTest, ARankMayLookAtAState) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    for (const FusedOptimizer::Options& options :
         {FusedOptimizer::Options(kOptions), FusedOptimizer::Options(AdafactorOptions{})}) {
      const Placements p = {Shard(0)};
      const at::Tensor w = distribute_tensor(start({7, 5}), mesh, p).requires_grad_();
      FusedOptimizer optimizer({w}, options);
      if (mesh->coordinate()[0] == 1) {
        EXPECT_EQ(optimizer.state(0, "step").item<float>(), 0);
      }
      w.mutable_grad() = distribute_tensor(gradient({7, 5}, 0), mesh, p);
      EXPECT_NO_THROW(optimizer.step());
      EXPECT_EQ(optimizer.state(0, "step").item<float>(), 1);
    }
  });
}

TEST(MuonTest, RefusesWhatItCannotTake) {
  const auto refused = [](const at::Tensor& w, const MuonOptions& options,
                          const std::string& part) {
    try {
      FusedOptimizer optimizer({w}, options);
      ADD_FAILURE() << "took it: " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr(part));
    }
  };
  const at::Tensor w = start({4, 3}).requires_grad_();
  refused(start({4}).requires_grad_(), {}, "parameter 0 has shape [4]; Muon wants two dimensions");
  refused(start({2, 2, 3}).requires_grad_(), {}, "muon_groups() makes both");
  refused(w, {.lr = -1}, "lr is -1");
  refused(w, {.weight_decay = -1}, "weight_decay is -1");
  refused(w, {.momentum = 1}, "momentum is 1");
  refused(w, {.ns_steps = 0}, "ns_steps is 0");
  refused(w, {.ns_steps = 100}, "ns_steps is 100");
  refused(w, {.ns_a = HUGE_VAL}, "ns_a is inf");
  refused(w, {.eps = 0}, "eps is 0");
  refused(w, {.ns_dtype = at::kHalf}, "ns_dtype is Half");
}

}  // namespace
}  // namespace shardweave

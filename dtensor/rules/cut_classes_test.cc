// Softmax, negative log likelihood and cross entropy where the classes are cut: values and gradients
// of one device, and nothing as large as the logits is sent.
#include <algorithm>
#include <limits>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/expect_comms.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/op_check.h"

namespace shardweave {
namespace {

using testing::all_reduce;
using testing::check_ops;
using ::testing::HasSubstr;
using testing::in;
using testing::on_mesh;
using testing::OpCase;
using testing::Tensors;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(CutClassesTest, Softmax) {
  std::vector<OpCase> cases;
  for (int64_t dim : {0, 1, -1}) {
    cases.push_back({absl::StrCat("softmax ", dim), {in({7, 3, 5})}, [dim](const Tensors& x) {
                       return Tensors{at::softmax(x[0], dim)};
                     }});
    cases.push_back({absl::StrCat("log_softmax ", dim), {in({7, 3, 5})}, [dim](const Tensors& x) {
                       return Tensors{at::log_softmax(x[0], dim)};
                     }});
  }
  cases.push_back({"log_softmax of a transposed", {in({7, 5}).transposed()}, [](const Tensors& x) {
                     return Tensors{at::log_softmax(x[0], 1), at::softmax(x[0], 0)};
                   }});
  cases.push_back({"softmax of one line", {in({3})}, [](const Tensors& x) {
                     return Tensors{at::softmax(x[0], 0), at::log_softmax(x[0], 0)};
                   }});
  cases.push_back({"softmax to another dtype",
                   {in({7, 5}).dtype(at::kFloat)},
                   [](const Tensors& x) {
                     return Tensors{at::softmax(x[0], 1, at::kDouble),
                                    at::log_softmax(x[0], 1, at::kDouble)};
                   },
                   true,
                   1e-6});
  cases.push_back({"softmax of halves",
                   {in({7, 300}).dtype(at::kBFloat16)},
                   [](const Tensors& x) {
                     return Tensors{at::softmax(x[0], 1), at::log_softmax(x[0], 1),
                                    at::softmax(x[0], 1, at::kFloat)};
                   },
                   false,
                   2e-2});
  cases.push_back(
      {"gradients of halves",
       {in({7, 30}).dtype(at::kBFloat16), in({7, 30}).dtype(at::kBFloat16)},
       [](const Tensors& x) {
         return Tensors{
             at::_softmax_backward_data(x[0], at::softmax(x[1], 1), 1, at::kBFloat16),
             at::_log_softmax_backward_data(x[0], at::log_softmax(x[1], 1), 1, at::kBFloat16)};
       },
       false,
       4e-2});
  check_ops(cases);
}

// What no probability comes of: nothing but -inf, an inf, a nan.
TEST(CutClassesTest, LinesWithoutAnAnswerAreThoseOfOneDevice) {
  at::Tensor x = at::arange(35.0, at::kDouble).view({5, 7}).mul(0.1);
  x[0].fill_(-kInfinity);
  x[1].narrow(0, 0, 4).fill_(-kInfinity);
  x[2][6] = kInfinity;
  x[3][1] = std::numeric_limits<double>::quiet_NaN();
  x[4].mul_(1000).add_(1e8);
  for (int64_t n : {2, 3, 4}) {
    on_mesh({{"tp", n}}, [&](const MeshPtr& mesh) {
      for (const Placement& p : {Shard(1), StridedShard(1, 2)}) {
        const at::Tensor dx = distribute_tensor(x, mesh, Placements{p});
        const auto same = [](const at::Tensor& a, const at::Tensor& b) {
          EXPECT_EQ(layout_of(a).to_string().find("S("), 1u);
          EXPECT_TRUE(at::allclose(full_tensor(a), b, 1e-12, 1e-12, /*equal_nan=*/true))
              << full_tensor(a) << b;
        };
        same(at::softmax(dx, 1), at::softmax(x, 1));
        same(at::log_softmax(dx, 1), at::log_softmax(x, 1));
        same(at::_safe_softmax(dx, 1), at::_safe_softmax(x, 1));
      }
    });
  }
}

TEST(CutClassesTest, SoftmaxSendsAMaximumAndASum) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = at::arange(48.0, at::kDouble).view({6, 8}).sin();
    for (const Placements& placements :
         {Placements{Shard(0), Shard(1)}, Placements{Replicate(), Shard(1)},
          Placements{Shard(1), Shard(1)}}) {
      const at::Tensor dx = distribute_tensor(x, mesh, placements).requires_grad_();
      CommTrace trace(mesh);
      at::Tensor y = at::log_softmax(dx, 1);
      EXPECT_EQ(layout_of(y), layout_of(dx));
      EXPECT_COMMS(trace, {all_reduce().by("aten::_log_softmax").forward().implicitly(),
                           all_reduce().by("aten::_log_softmax").forward().implicitly()});
      const at::Tensor grad = distribute_tensor(x.cos(), mesh, placements);
      CommTrace back(mesh);
      y.backward(grad);
      EXPECT_COMMS(back, {all_reduce().by("aten::_log_softmax_backward_data")});
      EXPECT_EQ(layout_of(dx.grad()), layout_of(dx));
      const StrictScope strict(mesh);
      try {
        at::softmax(dx.detach(), 1);
        ADD_FAILURE() << "the strict scope let it send";
      } catch (const Error& e) {
        EXPECT_THAT(e.what(), HasSubstr("strict scope"));
      }
    }
  });
}

// A sum along another mesh dimension is reduced as it is cut, for this and for who asks later.
TEST(CutClassesTest, SoftmaxOfSumsThatAreCut) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = at::arange(48.0 * 8, at::kDouble).view({48, 8}).sin();
    const at::Tensor target = at::arange(48).remainder(8);
    for (const Placements& placements :
         {Placements{Shard(1), Partial()}, Placements{Partial(), Shard(1)}}) {
      const at::Tensor sum = testing::scattered(x, mesh, placements);
      const at::Tensor dtarget = distribute_tensor(target, mesh, Placements(2));
      CommTrace trace(mesh);
      const at::Tensor y = at::log_softmax(sum, 1);
      EXPECT_TRUE(layout_of(y)[0].is_shard(1) || layout_of(y)[1].is_shard(1))
          << layout_of(y).to_string();
      EXPECT_FALSE(layout_of(y).has_partial());
      // The half, once, and two numbers for each line.
      EXPECT_EQ(trace.events().size(), 3u) << trace.to_string();
      at::softmax(sum, 1);
      EXPECT_EQ(trace.events().size(), 5u) << trace.to_string();
      EXPECT_TRUE(at::allclose(full_tensor(y), at::log_softmax(x, 1)));
      EXPECT_TRUE(at::allclose(full_tensor(at::softmax(sum, 1)), at::softmax(x, 1)));
      EXPECT_TRUE(at::allclose(full_tensor(at::cross_entropy_loss(sum, dtarget)),
                               at::cross_entropy_loss(x, target)));
      // Of one that lies in whole lines already nothing is sent, and a gradient goes from there.
      const at::Tensor again = testing::scattered(x, mesh, placements);
      at::sort(again, 1);
      trace.clear();
      at::log_softmax(again, 1);
      EXPECT_EQ(trace.events().size(), 0u) << trace.to_string();
      const at::Tensor grad = at::_log_softmax_backward_data(again, y, 1, at::kDouble);
      EXPECT_COMMS(trace, {testing::all_to_all().implicitly(), all_reduce().implicitly()});
      EXPECT_TRUE(at::allclose(full_tensor(grad), at::_log_softmax_backward_data(
                                                      x, at::log_softmax(x, 1), 1, at::kDouble)));
    }
  });
}

// norm_loss_test.cc has more of them; here some ranks of four have no class.
TEST(CutClassesTest, NegativeLogLikelihood) {
  std::vector<OpCase> cases;
  for (int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    cases.push_back(
        {absl::StrCat("nll_loss ", reduction),
         {in({5, 3}), in({5}).integers(0, 3), in({3}).uniform(1, 2).constant()},
         [=](const Tensors& x) { return Tensors{at::nll_loss(x[0], x[1], x[2], reduction, 1)}; }});
    cases.push_back({absl::StrCat("nll_loss of one ", reduction),
                     {in({5}), in({}).integers(0, 5), in({5}).uniform(1, 2).constant()},
                     [reduction](const Tensors& x) {
                       return Tensors{at::nll_loss(x[0], x[1], x[2], reduction)};
                     }});
  }
  check_ops(cases);
}

TEST(CutClassesTest, CrossEntropy) {
  std::vector<OpCase> cases;
  for (int64_t reduction : {at::Reduction::None, at::Reduction::Mean}) {
    cases.push_back({absl::StrCat("cross_entropy smoothed, weighted, ignoring ", reduction),
                     {in({5, 7}), in({5}).integers(0, 7), in({7}).uniform(1, 2).constant()},
                     [=](const Tensors& x) {
                       return Tensors{at::cross_entropy_loss(x[0], x[1], x[2], reduction, 2, 0.1)};
                     }});
    cases.push_back({absl::StrCat("cross_entropy of probabilities ", reduction),
                     {in({5, 7}), in({5, 7}).uniform(0, 1)},
                     [=](const Tensors& x) {
                       return Tensors{at::cross_entropy_loss(x[0], x[1], {}, reduction, -100, 0.1)};
                     }});
  }
  check_ops(cases);
}

at::Tensor logits() {
  return at::arange(6.0 * 64, at::kDouble).view({6, 64}).sin();
}

int64_t largest(const CommTrace& trace) {
  int64_t bytes = 0;
  for (const CommEvent& event : trace.events()) bytes = std::max(bytes, event.bytes);
  return bytes;
}

TEST(CutClassesTest, CrossEntropySendsNoLogits) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const at::Tensor y = at::tensor({0, 63, 17, -100, 16, 5}, at::kLong);
    const at::Tensor target = distribute_tensor(y, mesh, Placements{Replicate()});
    for (int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
      for (bool weighted : {false, true}) {
        const at::Tensor w = at::arange(64.0, at::kDouble).add(1);
        at::Tensor x = logits().requires_grad_();
        at::Tensor dx = distribute_tensor(logits(), mesh, Placements{Shard(1)}).requires_grad_();
        const at::Tensor dw = distribute_tensor(w, mesh, Placements{Shard(0)});
        const auto loss = [&](const at::Tensor& l, const at::Tensor& t, const at::Tensor& v) {
          return at::cross_entropy_loss(l, t, weighted ? v : at::Tensor(), reduction);
        };
        CommTrace trace(mesh);
        const at::Tensor dl = loss(dx, target, dw);
        const at::Tensor value = full_tensor(dl);
        // A maximum, a sum, the loss.
        EXPECT_COMMS(trace, {{"all_reduce", 3}});
        EXPECT_LE(largest(trace), 2 * 6 * 8);
        const at::Tensor l = loss(x, y, w);
        EXPECT_TRUE(at::allclose(value, l, 1e-12, 1e-12));
        at::Tensor grad = l.detach().cos();
        l.backward(grad);
        const at::Tensor dgrad = distribute_tensor(grad, mesh, Placements{Replicate()});
        CommTrace back(mesh);
        dl.backward(dgrad);
        EXPECT_COMMS(back, {all_reduce()});
        EXPECT_LE(largest(back), 2 * 6 * 8);
        EXPECT_EQ(layout_of(dx.grad()).to_string(), "[S(1)]");
        EXPECT_TRUE(at::allclose(full_tensor(dx.grad()), x.grad(), 1e-12, 1e-12));
      }
    }
  });
}

TEST(CutClassesTest, SmoothedLabelsAndProbabilitiesSendNoLogits) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const at::Tensor labels = at::tensor({0, 63, 17, -100, 16, 5}, at::kLong);
    for (const at::Tensor& y : {labels, at::softmax(logits().cos(), 1)}) {
      const bool soft = y.dim() == 2;
      for (int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
        for (bool weighted : {false, true}) {
          const at::Tensor w = at::arange(64.0, at::kDouble).add(1);
          at::Tensor x = logits().requires_grad_();
          at::Tensor dx = distribute_tensor(logits(), mesh, Placements{Shard(1)}).requires_grad_();
          const at::Tensor dw = distribute_tensor(w, mesh, Placements{Shard(0)});
          const at::Tensor dy =
              distribute_tensor(y, mesh, Placements{soft ? Shard(1) : Replicate()});
          const auto loss = [&](const at::Tensor& l, const at::Tensor& t, const at::Tensor& v) {
            return at::cross_entropy_loss(l, t, weighted ? v : at::Tensor(), reduction, -100, 0.1);
          };
          CommTrace trace(mesh);
          const at::Tensor dl = loss(dx, dy, dw);
          const at::Tensor value = full_tensor(dl);
          const at::Tensor l = loss(x, y, w);
          EXPECT_TRUE(at::allclose(value, l, 1e-12, 1e-12));
          const at::Tensor grad = l.detach().cos();
          l.backward(grad);
          dl.backward(distribute_tensor(grad, mesh, Placements{Replicate()}));
          EXPECT_TRUE(at::allclose(full_tensor(dx.grad()), x.grad(), 1e-12, 1e-12));
          EXPECT_EQ(layout_of(dx.grad()).to_string(), "[S(1)]");
          for (const CommEvent& event : trace.events()) {
            // full_tensor() of the gradient is the test's own.
            if (!event.implicit) continue;
            EXPECT_LE(event.bytes, 2 * 6 * 8) << event.op << " " << reduction << weighted << soft;
          }
        }
      }
    }
  });
}

TEST(CutClassesTest, TargetsOutOfRangeAreRefusedByAll) {
  for (int64_t bad : {7, -1}) {
    on_mesh({{"tp", 3}}, [&](const MeshPtr& mesh) {
      const at::Tensor x = distribute_tensor(at::zeros({2, 7}), mesh, Placements{Shard(1)});
      const at::Tensor y = distribute_tensor(at::tensor({int64_t{2}, bad}, at::kLong), mesh,
                                             Placements{Replicate()});
      try {
        at::nll_loss(x, y);
        ADD_FAILURE() << "took " << bad;
      } catch (const c10::IndexError& e) {
        EXPECT_THAT(e.what(), HasSubstr(absl::StrCat("Target ", bad, " is out of bounds")));
      }
      EXPECT_EQ(full_tensor(at::nll_loss(x, y, {}, at::Reduction::Sum, bad)).item<double>(), 0);
    });
  }
}

}  // namespace
}  // namespace shardweave

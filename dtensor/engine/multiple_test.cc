// A sum that goes through -x or x * 2 as it is, is reduced once for both, and nobody gets what either
// was before it was written.

#include "shardweave/dtensor/engine/multiple.h"

#include <functional>
#include <string>

#include "ATen/ATen.h"
#include "c10/core/InferenceMode.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/observe/explain.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using at::Tensor;
using testing::on_mesh;
using testing::scattered;

Tensor numbers(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kDouble).sub_(7).div_(5).view(sizes);
}

void expect_value(const Tensor& got, const Tensor& want) {
  EXPECT_TRUE(at::allclose(full_tensor(got), want)) << full_tensor(got) << "\nwanted\n" << want;
}

int64_t held_bytes(const MeshPtr& mesh) {
  return dispatch_counters(mesh).remembered_bytes;
}

TEST(MultipleTest, ItsSumIsReducedForBoth) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 5});
    for (const bool multiple_first : {true, false}) {
      const Tensor x = scattered(whole, mesh, {Partial()});
      const Tensor n = x.neg();
      const Tensor half = n / 2;  // a multiple of a multiple
      const Tensor other = 3.0 * x;
      ASSERT_EQ(layout_of(half), Layout({Partial()}));
      const CommTrace trace(mesh);
      if (!multiple_first) expect_value(x.exp(), whole.exp());
      expect_value(half.exp(), (-whole / 2).exp());
      EXPECT_EQ(trace.events().size(), 1u) << trace.to_string();
      expect_value(x.exp(), whole.exp());
      expect_value(n.exp(), (-whole).exp());
      expect_value(n.t().exp(), (-whole.t()).exp());
      expect_value(other.exp(), (whole * 3).exp());
      expect_value(at::softmax(other, 1), at::softmax(whole * 3, 1));
      EXPECT_EQ(trace.events().size(), 1u) << trace.to_string();
    }
    EXPECT_EQ(held_bytes(mesh), 0);
  });
}

// The way of a gradient through q / q.norm().
TEST(MultipleTest, OfAQuotientTheGradientIsReducedOnce) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const Tensor q0 = numbers({6, 4}).cos(), k0 = numbers({6, 4}).sin();
    const auto loss = [](const Tensor& q, const Tensor& k) {
      const Tensor qn = q / q.norm(2, 1, true), kn = k / k.norm(2, 1, true);
      return qn.mm(kn.t()).logsumexp(1).sum();
    };
    const Tensor q1 = q0.clone().requires_grad_(), k1 = k0.clone().requires_grad_();
    loss(q1, k1).backward();
    const Tensor q = distribute_tensor(q0, mesh, Placements{Shard(0)}).requires_grad_();
    const Tensor k = distribute_tensor(k0, mesh, Placements{Shard(0)}).requires_grad_();
    const Tensor one = loss(q, k);
    const CommTrace trace(mesh);
    one.backward();
    int large = 0;
    for (const CommEvent& event : trace.events()) large += event.bytes >= 3 * 4 * 8;
    EXPECT_EQ(large, 1) << trace.to_string();
    expect_value(q.grad(), q1.grad());
    expect_value(k.grad(), k1.grad());
  });
}

TEST(MultipleTest, AWriteToEitherEndsIt) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 6});
    for (const std::string written :
         {"sum", "multiple", "view of the sum", "view of the multiple"}) {
      for (const bool reduced_before : {false, true}) {
        SCOPED_TRACE(written);
        const c10::AutoGradMode no_grad(false);
        Tensor x = scattered(whole, mesh, {Partial()});
        Tensor n = x * -2;
        if (reduced_before) n.exp();
        const bool of_sum = written.find("sum") != std::string::npos;
        Tensor& target = of_sum ? x : n;
        if (written.find("view") == std::string::npos) {
          target.mul_(5);
        } else {
          target.narrow(0, 1, 2).mul_(5);
        }
        Tensor want_x = whole.clone(), want_n = whole * -2;
        Tensor& want = of_sum ? want_x : want_n;
        if (written.find("view") == std::string::npos) {
          want.mul_(5);
        } else {
          want.narrow(0, 1, 2).mul_(5);
        }
        expect_value(n.exp(), want_n.exp());
        expect_value(x.exp(), want_x.exp());
        expect_value(n.exp(), want_n.exp());
      }
    }
  });
}

// Of a view that was brought here for it, and goes back.
TEST(MultipleTest, AndOneToACopy) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const c10::AutoGradMode no_grad(false);
    const Tensor whole = numbers({4, 6});
    for (const bool of_sum : {false, true}) {
      const Tensor x = scattered(whole, mesh, {Partial(), Shard(0)});
      const Tensor n = x * -2;
      Tensor want_x = whole.clone(), want_n = whole * -2;
      (of_sum ? x : n).select(0, 3).mul_(5);
      (of_sum ? want_x : want_n).select(0, 3).mul_(5);
      expect_value(n.exp(), want_n.exp());
      expect_value(x.exp(), want_x.exp());
    }
  });
}

// A view of what is remembered whole is one of that, which goes back to the sum.
TEST(MultipleTest, AndOneToAViewOfWhatTheSumIsRememberedAs) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const c10::AutoGradMode no_grad(false);
    const Tensor whole = numbers({4, 6});
    const std::function<Tensor(const Tensor&)> views[] = {
        [](const Tensor& t) { return t.detach(); }, [](const Tensor& t) { return t.t(); },
        [](const Tensor& t) { return t.select(1, 0); },
        [](const Tensor& t) { return t.view({24}); }};
    for (const auto& view : views) {
      for (const bool of_sum : {true, false}) {
        const Tensor x = scattered(whole, mesh, {Partial()});
        const Tensor n = x * 2, other = x.neg();
        (of_sum ? x : n).relu();
        Tensor want_x = whole.clone(), want_n = whole * 2;
        view(of_sum ? x : n).zero_();
        view(of_sum ? want_x : want_n).zero_();
        expect_value(n.exp(), want_n.exp());
        expect_value(other.exp(), whole.neg().exp());
        expect_value(x.exp(), want_x.exp());
      }
    }
  });
}

// By an operator on the parts, which no DTensor sees.
TEST(MultipleTest, SoDoesAWriteToAPart) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 6});
    for (const bool of_sum : {false, true}) {
      const Tensor x = scattered(whole, mesh, {Partial()});
      const Tensor n = x * -2;
      to_local(of_sum ? x : n).mul_(5);
      expect_value(n.exp(), (whole * (of_sum ? -2 : -10)).exp());
      expect_value(x.exp(), (whole * (of_sum ? 5 : 1)).exp());
    }
  });
}

// What a number is later does not matter; what a tensor is might.
TEST(MultipleTest, ANumberThatMayChangeIsNoFactor) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 6});
    const Tensor x = scattered(whole, mesh, {Partial()});
    const Tensor factor = at::tensor(2.0, at::kDouble);
    const Tensor y = x * factor;
    ASSERT_EQ(layout_of(y), Layout({Partial()}));
    EXPECT_EQ(held_bytes(mesh), 0);
    factor.fill_(100);
    expect_value(y.exp(), (whole * 2).exp());
    expect_value(x.exp(), whole.exp());
  });
}

TEST(MultipleTest, NoOtherOperatorsAndNoOtherReductions) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 6});
    // The largest of -x is not that of x, negated; halves of integers are no integers.
    const int64_t rank = mesh->coordinate()[0];
    const auto parts = [&](const Tensor& local, ReduceOp reduce) {
      return from_local(local, mesh, {Partial(reduce)}, local.sizes().vec());
    };
    const Tensor largest = parts(whole - rank, ReduceOp::kMax);
    expect_value(largest.neg().exp(), whole.neg().exp());
    expect_value(largest.exp(), whole.exp());
    const Tensor integers = at::arange(24).view({4, 6});
    const Tensor i = parts(rank == 0 ? integers * 2 : -integers, ReduceOp::kSum);
    expect_value((i * 3).bitwise_and(7), (integers * 3).bitwise_and(7));
    expect_value(i / 2, integers / 2);
    expect_value(at::div(i, 4, "floor"), at::div(integers, 4, "floor"));
    // Averages are linear, too.
    const Tensor average = parts(whole + (1 - 2 * rank), ReduceOp::kAvg);
    const Tensor twice = average * 2;
    const CommTrace trace(mesh);
    expect_value(twice.exp(), (whole * 2).exp());
    expect_value(average.exp(), whole.exp());
    EXPECT_EQ(trace.events().size(), 1u) << trace.to_string();
  });
}

TEST(MultipleTest, OnSeveralMeshDimensions) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({5, 6});
    for (const Placements& placements :
         {Placements{Partial(), Partial()}, Placements{Shard(0), Partial()},
          Placements{Partial(), Replicate()}, Placements{Partial(), Shard(1)}}) {
      const Tensor x = scattered(whole, mesh, placements);
      const Tensor y = x / 3;
      const CommTrace trace(mesh);
      y.exp();
      const size_t once = trace.events().size();
      EXPECT_GE(once, 1u);
      x.exp();
      EXPECT_EQ(trace.events().size(), once) << trace.to_string();
      expect_value(y.exp(), (whole / 3).exp());
      expect_value(x.exp(), whole.exp());
    }
  });
}

// Ranks whose multiples are not of one number hear of it, also where a composed operator reduces them.
TEST(MultipleTest, RanksThatMultiplyByOtherNumbers) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const Tensor x = scattered(numbers({4, 6}), mesh, {Partial(), Shard(1)});
    const Tensor n = x * (2 + mesh->coordinate()[0]);
    EXPECT_THROW(at::softmax(n, 1), Error);
  });
}

// A rank alone may ask what an operator would cost, and a chain may be long.
TEST(MultipleTest, WhatARankAloneAsksChangesNothing) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 6});
    const Tensor x = scattered(whole, mesh, {Partial()});
    const Tensor y = x * 2;
    x.relu();
    if (mesh->coordinate()[0] == 0) explain("aten::exp", {y});
    const CommTrace trace(mesh);
    expect_value(y.exp(), (whole * 2).exp());
    if (mesh->coordinate()[0] == 1) explain("aten::exp", {y});
    expect_value(y.sin(), (whole * 2).sin());
    EXPECT_EQ(trace.events().size(), 0u) << trace.to_string();
    // What has not been reduced yet: copies, views and multiples of one rank alone.
    const Tensor z = scattered(whole, mesh, {Partial()});
    const Tensor n = z.neg();
    if (mesh->coordinate()[0] == 0) {
      explain("aten::exp", {n});
      explain("aten::exp", {z});
      to_local(n.detach()).sum();
      to_local(n.t());
      n.variable_data();
      n * 3;
    }
    expect_value(n.exp(), whole.neg().exp());
    expect_value(z.exp(), whole.exp());
  });
}

// A rank that has asked knows no more than the others when the sum is written.
TEST(MultipleTest, NorDoesItOnceTheSumIsWritten) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const c10::AutoGradMode no_grad(false);
    const Tensor whole = numbers({4, 6});
    for (const int asks : {0, 1, 2}) {
      Tensor x = scattered(whole, mesh, {Partial()});
      const Tensor n = x.neg();
      if (mesh->coordinate()[0] == 0 && asks == 2) n.detach();
      x.exp();
      if (mesh->coordinate()[0] == 0 && asks == 0) explain("aten::exp", {n});
      if (mesh->coordinate()[0] == 0 && asks == 1) n.neg();
      if (asks != 2) x.mul_(5);
      const CommTrace trace(mesh);
      expect_value(n.exp(), whole.neg().exp());
      EXPECT_EQ(trace.events().size(), asks == 2 ? 0u : 1u) << trace.to_string();
      expect_value(x.exp(), (whole * (asks == 2 ? 1 : 5)).exp());
    }
  });
}

// What is divided before it is added up, so that the sum has a number.
TEST(MultipleTest, HalvesAreNotAddedUpBeforeTheyAreDivided) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      const Tensor part = at::full({8}, dtype == at::kHalf ? 4e4 : 2e38, dtype);
      const Tensor g = from_local(part, mesh, {Partial()}, part.sizes().vec());
      const Tensor mean = g / 2;
      EXPECT_TRUE(at::equal(full_tensor(mean.relu()), part));
      const Tensor n = g.neg();
      const CommTrace trace(mesh);
      n.relu();
      g.relu();
      EXPECT_EQ(trace.events().size(), 1u) << trace.to_string();
    }
  });
}

// A view of a view that lies in between: what one operator knows, another that gets others in its place does not.
TEST(MultipleTest, AnOperatorWithAViewOfIt) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 4}), c0 = numbers({4, 4}).cos();
    const Tensor x = scattered(whole, mesh, {Partial()});
    const Tensor n = x.neg(), t = n.t();
    const Tensor c = distribute_tensor(c0, mesh, Placements{Replicate()});
    x.exp();
    expect_value(at::lerp(t, c, n), at::lerp(whole.neg().t(), c0, whole.neg()));
    const Tensor other = scattered(whole * 3, mesh, {Partial()}).t();
    expect_value(at::lerp(other, c, n), at::lerp(whole.t() * 3, c0, whole.neg()));
  });
}

TEST(MultipleTest, NoMemoryIsHeldForLong) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 6});
    const int64_t size = 4 * 6 * 8;
    {
      Tensor y = scattered(whole, mesh, {Partial()});
      for (int i = 0; i < 20; ++i) {
        y = y * 0.9;
        EXPECT_EQ(held_bytes(mesh), i % 5 < 4 ? size : 0) << i;  // a long chain is cut
      }
      expect_value(y.exp(), (whole * std::pow(0.9, 20)).exp());
    }
    EXPECT_EQ(held_bytes(mesh), 0);
    // A gradient that autograd keeps.
    const Tensor w = distribute_tensor(at::ones({6, 3}, at::kDouble), mesh, Placements{Replicate()})
                         .requires_grad_();
    const Tensor a = distribute_tensor(whole, mesh, Placements{Shard(0)});
    a.mm(w * 0.5).sum().backward();
    ASSERT_EQ(layout_of(w.grad()), Layout({Partial()}));
    EXPECT_EQ(held_bytes(mesh), 0);
    expect_value(w.grad(), whole.sum(0).unsqueeze(1).expand({6, 3}) / 2);
    const c10::InferenceMode inference;
    const Tensor x = scattered(whole, mesh, {Partial()});
    expect_value((x * 2).exp(), (whole * 2).exp());
  });
}

}  // namespace
}  // namespace shardweave

// Reductions on shards against one device.
#include <atomic>
#include <cmath>
#include <limits>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/op_check.h"

namespace shardweave {
namespace {

using testing::check_ops;
using testing::in;
using testing::on_mesh;
using testing::Tensors;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <typename... T>
Tensors all(const std::tuple<T...>& tensors) {
  return std::apply([](const T&... t) { return Tensors{t...}; }, tensors);
}

TEST(ReductionRulesTest, Sum) {
  check_ops({
      {"sum", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::sum(x[0])}; }},
      {"sum of a scalar", {in({})}, [](const Tensors& x) { return Tensors{at::sum(x[0])}; }},
      {"sum of nothing", {in({3, 0})}, [](const Tensors& x) { return Tensors{at::sum(x[0])}; }},
      {"sum along one", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::sum(x[0], 1)}; }},
      {"sum along negative",
       {in({7, 5, 2})},
       [](const Tensors& x) { return Tensors{at::sum(x[0], at::IntArrayRef({-1, 0}))}; }},
      {"sum keeping",
       {in({7, 5, 2})},
       [](const Tensors& x) { return Tensors{at::sum(x[0], at::IntArrayRef({0, 2}), true)}; }},
      {"sum along no dim",
       {in({7, 5})},
       [](const Tensors& x) { return Tensors{at::sum(x[0], at::IntArrayRef())}; }},
      {"sum with dtype",
       {in({7, 5}).dtype(at::kFloat)},
       [](const Tensors& x) { return Tensors{at::sum(x[0], 0, false, at::kDouble)}; },
       true,
       1e-5},
      // Digits are cut off each element: sums of shards must not be cut off again, nor Partials.
      {"sum to integers",
       {in({7, 5}).uniform(-5, 5)},
       [](const Tensors& x) { return Tensors{at::sum(x[0], 0, false, at::kLong)}; },
       false},
      {"sum of integers",
       {in({7, 5}).integers(-5, 5)},
       [](const Tensors& x) { return Tensors{at::sum(x[0], 0)}; }},
      {"sum of flags",
       {in({7, 5}).flags()},
       [](const Tensors& x) { return Tensors{at::sum(x[0])}; }},
      {"nansum", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::nansum(x[0], 1)}; }},
      {"count_nonzero",
       {in({7, 5}).with_ties()},
       [](const Tensors& x) {
         return Tensors{at::count_nonzero(x[0]), at::count_nonzero(x[0], at::IntArrayRef{1})};
       }},
  });
}

TEST(ReductionRulesTest, MeanIsOverAllElements) {
  check_ops({
      {"mean", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::mean(x[0])}; }},
      {"mean along one",
       {in({7, 5})},
       [](const Tensors& x) { return Tensors{at::mean(x[0], -2)}; }},
      {"mean keeping",
       {in({3, 5, 2})},
       [](const Tensors& x) { return Tensors{at::mean(x[0], at::IntArrayRef({0, -1}), true)}; }},
      {"mean of nothing", {in({0, 3})}, [](const Tensors& x) { return Tensors{at::mean(x[0])}; }},
      {"mean of halves",
       {in({9, 50}).uniform(300, 400).dtype(at::kHalf)},
       [](const Tensors& x) { return Tensors{at::mean(x[0])}; },
       false,
       1e-2},
      {"mean out",
       {in({7, 5})},
       [](const Tensors& x) {
         at::Tensor out = x[0].detach().sum(1);
         at::mean_out(out, x[0].detach(), 1);
         return Tensors{out};
       },
       false},
  });
}

TEST(ReductionRulesTest, Products) {
  check_ops({
      {"prod", {in({7, 2})}, [](const Tensors& x) { return Tensors{at::prod(x[0])}; }},
      {"prod along one",
       {in({7, 5})},
       [](const Tensors& x) { return Tensors{at::prod(x[0], 0, true)}; }},
      {"prod of integers",
       {in({7, 3}).integers(1, 4)},
       [](const Tensors& x) { return Tensors{at::prod(x[0])}; }},
  });
}

TEST(ReductionRulesTest, Extremes) {
  check_ops({
      {"amax", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::amax(x[0])}; }},
      {"amin along one", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::amin(x[0], 0)}; }},
      {"amax with ties",
       {in({7, 5}).with_ties()},
       [](const Tensors& x) { return Tensors{at::amax(x[0], at::IntArrayRef({0, 1}), true)}; }},
      {"max", {in({7, 5}).with_ties()}, [](const Tensors& x) { return Tensors{at::max(x[0])}; }},
      {"min", {in({3})}, [](const Tensors& x) { return Tensors{at::min(x[0])}; }},
      {"aminmax", {in({7, 5})}, [](const Tensors& x) { return all(at::aminmax(x[0], 0)); }, false},
      {"max of integers",
       {in({3, 3}).integers(-9, -2)},
       [](const Tensors& x) { return Tensors{at::amax(x[0]), at::amin(x[0], 1)}; }},
      {"max of bytes",
       {in({3, 3}).uniform(1, 200).dtype(at::kByte)},
       [](const Tensors& x) { return Tensors{at::amax(x[0]), at::amin(x[0], 0)}; }},
      {"max of shorts",
       {in({3, 3}).uniform(-90, -1).dtype(at::kShort)},
       [](const Tensors& x) { return Tensors{at::amax(x[0]), at::amin(x[0], 0)}; }},
      {"max of flags",
       {in({3, 3}).flags()},
       [](const Tensors& x) { return Tensors{at::amax(x[0]), at::amin(x[0], 0)}; }},
      {"max of max",
       {in({3, 5, 4})},
       [](const Tensors& x) { return Tensors{at::amax(at::amax(x[0], 1), 1)}; }},
      {"any",
       {in({7, 5}).with_ties()},
       [](const Tensors& x) { return Tensors{at::any(x[0]), at::any(x[0], 1)}; }},
      {"all",
       {in({7, 5}).flags()},
       [](const Tensors& x) { return Tensors{at::all(x[0]), at::all(x[0], 0, true)}; }},
      {"any of dims",
       {in({7, 5, 2}).flags()},
       [](const Tensors& x) {
         return Tensors{at::any(x[0], at::OptionalIntArrayRef({0, 2})),
                        at::any(x[0], at::OptionalIntArrayRef()),
                        at::any(x[0], at::OptionalIntArrayRef(at::IntArrayRef()))};
       }},
      {"maximum by max",
       {in({7, 5}), in({5})},
       [](const Tensors& x) { return Tensors{at::max(x[0], x[1]), at::min(x[0], x[1])}; }},
  });
}

// A nan on one rank is the answer on all.
TEST(ReductionRulesTest, ExtremesKeepNan) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    for (int64_t at : {0, 3, 6}) {
      at::Tensor whole = at::arange(7.0);
      whole[at] = NAN;
      const at::Tensor x = distribute_tensor(whole, mesh, Placements{Shard(0)});
      EXPECT_TRUE(std::isnan(full_tensor(at::amax(x)).item<double>())) << "at " << at;
      EXPECT_TRUE(std::isnan(full_tensor(at::amin(x)).item<double>())) << "at " << at;
    }
  });
}

TEST(ReductionRulesTest, AlongALine) {
  check_ops({
      {"argmax",
       {in({7, 5})},
       [](const Tensors& x) { return Tensors{at::argmax(x[0]), at::argmax(x[0], 1)}; },
       false},
      {"argmin",
       {in({7, 5})},
       [](const Tensors& x) { return Tensors{at::argmin(x[0], 0, true)}; },
       false},
      {"max along", {in({7, 5})}, [](const Tensors& x) { return all(at::max(x[0], 1)); }},
      {"min along", {in({3, 5, 2})}, [](const Tensors& x) { return all(at::min(x[0], 1, true)); }},
      {"median along", {in({5, 3})}, [](const Tensors& x) { return all(at::median(x[0], 1)); }},
      {"mode", {in({5, 4}).with_ties()}, [](const Tensors& x) { return all(at::mode(x[0], 0)); }},
      {"kthvalue", {in({5, 4})}, [](const Tensors& x) { return all(at::kthvalue(x[0], 2, 1)); }},
      {"cumsum", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::cumsum(x[0], 0)}; }},
      {"cumprod", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::cumprod(x[0], 1)}; }},
      {"logcumsumexp",
       {in({7, 5})},
       [](const Tensors& x) { return Tensors{at::logcumsumexp(x[0], 1)}; }},
      {"cummax", {in({7, 5})}, [](const Tensors& x) { return all(at::cummax(x[0], 1)); }},
      {"cummin of a transposed",
       {in({7, 5, 2}).transposed()},
       [](const Tensors& x) { return all(at::cummin(x[0], 1)); }},
  });
}

TEST(ReductionRulesTest, Norms) {
  std::vector<testing::OpCase> cases;
  for (double p : {2.0, 1.0, 0.0, 3.0, -1.0, kInfinity, -kInfinity}) {
    cases.push_back({absl::StrCat("linalg_vector_norm ", p), {in({7, 5})}, [p](const Tensors& x) {
                       return Tensors{at::linalg_vector_norm(x[0], p),
                                      at::linalg_vector_norm(x[0], p, at::OptionalIntArrayRef(1))};
                     }});
  }
  cases.push_back({"norm", {in({7, 5})}, [](const Tensors& x) {
                     return Tensors{at::norm(x[0]), at::norm(x[0], 3, {0}, true)};
                   }});
  cases.push_back({"norm with dtype",
                   {in({7, 5}).dtype(at::kFloat)},
                   [](const Tensors& x) { return Tensors{at::norm(x[0], 2, at::kDouble)}; },
                   true,
                   1e-5});
  cases.push_back({"norm of halves",
                   {in({70}).uniform(200, 300).dtype(at::kHalf)},
                   [](const Tensors& x) { return Tensors{at::linalg_vector_norm(x[0])}; },
                   false,
                   1e-2});
  cases.push_back({"linalg_norm of a matrix", {in({7, 5})}, [](const Tensors& x) {
                     return Tensors{at::linalg_norm(x[0])};
                   }});
  check_ops(cases);
}

// As on one device, however it is cut.
TEST(ReductionRulesTest, WhatHasNoNormOrNoLargestElement) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
      const at::Tensor whole = distribute_tensor(at::arange(1, 3), mesh, Placements{placement});
      EXPECT_ANY_THROW(whole.norm());
      EXPECT_ANY_THROW(at::linalg_vector_norm(whole));
      const at::Tensor empty = distribute_tensor(at::zeros({0, 3}), mesh, Placements{placement});
      EXPECT_ANY_THROW(empty.max());
      EXPECT_ANY_THROW(empty.min());
    }
    // Of parts that are empty it has one.
    const at::Tensor one = distribute_tensor(at::full({1}, 3.0), mesh, Placements{Shard(0)});
    EXPECT_EQ(full_tensor(one.max()).item<double>(), 3);
  });
}

// Nothing is summed in 8 bits: a sum that is converted is one before.
TEST(ReductionRulesTest, APartialSumOf8Bits) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor sum = from_local(at::full({2}, 1.0f), mesh, {Partial()});
    const at::Tensor small = full_tensor(sum.to(at::kFloat8_e4m3fn)).to(at::kFloat);
    EXPECT_TRUE(at::equal(small, at::full({2}, 2.0f)));
  });
}

TEST(ReductionRulesTest, ComplexProducts) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::complex(at::tensor({1.0, 2.0, 3.0}), at::tensor({0.5, -1.0, 2.0}));
    const at::Tensor product = distribute_tensor(whole, mesh, Placements{Shard(0)}).prod().mul_(2);
    EXPECT_TRUE(at::allclose(full_tensor(product), whole.prod() * 2));
    const at::Tensor there = redistribute(distribute_tensor(whole, mesh, Placements{Replicate()}),
                                          Placements{Partial(ReduceOp::kProduct)});
    EXPECT_TRUE(at::allclose(full_tensor(there), whole));
  });
}

TEST(ReductionRulesTest, VarianceAndLogsumexp) {
  check_ops({
      {"var", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::var(x[0])}; }},
      {"var along",
       {in({7, 5})},
       [](const Tensors& x) {
         return Tensors{at::var(x[0], at::OptionalIntArrayRef(0), 0, true)};
       }},
      {"std", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::std(x[0], true)}; }},
      {"std along",
       {in({3, 5, 4})},
       [](const Tensors& x) {
         return Tensors{at::std(x[0], at::OptionalIntArrayRef({0, -1}), 2)};
       }},
      {"var_mean",
       {in({7, 5})},
       [](const Tensors& x) { return all(at::var_mean(x[0], at::OptionalIntArrayRef(1), 1)); }},
      {"std_mean", {in({7, 5})}, [](const Tensors& x) { return all(at::std_mean(x[0], false)); }},
      {"logsumexp", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::logsumexp(x[0], 0)}; }},
      {"logsumexp of both",
       {in({7, 5})},
       [](const Tensors& x) {
         return Tensors{at::logsumexp(x[0], at::IntArrayRef({0, 1}), true)};
       }},
      {"logsumexp of integers",
       {in({7, 5}).integers(-3, 3)},
       [](const Tensors& x) { return Tensors{at::logsumexp(x[0], 1)}; },
       false,
       1e-5},
  });
}

TEST(ReductionRulesTest, LogsumexpOfInfinities) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::stack({at::full({3}, -kInfinity), at::full({3}, kInfinity)});
    const at::Tensor x = distribute_tensor(whole, mesh, Placements{Shard(1)});
    EXPECT_TRUE(at::equal(full_tensor(at::logsumexp(x, 1)), at::logsumexp(whole, 1)));
  });
}

// The best of a cut line: two numbers of each line are sent, and not the line.
TEST(ReductionRulesTest, PlacesInCutLines) {
  at::Tensor with_nan = at::arange(4 * 50, at::kFloat).cos().view({4, 50}).contiguous();
  with_nan[1][7] = NAN;
  with_nan[1][40] = NAN;
  with_nan[3][49] = NAN;
  const std::vector<at::Tensor> wholes = {
      at::arange(4 * 50, at::kDouble).sin().view({4, 50}).contiguous(),
      at::arange(4 * 50).remainder(5).view({4, 50}),  // with ties: the first
      with_nan,
      at::arange(4 * 50, at::kBFloat16).remainder(7).view({4, 50}),
      at::arange(4 * 50).remainder(3).eq(1).view({4, 50}),
      at::tensor({1.0, NAN, 3.0, NAN, 0.0, 2.0}).view({2, 3}),  // so few that they are gathered
  };
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"x", 2}}, {{"x", 4}}, {{"x", 2}, {"y", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      for (const at::Tensor& whole : wholes) {
        for (const Placements& placements : testing::all_layouts(mesh->mesh().ndim(), 2, false)) {
          const at::Tensor x = distribute_tensor(whole, mesh, placements);
          for (const bool keepdim : {false, true}) {
            for (int64_t dim : {0, 1, -1}) {
              if (whole.scalar_type() != at::kBool) {
                EXPECT_TRUE(
                    at::equal(full_tensor(x.argmax(dim, keepdim)), whole.argmax(dim, keepdim)));
                EXPECT_TRUE(
                    at::equal(full_tensor(x.argmin(dim, keepdim)), whole.argmin(dim, keepdim)));
              }
              const auto [values, places] = x.max(dim, keepdim);
              const auto [want_values, want_places] = whole.max(dim, keepdim);
              EXPECT_TRUE(at::equal(full_tensor(places), want_places));
              EXPECT_TRUE(at::allclose(full_tensor(values).to(at::kDouble),
                                       want_values.to(at::kDouble), 0, 0, /*equal_nan=*/true));
              EXPECT_TRUE(at::equal(full_tensor(std::get<1>(x.min(dim, keepdim))),
                                    std::get<1>(whole.min(dim, keepdim))));
            }
          }
          if (whole.scalar_type() == at::kBool) continue;
          EXPECT_TRUE(at::equal(full_tensor(x.argmax()), whole.argmax()));
        }
      }
    });
  }
  // Ragged and strided cuts, and what is counted.
  on_mesh({{"x", 3}}, [&](const MeshPtr& mesh) {
    const at::Tensor logits = at::arange(4 * 12, at::kFloat).cos().view({4, 12});
    for (const Placement& p :
         {Placement(Shard(1)), StridedShard(1, 2), RaggedShard(1, {5, 0, 7})}) {
      const at::Tensor x =
          redistribute(distribute_tensor(logits, mesh, Placements{Replicate()}), {p});
      const CommTrace trace(mesh);
      const at::Tensor best = x.argmax(-1);
      EXPECT_EQ(trace.events().size(), 2u);
      EXPECT_EQ(trace.events()[0].collective, "all_reduce");
      EXPECT_TRUE(at::equal(full_tensor(best), logits.argmax(-1))) << p.to_string();
    }
    // A rank that has nothing of a line knows no best, of integers and truth values either.
    for (const at::Tensor& whole : wholes) {
      if (whole.size(1) != 50) continue;
      const at::Tensor x = redistribute(distribute_tensor(whole, mesh, Placements{Replicate()}),
                                        {RaggedShard(1, {20, 0, 30})});
      const CommTrace trace(mesh);
      const auto [most, most_at] = x.max(1);
      const auto [least, least_at] = x.min(1);
      EXPECT_EQ(trace.events().size(), 4u);
      EXPECT_TRUE(at::equal(full_tensor(most_at), std::get<1>(whole.max(1))));
      EXPECT_TRUE(at::equal(full_tensor(least_at), std::get<1>(whole.min(1))));
      EXPECT_TRUE(at::allclose(full_tensor(most).to(at::kDouble),
                               std::get<0>(whole.max(1)).to(at::kDouble), 0, 0, true));
      EXPECT_TRUE(at::allclose(full_tensor(least).to(at::kDouble),
                               std::get<0>(whole.min(1)).to(at::kDouble), 0, 0, true));
    }
    // The gradient of a maximum goes where the largest is.
    at::Tensor leaf = logits.clone().requires_grad_();
    at::Tensor x = distribute_tensor(logits, mesh, Placements{Shard(1)}).requires_grad_();
    std::get<0>(leaf.max(1)).sum().backward();
    std::get<0>(x.max(1)).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(x.grad()), leaf.grad()));
  });
}

// What casts in between.
TEST(ReductionRulesTest, CastsOfWhatIsStillPartial) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::full({2}, c10::complex<float>(0, 1), at::kComplexFloat);
    const at::Tensor i = distribute_tensor(whole, mesh, Placements{Shard(0)});
    EXPECT_EQ(full_tensor(i.prod(0).to(at::kFloat)).item<float>(), -1.0f);
    const at::Tensor x = distribute_tensor(at::tensor({1.5f}), mesh, Placements{Shard(0)});
    EXPECT_EQ(full_tensor(x.amax(0).to(at::kFloat8_e4m3fn)).to(at::kFloat).item<float>(), 1.5f);
    EXPECT_TRUE(layout_of(x.amax(0).to(at::kBFloat16)).has_partial());
    // (Of the infinity on the rank that has nothing the least integer would be made.)
    EXPECT_EQ(full_tensor(x.amin(0).to(at::kInt)).item<int>(), 1);
    const at::Tensor large = from_local(at::full({2}, 1 << 30, at::kInt), mesh, {Partial()});
    EXPECT_TRUE(at::equal(full_tensor(large.to(at::kLong)), full_tensor(large).to(at::kLong)));
    // Of truth values: any, not how many.
    const at::Tensor flags = from_local(at::ones({2}, at::kBool), mesh, {Partial()});
    EXPECT_TRUE(at::equal(full_tensor(flags.to(at::kInt)), at::ones({2}, at::kInt)));
  });
  // Complex numbers have no largest one: LibTorch's error on every rank, also on those with nothing.
  std::atomic<int> refused = 0;
  on_mesh({{"x", 3}}, [&](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4, 16}, at::kComplexFloat), mesh,
                                           Placements{RaggedShard(1, {8, 8, 0})});
    try {
      at::argmax(x, 1);
    } catch (const Error& error) {
      ADD_FAILURE() << "not LibTorch's: " << error.what();
    } catch (const c10::Error&) {
      ++refused;
    }
  });
  EXPECT_EQ(refused, 3);
}

// A plain out= argument becomes a DTensor, and what was in it is not looked at.
TEST(ReductionRulesTest, PlainOutArgumentsOfCutLines) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::arange(4 * 16, at::kFloat).cos().view({4, 16});
    const at::Tensor x = distribute_tensor(whole, mesh, Placements{Shard(1)});
    for (int i = 0; i < 2; ++i) {
      at::Tensor values = at::full({4}, mesh->coordinate()[0], at::kFloat);
      at::Tensor places = at::full({4}, mesh->coordinate()[0], at::kLong);
      at::max_out(values, places, x, 1);
      EXPECT_TRUE(at::equal(full_tensor(values), std::get<0>(whole.max(1))));
      EXPECT_TRUE(at::equal(full_tensor(places), std::get<1>(whole.max(1))));
      // Where it stands: in the memory that it had.
      const at::Tensor memory = at::full({2, 4}, mesh->coordinate()[0], at::kFloat);
      at::Tensor norm = memory[1];
      at::linalg_vector_norm_out(norm, x, 2, 1);
      EXPECT_TRUE(at::allclose(full_tensor(norm), at::linalg_vector_norm(whole, 2, 1)));
      EXPECT_TRUE(at::equal(memory[1], full_tensor(norm)));
    }
  });
}

}  // namespace
}  // namespace shardweave

// Random operators: the same numbers for every mesh and layout, and the distributions that they
// should have.
#include "shardweave/dtensor/random.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <numbers>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;

struct Operator {
  std::string name;
  std::function<at::Tensor(const at::Tensor&)>
      draw;  // from a tensor that gives shape, type and layout
  std::vector<at::ScalarType> dtypes = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16};
};

const std::vector<Operator>& operators() {
  using at::Tensor;
  const std::vector<at::ScalarType> any = {at::kDouble,   at::kFloat, at::kHalf,
                                           at::kBFloat16, at::kLong,  at::kInt,
                                           at::kShort,    at::kChar,  at::kByte};
  std::vector<at::ScalarType> bool_too = any;
  bool_too.push_back(at::kBool);
  static const auto* const list = new std::vector<Operator>{
      {"uniform_", [](const Tensor& x) { return x.clone().uniform_(-2, 3); }},
      {"normal_", [](const Tensor& x) { return x.clone().normal_(1, 2); }},
      {"log_normal_", [](const Tensor& x) { return x.clone().log_normal_(0.5, 0.25); }},
      {"exponential_", [](const Tensor& x) { return x.clone().exponential_(2); }},
      {"cauchy_", [](const Tensor& x) { return x.clone().cauchy_(1, 2); }},
      {"geometric_", [](const Tensor& x) { return x.clone().geometric_(0.3); }, any},
      {"bernoulli_", [](const Tensor& x) { return x.clone().bernoulli_(0.3); }, bool_too},
      {"random_", [](const Tensor& x) { return x.clone().random_(); }, bool_too},
      {"random_(to)", [](const Tensor& x) { return x.clone().random_(100); }, any},
      {"random_(from, to)", [](const Tensor& x) { return x.clone().random_(20, 50); }, any},
      {"random_(from, None)",
       [](const Tensor& x) { return x.clone().random_(20, std::optional<int64_t>()); }, any},
      {"rand_like", [](const Tensor& x) { return at::rand_like(x); }},
      {"randn_like", [](const Tensor& x) { return at::randn_like(x); }},
      {"randint_like", [](const Tensor& x) { return at::randint_like(x, 90); }, any},
      {"randint_like(low, high)", [](const Tensor& x) { return at::randint_like(x, 10, 90); }, any},
      {"bernoulli(p)", [](const Tensor& x) { return at::bernoulli(x, 0.7); }, bool_too},
      {"bernoulli of zeros and ones",
       [](const Tensor& x) { return at::bernoulli(at::ones_like(x) * 0.5); }},
      {"bernoulli_(tensor)",
       [](const Tensor& x) { return x.clone().bernoulli_(at::ones_like(x) * 0.25); }},
      {"normal(tensor, float)", [](const Tensor& x) { return at::normal(at::ones_like(x), 2.0); }},
      {"normal(float, tensor)", [](const Tensor& x) { return at::normal(1.0, at::ones_like(x)); }},
      {"normal(tensor, tensor)",
       [](const Tensor& x) { return at::normal(at::ones_like(x), at::ones_like(x)); }},
      {"dropout", [](const Tensor& x) { return at::dropout(at::ones_like(x), 0.25, true); }},
      {"native_dropout",
       [](const Tensor& x) {
         return std::get<0>(at::native_dropout(at::ones_like(x), 0.25, true));
       }},
      {"poisson", [](const Tensor& x) { return at::poisson(at::ones_like(x) * 3); }},
      {"poisson of a large mean",
       [](const Tensor& x) { return at::poisson(at::ones_like(x) * 50); }},
      {"binomial",
       [](const Tensor& x) { return at::binomial(at::ones_like(x) * 9, at::ones_like(x) * 0.25); }},
      {"binomial of many",
       [](const Tensor& x) {
         return at::binomial(at::ones_like(x) * 99, at::ones_like(x) * 0.75);
       }},
      {"gamma", [](const Tensor& x) { return at::_standard_gamma(at::ones_like(x) * 2); }},
      {"rrelu",
       [](const Tensor& x) { return at::rrelu(at::ones_like(x).neg(), 0.25, 0.75, true); }},
      {"a row, which may have to be brought",
       [](const Tensor& x) {
         const Tensor y = x.clone();
         y.select(0, 2).normal_();
         return y;
       }},
      {"a transposed one",
       [](const Tensor& x) {
         const Tensor y = x.clone();
         y.transpose(0, 2).normal_();
         return y;
       }},
  };
  return *list;
}

const std::vector<int64_t>& shape() {
  static const auto* const sizes = new std::vector<int64_t>{5, 7, 3};
  return *sizes;
}

std::vector<Placements> layouts(int mesh_ndim, int64_t ranks) {
  std::vector<Placements> all = testing::all_layouts(mesh_ndim, 3, false);
  if (mesh_ndim > 1) return all;
  for (int d = 0; d < 3; ++d) {
    all.push_back({StridedShard(d, 2)});
    std::vector<int64_t> sizes(ranks, 0);
    sizes[ranks - 1] = shape()[d] - 1;
    sizes[0] += 1;
    all.push_back({RaggedShard(d, sizes)});
  }
  return all;
}

TEST(RandomTest, TheSameNumbersForEveryLayout) {
  // One rank first.
  std::vector<std::vector<at::Tensor>> want;
  on_mesh({{"x", 1}}, [&](const MeshPtr& mesh) {
    for (const Operator& op : operators()) {
      auto& per_dtype = want.emplace_back();
      for (at::ScalarType dtype : op.dtypes) {
        manual_seed(mesh, 42);
        per_dtype.push_back(full_tensor(op.draw(zeros(shape(), mesh, {Replicate()}, dtype))));
      }
    }
  });
  for (const std::vector<MeshDim>& dims : std::vector<std::vector<MeshDim>>{
           {{"x", 2}}, {{"x", 3}}, {{"x", 8}}, {{"x", 2}, {"y", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      for (size_t i = 0; i < operators().size(); ++i) {
        const Operator& op = operators()[i];
        for (size_t t = 0; t < op.dtypes.size(); ++t) {
          for (const Placements& placements : layouts(mesh->mesh().ndim(), mesh->mesh().size())) {
            manual_seed(mesh, 42);
            const at::Tensor x = zeros(shape(), mesh, placements, op.dtypes[t]);
            const at::Tensor got = op.draw(x);
            EXPECT_EQ(layout_of(got).placements(), placements) << op.name;
            EXPECT_TRUE(at::equal(full_tensor(got), want[i][t]))
                << op.name << " " << c10::toString(op.dtypes[t]) << " " << to_string(placements);
          }
        }
      }
      EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 0);
    });
  }
}

TEST(RandomTest, FactoriesAndGradients) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    manual_seed(mesh, 1);
    const at::Tensor a = randn({7, 5}, mesh, {Shard(0)}, at::TensorOptions().requires_grad(true));
    const at::Tensor b = rand({7, 5}, mesh, {Shard(1)});
    manual_seed(mesh, 1);
    EXPECT_TRUE(
        at::equal(full_tensor(a.detach()), full_tensor(randn({7, 5}, mesh, {Replicate()}))));
    EXPECT_TRUE(at::equal(full_tensor(b), full_tensor(rand({7, 5}, mesh, {Shard(0)}))));
    // Dropout scales what it keeps, gradients alike, without communication.
    const StrictScope strict(mesh);
    const at::Tensor y = at::dropout(a, 0.5, true);
    const at::Tensor kept = full_tensor(y).ne(0);
    y.sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(y), full_tensor(a.detach()) * kept * 2));
    EXPECT_TRUE(at::equal(full_tensor(a.grad()), kept.to(at::kFloat) * 2));
  });
}

TEST(RandomTest, AnUnreducedTensorIsDrawnOnce) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    manual_seed(mesh, 9);
    const at::Tensor want = full_tensor(randn({4, 3}, mesh, {Replicate(), Replicate()}));
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kProduct}) {
      for (const Placements& placements :
           {Placements{Partial(op), Partial(op)}, Placements{Shard(0), Partial(op)}}) {
        manual_seed(mesh, 9);
        const Placements cuts = {placements[0].is_partial() ? Replicate() : placements[0],
                                 Replicate()};
        at::Tensor x = from_local(to_local(ones({4, 3}, mesh, cuts)), mesh, placements);
        x.normal_();
        EXPECT_EQ(layout_of(x).placements(), placements);
        EXPECT_TRUE(at::allclose(full_tensor(x), want)) << to_string(placements);
      }
    }
  });
}

TEST(RandomTest, ProbabilitiesLieAsTheyLike) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const at::Tensor p = at::linspace(0, 1, 35, at::kDouble).view({7, 5});
    const at::Tensor row = at::linspace(0, 1, 5, at::kDouble);
    for (const Placement& mine : testing::all_placements(2, false)) {
      for (const Placement& of_p : testing::all_placements(2, false)) {
        manual_seed(mesh, 5);
        const at::Tensor x =
            zeros({7, 5}, mesh, {mine}).bernoulli_(distribute_tensor(p, mesh, Placements{of_p}));
        manual_seed(mesh, 5);
        const at::Tensor u = full_tensor(zeros({7, 5}, mesh, {Replicate()}, at::kLong).random_(2));
        manual_seed(mesh, 5);
        const at::Tensor again =
            zeros({7, 5}, mesh, {Replicate()})
                .bernoulli_(distribute_tensor(p, mesh, Placements{Replicate()}));
        EXPECT_TRUE(at::equal(full_tensor(x), full_tensor(again)));
        EXPECT_EQ(full_tensor(x)[0][0].item<float>(), 0);
        EXPECT_EQ(full_tensor(x)[6][4].item<float>(), 1);
      }
    }
    manual_seed(mesh, 5);
    const at::Tensor x = zeros({2000, 5}, mesh, {Shard(0)})
                             .bernoulli_(distribute_tensor(row, mesh, Placements{Shard(0)}));
    EXPECT_TRUE(at::allclose(full_tensor(x).mean(0).to(at::kDouble), row, 0, 0.05));
  });
}

TEST(RandomTest, StateAdvancesByOperatorsOnly) {
  on_mesh({{"x", 4}}, [](const MeshPtr& mesh) {
    manual_seed(mesh, 3);
    EXPECT_EQ(random_state(mesh), (PhiloxState{3, 0}));
    // Two rows for four ranks: some draw nothing, and stay in step.
    at::Tensor x = randn({2, 3}, mesh, {Shard(0)});
    const PhiloxState before = random_state(mesh);
    EXPECT_EQ(before, (PhiloxState{3, 1}));
    const at::Tensor a = full_tensor(at::rand_like(x));
    const at::Tensor b = full_tensor(at::rand_like(x));
    EXPECT_FALSE(at::equal(a, b));
    set_random_state(mesh, before);
    EXPECT_TRUE(at::equal(full_tensor(at::rand_like(x)), a));
    // LibTorch's generators have no part in it.
    at::manual_seed(1);
    const at::Tensor c = full_tensor(at::rand_like(x));
    EXPECT_TRUE(at::equal(c, b));
  });
}

// --- distributions -------------------------------------------------------------------------------

// The drawn numbers of a large tensor, in double.
std::vector<double> sample(const std::function<at::Tensor(const at::Tensor&)>& draw,
                           at::ScalarType dtype) {
  std::vector<double> result;
  on_mesh({{"x", 1}}, [&](const MeshPtr& mesh) {
    manual_seed(mesh, 11);
    const at::Tensor numbers =
        to_local(draw(zeros({300, 331}, mesh, {Shard(0)}, dtype))).to(at::kDouble);
    result.assign(numbers.const_data_ptr<double>(),
                  numbers.const_data_ptr<double>() + numbers.numel());
  });
  return result;
}

// Kolmogorov's statistic; one sample in a thousand is above 1.95.
double distance(std::vector<double> numbers, const std::function<double(double)>& distribution) {
  std::sort(numbers.begin(), numbers.end());
  const double n = static_cast<double>(numbers.size());
  double worst = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double p = distribution(numbers[i]);
    worst = std::max({worst, std::abs(p - static_cast<double>(i) / n),
                      std::abs(p - static_cast<double>(i + 1) / n)});
  }
  return worst * std::sqrt(n);
}

double mean(const std::vector<double>& numbers) {
  double sum = 0;
  for (double x : numbers) sum += x;
  return sum / static_cast<double>(numbers.size());
}

TEST(RandomTest, Distributions) {
  auto normal = [](double x) { return 0.5 * std::erfc(-x / std::numbers::sqrt2); };
  for (at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    EXPECT_LT(distance(sample([](const at::Tensor& x) { return x.clone().uniform_(-2, 3); }, dtype),
                       [](double x) { return (x + 2) / 5; }),
              1.95);
    EXPECT_LT(distance(sample([](const at::Tensor& x) { return x.clone().normal_(1, 2); }, dtype),
                       [&](double x) { return normal((x - 1) / 2); }),
              1.95);
    EXPECT_LT(
        distance(sample([](const at::Tensor& x) { return x.clone().log_normal_(1, 2); }, dtype),
                 [&](double x) { return normal((std::log(x) - 1) / 2); }),
        1.95);
    EXPECT_LT(distance(sample([](const at::Tensor& x) { return x.clone().exponential_(3); }, dtype),
                       [](double x) { return 1 - std::exp(-3 * x); }),
              1.95);
    EXPECT_LT(distance(sample([](const at::Tensor& x) { return x.clone().cauchy_(1, 2); }, dtype),
                       [](double x) { return 0.5 + std::atan((x - 1) / 2) / std::numbers::pi; }),
              1.95);
  }
  for (double p : {0.0, 1e-3, 0.5, 0.9, 1.0}) {
    const double got =
        mean(sample([=](const at::Tensor& x) { return x.clone().bernoulli_(p); }, at::kBool));
    EXPECT_NEAR(got, p, 4 * std::sqrt(p * (1 - p) / 99300.0));
  }
  for (double p : {0.1, 0.5, 0.99}) {
    const std::vector<double> trials =
        sample([=](const at::Tensor& x) { return x.clone().geometric_(p); }, at::kLong);
    EXPECT_NEAR(mean(trials), 1 / p, 4 * std::sqrt((1 - p) / (p * p) / 99300.0));
    EXPECT_EQ(*std::min_element(trials.begin(), trials.end()), 1);
  }
}

TEST(RandomTest, HalfPrecisionStaysBelowTheEnd) {
  for (at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    const std::vector<double> u =
        sample([](const at::Tensor& x) { return at::rand_like(x); }, dtype);
    EXPECT_LT(*std::max_element(u.begin(), u.end()), 1);
    EXPECT_EQ(*std::min_element(u.begin(), u.end()), 0);
    EXPECT_NEAR(mean(u), 0.5, 0.01);
    // The end is a neighbour of the beginning in this type: nothing rounds to it.
    const std::vector<double> v =
        sample([](const at::Tensor& x) { return x.clone().uniform_(1, 1.01); }, dtype);
    EXPECT_LT(*std::max_element(v.begin(), v.end()), 1.01);
  }
}

TEST(RandomTest, IntegersCoverTheirRange) {
  auto range = [](const std::function<at::Tensor(const at::Tensor&)>& draw, at::ScalarType dtype) {
    const std::vector<double> numbers = sample(draw, dtype);
    return std::pair(*std::min_element(numbers.begin(), numbers.end()),
                     *std::max_element(numbers.begin(), numbers.end()));
  };
  EXPECT_EQ(range([](const at::Tensor& x) { return x.clone().random_(-3, 4); }, at::kInt),
            std::pair(-3.0, 3.0));
  EXPECT_EQ(range([](const at::Tensor& x) { return x.clone().random_(); }, at::kByte),
            std::pair(0.0, 255.0));
  EXPECT_EQ(range([](const at::Tensor& x) { return x.clone().random_(); }, at::kChar),
            std::pair(0.0, 127.0));
  EXPECT_EQ(
      range([](const at::Tensor& x) { return x.clone().random_(-128, std::optional<int64_t>()); },
            at::kChar),
      std::pair(-128.0, 127.0));
  EXPECT_EQ(range([](const at::Tensor& x) { return x.clone().random_(); }, at::kBool),
            std::pair(0.0, 1.0));
  EXPECT_EQ(range([](const at::Tensor& x) { return x.clone().random_(); }, at::kBFloat16),
            std::pair(0.0, 256.0));
  // All of 64 bits.
  const auto [low, high] = range(
      [](const at::Tensor& x) {
        return x.clone().random_(std::numeric_limits<int64_t>::min(), std::optional<int64_t>());
      },
      at::kLong);
  EXPECT_LT(low, -9.2e18);
  EXPECT_GT(high, 9.2e18);
  // Evenly: chi squared of ten values with nine degrees of freedom.
  std::vector<double> counts(10);
  for (double x : sample([](const at::Tensor& t) { return t.clone().random_(10); }, at::kLong))
    ++counts[static_cast<size_t>(x)];
  double chi = 0;
  for (double c : counts) chi += (c - 9930) * (c - 9930) / 9930;
  EXPECT_LT(chi, 27.9);
}

// --- errors --------------------------------------------------------------------------------------

std::string message(const std::function<void(const at::Tensor&)>& body,
                    at::ScalarType dtype = at::kFloat) {
  std::string text = "no error";
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    // On the rank without elements too.
    const at::Tensor x = zeros({1, 3}, mesh, {Shard(0)}, dtype);
    try {
      body(x);
      ADD_FAILURE() << "no error on rank " << mesh->rank().value;
    } catch (const c10::Error& error) {
      if (mesh->rank().value == 1) text = error.what_without_backtrace();
    }
  });
  return text;
}

TEST(RandomTest, ErrorsAreLibTorchsOnEveryRank) {
  EXPECT_THAT(message([](const at::Tensor& x) { x.normal_(0, -1); }),
              HasSubstr("std >= 0.0, but found std -1"));
  EXPECT_THAT(message([](const at::Tensor& x) { x.uniform_(2, 1); }), HasSubstr("from=2 > to=1"));
  EXPECT_THAT(message([](const at::Tensor& x) { x.bernoulli_(1.5); }), HasSubstr("p"));
  EXPECT_THAT(message([](const at::Tensor& x) { x.random_(5, 5); }),
              HasSubstr("'from' to be less than 'to'"));
  EXPECT_THAT(message([](const at::Tensor& x) { x.normal_(); }, at::kLong),
              HasSubstr("not implemented for 'Long'"));
}

TEST(RandomTest, GeneratorsAreRefused) {
  EXPECT_THAT(
      message([](const at::Tensor& x) { x.normal_(0, 1, at::detail::getDefaultCPUGenerator()); }),
      HasSubstr("takes no generator; DTensors draw from their mesh"));
}

TEST(RandomTest, PlainTensorsDoNotMix) {
  EXPECT_THAT(message([](const at::Tensor& x) { at::zeros({1, 3}).bernoulli_(x); }),
              HasSubstr("'self' is a plain tensor"));
}

TEST(RandomTest, OperatorsWithoutARuleAreRefused) {
  EXPECT_THAT(message([](const at::Tensor& x) { at::_fused_dropout(x, 0.5); }),
              HasSubstr("aten::_fused_dropout"));
}

// --- meshes and time -----------------------------------------------------------------------------

// The stages of a pipeline begin with weights of their own, and their ranks agree on them.
TEST(RandomTest, SlicesDrawDifferently) {
  on_mesh({{"pp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const MeshPtr stage = mesh->slice({"tp"}).value();
    for (const bool seeded : {false, true}) {
      if (seeded) manual_seed(stage, 7);
      const at::Tensor mine = full_tensor(randn({16}, stage, {Shard(0)}));
      const at::Tensor all = full_tensor(from_local(mine, mesh, {Shard(0), Replicate()}));
      EXPECT_FALSE(at::equal(all.slice(0, 0, 16), all.slice(0, 16, 32)));
      EXPECT_TRUE(at::equal(full_tensor(from_local(mine, mesh, {Replicate(), Shard(0)})),
                            mine.repeat({2})));
    }
    // The first one draws as a mesh of its own would, and who wants all alike says so.
    manual_seed(mesh, 7);
    manual_seed(stage, 7);
    const at::Tensor whole = full_tensor(randn({16}, mesh, {Shard(0), Shard(0)}));
    if (mesh->coordinate()[0] == 0) {
      EXPECT_TRUE(at::equal(full_tensor(randn({16}, stage, {Shard(0)})), whole));
    }
    set_random_state(stage, {7, 0});
    EXPECT_TRUE(at::equal(full_tensor(randn({16}, stage, {Shard(0)})), whole));
  });
}

TEST(RandomTest, AScopeDrawsAgainAndGoesOn) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = ones({5, 4}, mesh, {Shard(0)});
    const PhiloxState before = random_state(mesh);
    const at::Tensor first = full_tensor(at::dropout(x, 0.5, true));
    const at::Tensor second = full_tensor(at::dropout(x, 0.5, true));
    EXPECT_FALSE(at::equal(first, second));
    {
      const RandomStateScope again(mesh, before);
      EXPECT_TRUE(at::equal(full_tensor(at::dropout(x, 0.5, true)), first));
    }
    EXPECT_EQ(random_state(mesh).offset, before.offset + 2);
  });
}

// In every order in which three can end.
TEST(RandomTest, ScopesEndInAnyOrder) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const auto draw = [&] { rand({3}, mesh, {Shard(0)}); };
    std::vector<int> order = {0, 1, 2};
    do {
      set_random_state(mesh, {5, 10});
      std::vector<std::unique_ptr<RandomStateScope>> scopes;
      std::vector<uint64_t> offsets;  // of those that are there, the innermost last
      std::vector<int> open;
      for (const uint64_t begin : {100, 200, 300}) {
        draw();
        scopes.push_back(std::make_unique<RandomStateScope>(mesh, PhiloxState{7, begin}));
        open.push_back(static_cast<int>(begin / 100) - 1);
      }
      // Where each goes on when it is the innermost; the mesh itself behind them.
      const std::vector<PhiloxState> goes_on = {{7, 101}, {7, 201}, {7, 300}};
      for (const int ends : order) {
        const bool innermost = open.back() == ends;
        const PhiloxState before = random_state(mesh);
        scopes[static_cast<size_t>(ends)].reset();
        std::erase(open, ends);
        const PhiloxState wanted = !innermost     ? before
                                   : open.empty() ? PhiloxState{5, 11}
                                                  : goes_on[static_cast<size_t>(open.back())];
        EXPECT_EQ(random_state(mesh), wanted) << ends << " of " << order[0] << order[1] << order[2];
      }
      EXPECT_EQ(random_state(mesh), (PhiloxState{5, 11}));
    } while (std::next_permutation(order.begin(), order.end()));
  });
}

// --- distributions with parameters ---------------------------------------------------------------

struct Moments {
  double mean, variance;
};

Moments moments(const at::Tensor& x) {
  const at::Tensor whole = full_tensor(x).to(at::kDouble);
  return {whole.mean().item<double>(), whole.var().item<double>()};
}

TEST(RandomTest, MeansAndVariancesAreThoseOfTheDistribution) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    manual_seed(mesh, 3);
    const int64_t n = 40000;
    const at::Tensor one = ones({n}, mesh, {Shard(0)}, at::kDouble);
    // Five standard errors of the mean; the variance of variances is known less well.
    const auto expect = [&](const char* what, const at::Tensor& x, double mean, double variance) {
      const Moments got = moments(x);
      EXPECT_NEAR(got.mean, mean, 5 * std::sqrt(variance / n)) << what;
      EXPECT_NEAR(got.variance, variance, 0.06 * variance) << what;
    };
    for (double mean : {0.3, 3.0, 12.0, 200.0})
      expect("poisson", at::poisson(one * mean), mean, mean);
    for (double count : {4.0, 30.0, 400.0}) {
      for (double p : {0.1, 0.4, 0.9}) {
        expect("binomial", at::binomial(one * count, one * p), count * p, count * p * (1 - p));
      }
    }
    for (double a : {0.4, 1.0, 5.0}) expect("gamma", at::_standard_gamma(one * a), a, a);
    EXPECT_EQ(moments(at::poisson(one * 0)).mean, 0);
    EXPECT_EQ(moments(at::binomial(one * 7, one)).mean, 7);
  });
}

TEST(RandomTest, CategoriesByWeight) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const at::Tensor weights = at::tensor({1.0, 0.0, 3.0, 4.0});
    for (const Placement& placement : testing::all_placements(1, true)) {
      manual_seed(mesh, 11);
      const at::Tensor dweights = testing::scattered(weights, mesh, {placement});
      const at::Tensor drawn = full_tensor(at::multinomial(dweights, 20000, true));
      const at::Tensor counts = at::bincount(drawn, {}, 4).to(at::kDouble) / 20000;
      EXPECT_TRUE(at::allclose(counts, weights / 8, 0, 0.02)) << placement << " " << counts;
      EXPECT_EQ(counts[1].item<double>(), 0);
    }
    // Without replacement every category is drawn once, and those of weight 0 not before all
    // others.
    const at::Tensor rows = distribute_tensor(weights.repeat({5, 1}), mesh, Placements{Shard(0)});
    const at::Tensor three = full_tensor(at::multinomial(rows, 3));
    EXPECT_FALSE(three.eq(1).any().item<bool>());
    EXPECT_TRUE(at::equal(std::get<0>(three.sort(1)), at::tensor({0, 2, 3}).repeat({5, 1})));
  });
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    // Numbers of 16 bits do not tell a thousand categories apart.
    const at::Tensor many =
        distribute_tensor(at::ones({1000}, at::kBFloat16), mesh, Placements{Replicate()});
    const at::Tensor drawn = full_tensor(at::multinomial(many, 20000, true));
    EXPECT_GT(std::get<0>(at::_unique(drawn)).numel(), 990);
    // Small concentrations: one share is nearly all, and none is nothing or no number.
    const at::Tensor alpha =
        distribute_tensor(at::full({200, 2}, 0.01f), mesh, Placements{Shard(0)});
    const at::Tensor shares = full_tensor(at::_sample_dirichlet(alpha));
    EXPECT_TRUE(shares.gt(0).all().item<bool>());
    EXPECT_TRUE(at::allclose(shares.sum(-1), at::ones({200})));
    EXPECT_TRUE(full_tensor(at::_standard_gamma(alpha)).gt(0).all().item<bool>());
  });
  EXPECT_THAT(message([](const at::Tensor& x) { at::multinomial(x, 9); }),
              HasSubstr("multinomial"));
}

}  // namespace
}  // namespace shardweave

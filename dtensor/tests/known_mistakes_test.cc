// Mistakes that other sharded tensors make or made, one test each. The numbers are those of the
// list in the design (§9), the issues PyTorch's unless said otherwise. (11 and 12 are tests of
// comm/; 13 is of checkpoints.)

#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/op_check.h"
#include "torch/nn/init.h"
#include "torch/nn/utils/clip_grad.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

using testing::all_layouts;
using testing::check_op;
using testing::check_ops;
using ::testing::HasSubstr;
using testing::in;
using testing::on_mesh;
using testing::OpCase;
using testing::scattered;
using testing::Tensors;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor numbers(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return at::arange(1, n + 1, at::kDouble).view(sizes);
}

void expect_value(const at::Tensor& tensor, const at::Tensor& whole) {
  ASSERT_TRUE(tensor.defined());
  const at::Tensor got = full_tensor(tensor.detach());
  EXPECT_EQ(got.sizes(), whole.sizes());
  EXPECT_TRUE(at::allclose(got, whole, 1e-9, 1e-9, /*equal_nan=*/true))
      << layout_of(tensor).to_string() << "\n"
      << got << "\nwanted\n"
      << whole;
}

// (#134050) What was decided while gradients were off holds for a call with gradients, and the
// other way round.
TEST(KnownMistakes, Item01_RuleCachedWithGradientsOffUsedWithGradientsOn) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole_w = numbers({4, 3}), whole_x = numbers({5, 4}), whole_b = numbers({3});
    for (const bool gradients_first : {false, true}) {
      for (const Placement& p : {Replicate(), Shard(0), Shard(1)}) {
        MeshContext::of(mesh)->decisions.cache.clear();
        at::Tensor w = distribute_tensor(whole_w, mesh, Placements{p}).requires_grad_();
        at::Tensor b = distribute_tensor(whole_b, mesh, Placements{Replicate()}).requires_grad_();
        const at::Tensor x = distribute_tensor(whole_x, mesh, Placements{Replicate()});
        auto forward = [&] { return at::layer_norm(at::addmm(b, x, w).relu(), {3}).pow(2).sum(); };
        int64_t backwards = 0;
        for (int i = 0; i < 6; ++i) {
          const bool gradients = (i % 2 == 0) == gradients_first;
          const c10::AutoGradMode mode(gradients);
          const at::Tensor y = forward();
          EXPECT_EQ(y.requires_grad(), gradients);
          if (!gradients) continue;
          y.backward();
          ++backwards;
        }
        {
          const c10::InferenceMode inference;
          EXPECT_FALSE(forward().requires_grad());
        }
        forward().backward();
        ++backwards;
        at::Tensor plain_w = whole_w.clone().requires_grad_();
        at::Tensor plain_b = whole_b.clone().requires_grad_();
        at::layer_norm(at::addmm(plain_b, whole_x, plain_w).relu(), {3}).pow(2).sum().backward();
        expect_value(w.grad(), plain_w.grad() * backwards);
        expect_value(b.grad(), plain_b.grad() * backwards);
      }
    }
  });
}

// (#159856, #147180) What is not linear is not to be computed on summands. check_op tries Partials
// for every input.
TEST(KnownMistakes, Item02_NormOrComparisonOnPartial) {
  std::vector<OpCase> cases;
  for (double p : {0.5, 1.0, 2.0, 3.0, kInfinity, -kInfinity}) {
    cases.push_back({absl::StrCat("vector_norm ", p), {in({7, 5})}, [p](const Tensors& x) {
                       return Tensors{at::linalg_vector_norm(x[0], p)};
                     }});
    cases.push_back({absl::StrCat("vector_norm of rows ", p), {in({7, 5})}, [p](const Tensors& x) {
                       return Tensors{at::linalg_vector_norm(x[0], p, at::IntArrayRef({1}))};
                     }});
  }
  auto add = [&](const char* name, auto f) {
    OpCase c{name, {in({7, 5}).with_ties(), in({7, 5}).with_ties()}, [f](const Tensors& x) {
               return Tensors{f(x[0], x[1])};
             }};
    c.gradients = false;
    cases.push_back(std::move(c));
  };
  using T = const at::Tensor&;
  add("gt", [](T a, T b) { return at::gt(a, b); });
  add("ge", [](T a, T b) { return at::ge(a, b); });
  add("lt", [](T a, T b) { return at::lt(a, b); });
  add("le", [](T a, T b) { return at::le(a, b); });
  add("eq", [](T a, T b) { return at::eq(a, b); });
  add("ne", [](T a, T b) { return at::ne(a, b); });
  add("gt a number", [](T a, T) { return at::gt(a, 0.5); });
  add("maximum", [](T a, T b) { return at::maximum(a, b); });
  add("max", [](T a, T) { return at::max(a); });
  add("min", [](T a, T) { return at::min(a); });
  add("argmax", [](T a, T) { return at::argmax(a, 1); });
  add("any", [](T a, T) { return at::any(a); });
  add("all", [](T a, T) { return at::all(a, 0); });
  add("sign", [](T a, T) { return at::sign(a); });
  add("isclose", [](T a, T b) { return at::isclose(a, b); });
  add("logical_and", [](T a, T b) { return at::logical_and(a, b); });
  add("where", [](T a, T b) { return at::where(at::gt(a, b), a, b); });
  add("sort", [](T a, T) { return std::get<0>(at::sort(a, 1)); });
  add("abs", [](T a, T) { return at::abs(a); });
  check_ops(cases);
  // Two equal sums of different summands are equal.
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({4});
    const at::Tensor p = scattered(whole, mesh, {Partial()});
    EXPECT_TRUE(at::equal(p, distribute_tensor(whole, mesh, Placements{Replicate()})));
    EXPECT_TRUE(at::allclose(p, distribute_tensor(whole, mesh, Placements{Shard(0)})));
    EXPECT_FALSE(at::equal(p, distribute_tensor(whole + 1, mesh, Placements{Replicate()})));
  });
}

// (#149768) A number is added once, not by every rank.
TEST(KnownMistakes, Item03_ScalarAddedOnEveryRankToPartial) {
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"x", 2}}, std::vector<MeshDim>{{"x", 4}},
        std::vector<MeshDim>{{"x", 2}, {"y", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      const at::Tensor whole = numbers({5});
      for (const Placements& placements : all_layouts(static_cast<int>(dims.size()), 1, true)) {
        SCOPED_TRACE(to_string(placements));
        const auto p = [&] { return scattered(whole, mesh, placements); };
        const at::Tensor one =
            distribute_tensor(at::scalar_tensor(1.0, at::kDouble), mesh, Placements(dims.size()));
        expect_value(p() + 1, whole + 1);
        expect_value(1 - p(), 1 - whole);
        expect_value(at::rsub(p(), 3, 2), 3 - whole * 2);
        expect_value(at::sub(p(), 3, 2), whole - 6);
        expect_value(p().add_(1), whole + 1);
        expect_value(p().sub_(1).mul_(2), (whole - 1) * 2);
        expect_value(p() + at::scalar_tensor(2.5, at::kDouble), whole + 2.5);
        expect_value(p() + one, whole + 1);
        expect_value(p().add_(one, 4), whole + 4);
        expect_value(at::add(one, p()), whole + 1);
        expect_value(at::addcmul(p(), one, one, 3), whole + 3);
        expect_value(at::lerp(p(), p() + 2, 0.5), whole + 1);
        expect_value(at::fill(p(), 3), at::full({5}, 3, at::kDouble));
        expect_value(p().fill_(3), at::full({5}, 3, at::kDouble));
        expect_value(at::full_like(p(), 2), at::full({5}, 2, at::kDouble));
        expect_value(at::ones_like(p()), at::ones({5}, at::kDouble));
        expect_value(at::masked_fill(p(), at::gt(p(), 2), 7),
                     at::masked_fill(whole, at::gt(whole, 2), 7));
      }
      // A clone: from_local() shares the memory, which add_() writes.
      const at::Tensor average =
          from_local(whole.clone(), mesh, Placements(dims.size(), Partial(ReduceOp::kAvg)));
      expect_value(average + 1, whole + 1);
      expect_value(average.add_(1), whole + 1);
    });
  }
}

// (torchtitan #2106) A bias counts once, and its gradient is not multiplied by the number of ranks.
TEST(KnownMistakes, Item04_BiasAddedByEveryRank) {
  for (int64_t tp : {2, 3, 4}) {
    on_mesh({{"tp", tp}}, [](const MeshPtr& mesh) {
      const at::Tensor x = numbers({3, 8}), w = numbers({5, 8}), b = numbers({5});
      at::Tensor pw = w.clone().requires_grad_(), pb = b.clone().requires_grad_();
      const at::Tensor want = at::linear(x, pw, pb);
      want.pow(2).sum().backward();
      for (const Placement& px : testing::all_placements(2, true)) {
        for (const Placement& place_w : testing::all_placements(2, false)) {
          for (const Placement& place_b : testing::all_placements(1, false)) {
            SCOPED_TRACE(absl::StrCat(px.to_string(), place_w.to_string(), place_b.to_string()));
            at::Tensor dw = distribute_tensor(w, mesh, Placements{place_w}).requires_grad_();
            at::Tensor db = distribute_tensor(b, mesh, Placements{place_b}).requires_grad_();
            const at::Tensor y = at::linear(scattered(x, mesh, {px}), dw, db);
            expect_value(y, want.detach());
            y.pow(2).sum().backward();
            finish_grad_sync({dw, db});
            expect_value(dw.grad(), pw.grad());
            expect_value(db.grad(), pb.grad());
            EXPECT_EQ(layout_of(db.grad()), layout_of(db));
          }
        }
      }
    });
  }
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = numbers({3, 4, 5}), w = numbers({2, 4, 3}), b = numbers({2});
    at::Tensor pb = b.clone().requires_grad_();
    at::conv1d(x, w, pb, 1, 1).pow(2).sum().backward();
    // Channels are summed over tp.
    at::Tensor db = distribute_tensor(b, mesh, Placements(2)).requires_grad_();
    const at::Tensor y =
        at::conv1d(distribute_tensor(x, mesh, Placements{Shard(0), Shard(1)}),
                   distribute_tensor(w, mesh, Placements{Replicate(), Shard(1)}), db, 1, 1);
    expect_value(y, at::conv1d(x, w, b, 1, 1));
    y.pow(2).sum().backward();
    finish_grad_sync({db});
    expect_value(db.grad(), pb.grad());
  });
}

// (#172932) Leaving and coming back loses nothing: what was Partial stays so, forward and backward.
TEST(KnownMistakes, Item05_ToLocalThenFromLocalLosesThePartialOfAGradient) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({4, 6});
    for (const Placements& placements : all_layouts(2, 2, true)) {
      SCOPED_TRACE(to_string(placements));
      const at::Tensor p = scattered(whole, mesh, placements).detach();
      at::Tensor leaf = p.clone().requires_grad_();
      ASSERT_EQ(layout_of(leaf), Layout(placements));
      const at::Tensor back =
          from_local(to_local(leaf), mesh, placements, std::vector<int64_t>{4, 6});
      EXPECT_EQ(layout_of(back), Layout(placements));
      expect_value(back, whole);
      back.pow(2).sum().backward();
      expect_value(leaf.grad(), 2 * whole);
    }
    // A parameter that is used on each rank's rows: its gradient is a Partial of which each rank
    // has its rows' share.
    const at::Tensor rows = distribute_tensor(whole, mesh, Placements{Shard(0), Replicate()});
    at::Tensor scale = distribute_tensor(numbers({6}), mesh, Placements(2)).requires_grad_();
    const at::Tensor local_scale = to_local(scale, Placements{Partial(), Replicate()});
    from_local(to_local(rows) * local_scale, mesh, {Shard(0), Replicate()}).sum().backward();
    EXPECT_EQ(layout_of(scale.grad()).to_string(), "[P(sum), R]");
    expect_value(scale.grad(), whole.sum(0));
    // And through DTensors again: the Partial that comes from below goes through both.
    at::Tensor again = distribute_tensor(numbers({6}), mesh, Placements(2)).requires_grad_();
    const at::Tensor copy =
        from_local(to_local(again), mesh, Placements(2), std::vector<int64_t>{6});
    (rows * copy).sum().backward();
    expect_value(again.grad(), whole.sum(0));
  });
}

// (#194457, #161368, #168134) Uneven pieces over several mesh dimensions, and strided ones.
TEST(KnownMistakes, Item06_UnevenShardsOverSeveralMeshDimensions) {
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"x", 2}, {"y", 2}}, std::vector<MeshDim>{{"x", 2}, {"y", 3}},
        std::vector<MeshDim>{{"x", 3}, {"y", 2}},
        std::vector<MeshDim>{{"x", 2}, {"y", 2}, {"z", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      const int n = static_cast<int>(dims.size());
      for (int64_t rows : {1, 3, 5, 7, 11, 13}) {
        const at::Tensor whole = numbers({rows, 2});
        std::vector<Layout> layouts = {Layout(Placements(n, Shard(0)))};
        std::vector<int> reversed;
        for (int m = n; m-- > 0;) reversed.push_back(m);
        layouts.push_back(*Layout::create(Placements(n, Shard(0)), reversed));
        for (int64_t factor : {2, 3}) {
          Placements strided(n, Shard(0));
          strided[0] = StridedShard(0, factor);
          layouts.emplace_back(strided);
          strided[0] = Shard(0);
          strided[n - 1] = StridedShard(0, factor);
          layouts.emplace_back(strided);
        }
        for (const Layout& layout : layouts) {
          SCOPED_TRACE(absl::StrCat(layout.to_string(), " of ", rows, " rows on ",
                                    mesh->mesh().to_string()));
          const at::Tensor replicated = distribute_tensor(whole, mesh, Placements(n));
          const at::Tensor sharded = redistribute(replicated, layout);
          EXPECT_TRUE(at::equal(full_tensor(sharded), whole));
          // One collective over all mesh dimensions, or one dimension after the other.
          at::Tensor stepwise = sharded;
          for (auto m = layout.order().rbegin(); m != layout.order().rend(); ++m) {
            Placements fewer = layout_of(stepwise).placements();
            fewer[*m] = Replicate();
            stepwise = redistribute(stepwise, *Layout::create(fewer, layout.order()));
          }
          EXPECT_TRUE(at::equal(to_local(stepwise), whole));
          // What a rank says that it has, it has.
          const LocalExtent extent =
              local_extent(layout, mesh->mesh().shape(), mesh->coordinate(), {rows, 2});
          const at::Tensor local = to_local(sharded);
          ASSERT_EQ(local.size(0), extent.shape[0]);
          EXPECT_THAT(describe(sharded), HasSubstr(absl::StrCat("local [", local.size(0), ", 2]")));
          if (extent.contiguous) {
            EXPECT_TRUE(at::equal(local, whole.narrow(0, extent.offset[0], extent.shape[0])));
          }
          EXPECT_TRUE(at::equal(full_tensor(sharded + replicated), whole * 2));
          EXPECT_TRUE(at::equal(full_tensor(sharded.sum(0)), whole.sum(0)));
        }
      }
      // All local parts, gathered over the mesh as one dimension and put together by hand.
      const at::Tensor a = distribute_tensor(numbers({7, 3}), mesh, Placements(n, Shard(0)));
      EXPECT_TRUE(at::equal(full_tensor(from_local(to_local(a), mesh, Placements(n, Shard(0)))),
                            numbers({7, 3})));
    });
  }
}

// (#179502) The elements of a view of a sharded tensor are those of the view of the whole.
TEST(KnownMistakes, Item07_ViewOfAShardedDimension) {
  const struct {
    std::vector<int64_t> sizes, shape;
  } cases[] = {{{7, 6}, {42}},       {{42}, {7, 6}},       {{6, 7}, {2, 3, 7}},  {{6, 7}, {3, 14}},
               {{4, 6}, {8, 3}},     {{4, 6}, {2, 2, 6}},  {{4, 6}, {3, 8}},     {{5, 4}, {4, 5}},
               {{2, 3, 4}, {6, 4}},  {{2, 3, 4}, {2, 12}}, {{2, 3, 4}, {24}},    {{1, 5}, {5}},
               {{5}, {5, 1}},        {{3, 5}, {5, 3}},     {{12, 2}, {3, 4, 2}}, {{0, 4}, {4, 0}},
               {{12, 2}, {2, 6, 2}}, {{10, 3}, {2, 5, 3}}};
  std::vector<OpCase> views;
  for (const auto& c : cases) {
    const std::string name = absl::StrCat("[", absl::StrJoin(c.sizes, ", "), "] as [",
                                          absl::StrJoin(c.shape, ", "), "]");
    views.push_back({absl::StrCat("view ", name),
                     {in(c.sizes)},
                     [shape = c.shape](const Tensors& x) { return Tensors{x[0].view(shape)}; }});
    views.push_back({absl::StrCat("reshape and back ", name),
                     {in(c.sizes)},
                     [shape = c.shape, sizes = c.sizes](const Tensors& x) {
                       return Tensors{(x[0].reshape(shape) * 2).view(sizes).sin()};
                     }});
  }
  check_ops(views);
}

// (#178335, #168255) A number that changes every step is not part of what is cached, and lists hit
// the cache.
TEST(KnownMistakes, Item08_CacheThatGrowsOrNeverHits) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
    const at::Tensor a = distribute_tensor(numbers({7, 5}), mesh, Placements{Shard(0)});
    at::Tensor b = distribute_tensor(numbers({7, 5}), mesh, Placements{Shard(0)});
    const std::vector<at::Tensor> list = {a, b, a, b, a};
    auto step = [&](int i) {
      const double x = 0.001 * i;
      at::add(a, b, x);
      a.mul(x + 1).sub_(x).div_(x + 2);
      at::addcmul(a, a, b, x);
      at::addcdiv(a, a, b, x);
      at::lerp(a, b, x);
      at::clamp(a, -x, x);
      at::gelu(at::leaky_relu(a, x));
      at::pow(a, x);
      at::full_like(a, x);
      at::masked_fill(a, at::gt(a, x), x);
      at::where(at::gt(a, x), a, at::scalar_tensor(x, at::kDouble));
      at::stack(list);
      at::stack(list, -1);
      at::cat(list, 1);
      at::cat(list, 0);
    };
    step(0);
    step(1);
    const int64_t misses = dispatch_counters(mesh).cache_misses;
    const size_t entries = context->decisions.cache.size();
    const size_t specs = context->num_specs();
    for (int i = 2; i < 200; ++i) step(i);
    EXPECT_EQ(dispatch_counters(mesh).cache_misses, misses);
    EXPECT_EQ(context->decisions.cache.size(), entries);
    EXPECT_EQ(context->num_specs(), specs);
  });
}

// (#168058) One seed, one set of numbers: on any mesh, in any layout.
TEST(KnownMistakes, Item09_RandomNumbersThatDependOnTheSharding) {
  const auto draw = [](const MeshPtr& mesh, const Placements& placements) {
    manual_seed(mesh, 7);
    std::vector<at::Tensor> drawn;
    drawn.push_back(rand({7, 5}, mesh, placements));
    drawn.push_back(randn({5, 7}, mesh, placements));
    at::Tensor a = zeros({6, 4}, mesh, placements, at::kDouble);
    drawn.push_back(a.clone().normal_(1, 2));
    drawn.push_back(a.clone().uniform_(-1, 3));
    drawn.push_back(a.clone().bernoulli_(0.3));
    drawn.push_back(at::dropout(at::ones_like(a), 0.4, true));
    drawn.push_back(at::randn_like(a));
    drawn.push_back(at::rand_like(a));
    drawn.push_back(at::randint_like(a, 3, 90));
    at::Tensor weight = empty({9, 4}, mesh, placements);
    torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));
    drawn.push_back(weight.detach());
    std::vector<at::Tensor> whole;
    for (const at::Tensor& t : drawn) whole.push_back(full_tensor(t).clone());
    return whole;
  };
  std::vector<at::Tensor> want;
  on_mesh({{"x", 1}}, [&](const MeshPtr& mesh) { want = draw(mesh, {Replicate()}); });
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"x", 2}}, std::vector<MeshDim>{{"x", 3}},
        std::vector<MeshDim>{{"x", 4}}, std::vector<MeshDim>{{"x", 2}, {"y", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      for (const Placements& placements : all_layouts(static_cast<int>(dims.size()), 2, false)) {
        SCOPED_TRACE(to_string(placements) + " on " + mesh->mesh().to_string());
        const std::vector<at::Tensor> got = draw(mesh, placements);
        ASSERT_EQ(got.size(), want.size());
        for (size_t i = 0; i < got.size(); ++i) {
          EXPECT_TRUE(at::equal(got[i], want[i])) << "number " << i;
        }
      }
    });
  }
}

// (#180346) The norm of all gradients, though they lie on two meshes, is one number, the same on
// every rank.
TEST(KnownMistakes, Item10_ClipGradNormOverTwoMeshes) {
  struct Gradient {
    at::Tensor whole;
    int mesh;  // -1: plain
    Placements placements;
  };
  const std::vector<Gradient> gradients = {
      {numbers({7, 5}), 0, {Shard(0)}},
      {numbers({3}), 0, {Replicate()}},
      {numbers({2, 2}), 0, {Partial()}},
      {numbers({1, 3}), 0, {Shard(0)}},  // empty on three ranks
      {numbers({5, 6}).neg(), 1, {Shard(0), Shard(1)}},
      {numbers({5, 6}), 1, {Replicate(), Shard(1)}},
      {numbers({4}), 1, {Partial(), Shard(0)}},
      {numbers({4}), 1, {Shard(0), Shard(0)}},
      {numbers({2}), -1, {}},
  };
  std::mutex mutex;
  for (double norm_type : {1.0, 2.0, 3.0, kInfinity}) {
    for (double max_norm : {0.5, 1e9}) {
      std::vector<at::Tensor> plain;
      for (const Gradient& g : gradients) {
        plain.push_back(at::zeros(g.whole.sizes(), at::kDouble).requires_grad_());
        plain.back().mutable_grad() = g.whole.clone();
      }
      const double want = torch::nn::utils::clip_grad_norm_(plain, max_norm, norm_type);
      std::vector<double> norms;
      const absl::Status status = run_ranks(4, [&](World& world) -> absl::Status {
        const MeshPtr meshes[] = {init_device_mesh(world, {{"dp", 4}}).value(),
                                  init_device_mesh(world, {{"ep", 2}, {"tp", 2}}).value()};
        std::vector<at::Tensor> parameters;
        for (const Gradient& g : gradients) {
          if (g.mesh < 0) {
            parameters.push_back(at::zeros(g.whole.sizes(), at::kDouble).requires_grad_());
            parameters.back().mutable_grad() = g.whole.clone();
            continue;
          }
          Placements of_parameter = g.placements;
          for (Placement& p : of_parameter) {
            if (p.is_partial()) p = Replicate();
          }
          parameters.push_back(
              zeros(g.whole.sizes(), meshes[g.mesh], of_parameter, at::kDouble).requires_grad_());
          parameters.back().mutable_grad() = scattered(g.whole, meshes[g.mesh], g.placements);
        }
        parameters.push_back(zeros({3}, meshes[0], {Shard(0)}).requires_grad_());  // no gradient
        // LibTorch's own function has no way to know of two meshes: it says so.
        try {
          torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type);
          ADD_FAILURE() << "no error";
        } catch (const c10::Error& error) {
          EXPECT_THAT(std::string(error.what()), HasSubstr("mesh"));
        }
        const double norm = clip_grad_norm(parameters, max_norm, norm_type);
        EXPECT_NEAR(norm, want, 1e-9 * want);
        for (size_t i = 0; i < gradients.size(); ++i) {
          const at::Tensor& grad = parameters[i].grad();
          const at::Tensor whole = is_dtensor(grad) ? full_tensor(grad) : grad;
          EXPECT_TRUE(at::allclose(whole, plain[i].grad(), 1e-9)) << "gradient " << i;
        }
        const std::lock_guard<std::mutex> lock(mutex);
        norms.push_back(norm);
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
      for (double norm : norms) EXPECT_EQ(norm, norms[0]);  // the same bits
    }
  }
  // On one mesh LibTorch's function does, and ours says when there is nothing to clip by.
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    std::vector<at::Tensor> parameters, plain;
    for (const Placements& p :
         {Placements{Shard(0), Shard(1)}, Placements{Replicate(), Shard(0)}}) {
      plain.push_back(at::zeros({5, 3}, at::kDouble).requires_grad_());
      plain.back().mutable_grad() = numbers({5, 3});
      parameters.push_back(zeros({5, 3}, mesh, p, at::kDouble).requires_grad_());
      parameters.back().mutable_grad() = distribute_tensor(numbers({5, 3}), mesh, p);
    }
    const double norm = torch::nn::utils::clip_grad_norm_(parameters, 2.0);
    EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(plain, 2.0), 1e-9);
    expect_value(parameters[0].grad(), plain[0].grad());
    expect_value(parameters[1].grad(), plain[1].grad());
    parameters[1].mutable_grad().fill_(std::nan(""));
    EXPECT_TRUE(std::isnan(clip_grad_norm(parameters, 1.0, kInfinity)));
    EXPECT_THROW(clip_grad_norm(parameters, 1.0, 2, /*error_if_nonfinite=*/true), Error);
    EXPECT_THROW(clip_grad_norm(parameters, 1.0, 0), Error);
    EXPECT_EQ(clip_grad_norm({}, 1.0), 0);
  });
}

// Seen in PyTorch 2.11: means of shards' means, and gradients.
TEST(KnownMistakes, Item14_LossesAndGradientsOverUnevenShards) {
  const auto mean = at::Reduction::Mean;
  check_ops({
      {"mse_loss",
       {in({7, 5}), in({7, 5})},
       [](const Tensors& x) { return Tensors{at::mse_loss(x[0], x[1])}; }},
      {"huber_loss",
       {in({7, 5}), in({7, 5})},
       [=](const Tensors& x) { return Tensors{at::huber_loss(x[0], x[1], mean, 0.7)}; }},
      {"smooth_l1_loss",
       {in({7, 5}), in({7, 5})},
       [](const Tensors& x) { return Tensors{at::smooth_l1_loss(x[0], x[1])}; }},
      {"soft_margin_loss",
       {in({7, 5}), in({7, 5}).constant()},
       [](const Tensors& x) { return Tensors{at::soft_margin_loss(x[0], x[1])}; }},
      {"binary_cross_entropy",
       {in({7, 5}).uniform(0.1, 0.9), in({7, 5}).uniform(0, 1).constant()},
       [](const Tensors& x) { return Tensors{at::binary_cross_entropy(x[0], x[1])}; }},
      {"l1_loss",
       {in({7, 5}), in({7, 5})},
       [](const Tensors& x) { return Tensors{at::l1_loss(x[0], x[1])}; }},
      {"kl_div",
       {in({7, 5}), in({7, 5}).uniform(0.1, 1)},
       [](const Tensors& x) { return Tensors{at::kl_div(x[0], x[1])}; }},
      {"cosine_embedding_loss",
       {in({7, 5}), in({7, 5}), in({7}).constant()},
       [](const Tensors& x) {
         return Tensors{at::cosine_embedding_loss(x[0], x[1], x[2].sign(), 0.1)};
       }},
      {"stack along the last dim",
       {in({7, 5}), in({7, 5})},
       [](const Tensors& x) { return Tensors{at::stack({x[0], x[1]}, -1)}; }},
      {"tensordot",
       {in({7, 5, 3}), in({5, 3, 2})},
       [](const Tensors& x) { return Tensors{at::tensordot(x[0], x[1], {1, 2}, {0, 1})}; }},
      {"scatter",
       {in({7, 5}), in({7, 5}).integers(0, 7), in({7, 5})},
       [](const Tensors& x) {
         // Each place once: what wins otherwise is not defined.
         const at::Tensor index = at::argsort(x[1], int64_t{0}, false);
         return Tensors{at::scatter(x[0], 0, index, x[2])};
       }},
      {"scatter_add",
       {in({7, 5}), in({7, 5}).integers(0, 7), in({7, 5})},
       [](const Tensors& x) { return Tensors{at::scatter_add(x[0], 0, x[1], x[2])}; }},
      {"trapezoid",
       {in({7, 5})},
       [](const Tensors& x) { return Tensors{at::trapezoid(x[0], 0.5, 0)}; }},
      {"amax",
       {in({7, 5}).with_ties()},
       [](const Tensors& x) { return Tensors{at::amax(x[0], 0)}; }},
      {"amax of all", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::amax(x[0])}; }},
      {"norm -inf",
       {in({7, 5})},
       [](const Tensors& x) { return Tensors{at::norm(x[0], -kInfinity)}; }},
      {"conv3d",
       {in({3, 2, 4, 3, 3}), in({2, 2, 2, 2, 2}), in({2})},
       [](const Tensors& x) { return Tensors{at::conv3d(x[0], x[1], x[2], 1, 1)}; }},
  });
  // All targets of one rank's shard are ignored.
  for (int64_t n : {2, 3, 4}) {
    on_mesh({{"x", n}}, [](const MeshPtr& mesh) {
      const at::Tensor scores = at::sin(numbers({6, 4}));
      const at::Tensor targets = at::tensor({-100, -100, -100, 1, -100, 3}, at::kLong);
      at::Tensor plain = scores.clone().requires_grad_();
      const at::Tensor want = at::cross_entropy_loss(plain, targets);
      want.backward();
      for (const Placement& p : {Shard(0), Shard(1), Replicate()}) {
        at::Tensor leaf = distribute_tensor(scores, mesh, Placements{p}).requires_grad_();
        const at::Tensor loss = at::cross_entropy_loss(
            leaf, distribute_tensor(targets, mesh, Placements{p == Shard(0) ? p : Replicate()}));
        expect_value(loss, want.detach());
        loss.backward();
        expect_value(leaf.grad(), plain.grad());
      }
    });
  }
}

// What every rank's body ended with, after `body` and a collective that all others would wait in.
std::vector<absl::Status> ends_of_ranks(int num_ranks,
                                        const std::function<void(const MeshPtr&)>& body) {
  std::vector<absl::Status> ends(num_ranks);
  WorldOptions options;
  options.timeout = absl::Seconds(60);
  (void)run_ranks(
      num_ranks,
      [&](World& world) -> absl::Status {
        absl::Status& end = ends[world.rank()];
        const MeshPtr mesh = init_device_mesh(world, {{"x", world.size()}}).value();
        try {
          body(mesh);
          full_tensor(distribute_tensor(at::ones({8}), mesh, Placements{Shard(0)}));
        } catch (const Error& error) {
          end = error.status();
        } catch (const c10::Error& error) {
          end = absl::InvalidArgumentError(error.what_without_backtrace());
        }
        return end;
      },
      options);
  return ends;
}

// Seen in PyTorch 2.11 (index_put, cov, amax, argmin): one rank raises, the others wait for ever.
// An error that comes from one rank's data ends all ranks, soon; and where one device has no error,
// an empty shard has none.
TEST(KnownMistakes, Item15_OneRankRaisesAndTheOthersWait) {
  const auto start = std::chrono::steady_clock::now();
  const at::Tensor index = at::tensor({0, 1, 2, 99}, at::kLong);  // the last rank's is wrong
  const std::vector<std::pair<const char*, std::function<void(const MeshPtr&)>>> cases = {
      {"embedding",
       [&](const MeshPtr& mesh) {
         at::embedding(distribute_tensor(at::ones({5, 2}), mesh, Placements{Replicate()}),
                       distribute_tensor(index, mesh, Placements{Shard(0)}));
       }},
      {"index_select",
       [&](const MeshPtr& mesh) {
         at::index_select(distribute_tensor(at::ones({5, 2}), mesh, Placements{Replicate()}), 0,
                          distribute_tensor(index, mesh, Placements{Shard(0)}));
       }},
      {"index_put",
       [&](const MeshPtr& mesh) {
         at::Tensor a = distribute_tensor(at::ones({5, 2}), mesh, Placements{Shard(1)});
         at::index_put_(a, {distribute_tensor(index, mesh, Placements{Shard(0)})},
                        distribute_tensor(at::ones({4, 2}), mesh, Placements{Shard(0)}));
       }},
      {"gather",
       [&](const MeshPtr& mesh) {
         at::gather(distribute_tensor(at::ones({4, 3}), mesh, Placements{Shard(0)}), 1,
                    distribute_tensor(index.view({4, 1}), mesh, Placements{Shard(0)}));
       }},
      {"nll_loss",
       [&](const MeshPtr& mesh) {
         at::nll_loss(distribute_tensor(at::ones({4, 3}), mesh, Placements{Shard(0)}),
                      distribute_tensor(index, mesh, Placements{Shard(0)}));
       }},
      {"one_hot",
       [&](const MeshPtr& mesh) {
         at::one_hot(distribute_tensor(index, mesh, Placements{Shard(0)}), 5);
       }},
      {"linalg_cholesky",
       [&](const MeshPtr& mesh) {
         at::Tensor a = at::eye(2).repeat({4, 1, 1});
         a[3].neg_();
         at::linalg_cholesky(distribute_tensor(a, mesh, Placements{Shard(0)}));
       }},
      {"an operator with a wrong shape on every rank",
       [&](const MeshPtr& mesh) {
         at::mm(distribute_tensor(at::ones({4, 3}), mesh, Placements{Shard(0)}),
                distribute_tensor(at::ones({4, 3}), mesh, Placements{Shard(0)}));
       }},
  };
  for (const auto& [name, body] : cases) {
    const std::vector<absl::Status> ends = ends_of_ranks(4, body);
    for (size_t rank = 0; rank < ends.size(); ++rank) {
      EXPECT_FALSE(ends[rank].ok()) << name << ": rank " << rank << " saw no error";
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(40));

  // Three rows on four ranks: rank 3 has none.
  check_ops({
      {"amax", {in({3, 5})}, [](const Tensors& x) { return Tensors{at::amax(x[0], 0)}; }},
      {"amin of all", {in({3, 5})}, [](const Tensors& x) { return Tensors{at::amin(x[0])}; }},
      {"max",
       {in({3, 5})},
       [](const Tensors& x) { return Tensors{std::get<0>(at::max(x[0], 0))}; }},
      {"argmin",
       {in({3, 5})},
       [](const Tensors& x) { return Tensors{at::argmin(x[0], 0)}; },
       false},
      {"argmax of all",
       {in({3, 5})},
       [](const Tensors& x) { return Tensors{at::argmax(x[0])}; },
       false},
      {"cov", {in({3, 5})}, [](const Tensors& x) { return Tensors{at::cov(x[0])}; }},
      {"index_put",
       {in({3, 5}), in({2}).integers(0, 3), in({2, 5})},
       [](const Tensors& x) {
         return Tensors{at::index_put(x[0], {x[1]}, x[2], /*accumulate=*/true)};
       }},
      {"std", {in({3, 5})}, [](const Tensors& x) { return Tensors{at::std(x[0], 0)}; }},
      {"median",
       {in({3, 5})},
       [](const Tensors& x) { return Tensors{std::get<0>(at::median(x[0], 0))}; }},
  });
}

}  // namespace
}  // namespace shardweave

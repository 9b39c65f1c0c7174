// Loops in which the sizes are others in every step: what is kept is bounded, what comes back in
// every step stays, and a new size costs so many misses. Counts, no times.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "c10/core/GradMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/clock_cache.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/rule.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;

at::Tensor numbers(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return at::arange(n, at::kDouble).mul(0.7).sin().view(sizes);
}

// --- the clock -----------------------------------------------------------------------------------

struct Numbered : EntryOfClock {
  explicit Numbered(int key_in) : key(key_in) {}
  int key;
};

bool has(const ClockCache<Numbered>& cache, int key) {
  return cache.find(static_cast<uint64_t>(key), key) != nullptr;
}

std::unique_ptr<Numbered> put(ClockCache<Numbered>& cache, int key) {
  return cache.insert(static_cast<uint64_t>(key), std::make_unique<Numbered>(key));
}

TEST(ClockCacheTest, WhatIsUsedStays) {
  ClockCache<Numbered> cache(8);
  put(cache, -1);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(has(cache, -1)) << i;
    const std::unique_ptr<Numbered> gone = put(cache, i);
    EXPECT_EQ(gone == nullptr, i < 7) << i;
    if (gone != nullptr) {
      EXPECT_FALSE(has(cache, gone->key));
    }
    EXPECT_LE(cache.size(), 8u);
  }
  // All used: the oldest goes, and it ends.
  for (int i = 993; i < 1000; ++i) EXPECT_TRUE(has(cache, i)) << i;
  EXPECT_NE(put(cache, 1000), nullptr);
  EXPECT_TRUE(has(cache, 1000));
  EXPECT_EQ(cache.size(), 8u);
}

TEST(ClockCacheTest, OneEntryAndOneHash) {
  ClockCache<Numbered> one(1);
  for (int i = 0; i < 3; ++i) {
    put(one, i);
    EXPECT_TRUE(has(one, i));
  }
  ClockCache<Numbered> cache(4);
  cache.insert(7, std::make_unique<Numbered>(1));
  const std::unique_ptr<Numbered> gone = cache.insert(7, std::make_unique<Numbered>(2));
  ASSERT_NE(gone, nullptr);
  EXPECT_EQ(gone->key, 1);
  EXPECT_EQ(cache.find(7, 1), nullptr);
  EXPECT_NE(cache.find(7, 2), nullptr);
  for (int i = 100; i < 110; ++i) put(cache, i);
  EXPECT_EQ(cache.size(), 4u);
  EXPECT_EQ(cache.release().size(), 4u);
  EXPECT_EQ(cache.size(), 0u);
  put(cache, 1);
  EXPECT_TRUE(has(cache, 1));
}

// --- training over sequences of any length -------------------------------------------------------

constexpr int64_t kBatch = 2, kDim = 6;

// A transformer block and AdamW by hand: weights `w`, their moments, and a step over a batch.
struct Model {
  std::vector<at::Tensor> weights, first, second;
  static Model make(const std::function<at::Tensor(const at::Tensor&, int)>& place) {
    Model m;
    const std::vector<std::vector<int64_t>> sizes = {
        {kDim}, {3 * kDim, kDim}, {kDim, kDim}, {4 * kDim, kDim}, {kDim, 4 * kDim}};
    const int cuts[] = {-1, 0, 1, 0, 1};  // which dimension is cut over the ranks
    for (size_t i = 0; i < sizes.size(); ++i) {
      m.weights.push_back(place(numbers(sizes[i]) * 0.3, cuts[i]).requires_grad_());
      m.first.push_back(at::zeros_like(m.weights.back()).detach());
      m.second.push_back(at::zeros_like(m.weights.back()).detach());
    }
    return m;
  }
  at::Tensor loss(const at::Tensor& x) const {
    const std::vector<at::Tensor>& w = weights;
    const int64_t length = x.size(1);
    const at::Tensor h = at::layer_norm(x, {kDim}, w[0]);
    const std::vector<at::Tensor> parts = at::linear(h, w[1])
                                              .view({kBatch, length, 2, 3, kDim / 2})
                                              .permute({3, 0, 2, 1, 4})
                                              .unbind(0);
    // In place of the attention of all positions to all: the time of 1,000 steps.
    const at::Tensor gate = at::softmax(parts[0] * parts[1], -1);
    const at::Tensor mixed = (gate * parts[2]).transpose(1, 2).reshape({kBatch, length, kDim});
    const at::Tensor y = x + at::linear(mixed, w[2]);
    return (y + at::linear(at::gelu(at::linear(y, w[3])), w[4])).pow(2).mean();
  }
  void step() {
    const c10::AutoGradMode no_grad(false);
    finish_grad_sync(weights);
    for (size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor grad = weights[i].grad();
      first[i].mul_(0.9).add_(grad, 0.1);
      second[i].mul_(0.99).addcmul_(grad, grad, 0.01);
      weights[i].addcdiv_(first[i], second[i].sqrt().add_(1e-4), -1e-3);
      weights[i].mutable_grad() = at::Tensor();
    }
  }
};

// Lengths of 1 to 2048, in no order, none twice.
int64_t length_of_step(int64_t step) {
  return 1 + step * 1193 % 2039;
}

struct Lengths {
  std::vector<MeshDim> dims;
  Placements data;  // of a sequence; the last mesh dimension cuts the weights
  int64_t steps;
  int64_t misses_of_a_length;
};

void train_over(const Lengths& lengths) {
  on_mesh(lengths.dims, [&](const MeshPtr& mesh) {
    constexpr size_t kEntries = 600;  // of a few steps
    const int64_t steps = lengths.steps;
    const auto context = MeshContext::of(mesh);
    context->decisions.cache.set_capacity(kEntries);
    context->decisions.plans.set_capacity(100);
    Model plain = Model::make([](const at::Tensor& t, int) { return t.clone(); });
    Model sharded = Model::make([&](const at::Tensor& t, int dim) {
      Placements placements(lengths.dims.size());
      if (dim >= 0) placements.back() = Shard(dim);
      return distribute_tensor(t, mesh, placements);
    });
    size_t most_specs = 0, specs_of_first_half = 0, most_plans = 0;
    const auto misses = [&] { return dispatch_counters(mesh).cache_misses; };
    for (int64_t step = 0; step < steps; ++step) {
      // Short ones: what is counted does not depend on how long they are.
      const int64_t length = step == 0 ? 3000 : length_of_step(step);
      const bool compares = step % (steps / 4) < 2;
      const at::Tensor x =
          compares ? numbers({kBatch, length, kDim})
                   : at::zeros({kBatch, 1, 1}, at::kDouble).expand({kBatch, length, kDim});
      const at::Tensor input =
          compares
              ? distribute_tensor(x, mesh, lengths.data, {.source = std::nullopt})
              : zeros({kBatch, length, kDim}, mesh, lengths.data, at::TensorOptions(at::kDouble));
      const int64_t before = misses();
      sharded.loss(input).backward();
      const int64_t after_backward = misses();
      // No length costs more than another, however many there were.
      if (step > 0) {
        ASSERT_LE(after_backward - before, lengths.misses_of_a_length) << step;
      }
      if (compares) {
        // The same weights: what was evicted in between is decided again as it was.
        for (size_t i = 0; i < plain.weights.size(); ++i) {
          const c10::AutoGradMode no_grad(false);
          plain.weights[i].copy_(full_tensor(sharded.weights[i]));
        }
        plain.loss(x).backward();
        for (size_t i = 0; i < plain.weights.size(); ++i) {
          EXPECT_TRUE(
              at::allclose(full_tensor(sharded.weights[i].grad()), plain.weights[i].grad(), 1e-9))
              << "step " << step << ", weight " << i;
          plain.weights[i].mutable_grad() = at::Tensor();
        }
      }
      const int64_t before_step = misses();
      sharded.step();
      // What is the same in every step is decided once.
      if (step > 1) {
        ASSERT_EQ(misses(), before_step) << step;
      }
      ASSERT_LE(context->decisions.cache.size(), kEntries);
      most_specs = std::max(most_specs, context->num_specs());
      most_plans = std::max(most_plans, context->decisions.plans.size());
      if (step == steps / 2) specs_of_first_half = most_specs;
    }
    EXPECT_EQ(context->decisions.cache.size(), kEntries);  // it was full, many times over
    EXPECT_GT(misses(), static_cast<int64_t>(20 * kEntries));
    EXPECT_LE(most_plans, 100u);
    EXPECT_EQ(context->decisions.cache.num_put_aside(), 0u);
    EXPECT_LE(most_specs, 2 * kEntries);
    EXPECT_LE(most_specs, specs_of_first_half + specs_of_first_half / 10);
  });
}

TEST(DynamicShapesTest, AThousandLengths) {
  train_over({{{"x", 2}}, {Replicate()}, 1000, 90});
}

TEST(DynamicShapesTest, LengthsOnThreeDimensions) {
  train_over({{{"dp", 2}, {"sp", 2}, {"tp", 2}}, {Shard(0), Shard(1), Replicate()}, 240, 65});
}

// --- specs ---------------------------------------------------------------------------------------

TEST(DynamicShapesTest, SpecsThatNobodyUsesGo) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const auto context = MeshContext::of(mesh);
    const at::Tensor kept = zeros({5, 3}, mesh, {Shard(0)});
    const SpecRef spec = meta_of(kept).spec;
    std::vector<at::Tensor> used;
    for (int64_t n = 0; n < 300; ++n) used.push_back(zeros({n, 7}, mesh, {Shard(0)}));
    for (int64_t n = 0; n < 10000; ++n) {
      zeros({n, 9}, mesh, {Shard(0)});
      ASSERT_LE(context->num_specs(), 500u);
    }
    // Those that are in use are the same objects still.
    EXPECT_EQ(meta_of(zeros({5, 3}, mesh, {Shard(0)})).spec, spec);
    for (int64_t n = 0; n < 300; ++n) {
      EXPECT_EQ(meta_of(zeros({n, 7}, mesh, {Shard(0)})).spec, meta_of(used[n]).spec);
    }
    used.clear();
    for (int64_t n = 0; n < 300; ++n) zeros({n, 11}, mesh, {Shard(0)});
    EXPECT_LE(context->num_specs(), 200u);
  });
}

// What a new length tells the user is what another has told already.
TEST(DynamicShapesTest, WarningsDoNotGrowWithTheSizes) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const c10::AutoGradMode no_grad(false);
    const auto context = MeshContext::of(mesh);
    at::Tensor table = distribute_tensor(numbers({64, 6}), mesh, Placements{Shard(1)});
    table.requires_grad_();
    for (int64_t n = 1; n < 60; ++n) {
      // A part of a weight, made anew in every step, whole again.
      at::sort(table.slice(0, 0, n).to(at::kFloat), 1);
    }
    EXPECT_GE(dispatch_counters(mesh).unsharded_weights, 59);
    EXPECT_LE(context->observation.said_unsharded.size(), 2u);
  });
}

// --- operators within operators ------------------------------------------------------------------

thread_local std::function<void()> within_the_kernel;
thread_local c10::weak_intrusive_ptr<const Spec>* spec_of_result = nullptr;

// Of tan: runs what the test wants, then the operator.
void running_others(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  *spec_of_result = c10::weak_intrusive_ptr<const Spec>(call.outputs[0]);
  const auto body = within_the_kernel;  // which it may change
  body();
  EXPECT_FALSE(spec_of_result->expired()) << "the entry was freed while its operator runs";
  op.callBoxed(&stack);
}

TEST(DynamicShapesTest, AnEntryStaysWhileItsOperatorRuns) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const c10::AutoGradMode no_grad(false);
    const auto context = MeshContext::of(mesh);
    add_rule(mesh, "aten::tan", pointwise().runs(&running_others));
    constexpr size_t kEntries = 5;
    context->decisions.cache.set_capacity(kEntries);
    c10::weak_intrusive_ptr<const Spec> result_spec{c10::intrusive_ptr<const Spec>()};
    spec_of_result = &result_spec;
    const auto sweep = [&] {
      for (int64_t n = 1; n < 40; ++n) {
        const at::Tensor other = ones({n, 3}, mesh, {Shard(0)});
        at::add(other, other);
        at::mul(other, other);
      }
      EXPECT_EQ(context->decisions.cache.size(), kEntries);
      EXPECT_GT(context->decisions.cache.num_put_aside(), kEntries);
    };
    const auto tan_of = [&](int64_t rows) {
      const at::Tensor whole = numbers({rows, 4});
      return std::pair(at::tan(distribute_tensor(whole, mesh, Placements{Shard(0)})),
                       at::tan(whole));
    };
    within_the_kernel = sweep;
    for (int64_t rows : {5, 7, 5}) {
      const auto [got, want] = tan_of(rows);
      EXPECT_TRUE(at::allclose(full_tensor(got), want));
    }
    // Two deep, and the cost model, by which all entries were decided, changes below.
    within_the_kernel = [&] {
      c10::weak_intrusive_ptr<const Spec> inner_spec{c10::intrusive_ptr<const Spec>()};
      auto* const outer = std::exchange(spec_of_result, &inner_spec);
      within_the_kernel = [&] {
        sweep();
        context->decisions.set_cost_model(context->decisions.cost_model(),
                                          context->operator_under_way());
      };
      EXPECT_TRUE(at::allclose(full_tensor(tan_of(9).first), at::tan(numbers({9, 4}))));
      spec_of_result = outer;
    };
    const auto [got, want] = tan_of(11);
    EXPECT_TRUE(at::allclose(full_tensor(got), want));
    within_the_kernel = nullptr;
    // What was put aside goes with the next miss of an operator that runs within none.
    EXPECT_GT(context->decisions.cache.num_put_aside(), 0u);
    const at::Tensor last = ones({13, 3}, mesh, {Shard(0)});
    at::add(last, last);
    EXPECT_EQ(context->decisions.cache.num_put_aside(), 0u);
  });
}

TEST(DynamicShapesTest, NoRuleIsAddedWhileAnOperatorRuns) {
  const absl::Status status = try_on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const c10::AutoGradMode no_grad(false);
    add_rule(mesh, "aten::tan", pointwise().runs(&running_others));
    c10::weak_intrusive_ptr<const Spec> result_spec{c10::intrusive_ptr<const Spec>()};
    spec_of_result = &result_spec;
    within_the_kernel = [&] { add_rule(mesh, "aten::sinh", pointwise()); };
    at::tan(ones({4, 3}, mesh, {Shard(0)}));
  });
  within_the_kernel = nullptr;
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("'aten::sinh'"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("between operators"));
}

}  // namespace
}  // namespace shardweave

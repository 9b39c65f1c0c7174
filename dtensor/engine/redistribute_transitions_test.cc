// Every placement to every placement on real ranks: values, on inproc and Gloo; and on the wire
// exactly what the planner said.

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/testing/counted_mesh.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/placement/layout_samples.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

using testing::Carrier;
using testing::on_counted_mesh;
using testing::on_mesh;
using testing::Sent;

const std::vector<ReduceOp> kReductions = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin,
                                           ReduceOp::kMax, ReduceOp::kProduct};

std::vector<MeshDim> named(const Dims& mesh_shape) {
  std::vector<MeshDim> dims;
  for (size_t i = 0; i < mesh_shape.size(); ++i)
    dims.push_back({absl::StrCat("m", i), mesh_shape[i]});
  return dims;
}

// Small integers, so that every reduction is exact in every dtype.
at::Tensor numbers(const Dims& sizes, at::ScalarType dtype) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  const at::Tensor flat =
      at::arange(n, at::kLong).mul(5).remainder(7).add(dtype == at::kBool ? -3 : 1).clamp_min(0);
  return flat.view(at::IntArrayRef(sizes.data(), sizes.size())).to(dtype);
}

// The elements of `whole` that a rank holds, one index after the other.
at::Tensor part_of(const at::Tensor& whole, const Layout& layout, const MeshPtr& mesh) {
  at::Tensor part = whole;
  for (int d = 0; d < static_cast<int>(whole.dim()); ++d) {
    std::vector<int64_t> rows;
    for (const Interval& i : local_intervals(layout, mesh->mesh().shape(), mesh->coordinate(),
                                             {whole.sizes().data(), whole.sizes().size()}, d)) {
      for (int64_t r = i.begin; r < i.end; ++r) rows.push_back(r);
    }
    part = part.index_select(d, at::tensor(rows, at::kLong));
  }
  return part;
}

// This rank's share of a value that rank `index` of `n` holds as a Partial: different on every
// rank.
at::Tensor share(const at::Tensor& value, ReduceOp op, int64_t index, int64_t n) {
  const bool last = index + 1 == n;
  switch (op) {
    case ReduceOp::kSum:
      return last ? value.sub((n - 1) * n / 2) : at::full_like(value, index + 1);
    case ReduceOp::kAvg:
      return index == 0 ? value.add(n - 1) : value.sub(1);
    case ReduceOp::kMin:
      return last ? value.clone() : value.add(index + 1);
    case ReduceOp::kMax:
      return last ? value.clone() : value.sub(index + 1);
    case ReduceOp::kProduct:
      return last ? value.clone() : at::ones_like(value);
  }
  return {};
}

// The value `whole` in any layout, made without the code under test.
at::Tensor laid_out(const at::Tensor& whole, const Layout& layout, const MeshPtr& mesh) {
  at::Tensor local = part_of(whole, layout, mesh);
  for (int m = 0; m < layout.mesh_ndim(); ++m) {
    if (!layout[m].is_partial()) continue;
    local = share(local, layout[m].reduce_op(), mesh->coordinate()[m], mesh->mesh().size(m));
  }
  std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  const absl::Span<const int64_t> sizes(whole.sizes().data(), whole.sizes().size());
  SpecRef spec = context->intern(layout, sizes, contiguous_strides(sizes), whole.scalar_type(),
                                 whole.device());
  return wrap(local.contiguous(), std::move(spec), context);
}

std::string explain(const Layout& from, const Layout& to, const MeshPtr& mesh) {
  return absl::StrCat(from.to_string(), " -> ", to.to_string(), " on ", mesh->mesh().to_string(),
                      ", rank ", mesh->rank().value);
}

// Whether `tensor` is `whole`. What a Partial stands for is asked of a full_tensor().
bool holds(const at::Tensor& tensor, const at::Tensor& whole, const MeshPtr& mesh) {
  const Layout& layout = layout_of(tensor);
  if (layout.has_partial()) return at::equal(full_tensor(tensor), whole);
  return at::equal(to_local(tensor), part_of(whole, layout, mesh));
}

using Transition = std::pair<Layout, Layout>;

// All pairs, or `count` random ones.
std::vector<Transition> transitions(const std::vector<Layout>& layouts, size_t count) {
  std::vector<Transition> result;
  if (layouts.size() * layouts.size() <= count) {
    for (const Layout& from : layouts) {
      for (const Layout& to : layouts) result.emplace_back(from, to);
    }
    return result;
  }
  std::mt19937_64 random(11);
  std::uniform_int_distribution<size_t> any(0, layouts.size() - 1);
  for (size_t i = 0; i < count; ++i) {
    const size_t from = any(random);
    result.emplace_back(layouts[from], layouts[any(random)]);
  }
  return result;
}

// Those of equal parts count as the same of parts of any sizes, which is all that a plan says.
Sent of_any_parts(Sent sent) {
  const std::map<OpKind, OpKind> with_counts = {{OpKind::kAllGather, OpKind::kAllGatherV},
                                                {OpKind::kReduceScatter, OpKind::kReduceScatterV},
                                                {OpKind::kAllToAll, OpKind::kAllToAllV}};
  for (auto& collective : sent) {
    const auto found = with_counts.find(collective.op);
    if (found != with_counts.end()) collective.op = found->second;
  }
  return sent;
}

// An exchange after which all ranks of the group have what each had, in equal parts.
bool is_even_gather(const RedistributeStep& step, const Dims& mesh_shape, const Dims& sizes) {
  Dims left = sizes;
  for (int m : step.before.order()) {
    const Placement& p = step.before[m];
    const bool moves =
        std::find(step.mesh_dims.begin(), step.mesh_dims.end(), m) != step.mesh_dims.end();
    if (moves && !(p.is_plain_shard() && step.after[m].is_replicate())) return false;
    if (!p.is_shard()) continue;
    const Dims parts = cut_sizes(p, left[p.dim()], mesh_shape[m]);
    if (moves && parts.size() != 1) return false;
    left[p.dim()] = parts[0];
  }
  return true;
}

// The collectives that a plan issues, as ranks list them, with the planner's bytes.
Sent planned(const RedistributePlan& plan, const Dims& mesh_shape, const Dims& sizes) {
  Sent result;
  for (const RedistributeStep& step : plan.steps) {
    if (step.is_local()) continue;
    const std::map<StepKind, OpKind> ops = {{StepKind::kAllGather, OpKind::kAllGatherV},
                                            {StepKind::kAllReduce, OpKind::kAllReduce},
                                            {StepKind::kReduceScatter, OpKind::kReduceScatterV},
                                            {StepKind::kAllToAll, OpKind::kAllToAllV},
                                            {StepKind::kExchange, OpKind::kAllToAllV}};
    const bool gathers =
        step.kind == StepKind::kExchange && is_even_gather(step, mesh_shape, sizes);
    result.push_back({gathers ? OpKind::kAllGatherV : ops.at(step.kind), step.bytes});
  }
  return result;
}

void check_transitions(const Dims& mesh_shape, const Dims& sizes,
                       const std::vector<Transition>& all, at::ScalarType dtype = at::kFloat,
                       Carrier carrier = Carrier::kInproc) {
  const int num_ranks = static_cast<int>(
      std::accumulate(mesh_shape.begin(), mesh_shape.end(), int64_t{1}, std::multiplies<>()));
  // [rank][transition]: what it sent.
  std::vector<std::vector<Sent>> logs(num_ranks);
  std::vector<Sent> plans;
  on_counted_mesh(named(mesh_shape), carrier, [&](const MeshPtr& mesh, Sent& sent) {
    const at::Tensor whole = numbers(sizes, dtype);
    const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
    for (const auto& [from, to] : all) {
      const at::Tensor start = laid_out(whole, from, mesh);
      const at::Tensor before = to_local(start).clone();
      sent.clear();
      const at::Tensor end = redistribute(start, to);
      logs[mesh->rank().value].push_back(of_any_parts(sent));
      if (mesh->rank().value == 0) {
        plans.push_back(
            planned(searched_plan(*context, *meta_of(start).spec, to), mesh_shape, sizes));
      }
      EXPECT_EQ(layout_of(end), to);
      ASSERT_TRUE(holds(end, whole, mesh)) << explain(from, to, mesh) << ": " << to_local(end);
      ASSERT_TRUE(at::equal(to_local(start), before)) << explain(from, to, mesh);
      ASSERT_TRUE(from == to || !to_local(end).is_alias_of(to_local(start)))
          << explain(from, to, mesh);
    }
  });
  if (::testing::Test::HasFailure()) return;
  for (size_t t = 0; t < all.size(); ++t) {
    // The planner's figure of a step is that of the rank that sends most; every rank takes part in
    // every step.
    Sent most = logs[0][t];
    for (const std::vector<Sent>& log : logs) {
      ASSERT_EQ(log[t].size(), most.size()) << all[t].first << " -> " << all[t].second;
      for (size_t i = 0; i < most.size(); ++i) {
        ASSERT_EQ(log[t][i].op, most[i].op) << all[t].first << " -> " << all[t].second;
        most[i].bytes = std::max(most[i].bytes, log[t][i].bytes);
      }
    }
    ASSERT_EQ(most.size(), plans[t].size()) << all[t].first << " -> " << all[t].second;
    for (size_t i = 0; i < most.size(); ++i) {
      ASSERT_EQ(most[i], plans[t][i])
          << all[t].first << " -> " << all[t].second << ", step " << i << ": " << most[i].bytes
          << " bytes, planned " << plans[t][i].bytes;
    }
  }
}

std::vector<Layout> every_layout(const Dims& mesh_shape, const Dims& sizes,
                                 const std::vector<ReduceOp>& reductions) {
  std::vector<Placements> placements;
  for (int64_t n : mesh_shape) placements.push_back(all_placements(n, sizes, reductions));
  return all_layouts(placements, mesh_shape, sizes);
}

TEST(RedistributeTransitionsTest, OneMeshDimension) {
  for (int64_t n : {2, 3, 4}) {
    for (const Dims& sizes : std::vector<Dims>{{7, 5}, {1, 3}, {0, 3}, {3, 2, 4}, {12}}) {
      SCOPED_TRACE(absl::StrCat(n, " ranks, [", absl::StrJoin(sizes, ", "), "]"));
      check_transitions({n}, sizes, transitions(every_layout({n}, sizes, kReductions), 1000));
    }
  }
}

TEST(RedistributeTransitionsTest, Scalars) {
  check_transitions({3}, {}, transitions(every_layout({3}, {}, kReductions), 100));
  check_transitions({2, 2}, {}, transitions(every_layout({2, 2}, {}, kReductions), 1000));
}

TEST(RedistributeTransitionsTest, TwoMeshDimensions) {
  for (const Dims& mesh_shape : std::vector<Dims>{{2, 2}, {2, 3}}) {
    for (const Dims& sizes : std::vector<Dims>{{7, 5}, {1, 6}, {5, 0}}) {
      SCOPED_TRACE(absl::StrCat(mesh_shape[1], ", [", absl::StrJoin(sizes, ", "), "]"));
      const auto layouts = every_layout(mesh_shape, sizes, {ReduceOp::kSum, ReduceOp::kMax});
      check_transitions(mesh_shape, sizes, transitions(layouts, 1200));
    }
  }
}

TEST(RedistributeTransitionsTest, ReductionsBesideEachOther) {
  std::vector<Placement> placements = {Replicate(), Shard(0)};
  for (ReduceOp op : kReductions) placements.push_back(Partial(op));
  const auto layouts = all_layouts({placements, placements}, {2, 3}, {4});
  check_transitions({2, 3}, {4}, transitions(layouts, 10000));
}

TEST(RedistributeTransitionsTest, ThreeMeshDimensions) {
  const auto layouts = every_layout({2, 2, 2}, {9, 4}, {ReduceOp::kSum, ReduceOp::kMin});
  check_transitions({2, 2, 2}, {9, 4}, transitions(layouts, 600));
  const Placements few = {Replicate(), Shard(0), Partial()};
  check_transitions({2, 2, 2}, {5},
                    transitions(all_layouts({few, few, few}, {2, 2, 2}, {5}), 4000));
}

TEST(RedistributeTransitionsTest, EveryDtype) {
  const Dims sizes = {5, 6};
  const auto with = [&](const std::vector<ReduceOp>& reductions) {
    return transitions(every_layout({3}, sizes, reductions), 1000);
  };
  for (at::ScalarType dtype :
       {at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar}) {
    SCOPED_TRACE(c10::toString(dtype));
    check_transitions({3}, sizes, with(kReductions), dtype);
  }
  check_transitions({3}, sizes, with({ReduceOp::kSum, ReduceOp::kProduct}), at::kByte);
  check_transitions({3}, sizes, with({}), at::kBool);
  check_transitions({3}, sizes, with({}), at::kFloat8_e4m3fn);
  for (at::ScalarType dtype : {at::kComplexFloat, at::kComplexDouble}) {
    SCOPED_TRACE(c10::toString(dtype));
    check_transitions({3}, sizes, with({ReduceOp::kSum, ReduceOp::kAvg}), dtype);
  }
}

TEST(RedistributeTransitionsTest, ComplexNumbersAreConjugatedAndMultiplied) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    // On 3 ranks: uneven rows, and columns of which each rank has as many.
    const at::Tensor whole = at::complex(numbers({5, 6}, at::kFloat), numbers({5, 6}, at::kFloat));
    const at::Tensor sharded = distribute_tensor(whole, mesh, Placements{Shard(0)}).conj();
    EXPECT_TRUE(at::equal(full_tensor(sharded), whole.conj().resolve_conj()));
    const double r = 1.0 + static_cast<double>(mesh->coordinate()[0]);
    const at::Tensor factor = whole.mul(c10::complex<double>(r, 1));
    const at::Tensor product = whole * whole * whole * c10::complex<double>(1, 1) *
                               c10::complex<double>(2, 1) * c10::complex<double>(3, 1);
    const at::Tensor partial = from_local(factor, mesh, {Partial(ReduceOp::kProduct)});
    for (const Placement& to :
         {Replicate(), Shard(0), Shard(1), StridedShard(0, 2), StridedShard(1, 2)}) {
      EXPECT_TRUE(at::allclose(full_tensor(redistribute(partial, Placements{to})), product)) << to;
    }
  });
}

TEST(RedistributeTransitionsTest, NotContiguous) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({6, 5}, at::kFloat);
    const std::vector<Placement> placements = {Replicate(), Shard(0), Shard(1)};
    for (const Placement& a : placements) {
      for (const Placement& b : placements) {
        const at::Tensor t = distribute_tensor(whole, mesh, Placements{a, b}).t();
        for (const Placement& c : placements) {
          for (const Placement& d : placements) {
            EXPECT_TRUE(holds(redistribute(t, {c, d}), whole.t().contiguous(), mesh));
          }
        }
      }
    }
  });
}

// The same bits again, and on the other backend: reductions go in rank order on both.
TEST(RedistributeTransitionsTest, TheSameBitsEveryTimeAndOnEveryBackend) {
  const Dims mesh_shape = {2, 2};
  std::vector<Placement> placements = {Replicate(), Shard(0), Shard(1), Partial(),
                                       Partial(ReduceOp::kAvg)};
  const auto all = transitions(all_layouts({placements, placements}, mesh_shape, {13, 11}), 300);
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    auto run = [&](Carrier carrier) {
      std::vector<std::vector<at::Tensor>> results(4);  // [rank][transition]
      on_counted_mesh(named(mesh_shape), carrier, [&](const MeshPtr& mesh, Sent&) {
        for (const auto& [from, to] : all) {
          // Values whose sum depends on the order of the summands.
          at::Tensor local = part_of(at::zeros({13, 11}), from, mesh);
          local = at::sin(at::arange(local.numel(), at::kDouble)
                              .mul(1.37 + static_cast<double>(mesh->rank().value)))
                      .mul(1e3)
                      .exp2()
                      .clamp(1e-4, 1e4)
                      .view(local.sizes())
                      .to(dtype);
          const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
          const at::Tensor start =
              wrap(local, context->intern(from, {13, 11}, {11, 1}, dtype, at::kCPU), context);
          results[mesh->rank().value].push_back(to_local(redistribute(start, to)).clone());
        }
      });
      return results;
    };
    const auto first = run(Carrier::kInproc);
    for (Carrier carrier : {Carrier::kInproc, Carrier::kGloo}) {
      const auto again = run(carrier);
      for (size_t rank = 0; rank < first.size(); ++rank) {
        ASSERT_EQ(first[rank].size(), again[rank].size());
        for (size_t i = 0; i < first[rank].size(); ++i) {
          ASSERT_TRUE(at::equal(first[rank][i], again[rank][i]))
              << all[i].first << " -> " << all[i].second << " on rank " << rank;
        }
      }
    }
  }
}

TEST(RedistributeTransitionsTest, OnGloo) {
  const auto layouts = every_layout({2, 2}, {7, 5}, {ReduceOp::kSum, ReduceOp::kMax});
  check_transitions({2, 2}, {7, 5}, transitions(layouts, 150), at::kFloat, Carrier::kGloo);
  check_transitions({3}, {7, 5}, transitions(every_layout({3}, {7, 5}, kReductions), 1000),
                    at::kFloat, Carrier::kGloo);
}

}  // namespace
}  // namespace shardweave

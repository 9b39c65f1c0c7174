#include "shardweave/placement/direct_plan.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "shardweave/placement/step_bytes.h"

namespace shardweave::placement_internal {
namespace {

// The mesh dimensions whose pieces an exchange moves: those that cut a tensor dimension from the
// first difference between the two chains of cuts on. Not in order.
MeshDims moved_mesh_dims(const Layout& before, const Layout& after) {
  MeshDims moved;
  for (int m = 0; m < before.mesh_ndim(); ++m) {
    if (!before[m].is_shard()) continue;
    const auto a = before.shards_of(before[m].dim());
    if (a[0] != m) continue;  // every chain once
    const auto b = after.shards_of(before[m].dim());
    size_t same = 0;
    while (same < a.size() && same < b.size() && a[same] == b[same] &&
           before[a[same]] == after[b[same]]) {
      ++same;
    }
    moved.insert(moved.end(), a.begin() + same, a.end());
  }
  return moved;
}

void sort_unique(MeshDims& dims) {
  std::sort(dims.begin(), dims.end());
  dims.erase(std::unique(dims.begin(), dims.end()), dims.end());
}

// A plan in the making.
class PlanBuilder {
 public:
  explicit PlanBuilder(const RedistributeProblem& problem) : problem_(problem), at_(problem.from) {}

  const Layout& at() const { return at_; }

  void step(StepKind kind, const MeshDims& mesh_dims, Layout after) {
    const TensorCuts before_cuts = cuts_of(at_, problem_.mesh_shape, problem_.shape);
    const TensorCuts after_cuts = cuts_of(after, problem_.mesh_shape, problem_.shape);
    RedistributeStep& step = plan_.steps.emplace_back();
    step.kind = kind;
    step.mesh_dims.assign(mesh_dims.begin(), mesh_dims.end());
    int64_t num_ranks = 1;
    for (int m : mesh_dims) num_ranks *= problem_.mesh_shape[m];
    step.bytes =
        step_bytes(kind, mesh_dims[0], num_ranks, before_cuts, after_cuts, problem_.element_size);
    step.cost = step_cost(slowest_link(problem_.model, mesh_dims), step.bytes);
    step.before = std::move(at_);
    step.after = after;
    at_ = std::move(after);
  }

  // `layout` with another placement on one mesh dimension, the innermost cut if it is a shard.
  static Layout with(const Layout& layout, int m, const Placement& p) {
    Placements placements = layout.placements();
    placements[m] = p;
    std::vector<int> order = layout.order();
    order.erase(std::find(order.begin(), order.end(), m));
    order.push_back(m);
    return *Layout::create(std::move(placements), std::move(order));
  }

  // A shard as `p` if that fits the pieces, else a plain one of the same dimension.
  Layout with_shard(const Layout& layout, int m, const Placement& p) const {
    Layout result = with(layout, m, p);
    const bool fits = p.kind() != PlacementKind::kRaggedShard ||
                      validate(result, problem_.mesh_shape, problem_.shape).ok();
    return fits ? result : with(layout, m, Shard(p.dim()));
  }

  RedistributePlan finish() && { return std::move(plan_); }

 private:
  const RedistributeProblem& problem_;
  RedistributePlan plan_;
  Layout at_;
};

// One collective for all that is left to gather or to move.
void move_shards(PlanBuilder& builder, const Layout& to, const MeshDims& active) {
  Placements placements = to.placements();
  for (int m : active) {
    if (placements[m].is_partial()) placements[m] = Replicate();
  }
  Layout after = *Layout::create(std::move(placements), to.order());
  MeshDims moved = moved_mesh_dims(builder.at(), after);
  if (moved.empty()) return;
  std::sort(moved.begin(), moved.end());
  StepKind kind = StepKind::kExchange;
  if (moved.size() == 1) {
    const Placement& p = builder.at()[moved[0]];
    if (after[moved[0]].is_replicate()) {
      kind = StepKind::kAllGather;
    } else if (after[moved[0]].dim() != p.dim()) {
      kind = StepKind::kAllToAll;
    }
  }
  builder.step(kind, moved, std::move(after));
}

}  // namespace

MeshDims active_mesh_dims(const Layout& from, const Layout& to) {
  MeshDims active = moved_mesh_dims(from, to);  // those that are not shards before change anyway
  for (int m = 0; m < from.mesh_ndim(); ++m) {
    if (from[m] != to[m]) active.push_back(m);
  }
  // A Partial that does not commute with one on an earlier mesh dimension is in its way, and so on.
  sort_unique(active);
  for (int m = 0; m < from.mesh_ndim(); ++m) {
    if (!std::binary_search(active.begin(), active.end(), m)) continue;
    for (const Layout* layout : {&from, &to}) {
      if (!(*layout)[m].is_partial()) continue;
      for (int inner = m + 1; inner < from.mesh_ndim(); ++inner) {
        if (from[inner].is_partial() &&
            !commute((*layout)[m].reduce_op(), from[inner].reduce_op())) {
          active.push_back(inner);
        }
      }
    }
    sort_unique(active);
  }
  return active;
}

bool may_reduce_jointly(const Placement& after) {
  return after.kind() != PlacementKind::kStridedShard;
}

CostModel::Link slowest_link(const CostModel& model, absl::Span<const int> mesh_dims) {
  CostModel::Link result{0, std::numeric_limits<double>::infinity()};
  for (int m : mesh_dims) {
    const CostModel::Link link = model.link(m);
    result.latency = std::max(result.latency, link.latency);
    result.bandwidth = std::min(result.bandwidth, link.bandwidth);
  }
  return result;
}

namespace {

// With `joint`, neighbouring mesh dimensions that are reduced alike are reduced in one collective.
RedistributePlan direct_plan(const RedistributeProblem& problem, const MeshDims& active,
                             bool joint) {
  const Layout& from = problem.from;
  const Layout& to = problem.to;
  PlanBuilder builder(problem);
  auto is_active = [&](int m) { return std::binary_search(active.begin(), active.end(), m); };
  for (int m : to.order()) {
    if (is_active(m) && from[m].is_replicate() && to[m].is_shard()) {
      builder.step(StepKind::kSlice, {m}, builder.with_shard(builder.at(), m, to[m]));
    }
  }
  // From the last one on, so that each may be reduced.
  MeshDims partials;
  for (int m : active) {
    if (from[m].is_partial()) partials.push_back(m);
  }
  while (!partials.empty()) {
    const int last = partials.back();
    const bool scatters = to[last].is_shard();
    MeshDims reduced;
    Layout after = builder.at();
    do {
      const int m = partials.back();
      after = scatters ? builder.with_shard(after, m, to[m]) : builder.with(after, m, Replicate());
      reduced.insert(reduced.begin(), m);
      partials.pop_back();
    } while (joint && !partials.empty() && from[partials.back()] == from[last] &&
             to[partials.back()].is_shard() == scatters && may_reduce_jointly(to[last]) &&
             may_reduce_jointly(to[partials.back()]));
    builder.step(scatters ? StepKind::kReduceScatter : StepKind::kAllReduce, reduced,
                 std::move(after));
  }
  move_shards(builder, to, active);
  // From the first one on, so that the Partials within are not there yet: see may_become_partial().
  for (int m : active) {
    if (to[m].is_partial()) {
      builder.step(StepKind::kToPartial, {m}, builder.with(builder.at(), m, to[m]));
    }
  }
  return std::move(builder).finish();
}

}  // namespace

RedistributePlan direct_plan(const RedistributeProblem& problem, const MeshDims& active) {
  RedistributePlan plan = direct_plan(problem, active, /*joint=*/false);
  int partials = 0;
  for (int m : active) partials += problem.from[m].is_partial() ? 1 : 0;
  if (partials < 2) return plan;
  RedistributePlan joint = direct_plan(problem, active, /*joint=*/true);
  return joint.cost() <= plan.cost() ? joint : plan;
}

}  // namespace shardweave::placement_internal

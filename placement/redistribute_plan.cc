#include "shardweave/placement/redistribute_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <ostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/placement/redistribute_search.h"
#include "shardweave/placement/step_bytes.h"

namespace shardweave {
namespace {

absl::Status check(int64_t element_size, const CostModel& model, int mesh_ndim) {
  if (element_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot plan for elements of ", element_size, " bytes"));
  }
  for (int m = 0; m < mesh_ndim; ++m) {
    const CostModel::Link link = model.link(m);
    if (!(link.latency >= 0) || !std::isfinite(link.latency) || !(link.bandwidth > 0)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the cost model gives mesh dimension ", m, " a latency of ", link.latency,
          " s (wanted: 0 or more) and a bandwidth of ", link.bandwidth, " bytes/s (wanted: above 0)"));
    }
  }
  return absl::OkStatus();
}

// Whether a ragged shard is what Shard would give.
bool is_even(const Placement& ragged) {
  const std::vector<int64_t>& sizes = ragged.sizes();
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const auto n = static_cast<int64_t>(sizes.size());
  for (int64_t i = 0; i < n; ++i) {
    if (sizes[i] != chunk(total, n, i).size()) return false;
  }
  return true;
}

// The layout in which every rank holds the same as in `layout`, with the simplest placements.
Layout simplest(const Layout& layout, absl::Span<const int64_t> mesh_shape) {
  auto simpler = [&](int m) -> std::optional<Placement> {
    const Placement& p = layout[m];
    if (mesh_shape[m] == 1 && !p.is_replicate()) return Replicate();
    if (p.kind() == PlacementKind::kRaggedShard && is_even(p)) return Shard(p.dim());
    return std::nullopt;
  };
  Placements placements;
  for (int m = 0; m < layout.mesh_ndim(); ++m) {
    const std::optional<Placement> p = simpler(m);
    if (!p.has_value()) continue;
    if (placements.empty()) placements = layout.placements();
    placements[m] = *p;
  }
  if (placements.empty()) return layout;
  return *Layout::create(std::move(placements), layout.order());
}

// A plan for one mesh dimension, whose cut is the innermost one: nothing is cheaper than the direct
// step, so there is nothing to search for.
class SinglePlanner {
 public:
  SinglePlanner(const RedistributeProblem& problem, int mesh_dim)
      : problem_(problem), mesh_dim_(mesh_dim), cuts_(uncut(problem.shape)) {
    for (int m : problem.from.order()) {
      const Placement& p = problem.from[m];
      if (m != mesh_dim && p.is_shard()) add_cut(cuts_[p.dim()], cut_of(p, m));
    }
  }

  // Nothing where the best plan is not a single step, or one and a local step.
  std::optional<RedistributePlan> run() {
    const Placement& from = problem_.from[mesh_dim_];
    const Placement& to = problem_.to[mesh_dim_];
    if (from.is_partial() && to.kind() == PlacementKind::kStridedShard) return std::nullopt;
    RedistributePlan plan;
    if (from.is_replicate()) {
      add(plan, to.is_partial() ? StepKind::kToPartial : StepKind::kSlice, to, 0);
    } else if (from.is_partial()) {
      add_reduction(plan, to);
    } else {
      add_from_shard(plan, from, to);
    }
    if (to.is_partial() && !from.is_replicate()) add(plan, StepKind::kToPartial, to, 0);
    return plan;
  }

 private:
  Cut cut_of(const Placement& p, int m) const { return {&p, problem_.mesh_shape[m], m}; }

  void add_reduction(RedistributePlan& plan, const Placement& to) {
    if (to.is_shard()) {
      add(plan, StepKind::kReduceScatter, to,
          reduce_scatter_bytes(cuts_, to.dim(), cut_of(to, mesh_dim_), problem_.element_size));
    } else {
      add(plan, StepKind::kAllReduce, Replicate(),
          all_reduce_bytes(cuts_, problem_.mesh_shape[mesh_dim_], problem_.element_size));
    }
  }

  void add_from_shard(RedistributePlan& plan, const Placement& from, const Placement& to) {
    TensorCuts before = cuts_;
    add_cut(before[from.dim()], cut_of(from, mesh_dim_));
    const Cut target = cut_of(to, mesh_dim_);
    if (!to.is_shard()) {
      add(plan, StepKind::kAllGather, Replicate(),
          all_gather_bytes(before, from.dim(), problem_.element_size));
    } else if (to.dim() != from.dim()) {
      add(plan, StepKind::kAllToAll, to,
          all_to_all_bytes(before, from.dim(), to.dim(), target, problem_.element_size));
    } else {
      TensorCuts after = cuts_;
      add_cut(after[to.dim()], target);
      add(plan, StepKind::kExchange, to, exchange_bytes(before, after, problem_.element_size));
    }
  }

  void add(RedistributePlan& plan, StepKind kind, const Placement& to, int64_t bytes) {
    Layout before = plan.steps.empty() ? problem_.from : plan.steps.back().after;
    Layout after = problem_.to;
    if (to != problem_.to[mesh_dim_]) {
      Placements placements = before.placements();
      placements[mesh_dim_] = to;
      after = *Layout::create(std::move(placements), before.order());
    }
    RedistributeStep& step = plan.steps.emplace_back();
    step.kind = kind;
    step.mesh_dims = {mesh_dim_};
    step.before = std::move(before);
    step.after = std::move(after);
    step.bytes = bytes;
    if (!step.is_local()) step.cost = step_cost(problem_.model.link(mesh_dim_), bytes);
  }

  const RedistributeProblem& problem_;
  const int mesh_dim_;
  TensorCuts cuts_;  // of all other mesh dimensions
};

}  // namespace

std::string_view to_string(StepKind kind) {
  constexpr std::string_view kNames[] = {"all_gather",     "slice",      "all_reduce",
                                         "reduce_scatter", "all_to_all", "to_partial",
                                         "exchange"};
  return kNames[static_cast<int>(kind)];
}

std::string RedistributeStep::to_string() const {
  std::string text(shardweave::to_string(kind));
  if (kind == StepKind::kExchange) {
    absl::StrAppend(&text, "(mesh dims [", absl::StrJoin(mesh_dims, ", "), "], ",
                    before.to_string(), " -> ", after.to_string(), ")");
  } else {
    const int m = mesh_dims[0];
    absl::StrAppend(&text, "(mesh dim ", m, ", ", before[m].to_string(), " -> ",
                    after[m].to_string(), ")");
  }
  if (!is_local()) absl::StrAppend(&text, ": ", bytes, " bytes");
  return text;
}

int64_t RedistributePlan::bytes() const {
  int64_t sum = 0;
  for (const RedistributeStep& step : steps) {
    if (__builtin_add_overflow(sum, step.bytes, &sum)) return std::numeric_limits<int64_t>::max();
  }
  return sum;
}

double RedistributePlan::cost() const {
  double sum = 0;
  for (const RedistributeStep& step : steps) sum += step.cost;
  return sum;
}

bool RedistributePlan::is_local() const {
  return std::all_of(steps.begin(), steps.end(),
                     [](const RedistributeStep& step) { return step.is_local(); });
}

std::string RedistributePlan::to_string() const {
  if (steps.empty()) return "nothing to do";
  return absl::StrJoin(steps, "; ", [](std::string* out, const RedistributeStep& step) {
    out->append(step.to_string());
  });
}

std::ostream& operator<<(std::ostream& out, const RedistributeStep& step) {
  return out << step.to_string();
}

std::ostream& operator<<(std::ostream& out, const RedistributePlan& plan) {
  return out << plan.to_string();
}

absl::StatusOr<RedistributePlan> plan_redistribute(const Layout& from, const Layout& to,
                                                   absl::Span<const int64_t> mesh_shape,
                                                   absl::Span<const int64_t> shape,
                                                   int64_t element_size, const CostModel& model) {
  for (const Layout* layout : {&from, &to}) {
    if (absl::Status status = validate(*layout, mesh_shape, shape); !status.ok()) return status;
  }
  if (absl::Status status = check(element_size, model, from.mesh_ndim()); !status.ok()) {
    return status;
  }
  const Layout simple_from = simplest(from, mesh_shape);
  const Layout simple_to = simplest(to, mesh_shape);
  const auto active = active_mesh_dims(simple_from, simple_to);
  if (active.empty()) return RedistributePlan();
  const RedistributeProblem problem{simple_from, simple_to,    mesh_shape,
                                    shape,       element_size, model};
  std::optional<RedistributePlan> plan;
  if (active.size() == 1) plan = SinglePlanner(problem, active[0]).run();
  if (!plan.has_value()) plan = search_plan(problem, active);
  plan->steps.front().before = from;
  plan->steps.back().after = to;
  return *std::move(plan);
}

double transition_cost(const Placement& from, const Placement& to, int64_t num_ranks,
                       int64_t local_bytes, CostModel::Link link) {
  if (num_ranks == 1 || from == to || from.is_replicate()) return 0;
  const double bytes = static_cast<double>(local_bytes);
  const double piece = bytes / static_cast<double>(num_ranks);
  auto cost = [&](int messages, double sent) {
    return messages * link.latency + sent / link.bandwidth;
  };
  if (from.is_partial()) {
    const double all_reduce = cost(1, 2 * (bytes - piece));
    if (!to.is_shard()) return all_reduce;
    if (to.kind() != PlacementKind::kStridedShard) return cost(1, bytes - piece);
    return std::min(all_reduce, cost(2, bytes));  // reduce_scatter, then an exchange
  }
  if (!to.is_shard()) return cost(1, bytes * static_cast<double>(num_ranks - 1));
  return cost(1, to.dim() == from.dim() ? bytes : bytes - piece);
}

}  // namespace shardweave

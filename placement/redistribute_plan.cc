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
#include "shardweave/placement/direct_plan.h"
#include "shardweave/placement/redistribute_search.h"

namespace shardweave {
namespace {

using namespace placement_internal;

// Whether the tensor has less than 2^63 bytes.
bool is_countable(absl::Span<const int64_t> shape, int64_t element_size) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return true;
  int64_t bytes = element_size;
  return std::none_of(shape.begin(), shape.end(),
                      [&](int64_t size) { return __builtin_mul_overflow(bytes, size, &bytes); });
}

absl::Status check(absl::Span<const int64_t> shape, int64_t element_size, const CostModel& model,
                   int mesh_ndim) {
  if (element_size < 1 || !is_countable(shape, element_size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cannot plan for a tensor of shape [", absl::StrJoin(shape, ", "), "] with elements of ",
        element_size, " bytes (wanted: at least 1, and less than 2^63 in all)"));
  }
  for (int m = 0; m < mesh_ndim; ++m) {
    const CostModel::Link link = model.link(m);
    if (!(link.latency >= 0) || !std::isfinite(link.latency) || !(link.bandwidth > 0)) {
      return absl::InvalidArgumentError(absl::StrCat("the cost model gives mesh dimension ", m,
                                                     " a latency of ", link.latency,
                                                     " s (wanted: 0 or more) and a bandwidth of ",
                                                     link.bandwidth, " bytes/s (wanted: above 0)"));
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

// Whether the search could not improve on the direct plan, or would take too long.
bool is_surely_best(const MeshDims& active) {
  return active.size() == 1 || active.size() > kMaxSearchedMeshDims;
}

}  // namespace

std::string_view to_string(StepKind kind) {
  constexpr std::string_view kNames[] = {"all_gather", "slice",      "all_reduce", "reduce_scatter",
                                         "all_to_all", "to_partial", "exchange"};
  return kNames[static_cast<int>(kind)];
}

std::string RedistributeStep::to_string() const {
  std::string text(shardweave::to_string(kind));
  if (kind == StepKind::kExchange || mesh_dims.size() > 1) {
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
  if (absl::Status status = check(shape, element_size, model, from.mesh_ndim()); !status.ok()) {
    return status;
  }
  const Layout simple_from = simplest(from, mesh_shape);
  const Layout simple_to = simplest(to, mesh_shape);
  const MeshDims active = active_mesh_dims(simple_from, simple_to);
  if (active.empty()) return RedistributePlan();
  const RedistributeProblem problem{simple_from, simple_to, mesh_shape, shape, element_size, model};
  RedistributePlan plan = direct_plan(problem, active);
  if (!is_surely_best(active)) {
    std::optional<RedistributePlan> better = search_plan(problem, active, &plan);
    if (better.has_value()) plan = *std::move(better);
  }
  plan.steps.front().before = from;
  plan.steps.back().after = to;
  return plan;
}

double transition_cost(const Placement& from, const Placement& to, int64_t num_ranks,
                       int64_t local_bytes, CostModel::Link link) {
  if (num_ranks == 1 || local_bytes == 0 || from == to || from.is_replicate()) return 0;
  const double bytes = static_cast<double>(local_bytes);
  const double piece = bytes / static_cast<double>(num_ranks);
  auto cost = [&](double sent) { return link.latency + sent / link.bandwidth; };
  if (from.is_partial()) return cost((to.is_shard() ? 1 : 2) * (bytes - piece));
  if (!to.is_shard()) return cost(bytes * static_cast<double>(num_ranks - 1));
  return cost(to.dim() == from.dim() ? bytes : bytes - piece);
}

}  // namespace shardweave

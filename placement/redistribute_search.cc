#include "shardweave/placement/redistribute_search.h"

#include <algorithm>
#include <limits>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "shardweave/placement/step_bytes.h"

namespace shardweave {
namespace {

// Sets of active mesh dimensions.
using Mask = uint64_t;

// Where one active mesh dimension stands: its placement (an index into Search::options_), and for a
// shard how many active mesh dimensions cut the same tensor dimension before it.
struct Slot {
  uint8_t option = 0;
  uint8_t depth = 0;
  friend bool operator==(const Slot&, const Slot&) = default;
  template <typename H>
  friend H AbslHashValue(H h, Slot s) {
    return H::combine(std::move(h), s.option, s.depth);
  }
};

// A layout, as far as the active mesh dimensions (by index) go.
using Position = absl::InlinedVector<Slot, 4>;

constexpr uint8_t kReplicateOption = 0;

// A* over positions. Costs are compared first, then the number of steps.
class Search {
 public:
  Search(const RedistributeProblem& problem, absl::Span<const int> active);
  RedistributePlan run();

 private:
  struct Node {
    Position position;
    double cost = 0;
    int num_steps = 0;
    bool closed = false;
    // The last step, from `parent`.
    int parent = -1;
    StepKind kind = StepKind::kSlice;
    Mask moved = 0;
    int64_t step_bytes = 0;
    double step_cost = 0;
  };
  using Members = absl::InlinedVector<uint8_t, 4>;  // active mesh dims that cut a tensor dim, in order

  int num_active() const { return static_cast<int>(active_.size()); }
  void make_options(int i);
  uint8_t option_of(int i, const Placement& p) const;
  Position position_of(const Layout& layout) const;
  Layout layout_of(const Position& position) const;
  const Placement& placement(const Position& position, int i) const {
    return options_[i][position[i].option];
  }
  const Placement& placement_on(const Position& position, int mesh_dim) const;

  Members members(const Position& position, int tensor_dim) const;
  bool cut(const Position& position, TensorCuts* cuts) const;
  Cut cut_of(int i, uint8_t option) const {
    return {&options_[i][option], problem_.mesh_shape[active_[i]], active_[i]};
  }
  Position with(const Position& position, int i, uint8_t option) const;

  void expand(int node);
  void expand_partial(int node, const TensorCuts& cuts, int i);
  void expand_shard(int node, const TensorCuts& cuts, int i);
  void expand_replicate(int node, int i);
  void expand_exchanges(int node, const TensorCuts& cuts);
  bool may_reduce(const Position& position, int i) const;
  bool may_become(const Position& position, int i, ReduceOp op) const;

  double lower_bound(const Position& position) const;
  CostModel::Link link(Mask moved) const;
  bool worse_than_best(double cost, int num_steps) const {
    return std::tie(cost, num_steps) >= std::tie(best_cost_, best_num_steps_);
  }
  void reach(int parent, Position position, StepKind kind, Mask moved, int64_t bytes);
  RedistributePlan plan_to(int node) const;

  const RedistributeProblem& problem_;
  const absl::Span<const int> active_;
  TensorCuts outer_cuts_;           // of the mesh dimensions that are not active
  std::vector<int> candidate_dims_;  // tensor dimensions that may be sharded on the way
  std::vector<Placements> options_;  // of each active mesh dimension; Replicate first
  Position goal_;

  std::vector<Node> nodes_;
  absl::flat_hash_map<Position, int> index_;
  using Entry = std::tuple<double, int, int>;  // cost with lower bound, steps, node
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> open_;
  // Of the cheapest way to the goal so far.
  double best_cost_ = std::numeric_limits<double>::infinity();
  int best_num_steps_ = 0;
};

Search::Search(const RedistributeProblem& problem, absl::Span<const int> active)
    : problem_(problem), active_(active), outer_cuts_(uncut(problem.shape)) {
  auto is_active = [&](int m) { return std::binary_search(active.begin(), active.end(), m); };
  for (int m : problem.from.order()) {
    const Placement& p = problem.from[m];
    if (p.is_shard() && !is_active(m)) {
      add_cut(outer_cuts_[p.dim()], {&p, problem.mesh_shape[m], m});
    }
  }
  for (const Layout* layout : {&problem.from, &problem.to}) {
    for (int m : active) {
      if ((*layout)[m].is_shard()) candidate_dims_.push_back((*layout)[m].dim());
    }
  }
  if (!problem.shape.empty()) {
    candidate_dims_.push_back(static_cast<int>(
        std::max_element(problem.shape.begin(), problem.shape.end()) - problem.shape.begin()));
  }
  for (int i = 0; i < num_active(); ++i) make_options(i);
  goal_ = position_of(problem.to);
}

void Search::make_options(int i) {
  Placements& options = options_.emplace_back();
  auto add = [&](Placement p) {
    if (std::find(options.begin(), options.end(), p) == options.end()) {
      options.push_back(std::move(p));
    }
  };
  add(Replicate());
  add(problem_.from[active_[i]]);
  add(problem_.to[active_[i]]);
  for (int dim : candidate_dims_) add(Shard(dim));
}

uint8_t Search::option_of(int i, const Placement& p) const {
  return static_cast<uint8_t>(std::find(options_[i].begin(), options_[i].end(), p) -
                              options_[i].begin());
}

Position Search::position_of(const Layout& layout) const {
  Position result(num_active());
  for (int i = 0; i < num_active(); ++i) result[i].option = option_of(i, layout[active_[i]]);
  for (int tensor_dim = 0; tensor_dim < static_cast<int>(problem_.shape.size()); ++tensor_dim) {
    uint8_t depth = 0;
    for (int m : layout.shards_of(tensor_dim)) {
      const auto found = std::lower_bound(active_.begin(), active_.end(), m);
      if (found != active_.end() && *found == m) result[found - active_.begin()].depth = depth++;
    }
  }
  return result;
}

Layout Search::layout_of(const Position& position) const {
  Placements placements = problem_.from.placements();
  std::vector<int> order;
  for (int m : problem_.from.order()) {
    if (!std::binary_search(active_.begin(), active_.end(), m)) order.push_back(m);
  }
  for (int depth = 0; depth < num_active(); ++depth) {
    for (int i = 0; i < num_active(); ++i) {
      if (position[i].depth == depth) order.push_back(active_[i]);
    }
  }
  for (int i = 0; i < num_active(); ++i) placements[active_[i]] = placement(position, i);
  return *Layout::create(std::move(placements), std::move(order));
}

const Placement& Search::placement_on(const Position& position, int mesh_dim) const {
  const auto found = std::lower_bound(active_.begin(), active_.end(), mesh_dim);
  return found != active_.end() && *found == mesh_dim
             ? placement(position, static_cast<int>(found - active_.begin()))
             : problem_.from[mesh_dim];
}

Search::Members Search::members(const Position& position, int tensor_dim) const {
  Members result;
  for (int i = 0; i < num_active(); ++i) {
    if (placement(position, i).is_shard(tensor_dim)) result.push_back(static_cast<uint8_t>(i));
  }
  std::sort(result.begin(), result.end(),
            [&](int a, int b) { return position[a].depth < position[b].depth; });
  return result;
}

// False if a ragged shard does not fit there.
bool Search::cut(const Position& position, TensorCuts* cuts) const {
  *cuts = outer_cuts_;
  for (int dim = 0; dim < static_cast<int>(cuts->size()); ++dim) {
    for (int i : members(position, dim)) {
      if (!add_cut((*cuts)[dim], cut_of(i, position[i].option))) return false;
    }
  }
  return true;
}

// `i` must be no shard, or the innermost cut of its tensor dimension; so it will be again.
Position Search::with(const Position& position, int i, uint8_t option) const {
  Position result = position;
  result[i] = {option, 0};
  const Placement& p = options_[i][option];
  if (p.is_shard()) result[i].depth = static_cast<uint8_t>(members(result, p.dim()).size() - 1);
  return result;
}

// At least the latency of every mesh dimension that local steps cannot bring to the goal.
double Search::lower_bound(const Position& position) const {
  double latency = 0;
  for (int i = 0; i < num_active(); ++i) {
    if (position[i].option == goal_[i].option || position[i].option == kReplicateOption) continue;
    latency = std::max(latency, problem_.model.link(active_[i]).latency);
  }
  return latency;
}

CostModel::Link Search::link(Mask moved) const {
  CostModel::Link result{0, std::numeric_limits<double>::infinity()};
  for (int i = 0; i < num_active(); ++i) {
    if (!(moved >> i & 1)) continue;
    const CostModel::Link one = problem_.model.link(active_[i]);
    result.latency = std::max(result.latency, one.latency);
    result.bandwidth = std::min(result.bandwidth, one.bandwidth);
  }
  return result;
}

void Search::reach(int parent, Position position, StepKind kind, Mask moved, int64_t bytes) {
  const bool local = kind == StepKind::kSlice || kind == StepKind::kToPartial;
  const double cost_of_step = local ? 0 : step_cost(link(moved), bytes);
  const double cost = nodes_[parent].cost + cost_of_step;
  const int num_steps = nodes_[parent].num_steps + 1;
  const double bound = cost + lower_bound(position);
  if (worse_than_best(bound, num_steps)) return;
  const auto [found, is_new] = index_.try_emplace(position, static_cast<int>(nodes_.size()));
  const int id = found->second;
  if (is_new) {
    nodes_.emplace_back();
  } else {
    const Node& old = nodes_[id];
    if (old.closed || std::tie(cost, num_steps) >= std::tie(old.cost, old.num_steps)) return;
  }
  if (position == goal_) {
    best_cost_ = cost;
    best_num_steps_ = num_steps;
  }
  nodes_[id] = {std::move(position), cost, num_steps, false, parent, kind, moved, bytes,
                cost_of_step};
  open_.emplace(bound, num_steps, id);
}

// Reductions on later mesh dimensions come first, unless they commute.
bool Search::may_reduce(const Position& position, int i) const {
  const ReduceOp op = placement(position, i).reduce_op();
  for (int m = active_[i] + 1; m < problem_.from.mesh_ndim(); ++m) {
    const Placement& inner = placement_on(position, m);
    if (inner.is_partial() && !commute(op, inner.reduce_op())) return false;
  }
  return true;
}

// The identity that fills the other ranks must survive the reductions on later mesh dimensions: 0 does,
// and so do equal copies, but several 1s do not sum up to 1.
bool Search::may_become(const Position& position, int i, ReduceOp op) const {
  if (op != ReduceOp::kProduct) return true;
  for (int m = active_[i] + 1; m < problem_.from.mesh_ndim(); ++m) {
    if (placement_on(position, m).is_partial(ReduceOp::kSum)) return false;
  }
  return true;
}

void Search::expand(int node) {
  TensorCuts cuts;
  cut(nodes_[node].position, &cuts);
  for (int i = 0; i < num_active(); ++i) {
    const Placement& p = placement(nodes_[node].position, i);
    if (p.is_partial()) {
      expand_partial(node, cuts, i);
    } else if (p.is_shard()) {
      expand_shard(node, cuts, i);
    } else {
      expand_replicate(node, i);
    }
  }
  expand_exchanges(node, cuts);
}

void Search::expand_partial(int node, const TensorCuts& cuts, int i) {
  const Position position = nodes_[node].position;
  if (!may_reduce(position, i)) return;
  reach(node, with(position, i, kReplicateOption), StepKind::kAllReduce, Mask{1} << i,
        all_reduce_bytes(cuts, problem_.mesh_shape[active_[i]], problem_.element_size));
  for (uint8_t option = 0; option < options_[i].size(); ++option) {
    const Placement& to = options_[i][option];
    if (!to.is_shard() || to.kind() == PlacementKind::kStridedShard) continue;
    DimCuts target = cuts[to.dim()];
    if (!add_cut(target, cut_of(i, option))) continue;
    reach(node, with(position, i, option), StepKind::kReduceScatter, Mask{1} << i,
          reduce_scatter_bytes(cuts, to.dim(), cut_of(i, option), problem_.element_size));
  }
}

void Search::expand_shard(int node, const TensorCuts& cuts, int i) {
  const Position position = nodes_[node].position;
  const int dim = placement(position, i).dim();
  if (cuts[dim].chain.back().mesh_dim != active_[i]) return;
  reach(node, with(position, i, kReplicateOption), StepKind::kAllGather, Mask{1} << i,
        all_gather_bytes(cuts, dim, problem_.element_size));
  for (uint8_t option = 0; option < options_[i].size(); ++option) {
    const Placement& to = options_[i][option];
    if (!to.is_shard() || to.dim() == dim) continue;
    DimCuts target = cuts[to.dim()];
    if (!add_cut(target, cut_of(i, option))) continue;
    reach(node, with(position, i, option), StepKind::kAllToAll, Mask{1} << i,
          all_to_all_bytes(cuts, dim, to.dim(), cut_of(i, option), problem_.element_size));
  }
}

void Search::expand_replicate(int node, int i) {
  const Position position = nodes_[node].position;
  for (uint8_t option = 1; option < options_[i].size(); ++option) {
    const Placement& to = options_[i][option];
    if (to.is_shard()) {
      Position next = with(position, i, option);
      TensorCuts cuts;
      if (!cut(next, &cuts)) continue;
      reach(node, std::move(next), StepKind::kSlice, Mask{1} << i, 0);
    } else if (option == goal_[i].option && may_become(position, i, to.reduce_op())) {
      reach(node, with(position, i, option), StepKind::kToPartial, Mask{1} << i, 0);
    }
  }
}

void Search::expand_exchanges(int node, const TensorCuts& cuts) {
  const Position position = nodes_[node].position;
  Members movable;
  for (int i = 0; i < num_active(); ++i) {
    const Placement& final = placement(goal_, i);
    if (placement(position, i).is_shard() && position[i].option != goal_[i].option &&
        !final.is_partial()) {
      movable.push_back(static_cast<uint8_t>(i));
    }
  }
  for (Mask chosen = 0; chosen < Mask{1} << movable.size(); ++chosen) {
    Position next = position;
    for (size_t j = 0; j < movable.size(); ++j) {
      if (chosen >> j & 1) next[movable[j]] = goal_[movable[j]];
    }
    Mask moved = 0;
    for (int dim = 0; dim < static_cast<int>(cuts.size()); ++dim) {
      const Members before = members(position, dim);
      Members after = members(next, dim);
      std::sort(after.begin(), after.end(), [&](int a, int b) {
        const bool a_done = next[a].option == goal_[a].option;
        const bool b_done = next[b].option == goal_[b].option;
        if (a_done != b_done) return a_done;
        return a_done ? goal_[a].depth < goal_[b].depth : position[a].depth < position[b].depth;
      });
      for (size_t depth = 0; depth < after.size(); ++depth) {
        next[after[depth]].depth = static_cast<uint8_t>(depth);
      }
      size_t same = 0;
      while (same < before.size() && same < after.size() && before[same] == after[same] &&
             position[before[same]].option == next[before[same]].option) {
        ++same;
      }
      for (size_t j = same; j < before.size(); ++j) moved |= Mask{1} << before[j];
      for (size_t j = same; j < after.size(); ++j) moved |= Mask{1} << after[j];
    }
    if (moved == 0) continue;
    const double least = nodes_[node].cost + link(moved).latency + lower_bound(next);
    if (worse_than_best(least, nodes_[node].num_steps + 1)) continue;
    TensorCuts next_cuts;
    if (!cut(next, &next_cuts)) continue;
    reach(node, std::move(next), StepKind::kExchange, moved,
          exchange_bytes(cuts, next_cuts, problem_.element_size));
  }
}

RedistributePlan Search::plan_to(int node) const {
  RedistributePlan plan;
  for (; nodes_[node].parent >= 0; node = nodes_[node].parent) {
    const Node& n = nodes_[node];
    RedistributeStep& step = plan.steps.emplace_back();
    step.kind = n.kind;
    for (int i = 0; i < num_active(); ++i) {
      if (n.moved >> i & 1) step.mesh_dims.push_back(active_[i]);
    }
    step.before = layout_of(nodes_[n.parent].position);
    step.after = layout_of(n.position);
    step.bytes = n.step_bytes;
    step.cost = n.step_cost;
  }
  std::reverse(plan.steps.begin(), plan.steps.end());
  return plan;
}

RedistributePlan Search::run() {
  nodes_.emplace_back().position = position_of(problem_.from);
  index_.emplace(nodes_[0].position, 0);
  open_.emplace(0, 0, 0);
  // The goal can be reached: gather and reduce everything, then slice. So the queue never runs dry.
  while (true) {
    const int node = std::get<2>(open_.top());
    open_.pop();
    if (nodes_[node].closed) continue;
    if (nodes_[node].position == goal_) return plan_to(node);
    nodes_[node].closed = true;
    expand(node);
  }
}

}  // namespace

absl::InlinedVector<int, 4> active_mesh_dims(const Layout& from, const Layout& to) {
  const int n = from.mesh_ndim();
  absl::InlinedVector<bool, 8> active(n, false);
  for (int m = 0; m < n; ++m) {
    if (from[m] == to[m]) continue;
    active[m] = true;
  }
  // Inside of the first difference between two chains of cuts nothing stays as it is.
  for (int m = 0; m < n; ++m) {
    for (const Layout* layout : {&from, &to}) {
      if (!(*layout)[m].is_shard()) continue;
      const auto before = from.shards_of((*layout)[m].dim());
      const auto after = to.shards_of((*layout)[m].dim());
      size_t same = 0;
      while (same < before.size() && same < after.size() && before[same] == after[same] &&
             from[before[same]] == to[after[same]]) {
        ++same;
      }
      for (size_t i = same; i < before.size(); ++i) active[before[i]] = true;
      for (size_t i = same; i < after.size(); ++i) active[after[i]] = true;
    }
  }
  // A Partial that does not commute with one on an earlier mesh dimension is in its way.
  for (int m = 0; m < n; ++m) {
    for (const Layout* layout : {&from, &to}) {
      if (!active[m] || !(*layout)[m].is_partial()) continue;
      for (int inner = m + 1; inner < n; ++inner) {
        const Placement& p = from[inner];
        if (p.is_partial() && !commute((*layout)[m].reduce_op(), p.reduce_op())) {
          active[inner] = true;
        }
      }
    }
  }
  absl::InlinedVector<int, 4> result;
  for (int m = 0; m < n; ++m) {
    if (active[m]) result.push_back(m);
  }
  return result;
}

double step_cost(const CostModel::Link& link, int64_t bytes) {
  return link.latency + static_cast<double>(bytes) / link.bandwidth;
}

RedistributePlan search_plan(const RedistributeProblem& problem,
                             absl::Span<const int> active_mesh_dims) {
  return Search(problem, active_mesh_dims).run();
}

}  // namespace shardweave

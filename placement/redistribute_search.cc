#include "shardweave/placement/redistribute_search.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "shardweave/placement/intervals.h"
#include "shardweave/placement/step_bytes.h"

namespace shardweave::placement_internal {
namespace {

// Sets of active mesh dimensions; these are numbered by their place among the active ones.
using Mask = uint32_t;

// The active cuts of one tensor dimension: 16 bits for each, outermost lowest, with the mesh
// dimension (from 1) above its option.
using Chain = uint64_t;
constexpr int kCutBits = 16;
static_assert(kMaxSearchedMeshDims * kCutBits <= 64);

Chain cut_code(int i, uint8_t option) {
  return static_cast<Chain>(i + 1) << 8 | option;
}

Mask members(Chain chain) {
  Mask result = 0;
  for (; chain != 0; chain >>= kCutBits) result |= Mask{1} << ((chain >> 8 & 0xff) - 1);
  return result;
}

// The mesh dimensions of both chains from the first difference on.
Mask moved_members(Chain a, Chain b) {
  if (a == b) return 0;
  const int same = std::countr_zero(a ^ b) / kCutBits * kCutBits;
  return members(a >> same) | members(b >> same);
}

// A* over the layouts that a plan may go through.
class Search {
 public:
  Search(const RedistributeProblem& problem, const MeshDims& active);
  std::optional<RedistributePlan> run(const RedistributePlan* bound);

 private:
  // What one rank has in a layout.
  struct Held {
    absl::InlinedVector<Intervals, 3> intervals;  // of each tensor dimension
    int64_t size;
  };
  // A layout.
  struct Node {
    std::array<uint8_t, kMaxSearchedMeshDims> options{};  // indices into options_
    Mask shards = 0;
    Mask partials = 0;
    absl::InlinedVector<Chain, 3> chains;  // of each of dims_
    TensorCuts cuts;
    double cost_to_come = 0;
    std::array<Held, 2> held;  // by the ranks at probes_
    // The cheapest way found.
    double cost = std::numeric_limits<double>::infinity();
    int num_steps = 0;
    bool closed = false;
    int parent = -1;
    // The last step, from `parent`.
    StepKind kind = StepKind::kSlice;
    Mask moved = 0;
    int64_t step_bytes = 0;
    double step_cost = 0;
  };
  struct Edge {
    StepKind kind;
    Mask moved;
  };

  int num_active() const { return static_cast<int>(active_.size()); }
  const Placement& placement(const Node& node, int i) const { return options_[i][node.options[i]]; }
  void collect_options();
  void collect_nodes();
  bool make_node(const Dims& options, absl::Span<const int> order, Node* node) const;
  Held held_by(const Dims& coordinate, const TensorCuts& cuts) const;
  bool is(const Node& node, const Layout& layout) const;
  double cost_to_come(const Node& node) const;
  Layout layout_of(const Node& node) const;

  std::optional<Edge> edge(const Node& from, const Node& to) const;
  std::optional<Edge> edge_on(int i, const Node& from, const Node& to) const;
  std::optional<Edge> joint_reduction(Mask changed, const Node& from, const Node& to) const;
  bool may_reduce(const Node& node, int i) const;
  bool may_become(const Node& node, int i, ReduceOp op) const;
  const Placement& placement_on(const Node& node, int mesh_dim) const;

  int64_t least_bytes(const Edge& edge, const Node& from, const Node& to) const;
  void expand(int node);
  bool is_better(double cost, int num_steps) const {
    return std::tie(cost, num_steps) < std::tie(best_cost_, best_num_steps_);
  }
  RedistributePlan plan_to(int node) const;

  const RedistributeProblem& problem_;
  const MeshDims& active_;
  TensorCuts outer_cuts_;               // of the mesh dimensions that are not active
  std::vector<int> dims_;               // tensor dimensions that active mesh dimensions may cut
  std::vector<Placements> options_;     // for each active mesh dimension; Replicate first
  std::vector<CostModel::Link> links_;  // by Mask, as is
  Dims num_ranks_;                      // of the group
  double bytes_;                        // of what the active mesh dimensions cut

  std::array<Dims, 2> probes_;  // coordinates of ranks to try first

  std::vector<Node> nodes_;
  int start_ = -1;
  int goal_ = -1;
  using Entry = std::tuple<double, int, int>;  // cost and cost to come, steps, node
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> open_;
  // Of the cheapest way to the goal so far.
  double best_cost_ = std::numeric_limits<double>::infinity();
  int best_num_steps_ = 0;
};

Search::Search(const RedistributeProblem& problem, const MeshDims& active)
    : problem_(problem), active_(active), outer_cuts_(uncut(problem.shape)) {
  bytes_ = static_cast<double>(problem.element_size);
  for (int64_t size : problem.shape) bytes_ *= static_cast<double>(size);
  for (int m : problem.from.order()) {
    const Placement& p = problem.from[m];
    if (!p.is_shard() || std::binary_search(active.begin(), active.end(), m)) continue;
    add_cut(outer_cuts_[p.dim()], {&p, problem.mesh_shape[m], m});
    bytes_ /= static_cast<double>(problem.mesh_shape[m]);
  }
  for (Mask mask = 0; mask < Mask{1} << num_active(); ++mask) {
    MeshDims mesh_dims;
    for (int i = 0; i < num_active(); ++i) {
      if (mask >> i & 1) mesh_dims.push_back(active[i]);
    }
    links_.push_back(slowest_link(problem.model, mesh_dims));
    num_ranks_.push_back(1);
    for (int m : mesh_dims) num_ranks_.back() *= problem.mesh_shape[m];
  }
  for (Dims& probe : probes_) probe.resize(problem.mesh_shape.size(), 0);
  for (int i = 0; i < num_active(); ++i) probes_[i % 2][active[i]] = 1;
  collect_options();
  collect_nodes();
}

void Search::collect_options() {
  for (const Layout* layout : {&problem_.from, &problem_.to}) {
    for (int m : active_) {
      if ((*layout)[m].is_shard()) dims_.push_back((*layout)[m].dim());
    }
  }
  if (!problem_.shape.empty()) {
    const auto longest = std::max_element(problem_.shape.begin(), problem_.shape.end());
    dims_.push_back(static_cast<int>(longest - problem_.shape.begin()));
  }
  std::sort(dims_.begin(), dims_.end());
  dims_.erase(std::unique(dims_.begin(), dims_.end()), dims_.end());
  for (int m : active_) {
    Placements& options = options_.emplace_back();
    auto add = [&](Placement p) {
      if (std::find(options.begin(), options.end(), p) == options.end()) {
        options.push_back(std::move(p));
      }
    };
    add(Replicate());
    add(problem_.from[m]);
    add(problem_.to[m]);
    for (int dim : dims_) add(Shard(dim));
  }
}

void Search::collect_nodes() {
  Dims num_options;
  for (const Placements& options : options_) {
    num_options.push_back(static_cast<int64_t>(options.size()));
  }
  Dims options(num_active(), 0);
  do {
    const size_t first = nodes_.size();
    std::array<int, kMaxSearchedMeshDims> order;
    std::iota(order.begin(), order.end(), 0);
    const auto end = order.begin() + num_active();
    do {
      Node node;
      if (!make_node(options, absl::MakeSpan(order).first(num_active()), &node)) continue;
      const bool is_new =
          std::none_of(nodes_.begin() + first, nodes_.end(),
                       [&](const Node& other) { return other.chains == node.chains; });
      if (is_new) nodes_.push_back(std::move(node));
    } while (std::next_permutation(order.begin(), end));
  } while (advance(absl::MakeSpan(options), num_options));
  for (int n = 0; n < static_cast<int>(nodes_.size()); ++n) {
    if (is(nodes_[n], problem_.from)) start_ = n;
    if (is(nodes_[n], problem_.to)) goal_ = n;
  }
  for (Node& node : nodes_) node.cost_to_come = cost_to_come(node);
}

// False if a ragged shard does not fit there.
bool Search::make_node(const Dims& options, absl::Span<const int> order, Node* node) const {
  std::copy(options.begin(), options.end(), node->options.begin());
  node->chains.resize(dims_.size(), 0);
  node->cuts = outer_cuts_;
  for (int i : order) {
    const Placement& p = placement(*node, i);
    if (p.is_partial()) node->partials |= Mask{1} << i;
    if (!p.is_shard()) continue;
    node->shards |= Mask{1} << i;
    if (!add_cut(node->cuts[p.dim()], {&p, problem_.mesh_shape[active_[i]], active_[i]})) {
      return false;
    }
    Chain& chain =
        node->chains[std::lower_bound(dims_.begin(), dims_.end(), p.dim()) - dims_.begin()];
    const int depth = std::popcount(members(chain));
    chain |= cut_code(i, node->options[i]) << (depth * kCutBits);
  }
  for (size_t i = 0; i < probes_.size(); ++i) node->held[i] = held_by(probes_[i], node->cuts);
  return true;
}

Search::Held Search::held_by(const Dims& coordinate, const TensorCuts& cuts) const {
  Held held{{}, 1};
  for (size_t d = 0; d < cuts.size(); ++d) {
    held.intervals.push_back(
        placement_internal::held_by(coordinate, problem_.shape[d], cuts[d].chain));
    held.size *= count(held.intervals.back());
  }
  return held;
}

bool Search::is(const Node& node, const Layout& layout) const {
  for (int i = 0; i < num_active(); ++i) {
    if (placement(node, i) != layout[active_[i]]) return false;
  }
  for (size_t d = 0; d < dims_.size(); ++d) {
    Chain rest = node.chains[d];
    for (int m : layout.shards_of(dims_[d])) {
      const auto i = std::lower_bound(active_.begin(), active_.end(), m);
      if (i == active_.end() || *i != m) continue;
      if (members(rest & 0xffff) != Mask{1} << (i - active_.begin())) return false;
      rest >>= kCutBits;
    }
  }
  return true;
}

// A lower bound of the cost from here to the goal. Mesh dimensions that have to be gathered or
// reduced cost at least their latency. (From shard to shard it may be that nothing has to be sent.)
// And a rank must be sent what it does not have: all of its part of a sum, or else, on average,
// what its part is larger than before.
double Search::cost_to_come(const Node& node) const {
  if (bytes_ == 0) return 0;
  double latency = 0;
  double bandwidth = 0;
  double pieces = 1;
  double goal_pieces = 1;
  bool reduces = false;
  for (int i = 0; i < num_active(); ++i) {
    const Placement& p = placement(node, i);
    const Placement& goal = problem_.to[active_[i]];
    const CostModel::Link& link = links_[Mask{1} << i];
    bandwidth = std::max(bandwidth, link.bandwidth);
    if (p.is_shard()) pieces *= static_cast<double>(problem_.mesh_shape[active_[i]]);
    if (goal.is_shard()) goal_pieces *= static_cast<double>(problem_.mesh_shape[active_[i]]);
    if (p == goal || p.is_replicate() || (p.is_shard() && goal.is_shard())) continue;
    latency = std::max(latency, link.latency);
    if (p.is_partial()) reduces = true;
  }
  const double has = reduces ? 0 : bytes_ / pieces;
  const double received = std::max(0.0, bytes_ / goal_pieces - has);
  return latency + received / bandwidth * (1 - 1e-9);  // a little less, for the rounding
}

Layout Search::layout_of(const Node& node) const {
  Placements placements = problem_.from.placements();
  std::vector<int> order;
  for (int m : problem_.from.order()) {
    if (!std::binary_search(active_.begin(), active_.end(), m)) order.push_back(m);
  }
  for (Chain chain : node.chains) {
    for (; chain != 0; chain >>= kCutBits) {
      order.push_back(active_[std::countr_zero(members(chain & 0xffff))]);
    }
  }
  for (int i = 0; i < num_active(); ++i) {
    placements[active_[i]] = placement(node, i);
    if (!placement(node, i).is_shard()) order.push_back(active_[i]);
  }
  return *Layout::create(std::move(placements), std::move(order));
}

const Placement& Search::placement_on(const Node& node, int mesh_dim) const {
  const auto i = std::lower_bound(active_.begin(), active_.end(), mesh_dim);
  return i != active_.end() && *i == mesh_dim
             ? placement(node, static_cast<int>(i - active_.begin()))
             : problem_.from[mesh_dim];
}

// Partials on later mesh dimensions are reduced first, unless they commute with this one.
bool Search::may_reduce(const Node& node, int i) const {
  const ReduceOp op = placement(node, i).reduce_op();
  for (int m = active_[i] + 1; m < problem_.from.mesh_ndim(); ++m) {
    const Placement& inner = placement_on(node, m);
    if (inner.is_partial() && !commute(op, inner.reduce_op())) return false;
  }
  return true;
}

// The identity that fills the other ranks must survive the reductions on later mesh dimensions: 0
// does, and so do equal copies, but several 1s do not sum up to 1.
bool Search::may_become(const Node& node, int i, ReduceOp op) const {
  if (op != ReduceOp::kProduct) return true;
  for (int m = active_[i] + 1; m < problem_.from.mesh_ndim(); ++m) {
    if (placement_on(node, m).is_partial(ReduceOp::kSum)) return false;
  }
  return true;
}

// The step that leads from one layout to another, if one does.
std::optional<Search::Edge> Search::edge(const Node& from, const Node& to) const {
  Mask changed = 0;
  for (int i = 0; i < num_active(); ++i) {
    if (from.options[i] != to.options[i]) changed |= Mask{1} << i;
  }
  const bool exchangeable = (changed & ~from.shards) == 0 && (changed & to.partials) == 0;
  if (!exchangeable && !std::has_single_bit(changed)) return joint_reduction(changed, from, to);
  Mask moved = 0;
  for (size_t d = 0; d < dims_.size(); ++d) moved |= moved_members(from.chains[d], to.chains[d]);
  if (std::has_single_bit(changed | moved)) {
    if (auto single = edge_on(std::countr_zero(changed | moved), from, to)) return single;
  }
  if (!exchangeable || (moved & ~from.shards) != 0) return std::nullopt;
  return Edge{StepKind::kExchange, moved};
}

// The step on mesh dimension i alone; whatever it cuts, it cuts innermost. Nothing where an
// exchange is needed, or no step will do.
std::optional<Search::Edge> Search::edge_on(int i, const Node& from, const Node& to) const {
  const Placement& before = placement(from, i);
  const Placement& after = placement(to, i);
  auto edge = [&](StepKind kind) { return Edge{kind, Mask{1} << i}; };
  if (before.is_partial()) {
    if (after.is_partial() || !may_reduce(from, i)) return std::nullopt;
    if (after.is_replicate()) return edge(StepKind::kAllReduce);
    return edge(StepKind::kReduceScatter);
  }
  if (before.is_replicate()) {
    if (after.is_shard()) return edge(StepKind::kSlice);
    if (after != problem_.to[active_[i]]) return std::nullopt;
    if (!may_become(from, i, after.reduce_op())) return std::nullopt;
    return edge(StepKind::kToPartial);
  }
  if (after.is_replicate()) return edge(StepKind::kAllGather);
  if (after.is_shard() && after.dim() != before.dim()) return edge(StepKind::kAllToAll);
  return std::nullopt;
}

// One reduction over all of `changed`, if they are Partials of one kind and become all Replicate or
// all innermost cuts.
std::optional<Search::Edge> Search::joint_reduction(Mask changed, const Node& from,
                                                    const Node& to) const {
  if ((changed & ~from.partials) != 0 || (changed & to.partials) != 0) return std::nullopt;
  const Mask scattered = changed & to.shards;
  if (scattered != 0 && scattered != changed) return std::nullopt;
  Mask moved = 0;
  for (size_t d = 0; d < dims_.size(); ++d) moved |= moved_members(from.chains[d], to.chains[d]);
  if (moved != scattered) return std::nullopt;
  const ReduceOp op = placement(from, std::countr_zero(changed)).reduce_op();
  for (int i = 0; i < num_active(); ++i) {
    if ((changed >> i & 1) == 0) continue;
    if (!placement(from, i).is_partial(op) || !may_reduce(from, i)) return std::nullopt;
    if (!may_reduce_jointly(placement(to, i))) return std::nullopt;
  }
  return Edge{scattered == 0 ? StepKind::kAllReduce : StepKind::kReduceScatter, changed};
}

// What the probes send in an exchange; a quick test that spares most of the exact ones.
int64_t Search::least_bytes(const Edge& edge, const Node& from, const Node& to) const {
  if (edge.kind != StepKind::kExchange) return 0;
  int64_t copies = 1;  // of each element: one per rank that gathers it
  for (int i = 0; i < num_active(); ++i) {
    if ((from.shards & ~to.shards) >> i & 1) copies *= problem_.mesh_shape[active_[i]];
  }
  int64_t most = 0;
  for (size_t i = 0; i < probes_.size(); ++i) {
    int64_t kept = 1;
    for (size_t d = 0; d < problem_.shape.size(); ++d) {
      kept *= common_size(from.held[i].intervals[d], to.held[i].intervals[d]);
    }
    most = std::max(most, saturating_product(copies, from.held[i].size) - kept);
  }
  return saturating_product(most, problem_.element_size);
}

void Search::expand(int node) {
  const Node& from = nodes_[node];
  for (int n = 0; n < static_cast<int>(nodes_.size()); ++n) {
    Node& to = nodes_[n];
    const int num_steps = from.num_steps + 1;
    if (to.closed || !is_better(from.cost + to.cost_to_come, num_steps)) continue;
    const std::optional<Edge> edge = this->edge(from, to);
    if (!edge.has_value()) continue;
    const CostModel::Link& link = links_[edge->moved];
    const double most_cost = std::min(best_cost_ - to.cost_to_come, to.cost) - from.cost;
    if (step_cost(link, least_bytes(*edge, from, to)) > most_cost) continue;
    // Above this many bytes the step leads to nothing better; a little more, for the rounding.
    const double enough = (most_cost - link.latency) * link.bandwidth * (1 + 1e-9) + 1;
    const int mesh_dim = active_[std::countr_zero(edge->moved)];
    const int64_t bytes = step_bytes(edge->kind, mesh_dim, num_ranks_[edge->moved], from.cuts,
                                     to.cuts, problem_.element_size,
                                     enough < 1e18 ? static_cast<int64_t>(std::max(enough, 0.0))
                                                   : std::numeric_limits<int64_t>::max());
    const double cost_of_step = step_cost(link, bytes);
    const double cost = from.cost + cost_of_step;
    if (!is_better(cost + to.cost_to_come, num_steps)) continue;
    if (std::tie(cost, num_steps) >= std::tie(to.cost, to.num_steps)) continue;
    to.cost = cost;
    to.num_steps = num_steps;
    to.parent = node;
    to.kind = edge->kind;
    to.moved = edge->moved;
    to.step_bytes = bytes;
    to.step_cost = cost_of_step;
    open_.emplace(cost + to.cost_to_come, num_steps, n);
    if (n == goal_) std::tie(best_cost_, best_num_steps_) = std::tie(cost, num_steps);
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
    step.before = layout_of(nodes_[n.parent]);
    step.after = layout_of(n);
    step.bytes = n.step_bytes;
    step.cost = n.step_cost;
  }
  std::reverse(plan.steps.begin(), plan.steps.end());
  return plan;
}

std::optional<RedistributePlan> Search::run(const RedistributePlan* bound) {
  if (bound != nullptr) {
    best_cost_ = bound->cost();
    best_num_steps_ = static_cast<int>(bound->steps.size());
  }
  nodes_[start_].cost = 0;
  open_.emplace(0, 0, start_);
  while (!open_.empty()) {
    const int node = std::get<2>(open_.top());
    open_.pop();
    if (nodes_[node].closed) continue;
    if (node == goal_) return plan_to(node);
    nodes_[node].closed = true;
    expand(node);
  }
  return std::nullopt;
}

}  // namespace

std::optional<RedistributePlan> search_plan(const RedistributeProblem& problem,
                                            const MeshDims& active, const RedistributePlan* bound) {
  return Search(problem, active).run(bound);
}

}  // namespace shardweave::placement_internal

// Plans are the cheapest ones: compared with the shortest way through the graph of all layouts and
// all steps between them, every edge priced by counting what each rank sends.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "shardweave/placement/direct_plan.h"
#include "shardweave/placement/layout_samples.h"
#include "shardweave/placement/redistribute_plan.h"
#include "shardweave/placement/simulated_mesh.h"

namespace shardweave {
namespace {

using namespace placement_internal;

constexpr int64_t kElementSize = 4;

// Powers of two, so that sums of costs are exact and ties are ties.
CostModel links(std::vector<std::pair<int, int>> exponents) {
  CostModel model;
  for (const auto& [latency, bandwidth] : exponents) {
    model.links.push_back({std::ldexp(1.0, latency), std::ldexp(1.0, bandwidth)});
  }
  return model;
}

const std::vector<CostModel> kModels = {
    links({{-10, 30}, {-10, 30}, {-10, 30}}),  // latency is all
    links({{-40, 10}, {-40, 10}, {-40, 10}}),  // bandwidth is all
    links({{-10, 14}, {-10, 14}, {-10, 14}}),  // both count
    links({{-10, 14}, {-13, 18}, {-11, 16}}),  // unlike links
    links({{-13, 18}, {-10, 12}, {-12, 15}}),
};

std::vector<int> without(const Layout& layout, int tensor_dim, int mesh_dim) {
  std::vector<int> result;
  for (int m : layout.shards_of(tensor_dim)) {
    if (m != mesh_dim) result.push_back(m);
  }
  return result;
}

bool is_innermost(const Layout& layout, int m) {
  return !layout[m].is_shard() || layout.shards_of(layout[m].dim()).back() == m;
}

// The layouts of one mesh and one tensor, and what the steps between them cost.
class LayoutGraph {
 public:
  LayoutGraph(Dims mesh_shape, Dims shape, std::vector<Layout> layouts)
      : mesh_shape_(std::move(mesh_shape)),
        shape_(std::move(shape)),
        ndim_(static_cast<int>(shape_.size())),
        layouts_(std::move(layouts)) {
    const SimulatedMesh mesh(mesh_shape_, shape_);
    for (const Layout& layout : layouts_) {
      std::vector<Held>& held = held_.emplace_back();
      for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
        Held& mine = held.emplace_back();
        for (const Indices& indices :
             naive_indices(layout, mesh_shape_, mesh.coordinate(rank), shape_)) {
          mine.push_back(0);
          for (int64_t i : indices) mine.back() |= uint64_t{1} << i;
        }
      }
    }
    for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
      coordinates_.push_back(mesh.coordinate(rank));
    }
  }

  const std::vector<Layout>& layouts() const { return layouts_; }

  // The cheapest way, going through the layouts in `nodes` only, as its cost, its number of steps
  // and the layouts on it: Bellman-Ford, until nothing gets cheaper.
  std::tuple<double, int, std::string> cheapest(int from, int to, const std::vector<int>& nodes,
                                                const CostModel& model) {
    const std::pair<double, int> nowhere{std::numeric_limits<double>::infinity(), 0};
    std::vector<std::pair<double, int>> best(layouts_.size(), nowhere);
    std::vector<int> parent(layouts_.size(), -1);
    best[from] = {0, 0};
    for (bool changed = true; changed;) {
      changed = false;
      for (int u : nodes) {
        if (best[u] == nowhere) continue;
        for (int v : nodes) {
          const Edge& edge = this->edge(u, v);
          if (!edge.exists) continue;
          std::pair<double, int> there{best[u].first + edge.cost(model), best[u].second + 1};
          // A Partial that is not part of the goal is never made.
          if (edge.makes_partial >= 0 &&
              layouts_[v][edge.makes_partial] != layouts_[to][edge.makes_partial]) {
            continue;
          }
          if (there < best[v]) {
            best[v] = there;
            parent[v] = u;
            changed = true;
          }
        }
      }
    }
    std::string way = layouts_[to].to_string();
    for (int at = parent[to]; at >= 0; at = parent[at]) {
      way = absl::StrCat(layouts_[at].to_string(), " > ", way);
    }
    return {best[to].first, best[to].second, way};
  }

 private:
  using Held =
      std::vector<uint64_t>;  // a rank's indices of each tensor dimension, as a set of bits

  struct Edge {
    bool exists = false;
    int makes_partial = -1;
    std::vector<int> mesh_dims;
    int64_t elements = 0;
    double cost(const CostModel& model) const {
      if (elements == 0) return 0;
      CostModel::Link slowest{0, std::numeric_limits<double>::infinity()};
      for (int m : mesh_dims) {
        slowest.latency = std::max(slowest.latency, model.link(m).latency);
        slowest.bandwidth = std::min(slowest.bandwidth, model.link(m).bandwidth);
      }
      return slowest.latency + static_cast<double>(elements * kElementSize) / slowest.bandwidth;
    }
  };

  const Edge& edge(int u, int v) {
    const auto [found, is_new] = edges_.try_emplace(std::pair(u, v));
    if (is_new && u != v) {
      found->second = single_step(u, v);
      if (!found->second.exists) found->second = joint_reduction(u, v);
      const Edge exchange = this->exchange(u, v);
      if (exchange.exists &&
          (!found->second.exists || (exchange.elements < found->second.elements))) {
        // A single collective never sends more than the exchange that does the same.
        EXPECT_FALSE(found->second.exists) << layouts_[u] << " to " << layouts_[v];
        found->second = exchange;
      }
    }
    return found->second;
  }

  static int64_t size(const Held& held) {
    int64_t n = 1;
    for (uint64_t bits : held) n *= std::popcount(bits);
    return n;
  }

  static int64_t common(const Held& a, const Held& b) {
    int64_t n = 1;
    for (size_t d = 0; d < a.size(); ++d) n *= std::popcount(a[d] & b[d]);
    return n;
  }

  bool in_group(int rank, int other, const std::vector<int>& mesh_dims) const {
    for (size_t m = 0; m < mesh_shape_.size(); ++m) {
      if (std::find(mesh_dims.begin(), mesh_dims.end(), m) != mesh_dims.end()) continue;
      if (coordinates_[rank][m] != coordinates_[other][m]) return false;
    }
    return true;
  }

  int num_ranks() const { return static_cast<int>(coordinates_.size()); }

  // What ranks send to others of what those want.
  int64_t most_sent(int u, int v, const std::vector<int>& mesh_dims) const {
    int64_t most = 0;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      int64_t sent = 0;
      for (int other = 0; other < num_ranks(); ++other) {
        if (other == rank || !in_group(rank, other, mesh_dims)) continue;
        sent += common(held_[u][rank], held_[v][other]);
      }
      most = std::max(most, sent);
    }
    return most;
  }

  int64_t most_gathered(int u, int m) const {
    int64_t most = 0;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      int64_t total = 0;
      int64_t least = size(held_[u][rank]);
      for (int other = 0; other < num_ranks(); ++other) {
        if (!in_group(rank, other, {m})) continue;
        total += size(held_[u][other]);
        least = std::min(least, size(held_[u][other]));
      }
      most = std::max(most, total - least);
    }
    return most;
  }

  int64_t most_scattered(int u, int v) const {
    int64_t most = 0;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      most = std::max(most, size(held_[u][rank]) - size(held_[v][rank]));
    }
    return most;
  }

  int64_t most_reduced(int u, const std::vector<int>& mesh_dims) const {
    int64_t ranks = 1;
    for (int m : mesh_dims) ranks *= mesh_shape_[m];
    int64_t most = 0;
    for (const Held& held : held_[u]) most = std::max(most, size(held));
    return 2 * (most - most / ranks);
  }

  // Several mesh dimensions with Partials of one kind, that all are replicated or all cut
  // innermost.
  Edge joint_reduction(int u, int v) const {
    const Layout& before = layouts_[u];
    const Layout& after = layouts_[v];
    std::vector<int> changed;
    for (int m = 0; m < before.mesh_ndim(); ++m) {
      if (before[m] != after[m]) changed.push_back(m);
    }
    if (changed.size() < 2) return {};
    for (int m : changed) {
      if (!before[m].is_partial() || before[m] != before[changed[0]]) return {};
      if (after[m].is_partial() || after[m].kind() == PlacementKind::kStridedShard) return {};
      if (after[m].is_shard() != after[changed[0]].is_shard()) return {};
      for (int inner = m + 1; inner < before.mesh_ndim(); ++inner) {
        if (before[inner].is_partial() &&
            !commute(before[m].reduce_op(), before[inner].reduce_op())) {
          return {};
        }
      }
    }
    for (int d = 0; d < ndim_; ++d) {
      const auto outer = before.shards_of(d);
      const auto cuts = after.shards_of(d);
      if (!std::equal(outer.begin(), outer.end(), cuts.begin(),
                      cuts.begin() + std::min(outer.size(), cuts.size()))) {
        return {};
      }
    }
    return {true, -1, changed,
            after[changed[0]].is_shard() ? most_scattered(u, v) : most_reduced(u, changed)};
  }

  Edge single_step(int u, int v) const {
    const Layout& before = layouts_[u];
    const Layout& after = layouts_[v];
    int m = -1;
    for (int i = 0; i < before.mesh_ndim(); ++i) {
      if (before[i] == after[i]) continue;
      if (m >= 0) return {};
      m = i;
    }
    if (m < 0 || !is_innermost(before, m) || !is_innermost(after, m)) return {};
    for (int d = 0; d < ndim_; ++d) {
      if (without(before, d, m) != without(after, d, m)) return {};
    }
    Edge edge{true, -1, {m}, 0};
    if (before[m].is_partial()) {
      for (int inner = m + 1; inner < before.mesh_ndim(); ++inner) {
        if (before[inner].is_partial() &&
            !commute(before[m].reduce_op(), before[inner].reduce_op())) {
          return {};
        }
      }
      if (after[m].is_partial()) return {};
      edge.elements = after[m].is_shard() ? most_scattered(u, v) : most_reduced(u, {m});
    } else if (before[m].is_replicate()) {
      if (after[m].is_partial()) {
        edge.makes_partial = m;
        for (int inner = m + 1; inner < before.mesh_ndim(); ++inner) {
          if (after[m].is_partial(ReduceOp::kProduct) && before[inner].is_partial(ReduceOp::kSum)) {
            return {};
          }
        }
      }
    } else if (after[m].is_replicate()) {
      edge.elements = most_gathered(u, m);
    } else if (after[m].is_shard() && before[m].dim() != after[m].dim()) {
      edge.elements = most_sent(u, v, {m});
    } else {
      return {};
    }
    return edge;
  }

  Edge exchange(int u, int v) const {
    const Layout& before = layouts_[u];
    const Layout& after = layouts_[v];
    std::vector<int> moved;
    for (int m = 0; m < before.mesh_ndim(); ++m) {
      if (before[m].is_partial() != after[m].is_partial()) return {};
      if (before[m].is_partial() && before[m] != after[m]) return {};
      if (before[m].is_replicate() && !after[m].is_replicate()) return {};
      if (!before[m].is_shard()) continue;
      bool moves = before[m] != after[m];
      for (const int dim : {before[m].dim(), after[m].dim()}) {
        const auto b = before.shards_of(dim);
        const auto a = after.shards_of(dim);
        size_t same = 0;
        while (same < b.size() && same < a.size() && b[same] == a[same] &&
               before[b[same]] == after[a[same]]) {
          ++same;
        }
        if (std::find(b.begin() + same, b.end(), m) != b.end()) moves = true;
        if (std::find(a.begin() + same, a.end(), m) != a.end()) moves = true;
      }
      if (moves) moved.push_back(m);
    }
    Edge edge{!moved.empty(), -1, moved, 0};
    if (edge.exists) edge.elements = most_sent(u, v, moved);
    return edge;
  }

  const Dims mesh_shape_;
  const Dims shape_;
  const int ndim_;
  const std::vector<Layout> layouts_;
  std::vector<std::vector<Held>> held_;  // [layout][rank]
  std::vector<Dims> coordinates_;
  absl::flat_hash_map<std::pair<int, int>, Edge> edges_;
};

// The layouts that a plan may go through, by the rules at the top of redistribute_plan.h.
std::vector<int> nodes_between(const std::vector<Layout>& layouts, const Layout& from,
                               const Layout& to, const Dims& shape) {
  const auto active = active_mesh_dims(from, to);
  auto is_active = [&](int m) {
    return std::find(active.begin(), active.end(), m) != active.end();
  };
  std::vector<int> dims;
  for (int m : active) {
    for (const Layout* layout : {&from, &to}) {
      if ((*layout)[m].is_shard()) dims.push_back((*layout)[m].dim());
    }
  }
  if (!shape.empty()) {
    dims.push_back(static_cast<int>(std::max_element(shape.begin(), shape.end()) - shape.begin()));
  }
  auto may_pass = [&](const Layout& layout) {
    for (int m = 0; m < layout.mesh_ndim(); ++m) {
      const Placement& p = layout[m];
      if (p == from[m]) continue;
      if (!is_active(m)) return false;
      if (p == to[m] || p.is_replicate()) continue;
      if (!p.is_plain_shard() || std::find(dims.begin(), dims.end(), p.dim()) == dims.end()) {
        return false;
      }
    }
    for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
      const auto cuts = layout.shards_of(d);
      if (!std::is_partitioned(cuts.begin(), cuts.end(), [&](int m) { return !is_active(m); })) {
        return false;
      }
      // The cuts that stay, stay in their order.
      std::vector<int> outer, outer_from;
      for (int m : cuts) {
        if (!is_active(m)) outer.push_back(m);
      }
      for (int m : from.shards_of(d)) {
        if (!is_active(m)) outer_from.push_back(m);
      }
      if (outer != outer_from) return false;
    }
    return true;
  };
  std::vector<int> result;
  for (int i = 0; i < static_cast<int>(layouts.size()); ++i) {
    if (may_pass(layouts[i])) result.push_back(i);
  }
  return result;
}

class OptimalityTest : public ::testing::Test {
 protected:
  void compare(LayoutGraph& graph, int from, int to, const Dims& mesh_shape, const Dims& shape,
               const CostModel& model) {
    const Layout& a = graph.layouts()[from];
    const Layout& b = graph.layouts()[to];
    const auto plan = plan_redistribute(a, b, mesh_shape, shape, kElementSize, model);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto [cost, num_steps, way] =
        graph.cheapest(from, to, nodes_between(graph.layouts(), a, b, shape), model);
    EXPECT_EQ(std::pair(plan->cost(), static_cast<int>(plan->steps.size())),
              std::pair(cost, num_steps))
        << a << " to " << b << " on the mesh [" << absl::StrJoin(mesh_shape, ", ") << "], tensor ["
        << absl::StrJoin(shape, ", ") << "], first link " << model.links[0].latency << ", "
        << model.links[0].bandwidth << ": " << *plan << ", wanted: " << way;
  }

  void compare_all(const std::vector<Placements>& placements, const Dims& mesh_shape,
                   const Dims& shape) {
    LayoutGraph graph(mesh_shape, shape, all_layouts(placements, mesh_shape, shape));
    const int n = static_cast<int>(graph.layouts().size());
    for (const CostModel& model : kModels) {
      for (int from = 0; from < n; ++from) {
        for (int to = 0; to < n; ++to) compare(graph, from, to, mesh_shape, shape, model);
      }
    }
  }

  void compare_some(const std::vector<Placements>& placements, const Dims& mesh_shape,
                    const Dims& shape, int pairs) {
    LayoutGraph graph(mesh_shape, shape, all_layouts(placements, mesh_shape, shape));
    std::mt19937_64 random(3);
    std::uniform_int_distribution<int> any(0, static_cast<int>(graph.layouts().size()) - 1);
    for (const CostModel& model : kModels) {
      for (int i = 0; i < pairs; ++i) {
        const int from = any(random);
        compare(graph, from, any(random), mesh_shape, shape, model);
      }
    }
  }
};

TEST_F(OptimalityTest, OneMeshDimension) {
  for (int64_t n : {2, 3, 4}) {
    for (const Dims& shape : std::vector<Dims>{{8, 12}, {7, 5}, {1, 9}, {3, 2}}) {
      compare_all({all_placements(n, shape, {ReduceOp::kSum, ReduceOp::kMax})}, {n}, shape);
    }
  }
}

TEST_F(OptimalityTest, TwoMeshDimensions) {
  const Placements placements = {Replicate(),        Shard(0),  Shard(1),
                                 StridedShard(0, 2), Partial(), Partial(ReduceOp::kMax)};
  for (const Dims& mesh_shape : std::vector<Dims>{{2, 2}, {2, 4}, {3, 2}}) {
    for (const Dims& shape : std::vector<Dims>{{16, 24}, {7, 5}}) {
      compare_all({placements, placements}, mesh_shape, shape);
    }
  }
}

TEST_F(OptimalityTest, TwoMeshDimensionsAndAThirdTensorDimension) {
  const Placements placements = {Replicate(), Shard(0), Shard(1), Shard(2), Partial()};
  compare_all({placements, placements}, {4, 2}, {8, 8, 12});
}

TEST_F(OptimalityTest, ThreeMeshDimensions) {
  const Placements placements = {Replicate(), Shard(0), Shard(1), Partial()};
  for (const Dims& shape : std::vector<Dims>{{16, 24}, {9, 7}}) {
    compare_some({placements, placements, placements}, {2, 2, 2}, shape, 250);
  }
  compare_some({placements, placements, placements}, {4, 3, 2}, {48, 24}, 100);
}

}  // namespace
}  // namespace shardweave

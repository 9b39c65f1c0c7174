// A RedistributePlan is the cheapest sequence of steps that leads a tensor from one layout to another.
//
//   auto plan = plan_redistribute(from, to, {2, 4}, {128, 64}, /*element_size=*/4, CostModel());
//   plan->to_string();   // "reduce_scatter(sum, mesh dim 1, S(0)): 28672 bytes"
//
// Plan with values, act at the edge: this file computes, dtensor/ executes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardweave/placement/layout.h"
#include "shardweave/placement/placement.h"

namespace shardweave {

// Time of a step on mesh dimension d = latency[d] * (messages) + bytes / bandwidth[d].
struct CostModel {
  struct Link {
    double latency = 5e-6;     // seconds per collective
    double bandwidth = 5e9;    // bytes per second and rank
    friend bool operator==(const Link&, const Link&) = default;
  };
  std::vector<Link> links;     // per mesh dimension; missing ones are Link()
  Link link(int mesh_dim) const {
    return mesh_dim < static_cast<int>(links.size()) ? links[mesh_dim] : Link();
  }
};

enum class StepKind : uint8_t {
  kAllGather,      // S(d) -> R on `mesh_dim`; mesh_dim is the innermost cut of d
  kSlice,          // R -> S(d) on `mesh_dim` (becomes the innermost cut); local
  kAllReduce,      // P(op) -> R
  kReduceScatter,  // P(op) -> S(d) (innermost cut); contiguous Shard only
  kAllToAll,       // S(i) -> S(j) on one mesh dim (innermost cut of both)
  kToPartial,      // R -> P(op); local: sum/product: coordinate 0 keeps the value and the others hold the identity; avg/min/max: all keep it
  kExchange,       // any layout without Partial changes on `mesh_dims` -> any other: each rank sends every peer of those
                   // mesh dims the intersection of what it has and what the peer wants (v-variant all-to-all). On dims in
                   // `mesh_dims` only; covers strided, ragged and changes of the cut order.
};

struct RedistributeStep {
  StepKind kind;
  std::vector<int> mesh_dims;  // exactly one, except kExchange (ascending)
  Layout before;
  Layout after;
  int64_t bytes = 0;           // largest number of bytes that any rank sends
  double cost = 0;             // seconds by the model
  std::string to_string() const;
  friend bool operator==(const RedistributeStep&, const RedistributeStep&) = default;
};

struct RedistributePlan {
  std::vector<RedistributeStep> steps;
  int64_t bytes() const;
  double cost() const;
  bool is_noop() const { return steps.empty(); }
  bool is_local() const;       // no step communicates
  std::string to_string() const;
  friend bool operator==(const RedistributePlan&, const RedistributePlan&) = default;
};

// Every transition is possible; from == to gives the empty plan. Partial(a) to Partial(b) goes through a reduction. A layout that
// does not fit the mesh or the shape is an InvalidArgument that says which part.
absl::StatusOr<RedistributePlan> plan_redistribute(const Layout& from, const Layout& to,
                                                   absl::Span<const int64_t> mesh_shape,
                                                   absl::Span<const int64_t> shape,
                                                   int64_t element_size, const CostModel& model);

// One rank's share of an exchange step: what it sends to and receives from every peer of step.mesh_dims (peers ordered by
// their coordinate in those mesh dims, last fastest).
// Blocks of one peer are packed one after the other, each block row-major, in the same order on sender and receiver.
struct ExchangeBlock {
  Dims offset;   // in the local tensor
  Dims shape;
};
struct ExchangePart {
  std::vector<std::vector<ExchangeBlock>> send;  // [peer][block], in the local tensor of `before`
  std::vector<std::vector<ExchangeBlock>> recv;  // [peer][block], in the local tensor of `after`
};
ExchangePart exchange_part(const Layout& before, const Layout& after, const std::vector<int>& mesh_dims,
                           absl::Span<const int64_t> mesh_shape, absl::Span<const int64_t> coordinate,
                           absl::Span<const int64_t> shape);

// A quick estimate in seconds for one mesh dimension changing from `from` to `to` while the local tensor before the change has
// `local_bytes` bytes (0 for steps without communication). Used to compare sharding strategies; no allocation.
double transition_cost(const Placement& from, const Placement& to, int64_t num_ranks, int64_t local_bytes,
                       CostModel::Link link);

}  // namespace shardweave

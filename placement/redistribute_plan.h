// A RedistributePlan is the cheapest sequence of steps that leads a tensor from one layout to
// another.
//
//   auto plan = plan_redistribute(from, to, {2, 4}, {128, 64}, /*element_size=*/4, CostModel());
//   plan->to_string();   // "reduce_scatter(mesh dim 1, P(sum) -> S(0)): 24576 bytes"
//   for (const RedistributeStep& step : plan->steps) run(step);
//   part = exchange_part(step.before, step.after, ...);   // for StepKind::kExchange
//
// Plan with values, act at the edge: this file computes, dtensor/ executes. A plan is the same on
// every rank: it depends on nothing but the arguments, and equally cheap plans are told apart by
// fixed rules (fewer steps, then the order in which they are found). Pure functions, safe on any
// thread.
//
// Determinism: a plan fixes the order in which summands come together (in rank order within a
// step, step after step), so that on backends that reduce in rank order (all in comm/) a plan gives
// the same bits every time. Different plans between the same layouts, as other cost models choose
// them, may round sums differently.
//
// What is cheapest: of all sequences of the steps below, in which
//   - only the mesh dimensions that change take part. Those are the ones that `from` and `to` place
//     differently, those that cut a tensor dimension inside such a one, and those with a Partial
//     that has to be reduced earlier;
//   - each of them goes through its placements in `from` and `to`, Replicate, and Shard of the
//     tensor dimensions that such mesh dimensions cut in `from` or `to`, and of the longest one.
//     Their cuts lie inside those of the others, in any order.
// For one such mesh dimension the answer is known, for two and three it is searched with A*. When
// more than three change at once, the plan is the obvious one: slice, reduce, one exchange.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardweave/placement/layout.h"
#include "shardweave/placement/placement.h"

namespace shardweave {

// The time of a step is latency + bytes / bandwidth of its mesh dimension; an exchange over several
// takes the largest latency and the smallest bandwidth among them. Steps in which nobody sends
// anything are free.
struct CostModel {
  struct Link {
    double latency = 5e-6;   // seconds per collective
    double bandwidth = 5e9;  // bytes per second and rank
    friend bool operator==(const Link&, const Link&) = default;
  };
  std::vector<Link> links;  // per mesh dimension; missing ones are Link()
  // What a rank computes; for the choice between strategies, not for plans.
  struct Device {
    double flops = 5e10;      // multiplications and additions per second, in matrix products
    double bandwidth = 1e10;  // bytes per second that are read or written
    friend bool operator==(const Device&, const Device&) = default;
  };
  Device device;
  Link link(int mesh_dim) const {
    return mesh_dim < static_cast<int>(links.size()) ? links[mesh_dim] : Link();
  }
  friend bool operator==(const CostModel&, const CostModel&) = default;
};

// What the executor has to do. In each step `m` is step.mesh_dims[0], k its number of ranks, "the
// group" the k ranks that differ in their coordinate on m only, `local` the local tensor in
// step.before. All ranks of a group reach a step together and have local tensors of one shape,
// except along what m itself cuts; that may be uneven or empty (a rank with nothing takes part with
// 0 elements). Which elements belong to rank c is always cut(placement of m, size, k, c), where
// `size` counts the piece that m cuts. The whole group has that piece in common, for m is the
// innermost cut of its tensor dimension, before and after.
// A reduction may take several mesh dimensions at once. Then the group are the ranks that differ on
// those only, by their coordinates there (last fastest), and k is their number.
enum class StepKind : uint8_t {
  // S(d) -> R, any shard. Everybody gets everybody's `local`; that of rank c goes to the indices
  // cut(before[m], size, k, c) of dimension d of the result, where size is the result's.
  kAllGather,
  // R -> S(d), any shard; local. The result is the indices cut(after[m], size, k, own coordinate)
  // of dimension d.
  kSlice,
  // P(op) -> R, one op. Elementwise reduction over the group; op == avg divides by k.
  kAllReduce,
  // P(op) -> S(d), one op, any shard. Rank c gets the reduction of the indices
  // cut(after[m], size, k, c) of dimension d. Of several mesh dimensions, which may cut different
  // tensor dimensions, but not by strided shards: of what their cuts, the innermost in step.after,
  // leave it.
  kReduceScatter,
  // S(i) -> S(j), i != j, any shards. Rank c gets from each rank the indices
  // cut(after[m], size of j, k, c) of dimension j. What comes from rank c goes to the indices
  // cut(before[m], size of i, k, c) of dimension i of the result, where size of i is the result's.
  kAllToAll,
  // R -> P(op); local. sum, product: rank 0 of the group keeps its value, the others hold the
  // identity (0, 1) instead; avg, min, max: all keep their value.
  kToPartial,
  // Any change of the placements and of the cut order of step.mesh_dims, all of them shards before
  // and shards or Replicate after. Each rank sends every rank that differs from it on those mesh
  // dimensions only the elements that it has and the other one wants: exchange_part() tells which.
  // Other mesh dimensions may have any placement, Partial included.
  kExchange,
};

std::string_view to_string(StepKind kind);  // "all_gather", ...

struct RedistributeStep {
  StepKind kind = StepKind::kSlice;
  // Exactly one, except kExchange, kAllReduce and kReduceScatter (ascending).
  std::vector<int> mesh_dims;
  // Mesh dimensions outside of mesh_dims do not change. Only at the ends of a plan those of size 1
  // (which cut nothing) may, and a ragged shard into the plain one that it equals, or back.
  Layout before;
  Layout after;
  // The largest number of bytes that any rank sends. In elements:
  //   all_gather      the group's total less the smallest piece (a ring: a rank passes on all
  //                   pieces but the one that its successor began with)
  //   reduce_scatter  `local` less the smallest piece that a rank keeps (a ring as well)
  //   all_reduce      2 (`local` - floor(`local` / k)): reduce_scatter, then all_gather
  //   all_to_all      what goes to other ranks
  //   exchange        the same; among more than 256 ranks what they keep is counted as sent
  // Exact for uneven and empty pieces. Saturates at the largest int64_t.
  int64_t bytes = 0;
  double cost = 0;  // seconds by the model
  // Nobody sends anything, as in kSlice and kToPartial. A collective of 0 bytes (of an empty
  // tensor, or an exchange between two descriptions of one distribution) may be skipped: each rank
  // already has the elements of its result, in their order; an empty result may need another shape.
  bool is_local() const { return bytes == 0; }
  // "all_to_all(mesh dim 0, S(0) -> S(1)): 96 bytes".
  std::string to_string() const;
  friend bool operator==(const RedistributeStep&, const RedistributeStep&) = default;
  friend std::ostream& operator<<(std::ostream& out, const RedistributeStep& step);
};

struct RedistributePlan {
  std::vector<RedistributeStep> steps;
  int64_t bytes() const;
  double cost() const;
  // Every rank already holds the local tensor that it should have (as when the layouts differ on
  // mesh dimensions of size 1 only).
  bool is_noop() const { return steps.empty(); }
  bool is_local() const;  // no step communicates
  // The steps, "; " between them; "nothing to do" if there are none.
  std::string to_string() const;
  friend bool operator==(const RedistributePlan&, const RedistributePlan&) = default;
  friend std::ostream& operator<<(std::ostream& out, const RedistributePlan& plan);
};

// Every transition is possible. Partial(a) to Partial(b) goes through a reduction; Partials that do
// not commute() are reduced from the last mesh dimension to the first. Steps chain: the first
// begins with `from`, each with the layout that the one before it left, the last ends with `to`.
// InvalidArgument says which layout does not fit the mesh or the shape, or what in the model or the
// sizes is not possible.
absl::StatusOr<RedistributePlan> plan_redistribute(const Layout& from, const Layout& to,
                                                   absl::Span<const int64_t> mesh_shape,
                                                   absl::Span<const int64_t> shape,
                                                   int64_t element_size, const CostModel& model);

// One rank's share of an exchange step: what it sends to and receives from every peer of
// step.mesh_dims, itself included (peers ordered by their coordinate in those mesh dims, last
// fastest). Blocks of one peer are packed one after the other, each block row-major, in the same
// order on sender and receiver (by global index); none is empty. Together the received blocks fill
// the local tensor of `after`, each element once. Mesh dimensions of `mesh_dims` that `before`
// replicates are allowed: there a rank receives from the peers with its own coordinate.
struct ExchangeBlock {
  Dims offset;  // in the local tensor
  Dims shape;
  friend bool operator==(const ExchangeBlock&, const ExchangeBlock&) = default;
};
struct ExchangePart {
  std::vector<std::vector<ExchangeBlock>> send;  // [peer][block], in the local tensor of `before`
  std::vector<std::vector<ExchangeBlock>> recv;  // [peer][block], in the local tensor of `after`
};
ExchangePart exchange_part(const Layout& before, const Layout& after,
                           const std::vector<int>& mesh_dims, absl::Span<const int64_t> mesh_shape,
                           absl::Span<const int64_t> coordinate, absl::Span<const int64_t> shape);

// A quick estimate in seconds for one mesh dimension of `num_ranks` changing from `from` to `to`
// while the local tensor before the change has `local_bytes` bytes. What plan_redistribute says for
// even pieces; more than that, by at most what a rank keeps, where shards of one tensor dimension
// change their kind. Used to compare sharding strategies; no allocation.
double transition_cost(const Placement& from, const Placement& to, int64_t num_ranks,
                       int64_t local_bytes, CostModel::Link link);

}  // namespace shardweave

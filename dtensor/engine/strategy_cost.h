// What a strategy costs along one mesh dimension. Pure functions: the same on every rank.
//
//   seconds = move      to bring the inputs, and a written result, where they have to be
//           + compute   the operator itself on a rank's part
//           + owed      the reduction that Partial results still need
//
// One operator sees neither what comes after it nor backward. Two things it must not do to save a
// transfer, and strategies that do them come after all others, however cheap they are:
//
//   1. Move the data, or, worse, give up its cut. Once a batch is whole on every rank, all ranks do
//      the same work from there on. Where a batch that is cut meets a weight that is cut, the weight
//      is gathered.
//   2. Give up the cut of a weight: gathered here, it is gathered in every step, and in backward.
//
// A Partial is reduced as late as possible where it stays one tensor (sums, views, linear functions
// of it alone), for other summands may join it: (x + Partial) + Partial is reduced once. In a product
// it is reduced first, for each product would owe a reduction of its own. A tensor that has been
// reduced or gathered once is remembered so (remembered.h), and costs nothing a second time.
//
// Internal to dtensor/.
#pragma once

#include <optional>
#include <vector>

#include "shardweave/dtensor/rule.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave::dtensor_internal {

// Of the inputs that are data and cut: they stay (and the results are cut as they are, or nothing at
// all moves); some stay, or all are cut in another way; all become whole.
enum class DataMoves : uint8_t { kStays, kMoves, kGivenUp };

struct StrategyCost {
  double move = 0;  // seconds, as are the next two
  double compute = 0;
  double owed = 0;
  DataMoves data = DataMoves::kStays;
  bool gives_up_weight = false;

  double seconds() const { return move + compute + owed; }
  friend bool operator<(const StrategyCost& a, const StrategyCost& b) {
    if (a.data != b.data) return a.data < b.data;
    if (a.gives_up_weight != b.gives_up_weight) return b.gives_up_weight;
    return a.seconds() < b.seconds();
  }
};

// `call` at its turn: call.mesh_dim is being decided. `outputs`: what the mesh dimensions before it
// have decided, Replicate for those to come. `flops`: of the whole operator. `written_input`: the
// input that output 0 is written into.
StrategyCost strategy_cost(const OpCall& call, const Strategy& strategy, const CostModel& model,
                           double flops, absl::Span<const Placements> outputs,
                           std::optional<int> written_input);

}  // namespace shardweave::dtensor_internal

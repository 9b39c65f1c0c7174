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
//      is gathered. (Indices may be, if each rank makes a part of the results then.)
//   2. Give up the cut of a weight: gathered here, it is gathered in every step, and in backward.
//
// A Partial is reduced as late as possible where it stays one tensor (sums, views, linear functions
// of it alone), for other summands may join it: (x + Partial) + Partial is reduced once. In a product
// it is reduced first, for each product would owe a reduction of its own; but not a sum over data,
// which is most often on its way to be a parameter's gradient, and reduced there with all others,
// unless it is what it is multiplied by that makes more of it. That
// a result has wider elements (a gradient that is cast to its parameter's type), or that of a sum over
// data more of them (it is that of a slice), makes putting a reduction off no dearer. A
// tensor that has been reduced or gathered once is remembered so (remembered.h), and costs nothing a
// second time.
//
// A cut of neither data nor a weight (the columns of a product with a weight that is cut) goes on as
// long as it costs nothing, and so does that of a sum which has been reduced to parts for somebody else
// (a view of it stays a sum, and so does what is added to another sum). Where a tensor is needed whole
// it is gathered, rather than cut along its batch: whether a batch is cut is for users to say.
//
// Internal to dtensor/.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
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

// Weighs the strategies of `call` at its turn, when call.mesh_dim is being decided. What they have in
// common is worked out once. Refers to all that it is given.
class StrategyWeigher {
 public:
  // `outputs`: what the mesh dimensions before this one have decided, Replicate for those to come.
  // `flops`: of the whole operator. `written_input`: the input that output 0 is written into, of the
  // same shape.
  StrategyWeigher(const OpCall& call, absl::Span<const int64_t> mesh_shape, const CostModel& model,
                  double flops, absl::Span<const Placements> outputs,
                  std::optional<int> written_input);

  StrategyCost cost(const Strategy& strategy) const;
  // Nothing unless it is less than `bound` (or as much, with `or_equal`). Most strategies move more
  // than the best one costs in all, and what they compute and owe is not worked out.
  std::optional<StrategyCost> cost_below(const StrategyCost& bound, bool or_equal,
                                         const Strategy& strategy) const;
  // True if every input stays where it is.
  bool moves_nothing(const Strategy& strategy) const;

 private:
  struct Input {
    int index;
    const TensorInfo* info;
    const Placement* have;    // along call.mesh_dim
    const Placement* kept;    // of what is remembered; null: nothing is
    bool is_plain;            // a number, which lies nowhere
    bool is_index;            // no factor, and cutting it is no work
    bool is_data, is_weight;  // cut so along call.mesh_dim
    bool sums_data;           // a Partial along it
    bool was_saved;           // of an operator that takes a gradient, all else
    int64_t numel;
    int64_t other_cuts;  // pieces that other mesh dimensions cut it into
    // Where the tensor is given a second time, as which of inputs_ it was before; -1: it is not.
    int again;
  };
  struct Output {
    int index;
    const TensorInfo* info;
    int64_t numel;
    int64_t other_cuts;
  };

  std::optional<StrategyCost> weigh(const Strategy& strategy, const StrategyCost* bound,
                                    bool or_equal) const;
  double pieces(const TensorInfo& info, const Placement& placement) const;
  double transfer(const Input& input, const Placement& from, const Placement& to) const;
  double move(const Input& input, const Placement& want) const;
  bool is_brought_before(const Input& input, const Strategy& strategy) const;
  double write_back(const Strategy& strategy) const;
  int64_t bytes_of(const Output& output, const Strategy& strategy) const;
  double compute(const Strategy& strategy) const;
  double bring(const Strategy& strategy) const;
  double owed(const Strategy& strategy, double share_of_sums, double share_of_cuts,
              bool may_grow) const;

  const OpCall& call_;
  const CostModel& model_;
  const CostModel::Link link_;
  const double flops_;
  const std::optional<int> written_input_;
  absl::InlinedVector<Input, 4> inputs_;    // those that are not None
  absl::InlinedVector<Output, 2> outputs_;  // the same
  int64_t shared_by_others_ = 1;            // ranks along other mesh dimensions that share the work
};

}  // namespace shardweave::dtensor_internal

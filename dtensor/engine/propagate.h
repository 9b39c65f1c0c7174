// From rules for one mesh dimension to a decision for the whole mesh.
//
// For every mesh dimension the rule is asked once; the strategy that costs least (strategy_cost.h)
// is taken (ties: the earlier one; all-Replicate comes first). The decision depends on global facts
// only, so that all ranks take the same.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/strategy_cost.h"
#include "shardweave/dtensor/rule.h"
#include "shardweave/placement/layout.h"

namespace shardweave::dtensor_internal {

struct Decision {
  // One per flat input: as it has to be. Null: None, or a plain number, which stays one.
  std::vector<SpecRef> inputs;
  std::vector<Layout> outputs;  // one per flat output, as the operator leaves it
  std::vector<Layout> results;  // where they are brought then; empty: all stay
  LocalKernel kernel = nullptr;
};

// Everything that the rule offers along call.mesh_dim, checked: all-Replicate first, then the
// rule's own, then these with the strided and ragged shards that the inputs have, or are remembered
// in. Throws Error if the rule returns nonsense, naming the operator.
std::vector<Strategy> strategies_of(const OpCall& call, const ShardedRule& rule);

// What propagate() weighed on one mesh dimension, for explain.h.
struct WeighedDim {
  struct Option {
    Strategy strategy;
    StrategyCost cost;          // of no meaning with an obstacle
    std::string_view obstacle;  // why it is not possible; "": it is
  };
  int mesh_dim;
  std::vector<SpecRef> inputs;  // at this turn: mesh dimensions before it are decided
  std::vector<Option> options;  // all-Replicate first
  size_t chosen;
};
using Weighed = std::vector<WeighedDim>;  // in the order of the turns

// Mesh dimensions are decided one after another, the outer cut first, and not all at once: trying all
// combinations has found nothing cheaper for any decision of the models in //bench:communication, and
// for one in 200 of random layouts, none of which kept more data or weights cut (joint_choice_test.cc).
//
// `written_input`: the flat input that output 0 is written into (in-place operators), and which has
// its shape: strategies that leave it where it lies are preferred. Throws Error if the rule returns
// nonsense, naming the operator. What is weighed is added to `weighed`, if given. Works on `call`, and
// leaves its tensors as they were.
Decision propagate(MeshContext& context, OpCall& call, const ShardedRule& rule,
                   std::optional<int> written_input, Weighed* weighed = nullptr);

// The same for a rule that speaks of one element of the operator's lists: each element is decided
// on its own. Where the operator writes its first list, its elements are left where they lie if
// they can be.
Decision propagate_elements(MeshContext& context, const OpCall& call, const ShardedRule& rule);

}  // namespace shardweave::dtensor_internal

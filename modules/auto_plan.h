// Finds a plan for a model: which of its modules are worth cutting on a mesh, and how.
//
//   const AutoPlan found = auto_plan(make, mesh, cost_model(connected_mesh));   // make: plan_cost.h
//   std::cout << found.to_string();          // each choice, what it costs, and the next best
//   parallelize_module(*model, connected_mesh, found.plan);
//
// Modules of one type and shape whose names differ by layers' numbers ("h.0.attn", "h.1.attn") are
// decided together. What there is to choose from are the styles of parallel_style.h: attentions and
// MLPs whole, in pairs, or in pairs with activations along the sequence between them; single linear
// layers and embeddings whole, or cut either way; and how activations come to the first of equal
// layers and leave the last norm. Each plan that is looked at is measured by plan_cost(), so that
// nothing but the seconds is estimated.
//
// The search begins with all whole, all in pairs and all along the sequence, takes the best, changes
// one group and then two at once as long as that helps, and stops where nothing does: it finds what no
// change of two groups betters. (All combinations are tried where there are few.) Deterministic: every
// rank finds the same, without talking to the others.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/plan_cost.h"

namespace shardweave {

struct AutoPlanOptions {
  // Of the mesh, along which modules may be cut; "": its only one, or "tp" of several.
  std::string tp_mesh_dim;
  // Bytes that a rank has; nullopt: as many as it takes.
  std::optional<int64_t> memory_limit;
  PlanCostOptions cost;
  int sequence_dim = 1;  // of the activations
  // Of attentions, as PairwiseParallel::heads; 0: not known.
  int64_t heads = 0;
  // Plans that are measured at most, each about a step of one rank.
  int64_t max_evaluations = 120;
  // Told of each plan that has been measured: how many there were, and the best so far. Null: nobody.
  std::function<void(int64_t evaluations, const PlanCost& best)> progress;
};

struct AutoPlan {
  struct Choice {
    std::string style;  // "replicate", "PairwiseParallel", ...
    // Of the whole step with it, where all other groups are as chosen; nullopt: not measured, or not
    // possible.
    std::optional<PlanCost> cost;
    std::string obstacle;  // why it is not possible; "": it is
  };
  // Modules that are decided together.
  struct Group {
    std::string modules;  // "transformer.h.*.attn"
    int64_t count = 0;
    std::vector<Choice> choices;  // replicate first
    size_t chosen = 0;
    std::optional<size_t> next_best;  // of those that were measured
  };

  ShardingPlan plan;
  PlanCost cost;
  std::vector<Group> groups;  // in the order of the modules
  int64_t evaluations = 0;
  bool finished = true;  // false: max_evaluations came first

  // The cost, and a row per group.
  std::string to_string() const;
  // {"plan": {"parameter": .., "forward": ..}, "cost": {..}, "evaluations": 31, "finished": true,
  //  "groups": [{"modules": "h.*.attn", "count": 2, "chosen": "PairwiseParallel",
  //              "choices": [{"style": "replicate", "cost": {..} or null, "obstacle": ""}]}]}
  // The plan is as parse_sharding_plan() takes it, the costs as PlanCost::to_json().
  std::string to_json() const;
};

// Local. `mesh`, `model`: as of plan_cost(). Throws Error: NotFound for a mesh without tp_mesh_dim;
// InvalidArgument for an option out of its range; ResourceExhausted if no plan keeps the memory limit,
// saying what the smallest one takes; what plan_cost() throws of the model with all whole.
AutoPlan auto_plan(const MakeModel& make, const DeviceMesh& mesh, const CostModel& model = {},
                   const AutoPlanOptions& options = {});

}  // namespace shardweave

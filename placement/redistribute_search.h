// The general search behind plan_redistribute(). Internal to placement/.
#pragma once

#include <optional>

#include "shardweave/placement/direct_plan.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave::placement_internal {

// More active mesh dimensions than this are not searched: the graph grows exponentially with them.
constexpr int kMaxSearchedMeshDims = 3;

// The best plan, by cost and then by the number of steps; nothing if that is not better than
// `bound` (nullptr: no bound).
std::optional<RedistributePlan> search_plan(const RedistributeProblem& problem,
                                            const MeshDims& active, const RedistributePlan* bound);

}  // namespace shardweave::placement_internal

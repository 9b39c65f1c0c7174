// The plan that needs no search, and what the search shares with it. Internal to placement/.
#pragma once

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "shardweave/placement/layout.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave::placement_internal {

// What is to be planned: valid, different layouts that cut nothing on mesh dimensions of size 1.
struct RedistributeProblem {
  const Layout& from;
  const Layout& to;
  absl::Span<const int64_t> mesh_shape;
  absl::Span<const int64_t> shape;
  int64_t element_size;
  const CostModel& model;
};

using MeshDims = absl::InlinedVector<int, 4>;  // ascending

// The mesh dimensions that take part in a plan (see redistribute_plan.h). Where they cut a tensor
// dimension, they are its innermost cuts in both layouts.
MeshDims active_mesh_dims(const Layout& from, const Layout& to);

// Whether a reduction over several mesh dimensions may leave this on one of them.
bool may_reduce_jointly(const Placement& after);

// The link of a step over `mesh_dims`.
CostModel::Link slowest_link(const CostModel& model, absl::Span<const int> mesh_dims);

// The obvious plan: slice what can be sliced, reduce what has to be reduced, get the rest right in
// one collective, then make new Partials. For one active mesh dimension nothing is cheaper; for more
// it is where the search begins.
RedistributePlan direct_plan(const RedistributeProblem& problem, const MeshDims& active);

}  // namespace shardweave::placement_internal

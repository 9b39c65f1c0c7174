// The general search behind plan_redistribute(). Internal to placement/.
#pragma once

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "shardweave/placement/layout.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave {

// What is to be planned: valid layouts that cut nothing on mesh dimensions of size 1.
struct RedistributeProblem {
  const Layout& from;
  const Layout& to;
  absl::Span<const int64_t> mesh_shape;
  absl::Span<const int64_t> shape;
  int64_t element_size;
  const CostModel& model;
};

// The mesh dimensions that take part in a plan (see redistribute_plan.h), ascending. Where they cut
// a tensor dimension, they are its innermost cuts in both layouts.
absl::InlinedVector<int, 4> active_mesh_dims(const Layout& from, const Layout& to);

// Seconds of a step on one mesh dimension.
double step_cost(const CostModel::Link& link, int64_t bytes);

// The cheapest plan; the time grows exponentially with the number of active mesh dimensions.
RedistributePlan search_plan(const RedistributeProblem& problem,
                             absl::Span<const int> active_mesh_dims);

}  // namespace shardweave

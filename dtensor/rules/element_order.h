// Which elements of the whole tensor a rank holds, in the order of its local tensor. Internal to
// dtensor/rules.
#pragma once

#include <vector>

#include "shardweave/dtensor/engine/mesh_context.h"

namespace shardweave::dtensor_internal {

// Calls f(first, count) for the elements that this rank holds, in the order of its local tensor, in
// runs of consecutive indices of the global tensor (row major).
template <typename F>
void for_each_run(const Spec& spec, F f) {
  if (spec.local_numel() == 0) return;
  const MeshContext& context = *spec.context;
  const int ndim = spec.ndim();
  std::vector<Intervals> held;
  for (int d = 0; d < ndim; ++d) {
    held.push_back(
        local_intervals(spec.layout, context.mesh().shape(), context.coordinate(), spec.sizes, d));
  }
  // Dimensions from `inner` on are whole: their elements are consecutive.
  int inner = ndim;
  int64_t inner_size = 1;
  while (inner > 0 && spec.local_sizes[inner - 1] == spec.sizes[inner - 1]) {
    inner_size *= spec.sizes[--inner];
  }
  if (inner == 0) {
    f(int64_t{0}, inner_size);
    return;
  }
  // All combinations of indices of the dimensions before the innermost cut one.
  const int cut_dim = inner - 1;
  auto descend = [&](auto& self, int d, int64_t row) -> void {
    for (const Interval& interval : held[d]) {
      if (d == cut_dim) {
        f((row * spec.sizes[d] + interval.begin) * inner_size, interval.size() * inner_size);
        continue;
      }
      for (int64_t i = interval.begin; i < interval.end; ++i)
        self(self, d + 1, row * spec.sizes[d] + i);
    }
  };
  descend(descend, 0, 0);
}

}  // namespace shardweave::dtensor_internal

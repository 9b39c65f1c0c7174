#include "shardweave/placement/layout_samples.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "shardweave/placement/intervals.h"

namespace shardweave {

using namespace placement_internal;

std::vector<Layout> all_layouts(const std::vector<Placements>& placements, const Dims& mesh_shape,
                                const Dims& shape) {
  std::vector<Layout> result;
  absl::flat_hash_set<Layout> seen;
  Dims chosen(placements.size(), 0);
  Dims num_choices;
  for (const Placements& p : placements) num_choices.push_back(static_cast<int64_t>(p.size()));
  do {
    Placements one;
    for (size_t m = 0; m < placements.size(); ++m) one.push_back(placements[m][chosen[m]]);
    std::vector<int> order(placements.size());
    std::iota(order.begin(), order.end(), 0);
    do {
      Layout layout = *Layout::create(one, order);
      if (!validate(layout, mesh_shape, shape).ok()) continue;
      if (seen.insert(layout).second) result.push_back(std::move(layout));
    } while (std::next_permutation(order.begin(), order.end()));
  } while (advance(absl::MakeSpan(chosen), num_choices));
  return result;
}

Placements all_placements(int64_t num_ranks, const Dims& shape,
                          const std::vector<ReduceOp>& reductions) {
  Placements result = {Replicate()};
  for (int dim = 0; dim < static_cast<int>(shape.size()); ++dim) {
    result.push_back(Shard(dim));
    result.push_back(StridedShard(dim, 2));
    result.push_back(StridedShard(dim, 3));
    std::vector<int64_t> ragged(num_ranks, 0);
    ragged[0] = shape[dim] / 3;
    ragged.back() += shape[dim] - ragged[0];
    result.push_back(RaggedShard(dim, std::move(ragged)));
  }
  for (ReduceOp op : reductions) result.push_back(Partial(op));
  return result;
}

}  // namespace shardweave

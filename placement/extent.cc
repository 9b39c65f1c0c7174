// Who holds what: single cuts, and the cuts of a whole layout one after the other.
#include <algorithm>

#include "shardweave/placement/intervals.h"
#include "shardweave/placement/layout.h"

namespace shardweave {
namespace {

using namespace placement_internal;

int64_t ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b != 0);
}

Intervals strided_cut(int64_t size, int64_t split_factor, int64_t num_ranks, int64_t index) {
  Intervals result;
  const int64_t step = ceil_div(size, split_factor);
  for (int64_t begin = 0; begin < size; begin += step) {
    const Interval piece = chunk(std::min(step, size - begin), num_ranks, index);
    append(result, {begin + piece.begin, begin + piece.end});
  }
  return result;
}

Interval ragged_cut(const Placement& p, int64_t index) {
  const int64_t begin = p.ragged_begin(index);
  return {begin, begin + p.sizes()[index]};
}

}  // namespace

Interval chunk(int64_t size, int64_t n, int64_t index) {
  const int64_t step = ceil_div(size, n);
  int64_t begin;
  if (__builtin_mul_overflow(index, step, &begin) || begin >= size) return {size, size};
  return {begin, begin + std::min(step, size - begin)};
}

Intervals cut(const Placement& placement, int64_t size, int64_t num_ranks, int64_t index) {
  Intervals result;
  switch (placement.kind()) {
    case PlacementKind::kReplicate:
    case PlacementKind::kPartial:
      append(result, {0, size});
      break;
    case PlacementKind::kShard:
      append(result, chunk(size, num_ranks, index));
      break;
    case PlacementKind::kRaggedShard:
      append(result, ragged_cut(placement, index));
      break;
    case PlacementKind::kStridedShard:
      return strided_cut(size, placement.split_factor(), num_ranks, index);
  }
  return result;
}

int64_t cut_size(const Placement& placement, int64_t size, int64_t num_ranks, int64_t index) {
  switch (placement.kind()) {
    case PlacementKind::kReplicate:
    case PlacementKind::kPartial:
      return size;
    case PlacementKind::kShard:
      return chunk(size, num_ranks, index).size();
    case PlacementKind::kRaggedShard:
      return placement.sizes()[index];
    case PlacementKind::kStridedShard: {
      if (size == 0) return 0;
      const int64_t step = ceil_div(size, placement.split_factor());
      return size / step * chunk(step, num_ranks, index).size() +
             chunk(size % step, num_ranks, index).size();
    }
  }
  return 0;  // not reached: the switch is complete
}

Dims cut_sizes(const Placement& placement, int64_t size, int64_t num_ranks) {
  Dims sizes;
  const auto add = [&](int64_t index) {
    if (index >= num_ranks) return;
    const int64_t piece = cut_size(placement, size, num_ranks, index);
    const auto at = std::lower_bound(sizes.begin(), sizes.end(), piece);
    if (at == sizes.end() || *at != piece) sizes.insert(at, piece);
  };
  add(0);
  if (placement.kind() == PlacementKind::kRaggedShard) {
    for (int64_t r = 1; r < num_ranks; ++r) add(r);
  } else if (placement.is_shard() && size > 0) {
    // Of each chunk some ranks have a full piece, the next one the rest, those after it nothing.
    const int64_t step = ceil_div(size, placement.split_factor());
    for (const int64_t chunk : {step, size % step}) {
      if (chunk == 0) continue;
      const int64_t full = chunk / ceil_div(chunk, num_ranks);
      add(full);
      add(full + 1);
    }
  }
  return sizes;
}

Dims local_shape(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                 absl::Span<const int64_t> coordinate, absl::Span<const int64_t> shape) {
  Dims result(shape.begin(), shape.end());
  for (int mesh_dim : layout.order()) {
    const Placement& p = layout[mesh_dim];
    if (!p.is_shard()) continue;
    int64_t& size = result[p.dim()];
    size = cut_size(p, size, mesh_shape[mesh_dim], coordinate[mesh_dim]);
  }
  return result;
}

Intervals local_intervals(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                          absl::Span<const int64_t> coordinate, absl::Span<const int64_t> shape,
                          int dim) {
  Intervals held;
  append(held, {0, shape[dim]});
  for (int mesh_dim : layout.order()) {
    if (!layout[mesh_dim].is_shard(dim)) continue;
    narrow(held, layout[mesh_dim], mesh_shape[mesh_dim], coordinate[mesh_dim]);
  }
  return held;
}

LocalExtent local_extent(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                         absl::Span<const int64_t> coordinate, absl::Span<const int64_t> shape) {
  LocalExtent result;
  for (int dim = 0; dim < static_cast<int>(shape.size()); ++dim) {
    const Intervals held = local_intervals(layout, mesh_shape, coordinate, shape, dim);
    result.shape.push_back(count(held));
    result.offset.push_back(held.empty() ? 0 : held[0].begin);
    if (held.size() > 1) result.contiguous = false;
  }
  return result;
}

}  // namespace shardweave

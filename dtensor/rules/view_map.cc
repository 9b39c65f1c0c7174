#include "shardweave/dtensor/rules/view_map.h"

#include <algorithm>

namespace shardweave::dtensor_internal {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b != 0);
}

void insert(SizeSet& sizes, int64_t size) {
  const auto at = std::lower_bound(sizes.begin(), sizes.end(), size);
  if (at == sizes.end() || *at != size) sizes.insert(at, size);
}

SizeSet after_cut(const SizeSet& sizes, const MeshCut& c) {
  SizeSet result;
  for (int64_t size : sizes) {
    for (int64_t piece : cut_sizes(c.placement, size, c.num_ranks)) insert(result, piece);
  }
  return result;
}

SizeSet product(absl::Span<const SizeSet> dims) {
  SizeSet result = {1};
  for (const SizeSet& sizes : dims) {
    if (result.size() == 1 && sizes.size() == 1) {
      result[0] *= sizes[0];
      continue;
    }
    SizeSet next;
    for (int64_t a : result) {
      for (int64_t b : sizes) insert(next, a * b);
    }
    result = std::move(next);
  }
  return result;
}

// The one size on all ranks that hold anything, if it is one.
std::optional<int64_t> single(const SizeSet& sizes) {
  if (sizes.size() == 1 || (sizes.size() == 2 && sizes[0] == 0)) return sizes.back();
  return std::nullopt;
}

// Where a dimension is within those that make up one with it: it is repeated `outer` times, with
// pieces of `inner` elements.
struct Position {
  Position(absl::Span<const SizeSet> dims, size_t j)
      : outer(product(dims.subspan(0, j))), inner(product(dims.subspan(j + 1))), size(dims[j]) {}

  // All ranks hold equally much: what RaggedShard wants.
  bool uniform() const { return outer.size() == 1 && size.size() == 1 && inner.size() == 1; }
  // Chunks of the dimension, divided by `split_factor` first, are chunks of the elements.
  bool same_chunks(int64_t split_factor, int64_t num_ranks) const {
    for (int64_t s : size) {
      if (s % split_factor != 0) return false;
      for (int64_t i : inner) {
        const int64_t rows = s / split_factor;
        if (ceil_div(rows, num_ranks) * i != ceil_div(rows * i, num_ranks)) return false;
      }
    }
    return true;
  }

  const SizeSet outer, inner;
  const SizeSet& size;
};

// The cut `c` of one dimension as a cut of all the elements, in order.
std::optional<Placement> merged(const Position& at, const MeshCut& c) {
  const std::optional<int64_t> outer = single(at.outer);
  if (!outer.has_value()) return std::nullopt;
  const Placement& p = c.placement;
  const int64_t split_factor = p.kind() == PlacementKind::kStridedShard ? p.split_factor() : 1;
  if (p.kind() != PlacementKind::kRaggedShard && at.same_chunks(split_factor, c.num_ranks)) {
    return StridedShard(0, *outer * split_factor);
  }
  const bool consecutive = p.kind() != PlacementKind::kStridedShard && *outer == 1;
  if (!consecutive || !at.uniform()) return std::nullopt;
  std::vector<int64_t> sizes;
  for (int64_t r = 0; r < c.num_ranks; ++r) {
    sizes.push_back(cut_size(p, at.size[0], c.num_ranks, r) * at.inner[0]);
  }
  return RaggedShard(0, std::move(sizes));
}

// The inverse: the cut `c` of all the elements as one of dimension `dim`.
std::optional<Placement> split(const Position& at, const MeshCut& c, int dim) {
  const std::optional<int64_t> outer = single(at.outer);
  if (!outer.has_value()) return std::nullopt;
  const Placement& p = c.placement;
  if (p.kind() != PlacementKind::kRaggedShard) {
    if (p.split_factor() % *outer != 0) return std::nullopt;
    const int64_t split_factor = p.split_factor() / *outer;
    if (!at.same_chunks(split_factor, c.num_ranks)) return std::nullopt;
    return StridedShard(dim, split_factor);
  }
  if (*outer != 1 || !at.uniform()) return std::nullopt;
  std::vector<int64_t> sizes = p.sizes();
  bool chunks = true;
  for (int64_t r = 0; r < c.num_ranks; ++r) {
    if (sizes[r] % at.inner[0] != 0) return std::nullopt;
    sizes[r] /= at.inner[0];
    chunks &= sizes[r] == chunk(at.size[0], c.num_ranks, r).size();
  }
  return chunks ? Shard(dim) : RaggedShard(dim, std::move(sizes));
}

}  // namespace

CutMap::CutMap(absl::Span<const int64_t> from, absl::Span<const int64_t> to) {
  for (int64_t size : from) from_sizes_.push_back({size});
  for (int64_t size : to) to_sizes_.push_back({size});
  const int num_from = static_cast<int>(from.size());
  const int num_to = static_cast<int>(to.size());
  const bool empty = std::find(from.begin(), from.end(), 0) != from.end();
  int i = 0;
  int o = 0;
  while (i < num_from || o < num_to) {
    Group group{i, i, o, o};
    int64_t a = i < num_from ? from[i++] : 1;
    int64_t b = o < num_to ? to[o++] : 1;
    // Without elements sizes tell nothing: only equal dimensions in front correspond.
    if (empty && a != b) break;
    while (a != b) {
      if (a < b) {
        a *= from[i++];
      } else {
        b *= to[o++];
      }
    }
    group.from_end = i;
    group.to_end = o;
    groups_.push_back(group);
  }
}

std::optional<Placement> CutMap::map(const MeshCut& c) const {
  if (!c.placement.is_shard()) return c.placement;
  const int dim = c.placement.dim();
  const auto group = std::find_if(groups_.begin(), groups_.end(), [&](const Group& g) {
    return g.from_begin <= dim && dim < g.from_end;
  });
  if (group == groups_.end()) return std::nullopt;
  if (group->same_dim()) return c.placement.with_dim(group->to_begin);

  const auto sources = absl::MakeConstSpan(from_sizes_)
                           .subspan(group->from_begin, group->from_end - group->from_begin);
  const auto targets =
      absl::MakeConstSpan(to_sizes_).subspan(group->to_begin, group->to_end - group->to_begin);
  const std::optional<Placement> all = merged(Position(sources, dim - group->from_begin), c);
  if (!all.has_value()) return std::nullopt;
  for (size_t j = 0; j < targets.size(); ++j) {
    auto mapped =
        split(Position(targets, j), {*all, c.num_ranks}, group->to_begin + static_cast<int>(j));
    if (mapped.has_value()) return mapped;
  }
  return std::nullopt;
}

void CutMap::add(const MeshCut& c, const std::optional<Placement>& mapped) {
  if (!c.placement.is_shard() || !mapped.has_value()) return;
  SizeSet& source = from_sizes_[c.placement.dim()];
  source = after_cut(source, c);
  SizeSet& target = to_sizes_[mapped->dim()];
  target = after_cut(target, {*mapped, c.num_ranks});
}

std::vector<std::optional<Placement>> map_cuts(absl::Span<const int64_t> from,
                                               absl::Span<const int64_t> to,
                                               absl::Span<const MeshCut> cuts) {
  CutMap map(from, to);
  std::vector<std::optional<Placement>> result;
  for (const MeshCut& c : cuts) {
    result.push_back(map.map(c));
    map.add(c, result.back());
  }
  return result;
}

}  // namespace shardweave::dtensor_internal

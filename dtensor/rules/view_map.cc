#include "shardweave/dtensor/rules/view_map.h"

#include <algorithm>

namespace shardweave::dtensor_internal {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b != 0);
}

// The sizes that a dimension may have on some rank. Sorted, distinct.
using Sizes = absl::InlinedVector<int64_t, 2>;

void insert(Sizes& sizes, int64_t size) {
  const auto at = std::lower_bound(sizes.begin(), sizes.end(), size);
  if (at == sizes.end() || *at != size) sizes.insert(at, size);
}

Sizes after_cut(const Sizes& sizes, const MeshCut& c) {
  Sizes result;
  for (int64_t size : sizes) {
    for (int64_t r = 0; r < c.num_ranks; ++r) {
      insert(result, cut_size(c.placement, size, c.num_ranks, r));
    }
  }
  return result;
}

Sizes product(absl::Span<const Sizes> dims) {
  Sizes result = {1};
  for (const Sizes& sizes : dims) {
    Sizes next;
    for (int64_t a : result) {
      for (int64_t b : sizes) insert(next, a * b);
    }
    result = std::move(next);
  }
  return result;
}

// The one size on all ranks that hold anything, if it is one.
std::optional<int64_t> single(Sizes sizes) {
  if (sizes.size() > 1 && sizes[0] == 0) sizes.erase(sizes.begin());
  return sizes.size() == 1 ? std::optional(sizes[0]) : std::nullopt;
}

// Where a dimension is within those that make up one with it: it is repeated `outer` times, with
// pieces of `inner` elements.
struct Position {
  Position(absl::Span<const Sizes> dims, size_t j)
      : outer(product(dims.subspan(0, j))), size(dims[j]), inner(product(dims.subspan(j + 1))) {}

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

  Sizes outer, size, inner;
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

// Dimensions [from_begin, from_end) together have the elements of [to_begin, to_end) together.
struct Group {
  int from_begin, from_end, to_begin, to_end;
  bool same_dim() const { return from_end - from_begin == 1 && to_end - to_begin == 1; }
};

std::vector<Group> smallest_groups(absl::Span<const int64_t> from, absl::Span<const int64_t> to) {
  const int num_from = static_cast<int>(from.size());
  const int num_to = static_cast<int>(to.size());
  std::vector<Group> groups;
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
    groups.push_back(group);
  }
  return groups;
}

}  // namespace

std::vector<std::optional<Placement>> map_cuts(absl::Span<const int64_t> from,
                                               absl::Span<const int64_t> to,
                                               absl::Span<const MeshCut> cuts) {
  const std::vector<Group> groups = smallest_groups(from, to);
  std::vector<Sizes> from_sizes, to_sizes;
  for (int64_t size : from) from_sizes.push_back({size});
  for (int64_t size : to) to_sizes.push_back({size});

  auto map = [&](const MeshCut& c) -> std::optional<Placement> {
    const int dim = c.placement.dim();
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
      return g.from_begin <= dim && dim < g.from_end;
    });
    if (group == groups.end()) return std::nullopt;
    if (group->same_dim()) return c.placement.with_dim(group->to_begin);

    const auto sources = absl::MakeConstSpan(from_sizes)
                             .subspan(group->from_begin, group->from_end - group->from_begin);
    const auto targets =
        absl::MakeConstSpan(to_sizes).subspan(group->to_begin, group->to_end - group->to_begin);
    const std::optional<Placement> all = merged(Position(sources, dim - group->from_begin), c);
    if (!all.has_value()) return std::nullopt;
    for (size_t j = 0; j < targets.size(); ++j) {
      auto mapped =
          split(Position(targets, j), {*all, c.num_ranks}, group->to_begin + static_cast<int>(j));
      if (mapped.has_value()) return mapped;
    }
    return std::nullopt;
  };

  std::vector<std::optional<Placement>> result;
  for (const MeshCut& c : cuts) {
    if (!c.placement.is_shard()) {
      result.emplace_back(c.placement);
      continue;
    }
    result.push_back(map(c));
    if (!result.back().has_value()) continue;
    Sizes& source = from_sizes[c.placement.dim()];
    source = after_cut(source, c);
    Sizes& target = to_sizes[result.back()->dim()];
    target = after_cut(target, {*result.back(), c.num_ranks});
  }
  return result;
}

}  // namespace shardweave::dtensor_internal

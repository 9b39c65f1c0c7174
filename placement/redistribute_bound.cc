#include "shardweave/placement/redistribute_bound.h"

#include <algorithm>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "shardweave/placement/intervals.h"

namespace shardweave {
namespace {

using namespace placement_internal;

struct Rank {
  Dims coordinate;
  std::vector<Intervals> before;  // of each tensor dimension
  std::vector<Intervals> after;
};

bool contains(const Intervals& intervals, int64_t index) {
  return std::any_of(intervals.begin(), intervals.end(),
                     [&](const Interval& i) { return i.begin <= index && index < i.end; });
}

// Where the blocks of one tensor dimension begin, and the end of the last.
std::vector<int64_t> borders_of(const std::vector<Rank>& ranks, int dim, int64_t size) {
  std::vector<int64_t> borders = {0, size};
  for (const Rank& rank : ranks) {
    for (const Intervals* intervals : {&rank.before[dim], &rank.after[dim]}) {
      for (const Interval& i : *intervals) {
        borders.push_back(i.begin);
        borders.push_back(i.end);
      }
    }
  }
  std::sort(borders.begin(), borders.end());
  borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
  return borders;
}

// The coordinate on those mesh dimensions only.
Dims on(const std::vector<int>& mesh_dims, const Dims& coordinate) {
  Dims result;
  for (int m : mesh_dims) result.push_back(coordinate[m]);
  return result;
}

class Bound {
 public:
  Bound(const Layout& from, const Layout& to, absl::Span<const int64_t> mesh_shape) {
    for (int m = 0; m < from.mesh_ndim(); ++m) {
      if (from[m].is_partial() && from[m] == to[m]) {
        kept_.push_back(m);
      } else {
        if (from[m].is_partial()) summed_.push_back(m);
        if (!to[m].is_partial()) wanted_.push_back(m);
      }
    }
    for (int m : summed_) num_summands_ *= mesh_shape[m];
  }

  // Of one block of `elements` elements: who `has` it and who `wants` it.
  void add(int64_t elements, const std::vector<Rank>& ranks, const std::vector<bool>& has,
           const std::vector<bool>& wants, std::vector<int64_t>& sends) {
    struct Slice {                                             // ranks with one coordinate on kept_
      absl::flat_hash_map<Dims, std::vector<size_t>> holders;  // by summand
      absl::flat_hash_map<Dims, std::vector<size_t>> wanting;  // one rank of each group is enough
    };
    absl::flat_hash_map<Dims, Slice> slices;
    for (size_t r = 0; r < ranks.size(); ++r) {
      Slice& slice = slices[on(kept_, ranks[r].coordinate)];
      if (has[r]) slice.holders[on(summed_, ranks[r].coordinate)].push_back(r);
      if (wants[r]) slice.wanting[on(wanted_, ranks[r].coordinate)].push_back(r);
    }
    for (const auto& [unused, slice] : slices) {
      int64_t missing = 0;  // groups of which no rank has it
      for (const auto& [unused_group, members] : slice.wanting) {
        missing += std::none_of(members.begin(), members.end(), [&](size_t r) { return has[r]; });
      }
      const auto groups = static_cast<int64_t>(slice.wanting.size());
      transfers_ += elements * (num_summands_ == 1 ? missing : num_summands_ - 1 + groups - 1);
      for (const auto& [unused_summand, holders] : slice.holders) {
        if (holders.size() != 1) continue;
        const bool others_want =
            std::any_of(slice.wanting.begin(), slice.wanting.end(), [&](const auto& group) {
              return std::find(group.second.begin(), group.second.end(), holders[0]) ==
                     group.second.end();
            });
        if (others_want) sends[holders[0]] += elements;
      }
    }
  }

  int64_t transfers() const { return transfers_; }

 private:
  std::vector<int> kept_;    // mesh dimensions whose Partial stays
  std::vector<int> summed_;  // whose Partial is reduced
  std::vector<int> wanted_;  // on which every rank wants its part
  int64_t num_summands_ = 1;
  int64_t transfers_ = 0;
};

}  // namespace

int64_t least_bytes(const Layout& from, const Layout& to, absl::Span<const int64_t> mesh_shape,
                    absl::Span<const int64_t> shape, int64_t element_size) {
  const int ndim = static_cast<int>(shape.size());
  std::vector<Rank> ranks;
  Dims coordinate(mesh_shape.size(), 0);
  do {
    Rank& rank = ranks.emplace_back();
    rank.coordinate = coordinate;
    for (int d = 0; d < ndim; ++d) {
      rank.before.push_back(local_intervals(from, mesh_shape, coordinate, shape, d));
      rank.after.push_back(local_intervals(to, mesh_shape, coordinate, shape, d));
    }
  } while (advance(absl::MakeSpan(coordinate), mesh_shape));

  std::vector<std::vector<int64_t>> borders;
  Dims num_blocks;
  for (int d = 0; d < ndim; ++d) {
    borders.push_back(borders_of(ranks, d, shape[d]));
    num_blocks.push_back(static_cast<int64_t>(borders.back().size()) - 1);
    if (num_blocks.back() == 0) return 0;  // an empty tensor
  }
  Bound bound(from, to, mesh_shape);
  std::vector<int64_t> sends(ranks.size(), 0);
  Dims block(ndim, 0);
  do {
    int64_t elements = 1;
    std::vector<bool> has(ranks.size(), true);
    std::vector<bool> wants(ranks.size(), true);
    for (int d = 0; d < ndim; ++d) {
      const int64_t begin = borders[d][block[d]];
      elements *= borders[d][block[d] + 1] - begin;
      for (size_t r = 0; r < ranks.size(); ++r) {
        has[r] = has[r] && contains(ranks[r].before[d], begin);
        wants[r] = wants[r] && contains(ranks[r].after[d], begin);
      }
    }
    bound.add(elements, ranks, has, wants, sends);
  } while (advance(absl::MakeSpan(block), num_blocks));
  const auto num_ranks = static_cast<int64_t>(ranks.size());
  const int64_t average = (bound.transfers() + num_ranks - 1) / num_ranks;
  return std::max(average, *std::max_element(sends.begin(), sends.end())) * element_size;
}

}  // namespace shardweave

#include "shardweave/placement/step_bytes.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "shardweave/placement/intervals.h"

namespace shardweave {
namespace {

// Above this what the ranks of an exchange keep is not worth counting.
constexpr int64_t kMaxExchangeRanks = 1024;

int64_t multiply(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}

void sort_unique(SizeSet& sizes) {
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
}

// The first rank of every run of ranks that get equally large pieces.
using Runs = absl::InlinedVector<int64_t, 8>;

void append_chunk_runs(Runs& runs, int64_t size, int64_t num_ranks) {
  if (size == 0) return;
  const int64_t full = size / chunk(size, num_ranks, 0).size();
  if (full < num_ranks) runs.push_back(full);
  if (full + 1 < num_ranks) runs.push_back(full + 1);
}

void append_runs(Runs& runs, int64_t size, const Cut& cut) {
  const Placement& p = *cut.placement;
  if (p.kind() == PlacementKind::kRaggedShard) {
    for (int64_t i = 0; i < cut.num_ranks; ++i) runs.push_back(i);
    return;
  }
  runs.push_back(0);
  if (p.kind() == PlacementKind::kStridedShard && size > 0) {
    const int64_t step = chunk(size, p.split_factor(), 0).size();
    append_chunk_runs(runs, step, cut.num_ranks);
    append_chunk_runs(runs, size % step, cut.num_ranks);
  } else {
    append_chunk_runs(runs, size, cut.num_ranks);
  }
}

int64_t piece(int64_t size, const Cut& cut, int64_t index) {
  return cut_size(*cut.placement, size, cut.num_ranks, index);
}

int64_t smallest_piece(int64_t size, const Cut& cut) {
  const std::vector<int64_t>& sizes = cut.placement->sizes();
  return sizes.empty() ? piece(size, cut, cut.num_ranks - 1)  // they never grow with the rank
                       : *std::min_element(sizes.begin(), sizes.end());
}

SizeSet cut_pieces(const SizeSet& pieces, const Cut& cut) {
  SizeSet result;
  for (int64_t size : pieces) {
    Runs runs;
    append_runs(runs, size, cut);
    for (int64_t index : runs) result.push_back(piece(size, cut, index));
  }
  sort_unique(result);
  return result;
}

// The largest that a rank has less the smallest piece of it.
int64_t largest_remainder(const SizeSet& pieces, const Cut& cut) {
  int64_t result = 0;
  for (int64_t size : pieces) result = std::max(result, size - smallest_piece(size, cut));
  return result;
}

// Bytes of `elements` of the dimensions `a` and `b` times the largest pieces of all others.
// Different tensor dimensions are cut by different mesh dimensions: some rank has the largest of
// all of them.
int64_t times_others(int64_t elements, int a, int b, const TensorCuts& cuts, int64_t element_size) {
  int64_t result = multiply(elements, element_size);
  for (int d = 0; d < static_cast<int>(cuts.size()); ++d) {
    if (d != a && d != b) result = multiply(result, cuts[d].pieces.back());
  }
  return result;
}

bool same_cut(const Cut& a, const Cut& b) {
  return a.mesh_dim == b.mesh_dim && (a.placement == b.placement || *a.placement == *b.placement);
}

// A tensor dimension that an exchange changes: what its outer cuts leave, which stay, and the inner
// cuts that do not.
struct MovedDim {
  SizeSet pieces;
  absl::Span<const Cut> before;
  absl::Span<const Cut> after;
};

MovedDim moved_dim(const DimCuts& before, const DimCuts& after) {
  MovedDim moved{{before.size}, before.chain, after.chain};
  while (!moved.before.empty() && !moved.after.empty() &&
         same_cut(moved.before[0], moved.after[0])) {
    moved.pieces = cut_pieces(moved.pieces, moved.before[0]);
    moved.before.remove_prefix(1);
    moved.after.remove_prefix(1);
  }
  return moved;
}

// What an exchange does to the dimensions that it changes.
class Exchange {
 public:
  void add(MovedDim dim) {
    for (const Cut& cut : dim.before) {
      mesh_dims_.push_back(cut.mesh_dim);
      num_ranks_.push_back(cut.num_ranks);
    }
    num_pieces_.push_back(static_cast<int64_t>(dim.pieces.size()));
    dims_.push_back(std::move(dim));
  }

  // The largest number of elements (of these dimensions) that a rank sends to others; `limit` is
  // what it would be if the rank with the largest piece kept nothing. Stops looking above `enough`.
  int64_t largest_sent(int64_t copies, int64_t limit, int64_t enough) const {
    int64_t num_ranks = 1;
    for (int64_t n : num_ranks_) num_ranks = multiply(num_ranks, n);
    if (num_ranks > kMaxExchangeRanks) return limit;
    Dims piece(dims_.size(), 0);
    Dims coordinate(mesh_dims_.size(), 0);
    // A rank off the diagonal first: it is likely to keep nothing.
    for (size_t i = 0; i < coordinate.size(); i += 2) coordinate[i] = 1;
    int64_t largest = sent(copies, piece, coordinate);
    std::fill(coordinate.begin(), coordinate.end(), 0);
    do {
      do {
        if (largest == limit || largest > enough) return largest;
        largest = std::max(largest, sent(copies, piece, coordinate));
      } while (advance(absl::MakeSpan(coordinate), num_ranks_));
    } while (advance(absl::MakeSpan(piece), num_pieces_));
    return largest;
  }

 private:
  Intervals held(int64_t size, absl::Span<const Cut> cuts, const Dims& coordinate) const {
    Intervals result;
    append(result, {0, size});
    for (const Cut& cut : cuts) {
      const auto i = std::find(mesh_dims_.begin(), mesh_dims_.end(), cut.mesh_dim);
      narrow(result, *cut.placement, cut.num_ranks, coordinate[i - mesh_dims_.begin()]);
    }
    return result;
  }

  int64_t sent(int64_t copies, const Dims& piece, const Dims& coordinate) const {
    int64_t has = copies;
    int64_t keeps = 1;
    for (size_t d = 0; d < dims_.size(); ++d) {
      const int64_t size = dims_[d].pieces.rbegin()[piece[d]];  // largest first
      const Intervals before = held(size, dims_[d].before, coordinate);
      const Intervals after = held(size, dims_[d].after, coordinate);
      int64_t common = 0;
      for (const CommonRun& run : intersect(before, after)) common += run.size;
      has = multiply(has, count(before));
      keeps = multiply(keeps, common);
    }
    return has - keeps;
  }

  absl::InlinedVector<MovedDim, 4> dims_;
  Dims num_pieces_;  // different sizes in each of dims_
  absl::InlinedVector<int, 4> mesh_dims_;
  Dims num_ranks_;  // of each of mesh_dims_
};

int dim_cut_last_by(int mesh_dim, const TensorCuts& cuts) {
  const auto found = std::find_if(cuts.begin(), cuts.end(), [&](const DimCuts& c) {
    return !c.chain.empty() && c.chain.back().mesh_dim == mesh_dim;
  });
  return static_cast<int>(found - cuts.begin());
}

int64_t all_to_all_bytes(int from_dim, int to_dim, const TensorCuts& before,
                         const TensorCuts& after, int64_t element_size) {
  const Cut& from = before[from_dim].chain.back();
  const Cut& to = after[to_dim].chain.back();
  int64_t largest = 0;
  for (int64_t from_size : before[from_dim].outer) {
    for (int64_t to_size : before[to_dim].pieces) {
      Runs runs;
      append_runs(runs, from_size, from);
      append_runs(runs, to_size, to);
      for (int64_t rank : runs) {
        largest = std::max(
            largest, multiply(piece(from_size, from, rank), to_size - piece(to_size, to, rank)));
      }
    }
  }
  return times_others(largest, from_dim, to_dim, before, element_size);
}

int64_t exchange_bytes(const TensorCuts& before, const TensorCuts& after, int64_t element_size,
                       int64_t enough) {
  Exchange exchange;
  int64_t pieces_before = 1;
  int64_t pieces_after = 1;
  int64_t limit = 1;  // elements that a rank has of the dimensions that change
  int64_t others = element_size;
  for (size_t d = 0; d < before.size(); ++d) {
    MovedDim dim = moved_dim(before[d], after[d]);
    if (dim.before.empty() && dim.after.empty()) {
      others = multiply(others, before[d].pieces.back());
      continue;
    }
    for (const Cut& cut : dim.before) pieces_before = multiply(pieces_before, cut.num_ranks);
    for (const Cut& cut : dim.after) pieces_after = multiply(pieces_after, cut.num_ranks);
    limit = multiply(limit, before[d].pieces.back());
    exchange.add(std::move(dim));
  }
  if (others == 0 || limit == 0) return 0;
  const int64_t copies = pieces_before / pieces_after;  // of each element: one per rank gathered to
  return multiply(exchange.largest_sent(copies, multiply(limit, copies), enough / others), others);
}

}  // namespace

TensorCuts uncut(absl::Span<const int64_t> shape) {
  TensorCuts result;
  for (int64_t size : shape) result.push_back({size, {}, {size}, {size}});
  return result;
}

bool add_cut(DimCuts& cuts, const Cut& cut) {
  const std::vector<int64_t>& sizes = cut.placement->sizes();
  if (cut.placement->kind() == PlacementKind::kRaggedShard &&
      (cuts.pieces.size() != 1 ||
       cuts.pieces[0] != std::accumulate(sizes.begin(), sizes.end(), int64_t{0}))) {
    return false;
  }
  cuts.outer = std::exchange(cuts.pieces, cut_pieces(cuts.pieces, cut));
  cuts.chain.push_back(cut);
  return true;
}

TensorCuts cuts_of(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                   absl::Span<const int64_t> shape) {
  TensorCuts result = uncut(shape);
  for (int m : layout.order()) {
    if (layout[m].is_shard()) add_cut(result[layout[m].dim()], {&layout[m], mesh_shape[m], m});
  }
  return result;
}

int64_t step_bytes(StepKind kind, int mesh_dim, int64_t num_ranks, const TensorCuts& before,
                   const TensorCuts& after, int64_t element_size, int64_t enough) {
  switch (kind) {
    case StepKind::kSlice:
    case StepKind::kToPartial:
      return 0;
    case StepKind::kAllGather: {
      const int dim = dim_cut_last_by(mesh_dim, before);
      const DimCuts& cuts = before[dim];
      return times_others(largest_remainder(cuts.outer, cuts.chain.back()), dim, dim, before,
                          element_size);
    }
    case StepKind::kAllReduce: {
      const int64_t elements = times_others(1, -1, -1, before, 1);
      return multiply(multiply(2, elements - elements / num_ranks), element_size);
    }
    case StepKind::kReduceScatter: {
      const int dim = dim_cut_last_by(mesh_dim, after);
      return times_others(largest_remainder(before[dim].pieces, after[dim].chain.back()), dim, dim,
                          before, element_size);
    }
    case StepKind::kAllToAll:
      return all_to_all_bytes(dim_cut_last_by(mesh_dim, before), dim_cut_last_by(mesh_dim, after),
                              before, after, element_size);
    case StepKind::kExchange:
      return exchange_bytes(before, after, element_size, enough);
  }
  return 0;  // not reached: the switch is complete
}

double step_cost(const CostModel::Link& link, int64_t bytes) {
  return bytes == 0 ? 0 : link.latency + static_cast<double>(bytes) / link.bandwidth;
}

}  // namespace shardweave

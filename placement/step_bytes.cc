#include "shardweave/placement/step_bytes.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "shardweave/placement/intervals.h"

namespace shardweave::placement_internal {
namespace {

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

// The least that a rank keeps of `size` elements under all of `cuts`.
int64_t smallest_piece(int64_t size, absl::Span<const Cut> cuts) {
  if (cuts.size() == 1) return smallest_piece(size, cuts[0]);
  SizeSet pieces = {size};
  for (const Cut& cut : cuts) pieces = cut_pieces(pieces, cut);
  return pieces.front();
}

// Bytes of `elements` of the dimensions `a` and `b` times the largest pieces of all others.
// Different tensor dimensions are cut by different mesh dimensions: some rank has the largest of
// all of them.
int64_t times_others(int64_t elements, int a, int b, const TensorCuts& cuts, int64_t element_size) {
  int64_t result = saturating_product(elements, element_size);
  for (int d = 0; d < static_cast<int>(cuts.size()); ++d) {
    if (d != a && d != b) result = saturating_product(result, cuts[d].pieces().back());
  }
  return result;
}

// What there was before the last cut.
const SizeSet& outer_pieces(const DimCuts& cuts) {
  return cuts.levels[cuts.levels.size() - 2];
}

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
  for (int64_t from_size : outer_pieces(before[from_dim])) {
    for (int64_t to_size : before[to_dim].pieces()) {
      Runs runs;
      append_runs(runs, from_size, from);
      append_runs(runs, to_size, to);
      for (int64_t rank : runs) {
        largest = std::max(largest, saturating_product(piece(from_size, from, rank),
                                                       to_size - piece(to_size, to, rank)));
      }
    }
  }
  return times_others(largest, from_dim, to_dim, before, element_size);
}

// The cuts of the reduced mesh dimensions are the innermost ones of `after`.
int64_t reduce_scatter_bytes(const TensorCuts& before, const TensorCuts& after,
                             int64_t element_size) {
  absl::InlinedVector<int, 3> dims;
  Dims num_sizes;
  int64_t result = element_size;
  for (int d = 0; d < static_cast<int>(before.size()); ++d) {
    if (before[d].chain.size() == after[d].chain.size()) {
      result = saturating_product(result, before[d].pieces().back());
    } else {
      dims.push_back(d);
      num_sizes.push_back(static_cast<int64_t>(before[d].pieces().size()));
    }
  }
  int64_t largest = 0;
  Dims chosen(dims.size(), 0);
  do {
    int64_t has = 1;
    int64_t keeps = 1;
    for (size_t i = 0; i < dims.size(); ++i) {
      const DimCuts& cuts = before[dims[i]];
      const int64_t size = cuts.pieces()[chosen[i]];
      has = saturating_product(has, size);
      keeps = saturating_product(
          keeps, smallest_piece(
                     size, absl::MakeConstSpan(after[dims[i]].chain).subspan(cuts.chain.size())));
    }
    largest = std::max(largest, has - keeps);
  } while (advance(absl::MakeSpan(chosen), num_sizes));
  return saturating_product(result, largest);
}

}  // namespace

int64_t saturating_product(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}

TensorCuts uncut(absl::Span<const int64_t> shape) {
  TensorCuts result;
  for (int64_t size : shape) result.emplace_back().levels.push_back({size});
  return result;
}

bool add_cut(DimCuts& cuts, const Cut& cut) {
  const std::vector<int64_t>& sizes = cut.placement->sizes();
  if (cut.placement->kind() == PlacementKind::kRaggedShard &&
      (cuts.pieces().size() != 1 ||
       cuts.pieces()[0] != std::accumulate(sizes.begin(), sizes.end(), int64_t{0}))) {
    return false;
  }
  cuts.levels.push_back(cut_pieces(cuts.pieces(), cut));
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

Intervals held_by(absl::Span<const int64_t> coordinate, int64_t size, absl::Span<const Cut> cuts) {
  Intervals result;
  append(result, {0, size});
  for (const Cut& cut : cuts) {
    narrow(result, *cut.placement, cut.num_ranks, coordinate[cut.mesh_dim]);
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
      return times_others(largest_remainder(outer_pieces(cuts), cuts.chain.back()), dim, dim,
                          before, element_size);
    }
    case StepKind::kAllReduce: {
      const int64_t elements = times_others(1, -1, -1, before, 1);
      return saturating_product(saturating_product(2, elements - elements / num_ranks),
                                element_size);
    }
    case StepKind::kReduceScatter:
      return reduce_scatter_bytes(before, after, element_size);
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

}  // namespace shardweave::placement_internal

#include <algorithm>
#include <utility>

#include "shardweave/placement/intervals.h"
#include "shardweave/placement/step_bytes.h"

namespace shardweave::placement_internal {
namespace {

// Above this what the ranks keep is not worth counting.
constexpr int64_t kMaxCountedRanks = 256;

bool same_cut(const Cut& a, const Cut& b) {
  return a.mesh_dim == b.mesh_dim && (a.placement == b.placement || *a.placement == *b.placement);
}

// A tensor dimension that an exchange changes: the inner cuts that differ, and what the outer ones,
// which stay, have left of it.
struct MovedDim {
  absl::Span<const Cut> before;
  absl::Span<const Cut> after;
  const SizeSet* pieces;
};

MovedDim moved_dim(const DimCuts& before, const DimCuts& after) {
  const size_t most = std::min(before.chain.size(), after.chain.size());
  size_t same = 0;
  while (same < most && same_cut(before.chain[same], after.chain[same])) ++same;
  return {absl::MakeSpan(before.chain).subspan(same), absl::MakeSpan(after.chain).subspan(same),
          &before.levels[same]};
}

// The dimensions that an exchange changes, and the ranks that take part.
class Exchange {
 public:
  void add(const MovedDim& dim) {
    dims_.push_back(dim);
    for (const Cut& cut : dim.before) {
      mesh_dims_.push_back(cut.mesh_dim);
      num_ranks_.push_back(cut.num_ranks);
      coordinate_size_ = std::max(coordinate_size_, cut.mesh_dim + 1);
    }
  }

  // The largest number of elements (of these dimensions) that a rank sends to others, if each
  // element has `copies` after the exchange. `limit` is what it would be if the rank with the
  // largest piece kept nothing. Stops looking above `enough`.
  int64_t largest_sent(int64_t copies, int64_t limit, int64_t enough) const {
    int64_t num_ranks = 1;
    for (int64_t n : num_ranks_) num_ranks = saturating_product(num_ranks, n);
    if (num_ranks > kMaxCountedRanks) return limit;
    // A rank off the diagonal first: it is likely to keep nothing.
    Dims rank(num_ranks_.size(), 0);
    for (size_t i = 0; i < rank.size(); i += 2) rank[i] = 1;
    Dims num_pieces;
    for (const MovedDim& dim : dims_) num_pieces.push_back(dim.pieces->size());
    Dims piece(dims_.size(), 0);
    int64_t largest = sent(copies, piece, rank);
    std::fill(rank.begin(), rank.end(), 0);
    do {
      do {
        if (largest == limit || largest > enough) return largest;
        largest = std::max(largest, sent(copies, piece, rank));
      } while (advance(absl::MakeSpan(rank), num_ranks_));
    } while (advance(absl::MakeSpan(piece), num_pieces));
    return largest;
  }

 private:
  // By one rank of a group that has these pieces (by index, the largest first) in common.
  int64_t sent(int64_t copies, const Dims& piece, const Dims& rank) const {
    Dims coordinate(coordinate_size_, 0);
    for (size_t i = 0; i < rank.size(); ++i) coordinate[mesh_dims_[i]] = rank[i];
    int64_t has = copies;
    int64_t keeps = 1;
    for (size_t d = 0; d < dims_.size(); ++d) {
      const int64_t size = dims_[d].pieces->rbegin()[piece[d]];
      const Intervals before = held_by(coordinate, size, dims_[d].before);
      has = saturating_product(has, count(before));
      if (keeps != 0) keeps *= common_size(before, held_by(coordinate, size, dims_[d].after));
    }
    return has - keeps;
  }

  absl::InlinedVector<MovedDim, 3> dims_;
  absl::InlinedVector<int, 4> mesh_dims_;
  Dims num_ranks_;  // of each of mesh_dims_
  int coordinate_size_ = 0;
};

}  // namespace

int64_t exchange_bytes(const TensorCuts& before, const TensorCuts& after, int64_t element_size,
                       int64_t enough) {
  Exchange exchange;
  int64_t pieces_before = 1;
  int64_t pieces_after = 1;
  int64_t limit = 1;  // elements that a rank has of the dimensions that change
  int64_t others = element_size;
  for (size_t d = 0; d < before.size(); ++d) {
    const MovedDim dim = moved_dim(before[d], after[d]);
    if (dim.before.empty() && dim.after.empty()) {
      others *= before[d].pieces().back();
      continue;
    }
    for (const Cut& cut : dim.before) pieces_before *= cut.num_ranks;
    for (const Cut& cut : dim.after) pieces_after *= cut.num_ranks;
    limit *= before[d].pieces().back();
    exchange.add(dim);
  }
  if (others == 0 || limit == 0) return 0;
  const int64_t copies = pieces_before / pieces_after;  // one per rank that gathers it
  return saturating_product(
      exchange.largest_sent(copies, saturating_product(limit, copies), enough / others), others);
}

}  // namespace shardweave::placement_internal

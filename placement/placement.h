// A Placement says how a tensor lies along one dimension of a device mesh.
//
//   Placement p = Shard(0);                     // split along tensor dimension 0
//   Placement r = Replicate();                  // every rank holds all of it
//   Placement s = Partial(ReduceOp::kSum);      // every rank holds a summand
//   p.to_string();                              // "S(0)"
//   parse_placements("[S(0), R]");              // {Shard(0), Replicate()}
//
// A value: copy, compare and hash it freely. Nothing here communicates or allocates tensors.
// Whether a placement fits a tensor and a mesh is a question for validate() in layout.h.
//
// Tensor dimensions may be counted from the end: Shard(-1) cuts the last one. A placement knows no
// tensor, so that Shard(-1) and Shard(1) are two values until with_dims_of() in layout.h, which
// every function that takes placements and a tensor (or its sizes) calls, makes them one.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "shardweave/placement/reduce_op.h"

namespace shardweave {

enum class PlacementKind : uint8_t { kReplicate, kShard, kStridedShard, kRaggedShard, kPartial };

class Placement {
 public:
  Placement() = default;  // Replicate

  PlacementKind kind() const { return kind_; }
  bool is_replicate() const { return kind_ == PlacementKind::kReplicate; }
  bool is_partial() const { return kind_ == PlacementKind::kPartial; }
  bool is_partial(ReduceOp op) const { return is_partial() && reduce_op_ == op; }
  // Shard, strided shard or ragged shard (of any dimension, or of dimension `dim`).
  bool is_shard() const { return !is_replicate() && !is_partial(); }
  bool is_shard(int dim) const { return is_shard() && dim_ == dim; }
  // Exactly Shard(dim): contiguous, chunk semantics.
  bool is_plain_shard() const { return kind_ == PlacementKind::kShard; }

  int dim() const { return dim_; }                        // shards only; below 0: from the end
  ReduceOp reduce_op() const { return reduce_op_; }       // Partial only
  int64_t split_factor() const { return split_factor_; }  // strided shard only
  const std::vector<int64_t>& sizes() const;              // ragged shard only: one per rank
  // The sum of the sizes before that of rank `index`; ragged shard only. O(1).
  int64_t ragged_begin(int64_t index) const { return ragged_->begins[index]; }

  // The same cut of another dimension; what is no shard stays what it is.
  Placement with_dim(int dim) const;

  std::string to_string() const;

  friend bool operator==(const Placement& a, const Placement& b) {
    return a.kind_ == b.kind_ && a.reduce_op_ == b.reduce_op_ && a.dim_ == b.dim_ &&
           a.split_factor_ == b.split_factor_ && (a.ragged_ == b.ragged_ || a.sizes() == b.sizes());
  }
  friend std::ostream& operator<<(std::ostream& out, const Placement& placement);
  template <typename H>
  friend H AbslHashValue(H h, const Placement& p) {
    h = H::combine(std::move(h), p.kind_, p.reduce_op_, p.dim_, p.split_factor_);
    return p.ragged_ == nullptr ? std::move(h) : H::combine(std::move(h), p.ragged_->sizes);
  }

 private:
  friend Placement Shard(int dim);
  friend Placement Partial(ReduceOp op);
  friend Placement StridedShard(int dim, int64_t split_factor);
  friend Placement RaggedShard(int dim, std::vector<int64_t> sizes);

  PlacementKind kind_ = PlacementKind::kReplicate;
  ReduceOp reduce_op_ = ReduceOp::kSum;
  int dim_ = 0;
  int64_t split_factor_ = 1;
  // Shared by all copies: layouts are copied much, and there may be as many sizes as ranks.
  struct Ragged {
    std::vector<int64_t> sizes;
    std::vector<int64_t> begins;
  };
  std::shared_ptr<const Ragged> ragged_;  // ragged shard only
};

Placement Replicate();
// The dimension is cut into chunks of ceil(size / ranks): full ones first, then the rest, then
// empty ones (torch.chunk).
Placement Shard(int dim);
// The tensor is the reduction of what the ranks hold. On several mesh dimensions the last one is
// reduced first, which matters only for reductions that do not commute().
Placement Partial(ReduceOp op = ReduceOp::kSum);
// The dimension is first cut into `split_factor` chunks; each chunk is cut again over the ranks,
// and a rank holds its piece of every chunk, concatenated. (What a flattened or merged dimension
// needs, such as a fused QKV weight.) A split factor of 1 is Shard(dim), and compares equal to it.
Placement StridedShard(int dim, int64_t split_factor);
// Rank i of the mesh dimension holds sizes[i] consecutive elements of `dim`; they sum to its size.
Placement RaggedShard(int dim, std::vector<int64_t> sizes);

using Placements = std::vector<Placement>;  // one per mesh dimension

// "[S(0), R]", "[P(sum)]", "[S(-1, sf=3)]", "[S(0, sizes=[3,0,4])]".
std::string to_string(const Placements& placements);
// The inverses. Spaces between the words are free, "P" is "P(sum)". A text that says something else
// is an InvalidArgument with the position of the first wrong character and what was expected there.
absl::StatusOr<Placement> parse_placement(std::string_view text);
absl::StatusOr<Placements> parse_placements(std::string_view text);

}  // namespace shardweave

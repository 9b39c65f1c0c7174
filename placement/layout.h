// A Layout says how one tensor lies on a whole mesh: a placement per mesh dimension and the order
// in which the mesh dimensions cut it.
//
//   auto layout = Layout::create({Shard(0), Shard(0)});  // mesh dimension 0 cuts first, then 1
//   auto mine = local_extent(*layout, {2, 2}, {1, 0}, {7, 5});  // of the rank at (1, 0)
//   mine.shape;                                                 // {2, 5}
//   mine.offset;                                                // {4, 0}
//   layout->to_string();                                        // "[S(0), S(0)]"
//
// When several mesh dimensions shard one tensor dimension, each cuts the piece that the cuts before
// it have left. A value: copy, compare and hash it freely, share it between threads.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardweave/placement/placement.h"

namespace shardweave {

using Dims = absl::InlinedVector<int64_t, 6>;

class Layout {
 public:
  Layout() = default;
  // Mesh dimensions cut in their own order (0 first).
  explicit Layout(Placements placements);
  // `order` is a permutation of the mesh dimensions, outermost cut first (empty: their own order);
  // InvalidArgument if it is not. Only the relative order of mesh dimensions that shard the same
  // tensor dimension matters; the stored order is canonical, so that layouts that mean the same
  // compare equal (dimensions counted from the end are others until with_dims_of(), and no order
  // says which of Shard(0) and Shard(-1) cuts first).
  static absl::StatusOr<Layout> create(Placements placements, std::vector<int> order = {});

  const Placements& placements() const { return placements_; }
  const Placement& operator[](int mesh_dim) const { return placements_[mesh_dim]; }
  int mesh_ndim() const { return static_cast<int>(placements_.size()); }
  const std::vector<int>& order() const { return order_; }
  bool default_order() const;

  // The mesh dimensions that shard `tensor_dim`, outermost cut first.
  absl::InlinedVector<int, 4> shards_of(int tensor_dim) const;
  bool is_replicated() const;  // Replicate on every mesh dimension
  bool has_partial() const;

  // "[S(0), R]". Where mesh dimensions do not cut a tensor dimension in their own order, each says
  // when it is its turn: "[S(0)@1, S(0)@0]".
  std::string to_string() const;
  // The inverse; InvalidArgument says where the text is wrong.
  static absl::StatusOr<Layout> parse(std::string_view text);

  friend bool operator==(const Layout&, const Layout&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Layout& layout);
  template <typename H>
  friend H AbslHashValue(H h, const Layout& l) {
    return H::combine(std::move(h), l.placements_, l.order_);
  }

 private:
  Layout(Placements placements, absl::Span<const int> order);  // `order`: a permutation

  Placements placements_;
  std::vector<int> order_;
};

// The layout with every tensor dimension counted from the front, for a tensor of `ndim` dimensions.
// InvalidArgument for one that the tensor does not have; the message says the range.
absl::StatusOr<Layout> with_dims_of(const Layout& layout, int ndim);

// Checks a layout against a mesh shape and a global tensor shape: number of placements, dims in
// range (counted from the front), positive split factors, ragged sizes that are as many as the ranks and sum up to what they
// cut (below other cuts those must have left pieces of one size). InvalidArgument names the part
// that does not fit.
absl::Status validate(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                      absl::Span<const int64_t> shape);

// [begin, end) along one tensor dimension.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const Interval&, const Interval&) = default;
};
// Ascending, none empty, none touching the next: equal sets of indices are equal Intervals.
using Intervals = absl::InlinedVector<Interval, 2>;

// What one rank holds.
struct LocalExtent {
  Dims shape;
  Dims offset;             // global index of the first element; 0 in a dimension of size 0
  bool contiguous = true;  // false: some dimension consists of several intervals
  friend bool operator==(const LocalExtent&, const LocalExtent&) = default;
};

// The functions below want a layout that validate() accepts. `coordinate` is the rank's coordinate
// in the mesh, `shape` the global shape. They cost O(tensor dims + mesh dims), plus the split
// factors of strided shards; the number of ranks does not matter. A Partial holds all of what the others leave.
Dims local_shape(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                 absl::Span<const int64_t> coordinate, absl::Span<const int64_t> shape);
LocalExtent local_extent(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                         absl::Span<const int64_t> coordinate, absl::Span<const int64_t> shape);
// The global indices of dimension `dim` that the rank holds, in the order of its local tensor.
Intervals local_intervals(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                          absl::Span<const int64_t> coordinate, absl::Span<const int64_t> shape,
                          int dim);

// Chunk semantics of the field (torch.chunk): chunks of ceil(size / n), then the rest, then empty
// ones (which lie at the end: {size, size}).
Interval chunk(int64_t size, int64_t n, int64_t index);

// One cut on its own: of a piece of `size` elements, those that `placement` (a shard of any kind)
// gives to rank `index` of `num_ranks`; and how many they are, without listing them.
Intervals cut(const Placement& placement, int64_t size, int64_t num_ranks, int64_t index);
int64_t cut_size(const Placement& placement, int64_t size, int64_t num_ranks, int64_t index);
// The different sizes that there are, ascending. At most five, or as many as a ragged shard has.
Dims cut_sizes(const Placement& placement, int64_t size, int64_t num_ranks);

// The inverse of local_shape: the global shape from every rank's local shape (indexed by linear
// rank, last mesh dimension fastest). InvalidArgument names the first rank whose shape does not
// fit.
absl::StatusOr<Dims> global_shape(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                                  const std::vector<Dims>& local_shapes);

// The same for parts that need not be cut evenly: where the sizes along a mesh dimension with
// Shard(dim) are not those of chunks, it becomes the RaggedShard of these sizes. InvalidArgument as
// from global_shape() if no such layout describes the parts either.
struct FittedLayout {
  Layout layout;
  Dims shape;  // global
};
absl::StatusOr<FittedLayout> fit_local_shapes(const Layout& layout,
                                              absl::Span<const int64_t> mesh_shape,
                                              const std::vector<Dims>& local_shapes);

}  // namespace shardweave

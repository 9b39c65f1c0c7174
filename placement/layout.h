// A Layout says how one tensor lies on a whole mesh: a placement per mesh dimension and the order in
// which the mesh dimensions cut it.
//
//   auto layout = Layout::create({Shard(0), Shard(0)});       // mesh dim 0 cuts first, then mesh dim 1
//   auto mine = local_extent(*layout, {2, 2}, {1, 0}, {7, 5}); // of the rank at coordinate (1, 0)
//   mine.shape;                                               // {2, 5}
//   mine.offset;                                              // {4, 0}
#pragma once

#include <cstdint>
#include <string>
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
  // `order` is a permutation of the mesh dimensions, outermost cut first. Only the relative order of
  // mesh dimensions that shard the same tensor dimension matters; the stored order is canonical, so
  // that layouts that mean the same compare equal.
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

  // "[S(0), R]"; a non-default order is shown by the rank of the cut: "[S(0)@1, S(0)@0]".
  std::string to_string() const;
  static absl::StatusOr<Layout> parse(std::string_view text);

  friend bool operator==(const Layout&, const Layout&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const Layout& l) {
    return H::combine(std::move(h), l.placements_, l.order_);
  }

 private:
  Placements placements_;
  std::vector<int> order_;
};

// Checks a layout against a mesh shape and a global tensor shape: number of placements, dims in
// range, ragged sizes that sum up, positive split factors.
absl::Status validate(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                      absl::Span<const int64_t> shape);

// [begin, end) along one tensor dimension.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const Interval&, const Interval&) = default;
};
using Intervals = absl::InlinedVector<Interval, 2>;  // ascending or not, disjoint, never empty ones

// What one rank holds.
struct LocalExtent {
  Dims shape;
  Dims offset;                     // of the first element, per dimension (0 if the shard is empty ... see .cc)
  bool contiguous = true;          // false: some dimension consists of several intervals
  friend bool operator==(const LocalExtent&, const LocalExtent&) = default;
};

// All functions below: `coordinate` is the rank's coordinate in the mesh, `shape` the global shape.
// Cost: O(tensor dims + mesh dims) (+ the number of intervals for strided shards), independent of the number of ranks.
Dims local_shape(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                 absl::Span<const int64_t> coordinate, absl::Span<const int64_t> shape);
LocalExtent local_extent(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                         absl::Span<const int64_t> coordinate, absl::Span<const int64_t> shape);
// The global indices of dimension `dim` that the rank holds, in the order of its local tensor.
Intervals local_intervals(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                          absl::Span<const int64_t> coordinate, absl::Span<const int64_t> shape, int dim);

// Chunk semantics of the field (torch.chunk): chunks of ceil(size / n), then the rest, then empty ones.
Interval chunk(int64_t size, int64_t n, int64_t index);

// The inverse: the global shape from every rank's local shape (indexed by linear rank, last mesh
// dimension fastest); an error names the first rank whose shape does not fit.
absl::StatusOr<Dims> global_shape(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                                  const std::vector<Dims>& local_shapes);

}  // namespace shardweave

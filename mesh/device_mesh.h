// A DeviceMesh names every rank by its coordinate in an n-dimensional grid.
//
//   auto mesh = DeviceMesh::create({{"dp", 2}, {"tp", 4}});   // 8 ranks
//   mesh->coordinate(Rank(5));                                // {1, 1}
//   auto tp = mesh->slice({"tp"}, Rank(5));                   // the 1-D mesh of ranks 4, 5, 6, 7
//   auto all = mesh->flatten();                               // the 1-D mesh "dp_tp"
//
// Immutable after creation: share it between threads. Cheap to copy (a pointer) and to make: a
// layout of a few numbers per dimension, never a table of ranks, unless it was made from an
// explicit one that no layout describes. The layout is a mixed-radix number system as in CuTe's
// layout algebra, so that a flattened dimension of ranks that are not evenly spaced needs no table
// either.
//
// Dimensions are numbered from 0 and named; a name consists of letters, digits, '_', '-' and '.',
// and is unique in its mesh. A function that takes a dimension as a number expects 0 <= dim <
// ndim().
//
// Errors: InvalidArgument for bad sizes, names, ranks and coordinates, NotFound for a name or a
// rank that the mesh does not have.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace shardweave {

// A rank in the world, 0-based.
struct Rank {
  constexpr explicit Rank(int64_t v) : value(v) {}
  int64_t value;
  friend auto operator<=>(const Rank&, const Rank&) = default;
  template <typename H>
  friend H AbslHashValue(H h, Rank r) {
    return H::combine(std::move(h), r.value);
  }
};

struct MeshDim {
  std::string name;
  int64_t size;
  friend bool operator==(const MeshDim&, const MeshDim&) = default;
};

using Coordinate = absl::InlinedVector<int64_t, 4>;

class DeviceMesh {
 public:
  // Ranks 0 .. size-1, row-major: the last dimension varies fastest.
  static absl::StatusOr<DeviceMesh> create(std::vector<MeshDim> dims);
  // From an explicit array of ranks (row-major, all distinct). O(ranks.size()).
  static absl::StatusOr<DeviceMesh> from_ranks(std::vector<MeshDim> dims,
                                               std::vector<int64_t> ranks);
  // "dp=2,tp=4"; blanks around names and numbers do not matter.
  static absl::StatusOr<DeviceMesh> parse(std::string_view text);

  int ndim() const;
  int64_t size() const;  // number of ranks
  int64_t size(int dim) const;
  absl::Span<const int64_t> shape() const;
  std::string_view name(int dim) const;
  std::vector<MeshDim> dims() const;
  absl::StatusOr<int> dim(std::string_view name) const;  // the error lists the names there are

  absl::StatusOr<Rank> rank_at(absl::Span<const int64_t> coordinate) const;
  absl::StatusOr<Coordinate> coordinate(Rank rank) const;  // NotFound if the mesh lacks the rank
  bool contains(Rank rank) const;
  // The ranks along `dim` through `rank`, in order of the coordinate. O(size(dim)).
  absl::StatusOr<std::vector<int64_t>> group(int dim, Rank rank) const;
  std::vector<int64_t> ranks() const;  // all, row-major; O(size())
  Rank min_rank() const;               // O(ndim()), or O(size()) with an explicit table
  Rank max_rank() const;               // likewise

  // The sub-mesh of the named dimensions, in the order given, that contains `member`.
  absl::StatusOr<DeviceMesh> slice(const std::vector<std::string>& names, Rank member) const;
  // Merges neighbouring dimensions, named in the mesh's order, into one that stands in their place
  // (all when `names` is empty). Its name is the old ones joined by "_" unless given.
  absl::StatusOr<DeviceMesh> flatten(const std::vector<std::string>& names = {},
                                     std::string_view new_name = "") const;
  // Splits one dimension into several, row-major; their sizes multiply to its size.
  absl::StatusOr<DeviceMesh> unflatten(std::string_view name, std::vector<MeshDim> dims) const;
  // The dimensions of several slices of one mesh side by side; the slices have a rank in common.
  // Undoes slice: concatenating the slices of every dimension through one rank gives the whole
  // mesh. O(size of the smallest slice).
  static absl::StatusOr<DeviceMesh> concatenate(absl::Span<const DeviceMesh> meshes);

  // "DeviceMesh(dp=2, tp=4)"; ranks other than 0 .. size-1 in order are shown:
  // "DeviceMesh(tp=4, ranks [4, 5, 6, 7])".
  std::string to_string() const;

  // The same names, sizes and ranks, however the meshes were made. O(ndim()), or O(size()) when one
  // of them has an explicit table that the other does not share.
  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b);
  template <typename H>
  friend H AbslHashValue(H h, const DeviceMesh& mesh) {
    return H::combine(std::move(h), mesh.hash());
  }

 private:
  struct Grid;
  explicit DeviceMesh(std::shared_ptr<const Grid> grid) : grid_(std::move(grid)) {}
  static DeviceMesh finish(Grid grid);
  size_t hash() const;

  std::shared_ptr<const Grid> grid_;
};

}  // namespace shardweave

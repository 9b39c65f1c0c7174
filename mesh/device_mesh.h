// A DeviceMesh names every rank by its coordinate in an n-dimensional grid.
//
//   auto mesh = DeviceMesh::create({{"dp", 2}, {"tp", 4}});   // 8 ranks
//   mesh->coordinate(Rank(5));                                // {1, 1}
//   auto tp = mesh->slice({"tp"}, Rank(5));                   // the 1-D mesh {4, 5, 6, 7}
//
// Immutable after creation: share it between threads. Cheap to copy: a layout (shape, strides, offset, names), never a table
// of ranks, unless it was made from an explicit one.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace shardweave {

// A rank in the world, 0-based.
struct Rank {
  constexpr explicit Rank(int64_t value) : value(value) {}
  int64_t value;
  friend auto operator<=>(const Rank&, const Rank&) = default;
  template <typename H>
  friend H AbslHashValue(H h, Rank r) { return H::combine(std::move(h), r.value); }
};

struct MeshDim {
  std::string name;
  int64_t size;
  friend bool operator==(const MeshDim&, const MeshDim&) = default;
};

using Coordinate = absl::InlinedVector<int64_t, 4>;

class DeviceMesh {
 public:
  // Row-major: the last dimension varies fastest.
  static absl::StatusOr<DeviceMesh> create(std::vector<MeshDim> dims);
  // From an explicit array of ranks (row-major, all distinct).
  static absl::StatusOr<DeviceMesh> from_ranks(std::vector<MeshDim> dims, std::vector<int64_t> ranks);
  // "dp=2,tp=4"
  static absl::StatusOr<DeviceMesh> parse(std::string_view text);

  int ndim() const;
  int64_t size() const;                              // number of ranks
  int64_t size(int dim) const;
  absl::Span<const int64_t> shape() const;
  absl::Span<const int64_t> strides() const;
  std::string_view name(int dim) const;
  absl::StatusOr<int> dim(std::string_view name) const;   // error lists the names there are

  absl::StatusOr<Rank> rank_at(absl::Span<const int64_t> coordinate) const;
  absl::StatusOr<Coordinate> coordinate(Rank rank) const;  // NotFound if the rank is not in the mesh
  bool contains(Rank rank) const;
  // The ranks along `dim` through `rank`, in order of the coordinate.
  absl::StatusOr<std::vector<int64_t>> group(int dim, Rank rank) const;
  std::vector<int64_t> ranks() const;                // all, row-major; O(size)

  // The sub-mesh of the named dimensions (in the order given) that contains `member`.
  absl::StatusOr<DeviceMesh> slice(const std::vector<std::string>& names, Rank member) const;
  // Merge adjacent dimensions (all when names is empty) into one; its name is the old ones joined by "_" unless given.
  absl::StatusOr<DeviceMesh> flatten(const std::vector<std::string>& names = {}, std::string_view new_name = "") const;
  absl::StatusOr<DeviceMesh> unflatten(std::string_view name, std::vector<MeshDim> dims) const;
  // Dimensions of several slices of one mesh side by side.
  static absl::StatusOr<DeviceMesh> concatenate(absl::Span<const DeviceMesh> meshes);

  std::string to_string() const;                     // "DeviceMesh(dp=2, tp=4)"
  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b);
  template <typename H>
  friend H AbslHashValue(H h, const DeviceMesh& m);
};

}  // namespace shardweave

#include <algorithm>
#include <functional>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/placement/intervals.h"
#include "shardweave/placement/layout.h"

namespace shardweave {
namespace {

using namespace placement_internal;

std::string show(absl::Span<const int64_t> dims) {
  return absl::StrCat("[", absl::StrJoin(dims, ", "), "]");
}

int64_t linear_rank(absl::Span<const int64_t> mesh_shape, absl::Span<const int64_t> coordinate) {
  int64_t rank = 0;
  for (size_t d = 0; d < mesh_shape.size(); ++d) rank = rank * mesh_shape[d] + coordinate[d];
  return rank;
}

}  // namespace

absl::StatusOr<Dims> global_shape(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                                  const std::vector<Dims>& local_shapes) {
  const int64_t num_ranks =
      std::accumulate(mesh_shape.begin(), mesh_shape.end(), int64_t{1}, std::multiplies<>());
  if (layout.mesh_ndim() != static_cast<int>(mesh_shape.size()) || num_ranks < 1 ||
      num_ranks != static_cast<int64_t>(local_shapes.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("the layout ", layout.to_string(), " on a mesh ", show(mesh_shape), " needs ",
                     layout.mesh_ndim(), " mesh dimensions and one local shape per rank, but ",
                     local_shapes.size(), " were given"));
  }

  // The pieces of a dimension lie on the ranks whose coordinate is 0 wherever the mesh does not cut
  // that dimension. They sum up to its size, if they belong together at all; a ragged cut knows it.
  Dims global(local_shapes[0].size(), 0);
  Dims coordinate(mesh_shape.size(), 0);
  size_t rank = 0;
  auto on_edge = [&](int dim) {
    for (int d = 0; d < layout.mesh_ndim(); ++d) {
      if (coordinate[d] != 0 && !layout[d].is_shard(dim)) return false;
    }
    return true;
  };
  do {
    const Dims& local = local_shapes[rank++];
    for (size_t dim = 0; dim < std::min(global.size(), local.size()); ++dim) {
      if (on_edge(static_cast<int>(dim))) global[dim] += local[dim];
    }
  } while (advance(absl::MakeSpan(coordinate), mesh_shape));

  for (size_t dim = 0; dim < global.size(); ++dim) {
    int64_t pieces = 1;  // equal ones, outside of a ragged cut
    for (int d : layout.shards_of(static_cast<int>(dim))) {
      const std::vector<int64_t>& sizes = layout[d].sizes();
      if (layout[d].kind() == PlacementKind::kRaggedShard) {
        global[dim] = pieces * std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
      }
      pieces *= mesh_shape[d];
    }
  }

  if (absl::Status status = validate(layout, mesh_shape, global); !status.ok()) return status;
  rank = 0;
  do {
    const Dims want = local_shape(layout, mesh_shape, coordinate, global);
    if (local_shapes[rank] != want) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank, " at ", show(coordinate), " has the local shape ",
                       show(local_shapes[rank]), ", but the layout ", layout.to_string(),
                       " cuts the global shape ", show(global), " into ", show(want), " there"));
    }
    ++rank;
  } while (advance(absl::MakeSpan(coordinate), mesh_shape));
  return global;
}

absl::StatusOr<FittedLayout> fit_local_shapes(const Layout& layout,
                                              absl::Span<const int64_t> mesh_shape,
                                              const std::vector<Dims>& local_shapes) {
  absl::StatusOr<Dims> even = global_shape(layout, mesh_shape, local_shapes);
  if (even.ok()) return FittedLayout{layout, *std::move(even)};
  const auto fits_mesh = [&] {
    const int64_t ranks =
        std::accumulate(mesh_shape.begin(), mesh_shape.end(), int64_t{1}, std::multiplies<>());
    return layout.mesh_ndim() == static_cast<int>(mesh_shape.size()) &&
           ranks == static_cast<int64_t>(local_shapes.size());
  };
  if (!fits_mesh()) return even.status();

  // From the innermost cut of each tensor dimension outwards: how many elements the ranks of a mesh
  // dimension hold, each with the ranks that cut its piece further. Those at coordinate 0 of all
  // other mesh dimensions are looked at; that the rest agrees is for global_shape() to say.
  Placements placements = layout.placements();
  for (size_t dim = 0; dim < local_shapes[0].size(); ++dim) {
    const auto cuts = layout.shards_of(static_cast<int>(dim));
    for (size_t outer = 0; outer < cuts.size(); ++outer) {
      if (!placements[cuts[outer]].is_plain_shard()) continue;
      const int64_t num_ranks = mesh_shape[cuts[outer]];
      std::vector<int64_t> sizes(num_ranks, 0);
      Dims coordinate(mesh_shape.size(), 0);
      do {
        bool counts = true;
        for (int d = 0; d < layout.mesh_ndim(); ++d) {
          const bool free = std::find(cuts.begin() + outer, cuts.end(), d) != cuts.end();
          counts &= free || coordinate[d] == 0;
        }
        if (!counts) continue;
        const Dims& local = local_shapes[linear_rank(mesh_shape, coordinate)];
        if (local.size() <= dim) return even.status();
        sizes[coordinate[cuts[outer]]] += local[dim];
      } while (advance(absl::MakeSpan(coordinate), mesh_shape));
      const int64_t all = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
      bool is_even = true;
      for (int64_t i = 0; i < num_ranks; ++i)
        is_even &= sizes[i] == chunk(all, num_ranks, i).size();
      if (!is_even) placements[cuts[outer]] = RaggedShard(static_cast<int>(dim), std::move(sizes));
    }
  }
  absl::StatusOr<Layout> ragged = Layout::create(std::move(placements), layout.order());
  if (!ragged.ok()) return ragged.status();
  absl::StatusOr<Dims> shape = global_shape(*ragged, mesh_shape, local_shapes);
  if (!shape.ok()) return even.status();
  return FittedLayout{*std::move(ragged), *std::move(shape)};
}

}  // namespace shardweave

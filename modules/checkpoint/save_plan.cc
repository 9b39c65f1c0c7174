#include "shardweave/modules/checkpoint/save_plan.h"

#include <algorithm>
#include <numeric>

#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

int64_t product(absl::Span<const int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// Counts through the mesh dimensions `dims` of `coordinate`; false when it is through.
bool next(Dims& coordinate, absl::Span<const int64_t> mesh_shape, const std::vector<size_t>& dims) {
  for (size_t i = dims.size(); i > 0; --i) {
    const size_t d = dims[i - 1];
    if (++coordinate[d] < mesh_shape[d]) return true;
    coordinate[d] = 0;
  }
  return false;
}

int64_t rank_of(const Dims& coordinate, absl::Span<const int64_t> mesh_shape) {
  int64_t rank = 0;
  for (size_t d = 0; d < mesh_shape.size(); ++d) rank = rank * mesh_shape[d] + coordinate[d];
  return rank;
}

// At most `count` slabs of about one size, along the first dimension that can be cut.
std::vector<Box> slabs(const Box& box, int64_t count) {
  const auto it =
      std::find_if(box.shape.begin(), box.shape.end(), [](int64_t size) { return size > 1; });
  if (count <= 1 || it == box.shape.end()) return {box};
  const auto d = static_cast<size_t>(it - box.shape.begin());
  std::vector<Box> result;
  for (int64_t i = 0; i < count; ++i) {
    const Interval part = chunk(*it, count, i);
    if (part.size() == 0) break;
    Box& slab = result.emplace_back(box);
    slab.offset[d] += part.begin;
    slab.shape[d] = part.size();
  }
  return result;
}

}  // namespace

absl::StatusOr<std::vector<PlannedPiece>> plan_save(const std::vector<LaidOutTensor>& tensors,
                                                    absl::Span<const int64_t> mesh_shape,
                                                    int64_t split_bytes) {
  std::vector<PlannedPiece> pieces;
  struct Shared {
    size_t piece;
    int64_t bytes;
    size_t holders;  // in `groups`
  };
  std::vector<Shared> shared;  // what several ranks could write
  std::vector<std::vector<int64_t>> groups;
  std::vector<int64_t> load(static_cast<size_t>(product(mesh_shape)), 0);
  for (size_t t = 0; t < tensors.size(); ++t) {
    const LaidOutTensor& tensor = tensors[t];
    absl::Status status = validate(tensor.layout, mesh_shape, tensor.shape);
    if (status.ok() && tensor.layout.has_partial()) {
      status = absl::InvalidArgumentError(
          str_cat("lies ", tensor.layout.to_string(),
                  ": a Partial is no value yet; redistribute it to Replicate or Shard first"));
    }
    if (!status.ok()) {
      return absl::InvalidArgumentError(
          str_cat("\"", tensor.name, "\": ", std::string(status.message())));
    }
    if (product(tensor.shape) == 0) continue;
    std::vector<size_t> cut;
    std::vector<size_t> same;
    for (size_t d = 0; d < mesh_shape.size(); ++d) {
      (tensor.layout[static_cast<int>(d)].is_shard() ? cut : same).push_back(d);
    }
    Dims coordinate(mesh_shape.size(), 0);
    do {
      std::vector<int64_t> holders;
      do {
        holders.push_back(rank_of(coordinate, mesh_shape));
      } while (!tensor.is_plain && next(coordinate, mesh_shape, same));
      const auto count = static_cast<int64_t>(holders.size());
      for (const LocalBox& local :
           local_boxes(tensor.layout, mesh_shape, coordinate, tensor.shape)) {
        const int64_t bytes = local.box.numel() * element_size(tensor.dtype);
        const int64_t parts = std::min(count, (bytes + split_bytes - 1) / split_bytes);
        for (Box& box : slabs(local.box, parts)) {
          const int64_t its = box.numel() * element_size(tensor.dtype);
          if (count == 1) {
            load[static_cast<size_t>(holders[0])] += its;
          } else {
            shared.push_back({pieces.size(), its, groups.size()});
          }
          pieces.push_back({t, std::move(box), holders[0]});
        }
      }
      if (count > 1) groups.push_back(std::move(holders));
    } while (next(coordinate, mesh_shape, cut));
  }
  // The largest first, each to whoever has least so far (Graham's LPT rule: within a third of the best).
  std::stable_sort(shared.begin(), shared.end(),
                   [](const Shared& a, const Shared& b) { return a.bytes > b.bytes; });
  for (const Shared& s : shared) {
    const std::vector<int64_t>& holders = groups[s.holders];
    const int64_t rank =
        *std::min_element(holders.begin(), holders.end(), [&](int64_t a, int64_t b) {
          return load[static_cast<size_t>(a)] < load[static_cast<size_t>(b)];
        });
    pieces[s.piece].rank = rank;
    load[static_cast<size_t>(rank)] += s.bytes;
  }
  return pieces;
}

}  // namespace shardweave

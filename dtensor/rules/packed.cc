#include "shardweave/dtensor/rules/packed.h"

#include <algorithm>

namespace shardweave::dtensor_internal {
namespace {

// Into how many chunks, each of them cut over the ranks, `placement` cuts `dim`; 0: it does not.
int64_t chunks_of(const Placement& placement, int dim) {
  if (!placement.is_shard(dim) || placement.kind() == PlacementKind::kRaggedShard) return 0;
  return placement.is_plain_shard() ? 1 : placement.split_factor();
}

// What is left of `dim` after the cuts that are decided is `chunks` equal pieces.
bool divides(const OpCall& call, int i, int dim, int64_t chunks) {
  const auto sizes = call.sizes_so_far(call.input(i), dim);
  return call.input(i).sizes[dim] % chunks == 0 &&
         std::all_of(sizes.begin(), sizes.end(), [&](int64_t n) { return n % chunks == 0; });
}

}  // namespace

std::optional<Placement> placement_of_part(const OpCall& call, int i, int dim, int64_t begin,
                                           int64_t size) {
  const int64_t chunks = chunks_of(call.placement(i), dim);
  if (chunks < 2 || size < 1 || !divides(call, i, dim, chunks)) return std::nullopt;
  const int64_t chunk = call.input(i).sizes[dim] / chunks;
  if (begin % chunk != 0 || size % chunk != 0) return std::nullopt;
  return StridedShard(dim, size / chunk);
}

std::optional<Placement> placement_of_packed(const OpCall& call, int i, int dim, int64_t begin,
                                             int64_t total) {
  const int64_t size = call.input(i).sizes[dim];
  const int64_t chunks = chunks_of(call.placement(i), dim);
  if (chunks < 1 || size < 1 || !divides(call, i, dim, chunks)) return std::nullopt;
  const int64_t chunk = size / chunks;
  if (begin % chunk != 0 || total % chunk != 0) return std::nullopt;
  return StridedShard(dim, total / chunk);
}

}  // namespace shardweave::dtensor_internal

#include <algorithm>
#include <vector>

#include "shardweave/placement/intervals.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave {
namespace {

using namespace placement_internal;

using AllIntervals = absl::InlinedVector<Intervals, 4>;  // per tensor dimension

AllIntervals all_intervals(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                           absl::Span<const int64_t> coordinate, absl::Span<const int64_t> shape) {
  AllIntervals result;
  for (int dim = 0; dim < static_cast<int>(shape.size()); ++dim) {
    result.push_back(local_intervals(layout, mesh_shape, coordinate, shape, dim));
  }
  return result;
}

// What is in both sets, as blocks of the local tensor of the one that `offset_of` reads from a run;
// in the order of the global indices, which is the same from both sides.
std::vector<ExchangeBlock> common_blocks(const AllIntervals& before, const AllIntervals& after,
                                         int64_t CommonRun::*offset) {
  std::vector<ExchangeBlock> result;
  absl::InlinedVector<CommonRuns, 4> runs;
  Dims num_runs;
  for (size_t dim = 0; dim < before.size(); ++dim) {
    runs.push_back(intersect(before[dim], after[dim]));
    if (runs.back().empty()) return result;
    num_runs.push_back(static_cast<int64_t>(runs.back().size()));
  }
  Dims chosen(runs.size(), 0);
  do {
    ExchangeBlock& block = result.emplace_back();
    for (size_t dim = 0; dim < runs.size(); ++dim) {
      const CommonRun& run = runs[dim][chosen[dim]];
      block.offset.push_back(run.*offset);
      block.shape.push_back(run.size);
    }
  } while (advance(absl::MakeSpan(chosen), num_runs));
  return result;
}

}  // namespace

ExchangePart exchange_part(const Layout& before, const Layout& after,
                           const std::vector<int>& mesh_dims, absl::Span<const int64_t> mesh_shape,
                           absl::Span<const int64_t> coordinate, absl::Span<const int64_t> shape) {
  const AllIntervals have = all_intervals(before, mesh_shape, coordinate, shape);
  const AllIntervals want = all_intervals(after, mesh_shape, coordinate, shape);
  Dims peers_shape;
  for (int m : mesh_dims) peers_shape.push_back(mesh_shape[m]);
  Dims peer(mesh_dims.size(), 0);
  Dims peer_coordinate(coordinate.begin(), coordinate.end());
  ExchangePart part;
  do {
    bool is_source = true;  // this rank of the peer's elements, and the peer of this rank's
    for (size_t i = 0; i < mesh_dims.size(); ++i) {
      const int m = mesh_dims[i];
      peer_coordinate[m] = peer[i];
      if (!before[m].is_shard() && peer[i] != coordinate[m]) is_source = false;
    }
    std::vector<ExchangeBlock>& send = part.send.emplace_back();
    std::vector<ExchangeBlock>& recv = part.recv.emplace_back();
    if (!is_source) continue;
    send = common_blocks(have, all_intervals(after, mesh_shape, peer_coordinate, shape),
                         &CommonRun::first_offset);
    recv = common_blocks(all_intervals(before, mesh_shape, peer_coordinate, shape), want,
                         &CommonRun::second_offset);
  } while (advance(absl::MakeSpan(peer), peers_shape));
  return part;
}

}  // namespace shardweave

// Which elements of the whole tensor a rank's memory holds, as boxes: a launch of a kernel each.
//
//   // Shard(1) of {6, 8} over two ranks, on rank 1: columns 4 to 7 of each row.
//   std::vector<Intervals> held = {{{0, 6}}, {{4, 8}}};
//   index_boxes(held, {6, 8}, {4, 1});      // one box: six rows of four, from global index 4 on
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "shardweave/dtensor/cuda/random_kernel.h"
#include "shardweave/placement/layout.h"

namespace shardweave::dtensor_internal {

// `held`: of each dimension, the indices that the rank holds, in the order of its local tensor (see
// local_intervals); `sizes`: of the whole tensor; `strides`: of the local tensor, in elements. The
// whole tensor's elements are numbered row by row. Together the boxes have every local element
// once; none are empty.
std::vector<IndexBox> index_boxes(absl::Span<const Intervals> held, absl::Span<const int64_t> sizes,
                                  absl::Span<const int64_t> strides);

bool operator==(const IndexBox& a, const IndexBox& b);
std::string to_string(const IndexBox& box);

}  // namespace shardweave::dtensor_internal

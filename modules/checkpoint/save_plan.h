// Which rank writes which part of which tensor: a pure function of layouts, and so the same on all
// ranks without a word between them.
//
//   auto pieces = plan_save({{"w", DType::kF32, {8, 4}, *Layout::create({Shard(0), Replicate()})}}, {2, 2});
//   (*pieces)[0];                                 // {tensor 0, [0:4, 0:4], rank 1}
//
// Every element of every tensor is in one piece. What several ranks hold alike is written by one of them, so
// that all write about as many bytes; a large one is cut into slabs that they divide. A plain tensor, of
// which nobody knows that ranks hold it alike, is rank 0's. (As PyTorch's DCP
// drops duplicates, and Megatron's fully parallel save shares them out.)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/modules/checkpoint/box.h"
#include "shardweave/placement/layout.h"

namespace shardweave {

struct LaidOutTensor {
  std::string name;
  DType dtype = DType::kF32;
  Dims shape;  // global
  Layout layout;
  bool is_plain = false;  // rank 0's is the one that counts, whatever others hold
};

struct PlannedPiece {
  size_t tensor;  // index
  Box box;
  int64_t rank;  // row-major in the mesh
  friend bool operator==(const PlannedPiece&, const PlannedPiece&) = default;
};

// In the order of tensors, then of boxes; none is empty. `split_bytes`: what several ranks have alike is
// cut when it is larger. InvalidArgument, with the tensor's name, for a Partial (reduce it first) and
// for what validate() refuses.
absl::StatusOr<std::vector<PlannedPiece>> plan_save(const std::vector<LaidOutTensor>& tensors,
                                                    absl::Span<const int64_t> mesh_shape,
                                                    int64_t split_bytes = int64_t{16} << 20);

}  // namespace shardweave

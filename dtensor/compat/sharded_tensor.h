// ShardedTensor: tensors that are sharded as a specification says, after torch.distributed's
// ShardedTensor. What comes out are ordinary DTensors, on which every operator works.
//
//   at::Tensor table = sharded_tensor::rand(ChunkSpec{0, {0, 1, 2, 3}}, {1000, 64}, mesh);
//   shard_parameter(*model, "fc.weight", ChunkSpec{0}, mesh);           // the model stays as it is
//   shard_parameter(*model, "words.weight",
//                   EnumerableSpec{{{{0, 0}, {600, 64}, 0}, {{600, 0}, {400, 64}, 1}}}, mesh);
//
// The mesh has one dimension (take a slice of a larger one); ranks are those of the mesh, 0 .. size
// - 1. Everything here is collective over it: every rank gives the same specification. A
// specification that does not fit the tensor or the mesh is an Error (InvalidArgument) on every
// rank, before anything is changed or sent.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "shardweave/dtensor/dtensor.h"

namespace torch::nn {
class Module;
}

namespace shardweave {

// Dimension `dim` (negative: from the end) is cut into as many chunks as there are ranks, as
// torch.chunk does: full ones first, then the rest, then empty ones. Chunk i lies on ranks[i].
// `ranks` ascends; a rank that is not in it has an empty shard. No ranks: all of the mesh. (For
// another order make the mesh in that order: DeviceMesh::from_ranks.)
struct ChunkSpec {
  int dim = 0;
  std::vector<int64_t> ranks = {};
  friend bool operator==(const ChunkSpec&, const ChunkSpec&) = default;
};

// One shard: a block of the tensor, and the rank that holds it.
struct ShardMetadata {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  int64_t rank = 0;
  friend bool operator==(const ShardMetadata&, const ShardMetadata&) = default;
};

// An explicit list, in any order: slices along one dimension, whole in the others, that together
// are the tensor. Each rank holds one at most, and those that come first lie on lower ranks. Slices
// may be empty; a rank without one has an empty shard.
struct EnumerableSpec {
  std::vector<ShardMetadata> shards;
  friend bool operator==(const EnumerableSpec&, const EnumerableSpec&) = default;
};

using ShardingSpec = std::variant<ChunkSpec, EnumerableSpec>;
// "ChunkSpec(dim 0, ranks [0, 1])", "EnumerableSpec([0:600, 0:64] on rank 0, ...)".
std::string to_string(const ShardingSpec& spec);

// What the specification says of a tensor of these sizes: Shard(dim) for chunks over all ranks,
// else a ragged shard.
Placement placement_of(const ShardingSpec& spec, at::IntArrayRef sizes, const DeviceMesh& mesh);

namespace sharded_tensor {

// As the factories in dtensor.h, which see for random numbers and options.
at::Tensor empty(const ShardingSpec& spec, at::IntArrayRef sizes, const MeshPtr& mesh,
                 at::TensorOptions options = {});
at::Tensor zeros(const ShardingSpec& spec, at::IntArrayRef sizes, const MeshPtr& mesh,
                 at::TensorOptions options = {});
at::Tensor ones(const ShardingSpec& spec, at::IntArrayRef sizes, const MeshPtr& mesh,
                at::TensorOptions options = {});
at::Tensor full(const ShardingSpec& spec, at::IntArrayRef sizes, const at::Scalar& value,
                const MeshPtr& mesh, at::TensorOptions options = {});
at::Tensor rand(const ShardingSpec& spec, at::IntArrayRef sizes, const MeshPtr& mesh,
                at::TensorOptions options = {});
at::Tensor randn(const ShardingSpec& spec, at::IntArrayRef sizes, const MeshPtr& mesh,
                 at::TensorOptions options = {});

}  // namespace sharded_tensor

// distribute_tensor() by a specification.
at::Tensor shard_tensor(const at::Tensor& tensor, const ShardingSpec& spec, const MeshPtr& mesh,
                        const DistributeOptions& options = {});

// Shards the parameter `name` ("fc.weight") of `module` in place: the module and the optimizer keep
// their handles. What is left of the module's parameters and buffers that is still plain becomes
// replicated, so that the module's forward meets DTensors only. Call it again for further
// parameters. NotFound for a name that the module does not have, with those that are like it;
// FailedPrecondition for a parameter that is sharded already, or lies on another mesh.
void shard_parameter(torch::nn::Module& module, std::string_view name, const ShardingSpec& spec,
                     const MeshPtr& mesh, const DistributeOptions& options = {});

}  // namespace shardweave

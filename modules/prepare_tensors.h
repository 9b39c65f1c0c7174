// Tensors on their way into and out of a module that is parallelized along a mesh of one dimension:
// the make_* functions of torch.distributed.tensor.parallel.
//
//   at::Tensor x = make_input_shard_1d(rows_of_this_rank, mesh);   // [S(0)]
//   at::Tensor y = model->forward(make_input_replicate_1d(x));     // of x's mesh
//   at::Tensor all = make_output_tensor(y);                        // plain, on every rank
//
// An input may be a DTensor, which is redistributed, or this rank's plain tensor, which is made one
// by from_local(). An output has to be a DTensor. `mesh`: null is that of the DTensor.
//
// All are collective and differentiable. They throw Error, InvalidArgument: for a mesh that has not
// exactly one dimension, a DTensor of another mesh than the one given, a plain tensor without a
// mesh, an output that is no DTensor, a tensor that is undefined, a dimension that it does not
// have.
#pragma once

#include <source_location>

#include "shardweave/dtensor/dtensor.h"

namespace shardweave {

// Replicated; a plain tensor is the same on every rank.
at::Tensor make_input_replicate_1d(const at::Tensor& input, const MeshPtr& mesh = nullptr,
                                   std::source_location where = std::source_location::current());
// Cut along `dim`; a plain tensor is this rank's part.
at::Tensor make_input_shard_1d(const at::Tensor& input, const MeshPtr& mesh = nullptr, int dim = 0,
                               std::source_location where = std::source_location::current());
at::Tensor make_input_shard_1d_last_dim(
    const at::Tensor& input, const MeshPtr& mesh = nullptr,
    std::source_location where = std::source_location::current());
// Cut along dimension 0 (a plain tensor is this rank's part), then replicated.
at::Tensor make_input_reshard_replicate(
    const at::Tensor& input, const MeshPtr& mesh = nullptr,
    std::source_location where = std::source_location::current());

// Replicated, cut along `dim`.
at::Tensor make_output_replicate_1d(const at::Tensor& output, const MeshPtr& mesh = nullptr,
                                    std::source_location where = std::source_location::current());
at::Tensor make_output_shard_1d(const at::Tensor& output, const MeshPtr& mesh = nullptr,
                                int dim = 0,
                                std::source_location where = std::source_location::current());
// Plain tensors: all of it; this rank's part when it is cut along dimension 0.
at::Tensor make_output_tensor(const at::Tensor& output, const MeshPtr& mesh = nullptr,
                              std::source_location where = std::source_location::current());
at::Tensor make_output_reshard_tensor(const at::Tensor& output, const MeshPtr& mesh = nullptr,
                                      std::source_location where = std::source_location::current());

}  // namespace shardweave

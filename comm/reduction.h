// Reductions over the ranks' values in memory, as Communicator defines them: in rank order, f16 and
// bf16 accumulated in f32 and rounded once, integers wrapping around, NaN propagated.
//
//   const void* inputs[] = {rank0, rank1, rank2};
//   void* outputs[] = {rank0, rank2};                 // an output may be one of the inputs
//   reduce_ranks(DType::kBF16, ReduceOp::kAvg, inputs, outputs, count);
//
// For backends. No heap allocation, no locks.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/placement/reduce_op.h"

namespace shardweave {

// False for fp8 and for the average of bool.
bool is_reduction_defined(DType dtype, ReduceOp op);

// outputs[*][i] = inputs[0][i] op inputs[1][i] op ... for i in [0, count). Every output gets the
// same. At least one input and one output; the reduction is defined; an output overlaps an input
// only by being the same address.
void reduce_ranks(DType dtype, ReduceOp op, absl::Span<const void* const> inputs,
                  absl::Span<void* const> outputs, int64_t count);

}  // namespace shardweave

// Reductions of NCCL's numbers, in rank order. The fake has them of its own, so that its library links
// nothing.
#pragma once

#include <cstddef>
#include <vector>

namespace shardweave::fake_gpu_internal {

// Bytes of an element.
size_t size_of(int nccl_dtype);
// out[i] = ins[0][i] op ins[1][i] ...; `out` may be one of them.
void reduce(int nccl_dtype, int nccl_op, const std::vector<const void*>& ins, void* out,
            size_t count);

}  // namespace shardweave::fake_gpu_internal

// The kernels. random_fill.cc finds them by name.
#include "shardweave/dtensor/cuda/random_kernel.h"

namespace shardweave::dtensor_internal {

using namespace random_functors;

#define SHARDWEAVE_KERNEL(name, functor)                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                       \
      name(const RandomSource source, const functor element, const IndexBox box,          \
           functor::Element* out) {                                                       \
    fill_items(blockIdx.x* static_cast<uint64_t>(blockDim.x) + threadIdx.x,               \
               gridDim.x * static_cast<uint64_t>(blockDim.x), source, element, box, out); \
  }
SHARDWEAVE_RANDOM_KERNELS(SHARDWEAVE_KERNEL)
#undef SHARDWEAVE_KERNEL

}  // namespace shardweave::dtensor_internal

#pragma once

#include <string>

namespace shardweave {

// Files to load instead of those that the system finds; empty: "libnccl.so.2", "libcudart.so.13" (or
// .12), "libcuda.so.1".
struct NcclLibraries {
  std::string nccl;
  std::string runtime;
  std::string driver;
};

struct NcclOptions {
  int device = 0;  // the GPU of this rank, as CUDA numbers those that are visible
  NcclLibraries libraries;
};

// Libraries that the environment names: SHARDWEAVE_NCCL_LIBRARY, SHARDWEAVE_CUDART_LIBRARY,
// SHARDWEAVE_CUDA_DRIVER_LIBRARY.
NcclLibraries nccl_libraries_of_environment();

}  // namespace shardweave

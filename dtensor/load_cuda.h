// LibTorch's CUDA half, which programs do not link: the same binary runs with and without GPUs.
//
//   if (absl::Status s = load_cuda(); !s.ok()) return s;    // before the first tensor on a GPU
//   at::Tensor x = at::ones({4}, at::kCUDA);
#pragma once

#include "absl/status/status.h"

namespace shardweave {

// Loads libtorch_cuda.so from beside the libtorch_cpu.so that the program runs with, unless LibTorch
// has CUDA already (the program links it, or an earlier call has loaded it). It stays loaded.
// FailedPrecondition: it is not there (the wheels that this repository fetches are without: set
// LIBTORCH_HOME to a whole LibTorch), it cannot be loaded, or it finds no GPU. Any thread.
absl::Status load_cuda();

}  // namespace shardweave

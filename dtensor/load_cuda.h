// LibTorch's CUDA half, which programs do not link: the same binary runs with and without GPUs.
//
//   if (absl::Status s = load_cuda(local_rank); !s.ok()) return s;    // first thing
//   at::Tensor x = at::ones({4}, at::kCUDA);                          // on that GPU
#pragma once

#include "absl/status/status.h"

namespace shardweave {

// Loads libtorch_cuda.so from beside the libtorch_cpu.so that the program runs with, unless LibTorch
// has CUDA already (the program links it, or an earlier call has loaded it). It stays loaded. Before
// anything that asks LibTorch for CUDA (a seed, a tensor on a GPU) and before the first backward:
// LibTorch looks once, and never again.
//
// `device`, if it is not negative, becomes the calling thread's current one: the device of tensors
// that are made on at::kCUDA.
//
// Turns cuDNN's attention off the first time (at::globalContext().setSDPUseCuDNN(false)), which DTensors
// have no rule for: LibTorch then takes its flash and memory-efficient kernels.
//
// FailedPrecondition: it is not there (the wheels that this repository fetches are without: set
// LIBTORCH_HOME to a whole LibTorch, or LD_LIBRARY_PATH where Shardweave is installed), it cannot be loaded, it comes too late, or it finds no GPU.
// InvalidArgument: no such device. Any thread.
absl::Status load_cuda(int device = -1);

}  // namespace shardweave

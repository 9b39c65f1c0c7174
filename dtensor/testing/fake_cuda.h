// Tensors on GPUs, where there is none: LibTorch's device `cuda` on the machine of
// comm/nccl/testing/fake_gpu.h, whose memory no host may touch and whose streams work late.
//
//   on_gpus({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
//     const at::Tensor x = at::ones({4}, at::kCUDA);   // on this rank's GPU
//     EXPECT_EQ(host(x).sum().item<float>(), 4);
//   });
//
// An operator waits for what is on the thread's current stream of its device, as a kernel would, and
// reads its inputs there; its results come later, in the order of that stream. So whoever reads
// memory on another stream without waiting for this one finds what was there before, and so does an
// operator that does not wait for a collective. A tensor's memory is another's as soon as its stream
// has done what was on it when the tensor died. Pinned memory of the host is copied from and to late, too,
// where copies do not block. Numbers are those of LibTorch's kernels for the CPU.
//
// Linked, it is LibTorch's CUDA for the whole program. Attention's operators for CUDA alone and layer norm's are here by
// their definition (flash attention for half precision without a mask, as there, else the efficient
// one); of LibTorch's kernels for CUDA nothing is tried.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "shardweave/comm/nccl/testing/fake_gpu.h"
#include "shardweave/dtensor/dtensor.h"

namespace shardweave::testing {

// Runs `body` on rank threads, each with a GPU of its own as its current device, over the NCCL
// backend on the fake. Fails the test (naming the rank) if a body throws.
void on_gpus(const std::vector<MeshDim>& dims, const std::function<void(const MeshPtr&)>& body,
             const FakeGpuScript& script = {});

// What each rank's body has ended with.
std::vector<absl::Status> try_on_gpus(const std::vector<MeshDim>& dims,
                                      const std::function<void(const MeshPtr&)>& body,
                                      const FakeGpuScript& script = {});

// A copy on the CPU, of a DTensor's whole value too (collective).
at::Tensor host(const at::Tensor& tensor);

// How often the host has waited for the thread's current device: copies to the CPU, .item(),
// synchronisations, by backward's threads too. (An operator's own wait, which stands for the order of
// kernels on a stream, does not count.)
int64_t host_waits();

}  // namespace shardweave::testing

// LibTorch's CUDA graphs (at::cuda::CUDAGraph), found in its CUDA half when a program runs, as all of
// CUDA is here (load_cuda.h).
//
//   absl::StatusOr<std::unique_ptr<CudaGraph>> graph = CudaGraph::create();
//   (*graph)->begin();           // on the thread's current stream, which is not the default one
//   y = x * 2;                   // goes into the graph, and does not run
//   (*graph)->end();
//   (*graph)->replay();          // on the current stream
//
// What is allocated between begin() and end() comes from memory that is the graph's as long as it is
// there. begin(), end() and replay() throw what LibTorch throws. Internal to dtensor/.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"

namespace shardweave::dtensor_internal {

class CudaGraph {
 public:
  // FailedPrecondition: LibTorch has no CUDA here, or one without graphs.
  static absl::StatusOr<std::unique_ptr<CudaGraph>> create();
  ~CudaGraph();
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  void begin();
  // Throws if something that a capture forbids has happened since begin(): there is no graph then.
  void end();
  void replay();

  // One whose end() has thrown stays for ever: LibTorch has not let go of it, and looks at it in later
  // captures.
  static void abandon(std::unique_ptr<CudaGraph> graph);

  // Room for LibTorch's class, which abi_test.cc compares.
  static constexpr size_t kBytes = 1024;
  // cudaStreamCaptureModeThreadLocal: what other threads do, NCCL's and those that watch it among
  // them, spoils nothing.
  static constexpr int kThreadLocal = 1;

 private:
  struct Members;
  explicit CudaGraph(std::unique_ptr<const Members> members);

  const std::unique_ptr<const Members> members_;
  alignas(std::max_align_t) std::byte graph_[kBytes] = {};
};

}  // namespace shardweave::dtensor_internal

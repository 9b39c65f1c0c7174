// graph.h against LibTorch's header: room, and how each member is called.
#include "shardweave/dtensor/cuda/graph.h"

#include <type_traits>
#include <utility>

#include "ATen/cuda/CUDAGraph.h"
#include "gtest/gtest.h"

namespace shardweave::dtensor_internal {
namespace {

using at::cuda::CUDAGraph;
using Pool = std::pair<unsigned long long, unsigned long long>;

static_assert(sizeof(CUDAGraph) <= CudaGraph::kBytes);
static_assert(alignof(CUDAGraph) <= alignof(std::max_align_t));
static_assert(std::is_same_v<c10::MempoolId_t, Pool>);
static_assert(std::is_constructible_v<CUDAGraph, bool>);
static_assert(std::is_same_v<decltype(&CUDAGraph::capture_begin),
                             void (CUDAGraph::*)(Pool, cudaStreamCaptureMode)>);
static_assert(std::is_same_v<decltype(&CUDAGraph::capture_end), void (CUDAGraph::*)()>);
static_assert(std::is_same_v<decltype(&CUDAGraph::replay), void (CUDAGraph::*)()>);
static_assert(sizeof(cudaStreamCaptureMode) == sizeof(int));
static_assert(CudaGraph::kThreadLocal == cudaStreamCaptureModeThreadLocal);
static_assert(!std::is_polymorphic_v<CUDAGraph>);

TEST(GraphAbiTest, WithoutCudaThereIsNone) {
  const auto graph = CudaGraph::create();
  EXPECT_EQ(graph.status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace shardweave::dtensor_internal

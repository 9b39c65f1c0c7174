// abi.h against NVIDIA's headers: numbers, structs, and how each function is called.
#include "shardweave/comm/nccl/abi.h"

// The headers of NCCL include those of CUDA's small floats, which need further packages, for macros
// that say whether they are there.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>

#include "gtest/gtest.h"
#include "shardweave/comm/nccl/testing/passed_alike.h"

namespace shardweave::nccl_internal {
namespace {

#define SHARDWEAVE_CHECK(result, name, parameters) \
  using Mine_##name = result parameters;           \
  static_assert(testing::kPassedAlike<Mine_##name, decltype(::name)>);
SHARDWEAVE_CUDA_DRIVER_FUNCTIONS(SHARDWEAVE_CHECK)
SHARDWEAVE_CUDA_RUNTIME_FUNCTIONS(SHARDWEAVE_CHECK)
SHARDWEAVE_NCCL_FUNCTIONS(SHARDWEAVE_CHECK)

static_assert(kCudaSuccess == cudaSuccess);
static_assert(kCudaErrorMemoryAllocation == cudaErrorMemoryAllocation);
static_assert(kCudaErrorNotReady == cudaErrorNotReady);
static_assert(kCudaStreamNonBlocking == cudaStreamNonBlocking);
static_assert(kCudaEventDisableTiming == cudaEventDisableTiming);
static_assert(kCudaStreamCaptureModeRelaxed == cudaStreamCaptureModeRelaxed);
static_assert(kCudaStreamCaptureStatusNone == cudaStreamCaptureStatusNone);
static_assert(kCudaMemcpyHostToDevice == cudaMemcpyHostToDevice);
static_assert(kCudaMemcpyDeviceToHost == cudaMemcpyDeviceToHost);
static_assert(kCudaMemcpyDeviceToDevice == cudaMemcpyDeviceToDevice);

static_assert(kNcclSuccess == ncclSuccess);
static_assert(kNcclRemoteError == ncclRemoteError);
static_assert(kNcclInProgress == ncclInProgress);
static_assert(kNcclSum == ncclSum);
static_assert(kNcclProd == ncclProd);
static_assert(kNcclMax == ncclMax);
static_assert(kNcclMin == ncclMin);
static_assert(kNcclAvg == ncclAvg);
static_assert(kNcclInt8 == ncclInt8);
static_assert(kNcclUint8 == ncclUint8);
static_assert(kNcclInt32 == ncclInt32);
static_assert(kNcclUint32 == ncclUint32);
static_assert(kNcclInt64 == ncclInt64);
static_assert(kNcclUint64 == ncclUint64);
static_assert(kNcclFloat16 == ncclFloat16);
static_assert(kNcclFloat32 == ncclFloat32);
static_assert(kNcclFloat64 == ncclFloat64);
static_assert(kNcclBfloat16 == ncclBfloat16);

static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));

// As it was in 2.18: the beginning of today's.
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
static_assert(offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(NcclConfig, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(NcclConfig, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(NcclConfig, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(NcclConfig, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(NcclConfig, split_share) == offsetof(ncclConfig_t, splitShare));
static_assert(kNcclUndefined == NCCL_CONFIG_UNDEF_INT);

TEST(NcclAbiTest, AConfigIsOneThatNcclTakes) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const NcclConfig mine;
  EXPECT_EQ(mine.magic, theirs.magic);
  EXPECT_LE(mine.version, theirs.version);
  EXPECT_EQ(mine.blocking, theirs.blocking);
  EXPECT_EQ(mine.split_share, theirs.splitShare);
  EXPECT_EQ(mine.net_name, theirs.netName);
}

}  // namespace
}  // namespace shardweave::nccl_internal

// What this library uses of the binary interfaces of NCCL (2.27.3 and later), of CUDA's runtime (11
// and later) and of its driver, so that building needs the headers of none. abi_test.cc compares it with
// NVIDIA's headers.
#pragma once

#include <cstddef>

namespace shardweave::nccl_internal {

// Pointers to what is theirs.
using CudaStream = struct CudaStreamOpaque*;
using CudaEvent = struct CudaEventOpaque*;
using NcclComm = struct NcclCommOpaque*;

// 1. CUDA. Enums are ints there.

inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaErrorMemoryAllocation = 2;
inline constexpr int kCudaErrorNotReady = 600;
inline constexpr unsigned kCudaStreamNonBlocking = 1;
inline constexpr unsigned kCudaEventDisableTiming = 2;
inline constexpr int kCudaStreamCaptureModeRelaxed = 2;
inline constexpr int kCudaStreamCaptureStatusNone = 0;
inline constexpr int kCudaMemcpyHostToDevice = 1;
inline constexpr int kCudaMemcpyDeviceToHost = 2;
inline constexpr int kCudaMemcpyDeviceToDevice = 3;

// 2. NCCL.

inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclRemoteError = 6;
inline constexpr int kNcclInProgress = 7;

inline constexpr int kNcclSum = 0;
inline constexpr int kNcclProd = 1;
inline constexpr int kNcclMax = 2;
inline constexpr int kNcclMin = 3;
inline constexpr int kNcclAvg = 4;

inline constexpr int kNcclInt8 = 0;
inline constexpr int kNcclUint8 = 1;
inline constexpr int kNcclInt32 = 2;
inline constexpr int kNcclUint32 = 3;
inline constexpr int kNcclInt64 = 4;
inline constexpr int kNcclUint64 = 5;
inline constexpr int kNcclFloat16 = 6;
inline constexpr int kNcclFloat32 = 7;
inline constexpr int kNcclFloat64 = 8;
inline constexpr int kNcclBfloat16 = 9;

struct NcclUniqueId {
  char bytes[128];
};

// ncclConfig_t as it was in 2.18, which has all that is set here; later versions have more at the end,
// and take this one.
inline constexpr int kNcclUndefined = -0x7fffffff - 1;
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = kNcclUndefined;
  int cga_cluster_size = kNcclUndefined;
  int min_ctas = kNcclUndefined;
  int max_ctas = kNcclUndefined;
  const char* net_name = nullptr;
  int split_share = kNcclUndefined;
};

// 3. Functions: F(result, name, parameters).

#define SHARDWEAVE_CUDA_DRIVER_FUNCTIONS(F)  \
  F(int, cuInit, (unsigned flags))           \
  F(int, cuDriverGetVersion, (int* version)) \
  F(int, cuDevicePrimaryCtxGetState, (int device, unsigned* flags, int* active))

#define SHARDWEAVE_CUDA_RUNTIME_FUNCTIONS(F)                                                       \
  F(int, cudaRuntimeGetVersion, (int* version))                                                    \
  F(int, cudaGetDeviceCount, (int* count))                                                         \
  F(int, cudaGetDevice, (int* device))                                                             \
  F(int, cudaSetDevice, (int device))                                                              \
  F(int, cudaDeviceGetPCIBusId, (char* id, int length, int device))                                \
  F(int, cudaStreamCreateWithFlags, (CudaStream * stream, unsigned flags))                         \
  F(int, cudaStreamDestroy, (CudaStream stream))                                                   \
  F(int, cudaStreamQuery, (CudaStream stream))                                                     \
  F(int, cudaStreamIsCapturing, (CudaStream stream, int* state))                                   \
  F(int, cudaStreamWaitEvent, (CudaStream stream, CudaEvent event, unsigned flags))                \
  F(int, cudaEventCreateWithFlags, (CudaEvent * event, unsigned flags))                            \
  F(int, cudaEventRecord, (CudaEvent event, CudaStream stream))                                    \
  F(int, cudaEventQuery, (CudaEvent event))                                                        \
  F(int, cudaEventDestroy, (CudaEvent event))                                                      \
  F(int, cudaStreamSynchronize, (CudaStream stream))                                               \
  F(int, cudaThreadExchangeStreamCaptureMode, (int* mode))                                         \
  F(int, cudaMemcpyAsync, (void* to, const void* from, size_t bytes, int kind, CudaStream stream)) \
  F(const char*, cudaGetErrorString, (int error))

#define SHARDWEAVE_NCCL_FUNCTIONS(F)                                                           \
  F(int, ncclGetVersion, (int* version))                                                       \
  F(int, ncclGetUniqueId, (NcclUniqueId * id))                                                 \
  F(int, ncclCommInitRankConfig,                                                               \
    (NcclComm * comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config))               \
  F(int, ncclCommFinalize, (NcclComm comm))                                                    \
  F(int, ncclCommDestroy, (NcclComm comm))                                                     \
  F(int, ncclCommAbort, (NcclComm comm))                                                       \
  F(int, ncclCommGetAsyncError, (NcclComm comm, int* error))                                   \
  F(const char*, ncclGetErrorString, (int error))                                              \
  F(const char*, ncclGetLastError, (NcclComm comm))                                            \
  F(int, ncclGroupStart, ())                                                                   \
  F(int, ncclGroupEnd, ())                                                                     \
  F(int, ncclAllReduce,                                                                        \
    (const void* in, void* out, size_t count, int dtype, int op, NcclComm comm,                \
     CudaStream stream))                                                                       \
  F(int, ncclReduce,                                                                           \
    (const void* in, void* out, size_t count, int dtype, int op, int root, NcclComm comm,      \
     CudaStream stream))                                                                       \
  F(int, ncclBroadcast,                                                                        \
    (const void* in, void* out, size_t count, int dtype, int root, NcclComm comm,              \
     CudaStream stream))                                                                       \
  F(int, ncclAllGather,                                                                        \
    (const void* in, void* out, size_t in_count, int dtype, NcclComm comm, CudaStream stream)) \
  F(int, ncclReduceScatter,                                                                    \
    (const void* in, void* out, size_t out_count, int dtype, int op, NcclComm comm,            \
     CudaStream stream))                                                                       \
  F(int, ncclSend,                                                                             \
    (const void* in, size_t count, int dtype, int peer, NcclComm comm, CudaStream stream))     \
  F(int, ncclRecv, (void* out, size_t count, int dtype, int peer, NcclComm comm, CudaStream stream))

}  // namespace shardweave::nccl_internal

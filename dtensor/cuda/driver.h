// What the kernels' launches use of NVIDIA's driver, found when the program runs: nothing is
// linked.
//
//   auto driver = Driver::load("");                       // libcuda.so.1
//   if (!driver.ok()) return driver.status();             // "no NVIDIA driver: ..."
//   absl::Status status = driver->check("cuInit", driver->cuInit(0));
//
// The declarations are those of CUDA 12.0 and later; abi_test.cc compares them with NVIDIA's
// header. What has been loaded stays loaded. Any thread may use it.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardweave::dtensor_internal {

// Pointers to what is the driver's. Enums are ints there.
using CuContext = struct CuContextOpaque*;
using CuLibrary = struct CuLibraryOpaque*;
using CuKernel = struct CuKernelOpaque*;
using CuStream = struct CuStreamOpaque*;

inline constexpr int kCuSuccess = 0;
inline constexpr int kCuErrorOutOfMemory = 2;
inline constexpr int kCuErrorNoDevice = 100;
inline constexpr int kCuErrorInvalidDevice = 101;
inline constexpr int kCuErrorNoBinaryForGpu = 209;
inline constexpr int kCuErrorUnsupportedPtxVersion = 222;

// F(result, name, name in the library, parameters)
#define SHARDWEAVE_CU_FUNCTIONS(F)                                                                 \
  F(int, cuInit, "cuInit", (unsigned flags))                                                       \
  F(int, cuGetErrorString, "cuGetErrorString", (int error, const char** text))                     \
  F(int, cuDeviceGet, "cuDeviceGet", (int* device, int ordinal))                                   \
  F(int, cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CuContext * context, int device))  \
  F(int, cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CuContext context))                             \
  F(int, cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CuContext * context))                             \
  F(int, cuLibraryLoadData, "cuLibraryLoadData",                                                   \
    (CuLibrary * library, const void* code, int* jit_options, void** jit_values, unsigned num_jit, \
     int* options, void** values, unsigned num_options))                                           \
  F(int, cuLibraryGetKernel, "cuLibraryGetKernel",                                                 \
    (CuKernel * kernel, CuLibrary library, const char* name))                                      \
  F(int, cuLaunchKernel, "cuLaunchKernel",                                                         \
    (CuKernel kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,         \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, CuStream stream,                   \
     void** parameters, void** extra))

class Driver {
 public:
  // `file`: what to load in place of "libcuda.so.1", unless empty. FailedPrecondition says what is
  // missing.
  static absl::StatusOr<Driver> load(const std::string& file);

// NOLINTNEXTLINE(bugprone-macro-parentheses): they are a declaration.
#define SHARDWEAVE_MEMBER(result, name, symbol, parameters) result(*name) parameters = nullptr;
  SHARDWEAVE_CU_FUNCTIONS(SHARDWEAVE_MEMBER)
#undef SHARDWEAVE_MEMBER

  // OK, or what the call has answered: FailedPrecondition where this GPU or driver will not do,
  // ResourceExhausted for memory, else Internal.
  absl::Status check(const char* call, int error) const;
};

}  // namespace shardweave::dtensor_internal

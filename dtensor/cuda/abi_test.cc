// driver.h against NVIDIA's header: numbers, names, and how each function is called.
#include "shardweave/dtensor/cuda/driver.h"

#include <cuda.h>

#include <string_view>

#include "gtest/gtest.h"
#include "shardweave/comm/nccl/testing/passed_alike.h"

namespace shardweave::dtensor_internal {
namespace {

// The header makes macros of names whose functions have had several forms: their values are the
// names in the library.
#define SHARDWEAVE_TEXT(name) #name
#define SHARDWEAVE_CHECK(result, name, symbol, parameters)                   \
  static_assert(testing::kPassedAlike<result parameters, decltype(::name)>); \
  static_assert(std::string_view(symbol) == SHARDWEAVE_TEXT(name));
SHARDWEAVE_CU_FUNCTIONS(SHARDWEAVE_CHECK)

static_assert(kCuSuccess == CUDA_SUCCESS);
static_assert(kCuErrorOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(kCuErrorNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(kCuErrorInvalidDevice == CUDA_ERROR_INVALID_DEVICE);
static_assert(kCuErrorNoBinaryForGpu == CUDA_ERROR_NO_BINARY_FOR_GPU);
static_assert(kCuErrorUnsupportedPtxVersion == CUDA_ERROR_UNSUPPORTED_PTX_VERSION);

TEST(AbiTest, CompiledWithNvidiasHeader) {
  EXPECT_GE(CUDA_VERSION, 12000);
}

}  // namespace
}  // namespace shardweave::dtensor_internal

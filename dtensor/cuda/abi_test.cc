// driver.h against NVIDIA's header: numbers, names, and how each function is called.
#include "shardweave/dtensor/cuda/driver.h"

#include <cuda.h>

#include <string_view>
#include <type_traits>

#include "gtest/gtest.h"

namespace shardweave::dtensor_internal {
namespace {

// Whether an argument is passed in the same way: pointers are pointers, an enum is an int.
template <typename Mine, typename Theirs>
constexpr bool is_passed_alike() {
  if constexpr (std::is_pointer_v<Mine> || std::is_pointer_v<Theirs>) {
    return std::is_pointer_v<Mine> && std::is_pointer_v<Theirs>;
  } else if constexpr (std::is_enum_v<Theirs>) {
    return std::is_same_v<Mine, int> && sizeof(Theirs) == sizeof(int);
  } else {
    return std::is_same_v<Mine, Theirs>;
  }
}

template <typename Mine, typename Theirs>
struct Alike : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
  requires(sizeof...(A) == sizeof...(B))
struct Alike<R(A...), S(B...)>
    : std::bool_constant<is_passed_alike<R, S>() && (is_passed_alike<A, B>() && ...)> {};

// The header makes macros of names whose functions have had several forms: their values are the
// names in the library.
#define SHARDWEAVE_TEXT(name) #name
#define SHARDWEAVE_CHECK(result, name, symbol, parameters)          \
  static_assert(Alike<result parameters, decltype(::name)>::value); \
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

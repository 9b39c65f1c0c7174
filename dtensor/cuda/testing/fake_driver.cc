#include "shardweave/dtensor/cuda/testing/fake_driver.h"

#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "shardweave/dtensor/cuda/driver.h"
#include "shardweave/dtensor/cuda/random_kernel.h"

namespace shardweave::testing {
namespace {

using namespace dtensor_internal;
using namespace random_functors;

FakeDriver& state() {
  static FakeDriver* const fake = new FakeDriver;
  return *fake;
}

// What `call` answers if nothing else is wrong.
int answer(const char* call) {
  const FakeDriver& fake = state();
  return fake.fails != nullptr && std::strcmp(fake.fails, call) == 0 ? fake.error : kCuSuccess;
}

using Body = std::function<void(uint64_t thread, uint64_t threads, void** parameters)>;

template <typename Functor>
void run(uint64_t thread, uint64_t threads, void** parameters) {
  fill_items(thread, threads, *static_cast<const RandomSource*>(parameters[0]),
             *static_cast<const Functor*>(parameters[1]),
             *static_cast<const IndexBox*>(parameters[2]),
             *static_cast<typename Functor::Element**>(parameters[3]));
}

std::map<std::string, Body>& kernels() {
  static auto* const all = new std::map<std::string, Body>{
#define SHARDWEAVE_ENTRY(name, functor) {#name, run<functor>},
      SHARDWEAVE_RANDOM_KERNELS(SHARDWEAVE_ENTRY)
#undef SHARDWEAVE_ENTRY
  };
  return *all;
}

int a_context, a_library;
constexpr int kErrorInvalidValue = 1;
constexpr int kErrorInvalidContext = 201;
constexpr int kErrorNotFound = 500;

}  // namespace
}  // namespace shardweave::testing

using namespace shardweave::testing;
using namespace shardweave::dtensor_internal;

#define SHARDWEAVE_EXPORT extern "C" __attribute__((visibility("default")))

SHARDWEAVE_EXPORT FakeDriver* fake_driver() {
  return &state();
}

SHARDWEAVE_EXPORT int cuInit(unsigned flags) {
  return flags == 0 ? answer("cuInit") : kErrorInvalidValue;
}

SHARDWEAVE_EXPORT int cuGetErrorString(int error, const char** text) {
  if (error == kErrorInvalidContext) return kErrorInvalidValue;  // one without a text
  *text = "an error of the fake";
  return kCuSuccess;
}

SHARDWEAVE_EXPORT int cuDeviceGet(int* device, int ordinal) {
  if (ordinal != 0) return kCuErrorInvalidDevice;
  *device = 40;  // the driver's own number
  return answer("cuDeviceGet");
}

SHARDWEAVE_EXPORT int cuDevicePrimaryCtxRetain(CuContext* context, int device) {
  if (device != 40) return kCuErrorInvalidDevice;
  ++state().retains;
  *context = reinterpret_cast<CuContext>(&a_context);
  return answer("cuDevicePrimaryCtxRetain");
}

SHARDWEAVE_EXPORT int cuCtxPushCurrent_v2(CuContext context) {
  if (context != reinterpret_cast<CuContext>(&a_context)) return kErrorInvalidContext;
  const int error = answer("cuCtxPushCurrent");
  if (error == kCuSuccess) ++state().current;
  return error;
}

SHARDWEAVE_EXPORT int cuCtxPopCurrent_v2(CuContext* context) {
  if (state().current == 0) return kErrorInvalidContext;
  --state().current;
  *context = reinterpret_cast<CuContext>(&a_context);
  return kCuSuccess;
}

SHARDWEAVE_EXPORT int cuLibraryLoadData(CuLibrary* library, const void* code, int*, void**,
                                        unsigned num_jit, int*, void**, unsigned num_options) {
  if (std::strcmp(static_cast<const char*>(code), kFakeCode) != 0 || num_jit + num_options != 0) {
    return kErrorInvalidValue;
  }
  ++state().loads;
  *library = reinterpret_cast<CuLibrary>(&a_library);
  return answer("cuLibraryLoadData");
}

SHARDWEAVE_EXPORT int cuLibraryGetKernel(CuKernel* kernel, CuLibrary library, const char* name) {
  if (library != reinterpret_cast<CuLibrary>(&a_library)) return kErrorInvalidValue;
  const auto found = kernels().find(name);
  if (found == kernels().end()) return kErrorNotFound;
  *kernel = reinterpret_cast<CuKernel>(&found->second);
  return answer("cuLibraryGetKernel");
}

SHARDWEAVE_EXPORT int cuLaunchKernel(CuKernel kernel, unsigned grid_x, unsigned grid_y,
                                     unsigned grid_z, unsigned block_x, unsigned block_y,
                                     unsigned block_z, unsigned, CuStream stream, void** parameters,
                                     void** extra) {
  FakeDriver& fake = state();
  if (fake.current == 0) return kErrorInvalidContext;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > 1024 || block_y != 1 ||
      block_z != 1 || extra != nullptr) {
    return kErrorInvalidValue;
  }
  const int error = answer("cuLaunchKernel");
  if (error != kCuSuccess) return error;
  ++fake.launches;
  if (grid_x > fake.largest_grid) fake.largest_grid = grid_x;
  fake.last_stream = stream;
  const uint64_t threads = static_cast<uint64_t>(grid_x) * block_x;
  const Body& body = *reinterpret_cast<const Body*>(kernel);
  for (uint64_t thread = 0; thread < threads; ++thread) body(thread, threads, parameters);
  return kCuSuccess;
}

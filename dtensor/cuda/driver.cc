#include "shardweave/dtensor/cuda/driver.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace shardweave::dtensor_internal {
namespace {

absl::Status unusable(const std::string& why) {
  return absl::FailedPreconditionError(absl::StrCat("random numbers on a GPU: ", why));
}

}  // namespace

absl::StatusOr<Driver> Driver::load(const std::string& file) {
  const std::string name = file.empty() ? "libcuda.so.1" : file;
  void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* const why = ::dlerror();
    return unusable(
        absl::StrCat("no NVIDIA driver: cannot load ", name, " (", why == nullptr ? "" : why, ")"));
  }
  Driver driver;
  std::string missing;
  const auto find = [&](const char* symbol) {
    void* const found = ::dlsym(handle, symbol);
    if (found == nullptr && missing.empty()) missing = symbol;
    return found;
  };
#define SHARDWEAVE_FIND(result, name, symbol, parameters) \
  driver.name = reinterpret_cast<decltype(driver.name)>(find(symbol));
  SHARDWEAVE_CU_FUNCTIONS(SHARDWEAVE_FIND)
#undef SHARDWEAVE_FIND
  if (!missing.empty()) {
    return unusable(absl::StrCat("the NVIDIA driver is too old: ", name, " has no ", missing,
                                 "; wanted one for CUDA 12.0 or later"));
  }
  return driver;
}

absl::Status Driver::check(const char* call, int error) const {
  if (error == kCuSuccess) return absl::OkStatus();
  const char* text = nullptr;
  if (cuGetErrorString(error, &text) != kCuSuccess || text == nullptr) text = "unknown error";
  const std::string message = absl::StrCat(call, ": ", text, " (CUDA error ", error, ")");
  switch (error) {
    case kCuErrorOutOfMemory:
      return absl::ResourceExhaustedError(absl::StrCat("random numbers on a GPU: ", message));
    case kCuErrorNoDevice:
    case kCuErrorInvalidDevice:
      return unusable(message);
    case kCuErrorNoBinaryForGpu:
      return unusable(absl::StrCat(message,
                                   "; there are kernels for compute capability 8.x, 9.0, "
                                   "10.x and later"));
    case kCuErrorUnsupportedPtxVersion:
      return unusable(absl::StrCat(message,
                                   "; the NVIDIA driver is older than the CUDA that this "
                                   "program was built with"));
    default:
      return absl::InternalError(absl::StrCat("random numbers on a GPU: ", message));
  }
}

}  // namespace shardweave::dtensor_internal

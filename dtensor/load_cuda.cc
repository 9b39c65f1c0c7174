#include "shardweave/dtensor/load_cuda.h"

#include <dlfcn.h>

#include <mutex>
#include <string>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "c10/core/impl/DeviceGuardImplInterface.h"

namespace shardweave {
namespace {

constexpr char kName[] = "libtorch_cuda.so";

const c10::impl::DeviceGuardImplInterface* cuda() {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].load();
}

// With its slash.
std::string directory_of_libtorch() {
  Dl_info info = {};
  if (::dladdr(reinterpret_cast<const void*>(&at::_ops::empty_memory_format::call), &info) == 0) {
    return "";
  }
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

}  // namespace

absl::Status load_cuda() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (cuda() == nullptr) {
    const std::string path = directory_of_libtorch() + kName;
    if (::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      const char* const why = ::dlerror();
      return absl::FailedPreconditionError(
          absl::StrCat("no CUDA in LibTorch: ", why == nullptr ? path : why,
                       "; wanted a LibTorch with CUDA, whose folder LIBTORCH_HOME names when the "
                       "program is built"));
    }
  }
  if (cuda() == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(kName, " is loaded, but LibTorch has no CUDA: is it of another version?"));
  }
  if (cuda()->deviceCount() == 0) {
    return absl::FailedPreconditionError("LibTorch's CUDA finds no GPU");
  }
  return absl::OkStatus();
}

}  // namespace shardweave

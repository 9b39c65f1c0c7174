#include "shardweave/dtensor/load_cuda.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>

#include "ATen/Context.h"
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
  // Where the file itself is: programs may see it by a link, in a folder without the other half.
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(info.dli_fname, nullptr),
                                                         &std::free);
  const std::string path = real == nullptr ? info.dli_fname : real.get();
  return path.substr(0, path.rfind('/') + 1);
}

}  // namespace

absl::Status load_cuda(int device) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (cuda() == nullptr) {
    const std::string path = directory_of_libtorch() + kName;
    if (::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      const char* const why = ::dlerror();
      return absl::FailedPreconditionError(
          absl::StrCat("no CUDA in LibTorch: ", why == nullptr ? path : why,
                       "; wanted a LibTorch with CUDA: in the folder that LIBTORCH_HOME names when "
                       "Shardweave is built, or, where it is installed, LD_LIBRARY_PATH names"));
    }
  }
  if (cuda() == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(kName, " is loaded, but LibTorch has no CUDA: is it of another version?"));
  }
  // Before at::hasCUDA(), which also says no where there is no GPU.
  const int count = cuda()->deviceCount();
  if (count == 0) return absl::FailedPreconditionError("LibTorch's CUDA finds no GPU");
  if (!at::hasCUDA()) {
    return absl::FailedPreconditionError(
        "LibTorch was asked for CUDA before it was loaded, and has none from then on: load_cuda() "
        "comes first");
  }
  if (device >= count) {
    return absl::InvalidArgumentError(
        absl::StrCat("device ", device, " of ", count, ", which is not there"));
  }
  // Once: who turns it on later has his reason.
  static bool turned_off = false;  // guarded by mutex
  if (!turned_off) at::globalContext().setSDPUseCuDNN(false);
  turned_off = true;
  if (device >= 0) cuda()->setDevice({c10::kCUDA, static_cast<c10::DeviceIndex>(device)});
  return absl::OkStatus();
}

}  // namespace shardweave

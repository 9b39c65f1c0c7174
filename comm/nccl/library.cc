#include "shardweave/comm/nccl/library.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "absl/strings/str_join.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::nccl_internal {
namespace {

// The first where calls of several communicators that do not block may go on at a time in one thread:
// those before have one job for all of a thread's.
constexpr int kOldestNccl = 22703;

// "2.28.9": 10000 * major + 100 * minor + patch since 2.9.
std::string nccl_version(int version) {
  return str_cat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}
// "13.0": 1000 * major + 10 * minor.
std::string cuda_version(int version) {
  return str_cat(version / 1000, ".", version % 1000 / 10);
}

// For what is under way on the device to end, after an error.
constexpr auto kGrace = std::chrono::seconds(5);
constexpr auto kLookEvery = std::chrono::microseconds(100);

std::vector<std::string> candidates(const std::string& given, std::vector<std::string> usual) {
  return given.empty() ? std::move(usual) : std::vector<std::string>{given};
}

}  // namespace

std::string_view name_of(Library::Parts parts) {
  return parts == Library::Parts::kCuda ? "a GPU's memory by way of the host: " : "backend nccl: ";
}

absl::Status Library::unusable(const std::string& why) const {
  return absl::FailedPreconditionError(str_cat(name_of(parts_), why));
}

absl::StatusOr<std::shared_ptr<const Library>> Library::load(const NcclLibraries& names,
                                                             Parts parts) {
  std::shared_ptr<Library> library(new Library(parts));
  if (absl::Status status = library->find_all(names); !status.ok()) return status;
  return library;
}

absl::Status Library::open(const std::vector<std::string>& names, const char* what,
                           const char* advice, void** handle, std::string* name) {
  // What the program has loaded already (LibTorch's) before anything else.
  for (const int mode : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
    for (const std::string& candidate : names) {
      *handle = ::dlopen(candidate.c_str(), mode | RTLD_LOCAL | RTLD_NODELETE);
      if (*handle == nullptr) continue;
      *name = candidate;
      return absl::OkStatus();
    }
  }
  const char* const why = ::dlerror();
  return unusable(str_cat("no ", what, ": cannot load ", absl::StrJoin(names, " or "), " (",
                          why == nullptr ? "" : why, "); ", advice));
}

absl::Status Library::find_all(const NcclLibraries& names) {
  void* driver = nullptr;
  void* runtime = nullptr;
  void* nccl = nullptr;
  std::string driver_name, runtime_name, nccl_name;
  absl::Status status =
      open(candidates(names.driver, {"libcuda.so.1"}), "NVIDIA driver",
           "this machine has no NVIDIA GPU, or the driver is not visible in this container",
           &driver, &driver_name);
  if (status.ok()) {
    status =
        open(candidates(names.runtime, {"libcudart.so.13", "libcudart.so.12", "libcudart.so"}),
             "CUDA runtime", "put it on LD_LIBRARY_PATH, or name it in SHARDWEAVE_CUDART_LIBRARY",
             &runtime, &runtime_name);
  }
  if (status.ok() && parts_ == Parts::kCudaAndNccl) {
    status =
        open(candidates(names.nccl, {"libnccl.so.2"}), "NCCL",
             "put it on LD_LIBRARY_PATH, or name it in SHARDWEAVE_NCCL_LIBRARY", &nccl, &nccl_name);
  }
  if (!status.ok()) return status;

  std::string missing;
  const auto find = [&](void* handle, const std::string& file, const char* function) {
    void* const found = ::dlsym(handle, function);
    if (found == nullptr && missing.empty()) missing = str_cat(file, " has no ", function);
    return found;
  };
#define SHARDWEAVE_FIND_IN(handle, file, name) \
  name = reinterpret_cast<decltype(name)>(find(handle, file, #name));
#define SHARDWEAVE_FIND(result, name, parameters) SHARDWEAVE_FIND_IN(driver, driver_name, name)
  SHARDWEAVE_CUDA_DRIVER_FUNCTIONS(SHARDWEAVE_FIND)
#undef SHARDWEAVE_FIND
#define SHARDWEAVE_FIND(result, name, parameters) SHARDWEAVE_FIND_IN(runtime, runtime_name, name)
  SHARDWEAVE_CUDA_RUNTIME_FUNCTIONS(SHARDWEAVE_FIND)
#undef SHARDWEAVE_FIND
#define SHARDWEAVE_FIND(result, name, parameters) SHARDWEAVE_FIND_IN(nccl, nccl_name, name)
  if (parts_ == Parts::kCudaAndNccl) {
    SHARDWEAVE_NCCL_FUNCTIONS(SHARDWEAVE_FIND)
  }
#undef SHARDWEAVE_FIND
#undef SHARDWEAVE_FIND_IN
  // An old NCCL lacks functions; its version says more.
  if (ncclGetVersion != nullptr) {
    int version = 0;
    ncclGetVersion(&version);
    if (version < kOldestNccl) {
      return unusable(str_cat("NCCL is too old: ", nccl_name, " is ", nccl_version(version),
                              ", want ", nccl_version(kOldestNccl), " or newer"));
    }
  }
  if (!missing.empty()) return unusable(missing);
  return check_versions(nccl_name, runtime_name);
}

absl::Status Library::check_versions(const std::string& nccl, const std::string& runtime) {
  int nccl_is = 0, runtime_is = 0, driver_is = 0;
  // The driver answers only where there is a GPU.
  if (const int error = cuInit(0); error != 0) {
    return unusable(str_cat("the NVIDIA driver finds no GPU that it can use (cuInit: error ", error,
                            error == 100 ? ", no device" : "", ")"));
  }
  if (const int error = cuDriverGetVersion(&driver_is); error != 0) {
    return unusable(str_cat("cuDriverGetVersion: error ", error));
  }
  if (ncclGetVersion != nullptr) ncclGetVersion(&nccl_is);
  if (absl::Status status = check_cuda("cudaRuntimeGetVersion", cudaRuntimeGetVersion(&runtime_is));
      !status.ok()) {
    return status;
  }
  if (driver_is / 1000 < runtime_is / 1000) {
    return unusable(str_cat("the NVIDIA driver is too old: it is for CUDA ",
                            cuda_version(driver_is), ", ", runtime, " is CUDA ",
                            cuda_version(runtime_is)));
  }
  if (ncclGetVersion != nullptr) {
    versions_ = str_cat("NCCL ", nccl_version(nccl_is), " (", nccl, "), ");
  }
  str_append(&versions_, "CUDA ", cuda_version(runtime_is), " (", runtime, "), driver for CUDA ",
             cuda_version(driver_is));
  return absl::OkStatus();
}

absl::Status Library::check_cuda(const char* call, int error) const {
  if (error == kCudaSuccess) return absl::OkStatus();
  const std::string text =
      str_cat(call, ": ", cudaGetErrorString(error), " (CUDA error ", error, ")");
  return error == kCudaErrorMemoryAllocation ? absl::ResourceExhaustedError(text)
                                             : absl::InternalError(text);
}

absl::Status Library::check_nccl(const char* call, int error, NcclComm comm) const {
  if (error == kNcclSuccess) return absl::OkStatus();
  std::string text = str_cat(call, ": ", ncclGetErrorString(error), " (NCCL error ", error, ")");
  const char* const last = ncclGetLastError(comm);
  if (last != nullptr && *last != '\0') str_append(&text, ": ", last);
  return error == kNcclRemoteError ? absl::UnavailableError(text) : absl::InternalError(text);
}

absl::Status Library::copy(int device, void* to, const void* from, int64_t bytes, int kind,
                           DeviceStream stream) const {
  if (bytes == 0) return absl::OkStatus();
  const CurrentDevice on(*this, device);
  if (!on.status().ok()) return on.status();
  const auto on_stream = static_cast<CudaStream>(stream.handle);
  absl::Status status =
      check_cuda("cudaMemcpyAsync", cudaMemcpyAsync(to, from, bytes, kind, on_stream));
  if (!status.ok()) return status;
  status = check_cuda("cudaStreamSynchronize", cudaStreamSynchronize(on_stream));
  // After a failure the device may still be at it, and the caller frees the memory.
  const auto limit = std::chrono::steady_clock::now() + kGrace;
  while (!status.ok() && cudaStreamQuery(on_stream) == kCudaErrorNotReady &&
         std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(kLookEvery);
  }
  return status;
}

CurrentDevice::CurrentDevice(const Library& library, int device)
    : library_(library), mode_(kCudaStreamCaptureModeRelaxed) {
  library_.cudaThreadExchangeStreamCaptureMode(&mode_);
  status_ = library_.check_cuda("cudaGetDevice", library_.cudaGetDevice(&before_));
  if (!status_.ok() || before_ == device) return;
  unsigned flags = 0;
  int is_active = 0;
  restores_ =
      library_.cuDevicePrimaryCtxGetState(before_, &flags, &is_active) == 0 && is_active != 0;
  status_ = library_.check_cuda("cudaSetDevice", library_.cudaSetDevice(device));
}

CurrentDevice::~CurrentDevice() {
  if (restores_) library_.cudaSetDevice(before_);
  library_.cudaThreadExchangeStreamCaptureMode(&mode_);
}

}  // namespace shardweave::nccl_internal

namespace shardweave {

NcclLibraries nccl_libraries_of_environment() {
  const auto get = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  return {.nccl = get("SHARDWEAVE_NCCL_LIBRARY"),
          .runtime = get("SHARDWEAVE_CUDART_LIBRARY"),
          .driver = get("SHARDWEAVE_CUDA_DRIVER_LIBRARY")};
}

}  // namespace shardweave

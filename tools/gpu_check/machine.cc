// Versions, and the GPUs that there are.
#include <dlfcn.h>

#include <string>

#include "ATen/detail/CUDAHooksInterface.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "check.h"
#include "shardweave/comm/nccl/library.h"
#include "torch/version.h"

namespace shardweave_tool {
namespace {

using namespace shardweave;

// "12.8": 1000 * major + 10 * minor.
std::string cuda_version(int64_t version) {
  return absl::StrFormat("%d.%d", version / 1000, version % 1000 / 10);
}

std::string gibibytes(size_t bytes) {
  return absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / (1 << 30));
}

// By the driver, which makes no context on a GPU for it. "": it does not say.
std::string describe_gpu(int index) {
  const std::string given = nccl_libraries_of_environment().driver;
  void* const driver = ::dlopen(given.empty() ? "libcuda.so.1" : given.c_str(),
                                RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (driver == nullptr) return "";
  const auto get = reinterpret_cast<int (*)(int*, int)>(::dlsym(driver, "cuDeviceGet"));
  const auto get_name =
      reinterpret_cast<int (*)(char*, int, int)>(::dlsym(driver, "cuDeviceGetName"));
  const auto get_memory =
      reinterpret_cast<int (*)(size_t*, int)>(::dlsym(driver, "cuDeviceTotalMem_v2"));
  if (get == nullptr || get_name == nullptr || get_memory == nullptr) return "";
  int device = 0;
  char name[256] = {};
  size_t bytes = 0;
  if (get(&device, index) != 0 || get_name(name, sizeof(name) - 1, device) != 0 ||
      get_memory(&bytes, device) != 0) {
    return "";
  }
  return absl::StrCat(name, ", ", gibibytes(bytes));
}

void say_libtorchs(Check& check) {
  const at::CUDAHooksInterface& cuda = at::detail::getCUDAHooks();
  if (cuda.hasCUDART()) {
    check.fact("CUDA", cuda_version(cuda.versionCUDART()));
  }
  if (cuda.hasCuDNN()) check.fact("cuDNN", absl::StrCat(cuda.versionRuntimeCuDNN()));
}

}  // namespace

void check_machine(Session& session, Check& check) {
  check.fact("LibTorch", TORCH_VERSION);
  const auto library = nccl_internal::Library::load(nccl_libraries_of_environment());
  check.fact("NCCL",
             library.ok() ? (*library)->versions() : std::string(library.status().message()));
  if (!session.gpu.ok()) {
    check.fact("GPUs", std::string(session.gpu.message()));
    return check.looked_at("no GPU: what needs one is skipped");
  }
  say_libtorchs(check);
  const int count = c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
  for (int i = 0; i < count; ++i) {
    const std::string what = describe_gpu(i);
    check.fact(absl::StrCat("cuda:", i), what.empty() ? "the driver does not say" : what);
  }
  check.looked_at(absl::StrCat(count, count == 1 ? " GPU" : " GPUs"));
}

}  // namespace shardweave_tool

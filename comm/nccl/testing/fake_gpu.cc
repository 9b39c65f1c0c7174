#include "shardweave/comm/nccl/testing/fake_gpu.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace shardweave {
namespace {

constexpr char kLibrary[] = "comm/nccl/testing/libfake_gpu.so";
constexpr char kEmpty[] = "comm/nccl/testing/libempty.so";

}  // namespace

FakeGpu& fake_gpu_of_tests() {
  static FakeGpu* const gpu = [] {
    void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    void* const get = library == nullptr ? nullptr : ::dlsym(library, "fake_gpu");
    if (get == nullptr) {
      std::fprintf(stderr, "%s\n", ::dlerror());
      std::abort();
    }
    return reinterpret_cast<FakeGpu* (*)()>(get)();
  }();
  return *gpu;
}

NcclLibraries fake_libraries() {
  return {.nccl = kLibrary, .runtime = kLibrary, .driver = kLibrary};
}

std::string empty_library() {
  return kEmpty;
}

}  // namespace shardweave

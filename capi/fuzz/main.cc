// How long, from which seed, and what may not be left over.
#include <chrono>
#include <filesystem>

#include <unistd.h>

#include "ATen/ops/ones.h"
#include "fuzzer.h"
#include "torch/csrc/jit/api/module.h"

namespace shardweave::capi {
namespace {

// What scripts() loads.
void save_module(const std::string& path) {
  torch::jit::Module module("Model");
  module.register_parameter("weight", at::ones({3}), false);
  module.register_buffer("offset", at::ones({1}));
  module.define(
      "def forward(self, x, scale: float = 2.0):\n  return x * self.weight * scale + self.offset\n"
      "def both(self, x, n: int = 2, flag: bool = False):\n  return (x, [n, n], flag)\n");
  module.save(path);
}

int run(int argc, char** argv) {
  double seconds = 10;
  unsigned long long seed = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::sscanf(argv[i], "--seconds=%lf", &seconds) == 1 ||
        std::sscanf(argv[i], "--seed=%llu", &seed) == 1)
      continue;
    std::fprintf(stderr, "usage: fuzz [--seconds=N] [--seed=N]\n");
    return 2;
  }
  swv_status_free(swv_set_num_threads(1));
  // Everything that is written goes there.
  const char* const temporary = std::getenv("TEST_TMPDIR");
  std::string folder = std::string(temporary == nullptr ? "/tmp" : temporary) + "/fuzz_XXXXXX";
  if (mkdtemp(folder.data()) == nullptr || chdir(folder.c_str()) != 0) return 1;
  clearenv();  // nobody has started this process with others
  save_module(folder + "/model.pt");
  const int64_t before = swv_live_handles();
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t steps = 0, succeeded = 0, failed = 0;
  // A new world of things every few thousand steps, so that a seed that fails fails soon.
  for (; std::chrono::steady_clock::now() < end; ++seed) {
    std::fprintf(stderr, "fuzz: --seed=%llu\n", seed);
    Fuzzer fuzzer(seed, nullptr, folder);
    for (int i = 0; i < 4000 && std::chrono::steady_clock::now() < end; ++i, ++steps) {
      if (i % 100 == 0) alarm(120);  // what hangs ends with SIGALRM
      fuzzer.step();
    }
    succeeded += fuzzer.succeeded();
    failed += fuzzer.failed();
  }
  std::filesystem::remove_all(folder);
  if (swv_live_handles() != before) {
    std::fprintf(stderr, "fuzz: %lld handles leaked\n",
                 static_cast<long long>(swv_live_handles() - before));
    return 1;
  }
  std::printf("%lld steps: %lld calls succeeded, %lld failed as they should\n",
              static_cast<long long>(steps), static_cast<long long>(succeeded),
              static_cast<long long>(failed));
  return succeeded > 0 && failed > 0 ? 0 : 1;
}

}  // namespace
}  // namespace shardweave::capi

// Tensors that are too large for the machine have to fail here, not the machine.
constexpr char kSmallAllocations[] = "allocator_may_return_null=1:max_allocation_size_mb=2048";
extern "C" const char* __asan_default_options() {
  return kSmallAllocations;
}
extern "C" const char* __tsan_default_options() {
  return kSmallAllocations;
}

int main(int argc, char** argv) {
  return shardweave::capi::run(argc, argv);
}

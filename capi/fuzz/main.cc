// How long, from which seed, and what may not be left over.
#include <chrono>
#include <filesystem>
#include <string_view>

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

// That cannot succeed here, where nobody has started the process with others, and no step is captured
// without a GPU.
bool may_fail(std::string_view function) {
  return function == "swv_world_from_environment" || function == "swv_captured_step_create" ||
         function == "swv_captured_step_replay" || function == "swv_captured_step_replays";
}

// Functions that were never called, or have never succeeded.
std::vector<std::string> missed() {
  std::vector<std::string> names;
  for (size_t i = 0; i < kNumFunctions; ++i) {
    if (calls[i] == 0 || (successes[i] == 0 && !may_fail(kFunctions[i]))) {
      names.push_back(kFunctions[i]);
    }
  }
  return names;
}

// The steps in which one of them might succeed.
uint64_t steps_of_missed() {
  uint64_t steps = 0;
  for (size_t i = 0; i < kNumFunctions; ++i) {
    if (successes[i] == 0 && !may_fail(kFunctions[i])) steps |= called_in[i];
  }
  return steps;
}

// Everything that is written goes there.
std::string new_folder() {
  const char* const temporary = std::getenv("TEST_TMPDIR");
  std::string folder = std::string(temporary == nullptr ? "/tmp" : temporary) + "/fuzz_XXXXXX";
  if (mkdtemp(folder.data()) == nullptr || chdir(folder.c_str()) != 0) std::abort();
  clearenv();  // nobody has started this process with others
  save_module(folder + "/model.pt");
  return folder;
}

#ifdef SHARDWEAVE_LIBFUZZER

int run_input(const uint8_t* data, size_t size) {
  static const std::string* const folder = [] {
    swv_status_free(swv_set_num_threads(1));
    return new std::string(new_folder());
  }();
  Fuzzer fuzzer(Chance(data, size), nullptr, *folder);
  for (int i = 0; i < 1000 && !fuzzer.ended(); ++i) fuzzer.step();
  return 0;
}

#else

int run(int argc, char** argv) {
  double seconds = 10;
  // Seeds move on: each start tries others.
  unsigned long long seed = std::chrono::system_clock::now().time_since_epoch().count();
  unsigned long long favoured = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::sscanf(argv[i], "--seconds=%lf", &seconds) == 1 ||
        std::sscanf(argv[i], "--seed=%llu", &seed) == 1 ||
        std::sscanf(argv[i], "--favour=%llx", &favoured) == 1)
      continue;
    std::fprintf(stderr, "usage: fuzz [--seconds=N] [--seed=N] [--favour=STEPS]\n");
    return 2;
  }
  swv_status_free(swv_set_num_threads(1));
  const std::string folder = new_folder();
  const int64_t before = swv_live_handles();
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t steps = 0, succeeded = 0, failed = 0;
  // On a slow machine it takes longer until everything was called.
  const auto last = end + std::chrono::duration<double>(8 * seconds);
  const auto go_on = [&] {
    const auto now = std::chrono::steady_clock::now();
    return now < end || (now < last && !missed().empty());
  };
  // A new world of things every few thousand steps, so that a seed that fails fails soon.
  for (; go_on(); ++seed) {
    std::fprintf(stderr, "fuzz: --seed=%llu --favour=%llx\n", seed, favoured);
    Fuzzer fuzzer(Chance(seed), nullptr, folder, favoured);
    for (int i = 0; i < 4000 && (i % 100 != 0 || go_on()); ++i, ++steps) {
      if (i % 100 == 0) alarm(120);  // what hangs ends with SIGALRM
      fuzzer.step();
    }
    succeeded += fuzzer.succeeded();
    failed += fuzzer.failed();
    favoured = steps_of_missed();
  }
  std::filesystem::remove_all(folder);
  if (swv_live_handles() != before) {
    std::fprintf(stderr, "fuzz: %lld handles leaked\n",
                 static_cast<long long>(swv_live_handles() - before));
    return 1;
  }
  for (const std::string& name : missed()) {
    std::fprintf(stderr, "fuzz: %s was never called with success\n", name.c_str());
  }
  std::printf("%lld steps: %lld calls succeeded, %lld failed as they should\n",
              static_cast<long long>(steps), static_cast<long long>(succeeded),
              static_cast<long long>(failed));
  return succeeded > 0 && failed > 0 && missed().empty() ? 0 : 1;
}

#endif

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

#ifdef SHARDWEAVE_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return shardweave::capi::run_input(data, size);
}
#else
int main(int argc, char** argv) {
  return shardweave::capi::run(argc, argv);
}
#endif

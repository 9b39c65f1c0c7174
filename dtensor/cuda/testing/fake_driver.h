// What a test tells the driver that is none, testing/fake_driver.cc: a shared library with the
// driver's functions, whose one GPU is this thread and whose memory is the host's.
#pragma once

#include <cstdint>

namespace shardweave::testing {

// The function "fake_driver" of the library gives it.
struct FakeDriver {
  const char* fails = nullptr;  // the call that answers `error`, if not null
  int error = 0;
  int64_t launches = 0;
  int64_t largest_grid = 0;
  void* last_stream = nullptr;
  int64_t loads = 0;    // of code
  int64_t retains = 0;  // of primary contexts
  int64_t current = 0;  // contexts that were pushed and not popped
};

// What cuLibraryLoadData() takes for code.
inline constexpr char kFakeCode[] = "kernels of random_kernels.cu";

}  // namespace shardweave::testing

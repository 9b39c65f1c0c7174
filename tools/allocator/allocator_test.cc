// What LibTorch allocates comes from TCMalloc, in a program that names it.
#include <cstddef>

#include "ATen/ops/empty.h"
#include "gtest/gtest.h"

// Of gperftools/malloc_extension_c.h; not there where a sanitizer has its own allocator.
extern "C" __attribute__((weak)) int MallocExtension_GetNumericProperty(const char* property,
                                                                        size_t* value);

namespace {

size_t allocated() {
  size_t bytes = 0;
  EXPECT_EQ(MallocExtension_GetNumericProperty("generic.current_allocated_bytes", &bytes), 1);
  return bytes;
}

TEST(AllocatorTest, ATensorsMemoryIsTcmallocs) {
  if (&MallocExtension_GetNumericProperty == nullptr) {
    GTEST_SKIP() << "built for a sanitizer";
  }
  constexpr size_t kBytes = size_t{64} << 20;
  const size_t before = allocated();
  at::Tensor tensor = at::empty({static_cast<int64_t>(kBytes)}, at::kByte);
  EXPECT_GE(allocated(), before + kBytes);
  EXPECT_LT(allocated(), before + 2 * kBytes);
  tensor.reset();
  EXPECT_LT(allocated(), before + kBytes);
}

}  // namespace

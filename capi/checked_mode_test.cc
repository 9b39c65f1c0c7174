// SWV_CHECK_HANDLES=1: what is looked up is looked up without a lock, and no memory for an error is
// not another error.
#include <atomic>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <pthread.h>

#include "gtest/gtest.h"
#include "shardweave.h"

namespace {

std::atomic<int64_t> locks{0};
// How many more allocations this thread gets; below 0: as many as there are.
thread_local int64_t allocations_left = -1;

}  // namespace

extern "C" int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static const auto real =
      reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  locks.fetch_add(1, std::memory_order_relaxed);
  return real(mutex);
}

// Not inlined: GCC would take new and free() for a mismatch.
[[gnu::noinline]] void* operator new(size_t size) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* const memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace {

void expect_ok(swv_status* status) {
  EXPECT_EQ(status, nullptr) << swv_status_message(status);
  swv_status_free(status);
}

TEST(CheckedModeTest, ALookUpTakesNoLock) {
  swv_tensor* t = nullptr;
  ASSERT_GE(swv_live_handles(), 0) << "SWV_CHECK_HANDLES is not set";
  expect_ok(swv_tensor_ones(nullptr, 0, nullptr, &t));
  int32_t ndim = -1;
  expect_ok(swv_tensor_ndim(t, &ndim));
  const int64_t before = locks.load();
  for (int i = 0; i < 100; ++i) expect_ok(swv_tensor_ndim(t, &ndim));
  EXPECT_EQ(locks.load() - before, 0);
  {
    // The counter counts.
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
    EXPECT_EQ(locks.load() - before, 1);
  }
  swv_tensor_free(t);
}

// Wherever it fails, the code says so, and nothing is left over.
template <typename Call>
void expect_out_of_memory(const char* what, const Call& call) {
  const int64_t before = swv_live_handles();
  int failures = 0;
  for (int64_t n = 0; n < 1000; ++n) {
    allocations_left = n;
    swv_status* status = call();
    const swv_code code = swv_status_code(status);
    const bool is_named =
        std::string_view(swv_status_message(status)).find("memory") != std::string_view::npos;
    swv_status_free(status);
    allocations_left = -1;
    EXPECT_EQ(swv_live_handles(), before) << what << ", " << n;
    if (code == SWV_CODE_OK) break;
    ++failures;
    EXPECT_STREQ(swv_code_name(code), "RESOURCE_EXHAUSTED") << what << ", " << n;
    EXPECT_TRUE(is_named) << what << ", " << n;
  }
  EXPECT_GT(failures, 0) << what;
}

TEST(CheckedModeTest, OutOfMemoryKeepsItsCode) {
  expect_out_of_memory("swv_layout_parse", [] {
    swv_layout* layout = nullptr;
    swv_status* status = swv_layout_parse("[S(0), R, S(1, sf=3)]", &layout);
    swv_layout_free(layout);
    return status;
  });
  expect_out_of_memory("swv_plan_create", [] {
    swv_plan* plan = nullptr;
    swv_status* status = swv_plan_create(&plan);
    swv_plan_free(plan);
    return status;
  });
  // An error that there is no memory for.
  allocations_left = 0;
  swv_status* status = swv_layout_parse(nullptr, nullptr);
  EXPECT_EQ(swv_status_code(status), SWV_CODE_RESOURCE_EXHAUSTED);
  swv_status_free(status);
  status =
      swv_status_new(SWV_CODE_ABORTED, "a text that does not fit into a string without memory");
  EXPECT_EQ(swv_status_code(status), SWV_CODE_RESOURCE_EXHAUSTED);
  EXPECT_STREQ(swv_status_message(status), "out of memory");
  swv_status_free(status);
  allocations_left = -1;
}

swv_status* no_memory(void*, swv_world*) {
  allocations_left = 0;
  swv_status* status = swv_status_new(SWV_CODE_ABORTED, "a text that does not fit");
  allocations_left = -1;
  return status;
}

TEST(CheckedModeTest, ACallbackMayHaveNoMemory) {
  swv_status* status = swv_run_ranks(1, no_memory, nullptr, nullptr);
  EXPECT_STREQ(swv_code_name(swv_status_code(status)), "RESOURCE_EXHAUSTED")
      << swv_status_message(status);
  swv_status_free(status);
}

// Many threads make and free, and each handle is freed by one of two.
TEST(CheckedModeTest, OfTwoThatFreeOneIsTold) {
  const int64_t before = swv_live_handles();
  testing::internal::CaptureStderr();
  constexpr int kHandles = 500;
  for (int i = 0; i < kHandles; ++i) {
    swv_plan* plan = nullptr;
    expect_ok(swv_plan_create(&plan));
    std::thread other([&] { swv_plan_free(plan); });
    swv_plan_free(plan);
    other.join();
  }
  const std::string said = testing::internal::GetCapturedStderr();
  int told = 0;
  for (size_t at = 0; (at = said.find("is a swv_plan that was freed", at)) != std::string::npos;
       ++at)
    ++told;
  EXPECT_EQ(told, kHandles);
  EXPECT_EQ(swv_live_handles(), before);
}

// The addresses of the last freed ones are not given out again, those of older ones are.
TEST(CheckedModeTest, ManyHandles) {
  const int64_t before = swv_live_handles();
  std::vector<swv_plan*> plans(100000);
  for (swv_plan*& plan : plans) expect_ok(swv_plan_create(&plan));
  EXPECT_EQ(swv_live_handles(), before + static_cast<int64_t>(plans.size()));
  for (swv_plan* plan : plans) swv_plan_free(plan);
  swv_string* text = nullptr;
  swv_status* status = swv_plan_to_json(plans.back(), &text);
  EXPECT_NE(std::string(swv_status_message(status)).find("is a swv_plan that was freed"),
            std::string::npos)
      << swv_status_message(status);
  swv_status_free(status);
  status = swv_plan_to_json(reinterpret_cast<swv_plan*>(uintptr_t{1} << 60), &text);
  EXPECT_NE(std::string(swv_status_message(status)).find("is no handle"), std::string::npos);
  swv_status_free(status);
  EXPECT_EQ(swv_live_handles(), before);
}

}  // namespace

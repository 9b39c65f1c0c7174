// Loading and launching, on a driver that is none.
#include "shardweave/dtensor/cuda/random_kernels.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/cuda/testing/fake_driver.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

using ::testing::AllOf;
using testing::FakeDriver;
using ::testing::HasSubstr;

constexpr char kLibrary[] = "dtensor/cuda/testing/libfake_driver.so";

class RandomKernelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr) << ::dlerror();
    void* const get = ::dlsym(library, "fake_driver");
    ASSERT_NE(get, nullptr);
    fake_ = reinterpret_cast<FakeDriver* (*)()>(get)();
    *fake_ = FakeDriver();
    absl::StatusOr<Driver> driver = Driver::load(kLibrary);
    ASSERT_TRUE(driver.ok()) << driver.status();
    kernels_ = std::make_unique<RandomKernels>(*driver, testing::kFakeCode);
  }

  absl::Status fill_some(int device = 0) {
    const IndexBox box = {.length = 3};
    return kernels_->fill(RandomDraw::normal(DType::kF32, 0, 1), {}, {box}, some_,
                          {.device = device});
  }

  FakeDriver* fake_ = nullptr;
  std::unique_ptr<RandomKernels> kernels_;
  float some_[3] = {};
};

// Every kernel by its name, with its parameters as it takes them.
TEST_F(RandomKernelsTest, DrawWhatTheHostDraws) {
  constexpr int64_t kCount = 3001;
  const std::vector<double> each(2 * kCount, 0.3);
  int kernels = 0;
  for (int kind = 0; kind < kNumRandomKinds; ++kind) {
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      RandomDraw draw = {.kind = static_cast<RandomKind>(kind),
                         .dtype = static_cast<DType>(dtype),
                         .a = 0.25,
                         .b = 0.75,
                         .from = 3,
                         .range = 90,
                         .each = each.data()};
      if (!can_draw(draw.kind, draw.dtype)) continue;
      if (draw.kind == RandomKind::kGeometric) draw.a = -0.1;
      const size_t bytes = static_cast<size_t>(kCount * element_size(draw.dtype));
      std::vector<unsigned char> want(2 * bytes, 1), got = want;
      draw_numbers(draw, PhiloxStream(5, 6), want.data(), [](RunVisitor run) {
        run(10, kCount - 1);
        run(int64_t{1} << 40, 1);
        run(777, kCount);
      });
      const std::vector<IndexBox> boxes = {
          {.first = 10, .length = kCount - 1},
          {.first = int64_t{1} << 40, .at = kCount - 1, .length = 1},
          {.first = 777, .at = kCount, .length = kCount}};
      const absl::Status status =
          kernels_->fill(draw, {.seed = 5, .stream = 6}, boxes, got.data(), {.device = 0});
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(got, want) << kernel_name(draw);
      EXPECT_EQ(fake_->launches, 3 * ++kernels);
    }
  }
  EXPECT_EQ(kernels, 5 * 4 + 4 * 10);
  EXPECT_EQ(fake_->loads, 1);
  EXPECT_EQ(fake_->retains, 1);
  EXPECT_EQ(fake_->current, 0);
}

TEST_F(RandomKernelsTest, LargeTensorsTakeNoLargerGrids) {
  constexpr int64_t kCount = 5'000'000;
  std::vector<uint8_t> want(kCount), got(kCount);
  const RandomDraw draw = RandomDraw::bernoulli(DType::kBool, 0.5);
  draw_numbers(draw, PhiloxStream(5, 6), want.data(), [](RunVisitor run) { run(1, kCount); });
  const IndexBox box = {.first = 1, .length = kCount};
  int on_stream = 0;
  ASSERT_TRUE(kernels_
                  ->fill(draw, {.seed = 5, .stream = 6}, {box}, got.data(),
                         {.device = 0, .stream = &on_stream})
                  .ok());
  EXPECT_EQ(got, want);
  EXPECT_EQ(fake_->launches, 1);
  EXPECT_EQ(fake_->largest_grid, 4096);
  EXPECT_EQ(fake_->last_stream, &on_stream);
}

TEST_F(RandomKernelsTest, NothingToDrawNeedsNoGpu) {
  fake_->fails = "cuInit";
  fake_->error = kCuErrorNoDevice;
  EXPECT_TRUE(kernels_->fill(RandomDraw::uniform(DType::kF32, 0, 1), {}, {}, nullptr, {}).ok());
}

TEST_F(RandomKernelsTest, LoadedOnce) {
  ASSERT_TRUE(kernels_->load(0).ok());
  ASSERT_TRUE(kernels_->load(0).ok());
  ASSERT_TRUE(fill_some().ok());
  EXPECT_EQ(fake_->loads, 1);
  EXPECT_EQ(fake_->retains, 1);
  EXPECT_EQ(fake_->current, 0);
}

TEST_F(RandomKernelsTest, WhatThereIsNot) {
  const IndexBox box = {.length = 3};
  absl::Status status = kernels_->fill(RandomDraw::normal(DType::kI32, 0, 1), {}, {box}, some_, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("normal_i32"));
  status = fill_some(1);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("cuDeviceGet"), HasSubstr("device 1")));
  EXPECT_EQ(kernels_->load(1), status);
}

// Whichever call fails with whatever: an error that names it, the thread's context as before, and
// no trace of it when it is over.
TEST_F(RandomKernelsTest, EveryErrorOfTheDriver) {
  const struct {
    int error;
    absl::StatusCode code;
    const char* text;
  } errors[] = {
      {kCuErrorOutOfMemory, absl::StatusCode::kResourceExhausted, "an error of the fake"},
      {kCuErrorNoDevice, absl::StatusCode::kFailedPrecondition, "an error of the fake"},
      {kCuErrorNoBinaryForGpu, absl::StatusCode::kFailedPrecondition, "compute capability"},
      {kCuErrorUnsupportedPtxVersion, absl::StatusCode::kFailedPrecondition, "older than the CUDA"},
      {201, absl::StatusCode::kInternal, "unknown error (CUDA error 201)"},
      {700, absl::StatusCode::kInternal, "an error of the fake (CUDA error 700)"},
  };
  for (const char* call : {"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent",
                           "cuLibraryLoadData", "cuLibraryGetKernel", "cuLaunchKernel"}) {
    for (const auto& [error, code, text] : errors) {
      absl::StatusOr<Driver> driver = Driver::load(kLibrary);
      ASSERT_TRUE(driver.ok());
      kernels_ = std::make_unique<RandomKernels>(*driver, testing::kFakeCode);
      fake_->fails = call;
      fake_->error = error;
      const absl::Status status = fill_some();
      EXPECT_EQ(status.code(), code) << call;
      EXPECT_THAT(status.message(), AllOf(HasSubstr(call), HasSubstr(text)));
      if (std::string_view(call) != "cuLaunchKernel") {
        EXPECT_EQ(kernels_->load(0).code(), code) << call;
      }
      EXPECT_EQ(fake_->current, 0) << call;
      fake_->fails = nullptr;
      EXPECT_TRUE(fill_some().ok()) << call;
    }
  }
}

TEST_F(RandomKernelsTest, NoDriver) {
  absl::Status status = Driver::load("libdriver_that_is_not_there.so").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("no NVIDIA driver"), HasSubstr("libdriver_that_is_not_there.so")));
  // A library that is something else, or a driver from before kernels had their own handles.
  status = Driver::load("libm.so.6").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("too old: libm.so.6 has no cuInit"));
}

}  // namespace
}  // namespace shardweave

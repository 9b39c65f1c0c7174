#include "shardweave/dtensor/cuda/random_kernels.h"

#include <algorithm>
#include <type_traits>

#include "absl/strings/str_cat.h"

namespace shardweave::dtensor_internal {
namespace {

constexpr uint64_t kThreadsOfBlock = 256;
// Threads go on with further items: more blocks than a GPU runs at a time would be no faster.
constexpr uint64_t kMostBlocks = 4096;

// Makes a context current for as long as it lives.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, CuContext context)
      : driver_(driver),
        status_(driver.check("cuCtxPushCurrent", driver.cuCtxPushCurrent(context))) {}
  ~CurrentContext() {
    CuContext popped;
    if (status_.ok()) driver_.cuCtxPopCurrent(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  // Whether it is.
  const absl::Status& status() const { return status_; }

 private:
  const Driver& driver_;
  const absl::Status status_;
};

}  // namespace

absl::StatusOr<CuContext> RandomKernels::context_of(int device) {
  const absl::MutexLock lock(&mutex_);
  const auto found = contexts_.find(device);
  if (found != contexts_.end()) return found->second;
  absl::Status status = driver_.check("cuInit", driver_.cuInit(0));
  int handle = 0;
  if (status.ok()) status = driver_.check("cuDeviceGet", driver_.cuDeviceGet(&handle, device));
  CuContext context = nullptr;
  if (status.ok()) {
    status = driver_.check("cuDevicePrimaryCtxRetain",
                           driver_.cuDevicePrimaryCtxRetain(&context, handle));
  }
  if (!status.ok()) {
    return absl::Status(status.code(), absl::StrCat(status.message(), ", device ", device));
  }
  contexts_.emplace(device, context);
  return context;
}

absl::Status RandomKernels::load_code() {
  if (library_ != nullptr) return absl::OkStatus();
  absl::Status status = driver_.check(
      "cuLibraryLoadData",
      driver_.cuLibraryLoadData(&library_, code_, nullptr, nullptr, 0, nullptr, nullptr, 0));
  if (!status.ok()) library_ = nullptr;
  return status;
}

absl::StatusOr<CuKernel> RandomKernels::kernel_of(const RandomDraw& draw) {
  const absl::MutexLock lock(&mutex_);
  CuKernel& kernel = kernels_[static_cast<int>(draw.kind)][static_cast<int>(draw.dtype)];
  if (kernel != nullptr) return kernel;
  if (absl::Status status = load_code(); !status.ok()) return status;
  const std::string name = kernel_name(draw);
  absl::Status status = driver_.check("cuLibraryGetKernel",
                                      driver_.cuLibraryGetKernel(&kernel, library_, name.c_str()));
  if (!status.ok()) {
    kernel = nullptr;
    return absl::Status(status.code(), absl::StrCat(status.message(), ", kernel ", name));
  }
  return kernel;
}

absl::Status RandomKernels::load(int device) {
  absl::StatusOr<CuContext> context = context_of(device);
  if (!context.ok()) return context.status();
  const CurrentContext current(driver_, *context);
  if (!current.status().ok()) return current.status();
  for (int kind = 0; kind < kNumRandomKinds; ++kind) {
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      const RandomDraw draw = {.kind = static_cast<RandomKind>(kind),
                               .dtype = static_cast<DType>(dtype)};
      if (!can_draw(draw.kind, draw.dtype)) continue;
      if (absl::Status status = kernel_of(draw).status(); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status RandomKernels::fill(const RandomDraw& draw, const RandomSource& source,
                                 absl::Span<const IndexBox> boxes, void* out,
                                 const OnDevice& where) {
  if (!can_draw(draw.kind, draw.dtype)) {
    return absl::UnimplementedError(
        absl::StrCat("random numbers on a GPU: there is no ", kernel_name(draw)));
  }
  if (boxes.empty()) return absl::OkStatus();
  absl::StatusOr<CuContext> context = context_of(where.device);
  if (!context.ok()) return context.status();
  const CurrentContext current(driver_, *context);
  if (!current.status().ok()) return current.status();
  absl::StatusOr<CuKernel> kernel = kernel_of(draw);
  if (!kernel.ok()) return kernel.status();
  absl::Status status;
  with_functor(draw, [&](auto functor) {
    using Functor = decltype(functor);
    RandomSource from = source;
    auto* elements = static_cast<typename Functor::Element*>(out);
    for (IndexBox box : boxes) {
      const uint64_t threads = num_items<typename Functor::Number>(box);
      const uint64_t blocks =
          std::min(kMostBlocks, (threads + kThreadsOfBlock - 1) / kThreadsOfBlock);
      void* parameters[] = {&from, &functor, &box, static_cast<void*>(&elements)};
      status = driver_.check(
          "cuLaunchKernel",
          driver_.cuLaunchKernel(*kernel, static_cast<unsigned>(blocks), 1, 1, kThreadsOfBlock, 1,
                                 1, 0, static_cast<CuStream>(where.stream), parameters, nullptr));
      if (!status.ok()) {
        status = absl::Status(status.code(),
                              absl::StrCat(status.message(), ", kernel ", kernel_name(draw)));
        return;
      }
    }
  });
  return status;
}

}  // namespace shardweave::dtensor_internal

// Kernels that a driver has loaded.
//
//   absl::StatusOr<Driver> driver = Driver::load("");
//   RandomKernels kernels(*std::move(driver), code);
//   absl::Status status = kernels.fill(draw, source, boxes, memory, {.device = 1});
//
// random_fill.h has the contract: there is one of these for a process. Any thread may use it.
#pragma once

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "shardweave/dtensor/cuda/driver.h"
#include "shardweave/dtensor/cuda/random_fill.h"

namespace shardweave::dtensor_internal {

class RandomKernels {
 public:
  // `code`: a fat binary with the kernels of random_kernels.cu, or what the driver takes for one.
  // It must live as long as the process.
  RandomKernels(const Driver& driver, const void* code) : driver_(driver), code_(code) {}
  RandomKernels(const RandomKernels&) = delete;
  RandomKernels& operator=(const RandomKernels&) = delete;

  absl::Status load(int device);
  absl::Status fill(const RandomDraw& draw, const RandomSource& source,
                    absl::Span<const IndexBox> boxes, void* out, const OnDevice& where);

 private:
  absl::StatusOr<CuContext> context_of(int device) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<CuKernel> kernel_of(const RandomDraw& draw) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status load_code() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Driver driver_;
  const void* const code_;
  absl::Mutex mutex_;
  // Primary contexts, of which this keeps one reference each until the process ends.
  absl::flat_hash_map<int, CuContext> contexts_ ABSL_GUARDED_BY(mutex_);
  CuLibrary library_ ABSL_GUARDED_BY(mutex_) = nullptr;
  CuKernel kernels_[kNumRandomKinds][kNumDTypes] ABSL_GUARDED_BY(mutex_) = {};
};

}  // namespace shardweave::dtensor_internal

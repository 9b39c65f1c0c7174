#include "shardweave/dtensor/cuda/random_fill.h"

#include <cstdlib>

#include "shardweave/dtensor/cuda/driver.h"
#include "shardweave/dtensor/cuda/random_kernels.h"

// The kernels for all architectures: see BUILD.
extern "C" const unsigned char shardweave_random_kernels[];

namespace shardweave::dtensor_internal {
namespace {

absl::StatusOr<RandomKernels*> make_kernels() {
  const char* const file = std::getenv("SHARDWEAVE_CUDA_DRIVER_LIBRARY");
  absl::StatusOr<Driver> driver = Driver::load(file == nullptr ? "" : file);
  if (!driver.ok()) return driver.status();
  return new RandomKernels(*driver, shardweave_random_kernels);
}

// Made once, and never destroyed: other threads may draw while the process ends.
const absl::StatusOr<RandomKernels*>& the_kernels() {
  static const auto* const kernels = new absl::StatusOr<RandomKernels*>(make_kernels());
  return *kernels;
}

}  // namespace

bool has_random_kernels() {
  return true;
}

absl::Status load_random_kernels(int device) {
  const absl::StatusOr<RandomKernels*>& kernels = the_kernels();
  return kernels.ok() ? (*kernels)->load(device) : kernels.status();
}

absl::Status fill_random(const RandomDraw& draw, const RandomSource& source,
                         absl::Span<const IndexBox> boxes, void* out, const OnDevice& where) {
  const absl::StatusOr<RandomKernels*>& kernels = the_kernels();
  return kernels.ok() ? (*kernels)->fill(draw, source, boxes, out, where) : kernels.status();
}

}  // namespace shardweave::dtensor_internal

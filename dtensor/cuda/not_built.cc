// In place of random_fill.cc where there are no kernels.
#include "shardweave/dtensor/cuda/random_fill.h"

namespace shardweave::dtensor_internal {
namespace {

absl::Status not_built() {
  return absl::UnimplementedError(
      "random numbers on a GPU: this program was built without CUDA kernels; build it with "
      "--config=cuda");
}

}  // namespace

bool has_random_kernels() {
  return false;
}

absl::Status load_random_kernels(int) {
  return not_built();
}

absl::Status fill_random(const RandomDraw&, const RandomSource&, absl::Span<const IndexBox>, void*,
                         const OnDevice&) {
  return not_built();
}

}  // namespace shardweave::dtensor_internal

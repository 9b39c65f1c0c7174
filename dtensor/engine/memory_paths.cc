// Composites of LibTorch that read their input's memory where nothing is to be differentiated, with
// no operator in between that the fallback for DTensors (dispatch.cc) would see.
#include <tuple>

#include "ATen/ops/max_pool1d_native.h"
#include "ATen/ops/max_pool1d_with_indices.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "torch/library.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

// The path that it takes for inputs that require grad. A plain tensor gets what it always gets.
at::Tensor max_pool1d(const at::Tensor& self, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  if (!is_dtensor(self.unsafeGetTensorImpl())) {
    return at::native::max_pool1d(self, kernel_size, stride, padding, dilation, ceil_mode);
  }
  return std::get<0>(
      at::max_pool1d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode));
}

}  // namespace
}  // namespace shardweave

// (In inference mode there is no autograd, and the fallback sees it: rules/spatial.cc.)
TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) {
  m.impl("max_pool1d", &shardweave::max_pool1d);
}

#include "shardweave/dtensor/testing/pieces.h"

#include <algorithm>

#include "ATen/TensorOperators.h"
#include "ATen/ops/allclose.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/maximum.h"
#include "ATen/ops/minimum.h"

namespace shardweave::testing {

at::Tensor reduce(const Tensors& pieces, ReduceOp op) {
  at::Tensor result = pieces[0];
  for (size_t r = 1; r < pieces.size(); ++r) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        result = result + pieces[r];
        break;
      case ReduceOp::kMin:
        result = at::minimum(result, pieces[r]);
        break;
      case ReduceOp::kMax:
        result = at::maximum(result, pieces[r]);
        break;
      case ReduceOp::kProduct:
        result = result * pieces[r];
        break;
    }
  }
  if (op != ReduceOp::kAvg) return result.to(pieces[0].scalar_type());
  return (result / static_cast<int64_t>(pieces.size())).to(pieces[0].scalar_type());
}

bool has_values(const Sample& sample, size_t k, const at::Tensor& result) {
  const auto& unset = sample.unset_on_gpus;
  const bool is_unset = result.defined() && result.is_cuda() &&
                        std::find(unset.begin(), unset.end(), k) != unset.end();
  return sample.values && !is_unset;
}

bool close(const at::Tensor& got, const at::Tensor& want, double tolerance) {
  const at::ScalarType dtype = want.scalar_type();
  if (!c10::isFloatingType(dtype) && !c10::isComplexType(dtype)) return at::equal(got, want);
  return at::allclose(got, want, tolerance, tolerance, /*equal_nan=*/true);
}

}  // namespace shardweave::testing

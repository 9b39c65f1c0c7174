// What the ranks hold, put together again and compared with the whole. For the validators.
#pragma once

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/testing/op_check.h"
#include "shardweave/dtensor/testing/sample.h"

namespace shardweave::testing {

// The reduction of the summands (factors, ...) that ranks hold.
at::Tensor reduce(const Tensors& pieces, ReduceOp op);

// Equal, or nearly so for floating point and complex numbers. Shapes and dtypes are those of
// `want`.
bool close(const at::Tensor& got, const at::Tensor& want, double tolerance);

// Whether what a call has made of result `k` is to be compared.
bool has_values(const Sample& sample, size_t k, const at::Tensor& result);

}  // namespace shardweave::testing

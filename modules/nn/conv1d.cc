#include "shardweave/modules/nn/conv1d.h"

#include <vector>

#include "ATen/ops/addmm.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"

namespace shardweave::nn {

Conv1dImpl::Conv1dImpl(int64_t in, int64_t out)
    : weight(register_parameter("weight", at::empty({in, out}))),
      bias(register_parameter("bias", at::zeros({out}))) {}

at::Tensor Conv1dImpl::forward(const at::Tensor& x) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(1);
  return at::addmm(bias, x.reshape({-1, x.size(-1)}), weight).view(sizes);
}

}  // namespace shardweave::nn

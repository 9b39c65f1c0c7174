#include "shardweave/modules/nn/rms_norm.h"

#include "ATen/ops/ones.h"
#include "ATen/ops/rms_norm.h"

namespace shardweave::nn {

RMSNormImpl::RMSNormImpl(int64_t size, std::optional<double> eps)
    : weight(register_parameter("weight", at::ones({size}))), eps_(eps) {}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  return at::rms_norm(x, weight.sizes(), weight, eps_);
}

}  // namespace shardweave::nn

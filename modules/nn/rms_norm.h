// Root mean square layer normalization (Zhang and Sennrich): x / sqrt(mean(x^2) + eps) * weight.
//
//   nn::RMSNorm norm(/*size=*/4096, /*eps=*/1e-5);
//   const at::Tensor y = norm(x);  // of the last dimension
#pragma once

#include <cstdint>
#include <optional>

#include "ATen/core/Tensor.h"
#include "shardweave/modules/hooked.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"

namespace shardweave::nn {

struct RMSNormImpl : torch::nn::Module {
  // nullopt: the smallest number that the dtype tells from 1.
  explicit RMSNormImpl(int64_t size, std::optional<double> eps = 1e-6);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;

 private:
  const std::optional<double> eps_;
};
using RMSNorm = torch::nn::ModuleHolder<Hooked<RMSNormImpl>>;

}  // namespace shardweave::nn

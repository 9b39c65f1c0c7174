// GPT-2's linear layer (transformers' Conv1D): x @ weight + bias, whose weight is [in, out], a Linear's
// transposed.
//
//   nn::Conv1d layer(768, 3072);
//   layer(x);  // [..., 768] -> [..., 3072]
#pragma once

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "shardweave/modules/hooked.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"

namespace shardweave::nn {

struct Conv1dImpl : torch::nn::Module {
  Conv1dImpl(int64_t in, int64_t out);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;
};
using Conv1d = torch::nn::ModuleHolder<Hooked<Conv1dImpl>>;

}  // namespace shardweave::nn

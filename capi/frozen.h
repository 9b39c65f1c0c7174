// What a host has frozen: swv_tensor_set_requires_grad(tensor, 0) holds when a module that is to be
// trained gets the tensor, while one that nobody has asked about, as every fresh tensor, is trained.
// Both do not require grad until then, so what was said is kept on the tensor: as the name that
// LibTorch has for a variable, which goes with it wherever its handles do and is read nowhere else.
#pragma once

#include "ATen/core/Tensor.h"
#include "torch/csrc/autograd/variable.h"

namespace shardweave::capi {

inline constexpr char kFrozen[] = "shardweave: frozen";

inline bool is_frozen(const at::Tensor& tensor) {
  return !tensor.requires_grad() && tensor.name() == kFrozen;
}

inline void set_frozen(const at::Tensor& tensor, bool frozen) {
  if (frozen != (tensor.name() == kFrozen)) {
    torch::autograd::impl::set_name(tensor, frozen ? kFrozen : "");
  }
}

}  // namespace shardweave::capi

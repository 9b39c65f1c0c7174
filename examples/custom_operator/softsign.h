// An operator of one's own, with a derivative and sharding rules:
//
//   mylib::softsign(x, scale) = x / (scale + |x|)      scale: one number per feature (the last dimension of x)
#pragma once

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/rule.h"

namespace custom_operator {

at::Tensor softsign(const at::Tensor& x, const at::Tensor& scale);

// What the operator and its derivative give when they are cut along one mesh dimension.
shardweave::Rule softsign_rule();
shardweave::Rule softsign_backward_rule();

}  // namespace custom_operator

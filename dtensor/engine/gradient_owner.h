// Who brings the gradient of a parameter elsewhere than to where the parameter lies: ZeRO
// (modules/zero.h). finish_grad_sync() leaves it to them.
//
//   own_gradient(parameter, owner, i);    // owner->came(i) in backward, while the owner lives
//   if (auto owner = owner_of_gradient(parameter)) owner->bring_gradients(cause);
//
// Internal to dtensor/ and modules/.
#pragma once

#include <cstddef>
#include <memory>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/engine/redistribute.h"

namespace shardweave::dtensor_internal {

class GradientOwner {
 public:
  virtual ~GradientOwner() = default;
  // A gradient has been accumulated. On autograd's thread.
  virtual void came(size_t index) = 0;
  // Brings those of all parameters that it owns. Collective.
  virtual void bring_gradients(const Cause& cause) = 0;
};

void own_gradient(const at::Tensor& parameter, const std::weak_ptr<GradientOwner>& owner,
                  size_t index);
void disown_gradient(const at::Tensor& parameter);
// Null: nobody.
std::shared_ptr<GradientOwner> owner_of_gradient(const at::Tensor& parameter);

}  // namespace shardweave::dtensor_internal

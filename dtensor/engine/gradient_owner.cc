#include "shardweave/dtensor/engine/gradient_owner.h"

#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/variable.h"

namespace shardweave::dtensor_internal {
namespace {

// Hangs off the tensor itself, whatever becomes of its node in autograd's graph.
class TellsOwner final : public torch::autograd::PostAccumulateGradHook {
 public:
  TellsOwner(std::weak_ptr<GradientOwner> owner_in, size_t index)
      : owner(std::move(owner_in)), index_(index) {}
  void operator()(const at::Tensor& /*parameter*/) override {
    if (const std::shared_ptr<GradientOwner> alive = owner.lock()) alive->came(index_);
  }

  const std::weak_ptr<GradientOwner> owner;

 private:
  const size_t index_;
};

}  // namespace

void own_gradient(const at::Tensor& parameter, const std::weak_ptr<GradientOwner>& owner,
                  size_t index) {
  torch::autograd::impl::set_post_acc_grad_hooks(parameter,
                                                 std::make_unique<TellsOwner>(owner, index));
}

void disown_gradient(const at::Tensor& parameter) {
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
}

std::shared_ptr<GradientOwner> owner_of_gradient(const at::Tensor& parameter) {
  if (torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  const auto* hook =
      dynamic_cast<const TellsOwner*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
  return hook == nullptr ? nullptr : hook->owner.lock();
}

}  // namespace shardweave::dtensor_internal

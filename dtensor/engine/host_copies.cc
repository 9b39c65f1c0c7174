#include "shardweave/dtensor/engine/host_copies.h"

#include <memory>
#include <utility>

#include "ATen/ops/empty.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/functions/accumulate_grad.h"
#include "torch/csrc/autograd/variable.h"

namespace shardweave::dtensor_internal {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::variable_list;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using StrongTensor = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// The leaf owns it, so it borrows the leaf: gradients of one that is gone are nobody's.
class AccumulateBeside final : public AccumulateGrad {
 public:
  AccumulateBeside(const at::Tensor& leaf, c10::Device device)
      : AccumulateGrad(at::Tensor(StrongTensor::reclaim(leaf.unsafeGetTensorImpl()))),
        leaf_(leaf.getIntrusivePtr()) {
    // The device says which thread runs it. That it is some subclass, that gradients may come from
    // elsewhere.
    clear_input_metadata();
    add_input_metadata(leaf.options().device(device), leaf.sym_sizes(),
                       /*is_tensor_subclass=*/true, /*is_nested=*/false, leaf.grad_dtype());
  }
  ~AccumulateBeside() override { variable.unsafeReleaseTensorImpl(); }

  variable_list apply(variable_list&& grads) override {
    const StrongTensor leaf = leaf_.lock();
    if (!leaf.defined()) return {};
    if (grads[0].defined() && grads[0].device() != leaf->device()) {
      grads[0] = grads[0].to(leaf->device());
    }
    return AccumulateGrad::apply(std::move(grads));
  }
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& tensor_pre_hooks() noexcept
      override {
    return leaf_.expired() ? no_hooks_ : AccumulateGrad::tensor_pre_hooks();
  }
  std::unique_ptr<torch::autograd::PostAccumulateGradHook>& tensor_post_acc_grad_hooks()
      const noexcept override {
    return leaf_.expired() ? no_hook_ : AccumulateGrad::tensor_post_acc_grad_hooks();
  }

 private:
  const WeakTensor leaf_;
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> no_hooks_;
  mutable std::unique_ptr<torch::autograd::PostAccumulateGradHook> no_hook_;
};

}  // namespace

c10::Stream copy_lane(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

at::Tensor host_memory(int64_t numel, at::ScalarType dtype) {
  const at::TensorOptions options(dtype);
  try {
    return at::empty({numel}, options.pinned_memory(true));
  } catch (const c10::Error& error) {
    TORCH_WARN_ONCE(
        "CPU offload: this memory could not be pinned, so that copies to and from the "
        "device wait for the host (",
        error.what_without_backtrace(), ")");
    return at::empty({numel}, options);
  }
}

void wait_for_current(const c10::Stream& stream) {
  const c10::Device device = stream.device();
  c10::Event now(device.type());
  now.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  now.block(stream);
}

HostCopies::HostCopies(c10::Stream lane, absl::Span<const at::Tensor> tensors) {
  if (tensors.empty()) return;
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) numel += tensor.numel();
  const at::Tensor memory = host_memory(numel, tensors[0].scalar_type());
  const c10::impl::VirtualGuardImpl device(lane.device_type());
  wait_for_current(lane);
  const c10::StreamGuard on(lane);
  int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    there_.push_back(memory.narrow(0, at, tensor.numel()).view(tensor.sizes()));
    at += tensor.numel();
    there_.back().copy_(tensor, /*non_blocking=*/true);
    device.recordDataPtrOnStream(tensor.storage().data_ptr(), lane);
  }
  landed_.emplace(lane.device_type());
  landed_->record(lane);
}

HostCopies::~HostCopies() {
  try {
    wait();
  } catch (const c10::Error&) {  // of the device: whoever uses that next hears it
  }
}

void HostCopies::wait() {
  if (!landed_.has_value()) return;
  landed_->synchronize();
  landed_.reset();
}

void accumulate_beside(c10::Device device, const at::Tensor& leaf) {
  namespace impl = torch::autograd::impl;
  auto& hooks = impl::materialize_autograd_meta(leaf)->cpp_hooks_list_;
  if (dynamic_cast<AccumulateBeside*>(impl::try_get_grad_accumulator(leaf).get()) != nullptr)
    return;
  // Which the node asks for, where nothing may fail.
  c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const auto node = std::make_shared<AccumulateBeside>(leaf, device);
  impl::set_grad_accumulator(leaf, node);
  if (hooks == nullptr) impl::create_cpp_hook(leaf);
  hooks->push_back([node](const at::TensorBase& grad) { return grad; });  // owns it
}

}  // namespace shardweave::dtensor_internal

#include "shardweave/dtensor/engine/host_copies.h"

#include <utility>

#include "ATen/ops/empty.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "torch/csrc/autograd/functions/accumulate_grad.h"
#include "torch/csrc/autograd/variable.h"

namespace shardweave::dtensor_internal {
namespace {

// Its second input never comes: it says on which device's thread the node runs.
class AccumulateBeside final : public torch::autograd::AccumulateGrad {
 public:
  AccumulateBeside(const at::Tensor& leaf, c10::Device device) : AccumulateGrad(leaf) {
    add_input_metadata(leaf.options().device(device), torch::autograd::SymIntSmallVec(),
                       /*is_tensor_subclass=*/false, /*is_nested=*/false, std::nullopt);
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    grads.resize(1);
    return AccumulateGrad::apply(std::move(grads));
  }
};

}  // namespace

c10::Stream copy_lane(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType dtype) {
  const at::TensorOptions options(dtype);
  try {
    return at::empty(sizes, options.pinned_memory(true));
  } catch (const c10::Error&) {  // there is no such memory, or no more of it
    return at::empty(sizes, options);
  }
}

void wait_for_current(const c10::Stream& stream) {
  const c10::Device device = stream.device();
  c10::Event now(device.type());
  now.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  now.block(stream);
}

HostCopies::~HostCopies() {
  try {
    wait();
  } catch (const c10::Error&) {  // of the device: whoever uses that next hears it
  }
}

at::Tensor HostCopies::begin(const at::Tensor& tensor) {
  const at::Tensor there = host_memory(tensor.sizes(), tensor.scalar_type());
  wait_for_current(lane_);
  const c10::StreamGuard on(lane_);
  there.copy_(tensor, /*non_blocking=*/true);
  c10::impl::VirtualGuardImpl(lane_.device_type())
      .recordDataPtrOnStream(tensor.storage().data_ptr(), lane_);
  if (!landed_.has_value()) landed_.emplace(lane_.device_type());
  landed_->record(lane_);
  return there;
}

void HostCopies::wait() {
  if (!landed_.has_value()) return;
  landed_->synchronize();
  landed_.reset();
}

torch::autograd::Edge accumulation_on(c10::Device device, const at::Tensor& leaf) {
  std::shared_ptr<torch::autograd::Node> node =
      torch::autograd::impl::try_get_grad_accumulator(leaf);
  if (dynamic_cast<AccumulateBeside*>(node.get()) == nullptr) {
    node = std::make_shared<AccumulateBeside>(leaf, device);
    torch::autograd::impl::set_grad_accumulator(leaf, node);
  }
  return {std::move(node), 0};
}

}  // namespace shardweave::dtensor_internal

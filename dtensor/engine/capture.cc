#include "shardweave/dtensor/engine/capture.h"

#include <algorithm>

#include "ATen/ops/empty.h"
#include "c10/core/GradMode.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "shardweave/dtensor/engine/mesh_context.h"

namespace shardweave::dtensor_internal {
namespace {

thread_local Capture* the_current = nullptr;

}  // namespace

Capture* Capture::current() {
  return the_current;
}

Capture::Capture(MeshContext& context, c10::Device device)
    : context_(context), device_(device), random_(context.random), offset_(number(at::kLong)) {}

Capture::Scope::Scope(Capture& capture) : capture_(capture) {
  the_current = capture.context_.capture = &capture;
  capture.context_.on_device.captured = true;
  ++capture.context_.generation;
}

// Nothing has been drawn yet, and what was remembered is not there.
Capture::Scope::~Scope() {
  MeshContext& context = capture_.context_;
  the_current = context.capture = nullptr;
  context.on_device.captured = false;
  ++context.generation;
  capture_.draws_ = context.random.offset - capture_.random_.offset;
  context.random = capture_.random_;
}

at::Tensor Capture::number(at::ScalarType dtype) const {
  const c10::impl::VirtualGuardImpl cuda(device_.type());
  const c10::StreamGuard not_captured(cuda.getDefaultStream(device_));
  return at::empty({}, at::TensorOptions(dtype).device(device_));
}

void Capture::uses(Communicator& group) {
  if (group.size() == 1) return;
  const bool known = std::find(groups_.begin(), groups_.end(), &group) != groups_.end();
  if (!known) groups_.push_back(&group);
}

const uint64_t* Capture::random_offset(const PhiloxState& state) const {
  if (state.seed != random_.seed || state.offset < random_.offset) {
    throw Error(
        absl::UnimplementedError("random numbers of a state that was set while a step is captured: "
                                 "a replay draws those that "
                                 "follow the mesh's"));
  }
  return reinterpret_cast<const uint64_t*>(offset_.const_data_ptr<int64_t>());
}

void Capture::prepare() {
  if (draws_ != 0 && context_.random.seed != random_.seed) {
    throw Error(absl::FailedPreconditionError(
        "the mesh has another seed than when the step was captured: capture it again"));
  }
  const c10::AutoGradMode no_grad(false);
  for (const std::function<void()>& action : actions_) action();
  if (draws_ == 0) return;
  offset_.fill_(static_cast<int64_t>(context_.random.offset - random_.offset));
  context_.random.offset += draws_;
}

void check_drawn_by_host(const MeshContext& context) {
  if (context.capture == nullptr) return;
  throw Error(absl::FailedPreconditionError(
      "random numbers that the host draws, in a step that is captured: a replay would have the "
      "same. "
      "Programs built with --config=cuda draw most kinds on the GPU"));
}

}  // namespace shardweave::dtensor_internal

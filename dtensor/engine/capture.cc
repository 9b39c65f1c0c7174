#include "shardweave/dtensor/engine/capture.h"

#include <algorithm>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/engine/mesh_context.h"

namespace shardweave::dtensor_internal {
namespace {

constexpr int64_t kNumbers = 1024;

thread_local Capture* the_current = nullptr;
thread_local const MeshContext* the_mesh = nullptr;

}  // namespace

Capture* Capture::current() {
  return the_current;
}

Capture::Capture(MeshContext& context, c10::Device device)
    : context_(context),
      numbers_(at::empty({kNumbers, 8}, at::TensorOptions(at::kByte).device(device))),
      random_(context.random.state),
      offset_(number(at::kLong)) {}

Capture::Scope::Scope(Capture& capture) : capture_(capture) {
  the_current = capture.context_.captures.under_way = &capture;
  the_mesh = &capture.context_;
  ++capture.context_.captures.generation;
}

// Nothing has been drawn yet, and what was remembered is not there.
Capture::Scope::~Scope() {
  MeshContext& context = capture_.context_;
  the_current = context.captures.under_way = nullptr;
  the_mesh = nullptr;
  ++context.captures.generation;
  capture_.draws_ = context.random.state.offset - capture_.random_.offset;
  context.random.state = capture_.random_;
}

at::Tensor Capture::number(at::ScalarType dtype) {
  if (given_ == kNumbers) {
    throw Error(absl::ResourceExhaustedError(absl::StrCat(
        "a step that is captured wants more than ", kNumbers, " numbers anew in each replay")));
  }
  const int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  return numbers_.select(0, given_++).narrow(0, 0, bytes).view(dtype).squeeze(0);
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
  if (draws_ != 0 && context_.random.state.seed != random_.seed) {
    throw Error(absl::FailedPreconditionError(
        "the mesh has another seed than when the step was captured: capture it again"));
  }
  const c10::AutoGradMode no_grad(false);
  for (const std::function<void()>& check : checks_) check();
  for (const std::function<void()>& action : actions_) action();
  if (draws_ == 0) return;
  offset_.fill_(static_cast<int64_t>(context_.random.state.offset - random_.offset));
  context_.random.state.offset += draws_;
}

void check_captured_mesh(const MeshContext& context) {
  if (the_mesh == nullptr || the_mesh == &context) return;
  throw Error(absl::FailedPreconditionError(
      "something is done on another mesh than that of the step that is captured"));
}

void check_drawn_by_host(const MeshContext& context) {
  if (context.captures.under_way == nullptr) return;
  throw Error(absl::FailedPreconditionError(
      "random numbers that the host draws, in a step that is captured: replays would repeat them; "
      "programs built with --config=cuda draw most kinds on the GPU"));
}

}  // namespace shardweave::dtensor_internal

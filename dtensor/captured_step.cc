#include "shardweave/dtensor/captured_step.h"

#include <exception>
#include <optional>
#include <utility>

#include "ATen/ops/zeros.h"
#include "c10/core/Event.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/cuda/graph.h"
#include "shardweave/dtensor/cuda/random_fill.h"
#include "shardweave/dtensor/engine/capture.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_work.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/variable.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

constexpr char kCapture[] = "CapturedStep::capture";
constexpr char kReplay[] = "CapturedStep::replay";

bool has_cuda() {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].load() != nullptr;
}

// The node that adds up a parameter's gradient, where a hook keeps it alive, works on the stream on
// which it was made; backward would leave the captured one for it.
void accumulate_on_current_stream(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
    if (node == nullptr) continue;
    node->clear_input_metadata();
    node->add_input_metadata(parameter);
  }
}

void check(const MeshContext& context, const std::vector<at::Tensor>& parameters,
           const std::optional<c10::Device>& device) {
  const auto refuse = [](absl::Status why) { throw Error(kCapture, std::move(why)); };
  if (!device.has_value()) {
    refuse(absl::FailedPreconditionError(
        "a step is captured on a GPU, and LibTorch has no CUDA here: load_cuda() comes first"));
  }
  if (Capture::current() != nullptr || context.capture != nullptr) {
    refuse(absl::FailedPreconditionError("a step is being captured already"));
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].defined() || parameters[i].device() != *device) {
      refuse(absl::InvalidArgumentError(str_cat(
          "parameter ", i, " is ",
          parameters[i].defined() ? str_cat("on ", parameters[i].device().str()) : "undefined",
          "; wanted those on the current GPU, ", device->str())));
    }
  }
}

}  // namespace

struct CapturedStep::State {
  State(MeshPtr mesh_in, std::shared_ptr<MeshContext> context_in, c10::Device device_in)
      : mesh(std::move(mesh_in)),
        context(std::move(context_in)),
        device(device_in),
        capture(*context, device),
        watched(at::zeros({1}, at::TensorOptions(at::kInt).device(device))) {}
  // Its memory is another's from then on.
  ~State() {
    try {
      if (last.has_value()) last->synchronize();
    } catch (const std::exception&) {  // the device is lost: so are its tensors
    }
  }

  void replay() {
    throw_if_error(context->on_device.wait_on(current_stream(device)));
    for (const Communicator* group : capture.groups()) throw_if_error(group->health());
    // What is whole has the weights of before.
    if (context->fsdp != nullptr) context->fsdp->reshard();
    capture.prepare();
    graph->replay();
    ++context->generation;
    ++replays;
    if (!last.has_value()) last.emplace(c10::kCUDA);
    const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
    last->record(cuda.getStream(device));
    // Whoever does not come to it is found missing, by the time an operation has.
    const Buffer word = comm_buffer(watched);
    for (Communicator* group : capture.groups()) {
      const TensorWork work(*context,
                            group->all_reduce(word, word, ReduceOp::kMax,
                                              {.tag = "captured step",
                                               .fingerprint = static_cast<uint64_t>(replays),
                                               .stream = current_stream(device)}),
                            device);
      throw_if_error(work.wait());
    }
  }

  const MeshPtr mesh;
  const std::shared_ptr<MeshContext> context;
  const c10::Device device;
  std::unique_ptr<CudaGraph> graph;
  Capture capture;
  const at::Tensor watched;
  int64_t replays = 0;
  std::optional<c10::Event> last;  // replay
};

CapturedStep CapturedStep::capture(const MeshPtr& mesh, const std::vector<at::Tensor>& parameters,
                                   const std::function<void()>& step, std::source_location where) {
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  Agreement agreement(*context, {.name = kCapture, .where = where});
  std::optional<c10::Device> device;
  if (has_cuda()) device = c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
  check(*context, parameters, device);
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  const std::string_view backend = mesh->world()->backend_name();
  if (mesh->mesh().size() > 1 && backend != "nccl") {
    throw Error(kCapture, absl::FailedPreconditionError(str_cat(
                              "the ranks communicate by '", backend,
                              "', where the host takes part in each collective; wanted nccl")));
  }
  absl::StatusOr<std::unique_ptr<CudaGraph>> graph = CudaGraph::create();
  if (!graph.ok()) throw Error(kCapture, graph.status());

  auto state = std::make_unique<State>(mesh, context, *device);
  if (has_random_kernels()) load_random_kernels(device->index()).IgnoreError();
  throw_if_error(context->on_device.wait());
  if (context->fsdp != nullptr) context->fsdp->reshard();
  cuda.synchronizeDevice(device->index());

  // What was on the default stream is there; a capture wants another one.
  {
    const c10::StreamGuard on(cuda.getStreamFromGlobalPool(*device));
    accumulate_on_current_stream(parameters);
    (*graph)->begin();
    std::exception_ptr error;
    {
      const Capture::Scope scope(state->capture);
      try {
        step();
        if (context->fsdp != nullptr) context->fsdp->reshard();
        throw_if_error(context->on_device.wait_on(current_stream(*device)));
      } catch (...) {
        error = std::current_exception();
      }
    }
    try {
      (*graph)->end();
    } catch (...) {
      if (error == nullptr) error = std::current_exception();
    }
    if (error != nullptr) {
      const c10::StreamGuard back(on.original_stream());
      accumulate_on_current_stream(parameters);
      std::rethrow_exception(error);
    }
  }
  accumulate_on_current_stream(parameters);
  state->graph = *std::move(graph);
  const std::optional<Difference> differs =
      agreement.reach({state->capture.draws(), state->capture.groups().size()});
  if (differs.has_value()) {
    throw Error(kCapture, absl::InvalidArgumentError(str_cat(
                              "ranks ", differs->ranks[0], " and ", differs->ranks[1],
                              " have captured different steps: they draw, or communicate, unlike "
                              "each other")));
  }
  return CapturedStep(std::move(state));
}

CapturedStep::CapturedStep(std::unique_ptr<State> state) : state_(std::move(state)) {}
CapturedStep::~CapturedStep() = default;
CapturedStep::CapturedStep(CapturedStep&&) noexcept = default;
CapturedStep& CapturedStep::operator=(CapturedStep&&) noexcept = default;

void CapturedStep::replay() {
  try {
    state_->replay();
  } catch (const Error& error) {
    throw Error(kReplay, error.status());
  }
}

int64_t CapturedStep::replays() const {
  return state_->replays;
}

}  // namespace shardweave

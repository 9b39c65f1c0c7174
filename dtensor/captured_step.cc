#include "shardweave/dtensor/captured_step.h"

#include <exception>
#include <optional>
#include <utility>

#include "ATen/autocast_mode.h"
#include "ATen/ops/zeros.h"
#include "c10/core/DeviceGuard.h"
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
#include "shardweave/dtensor/engine/provenance.h"
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

void check_not_capturing(const MeshContext& context) {
  if (Capture::current() == nullptr && context.captures.under_way == nullptr) return;
  throw Error(kCapture, absl::FailedPreconditionError("a step is being captured already"));
}

void check(const std::vector<at::Tensor>& parameters, const std::optional<c10::Device>& device) {
  const auto refuse = [](absl::Status why) { throw Error(kCapture, std::move(why)); };
  if (!device.has_value()) {
    refuse(absl::FailedPreconditionError(
        "a step is captured on a GPU, and LibTorch has no CUDA here: load_cuda() comes first"));
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

// The parameters' gradients: before a capture, and those that replays write.
class CapturedStep::Gradients {
 public:
  explicit Gradients(const std::vector<at::Tensor>& parameters) : parameters_(parameters) {
    for (const at::Tensor& p : parameters_) before_.push_back(p.grad());
  }
  // The capture is complete: `parameters` have those that replays write.
  void keep() {
    for (const at::Tensor& p : parameters_) captured_.push_back(p.grad());
  }
  // It is not: what they have now holds nothing.
  void put_back() const {
    for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = before_[i];
  }
  // After a replay. Of those that the step does not have, as they are.
  void show() const {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (captured_[i].defined()) parameters_[i].mutable_grad() = captured_[i];
    }
  }

 private:
  const std::vector<at::Tensor> parameters_;
  // Kept: a step that does not make its gradients anew adds to these.
  std::vector<at::Tensor> before_, captured_;
};

struct CapturedStep::State {
  State(MeshPtr mesh_in, std::shared_ptr<MeshContext> context_in, c10::Device device_in,
        uint64_t number_in, const std::vector<at::Tensor>& parameters)
      : mesh(std::move(mesh_in)),
        context(std::move(context_in)),
        device(device_in),
        number(number_in),
        gradients(parameters),
        capture(*context, device),
        watched(at::zeros({1}, at::TensorOptions(at::kInt).device(device))) {}
  // Its memory is another's from then on.
  ~State() {
    try {
      if (last.has_value()) last->synchronize();
    } catch (const std::exception&) {  // the device is lost: so are its tensors
    }
  }

  // Whatever happens, nothing is left half captured: on the captured stream.
  void record(const std::function<void()>& step) {
    graph->begin();
    std::exception_ptr error;
    const auto attempt = [&](const std::function<void()>& part) {
      try {
        part();
      } catch (...) {
        if (error == nullptr) error = std::current_exception();
      }
    };
    {
      const Capture::Scope scope(capture);
      attempt(step);
      // What is whole was gathered in the graph, and what is under way is to end in it.
      attempt([&] {
        if (context->gradients.fsdp != nullptr) context->gradients.fsdp->reshard();
      });
      attempt([&] { throw_if_error(context->on_device.wait_on(current_stream(device))); });
    }
    bool is_complete = false;
    attempt([&] {
      graph->end();
      is_complete = true;
    });
    if (!is_complete) CudaGraph::abandon(std::move(graph));
    if (error != nullptr) std::rethrow_exception(error);
  }

  void replay() {
    if (Capture::current() != nullptr || context->captures.under_way != nullptr) {
      throw Error(
          absl::FailedPreconditionError("a step is being captured; none is replayed in it"));
    }
    const c10::DeviceGuard on(device);  // the thread may be another one than captured it
    throw_if_error(context->on_device.wait_on(current_stream(device)));
    for (const Communicator* group : capture.groups()) throw_if_error(group->health());
    // What is whole has the weights of before.
    if (context->gradients.fsdp != nullptr) context->gradients.fsdp->reshard();
    capture.prepare();
    graph->replay();
    ++context->captures.generation;
    ++replays;
    gradients.show();
    if (!last.has_value()) last.emplace(c10::kCUDA);
    const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
    last->record(cuda.getStream(device));
    // Whoever does not come to it is found missing, by the time an operation has.
    const Buffer word = comm_buffer(watched);
    for (Communicator* group : capture.groups()) {
      const TensorWork work(
          *context,
          group->all_reduce(word, word, ReduceOp::kMax,
                            {.tag = "captured step",
                             .fingerprint = mix(number, static_cast<uint64_t>(replays)),
                             .stream = current_stream(device)}),
          device);
      throw_if_error(work.wait());
    }
  }

  // What all ranks have alike.
  std::vector<uint64_t> sums() const {
    std::vector<uint64_t> result = {number, capture.draws(), capture.groups().size()};
    for (const Communicator* group : capture.groups()) {
      result.push_back(checksum(static_cast<uint64_t>(group->size()), group->name()));
    }
    return result;
  }

  const MeshPtr mesh;
  const std::shared_ptr<MeshContext> context;
  const c10::Device device;
  const uint64_t number;  // of the captures on this mesh
  Gradients gradients;
  std::unique_ptr<CudaGraph> graph;
  Capture capture;
  const at::Tensor watched;
  int64_t replays = 0;
  std::optional<c10::Event> last;  // replay
};

CapturedStep CapturedStep::capture(const MeshPtr& mesh, const std::vector<at::Tensor>& parameters,
                                   const std::function<void()>& step, std::source_location where) {
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  check_not_capturing(*context);
  Agreement agreement(*context, {.name = kCapture, .where = where});
  // First of all, so that ranks that fail here count as those that do not.
  const uint64_t number = ++context->captures.count;
  std::optional<c10::Device> device;
  if (has_cuda()) device = c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
  check(parameters, device);
  const std::string_view backend = mesh->world()->backend_name();
  if (mesh->mesh().size() > 1 && backend != "nccl") {
    throw Error(kCapture, absl::FailedPreconditionError(str_cat(
                              "the ranks communicate by '", backend,
                              "', where the host takes part in each collective; wanted nccl")));
  }
  absl::StatusOr<std::unique_ptr<CudaGraph>> graph = CudaGraph::create();
  if (!graph.ok()) throw Error(kCapture, graph.status());

  auto state = std::make_unique<State>(mesh, context, *device, number, parameters);
  state->graph = *std::move(graph);
  if (has_random_kernels()) load_random_kernels(device->index()).IgnoreError();
  context->before_host_reads();
  if (context->gradients.fsdp != nullptr) context->gradients.fsdp->reshard();
  at::autocast::clear_cache();  // a replay casts anew
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  cuda.synchronizeDevice(device->index());
  try {
    {
      // What was on the default stream is there; a capture wants another one.
      const c10::StreamGuard on(cuda.getStreamFromGlobalPool(*device));
      accumulate_on_current_stream(parameters);
      state->record(step);
    }
    const std::optional<Difference> differs = agreement.reach(state->sums());
    if (differs.has_value()) {
      throw Error(kCapture, absl::InvalidArgumentError(str_cat(
                                "ranks ", differs->ranks[0], " and ", differs->ranks[1],
                                " have captured different steps: they draw, or communicate, "
                                "unlike each other")));
    }
  } catch (...) {
    accumulate_on_current_stream(parameters);
    at::autocast::clear_cache();
    state->gradients.put_back();
    throw;
  }
  accumulate_on_current_stream(parameters);
  at::autocast::clear_cache();
  state->gradients.keep();
  return CapturedStep(std::move(state));
}

CapturedStep::CapturedStep(std::unique_ptr<State> state) : state_(std::move(state)) {}
CapturedStep::~CapturedStep() = default;
CapturedStep::CapturedStep(CapturedStep&&) noexcept = default;
CapturedStep& CapturedStep::operator=(CapturedStep&&) noexcept = default;

void CapturedStep::replay() {
  if (state_ == nullptr) {
    throw Error(kReplay, absl::FailedPreconditionError("the captured step was moved away"));
  }
  try {
    state_->replay();
  } catch (const Error& error) {
    throw Error(kReplay, error.status());
  }
}

int64_t CapturedStep::replays() const {
  return state_ == nullptr ? 0 : state_->replays;
}

}  // namespace shardweave

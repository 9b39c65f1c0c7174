// Steps that are captured as CUDA graphs.
#include "shardweave/dtensor/captured_step.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "c10/core/DeviceGuard.h"
#include "shardweave/capi/handles.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/dtensor/error.h"

struct swv_captured_step : shardweave::capi::Handle<shardweave::capi::Kind::kCapturedStep> {
  shardweave::CapturedStep step;
};

namespace shardweave::capi {
namespace {

// C++ loads LibTorch's CUDA by a call; here the first tensor on a GPU does.
template <typename F>
auto saying_what_loads_cuda(F body) {
  try {
    return body();
  } catch (const Error& error) {
    constexpr std::string_view kHow = "load_cuda() comes first";
    const std::string message(error.status().message());
    if (!message.ends_with(kHow)) throw;
    throw Failure(
        retold(error.status(), str_cat(message.substr(0, message.size() - kHow.size()),
                                       "a tensor on a GPU, which loads it, comes first")));
  }
}

swv_captured_step* new_captured_step(const swv_mesh* mesh, swv_tensor* const* parameters,
                                     size_t num_parameters, swv_step_fn step, void* user_data) {
  // Held: the step may free the handle.
  const MeshPtr on = in(mesh, "mesh").mesh;
  const std::vector<at::Tensor> all = tensors(parameters, num_parameters, "parameters");
  if (step == nullptr) fail_null("step");
  const CallMode mode(SWV_MODE_GRAD, "mode");
  // A rank may be on any thread, whose current GPU is then another one.
  std::optional<c10::Device> gpu;
  if (!all.empty() && all[0].is_cuda()) gpu = all[0].device();
  const c10::OptionalDeviceGuard on_gpu(gpu);
  return saying_what_loads_cuda([&] {
    return make<swv_captured_step>(
        CapturedStep::capture(on, all, [&] { throw_if_failed(step(user_data), "step"); }, kHost));
  });
}

void replay(swv_captured_step& captured) {
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  captured.step.replay();
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_captured_step_create(const swv_mesh* mesh, swv_tensor* const* parameters,
                                     size_t num_parameters, swv_step_fn step, void* user_data,
                                     swv_captured_step** out_step) {
  return guarded(__func__, out_step, "out_step", [&] {
    return new_captured_step(mesh, parameters, num_parameters, step, user_data);
  });
}

void swv_captured_step_free(swv_captured_step* step) {
  release(step, __func__);
}

swv_status* swv_captured_step_replay(swv_captured_step* step) {
  return guarded(__func__, [&] { replay(in(step, "step")); });
}

swv_status* swv_captured_step_replays(const swv_captured_step* step, int64_t* out_replays) {
  return guarded(__func__, out_replays, "out_replays",
                 [&] { return in(step, "step").step.replays(); });
}

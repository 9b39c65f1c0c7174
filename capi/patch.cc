// Forwards of the host's in place of the library's.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shardweave/capi/callbacks.h"
#include "shardweave/capi/host_module.h"
#include "shardweave/modules/nn/layer_registry.h"
#include "shardweave/modules/plugin.h"

namespace shardweave::capi {
namespace {

// Owns the user data.
class HostPatch {
 public:
  explicit HostPatch(const swv_patch& patch)
      : patch_(patch), name_(patch.name == nullptr ? "patch" : patch.name) {}
  ~HostPatch() {
    if (patch_.drop != nullptr) patch_.drop(patch_.user_data);
  }
  HostPatch(const HostPatch&) = delete;
  HostPatch& operator=(const HostPatch&) = delete;

  std::vector<at::Tensor> run(const PatchedCall& patched) const {
    const Borrowed inputs(patched.inputs);
    Written outputs(patched.num_results, inputs);
    const CallContext context({.original = &patched.forward});
    // A handle of its own: one that this holds would keep the module, which keeps this.
    const std::shared_ptr<torch::nn::Module> module = patched.module.shared_from_this();
    const Owned<swv_module> handle(
        make<swv_module>(nullptr, std::make_shared<LibraryModule>(module, nn::as_layer(module))));
    swv_function_call call = function_call(context.get(), inputs, outputs);
    call.module = handle.get();
    call.fqn = patched.fqn.c_str();
    const std::string its = str_cat(name_, ".forward, in place of that of '", patched.fqn, "'");
    throw_if_failed(patch_.forward(patch_.user_data, &call), its);
    std::vector<at::Tensor> results = outputs.take("outputs");
    check_written(results, its);
    return results;
  }

 private:
  const swv_patch patch_;
  const std::string name_;
};

void patch_modules(const swv_module* module, const char* pattern, const swv_patch* given) {
  const swv_patch patch = known_options<swv_patch>(out(given, "patch"), SWV_PATCH_INIT, "patch");
  const auto owned = std::make_shared<const HostPatch>(patch);
  check_options(*given, patch, "patch");
  text_or(patch.name, "", "patch.name");
  if (patch.forward == nullptr) fail_null("patch.forward");
  patch_forwards(any_module(module), text(pattern, "pattern"),
                 [owned](const PatchedCall& call) { return owned->run(call); });
}

void run_original(const swv_function_context* context, swv_grad_mode mode,
                  const swv_tensor* const* inputs, size_t num_inputs, swv_tensor** out_outputs,
                  size_t num_outputs) {
  const auto* const original = in(context, "context").original;
  if (original == nullptr) {
    fail_argument("context", "is of a function; wanted that of a patch's forward");
  }
  const std::vector<at::Tensor> given = tensors_or_undefined(inputs, num_inputs, "inputs");
  out(out_outputs, "out_outputs");
  const CallMode call_mode(mode, "mode");
  std::vector<at::Tensor> results = (*original)(given);
  if (results.size() != num_outputs) {
    fail_argument("num_outputs", str_cat("is ", num_outputs, "; the forward that is patched has ",
                                         results.size()));
  }
  write_tensors(std::move(results), out_outputs);
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_module_patch(swv_module* module, const char* pattern, const swv_patch* patch) {
  return guarded(__func__, [&] { patch_modules(module, pattern, patch); });
}

swv_status* swv_function_context_original(const swv_function_context* context, swv_grad_mode mode,
                                          const swv_tensor* const* inputs, size_t num_inputs,
                                          swv_tensor** out_outputs, size_t num_outputs) {
  return guarded(
      __func__, [&] { run_original(context, mode, inputs, num_inputs, out_outputs, num_outputs); });
}

// What a module is and does: for people, and as JSON.
#include <functional>
#include <memory>
#include <string>

#include "shardweave/capi/host_module.h"
#include "shardweave/modules/dump.h"
#include "shardweave/modules/list_communication.h"
#include "shardweave/modules/module_memory.h"
#include "shardweave/modules/verify.h"

namespace shardweave::capi {
namespace {

// What is behind a handle, held: what the host runs may free the handle.
std::shared_ptr<torch::nn::Module> kept(const swv_module* module, const char* argument = "module") {
  const swv_module& m = in(module, argument);
  if (m.library != nullptr) return m.library->pointer();
  return m.host;
}

// What the host runs, and what it gives.
at::Tensor result_of(swv_run_fn run, void* user_data, const char* argument) {
  swv_tensor* made = nullptr;
  swv_status* const status = run(user_data, &made);
  const Owned<swv_tensor> owned(made);
  throw_if_failed(status, argument);
  return made == nullptr ? at::Tensor() : tensor(made, argument);
}
at::Tensor tensor_of(swv_run_fn run, void* user_data, const char* argument) {
  at::Tensor result = result_of(run, user_data, argument);
  if (!result.defined()) fail_argument(argument, "gave no tensor");
  return result;
}

template <typename Result>
void write_both(const Result& result, swv_string** out_text, swv_string** out_json) {
  Owned<swv_string> text(out_text == nullptr ? nullptr : new_string(result.to_string()));
  Owned<swv_string> json(out_json == nullptr ? nullptr : new_string(result.to_json()));
  if (out_text != nullptr) *out_text = text.release();
  if (out_json != nullptr) *out_json = json.release();
}

void memory(const swv_module* module, swv_run_fn run, void* user_data, swv_string** out_text,
            swv_string** out_json) {
  const std::shared_ptr<torch::nn::Module> model = kept(module);
  const CallMode mode(SWV_MODE_GRAD, "mode");
  std::function<at::Tensor()> forward;
  if (run != nullptr) forward = [&] { return result_of(run, user_data, "run"); };
  write_both(module_memory(*model, forward), out_text, out_json);
}

void communication(const swv_module* module, swv_run_fn run, void* user_data, swv_string** out_text,
                   swv_string** out_json) {
  const std::shared_ptr<torch::nn::Module> model = kept(module);
  if (run == nullptr) fail_null("run");
  const CallMode mode(SWV_MODE_GRAD, "mode");
  write_both(list_communication(*model, [&] { result_of(run, user_data, "run"); }), out_text,
             out_json);
}

void verify_module(const swv_module* module, swv_run_fn run, const swv_module* reference,
                   swv_run_fn run_reference, void* user_data, const swv_verify_options* given,
                   swv_bool* out_same, swv_string** out_text, swv_string** out_json) {
  const std::shared_ptr<torch::nn::Module> model = kept(module);
  if (run == nullptr) fail_null("run");
  const std::shared_ptr<torch::nn::Module> plain = kept(reference, "reference");
  if (run_reference == nullptr) fail_null("run_reference");
  const swv_verify_options o =
      options<swv_verify_options>(given, SWV_VERIFY_OPTIONS_INIT, "options");
  VerifyOptions how;
  how.backward = !flag(o.forward_only, "options.forward_only");
  if (!(o.tolerance >= 0)) {
    fail_argument("options.tolerance", str_cat("is ", o.tolerance, "; wanted 0 or more"));
  }
  if (o.tolerance > 0) how.tolerance = o.tolerance;
  swv_bool& same = out(out_same, "out_same");
  const CallMode mode(SWV_MODE_GRAD, "mode");
  if (flag(o.copy_values, "options.copy_values")) modules_internal::copy_values(*model, *plain);
  const Verification result = verify(
      *model, [&] { return tensor_of(run, user_data, "run"); }, *plain,
      [&] { return tensor_of(run_reference, user_data, "run_reference"); }, how);
  write_both(result, out_text, out_json);
  same = result.ok() ? 1 : 0;
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_module_dump(const swv_module* module, swv_string** out_text,
                            swv_string** out_json) {
  return guarded(__func__,
                 [&] { write_both(shardweave::dump(any_module(module)), out_text, out_json); });
}

swv_status* swv_module_memory(swv_module* module, swv_run_fn run, void* user_data,
                              swv_string** out_text, swv_string** out_json) {
  return guarded(__func__, [&] { memory(module, run, user_data, out_text, out_json); });
}

swv_status* swv_module_list_communication(swv_module* module, swv_run_fn run, void* user_data,
                                          swv_string** out_text, swv_string** out_json) {
  return guarded(__func__, [&] { communication(module, run, user_data, out_text, out_json); });
}

swv_status* swv_module_verify(swv_module* module, swv_run_fn run, swv_module* reference,
                              swv_run_fn run_reference, void* user_data,
                              const swv_verify_options* options, swv_bool* out_same,
                              swv_string** out_text, swv_string** out_json) {
  return guarded(__func__, [&] {
    verify_module(module, run, reference, run_reference, user_data, options, out_same, out_text,
                  out_json);
  });
}

// Modules: their tensors, their parts, what distributes them, and what tells when one runs.
#include <functional>
#include <memory>
#include <optional>

#include "shardweave/capi/host_module.h"
#include "shardweave/capi/scopes.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/modules/checkpoint/state_dict.h"
#include "shardweave/modules/sharding_plan_json.h"

namespace shardweave::capi {
namespace {

const std::vector<Named>& tensors_of(const swv_module* module, Slot slot) {
  const swv_module& m = in(module, "module");
  return m.library != nullptr ? m.library->tensors(slot) : m.host->tensors(slot);
}

const at::Tensor& tensor_at(const swv_module* module, std::string_view fqn) {
  const swv_module& m = in(module, "module");
  if (m.library == nullptr) return m.host->tensor_at(fqn);
  if (const at::Tensor* found = m.library->find(fqn)) return *found;
  fail_no_tensor(m.library->module(), fqn);
}

swv_module* child_of(const swv_module* module, std::string_view fqn) {
  const swv_module& m = in(module, "module");
  return new_module(m.library != nullptr ? HostModule::Found{nullptr, m.library->part(fqn)}
                                         : m.host->module_at(fqn));
}

void add_child(const swv_module* module, std::string_view fqn, const swv_module* given) {
  HostModule& outer = host_module(module);
  const swv_module& child = in(given, "child");
  if (child.library != nullptr) {
    outer.add_module(fqn, child.library);
  } else {
    outer.add_module(fqn, child.host);
  }
}

swv_module* create_by_kind(const char* kind, const char* options_json) {
  const CallMode mode(SWV_MODE_GRAD, "mode");
  return make<swv_module>(
      nullptr, LibraryModule::make(text(kind, "kind"), text_or(options_json, "", "options_json")));
}

void write_named(const std::vector<Named>& all, size_t index, const char* what,
                 swv_string** out_fqn, swv_tensor** out_tensor) {
  if (index >= all.size()) {
    fail(absl::StatusCode::kOutOfRange,
         str_cat("argument 'index' is ", index, " of ", all.size(), " ", what));
  }
  Owned<swv_string> fqn(out_fqn == nullptr ? nullptr : new_string(all[index].fqn));
  if (out_tensor != nullptr) *out_tensor = make<swv_tensor>(all[index].tensor);
  if (out_fqn != nullptr) *out_fqn = fqn.release();
}

bool is_persistent(const swv_module* module, size_t index) {
  swv_string* fqn = nullptr;
  write_named(tensors_of(module, Slot::kBuffer), index, "buffers", &fqn, nullptr);
  const Owned<swv_string> owned(fqn);
  return !checkpoint_internal::non_persistent_fqns(any_module(module)).contains(owned->text);
}

// What a call runs.
struct Callable {
  const Signature* signature;
  std::function<void(c10::Stack&)> run;
  std::optional<ModuleScope> scope;  // traces say who runs
};

void find_method(const swv_module* module, std::string_view name, Callable& found) {
  const swv_module& m = in(module, "module");
  if (m.library != nullptr) {
    LibraryModule& library = *m.library;
    found.signature = &library.method(name);
    found.run = [&library](c10::Stack& stack) { library.forward(stack); };
    const std::string fqn = library.fqn_on_mesh();
    if (library.mesh() != nullptr && !fqn.empty()) found.scope.emplace(library.mesh(), fqn);
    return;
  }
  if (!m.host->is_of_file()) {
    fail_argument("module", "was not loaded: its forward is the host's own code");
  }
  const Method& method = m.host->method(name);
  found.signature = &method.signature;
  found.run = [&method, self = m.host->self()](c10::Stack& stack) {
    stack.insert(stack.begin(), self);
    method.function->run(stack);
  };
}

void call_method(const swv_module* module, std::string_view name, swv_grad_mode mode,
                 const GivenArguments& given, swv_value* results, size_t capacity,
                 size_t* out_num_results) {
  // Held: the host's code that it runs (a patch) may free the caller's handle.
  const std::shared_ptr<HostModule> host = in(module, "module").host;
  const std::shared_ptr<LibraryModule> library = in(module, "module").library;
  Callable method;
  find_method(module, name, method);
  const Signature& signature = *method.signature;
  const CallMode call_mode(mode, "mode");
  check_capacity(signature, results, capacity);
  CallStack stack;
  std::string mismatch;
  if (!push_arguments(signature, given, Match::kLenient, stack, &mismatch)) {
    fail(absl::StatusCode::kInvalidArgument,
         str_cat(name, ": ", mismatch, "; its schema is ", signature.text));
  }
  method.run(stack.values);
  if (stack.values.size() == 1 && stack.values[0].isTuple()) {  // several results
    const auto tuple = stack.values[0].toTuple();
    stack.values.clear();
    for (const c10::IValue& element : tuple->elements()) stack.values.push_back(element);
  }
  write_results(signature, stack.values, results, capacity, out_num_results);
}

void distribute(const swv_module* module, const swv_mesh* mesh, const swv_plan* plan,
                const swv_distribute_options* options) {
  const CallMode mode(SWV_MODE_GRAD, "mode");
  const MeshPtr& on = in(mesh, "mesh").mesh;
  torch::nn::Module* of = nullptr;
  ShardingPlan says;
  const DistributeOptions how = read_together(on, "parallelize_module", [&] {
    of = &any_module(module);
    if (plan != nullptr) says = *in(plan, "plan").plan;
    return distribute_options(options);
  });
  parallelize_module(*of, on, says, host_plugins(), how, kHost);
  const swv_module& m = in(module, "module");
  if (m.library != nullptr) {
    m.library->set_mesh(on, "");
  } else {
    m.host->set_mesh(on);
  }
}

swv_forward* forward_of(swv_module* module, const char* fqn) {
  const HostModule::Found found = host_module(module).module_at(text(fqn, "fqn"));
  if (found.host == nullptr) {
    fail_argument("fqn", str_cat(found.library->called(),
                                 ": plans meet it without, and swv_module_call runs it"));
  }
  if (found.host->is_of_file()) {
    fail_argument("module",
                  "is of a file, and so is its forward: plans meet it without, and "
                  "swv_module_call runs it");
  }
  auto* const made = make<swv_forward>(found.host->site());
  found.host->is_met = true;
  return made;
}

// What is defined among `tensors` as the plan says; both are outputs' or inputs'.
template <typename Change>
std::vector<at::Tensor> laid_out(const swv_tensor* const* tensors, size_t count,
                                 const char* argument, swv_tensor** out, const char* out_argument,
                                 const Change& change) {
  std::vector<at::Tensor> all = tensors_or_undefined(tensors, count, argument);
  if (out == nullptr && count != 0) fail_null(out_argument);
  int index = 0;
  for (at::Tensor& tensor : all) tensor = change(index++, tensor);
  return all;
}

void begin_forward(const swv_forward* forward, swv_grad_mode mode, const swv_tensor* const* inputs,
                   size_t num_inputs, swv_tensor** out_inputs, swv_scope** out_scope) {
  // Held: the host's code that it runs may free the caller's handle.
  const std::shared_ptr<const HostModule::Site> site = in(forward, "forward").site;
  swv_scope*& result = out(out_scope, "out_scope");
  const CallMode call_mode(mode, "mode");
  Owned<swv_scope> scope =
      new_scope<ForwardRun>(site->redistribution, mode, static_cast<int>(num_inputs));
  ForwardRun& run = std::get<ForwardRun>(scope->scope);
  if (site->mesh != nullptr) run.scope.emplace(site->mesh, site->fqn);
  write_tensors(laid_out(inputs, num_inputs, "inputs", out_inputs, "out_inputs",
                         [&](int index, const at::Tensor& tensor) {
                           return run.plan == nullptr ? tensor : run.plan->input(index, tensor);
                         }),
                out_inputs);
  result = scope.release();
}

void end_forward(swv_scope* scope, const swv_tensor* const* outputs, size_t num_outputs,
                 swv_tensor** out_outputs) {
  auto* const run = std::get_if<ForwardRun>(&in(scope, "scope").scope);
  if (run == nullptr) fail_argument("scope", "is of another kind; wanted one of swv_forward_begin");
  if (run->has_ended) {
    fail(absl::StatusCode::kFailedPrecondition,
         "argument 'scope': this run of the forward has ended already");
  }
  const CallMode call_mode(run->mode, "mode");
  std::vector<at::Tensor> results =
      laid_out(outputs, num_outputs, "outputs", out_outputs, "out_outputs",
               [&](int index, const at::Tensor& tensor) {
                 return run->plan == nullptr ? tensor : run->plan->output(index, tensor);
               });
  if (run->plan != nullptr) run->plan->check_met(run->inputs, static_cast<int>(num_outputs));
  write_tensors(std::move(results), out_outputs);
  run->has_ended = true;
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_module_create(swv_module** out_module) {
  return guarded(__func__, out_module, "out_module",
                 [&] { return make<swv_module>(std::make_shared<HostModule>(), nullptr); });
}

swv_status* swv_module_create_by_kind(const char* kind, const char* options_json,
                                      swv_module** out_module) {
  return guarded(__func__, out_module, "out_module",
                 [&] { return create_by_kind(kind, options_json); });
}

swv_status* swv_module_load(const char* path, swv_module** out_module) {
  return guarded(__func__, out_module, "out_module", [&] {
    const CallMode mode(SWV_MODE_GRAD, "mode");
    return make<swv_module>(HostModule::load(std::string(text(path, "path"))), nullptr);
  });
}

swv_status* swv_module_share(const swv_module* module, swv_module** out_module) {
  return guarded(__func__, out_module, "out_module", [&] {
    const swv_module& m = in(module, "module");
    return make<swv_module>(m.host, m.library);
  });
}

void swv_module_free(swv_module* module) {
  release(module, __func__);
}

swv_status* swv_module_add_parameter(swv_module* module, const char* fqn, swv_tensor* tensor) {
  return guarded(__func__, [&] {
    host_module(module).add_tensor(text(fqn, "fqn"), in(tensor, "tensor").tensor, Slot::kParameter);
  });
}

swv_status* swv_module_add_buffer(swv_module* module, const char* fqn, swv_tensor* tensor) {
  return guarded(__func__, [&] {
    host_module(module).add_tensor(text(fqn, "fqn"), in(tensor, "tensor").tensor, Slot::kBuffer);
  });
}

swv_status* swv_module_add_child(swv_module* module, const char* fqn, swv_module* child) {
  return guarded(__func__, [&] { add_child(module, text(fqn, "fqn"), child); });
}

swv_status* swv_module_child(const swv_module* module, const char* fqn, swv_module** out_child) {
  return guarded(__func__, out_child, "out_child",
                 [&] { return child_of(module, text(fqn, "fqn")); });
}

swv_status* swv_module_set_sharding(swv_module* module, const char* sharding_json) {
  return guarded(__func__, [&] {
    host_module(module).sharding =
        check(shardweave::parse_module_sharding(text(sharding_json, "sharding_json")));
  });
}

swv_status* swv_module_num_parameters(const swv_module* module, size_t* out_num) {
  return guarded(__func__, out_num, "out_num",
                 [&] { return tensors_of(module, Slot::kParameter).size(); });
}

swv_status* swv_module_parameter(const swv_module* module, size_t index, swv_string** out_fqn,
                                 swv_tensor** out_tensor) {
  return guarded(__func__, [&] {
    write_named(tensors_of(module, Slot::kParameter), index, "parameters", out_fqn, out_tensor);
  });
}

swv_status* swv_module_num_buffers(const swv_module* module, size_t* out_num) {
  return guarded(__func__, out_num, "out_num",
                 [&] { return tensors_of(module, Slot::kBuffer).size(); });
}

swv_status* swv_module_buffer(const swv_module* module, size_t index, swv_string** out_fqn,
                              swv_tensor** out_tensor) {
  return guarded(__func__, [&] {
    write_named(tensors_of(module, Slot::kBuffer), index, "buffers", out_fqn, out_tensor);
  });
}

swv_status* swv_module_buffer_is_persistent(const swv_module* module, size_t index,
                                            swv_bool* out_is_persistent) {
  return guarded(__func__, out_is_persistent, "out_is_persistent",
                 [&] { return is_persistent(module, index); });
}

swv_status* swv_module_get(const swv_module* module, const char* fqn, swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor",
                 [&] { return make<swv_tensor>(tensor_at(module, text(fqn, "fqn"))); });
}

swv_status* swv_module_train(swv_module* module, swv_bool on) {
  return guarded(__func__, [&] { any_module(module).train(flag(on, "on")); });
}

swv_status* swv_module_is_training(const swv_module* module, swv_bool* out_is_training) {
  return guarded(__func__, out_is_training, "out_is_training",
                 [&] { return any_module(module).is_training(); });
}

swv_status* swv_module_call(swv_module* module, const char* method, swv_grad_mode mode,
                            const swv_value* arguments, size_t num_arguments,
                            swv_value* out_results, size_t capacity, size_t* out_num_results) {
  return guarded(__func__, [&] {
    call_method(module, text(method, "method"), mode, given_arguments(arguments, num_arguments),
                out_results, capacity, out_num_results);
  });
}

swv_status* swv_module_call_named(swv_module* module, const char* method, swv_grad_mode mode,
                                  const swv_value* arguments, size_t num_arguments,
                                  const char* const* names, size_t num_names,
                                  swv_value* out_results, size_t capacity,
                                  size_t* out_num_results) {
  return guarded(__func__, [&] {
    call_method(module, text(method, "method"), mode,
                given_arguments(arguments, num_arguments, names, num_names), out_results, capacity,
                out_num_results);
  });
}

swv_status* swv_module_distribute(swv_module* module, const swv_mesh* mesh, const swv_plan* plan,
                                  const swv_distribute_options* options) {
  return guarded(__func__, [&] { distribute(module, mesh, plan, options); });
}

swv_status* swv_module_finish_grad_sync(swv_module* module) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_GRAD, "mode");
    shardweave::finish_grad_sync(any_module(module), kHost);
  });
}

swv_status* swv_module_zero_grad(swv_module* module) {
  return guarded(__func__, [&] { any_module(module).zero_grad(); });
}

swv_status* swv_module_forward(swv_module* module, const char* fqn, swv_forward** out_forward) {
  return guarded(__func__, out_forward, "out_forward", [&] { return forward_of(module, fqn); });
}

swv_status* swv_forward_share(const swv_forward* forward, swv_forward** out_forward) {
  return guarded(__func__, out_forward, "out_forward",
                 [&] { return make<swv_forward>(in(forward, "forward").site); });
}

void swv_forward_free(swv_forward* forward) {
  release(forward, __func__);
}

swv_status* swv_forward_begin(const swv_forward* forward, swv_grad_mode mode,
                              const swv_tensor* const* inputs, size_t num_inputs,
                              swv_tensor** out_inputs, swv_scope** out_scope) {
  return guarded(__func__,
                 [&] { begin_forward(forward, mode, inputs, num_inputs, out_inputs, out_scope); });
}

swv_status* swv_forward_end(swv_scope* scope, const swv_tensor* const* outputs, size_t num_outputs,
                            swv_tensor** out_outputs) {
  return guarded(__func__, [&] { end_forward(scope, outputs, num_outputs, out_outputs); });
}

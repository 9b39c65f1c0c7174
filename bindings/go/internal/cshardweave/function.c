// The table of callbacks of a function that is written in Go.
#include "_cgo_export.h"
#include "shim.h"

static swv_status* forward(void* handle, const swv_function_call* call) {
  return swvgo_forward((uintptr_t)handle, call->context, call->mode, (swv_tensor**)call->inputs,
                       call->num_inputs, call->outputs, call->num_outputs);
}

static swv_status* backward(void* handle, const swv_function_call* call) {
  return swvgo_backward((uintptr_t)handle, call->context, call->mode, (swv_tensor**)call->inputs,
                        call->num_inputs, call->outputs, call->num_outputs);
}

static void drop(void* handle) {
  swvgo_drop((uintptr_t)handle);
}

swv_status* swvgo_function_apply(uintptr_t handle, const char* name, swv_grad_mode mode,
                                 swv_tensor* const* inputs, size_t num_inputs, swv_tensor** outputs,
                                 size_t num_outputs) {
  swv_function function = SWV_FUNCTION_INIT;
  function.name = name;
  function.user_data = (void*)handle;
  function.forward = forward;
  function.backward = backward;
  function.drop = drop;
  return swv_function_apply(&function, mode, (const swv_tensor* const*)inputs, num_inputs, outputs,
                            num_outputs);
}

static void take_line(void* handle, const char* message) {
  swvgo_log((uintptr_t)handle, (char*)message);
}

swv_status* swvgo_set_log(uintptr_t handle) {
  if (handle == 0) return swv_set_log(NULL, NULL, NULL);
  return swv_set_log(take_line, (void*)handle, drop);
}

static swv_status* run_segment(void* handle, const swv_function_call* call) {
  return swvgo_run_segment((uintptr_t)handle, call->mode, (swv_tensor**)call->inputs,
                           call->num_inputs, call->outputs, call->num_outputs);
}

swv_status* swvgo_checkpoint(uintptr_t handle, const char* name, swv_grad_mode mode,
                             swv_tensor* const* inputs, size_t num_inputs, swv_tensor** outputs,
                             size_t num_outputs) {
  swv_segment segment = SWV_SEGMENT_INIT;
  segment.name = name;
  segment.user_data = (void*)handle;
  segment.forward = run_segment;
  segment.drop = drop;
  return swv_checkpoint(&segment, mode, (const swv_tensor* const*)inputs, num_inputs, outputs,
                        num_outputs);
}

static swv_status* run_patch(void* handle, const swv_function_call* call) {
  return swvgo_run_patch((uintptr_t)handle, call->context, call->module, (char*)call->fqn,
                         call->mode, (swv_tensor**)call->inputs, call->num_inputs, call->outputs,
                         call->num_outputs);
}

swv_status* swvgo_module_patch(swv_module* module, const char* pattern, uintptr_t handle) {
  swv_patch patch = SWV_PATCH_INIT;
  patch.name = "f";
  patch.user_data = (void*)handle;
  patch.forward = run_patch;
  patch.drop = drop;
  return swv_module_patch(module, pattern, &patch);
}

static swv_status* run(void* handle, swv_tensor** out_result) {
  return swvgo_run((uintptr_t)handle, 0, out_result);
}
static swv_status* run_reference(void* handle, swv_tensor** out_result) {
  return swvgo_run((uintptr_t)handle, 1, out_result);
}

static swv_status* run_step(void* handle) {
  return swvgo_step((uintptr_t)handle);
}

swv_status* swvgo_captured_step_create(const swv_mesh* mesh, swv_tensor* const* parameters,
                                       size_t count, uintptr_t handle,
                                       swv_captured_step** out_step) {
  return swv_captured_step_create(mesh, parameters, count, run_step, (void*)handle, out_step);
}

swv_status* swvgo_module_memory(swv_module* module, uintptr_t handle, swv_string** out_text,
                                swv_string** out_json) {
  return swv_module_memory(module, handle == 0 ? NULL : run, (void*)handle, out_text, out_json);
}

swv_status* swvgo_module_list_communication(swv_module* module, uintptr_t handle,
                                            swv_string** out_text, swv_string** out_json) {
  return swv_module_list_communication(module, run, (void*)handle, out_text, out_json);
}

swv_status* swvgo_module_verify(swv_module* module, swv_module* reference, uintptr_t handle,
                                double tolerance, swv_bool forward_only, swv_bool copy_values,
                                swv_bool* out_same, swv_string** out_text, swv_string** out_json) {
  swv_verify_options options = SWV_VERIFY_OPTIONS_INIT;
  options.tolerance = tolerance;
  options.forward_only = forward_only;
  options.copy_values = copy_values;
  return swv_module_verify(module, run, reference, run_reference, (void*)handle, &options, out_same,
                           out_text, out_json);
}

static swv_status* make_model(void* handle, swv_module** out_module) {
  return swvgo_make_model((uintptr_t)handle, out_module);
}
static swv_status* model_loss(void* handle, swv_module* module, swv_mesh* mesh,
                              swv_tensor** out_loss) {
  (void)module;
  return swvgo_model_loss((uintptr_t)handle, mesh, out_loss);
}

swv_status* swvgo_plan_auto(const swv_mesh* mesh, uintptr_t handle, const char* tp_mesh_dim,
                            int64_t memory_limit, int64_t optimizer_states, int64_t heads,
                            int64_t max_evaluations, int32_t sequence_dim, swv_plan** out_plan,
                            swv_string** out_text, swv_string** out_json) {
  swv_plan_auto_options options = SWV_PLAN_AUTO_OPTIONS_INIT;
  options.tp_mesh_dim = tp_mesh_dim;
  options.memory_limit = memory_limit;
  options.optimizer_states = optimizer_states;
  options.heads = heads;
  options.max_evaluations = max_evaluations;
  options.sequence_dim = sequence_dim;
  return swv_plan_auto(mesh, make_model, model_loss, (void*)handle, &options, out_plan, out_text,
                       out_json);
}

static swv_status* begin_hook(void* handle, const swv_gradient_bucket* bucket) {
  return swvgo_gradient_hook((uintptr_t)handle, 0, (swv_gradient_bucket*)bucket);
}
static swv_status* finish_hook(void* handle, const swv_gradient_bucket* bucket) {
  return swvgo_gradient_hook((uintptr_t)handle, 1, (swv_gradient_bucket*)bucket);
}

// Of structs that the caller has; what they point to, too.
static void grad_sync_options(const swvgo_grad_sync* with, swv_grad_sync_options* options,
                              swv_gradient_hook* hook, swv_power_sgd_options* power_sgd) {
  options->bucket_bytes = with->bucket_bytes;
  options->reduce_dtype = with->reduce_dtype;
  if (with->hook != 0) {
    hook->name = with->hook_name;
    hook->user_data = (void*)with->hook;
    hook->begin = begin_hook;
    hook->finish = finish_hook;
    hook->drop = drop;
    options->hook = hook;
  }
  if (with->rank != 0) {
    power_sgd->columns = with->rank;
    power_sgd->start_iteration = with->start_iteration;
    power_sgd->min_compression_rate = with->min_compression_rate;
    power_sgd->seed = with->seed;
    power_sgd->error_feedback = with->error_feedback;
    power_sgd->warm_start = with->warm_start;
    options->power_sgd = power_sgd;
  }
}

swv_status* swvgo_grad_sync_create(swv_module* module, const swvgo_grad_sync* with,
                                   swv_grad_sync** out_sync) {
  swv_grad_sync_options options = SWV_GRAD_SYNC_OPTIONS_INIT;
  swv_gradient_hook hook = SWV_GRADIENT_HOOK_INIT;
  swv_power_sgd_options power_sgd = SWV_POWER_SGD_OPTIONS_INIT;
  grad_sync_options(with, &options, &hook, &power_sgd);
  return swv_grad_sync_create(module, &options, out_sync);
}

swv_status* swvgo_module_distributed_data_parallel(swv_module* module, const swv_mesh* mesh,
                                                   const char* mesh_dim, int32_t source,
                                                   const swvgo_grad_sync* with,
                                                   swv_grad_sync** out_sync) {
  swv_data_parallel_options options = SWV_DATA_PARALLEL_OPTIONS_INIT;
  swv_grad_sync_options sync = SWV_GRAD_SYNC_OPTIONS_INIT;
  swv_gradient_hook hook = SWV_GRADIENT_HOOK_INIT;
  swv_power_sgd_options power_sgd = SWV_POWER_SGD_OPTIONS_INIT;
  grad_sync_options(with, &sync, &hook, &power_sgd);
  options.mesh_dim = mesh_dim;
  options.source = source;
  options.sync = &sync;
  return swv_module_distributed_data_parallel(module, mesh, &options, out_sync);
}

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

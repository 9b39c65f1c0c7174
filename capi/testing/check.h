/* What tests in plain C need: checks that end the program and say where.
 *
 *   CHECK_OK(swv_mesh_ndim(mesh, &ndim));
 *   CHECK(ndim == 2);
 *   CHECK_FAILS(swv_mesh_ndim(NULL, &ndim), SWV_CODE_INVALID_ARGUMENT, "argument 'mesh' is NULL");
 */
#ifndef SHARDWEAVE_CAPI_TESTING_CHECK_H_
#define SHARDWEAVE_CAPI_TESTING_CHECK_H_

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "buffer.h"
#include "shardweave.h"

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                  \
    }                                                                           \
  } while (0)

#define CHECK_OK(call) check_ok(call, __FILE__, __LINE__, #call)
/* The call fails with this code, and a message that contains this text. */
#define CHECK_FAILS(call, code, text) check_fails(call, code, text, __FILE__, __LINE__, #call)

static inline void check_ok(swv_status* status, const char* file, int line, const char* call) {
  if (status == NULL) return;
  fprintf(stderr, "%s:%d: %s\n  gave %s: %s\n", file, line, call,
          swv_code_name(swv_status_code(status)), swv_status_message(status));
  abort();
}

static inline void check_fails(swv_status* status, swv_code code, const char* text,
                               const char* file, int line, const char* call) {
  if (status == NULL || swv_status_code(status) != code ||
      strstr(swv_status_message(status), text) == NULL) {
    fprintf(stderr, "%s:%d: %s\n  gave %s: %s\n  wanted %s: ...%s...\n", file, line, call,
            swv_code_name(swv_status_code(status)), swv_status_message(status), swv_code_name(code),
            text);
    abort();
  }
  swv_status_free(status);
}

/* `call`, of a string, is `text`. */
#define CHECK_TEXT(string, text)                                               \
  do {                                                                         \
    swv_string* const checked = (string);                                      \
    if (strcmp(swv_string_data(checked), text) != 0) {                         \
      fprintf(stderr, "%s:%d: \"%s\" instead of \"%s\"\n", __FILE__, __LINE__, \
              swv_string_data(checked), text);                                 \
      abort();                                                                 \
    }                                                                          \
    swv_string_free(checked);                                                  \
  } while (0)

/* Calls an operator with one result, a tensor. */
static inline swv_tensor* call_op(const char* name, swv_grad_mode mode, const swv_value* arguments,
                                  size_t num_arguments) {
  swv_op* op;
  swv_value result;
  size_t num_results = 0;
  CHECK_OK(swv_op_find(name, &op));
  CHECK_OK(swv_op_call(op, mode, arguments, num_arguments, &result, 1, &num_results));
  CHECK(num_results == 1 && result.kind == SWV_VALUE_TENSOR);
  swv_op_free(op);
  return result.as.tensor;
}

/* All elements of an f32 tensor, plain or sharded, on every rank. The caller frees. */
static inline float* elements(const swv_tensor* tensor, int64_t* out_count) {
  swv_tensor* whole;
  float* data;
  CHECK_OK(swv_tensor_full_tensor(tensor, SWV_MODE_NO_GRAD, &whole));
  CHECK_OK(swv_tensor_numel(whole, out_count));
  data = (float*)malloc((size_t)*out_count * sizeof(float) + 1);
  CHECK_OK(swv_tensor_copy_to_host(whole, data, (size_t)*out_count * sizeof(float)));
  swv_tensor_free(whole);
  return data;
}

#endif /* SHARDWEAVE_CAPI_TESTING_CHECK_H_ */

/* A swv_buffer in one line, for tests. */
#ifndef SHARDWEAVE_CAPI_TESTING_BUFFER_H_
#define SHARDWEAVE_CAPI_TESTING_BUFFER_H_

#include "shardweave.h"

/* Elements in this machine's memory. */
static inline swv_buffer cpu_buffer(void* data, int64_t count, swv_dtype dtype) {
  swv_buffer result = SWV_BUFFER_INIT;
  result.data = data;
  result.count = count;
  result.dtype = dtype;
  return result;
}

#endif /* SHARDWEAVE_CAPI_TESTING_BUFFER_H_ */

// What comes in from C, checked, as C++ values; and results on their way out. Everything here
// throws Failure that names the argument.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "shardweave/capi/guard.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/placement/reduce_op.h"

namespace shardweave::capi {

using shardweave::str_append;
using shardweave::str_cat;

// More elements than this cannot be meant.
inline constexpr size_t kMaxList = size_t{1} << 31;
inline constexpr size_t kMaxDims = 64;

// Where a result goes; not NULL.
template <typename T>
T& out(T* pointer, const char* argument) {
  if (pointer == nullptr) [[unlikely]]
    fail_null(argument);
  return *pointer;
}

template <typename T>
absl::Span<const T> span(const T* data, size_t size, const char* argument,
                         size_t limit = kMaxList) {
  if (size > limit) [[unlikely]] {
    fail_argument(argument, str_cat("has ", size, " elements; at most ", limit));
  }
  if (data == nullptr && size != 0) [[unlikely]]
    fail_argument(argument, str_cat("is NULL, but has ", size, " elements"));
  return {data, size};
}

// Text that ends with NUL: UTF-8.
std::string_view text(const char* pointer, const char* argument);
std::string_view text_or(const char* pointer, std::string_view otherwise, const char* argument);
// Bytes that have to be UTF-8.
void check_utf8(std::string_view bytes, const char* argument);

bool flag(swv_bool value, const char* argument);
void check_reserved(int64_t value, const char* argument);
ReduceOp reduce_op(swv_reduce_op op, const char* argument);
absl::Duration timeout(int64_t milliseconds, const char* argument, absl::Duration otherwise);

// A struct that may have grown since the caller was built, or since we were: what the caller knows,
// over `defaults`, whose struct_size is ours. `oldest` is the struct_size of its first version; 0: it
// has not grown.
template <typename T>
T options(const T* given, T defaults, const char* argument, size_t oldest = 0) {
  if (given == nullptr) return defaults;
  const size_t known = defaults.struct_size;
  const size_t size = given->struct_size;
  if (size < (oldest == 0 ? known : oldest) || size > 4096) {
    fail_argument(argument,
                  str_cat("has struct_size ", size, "; wanted ", known, " (use the initializer)"));
  }
  const char* bytes = reinterpret_cast<const char*>(given);
  for (size_t i = known; i < size; ++i) {
    if (bytes[i] != 0) {
      fail(absl::StatusCode::kUnimplemented,
           str_cat("argument '", argument,
                   "' sets members that this version of the library does not know"));
    }
  }
  std::memcpy(&defaults, given, size < known ? size : known);
  return defaults;
}
// The same where there are no defaults.
template <typename T>
T required_options(const T* given, T defaults, const char* argument, size_t oldest = 0) {
  return options(&out(given, argument), defaults, argument, oldest);
}

// Results.
swv_string* new_string(std::string text);
// As much as there is room for, and the full number.
template <typename Range>
void copy_out(const Range& values, int64_t* to, size_t capacity, size_t* out_count,
              const char* argument) {
  size_t& count = out(out_count, "out_count");
  if (to == nullptr && capacity != 0) fail_null(argument);
  size_t i = 0;
  for (int64_t value : values) {
    if (i < capacity) to[i] = value;
    ++i;
  }
  count = i;
}

// "; did you mean 'aten::mul', 'aten::mv'?", or nothing if no name is near.
std::string suggestion(std::string_view wanted, const std::vector<std::string>& names);

}  // namespace shardweave::capi

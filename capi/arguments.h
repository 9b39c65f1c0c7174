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
inline std::string given_text(const char* pointer, const char* argument) {  // a copy
  return std::string(text(pointer, argument));
}
std::string_view text_or(const char* pointer, std::string_view otherwise, const char* argument);
// Bytes that have to be UTF-8.
void check_utf8(std::string_view bytes, const char* argument);
// What is no UTF-8 in them as "\xe9", for messages that somebody else has written.
std::string as_utf8(std::string_view bytes);

bool flag(swv_bool value, const char* argument);
void check_reserved(int64_t value, const char* argument);
ReduceOp reduce_op(swv_reduce_op op, const char* argument);
absl::Duration timeout(int64_t milliseconds, const char* argument, absl::Duration otherwise);

// The structs that may grow, and the size that each had first, up to its last member: every caller
// has at least that. Frozen; new members come behind, and not in the padding, where a caller that
// does not know them has anything (abi_test.py looks).
template <typename T>
inline constexpr size_t first_size = 0;
template <>
inline constexpr size_t first_size<swv_world_options> = 32;
template <>
inline constexpr size_t first_size<swv_rendezvous> = 48;
template <>
inline constexpr size_t first_size<swv_buffer> = 48;
template <>
inline constexpr size_t first_size<swv_collective> = 80;
template <>
inline constexpr size_t first_size<swv_group> = 32;
template <>
inline constexpr size_t first_size<swv_backend> = 80;
template <>
inline constexpr size_t first_size<swv_device_backend> = 32;
template <>
inline constexpr size_t first_size<swv_placement> = 48;
template <>
inline constexpr size_t first_size<swv_tensor_options> = 40;
template <>
inline constexpr size_t first_size<swv_distribute_options> = 16;
template <>
inline constexpr size_t first_size<swv_backward_options> = 20;
template <>
inline constexpr size_t first_size<swv_function> = 48;
template <>
inline constexpr size_t first_size<swv_random_state> = 24;
template <>
inline constexpr size_t first_size<swv_clip_options> = 20;
template <>
inline constexpr size_t first_size<swv_sgd_options> = 44;
template <>
inline constexpr size_t first_size<swv_adamw_options> = 52;
template <>
inline constexpr size_t first_size<swv_adam_options> = 52;
template <>
inline constexpr size_t first_size<swv_lion_options> = 40;
template <>
inline constexpr size_t first_size<swv_adafactor_options> = 56;
template <>
inline constexpr size_t first_size<swv_muon_options> = 80;
template <>
inline constexpr size_t first_size<swv_schedule> = 52;
template <>
inline constexpr size_t first_size<swv_grad_scaler_options> = 40;
template <>
inline constexpr size_t first_size<swv_zero_options> = 32;
template <>
inline constexpr size_t first_size<swv_dispatch_counters> = 64;
template <>
inline constexpr size_t first_size<swv_device_cost> = 24;
template <>
inline constexpr size_t first_size<swv_segment> = 40;
template <>
inline constexpr size_t first_size<swv_patch> = 40;
template <>
inline constexpr size_t first_size<swv_materialize_options> = 44;
template <>
inline constexpr size_t first_size<swv_fully_shard_options> = 96;
template <>
inline constexpr size_t first_size<swv_fully_shard_counters> = 56;
template <>
inline constexpr size_t first_size<swv_grad_sync_options> = 40;
template <>
inline constexpr size_t first_size<swv_gradient_hook> = 48;
template <>
inline constexpr size_t first_size<swv_power_sgd_options> = 48;
template <>
inline constexpr size_t first_size<swv_data_parallel_options> = 32;
template <>
inline constexpr size_t first_size<swv_verify_options> = 24;
template <>
inline constexpr size_t first_size<swv_plan_auto_options> = 52;
template <>
inline constexpr size_t first_size<swv_loader_options> = 88;
template <>
inline constexpr size_t first_size<swv_checkpointer_options> = 28;
template <>
inline constexpr size_t first_size<swv_load_options> = 24;
template <>
inline constexpr size_t first_size<swv_load_pretrained_options> = 36;
template <>
inline constexpr size_t first_size<swv_save_pretrained_options> = 36;

// How much of a struct both sides know, in bytes: `theirs` is the caller's struct_size, `ours` what
// the initializer of this version says.
size_t common_size(size_t theirs, size_t first, size_t ours, const char* argument);
// That the caller sets no member behind the first `ours` bytes: what it asks for there is not done.
void check_unknown(const void* given, size_t theirs, size_t ours, const char* argument);
// Of the elements of an array.
void check_same_size(size_t theirs, size_t first, const char* argument);

// What the caller knows of a struct, over `defaults`, whose struct_size is ours. (Of what comes with
// a `drop`: it has to be taken over before anything can fail, so check_options() comes afterwards.)
template <typename T>
T known_options(const T& given, T defaults, const char* argument) {
  static_assert(first_size<T> != 0, "a struct that may grow belongs into the table above");
  const size_t ours = defaults.struct_size;
  std::memcpy(&defaults, &given, common_size(given.struct_size, first_size<T>, ours, argument));
  defaults.struct_size = ours;
  return defaults;
}
// `known` is what known_options() gave.
template <typename T>
void check_options(const T& given, const T& known, const char* argument) {
  // Padding has no meaning in any version.
  constexpr size_t kAlign = alignof(T);
  check_unknown(&given, given.struct_size, (known.struct_size + kAlign - 1) / kAlign * kAlign,
                argument);
}

template <typename T>
T options(const T* given, T defaults, const char* argument) {
  if (given == nullptr) return defaults;
  const T known = known_options(*given, defaults, argument);
  check_options(*given, known, argument);
  return known;
}
// The same where there are no defaults.
template <typename T>
T required_options(const T* given, T defaults, const char* argument) {
  return options(&out(given, argument), defaults, argument);
}

// An array of structs that may grow: the first one's size is that of all.
template <typename T, typename Body>
void for_each_struct(const T* given, size_t count, const T& defaults, const char* argument,
                     size_t limit, const Body& body) {
  span(given, count, argument, limit);
  const std::string element = str_cat(argument, "[]");
  const size_t size = count == 0 ? 0 : given->struct_size;
  // Up to the last member; the next element begins where T may.
  const size_t stride = (size + alignof(T) - 1) / alignof(T) * alignof(T);
  const char* at = reinterpret_cast<const char*>(given);
  for (size_t i = 0; i < count; ++i) {
    try {
      if (i > 0)
        check_same_size(reinterpret_cast<const T*>(at)->struct_size, size, element.c_str());
      body(options(reinterpret_cast<const T*>(at), defaults, element.c_str()));
    } catch (const Failure& failure) {
      fail_at(failure, element, i);
    }
    at += stride;
  }
}

// Writes the members of a result that the caller knows; struct_size and what it has behind ours stay
// as they are.
template <typename T>
void write_struct(const T& result, T* to, const char* argument) {
  static_assert(first_size<T> != 0, "a struct that may grow belongs into the table above");
  const size_t size =
      common_size(out(to, argument).struct_size, first_size<T>, result.struct_size, argument);
  constexpr size_t kSkipped = sizeof(result.struct_size);
  std::memcpy(reinterpret_cast<char*>(to) + kSkipped,
              reinterpret_cast<const char*>(&result) + kSkipped, size - kSkipped);
}

// Results.
swv_string* new_string(std::string text);
// Of an array for results: NULL only if it has no room, and no more than memory has (a host's -1).
void check_room(const void* to, size_t capacity, size_t element, const char* argument);
// As much as there is room for, and the full number.
template <typename Range, typename T>
void copy_out(const Range& values, T* to, size_t capacity, size_t* out_count,
              const char* argument) {
  size_t& count = out(out_count, "out_count");
  check_room(to, capacity, sizeof(T), argument);
  size_t i = 0;
  for (int64_t value : values) {
    if (i < capacity) to[i] = static_cast<T>(value);
    ++i;
  }
  count = i;
}

// "; did you mean 'aten::mul', 'aten::mv'?", or nothing if no name is near.
std::string suggestion(std::string_view wanted, const std::vector<std::string>& names);

}  // namespace shardweave::capi

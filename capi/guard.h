// The one border between C++ and C: every exported function is one line inside guarded(), which
// turns whatever is thrown into a status.
//
//   swv_status* swv_comm_rank(const swv_comm* comm, int32_t* out_rank) {
//     return guarded(__func__, out_rank, "out_rank",
//                    [&] { return in(comm, "comm").comm->rank(); });
//   }
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave.h"
#include "shardweave/capi/handle.h"

struct swv_status : shardweave::capi::Handle<shardweave::capi::Kind::kStatus> {
  swv_code code;
  std::string message;
  int32_t rank = -1;  // that failed, in the world
};

struct swv_string : shardweave::capi::Handle<shardweave::capi::Kind::kString> {
  std::string text;
};

namespace shardweave::capi {

// An error on its way out. `argument` may be empty.
class Failure : public std::exception {
 public:
  Failure(absl::StatusCode code, std::string message)
      : status_(code, message), message_(std::move(message)) {}
  explicit Failure(const absl::Status& status) : status_(status), message_(status.message()) {}
  absl::StatusCode code() const { return status_.code(); }
  const absl::Status& status() const { return status_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  absl::Status status_;  // with the rank that failed, where that is known
  std::string message_;  // of that, with a NUL
};

// "argument 'dims' <what>".
[[noreturn]] void fail_argument(const char* argument, std::string_view what);
[[noreturn]] void fail(absl::StatusCode code, std::string message);

// The same failure, of one element of an array: the first `what` in the message becomes
// "<what>[<index>]"; if that ends with [] already, the index goes there.
[[noreturn]] void fail_at(const Failure& failure, std::string_view what, size_t index);

// Calls `body` with each element of the array `what`.
template <typename Elements, typename Body>
void for_each(const Elements& elements, std::string_view what, const Body& body) {
  size_t index = 0;
  for (const auto& element : elements) {
    try {
      body(element);
    } catch (const Failure& failure) {
      fail_at(failure, what, index);
    }
    ++index;
  }
}

void check(const absl::Status& status);
template <typename T>
T check(absl::StatusOr<T> result) {
  check(result.status());
  return *std::move(result);
}
// Of a callback; takes it over.
absl::Status take(swv_status* status);
// The same, thrown.
void throw_if_failed(swv_status* status, std::string_view callback);

// What there is to say when there is no memory to say it with.
swv_status* out_of_memory();

// Describes the exception that is being handled; the message begins with `function`.
swv_status* status_of_exception(const char* function) noexcept;
// The same as a value, for code that is between callbacks and the library. Throws if there is no
// memory for it.
absl::Status absl_status_of_exception();

template <typename Body>
swv_status* guarded(const char* function, const Body& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (...) {
    return status_of_exception(function);
  }
}

// For functions with one result: where it goes is checked before anything is done, and written
// last.
template <typename Result, typename Body>
swv_status* guarded(const char* function, Result* result, const char* argument,
                    const Body& body) noexcept {
  return guarded(function, [&] {
    if (result == nullptr) fail_null(argument);
    *result = static_cast<Result>(body());
  });
}

}  // namespace shardweave::capi

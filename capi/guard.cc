#include "shardweave/capi/guard.h"

#include <algorithm>
#include <new>

#include "c10/util/Exception.h"
#include "shardweave/capi/arguments.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"

namespace shardweave::capi {
namespace {

absl::StatusCode code_of(const c10::Error& error) {
  if (dynamic_cast<const c10::IndexError*>(&error)) return absl::StatusCode::kOutOfRange;
  if (dynamic_cast<const c10::NotImplementedError*>(&error))
    return absl::StatusCode::kUnimplemented;
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error))
    return absl::StatusCode::kResourceExhausted;
  // TORCH_CHECK: nearly always what the caller gave.
  return absl::StatusCode::kInvalidArgument;
}

// LibTorch's allocator says it in words.
bool is_out_of_memory(std::string_view message) {
  return message.find("DefaultCPUAllocator") != std::string_view::npos;
}

}  // namespace

void fail_argument(const char* argument, std::string_view what) {
  throw Failure(absl::StatusCode::kInvalidArgument, str_cat("argument '", argument, "' ", what));
}

void fail(absl::StatusCode code, std::string message) {
  throw Failure(code, std::move(message));
}

void fail_at(const Failure& failure, std::string_view what, size_t index) {
  std::string message = failure.what();
  if (what.ends_with("[]")) what.remove_suffix(2);
  if (const size_t place = message.find(what); place != std::string::npos) {
    const size_t end = place + what.size();
    message.replace(end, message.compare(end, 2, "[]") == 0 ? 2 : 0, str_cat("[", index, "]"));
  }
  throw Failure(retold(failure.status(), message));
}

void check(const absl::Status& status) {
  if (!status.ok()) throw Failure(status);
}

absl::Status take(swv_status* status) {
  if (status == nullptr) return absl::OkStatus();
  // A callback may return anything.
  if (check_handles()) {
    try {
      check_handle(status, Kind::kStatus, "status");
    } catch (const Failure& failure) {
      return absl::InternalError(str_cat("a callback's ", failure.what()));
    }
  }
  if (status->kind != Kind::kStatus) {
    return absl::InternalError("a callback returned what is no swv_status");
  }
  absl::Status result(static_cast<absl::StatusCode>(status->code), status->message);
  if (status->rank >= 0) result = of_rank(std::move(result), status->rank);
  swv_status_free(status);
  return result;
}

void throw_if_failed(swv_status* status, std::string_view callback) {
  const absl::Status result = take(status);
  if (!result.ok()) {
    throw Failure(retold(result, str_cat(callback, ": ", std::string(result.message()))));
  }
}

absl::Status absl_status_of_exception() {
  try {
    throw;
  } catch (const Failure& failure) {
    return failure.status();
  } catch (const Error& error) {
    return error.status();  // without the name that the function has in C++
  } catch (const c10::Error& error) {
    const char* message = error.what_without_backtrace();
    return absl::Status(
        is_out_of_memory(message) ? absl::StatusCode::kResourceExhausted : code_of(error), message);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory");
  } catch (const std::length_error& error) {
    return absl::ResourceExhaustedError(str_cat("too large: ", error.what()));
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  } catch (...) {
    return absl::InternalError("an exception that is no std::exception");
  }
}

swv_status* status_of_exception(const char* function) noexcept {
  try {
    const absl::Status status = absl_status_of_exception();
    return make<swv_status>(static_cast<swv_code>(status.code()),
                            str_cat(function, ": ", std::string(status.message())),
                            failed_rank(status).value_or(-1));
  } catch (...) {
    return out_of_memory();
  }
}

}  // namespace shardweave::capi

using shardweave::capi::make;

swv_status* swv_status_new(swv_code code, const char* message) {
  return swv_status_new_of_rank(code, message, -1);
}

swv_status* swv_status_new_of_rank(swv_code code, const char* message, int32_t rank) {
  try {
    const bool known = code > SWV_CODE_OK && code <= SWV_CODE_UNAUTHENTICATED;
    return make<swv_status>(known ? code : swv_code{SWV_CODE_UNKNOWN},
                            shardweave::capi::as_utf8(message == nullptr ? "" : message),
                            std::max(rank, -1));
  } catch (...) {
    return shardweave::capi::out_of_memory();
  }
}

swv_code swv_status_code(const swv_status* status) {
  if (status == nullptr) return SWV_CODE_OK;
  try {
    return shardweave::capi::in(status, "status").code;
  } catch (...) {
    return SWV_CODE_INVALID_ARGUMENT;
  }
}

const char* swv_status_message(const swv_status* status) {
  if (status == nullptr) return "";
  try {
    return shardweave::capi::in(status, "status").message.c_str();
  } catch (...) {
    return "swv_status_message: argument 'status' is no swv_status";
  }
}

int32_t swv_status_rank(const swv_status* status) {
  if (status == nullptr) return -1;
  try {
    return shardweave::capi::in(status, "status").rank;
  } catch (...) {
    return -1;
  }
}

void swv_status_free(swv_status* status) {
  if (status == shardweave::capi::out_of_memory()) return;
  shardweave::capi::release(status, __func__);
}

const char* swv_code_name(swv_code code) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  return code >= 0 && code <= SWV_CODE_UNAUTHENTICATED ? kNames[code] : "UNKNOWN_CODE";
}

const char* swv_string_data(const swv_string* string) {
  if (string == nullptr) return "";
  try {
    return shardweave::capi::in(string, "string").text.c_str();
  } catch (...) {
    return "";
  }
}

size_t swv_string_size(const swv_string* string) {
  if (string == nullptr) return 0;
  try {
    return shardweave::capi::in(string, "string").text.size();
  } catch (...) {
    return 0;
  }
}

void swv_string_free(swv_string* string) {
  shardweave::capi::release(string, __func__);
}

int64_t swv_live_handles(void) {
  return shardweave::capi::live_handles();
}

// The one exception of dtensor/ and modules/: a c10::Error (so that users of LibTorch catch it as
// they are used to) that carries an absl::Status.
//
//   throw Error("redistribute", absl::InvalidArgumentError("the tensor is undefined"));
//   // what(): "redistribute: the tensor is undefined"
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/util/Exception.h"
#include "shardweave/comm/status_exception.h"

namespace shardweave {

class Error : public c10::Error, public StatusException {
 public:
  explicit Error(absl::Status status)
      : c10::Error(std::string(status.message())), status_(std::move(status)) {}
  // In a function that a user of C++ has called: what() begins with its name. The status does not,
  // because in another language it has another one.
  Error(std::string_view function, absl::Status status)
      : c10::Error(text(function, status)), status_(std::move(status)) {}
  const absl::Status& status() const override { return status_; }

 private:
  static std::string text(std::string_view function, const absl::Status& status) {
    std::string result(function);
    return result.append(": ").append(status.message().data(), status.message().size());
  }

  absl::Status status_;
};

inline void throw_if_error(absl::Status status) {
  if (!status.ok()) throw Error(std::move(status));
}

template <typename T>
T value_or_throw(absl::StatusOr<T> result) {
  if (!result.ok()) throw Error(std::move(result).status());
  return *std::move(result);
}

}  // namespace shardweave

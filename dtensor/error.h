// The one exception of dtensor/ and modules/: a c10::Error (so that users of LibTorch catch it as
// they are used to) that carries an absl::Status.
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/util/Exception.h"

namespace shardweave {

class Error : public c10::Error {
 public:
  explicit Error(absl::Status status)
      : c10::Error(std::string(status.message())), status_(std::move(status)) {}
  const absl::Status& status() const { return status_; }

 private:
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

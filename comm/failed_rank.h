// Which rank an error is of: a payload of its status, by the rank's number in the world. The text says
// it too; this is for programs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace shardweave {

absl::Status of_rank(absl::Status status, int64_t world_rank);
std::optional<int> failed_rank(const absl::Status& status);

// The same error, told in other words or in its own; a status that shares nothing with `why`.
absl::Status retold(const absl::Status& why, const std::string& text);
absl::Status retold(const absl::Status& why);

}  // namespace shardweave

// The errors and the counter arithmetic that all stores share, so that they fail with the same
// words.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardweave/comm/store/store.h"

namespace shardweave::store_errors {

absl::Status missing_keys(const Store& store, const std::vector<std::string>& keys,
                          absl::Duration timeout);
// value + delta, where `value` is the counter's text.
absl::StatusOr<int64_t> add_to_counter(const Store& store, std::string_view key,
                                       std::string_view value, int64_t delta);

}  // namespace shardweave::store_errors

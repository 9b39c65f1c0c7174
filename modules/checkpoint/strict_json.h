// JSON of files that somebody else may have written: nothing twice, not too deep, and numbers that are
// what they are taken for. Internal to modules/checkpoint/.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "shardweave/placement/layout.h"

namespace shardweave::checkpoint_internal {

using Json = nlohmann::json;

// InvalidArgument: no JSON (with line and column), a key that stands twice, more than 64 levels.
absl::StatusOr<Json> parse_strict(std::string_view text);

// InvalidArgument for a whole number that needs more than 64 bits, which parse_strict() takes for the
// floating-point number that is next to it.
absl::Status check_whole_numbers(std::string_view text);

// A place in a document, for messages: "tensors", "w", "pieces", "0".
using JsonPath = std::vector<std::string>;
// '"tensors", "w": wanted a list, not 3'.
absl::Status unexpected(const JsonPath& path, std::string_view wanted, const Json& got);

// A whole number from 0 to 2^63 - 1.
std::optional<int64_t> as_size(const Json& json);
// A list of those.
std::optional<Dims> as_sizes(const Json& json);
// numel times `element_size`, unless that is more than 2^63 - 1, or would be without the dimensions of size 0.
std::optional<int64_t> bytes_of(absl::Span<const int64_t> shape, int64_t element_size);
// Only these keys are there, and all of them.
absl::Status check_keys(const JsonPath& path, const Json& object,
                        const std::vector<std::string>& keys);

}  // namespace shardweave::checkpoint_internal

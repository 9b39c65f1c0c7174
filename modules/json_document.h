// JSON whose errors say where. Internal to modules/.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace shardweave::modules_internal {

using Json = nlohmann::ordered_json;

// A text, and where its keys stand.
class JsonDocument {
 public:
  using Path = std::vector<std::string>;  // of keys, outermost first

  // InvalidArgument: no JSON, a key that stands twice, more than 100 levels, or keys that need 256 MB with those around.
  static absl::StatusOr<JsonDocument> read(std::string_view text);

  const Json& json() const { return json_; }
  // InvalidArgument: 'line 3, "parameter", "w": why'.
  absl::Status refuse(const Path& path, std::string_view why) const;
  // 'line 3, "parameter", "w": wanted a number, not []'.
  absl::Status expected(const Path& path, std::string_view wanted, const Json& got) const;

 private:
  Json json_;
  std::map<Path, int64_t> lines_;
};

// "; did you mean 'bias'?", or nothing if no name is near.
std::string did_you_mean(std::string_view wanted, const std::vector<std::string>& names);

}  // namespace shardweave::modules_internal

// Hugging Face's configurations (config.json). Internal to modules/nn.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/modules/json_document.h"

namespace shardweave::nn_internal {

// A configuration's values by key. What is absent or null leaves the option as it is; the first
// that is of another type is the status, and nothing is read after it.
//
//   auto config = Config::read(text, "llama");
//   config->get("hidden_size", options.hidden_size);
//   if (!config->status().ok()) return config->status();
class Config {
 public:
  // InvalidArgument: no object, or a configuration of another "model_type" than `model_type` (""
  // for any). One that does not say counts.
  static absl::StatusOr<Config> read(std::string_view text, std::string_view model_type);

  template <typename T>
  void get(std::string_view key, T& value) {
    const modules_internal::Json* json = find(key);
    if (json != nullptr) convert(key, *json, value);
  }
  template <typename T>
  void get(std::string_view key, std::optional<T>& value) {
    if (find(key) == nullptr) return;
    T there{};
    get(key, there);
    value = std::move(there);
  }
  bool has(std::string_view key) const { return find(key) != nullptr; }
  int64_t size(std::string_view key) const;  // of an object or a list; 0: there is none

  // From now on keys are looked up in the object under `key`, and "" is the whole again. False, and
  // nothing changes, if there is none.
  bool enter(std::string_view key);

  void refuse(std::string_view key, std::string_view why);
  const absl::Status& status() const { return status_; }

 private:
  // Null: absent, null, or something was refused before.
  const modules_internal::Json* find(std::string_view key) const;
  modules_internal::JsonDocument::Path path(std::string_view key) const;
  void convert(std::string_view key, const modules_internal::Json& json, int64_t& value);
  void convert(std::string_view key, const modules_internal::Json& json, double& value);
  void convert(std::string_view key, const modules_internal::Json& json, bool& value);
  void convert(std::string_view key, const modules_internal::Json& json, std::string& value);
  void convert(std::string_view key, const modules_internal::Json& json,
               std::vector<double>& value);
  void expected(std::string_view key, std::string_view wanted, const modules_internal::Json& got);

  modules_internal::JsonDocument document_;
  std::string inside_;
  absl::Status status_;
};

}  // namespace shardweave::nn_internal

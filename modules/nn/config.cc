#include "shardweave/modules/nn/config.h"

#include <utility>

#include "shardweave/comm/str_cat.h"

namespace shardweave::nn_internal {

using modules_internal::Json;
using modules_internal::JsonDocument;

absl::StatusOr<Config> Config::read(std::string_view text, std::string_view model_type) {
  absl::StatusOr<JsonDocument> document = JsonDocument::read(text);
  if (!document.ok()) return document.status();
  if (!document->json().is_object()) return document->expected({}, "an object", document->json());
  Config config;
  config.document_ = *std::move(document);
  std::string type(model_type);
  config.get("model_type", type);
  if (!model_type.empty() && type != model_type) {
    config.refuse("model_type", str_cat("wanted \"", model_type, "\", not \"", type, "\""));
  }
  if (!config.status_.ok()) return config.status_;
  return config;
}

bool Config::enter(std::string_view key) {
  if (key.empty()) {
    inside_.clear();
    return true;
  }
  const Json* json = find(key);
  if (json == nullptr) return false;
  if (!json->is_object()) {
    expected(key, "an object", *json);
    return false;
  }
  inside_ = key;
  return true;
}

int64_t Config::size(std::string_view key) const {
  const Json* json = find(key);
  return json != nullptr && json->is_structured() ? static_cast<int64_t>(json->size()) : 0;
}

const Json* Config::find(std::string_view key) const {
  if (!status_.ok()) return nullptr;
  const Json* object = &document_.json();
  if (!inside_.empty()) object = &(*object)[inside_];
  const auto found = object->find(std::string(key));
  return found == object->end() || found->is_null() ? nullptr : &*found;
}

JsonDocument::Path Config::path(std::string_view key) const {
  JsonDocument::Path path;
  if (!inside_.empty()) path.push_back(inside_);
  path.emplace_back(key);
  return path;
}

void Config::refuse(std::string_view key, std::string_view why) {
  if (status_.ok()) status_ = document_.refuse(path(key), why);
}

void Config::expected(std::string_view key, std::string_view wanted, const Json& got) {
  status_ = document_.expected(path(key), wanted, got);
}

void Config::convert(std::string_view key, const Json& json, int64_t& value) {
  if (!json.is_number_integer()) return expected(key, "an integer", json);
  if (json.is_number_unsigned() && json.get<uint64_t>() > uint64_t{INT64_MAX}) {
    return expected(key, "an integer of 64 bits", json);  // it would become another number
  }
  value = json.get<int64_t>();
}
void Config::convert(std::string_view key, const Json& json, double& value) {
  if (!json.is_number()) return expected(key, "a number", json);
  value = json.get<double>();
}
void Config::convert(std::string_view key, const Json& json, bool& value) {
  if (!json.is_boolean()) return expected(key, "true or false", json);
  value = json.get<bool>();
}
void Config::convert(std::string_view key, const Json& json, std::string& value) {
  if (!json.is_string()) return expected(key, "a string", json);
  value = json.get<std::string>();
}
void Config::convert(std::string_view key, const Json& json, std::vector<double>& value) {
  value.clear();
  if (!json.is_array()) return expected(key, "a list of numbers", json);
  for (const Json& element : json) {
    if (!element.is_number()) return expected(key, "a list of numbers", json);
    value.push_back(element.get<double>());
  }
}

}  // namespace shardweave::nn_internal

#include "shardweave/modules/checkpoint/strict_json.h"

#include <limits>
#include <set>

#include "absl/strings/str_join.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::checkpoint_internal {
namespace {

// Ends a reading: what is behind it would be kept, whatever is said of it.
struct TooDeep {};

// Looks at numbers alone.
struct WholeNumbers final : nlohmann::json_sax<Json> {
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t& text) override {
    if (text.find_first_of(".eE") == string_t::npos) too_large = text;
    return too_large.empty();
  }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return true; }
  bool key(string_t&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(size_t, const std::string&, const Json::exception&) override { return false; }

  std::string too_large;
};

}  // namespace

absl::StatusOr<Json> parse_strict(std::string_view text) {
  constexpr size_t kMostNested = 64;
  std::vector<std::set<std::string>> keys;  // of the objects around; of a list none
  std::string twice;
  bool is_twice = false;
  const auto note = [&](int /*depth*/, Json::parse_event_t event, Json& parsed) {
    using Event = Json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) keys.emplace_back();
    if (event == Event::object_end || event == Event::array_end) keys.pop_back();
    if (keys.size() > kMostNested) throw TooDeep();
    if (event == Event::key && !is_twice && !keys.back().insert(parsed.get<std::string>()).second) {
      twice = parsed.get<std::string>();
      is_twice = true;
    }
    return true;
  };
  Json json;
  try {
    json = Json::parse(text.begin(), text.end(), note);
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(str_cat("no JSON: ", std::string_view(error.what())));
  } catch (const TooDeep&) {
    return absl::InvalidArgumentError("JSON is nested deeper than 64 times");
  }
  if (is_twice) return absl::InvalidArgumentError(str_cat("the key \"", twice, "\" stands twice"));
  return json;
}

absl::Status check_whole_numbers(std::string_view text) {
  WholeNumbers numbers;
  Json::sax_parse(text.begin(), text.end(), &numbers);
  if (numbers.too_large.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(str_cat(numbers.too_large.substr(0, 60),
                                            " is a whole number of more than 64 bits: it would be "
                                            "rounded; put it in quotes"));
}

absl::Status unexpected(const JsonPath& path, std::string_view wanted, const Json& got) {
  std::string where = path.empty() ? "the text" : "";
  for (const std::string& key : path) {
    str_append(&where, where.empty() ? "" : ", ", "\"", key.substr(0, 200), "\"");
  }
  std::string text = got.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 60);
  return absl::InvalidArgumentError(str_cat(where, ": wanted ", wanted, ", not ", text));
}

std::optional<int64_t> as_size(const Json& json) {
  if (!json.is_number_unsigned()) return std::nullopt;
  const auto value = json.get<uint64_t>();
  if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return static_cast<int64_t>(value);
}

std::optional<Dims> as_sizes(const Json& json) {
  if (!json.is_array() || json.size() > 64) return std::nullopt;  // LibTorch has as many
  Dims sizes;
  for (const Json& size : json) {
    const std::optional<int64_t> value = as_size(size);
    if (!value.has_value()) return std::nullopt;
    sizes.push_back(*value);
  }
  return sizes;
}

std::optional<int64_t> bytes_of(absl::Span<const int64_t> shape, int64_t element_size) {
  int64_t bytes = element_size;
  bool is_empty = false;
  for (const int64_t size : shape) {
    is_empty = is_empty || size == 0;
    // The strides of an empty tensor are numbers, too.
    if (size > 0 && __builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return is_empty ? 0 : bytes;
}

absl::Status check_keys(const JsonPath& path, const Json& object,
                        const std::vector<std::string>& keys) {
  const std::string wanted = str_cat("an object with ", absl::StrJoin(keys, ", "));
  if (!object.is_object() || object.size() != keys.size()) {
    return unexpected(path, wanted, object);
  }
  for (const std::string& key : keys) {
    if (!object.contains(key)) return unexpected(path, wanted, object);
  }
  return absl::OkStatus();
}

}  // namespace shardweave::checkpoint_internal

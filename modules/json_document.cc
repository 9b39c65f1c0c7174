#include "json_document.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "shardweave/comm/str_cat.h"

namespace shardweave::modules_internal {
namespace {

// Reads a text and tells how far the reading has come.
class TrackedChar {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  TrackedChar(const char* at, const char** furthest) : at_(at), furthest_(furthest) {}
  const char& operator*() const { return *at_; }
  TrackedChar& operator++() {
    *furthest_ = std::max(*furthest_, ++at_);
    return *this;
  }
  friend bool operator==(const TrackedChar& a, const TrackedChar& b) { return a.at_ == b.at_; }

 private:
  const char* at_;
  const char** furthest_;
};

}  // namespace

absl::StatusOr<JsonDocument> JsonDocument::read(std::string_view text) {
  JsonDocument document;
  const char* furthest = text.data();
  const auto line = [&] { return 1 + std::count(text.data(), furthest, '\n'); };
  Path path;
  std::optional<Path> twice;
  const auto note_key = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event != Json::parse_event_t::key) return true;
    path.resize(static_cast<size_t>(depth) - 1);
    path.push_back(parsed.get<std::string>());
    if (!document.lines_.emplace(path, line()).second && !twice.has_value()) twice = path;
    return true;
  };
  try {
    document.json_ = Json::parse(TrackedChar(text.data(), &furthest),
                                 TrackedChar(text.data() + text.size(), &furthest), note_key);
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(
        str_cat("no JSON on line ", line(), ": ", std::string_view(error.what())));
  }
  if (twice.has_value()) return document.refuse(*twice, "stands twice");
  return document;
}

absl::Status JsonDocument::refuse(const Path& path, std::string_view why) const {
  if (path.empty()) return absl::InvalidArgumentError(str_cat("the text: ", why));
  std::string where;
  if (const auto found = lines_.find(path); found != lines_.end()) {
    str_append(&where, "line ", found->second, ", ");
  }
  for (const std::string& key : path) {
    str_append(&where, "\"", key, "\"", &key == &path.back() ? ": " : ", ");
  }
  return absl::InvalidArgumentError(str_cat(where, why));
}

absl::Status JsonDocument::expected(const Path& path, std::string_view wanted,
                                    const Json& got) const {
  const std::string text = got.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 60);
  return refuse(path, str_cat("wanted ", wanted, ", not ", text));
}

}  // namespace shardweave::modules_internal

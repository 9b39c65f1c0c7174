#include "shardweave/modules/json_document.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/fqn_pattern.h"

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

// Ends a reading: what is behind it would be kept, whatever is said of it.
struct TooMuch {
  std::string what;
};

}  // namespace

absl::StatusOr<JsonDocument> JsonDocument::read(std::string_view text) {
  constexpr size_t kMostNested = 100;
  constexpr size_t kMostPathBytes = size_t{1} << 28;  // each key is noted with those around it
  JsonDocument document;
  const char* furthest = text.data();
  const char* counted = furthest;
  int64_t line = 1;  // of `counted`
  const auto line_now = [&] {
    line += std::count(counted, furthest, '\n');
    counted = furthest;
    return line;
  };
  struct Frame {
    bool is_list;
    int64_t index = -1;  // of a list's element
    std::string key = "";
  };
  std::vector<Frame> frames;
  const auto path_now = [&] {
    Path path;
    for (const Frame& f : frames) path.push_back(f.is_list ? std::to_string(f.index) : f.key);
    return path;
  };
  std::optional<Path> twice;
  size_t path_bytes = 0;
  const auto note = [&](int /*depth*/, Json::parse_event_t event, Json& parsed) {
    using Event = Json::parse_event_t;
    const bool begins = event == Event::object_start || event == Event::array_start;
    if ((begins || event == Event::value) && !frames.empty() && frames.back().is_list) {
      ++frames.back().index;
    }
    if (begins) frames.push_back({event == Event::array_start});
    if (event == Event::object_end || event == Event::array_end) frames.pop_back();
    if (frames.size() > kMostNested) {
      throw TooMuch{str_cat("is nested deeper than ", kMostNested, " times")};
    }
    if (event == Event::key) {
      frames.back().key = parsed.get<std::string>();
      for (const Frame& f : frames) path_bytes += sizeof(std::string) + f.key.size();
      if (path_bytes > kMostPathBytes) throw TooMuch{"has too many keys, or too long ones"};
      const Path path = path_now();
      if (!document.lines_.emplace(path, line_now()).second && !twice.has_value()) twice = path;
    }
    return true;
  };
  try {
    document.json_ = Json::parse(TrackedChar(text.data(), &furthest),
                                 TrackedChar(text.data() + text.size(), &furthest), note);
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(
        str_cat("no JSON on line ", line_now(), ": ", std::string_view(error.what())));
  } catch (const TooMuch& too_much) {
    return document.refuse({}, too_much.what);
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

std::string did_you_mean(std::string_view wanted, const std::vector<std::string>& names) {
  const absl::StatusOr<FqnPattern> pattern = FqnPattern::parse(wanted);
  return pattern.ok() ? pattern->suggestion(names, /*most=*/1) : "";
}

}  // namespace shardweave::modules_internal

#include "shardweave/modules/sharding_plan_json.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <vector>

#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

using Json = nlohmann::ordered_json;
using Path = std::vector<std::string>;

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

// A text, and where its keys stand.
struct Document {
  Json json;
  std::map<Path, int64_t> lines;

  // "line 3, "parameter", "w": "
  std::string where(const Path& path) const {
    std::string result;
    if (const auto found = lines.find(path); found != lines.end()) {
      str_append(&result, "line ", found->second, ", ");
    }
    for (const std::string& key : path) str_append(&result, "\"", key, "\", ");
    if (path.empty()) return "the text: ";
    result.replace(result.size() - 2, 2, ": ");
    return result;
  }
  absl::Status refuse(const Path& path, std::string_view why) const {
    return absl::InvalidArgumentError(str_cat(where(path), why));
  }
  absl::Status expected(const Path& path, std::string_view wanted, const Json& got) const {
    return refuse(path,
                  str_cat("wanted ", wanted, ", not ",
                          got.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 60)));
  }
};

absl::StatusOr<Document> read(std::string_view text) {
  Document document;
  const char* furthest = text.data();
  Path path;
  std::optional<Path> twice;
  const auto note_key = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event != Json::parse_event_t::key) return true;
    path.resize(static_cast<size_t>(depth) - 1);
    path.push_back(parsed.get<std::string>());
    const int64_t line = 1 + std::count(text.data(), furthest, '\n');
    if (!document.lines.emplace(path, line).second && !twice.has_value()) twice = path;
    return true;
  };
  try {
    document.json = Json::parse(TrackedChar(text.data(), &furthest),
                                TrackedChar(text.data() + text.size(), &furthest), note_key);
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(str_cat("no JSON on line ",
                                              1 + std::count(text.data(), furthest, '\n'), ": ",
                                              std::string_view(error.what())));
  }
  if (twice.has_value()) return document.refuse(*twice, "stands twice");
  return document;
}

absl::StatusOr<PlanPlacements> parse_placements(const Document& document, const Json& json,
                                                Path path) {
  const auto placement_of = [&](const Json& text) -> absl::StatusOr<Placement> {
    if (!text.is_string()) return document.expected(path, "a placement such as \"S(0)\"", text);
    absl::StatusOr<Placement> placement = parse_placement(text.get_ref<const std::string&>());
    if (placement.ok()) return placement;
    return document.refuse(path, std::string(placement.status().message()));
  };
  if (json.is_string()) {
    absl::StatusOr<Layout> layout = Layout::parse(json.get_ref<const std::string&>());
    if (layout.ok()) return PlanPlacements(*std::move(layout));
    return document.refuse(path, std::string(layout.status().message()));
  }
  if (json.is_array()) {
    Placements placements;
    for (const Json& text : json) {
      absl::StatusOr<Placement> placement = placement_of(text);
      if (!placement.ok()) return placement.status();
      placements.push_back(*std::move(placement));
    }
    return PlanPlacements(std::move(placements));
  }
  if (!json.is_object()) {
    return document.expected(
        path, "placements such as {\"tp\": \"S(0)\"}, [\"R\", \"S(0)\"] or \"[R, S(0)]\"", json);
  }
  NamedPlacements named;
  path.emplace_back();
  for (const auto& [mesh_dim, text] : json.items()) {
    path.back() = mesh_dim;
    absl::StatusOr<Placement> placement = placement_of(text);
    if (!placement.ok()) return placement.status();
    named.emplace_back(mesh_dim, *std::move(placement));
  }
  return PlanPlacements(std::move(named));
}

template <typename Entries>
Json json_of(const Entries& entries) {
  Json result = Json::object();
  for (const auto& entry : entries) {
    if (result.contains(entry.pattern)) continue;
    if (const Layout* layout = entry.placements.by_position()) {
      result[entry.pattern] = layout->to_string();
      continue;
    }
    Json placements = Json::object();
    for (const auto& [mesh_dim, placement] : *entry.placements.named()) {
      placements[mesh_dim] = placement.to_string();
    }
    result[entry.pattern] = std::move(placements);
  }
  return result;
}

}  // namespace

absl::StatusOr<ShardingPlan> parse_sharding_plan(std::string_view text) {
  const absl::StatusOr<Document> document = read(text);
  if (!document.ok()) return document.status();
  const Json& json = document->json;
  if (!json.is_object()) return document->expected({}, "an object", json);
  ShardingPlan plan;
  for (const auto& [key, entries] : json.items()) {
    if (key != "parameter" && key != "forward") {
      return document->refuse({key}, "is not known; wanted \"parameter\" or \"forward\"");
    }
    if (!entries.is_object()) return document->expected({key}, "an object", entries);
    for (const auto& [pattern, value] : entries.items()) {
      const absl::StatusOr<FqnPattern> parsed = FqnPattern::parse(pattern);
      if (!parsed.ok()) {
        return document->refuse({key, pattern}, std::string(parsed.status().message()));
      }
      absl::StatusOr<PlanPlacements> placements =
          parse_placements(*document, value, {key, pattern});
      if (!placements.ok()) return placements.status();
      if (key == "parameter") plan.parameter.push_back({pattern, *std::move(placements)});
      if (key == "forward") plan.forward.push_back({pattern, *std::move(placements)});
    }
  }
  return plan;
}

std::string to_json(const ShardingPlan& plan) {
  Json json = {{"parameter", json_of(plan.parameter)}};
  if (!plan.forward.empty()) json["forward"] = json_of(plan.forward);
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace shardweave

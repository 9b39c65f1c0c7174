#include "shardweave/modules/parameter_plan_json.h"

#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

using Json = nlohmann::ordered_json;

absl::Status expected(std::string_view where, std::string_view wanted, const Json& got) {
  return absl::InvalidArgumentError(
      str_cat("plan: ", where, ": wanted ", wanted, ", not ",
              got.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 60)));
}

absl::StatusOr<PlanEntry> parse_entry(const std::string& pattern, const Json& json) {
  PlanEntry entry{pattern, {}};
  if (!json.is_object()) {
    return expected(str_cat("\"", pattern, "\""), "an object such as {\"tp\": \"S(0)\"}", json);
  }
  for (const auto& [mesh_dim, text] : json.items()) {
    const std::string where = str_cat("\"", pattern, "\", \"", mesh_dim, "\"");
    if (!text.is_string()) return expected(where, "a placement such as \"S(0)\"", text);
    absl::StatusOr<Placement> placement = parse_placement(text.get_ref<const std::string&>());
    if (!placement.ok()) {
      return absl::InvalidArgumentError(
          str_cat("plan: ", where, ": ", std::string(placement.status().message())));
    }
    entry.placements.emplace_back(mesh_dim, *std::move(placement));
  }
  return entry;
}

}  // namespace

absl::StatusOr<ParameterPlan> parse_parameter_plan(std::string_view text) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::parse_error& error) {
    return absl::InvalidArgumentError(
        str_cat("plan: no JSON at byte ", error.byte, ": ", error.what()));
  }
  if (!json.is_object()) return expected("the text", "an object", json);
  ParameterPlan plan;
  for (const auto& [key, lines] : json.items()) {
    if (key != "parameter") {
      return absl::InvalidArgumentError(
          str_cat("plan: \"", key, "\" is not known; wanted \"parameter\""));
    }
    if (!lines.is_object()) return expected("\"parameter\"", "an object", lines);
    for (const auto& [pattern, placements] : lines.items()) {
      absl::StatusOr<PlanEntry> entry = parse_entry(pattern, placements);
      if (!entry.ok()) return entry.status();
      plan.push_back(*std::move(entry));
    }
  }
  return plan;
}

std::string to_json(const ParameterPlan& plan) {
  Json lines = Json::object();
  for (const PlanEntry& entry : plan) {
    // The first of two lines with one pattern counts.
    if (lines.contains(entry.pattern)) continue;
    Json placements = Json::object();
    for (const auto& [mesh_dim, placement] : entry.placements)
      placements[mesh_dim] = placement.to_string();
    lines[entry.pattern] = std::move(placements);
  }
  return Json{{"parameter", std::move(lines)}}.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace shardweave

#include "shardweave/modules/sharding_plan_json.h"

#include <algorithm>
#include <utility>

#include "shardweave/modules/json_document.h"
#include "shardweave/modules/plugin.h"

namespace shardweave {
namespace {

using modules_internal::Json;
using modules_internal::JsonDocument;

absl::StatusOr<Placement> parse_one(const JsonDocument& document, const Json& json,
                                    const JsonDocument::Path& path) {
  if (!json.is_string()) return document.expected(path, "a placement such as \"S(0)\"", json);
  absl::StatusOr<Placement> placement = parse_placement(json.get_ref<const std::string&>());
  if (placement.ok()) return placement;
  return document.refuse(path, std::string(placement.status().message()));
}

absl::StatusOr<PlanPlacements> parse_placements(const JsonDocument& document, const Json& json,
                                                JsonDocument::Path path) {
  const auto placement_of = [&](const Json& text) { return parse_one(document, text, path); };
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

// "tp", ["dp", "tp"] or {"tp": "style"}.
absl::StatusOr<std::vector<ModuleEntry::Along>> parse_along(const JsonDocument& document,
                                                            const Json& json,
                                                            JsonDocument::Path path) {
  constexpr char kWanted[] =
      "mesh dimensions, \"tp\" or [\"dp\", \"tp\"], or {\"tp\": \"a style of the plug-in\"}";
  std::vector<ModuleEntry::Along> all;
  if (json.is_string()) {
    all.push_back({json.get<std::string>(), ""});
    return all;
  }
  if (!json.is_array() && !json.is_object()) return document.expected(path, kWanted, json);
  for (const auto& [key, value] : json.items()) {
    if (!value.is_string()) return document.expected(path, kWanted, value);
    if (json.is_array()) all.push_back({value.get<std::string>(), ""});
    if (json.is_object()) all.push_back({key, value.get<std::string>()});
  }
  return all;
}

// One part of a module's: {"up": "S(0)"}.
absl::Status parse_answer(const JsonDocument& document, const Json& json, JsonDocument::Path path,
                          std::vector<std::pair<std::string, Placement>>& answer) {
  if (!json.is_object()) return document.expected(path, "an object", json);
  path.emplace_back();
  for (const auto& [name, text] : json.items()) {
    path.back() = name;
    absl::StatusOr<Placement> placement = parse_one(document, text, path);
    if (!placement.ok()) return placement.status();
    answer.emplace_back(name, *std::move(placement));
  }
  return absl::OkStatus();
}

absl::Status parse_style(const JsonDocument& document, const Json& json,
                         const JsonDocument::Path& path, const std::string& style,
                         std::map<std::string, ModuleSharding>& all) {
  if (!json.is_object()) return document.expected(path, "an object", json);
  for (const auto& [key, value] : json.items()) {
    JsonDocument::Path inner = path;
    inner.push_back(key);
    absl::Status status;
    if (key == "parameter") {
      status = parse_answer(document, value, inner, all[style].parameter);
    } else if (key == "forward") {
      status = parse_answer(document, value, inner, all[style].forward);
    } else if (key != "styles" || !path.empty()) {
      status = document.refuse(inner, path.empty() ? "is not known; wanted \"parameter\", "
                                                     "\"forward\" or \"styles\""
                                                   : "is not known; wanted \"parameter\" or "
                                                     "\"forward\"");
    } else if (!value.is_object()) {
      status = document.expected(inner, "an object", value);
    } else {
      for (const auto& [name, its] : value.items()) {
        all[name];  // says that nothing of it is cut, if no more
        JsonDocument::Path of_style = inner;
        of_style.push_back(name);
        status = parse_style(document, its, of_style, name, all);
        if (!status.ok()) return status;
      }
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

Json json_of(const std::vector<ModuleEntry::Along>& along) {
  const bool has_styles =
      std::any_of(along.begin(), along.end(), [](const auto& a) { return !a.style.empty(); });
  Json json = has_styles ? Json::object() : Json::array();
  for (const ModuleEntry::Along& a : along) {
    if (has_styles) {
      json[a.mesh_dim] = a.style;
    } else {
      json.push_back(a.mesh_dim);
    }
  }
  return json;
}

Json json_of(const PlanPlacements& placements) {
  if (const Layout* layout = placements.by_position()) return layout->to_string();
  Json json = Json::object();
  for (const auto& [mesh_dim, placement] : *placements.named()) {
    json[mesh_dim] = placement.to_string();
  }
  return json;
}

// Patterns are a user's and may be no UTF-8.
std::string text_of(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

const PlanPlacements& value_of(const PlanEntry& entry) {
  return entry.placements;
}
const PlanPlacements& value_of(const ForwardEntry& entry) {
  return entry.placements;
}
const std::vector<ModuleEntry::Along>& value_of(const ModuleEntry& entry) {
  return entry.along;
}

template <typename Entries>
Json json_of_entries(const Entries& entries) {
  Json result = Json::object();
  for (const auto& entry : entries) {
    if (result.contains(entry.pattern)) continue;
    result[entry.pattern] = json_of(value_of(entry));
  }
  return result;
}

}  // namespace

absl::StatusOr<ShardingPlan> parse_sharding_plan(std::string_view text) {
  const absl::StatusOr<JsonDocument> document = JsonDocument::read(text);
  if (!document.ok()) return document.status();
  const Json& json = document->json();
  if (!json.is_object()) return document->expected({}, "an object", json);
  ShardingPlan plan;
  for (const auto& [key, entries] : json.items()) {
    if (key != "parameter" && key != "forward" && key != "module") {
      return document->refuse({key},
                              "is not known; wanted \"parameter\", \"forward\" or \"module\"");
    }
    if (!entries.is_object()) return document->expected({key}, "an object", entries);
    for (const auto& [pattern, value] : entries.items()) {
      const absl::StatusOr<FqnPattern> parsed = FqnPattern::parse(pattern);
      if (!parsed.ok()) {
        return document->refuse({key, pattern}, std::string(parsed.status().message()));
      }
      if (key == "module") {
        absl::StatusOr<std::vector<ModuleEntry::Along>> along =
            parse_along(*document, value, {key, pattern});
        if (!along.ok()) return along.status();
        plan.module.push_back({pattern, *std::move(along)});
        continue;
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

absl::StatusOr<std::map<std::string, ModuleSharding>> parse_module_sharding(std::string_view text) {
  const absl::StatusOr<JsonDocument> document = JsonDocument::read(text);
  if (!document.ok()) return document.status();
  std::map<std::string, ModuleSharding> all;
  absl::Status status = parse_style(*document, document->json(), {}, "", all);
  if (!status.ok()) return status;
  return all;
}

std::string to_json(const ShardingPlan& plan) {
  Json json = {{"parameter", json_of_entries(plan.parameter)}};
  if (!plan.forward.empty()) json["forward"] = json_of_entries(plan.forward);
  if (!plan.module.empty()) json["module"] = json_of_entries(plan.module);
  return text_of(json);
}

std::string resolved_to_json(const ResolvedPlan& resolved) {
  Json parameter = Json::array(), forward = Json::array();
  for (const ResolvedTensor& t : resolved.tensors) {
    parameter.push_back({{"names", t.fqns},
                         {"shape", t.sizes},
                         {"is_buffer", t.is_buffer},
                         {"layout", t.layout.to_string()},
                         {"local_shape", t.local_sizes},
                         {"pattern", t.entry.has_value() ? Json(t.pattern) : Json()}});
  }
  for (const ResolvedForward& f : resolved.forward) {
    forward.push_back({{"module", f.module},
                       {"value", f.value},
                       {"placements", json_of(f.placements)},
                       {"pattern", f.pattern}});
  }
  return text_of({{"parameter", std::move(parameter)}, {"forward", std::move(forward)}});
}

}  // namespace shardweave

#include "shardweave/modules/parallel_style_json.h"

#include <cstdint>
#include <limits>
#include <utility>

#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/json_document.h"

namespace shardweave {
namespace {

using modules_internal::Json;
using modules_internal::JsonDocument;

// Reads the options of one style; the first error is kept.
class Options {
 public:
  Options(const JsonDocument& document, const Json& json, JsonDocument::Path path)
      : document_(document), json_(json), path_(std::move(path)) {}

  std::optional<Placement> placement(const char* key) {
    const Json* value = take(key);
    return value == nullptr ? std::nullopt : std::optional(read(key, *value));
  }

  // One, or a list.
  std::vector<std::optional<Placement>> placements(const char* key) {
    std::vector<std::optional<Placement>> values;
    const Json* value = take(key);
    if (value == nullptr) return values;
    if (!value->is_array()) return {read(key, *value)};
    for (const Json& element : *value) {
      values.push_back(element.is_null() ? std::nullopt : std::optional(read(key, element)));
    }
    return values;
  }

  int64_t number(const char* key, int64_t otherwise, int64_t least) {
    const Json* value = take(key);
    if (value == nullptr) return otherwise;
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    const bool fits = value->is_number_integer() &&
                      (value->is_number_unsigned() ? value->get<uint64_t>() <= kMost
                                                   : value->get<int64_t>() <= kMost) &&
                      value->get<int64_t>() >= least;
    if (fits) return value->get<int64_t>();
    fail(
        document_.expected(at(key), str_cat("a whole number from ", least, " to ", kMost), *value));
    return otherwise;
  }

  // What nobody has asked for.
  std::vector<std::pair<std::string, Placement>> others() {
    std::vector<std::pair<std::string, Placement>> values;
    if (!json_.is_object()) return values;
    for (const auto& [key, value] : json_.items()) {
      if (is_known(key)) continue;
      // Words of other styles, or nearly of this one: no layer's argument is called so.
      if (key == "inputs" || key == "output" || key == "outputs" || key == "heads" ||
          key == "sequence_dim") {
        fail(document_.refuse(at(key),
                              "is no argument's name; wanted \"input\", or an argument as "
                              "the layer's operator calls it"));
        continue;
      }
      values.emplace_back(key, read(key, value));
    }
    return values;
  }

  absl::Status finish(std::string_view style, bool takes_others = false) const {
    if (!status_.ok() || !json_.is_object() || takes_others) return status_;
    for (const auto& [key, value] : json_.items()) {
      if (is_known(key)) continue;
      std::string known;
      for (const std::string& name : known_) str_append(&known, known.empty() ? "" : ", ", name);
      return document_.refuse(at(key),
                              str_cat("is no option of \"", style, "\", which has ", known));
    }
    return status_;
  }

 private:
  JsonDocument::Path at(const std::string& key) const {
    JsonDocument::Path path = path_;
    path.push_back(key);
    return path;
  }
  bool is_known(std::string_view key) const {
    if (key == "style") return true;
    for (const std::string& name : known_) {
      if (name == key) return true;
    }
    return false;
  }
  const Json* take(const char* key) {
    known_.emplace_back(key);
    return json_.is_object() && json_.contains(key) ? &json_[key] : nullptr;
  }
  Placement read(const std::string& key, const Json& value) {
    if (!value.is_string()) {
      fail(document_.expected(at(key), "a placement such as \"S(-1)\"", value));
      return Replicate();
    }
    absl::StatusOr<Placement> placement = parse_placement(value.get_ref<const std::string&>());
    if (placement.ok()) return *std::move(placement);
    fail(document_.refuse(at(key), std::string(placement.status().message())));
    return Replicate();
  }
  void fail(absl::Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  const JsonDocument& document_;
  const Json& json_;
  const JsonDocument::Path path_;
  std::vector<std::string> known_;
  absl::Status status_;
};

absl::StatusOr<ParallelStyle> style_of(const JsonDocument& document, const Json& json,
                                       const JsonDocument::Path& path) {
  const bool is_object = json.is_object();
  if (!json.is_string() && !(is_object && json.contains("style"))) {
    return document.expected(
        path, R"(a style such as "colwise", or an object such as {"style": "colwise"})", json);
  }
  const Json& name = is_object ? json["style"] : json;
  JsonDocument::Path name_path = path;
  if (is_object) name_path.emplace_back("style");
  if (!name.is_string()) return document.expected(name_path, "a style such as \"colwise\"", name);
  const std::string& style = name.get_ref<const std::string&>();
  Options options(document, json, path);
  const auto finished = [&](ParallelStyle made,
                            bool takes_others = false) -> absl::StatusOr<ParallelStyle> {
    const absl::Status status = options.finish(style, takes_others);
    if (!status.ok()) return status;
    return made;
  };
  if (style == "colwise") {
    ColwiseParallel s;
    s.input = options.placement("input");
    s.output = options.placement("output");
    return finished(s);
  }
  if (style == "rowwise") {
    RowwiseParallel s;
    s.input = options.placement("input");
    s.output = options.placement("output");
    return finished(s);
  }
  if (style == "pairwise") {
    PairwiseParallel s;
    s.output = options.placement("output");
    s.heads = options.number("heads", 0, 1);
    return finished(s);
  }
  if (style == "sequence") {
    SequenceParallel s;
    constexpr int64_t kLeast = -64;  // as many dimensions as a tensor may have
    s.sequence_dim = static_cast<int>(options.number("sequence_dim", s.sequence_dim, kLeast));
    s.heads = options.number("heads", 0, 1);
    return finished(s);
  }
  if (style == "prepare_input") {
    PrepareModuleInput s;
    s.inputs = options.placements("input");
    s.by_name = options.others();
    return finished(std::move(s), /*takes_others=*/true);
  }
  if (style == "prepare_output") {
    PrepareModuleOutput s;
    s.outputs = options.placements("output");
    return finished(std::move(s));
  }
  return document.refuse(
      name_path, str_cat("the style \"", style,
                         "\" is not known; there are: colwise, rowwise, pairwise, sequence, "
                         "prepare_input, prepare_output"));
}

}  // namespace

absl::StatusOr<StylePlan> parallel_styles_from_json(std::string_view text) {
  const absl::StatusOr<JsonDocument> document = JsonDocument::read(text);
  if (!document.ok()) return document.status();
  const Json& json = document->json();
  if (!json.is_object()) return document->expected({}, "an object", json);
  StylePlan styles;
  // Of the whole module: {"style": "pairwise"}. A module called "style" has its own in an object.
  if (json.contains("style") && json["style"].is_string()) {
    absl::StatusOr<ParallelStyle> style = style_of(*document, json, {});
    if (!style.ok()) return style.status();
    styles.push_back({"", *std::move(style)});
    return styles;
  }
  for (const auto& [pattern, value] : json.items()) {
    const absl::StatusOr<FqnPattern> parsed = FqnPattern::parse(pattern);
    if (!parsed.ok()) {
      return document->refuse({pattern}, std::string(parsed.status().message()));
    }
    absl::StatusOr<ParallelStyle> style = style_of(*document, value, {pattern});
    if (!style.ok()) return style.status();
    styles.push_back({pattern, *std::move(style)});
  }
  return styles;
}

}  // namespace shardweave

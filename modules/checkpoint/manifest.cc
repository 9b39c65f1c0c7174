#include "shardweave/modules/checkpoint/manifest.h"

#include <optional>
#include <string>
#include <vector>

#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/checkpoint/checksum.h"
#include "shardweave/modules/checkpoint/safetensors.h"
#include "shardweave/modules/checkpoint/strict_json.h"

namespace shardweave {
namespace {

using namespace checkpoint_internal;

constexpr char kFormat[] = "shardweave-checkpoint";

// How a manifest ends that begins so.
std::string checksum_line(std::string_view text) {
  return str_cat(" \"xxh3\": \"", to_hex(checksum_of(text.data(), text.size())), "\"\n}\n");
}

Json to_list(const Dims& dims) {
  return std::vector<int64_t>(dims.begin(), dims.end());
}

absl::StatusOr<SavedPiece> parse_piece(const JsonPath& path, const Json& json,
                                       const SavedTensor& tensor, const Manifest& manifest) {
  std::vector<std::string> keys = {"file", "offset", "shape", "xxh3"};
  const bool has_sum = json.is_object() && json.contains("sum");
  if (has_sum) keys.emplace_back("sum");
  absl::Status status = check_keys(path, json, keys);
  if (!status.ok()) return status;
  const auto at = [&](const char* key) {
    JsonPath place = path;
    place.emplace_back(key);
    return place;
  };
  SavedPiece piece;
  const Json& file = json["file"];
  if (!file.is_string() || !manifest.files.contains(file.get<std::string>())) {
    return unexpected(at("file"), "one of \"files\"", file);
  }
  piece.file = file.get<std::string>();
  const std::optional<Dims> offset = as_sizes(json["offset"]);
  if (!offset.has_value() || offset->size() != tensor.shape.size()) {
    return unexpected(at("offset"), str_cat("a list of ", tensor.shape.size(), " whole numbers"),
                      json["offset"]);
  }
  const std::optional<Dims> shape = as_sizes(json["shape"]);
  bool fits = shape.has_value() && shape->size() == tensor.shape.size();
  for (size_t d = 0; fits && d < tensor.shape.size(); ++d) {
    fits = (*shape)[d] > 0 && (*offset)[d] < tensor.shape[d] &&
           (*shape)[d] <= tensor.shape[d] - (*offset)[d];
  }
  if (!fits) {
    return unexpected(at("shape"),
                      str_cat("a part of the tensor, ", whole_box(tensor.shape).to_string()),
                      json["shape"]);
  }
  piece.box = {*offset, *shape};
  const auto digits = [&](const char* key) {
    const Json& text = json[key];
    return text.is_string() ? from_hex(text.get<std::string>()) : std::nullopt;
  };
  const std::optional<uint64_t> xxh3 = digits("xxh3");
  if (!xxh3.has_value()) return unexpected(at("xxh3"), "16 digits of base 16", json["xxh3"]);
  piece.xxh3 = *xxh3;
  if (!has_sum) return piece;
  piece.sum = digits("sum");
  if (!piece.sum.has_value()) return unexpected(at("sum"), "16 digits of base 16", json["sum"]);
  return piece;
}

absl::StatusOr<SavedTensor> parse_tensor(const std::string& name, const Json& json,
                                         const Manifest& manifest, int64_t& comparisons) {
  absl::Status status = check_keys({"tensors", name}, json, {"dtype", "shape", "pieces"});
  if (!status.ok()) return status;
  SavedTensor tensor;
  const Json& dtype = json["dtype"];
  const std::optional<DType> known =
      dtype.is_string() ? safetensors_dtype(dtype.get<std::string>()) : std::nullopt;
  if (!known.has_value()) return unexpected({"tensors", name, "dtype"}, "a dtype", dtype);
  tensor.dtype = *known;
  const std::optional<Dims> shape = as_sizes(json["shape"]);
  const std::optional<int64_t> bytes =
      shape.has_value() ? bytes_of(*shape, element_size(tensor.dtype)) : std::nullopt;
  if (!bytes.has_value()) {
    return unexpected({"tensors", name, "shape"},
                      "a list of whole numbers, the bytes of which are below 2^63", json["shape"]);
  }
  tensor.shape = *shape;
  const Json& pieces = json["pieces"];
  if (!pieces.is_array()) return unexpected({"tensors", name, "pieces"}, "a list", pieces);
  // Disjoint parts of a whole that has as many elements are the whole; the sum cannot overflow before it
  // has become too large.
  const int64_t numel = *bytes / element_size(tensor.dtype);
  int64_t held = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    absl::StatusOr<SavedPiece> piece =
        parse_piece({"tensors", name, "pieces", std::to_string(i)}, pieces[i], tensor, manifest);
    if (!piece.ok()) return piece.status();
    tensor.pieces.push_back(*std::move(piece));
    const int64_t its = tensor.pieces.back().box.numel();
    if (its > numel - held) {
      return unexpected({"tensors", name, "pieces"}, "parts that do not overlap", pieces[i]);
    }
    held += its;
  }
  if (held != numel) {
    return unexpected({"tensors", name, "pieces"},
                      str_cat("all ", numel, " elements; these are ", held), pieces);
  }
  std::vector<Box> boxes;
  for (const SavedPiece& piece : tensor.pieces) boxes.push_back(piece.box);
  const auto two = find_overlap(boxes, comparisons);
  if (!two.ok()) {
    return absl::Status(two.status().code(),
                        str_cat("tensors.", name, ": ", std::string(two.status().message())));
  }
  if (two->has_value()) {
    const auto [first, second] = **two;
    return unexpected({"tensors", name, "pieces", std::to_string(second)},
                      str_cat("a part that does not overlap piece ", first), pieces[second]);
  }
  return tensor;
}

absl::Status parse_files(const Json& json, Manifest& manifest) {
  if (!json.is_object()) return unexpected({"files"}, "an object", json);
  int64_t total = 0;
  for (const auto& [name, file] : json.items()) {
    if (name.empty() || name.front() == '.' || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos) {
      return unexpected({"files", name}, "the name of a file beside the manifest", name);
    }
    absl::Status status = check_keys({"files", name}, file, {"bytes", "xxh3"});
    if (!status.ok()) return status;
    const std::optional<int64_t> bytes = as_size(file["bytes"]);
    if (!bytes.has_value()) {
      return unexpected({"files", name, "bytes"}, "a whole number", file["bytes"]);
    }
    if (__builtin_add_overflow(total, *bytes, &total)) {
      return unexpected({"files", name, "bytes"}, "bytes that are below 2^63 in all files", *bytes);
    }
    const std::optional<uint64_t> sum =
        file["xxh3"].is_string() ? from_hex(file["xxh3"].get<std::string>()) : std::nullopt;
    if (!sum.has_value()) {
      return unexpected({"files", name, "xxh3"}, "16 digits of base 16", file["xxh3"]);
    }
    manifest.files[name] = {*bytes, *sum};
  }
  return absl::OkStatus();
}

}  // namespace

std::string Manifest::to_json() const {
  Json json = {{"format", kFormat}, {"version", kVersion}, {"step", step}};
  json["world"] = {{"size", world_size}, {"mesh", mesh}};
  json["tensors"] = Json::object();
  for (const auto& [name, tensor] : tensors) {
    Json pieces = Json::array();
    for (const SavedPiece& piece : tensor.pieces) {
      pieces.push_back({{"file", piece.file},
                        {"offset", to_list(piece.box.offset)},
                        {"shape", to_list(piece.box.shape)},
                        {"xxh3", to_hex(piece.xxh3)}});
      if (piece.sum.has_value()) pieces.back()["sum"] = to_hex(*piece.sum);
    }
    json["tensors"][name] = {{"dtype", std::string(safetensors_name(tensor.dtype))},
                             {"shape", to_list(tensor.shape)},
                             {"pieces", std::move(pieces)}};
  }
  json["aliases"] = Json::object();
  for (const auto& [name, of] : aliases) json["aliases"][name] = of;
  json["without_state"] = without_state;
  json["files"] = Json::object();
  for (const auto& [name, file] : files) {
    json["files"][name] = {{"bytes", file.bytes}, {"xxh3", to_hex(file.xxh3)}};
  }
  json["values"] = Json::object();
  for (const auto& [name, value] : values) json["values"][name] = Json::parse(value);
  if (!resumes.empty()) json["resumes"] = resumes;
  // A line for each thing, not for each number of it.
  std::string text = "{\n";
  for (const char* key : {"format", "version", "step", "world", "tensors", "aliases",
                          "without_state", "files", "values", "resumes"}) {
    if (!json.contains(key)) continue;
    const Json& value = json[key];
    str_append(&text, " ", Json(key).dump(), ": ");
    const bool is_list = value.is_object() && std::string_view(key) != "world";
    if (!is_list) {
      text += value.dump();
    } else {
      text += "{";
      for (auto it = value.begin(); it != value.end(); ++it) {
        str_append(&text, it == value.begin() ? "\n  " : ",\n  ", Json(it.key()).dump(), ": ",
                   it.value().dump());
      }
      text += "}";
    }
    text += ",\n";
  }
  text += checksum_line(text);
  return text;
}

bool has_its_checksum(std::string_view text) {
  const size_t line = checksum_line(text).size();
  if (text.size() < line) return false;
  const std::string_view rest = text.substr(0, text.size() - line);
  return text.substr(rest.size()) == checksum_line(rest);
}

absl::StatusOr<Manifest> Manifest::parse(std::string_view text) {
  absl::StatusOr<Json> parsed = parse_strict(text);
  if (!parsed.ok()) return parsed.status();
  const Json& json = *parsed;
  if (!json.is_object() || !json.contains("format") || json["format"] != kFormat) {
    return unexpected({}, str_cat("an object with \"format\": \"", kFormat, "\""), json);
  }
  if (!json.contains("version") || !as_size(json["version"]).has_value()) {
    return unexpected({"version"}, "a whole number",
                      json.contains("version") ? json["version"] : Json());
  }
  if (json["version"] != kVersion) {
    return absl::UnimplementedError(str_cat("version ", json["version"].dump(),
                                            " of the format; this library reads ", kVersion));
  }
  std::vector<std::string> keys = {"format",  "version",       "step",  "world",  "tensors",
                                   "aliases", "without_state", "files", "values", "xxh3"};
  if (json.contains("resumes")) keys.emplace_back("resumes");
  absl::Status status = check_keys({}, json, keys);
  if (!status.ok()) return status;
  Manifest manifest;
  const std::optional<int64_t> step = as_size(json["step"]);
  if (!step.has_value()) return unexpected({"step"}, "a whole number", json["step"]);
  manifest.step = *step;
  const Json& world = json["world"];
  status = check_keys({"world"}, world, {"size", "mesh"});
  if (!status.ok()) return status;
  const std::optional<int64_t> size = as_size(world["size"]);
  if (!size.has_value() || !world["mesh"].is_string()) {
    return unexpected({"world"}, "a number of ranks, and a mesh as text", world);
  }
  manifest.world_size = *size;
  manifest.mesh = world["mesh"].get<std::string>();
  status = parse_files(json["files"], manifest);
  if (!status.ok()) return status;
  if (!json["tensors"].is_object()) return unexpected({"tensors"}, "an object", json["tensors"]);
  int64_t comparisons = kMostBoxComparisons;
  for (const auto& [name, value] : json["tensors"].items()) {
    absl::StatusOr<SavedTensor> tensor = parse_tensor(name, value, manifest, comparisons);
    if (!tensor.ok()) return tensor.status();
    manifest.tensors[name] = *std::move(tensor);
  }
  const Json& aliases = json["aliases"];
  if (!aliases.is_object()) return unexpected({"aliases"}, "an object", aliases);
  for (const auto& [name, of] : aliases.items()) {
    if (!of.is_string() || !manifest.tensors.contains(of.get<std::string>()) ||
        manifest.tensors.contains(name)) {
      return unexpected({"aliases", name}, "another name of one of \"tensors\"", of);
    }
    manifest.aliases[name] = of.get<std::string>();
  }
  if (!json["without_state"].is_array()) {
    return unexpected({"without_state"}, "a list", json["without_state"]);
  }
  for (const Json& prefix : json["without_state"]) {
    if (!prefix.is_string()) return unexpected({"without_state"}, "a list of texts", prefix);
    manifest.without_state.insert(prefix.get<std::string>());
  }
  if (!json["values"].is_object()) return unexpected({"values"}, "an object", json["values"]);
  for (const auto& [name, value] : json["values"].items()) {
    manifest.values[name] = value.dump();
  }
  if (!json.contains("resumes")) return manifest;
  if (!json["resumes"].is_array()) return unexpected({"resumes"}, "a list", json["resumes"]);
  for (const Json& name : json["resumes"]) {
    if (!name.is_string() || !manifest.values.contains(name.get<std::string>())) {
      return unexpected({"resumes"}, "a list of names of \"values\"", name);
    }
    manifest.resumes.insert(name.get<std::string>());
  }
  return manifest;
}

std::string piece_name(std::string_view tensor, absl::Span<const int64_t> shape, const Box& box) {
  if (box == whole_box(shape)) return std::string(tensor);
  return str_cat(tensor, box.to_string());
}

absl::StatusOr<std::string> normalized_json(std::string_view text) {
  const absl::StatusOr<Json> json = parse_strict(text);
  if (!json.ok()) return json.status();
  if (absl::Status status = check_whole_numbers(text); !status.ok()) return status;
  return json->dump();
}

}  // namespace shardweave

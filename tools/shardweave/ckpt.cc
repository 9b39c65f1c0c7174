#include "ckpt.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/checkpoint/checkpoint_directory.h"
#include "shardweave/modules/checkpoint/rewrite_checkpoint.h"
#include "shardweave/modules/checkpoint/safetensors_tensor.h"
#include "shardweave/modules/checkpoint/tensor_source.h"
#include "shardweave/modules/checkpoint/torch_files.h"
#include "shardweave/modules/hugging_face/model_files.h"
#include "shardweave/modules/hugging_face/names.h"
#include "shardweave/modules/hugging_face/pretrained.h"
#include "shardweave/tools/progress/progress_bar.h"

namespace shardweave_tool {
namespace {

using namespace shardweave;
using Json = nlohmann::ordered_json;

using Words = std::vector<std::string>;

// --- what is looked at ---------------------------------------------------------------------------

// A checkpoint, or what others have saved.
struct Opened {
  std::string path;
  std::optional<Manifest> manifest;
  std::vector<TensorSource> tensors;

  int64_t bytes() const {
    int64_t sum = 0;
    for (const TensorSource& tensor : tensors) sum += tensor.bytes();
    return sum;
  }
  int64_t pieces_of(const std::string& name) const {
    return manifest.has_value() ? static_cast<int64_t>(manifest->tensors.at(name).pieces.size())
                                : 1;
  }
};

// Of weights; else it is a directory.
bool names_file(const std::string& path) {
  for (const char* end : {".safetensors", ".json", ".pt", ".pth", ".bin"}) {
    if (path.ends_with(end)) return true;
  }
  return false;
}

absl::StatusOr<Opened> open_any(const std::string& path) {
  Opened opened{.path = path};
  const bool is_file = names_file(path);
  const absl::StatusOr<std::string> checkpoint =
      is_file ? absl::StatusOr<std::string>(absl::NotFoundError("")) : find_checkpoint(path);
  if (!checkpoint.ok() && !absl::IsNotFound(checkpoint.status())) return checkpoint.status();
  absl::StatusOr<std::vector<TensorSource>> tensors;
  if (checkpoint.ok()) {
    absl::StatusOr<Manifest> manifest = read_manifest(*checkpoint);
    if (!manifest.ok()) return manifest.status();
    opened.path = *checkpoint;
    opened.manifest = *std::move(manifest);
    tensors = checkpoint_sources(*checkpoint, *opened.manifest);
  } else {
    tensors = weight_sources(path);
    if (absl::IsNotFound(tensors.status()) && !is_file) {
      return absl::NotFoundError(absl::StrCat("'", path, "' has neither a checkpoint nor weights: ",
                                              std::string(tensors.status().message())));
    }
  }
  if (!tensors.ok()) return tensors.status();
  opened.tensors = *std::move(tensors);
  return opened;
}

absl::StatusOr<Opened> open_checkpoint(const std::string& path) {
  absl::StatusOr<Opened> opened = open_any(path);
  if (opened.ok() && !opened->manifest.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "' is no checkpoint; wanted one, or a directory of them"));
  }
  return opened;
}

std::string size_of(int64_t bytes) {
  constexpr double kKilo = 1000;
  const char* units[] = {"B", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= kKilo && unit + 1 < std::size(units)) {
    value /= kKilo;
    ++unit;
  }
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.1f %s", value, units[unit]);
}

std::string in_brackets(const Dims& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::vector<int64_t> list_of(const Dims& shape) {
  return {shape.begin(), shape.end()};
}

// Columns under each other; the last is not padded.
std::string table(const std::vector<Words>& rows) {
  std::vector<size_t> widths;
  for (const Words& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Words& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      absl::StrAppend(&text, row[i]);
      if (i + 1 < row.size()) text.append(widths[i] - row[i].size() + 2, ' ');
    }
    text += '\n';
  }
  return text;
}

std::string printed(const CkptFlags& flags, const Json& json, const std::string& text) {
  return flags.json ? json.dump() + "\n" : text;
}

// Of bytes; where the work is long enough to be waited for.
class Progress {
 public:
  Progress(const std::string& title, int64_t total, int64_t steps = 100)
      : total_(std::max<int64_t>(total, 1)), steps_(std::max<int64_t>(steps, 1)) {
    constexpr int64_t kLong = int64_t{256} << 20;
    const bool terminal = ::isatty(STDERR_FILENO) != 0;
    if (!terminal && total < kLong) return;
    bar_ = std::make_unique<ProgressBar>(
        ProgressBarOptions{.title = title,
                           .steps = steps_,
                           .unit = "MB",
                           .per_step = std::max<int64_t>(total / steps_ / 1'000'000, 1),
                           .out = &std::cerr,
                           .terminal = terminal});
  }
  void add(int64_t bytes) {
    done_ += bytes;
    if (bar_ == nullptr) return;
    while (bar_->done() < steps_ &&
           static_cast<double>(done_) * static_cast<double>(steps_) >=
               static_cast<double>(total_) * static_cast<double>(bar_->done() + 1)) {
      bar_->step_done(size_of(done_));
    }
  }

 private:
  const int64_t total_, steps_;
  int64_t done_ = 0;
  std::unique_ptr<ProgressBar> bar_;
};

// --- ls, show ------------------------------------------------------------------------------------

// The checkpoints of a directory, or the one that it is.
absl::StatusOr<Words> checkpoints_in(const std::string& path) {
  const absl::StatusOr<std::vector<int64_t>> steps = list_checkpoints(path);
  if (!steps.ok()) return steps.status();
  if (steps->empty()) {
    const absl::StatusOr<std::string> found = find_checkpoint(path);
    return found.ok() ? absl::StatusOr<Words>(Words{*found}) : found.status();
  }
  Words paths;
  for (const int64_t step : *steps) paths.push_back(join_path(path, checkpoint_name(step)));
  return paths;
}

absl::StatusOr<CkptOutcome> run_ls(const Words& args, const CkptFlags& flags) {
  const absl::StatusOr<Words> paths = checkpoints_in(args[0]);
  if (!paths.ok()) return paths.status();
  Json json = Json::array();
  std::vector<Words> rows = {{"step", "size", "tensors", "files", "saved by", "path"}};
  for (const std::string& path : *paths) {
    const absl::StatusOr<Manifest> manifest = read_manifest(path);
    if (!manifest.ok()) return manifest.status();
    int64_t bytes = 0;
    for (const auto& [name, file] : manifest->files) bytes += file.bytes;
    json.push_back({{"path", path},
                    {"step", manifest->step},
                    {"bytes", bytes},
                    {"tensors", manifest->tensors.size()},
                    {"files", manifest->files.size()},
                    {"ranks", manifest->world_size},
                    {"mesh", manifest->mesh}});
    rows.push_back({absl::StrCat(manifest->step), size_of(bytes),
                    absl::StrCat(manifest->tensors.size()), absl::StrCat(manifest->files.size()),
                    absl::StrCat(manifest->world_size, " (", manifest->mesh, ")"), path});
  }
  return CkptOutcome{printed(flags, json, table(rows))};
}

absl::StatusOr<CkptOutcome> run_show(const Words& args, const CkptFlags& flags) {
  const absl::StatusOr<Opened> opened = open_any(args[0]);
  if (!opened.ok()) return opened.status();
  const std::string wanted = args.size() > 1 ? args[1] : "";
  Json json = {{"path", opened->path}, {"bytes", opened->bytes()}, {"tensors", Json::array()}};
  std::vector<Words> rows = {{"tensor", "dtype", "shape", "size", "pieces"}};
  for (const TensorSource& tensor : opened->tensors) {
    if (!absl::StrContains(tensor.name, wanted)) continue;
    const std::string dtype(safetensors_name(tensor.dtype));
    const int64_t pieces = opened->pieces_of(tensor.name);
    json["tensors"].push_back({{"name", tensor.name},
                               {"dtype", dtype},
                               {"shape", list_of(tensor.shape)},
                               {"bytes", tensor.bytes()},
                               {"pieces", pieces}});
    rows.push_back({tensor.name, dtype, in_brackets(tensor.shape), size_of(tensor.bytes()),
                    absl::StrCat(pieces)});
  }
  std::string text = table(rows);
  if (!wanted.empty() && rows.size() == 1) {
    return absl::NotFoundError(
        absl::StrCat("'", opened->path, "' has no tensor with '", wanted, "' in its name"));
  }
  if (opened->manifest.has_value()) {
    json["step"] = opened->manifest->step;
    json["aliases"] = Json::object();
    json["values"] = Json::object();
    for (const auto& [alias, name] : opened->manifest->aliases) {
      json["aliases"][alias] = name;
      if (wanted.empty()) absl::StrAppend(&text, alias, " is ", name, "\n");
    }
    for (const auto& [name, value] : opened->manifest->values) {
      json["values"][name] = Json::parse(value);
      if (wanted.empty()) absl::StrAppend(&text, "value ", name, ": ", value, "\n");
    }
  }
  if (wanted.empty()) {
    absl::StrAppend(&text, opened->tensors.size(), " tensors, ", size_of(opened->bytes()), "\n");
  }
  return CkptOutcome{printed(flags, json, text)};
}

// --- fsck ----------------------------------------------------------------------------------------

// All that is wrong with one, a message each.
Words check(const std::string& path, const std::shared_ptr<FileSystem>& fs) {
  const absl::StatusOr<Manifest> manifest = read_manifest(path, fs.get());
  if (!manifest.ok()) return {std::string(manifest.status().message())};
  int64_t total = 0;
  for (const auto& [name, file] : manifest->files) total += file.bytes;
  Words errors;
  const auto count = static_cast<int64_t>(manifest->files.size());
  Progress progress(absl::StrCat("reading ", path), total, /*steps=*/count);
  int64_t i = 0;
  for (const auto& [name, file] : manifest->files) {
    const absl::Status status =
        checkpoint_internal::verify_files(path, *manifest, fs, /*rank=*/i++, /*num_ranks=*/count);
    if (!status.ok()) errors.emplace_back(status.message());
    progress.add(file.bytes);
  }
  const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs->list(path);
  if (!entries.ok()) return {std::string(entries.status().message())};
  for (const DirectoryEntry& entry : *entries) {
    if (entry.name == checkpoint_internal::kManifestName || manifest->files.contains(entry.name)) {
      continue;
    }
    errors.push_back(absl::StrCat("'", join_path(path, entry.name), "' is not in the manifest"));
  }
  return errors;
}

absl::StatusOr<CkptOutcome> run_fsck(const Words& args, const CkptFlags& flags) {
  const absl::StatusOr<Words> paths = checkpoints_in(args[0]);
  if (!paths.ok()) return paths.status();
  const std::shared_ptr<FileSystem> fs = posix_file_system();
  CkptOutcome outcome;
  Json json = Json::array();
  std::string text;
  for (const std::string& path : *paths) {
    const Words errors = check(path, fs);
    outcome.ok = outcome.ok && errors.empty();
    json.push_back({{"path", path}, {"ok", errors.empty()}, {"errors", errors}});
    absl::StrAppend(&text, path, errors.empty() ? ": whole\n" : ": damaged\n");
    for (const std::string& error : errors) absl::StrAppend(&text, "  ", error, "\n");
  }
  // One behind them that has lost its manifest.
  if (const absl::Status newest = find_checkpoint(args[0]).status(); !newest.ok()) {
    const std::string error(newest.message());
    outcome.ok = false;
    json.push_back({{"path", args[0]}, {"ok", false}, {"errors", {error}}});
    absl::StrAppend(&text, args[0], ": damaged\n  ", error, "\n");
  }
  outcome.text = printed(flags, json, text);
  return outcome;
}

// --- diff ----------------------------------------------------------------------------------------

// What differs in the values of two tensors of one shape.
struct Difference {
  int64_t count = 0;   // elements
  double largest = 0;  // |a - b|; NaN where one of the two is
};

at::Tensor read_box(const TensorSource& tensor, const Box& box) {
  at::Tensor result = at::empty(at::IntArrayRef(box.shape.data(), box.shape.size()),
                                at::TensorOptions(scalar_type_of(tensor.dtype)));
  throw_if_error(tensor.read(box, box, result.data_ptr()));
  return result;
}

bool is_whole(const at::Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
}

// Whole numbers of up to 64 bits, of which a double does not hold all.
void compare_whole(const at::Tensor& x, const at::Tensor& y, Difference& result) {
  // As they are in 64 bits, and which of them are below 0.
  const auto bits = [](const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kUInt64 ? tensor.view(at::kLong) : tensor.to(at::kLong);
  };
  const at::Tensor p = bits(x).contiguous(), q = bits(y).contiguous();
  const bool p_signed = x.scalar_type() != at::kUInt64, q_signed = y.scalar_type() != at::kUInt64;
  const auto* a = p.const_data_ptr<int64_t>();
  const auto* b = q.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < p.numel(); ++i) {
    const auto wide = [](int64_t value, bool is_signed) {
      return is_signed ? __int128{value} : __int128{static_cast<uint64_t>(value)};
    };
    const __int128 difference = wide(a[i], p_signed) - wide(b[i], q_signed);
    if (difference == 0) continue;
    ++result.count;
    const auto size = static_cast<double>(difference < 0 ? -difference : difference);
    if (!(size <= result.largest)) result.largest = size;
  }
}

void compare(const TensorSource& a, const TensorSource& b, const Box& box, Difference& result) {
  const at::Tensor x = read_box(a, box), y = read_box(b, box);
  if (a.dtype == b.dtype && at::equal(x, y)) return;
  if (is_whole(x) && is_whole(y)) return compare_whole(x, y, result);
  const at::Tensor p = x.to(at::kDouble), q = y.to(at::kDouble);
  const at::Tensor differs = p.ne(q).logical_and(p.isnan().logical_and(q.isnan()).logical_not());
  result.count += differs.sum().item<int64_t>();
  const double largest = (p - q).abs().masked_fill(differs.logical_not(), 0).max().item<double>();
  // NaN once is NaN.
  if (!std::isnan(result.largest) && !(largest <= result.largest)) result.largest = largest;
}

// Some rows at a time; of rows that are too large some of theirs.
void compare_in_parts(const TensorSource& a, const TensorSource& b, const Box& box, size_t dim,
                      Difference& result) {
  constexpr int64_t kMostElements = int64_t{4} << 20;
  if (box.numel() <= kMostElements || dim == box.shape.size()) return compare(a, b, box, result);
  const int64_t rows = box.shape[dim];
  const int64_t step = std::max<int64_t>(1, kMostElements / (box.numel() / rows));
  for (int64_t row = 0; row < rows; row += step) {
    Box part = box;
    part.offset[dim] += row;
    part.shape[dim] = std::min(step, rows - row);
    compare_in_parts(a, b, part, dim + 1, result);
  }
}

Difference compare(const TensorSource& a, const TensorSource& b) {
  Difference result;
  const Box whole = whole_box(a.shape);
  if (whole.numel() != 0) compare_in_parts(a, b, whole, 0, result);
  return result;
}

// What manifests say by name beside tensors.
using Notes = std::map<std::string, Json>;

Notes notes_of(const std::map<std::string, std::string, std::less<>>& texts,
               bool are_texts = false) {
  Notes notes;
  for (const auto& [name, text] : texts) notes[name] = are_texts ? Json(text) : Json::parse(text);
  return notes;
}

Notes notes_of(const std::set<std::string, std::less<>>& names) {
  Notes notes;
  for (const std::string& name : names) notes[name] = true;
  return notes;
}

// `kind`: "value", ...: a row each, and in JSON under the names with that before them, as LoadedCheckpoint has
// them.
void compare_notes(const std::string& first_path, const std::string& second_path,
                   const std::string& kind, const Notes& first, const Notes& second, Json& json,
                   std::vector<Words>& rows) {
  constexpr size_t kMostShown = 60;
  const auto shown = [](const Json& note) {
    const std::string text = note.dump();
    return text.size() <= kMostShown ? text : text.substr(0, kMostShown) + "...";
  };
  for (const auto& [name, note] : first) {
    const std::string full = absl::StrCat(kind, " ", name);
    const auto other = second.find(name);
    if (other == second.end()) {
      json["only_first"].push_back(full);
      rows.push_back({full, absl::StrCat("only in ", first_path)});
    } else if (note != other->second) {
      json["different"].push_back(
          {{"name", full}, {"what", kind}, {"first", note}, {"second", other->second}});
      rows.push_back({full, absl::StrCat(shown(note), " and ", shown(other->second))});
    }
  }
  for (const auto& [name, note] : second) {
    if (first.contains(name)) continue;
    const std::string full = absl::StrCat(kind, " ", name);
    json["only_second"].push_back(full);
    rows.push_back({full, absl::StrCat("only in ", second_path)});
  }
}

absl::StatusOr<CkptOutcome> run_diff(const Words& args, const CkptFlags& flags) {
  const absl::StatusOr<Opened> first = open_any(args[0]), second = open_any(args[1]);
  if (!first.ok()) return first.status();
  if (!second.ok()) return second.status();
  std::map<std::string, const TensorSource*> others;
  for (const TensorSource& tensor : second->tensors) others[tensor.name] = &tensor;
  Progress progress("comparing", first->bytes());
  Json json = {
      {"only_first", Json::array()}, {"only_second", Json::array()}, {"different", Json::array()}};
  std::vector<Words> rows;
  const auto differs = [&](const TensorSource& tensor, const char* what, const Json& a,
                           const Json& b) {
    json["different"].push_back(
        {{"name", tensor.name}, {"what", what}, {"first", a}, {"second", b}});
    rows.push_back({tensor.name, absl::StrCat(what, " ", a.dump(), " and ", b.dump())});
  };
  int64_t same = 0;
  for (const TensorSource& tensor : first->tensors) {
    const auto found = others.find(tensor.name);
    if (found == others.end()) {
      json["only_first"].push_back(tensor.name);
      rows.push_back({tensor.name, absl::StrCat("only in ", first->path)});
      continue;
    }
    const TensorSource& other = *found->second;
    others.erase(found);
    if (tensor.shape != other.shape) {
      differs(tensor, "shape", list_of(tensor.shape), list_of(other.shape));
      continue;
    }
    if (tensor.dtype != other.dtype) {
      differs(tensor, "dtype", std::string(safetensors_name(tensor.dtype)),
              std::string(safetensors_name(other.dtype)));
    }
    const Difference values = compare(tensor, other);
    progress.add(tensor.bytes());
    if (values.count > 0) {
      json["different"].push_back({{"name", tensor.name},
                                   {"what", "values"},
                                   {"elements", values.count},
                                   {"largest", values.largest}});
      rows.push_back(
          {tensor.name, absl::StrFormat("%d of %d values, by up to %.6g", values.count,
                                        whole_box(tensor.shape).numel(), values.largest)});
    } else if (tensor.dtype == other.dtype) {
      ++same;
    }
  }
  for (const auto& [name, tensor] : others) {
    json["only_second"].push_back(name);
    rows.push_back({name, absl::StrCat("only in ", second->path)});
  }
  std::string steps;
  if (first->manifest.has_value() && second->manifest.has_value()) {
    const Manifest &a = *first->manifest, &b = *second->manifest;
    // Shown, and no difference: two checkpoints of a run are of two steps.
    json["steps"] = {a.step, b.step};
    steps = absl::StrCat("steps ", a.step, " and ", b.step, "\n");
    compare_notes(first->path, second->path, "value", notes_of(a.values), notes_of(b.values), json,
                  rows);
    compare_notes(first->path, second->path, "alias", notes_of(a.aliases, /*are_texts=*/true),
                  notes_of(b.aliases, /*are_texts=*/true), json, rows);
    compare_notes(first->path, second->path, "without state", notes_of(a.without_state),
                  notes_of(b.without_state), json, rows);
  }
  json["same"] = same;
  const bool ok = rows.empty();
  const std::string end = absl::StrCat(same, " tensors are the same, ", rows.size(),
                                       rows.size() == 1 ? " difference\n" : " differences\n");
  return CkptOutcome{printed(flags, json, absl::StrCat(table(rows), steps, end)), ok};
}

// --- writing -------------------------------------------------------------------------------------

absl::Status verify_first(const Opened& opened, const CkptFlags& flags) {
  if (!flags.verify || !opened.manifest.has_value()) return absl::OkStatus();
  const Words errors = check(opened.path, posix_file_system());
  if (errors.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrJoin(errors, "; "));
}

CkptOutcome wrote(const CkptFlags& flags, const std::string& path, size_t tensors, int64_t bytes) {
  const Json json = {{"path", path}, {"tensors", tensors}, {"bytes", bytes}};
  return {
      printed(flags, json, absl::StrCat(path, ": ", tensors, " tensors, ", size_of(bytes), "\n"))};
}

absl::StatusOr<CkptOutcome> write_checkpoint(const std::string& directory, const Manifest& about,
                                             const std::vector<TensorSource>& tensors,
                                             int64_t files, const CkptFlags& flags) {
  int64_t total = 0;
  for (const TensorSource& tensor : tensors) total += tensor.bytes();
  Progress progress("writing", total);
  const absl::Status status = rewrite_checkpoint(
      directory, about, tensors,
      {.num_files = files, .piece_done = [&](int64_t bytes) { progress.add(bytes); }});
  if (!status.ok()) return status;
  return wrote(flags, join_path(directory, checkpoint_name(about.step)), tensors.size(), total);
}

absl::StatusOr<CkptOutcome> run_reshard(const Words& args, const CkptFlags& flags) {
  const absl::StatusOr<Opened> opened = open_checkpoint(args[0]);
  if (!opened.ok()) return opened.status();
  if (absl::Status status = verify_first(*opened, flags); !status.ok()) return status;
  const int64_t files =
      flags.files > 0 ? flags.files
                      : std::max<int64_t>(1, static_cast<int64_t>(opened->manifest->files.size()));
  return write_checkpoint(args[1], *opened->manifest, opened->tensors, files, flags);
}

// A config.json, or a directory with one.
absl::StatusOr<std::string> config_in(const std::string& path, const ModelConfigRules& rules) {
  constexpr int64_t kMostBytes = 100'000'000;
  if (!path.ends_with(".json")) return read_pretrained_config(path, rules);
  absl::StatusOr<std::string> text =
      read_file(*posix_file_system(), path, kMostBytes, Symlinks::kFollow);
  if (!text.ok()) return text.status();
  const absl::Status status = check_model_config(*text, rules);
  if (status.ok()) return text;
  return absl::Status(status.code(), absl::StrCat("'", path, "': ", std::string(status.message())));
}

// "": names stay as they are.
absl::StatusOr<std::string> config_for(const Opened& opened, const CkptFlags& flags) {
  const ModelConfigRules rules = {.allow_unknown = flags.allow_unknown};
  if (flags.config == "none") return std::string();
  if (!flags.config.empty()) return config_in(flags.config, rules);
  const auto value = opened.manifest->values.find("config");
  if (value == opened.manifest->values.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", opened.path,
        "' has no value \"config\" that says which model it is; wanted --config=FILE (a "
        "config.json, or a directory with one), or --config=none: names stay as they are"));
  }
  const absl::Status status = check_model_config(value->second, rules);
  if (status.ok()) return value->second;
  return absl::Status(status.code(), absl::StrCat("the checkpoint's value \"config\": ",
                                                  std::string(status.message())));
}

// The checkpoint's tensors that the configuration's model has; all that is not as there is one error.
absl::StatusOr<std::vector<TensorSource>> tensors_of_model(const Opened& opened,
                                                           const std::string& config,
                                                           const CkptFlags& flags) {
  std::map<std::string, const TensorSource*> there;
  for (const TensorSource& tensor : opened.tensors) there[tensor.name] = &tensor;
  const auto named = [](const TensorSource& tensor, std::string name) {
    TensorSource result = tensor;
    result.name = std::move(name);
    return result;
  };
  std::vector<TensorSource> result;
  if (config.empty()) {
    for (const TensorSource& tensor : opened.tensors) {
      if (!tensor.name.starts_with(flags.prefix)) continue;
      result.push_back(named(tensor, tensor.name.substr(flags.prefix.size())));
    }
    if (!result.empty()) return result;
    return absl::NotFoundError(absl::StrCat("'", opened.path, "' has no tensor \"", flags.prefix,
                                            "...\"; --prefix says how they begin"));
  }
  const absl::StatusOr<std::vector<WantedTensor>> wanted = tensors_of_config(config);
  if (!wanted.ok()) return wanted.status();
  FileMatch wrong;
  const auto first_part = [](std::string_view name) { return name.substr(0, name.find('.')); };
  std::set<std::string, std::less<>> taken, parts;  // names in the checkpoint; parts of the model
  for (const WantedTensor& each : *wanted) {
    Words names = {each.name};
    names.insert(names.end(), each.aliases.begin(), each.aliases.end());
    const TensorSource* found = nullptr;
    for (const std::string& name : names) {
      parts.emplace(first_part(name));
      const auto it = there.find(flags.prefix + name);
      if (it == there.end()) continue;
      if (found == nullptr) found = it->second;
      // Two tensors for what is one in the model are as good as one only if they are copies.
      const bool is_alike = found->shape == it->second->shape && found->dtype == it->second->dtype;
      if (is_alike && (found == it->second || compare(*found, *it->second).count == 0)) {
        taken.insert(it->second->name);
      }
    }
    if (found == nullptr) {
      wrong.missing.push_back(flags.prefix + each.name);
    } else if (found->shape != each.shape) {
      wrong.differing.push_back(absl::StrCat(found->name, " (", in_brackets(found->shape),
                                             " there, ", in_brackets(each.shape),
                                             " in the configuration)"));
    } else {
      result.push_back(named(*found, each.name));
    }
  }
  // What the model does not have, where it would: optimizers' states and the like are beside it.
  const std::string kind = Json::parse(config)["model_type"];
  for (const TensorSource& tensor : opened.tensors) {
    if (!tensor.name.starts_with(flags.prefix) || taken.contains(tensor.name)) continue;
    const std::string_view name = std::string_view(tensor.name).substr(flags.prefix.size());
    if (!parts.contains(first_part(name)) || is_passed_over(kind, name)) continue;
    wrong.unexpected.push_back(tensor.name);
  }
  if (wrong.ok()) return result;
  return absl::InvalidArgumentError(
      absl::StrCat("'", opened.path, "' is of another model: ", wrong.to_string()));
}

absl::StatusOr<std::optional<at::ScalarType>> dtype_from(const std::string& name) {
  const std::map<std::string, at::ScalarType> dtypes = {{"float32", at::kFloat},
                                                        {"bfloat16", at::kBFloat16},
                                                        {"float16", at::kHalf},
                                                        {"float64", at::kDouble}};
  if (name.empty()) return std::optional<at::ScalarType>();
  const auto found = dtypes.find(name);
  if (found != dtypes.end()) return std::optional<at::ScalarType>(found->second);
  return absl::InvalidArgumentError(
      absl::StrCat("--dtype=", name, ": wanted float32, bfloat16, float16 or float64"));
}

absl::StatusOr<CkptOutcome> run_export(const Words& args, const CkptFlags& flags) {
  const absl::StatusOr<Opened> opened = open_checkpoint(args[0]);
  if (!opened.ok()) return opened.status();
  const absl::StatusOr<std::optional<at::ScalarType>> dtype = dtype_from(flags.dtype);
  if (!dtype.ok()) return dtype.status();
  const absl::StatusOr<std::string> config = config_for(*opened, flags);
  if (!config.ok()) return config.status();
  const absl::StatusOr<std::vector<TensorSource>> tensors =
      tensors_of_model(*opened, *config, flags);
  if (!tensors.ok()) return tensors.status();
  if (absl::Status status = verify_first(*opened, flags); !status.ok()) return status;
  int64_t total = 0;
  for (const TensorSource& tensor : *tensors) total += tensor.bytes();
  Progress progress("writing", total);
  ModelFilesOptions options{.dtype = *dtype,
                            .tensor_done = [&](int64_t bytes) { progress.add(bytes); }};
  if (flags.max_file_bytes != 0) options.max_file_bytes = flags.max_file_bytes;
  const absl::Status status = write_model_files(args[1], *config, *tensors, options);
  if (!status.ok()) return status;
  return wrote(flags, args[1], tensors->size(), total);
}

// The configuration that says which model it is; "": none does.
absl::StatusOr<std::string> config_of_import(const std::string& path, const CkptFlags& flags) {
  if (flags.config == "none") return std::string();
  const ModelConfigRules rules = {.allow_unknown = flags.allow_unknown};
  if (!flags.config.empty()) return config_in(flags.config, rules);
  if (names_file(path)) return std::string();
  absl::StatusOr<std::string> config = read_pretrained_config(path, rules);
  if (absl::IsNotFound(config.status())) return std::string();
  return config;
}

absl::StatusOr<CkptOutcome> run_import(const Words& args, const CkptFlags& flags) {
  absl::StatusOr<std::vector<TensorSource>> there = weight_sources(args[0]);
  if (!there.ok()) return there.status();
  const absl::StatusOr<std::string> config = config_of_import(args[0], flags);
  if (!config.ok()) return config.status();
  Manifest about{.step = flags.step};
  std::vector<TensorSource> tensors;
  if (config->empty()) {
    tensors = *std::move(there);
    for (TensorSource& tensor : tensors) tensor.name = flags.prefix + tensor.name;
  } else {
    const absl::StatusOr<std::vector<WantedTensor>> wanted = tensors_of_config(*config);
    if (!wanted.ok()) return wanted.status();
    FileMatch match = match_files(*model_kind(*config), *wanted, *there);
    if (match.ok()) {
      if (absl::Status status = compare_copies(match); !status.ok()) return status;
    }
    if (!match.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", args[0], "' is of another model: ", match.to_string()));
    }
    for (size_t i = 0; i < wanted->size(); ++i) {
      tensors.push_back(*std::move(match.found[i]));
      tensors.back().name = flags.prefix + (*wanted)[i].name;
      for (const std::string& alias : (*wanted)[i].aliases) {
        about.aliases[flags.prefix + alias] = tensors.back().name;
      }
    }
    const absl::StatusOr<std::string> value = normalized_json(*config);
    if (!value.ok()) return value.status();
    about.values["config"] = *value;
  }
  return write_checkpoint(args[1], about, tensors, std::max<int64_t>(1, flags.files), flags);
}

// --- the commands --------------------------------------------------------------------------------

struct Command {
  const char* name;
  const char* takes;
  size_t least, most;  // arguments
  const char* does;
  absl::StatusOr<CkptOutcome> (*run)(const Words& args, const CkptFlags& flags);
};

// A PATH is a directory of checkpoints (then its newest is meant, but of ls and fsck all), or one of them.
constexpr Command kCommands[] = {
    {"ls", "PATH", 1, 1, "the checkpoints of a directory: step, size, tensors, files", run_ls},
    {"show", "PATH [TEXT]", 1, 2,
     "tensors (those with TEXT in their names), and values; of what import takes, too", run_show},
    {"fsck", "PATH", 1, 1, "reads every byte, and compares checksums (exit code 2)", run_fsck},
    {"diff", "PATH PATH", 2, 2,
     "names, shapes, dtypes, values, and a run's JSON; of what import takes, too (exit code 2)",
     run_diff},
    {"reshard", "PATH DIR", 2, 2, "the same checkpoint in --files=N files, into DIR/step-N",
     run_reshard},
    {"export", "PATH DIR", 2, 2, "the model, as transformers loads it: --config, --dtype",
     run_export},
    {"import", "PATH DIR", 2, 2,
     "a checkpoint of transformers' directory, a file of torch.save, a directory of DCP",
     run_import},
};

}  // namespace

std::string ckpt_usage() {
  std::string text;
  for (const Command& command : kCommands) {
    absl::StrAppend(&text, absl::StrFormat("  shardweave ckpt %-7s %-11s  %s\n", command.name,
                                           command.takes, command.does));
  }
  return text;
}

absl::StatusOr<CkptOutcome> run_ckpt(const Words& words, const CkptFlags& flags) {
  std::vector<std::string> names;
  for (const Command& command : kCommands) {
    names.emplace_back(command.name);
    if (words.empty() || words[0] != command.name) continue;
    const Words args(words.begin() + 1, words.end());
    if (args.size() < command.least || args.size() > command.most) {
      return absl::InvalidArgumentError(
          absl::StrCat("ckpt ", command.name, " takes ", command.takes, ", not ", args.size(),
                       args.size() == 1 ? " argument" : " arguments"));
    }
    return command.run(args, flags);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      words.empty() ? "ckpt" : words[0], ": wanted ckpt ", absl::StrJoin(names, ", ckpt ")));
}

}  // namespace shardweave_tool

#include "shardweave/modules/checkpoint/safetensors_index.h"

#include <algorithm>
#include <utility>

#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/checkpoint/strict_json.h"

namespace shardweave {
namespace {

using namespace checkpoint_internal;

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kOneFileName[] = "model.safetensors";
constexpr int64_t kMostIndexBytes = 100'000'000;

// The name of the file in the folder that has a model; or which there are.
absl::StatusOr<std::string> model_in(FileSystem& fs, const std::string& folder) {
  const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs.list(folder);
  if (!entries.ok()) return entries.status();
  std::vector<std::string> found;
  for (const DirectoryEntry& entry : *entries) {
    if (entry.name == kIndexName) return entry.name;
    if (entry.name.ends_with(".safetensors") && entry.kind != EntryKind::kDirectory) {
      found.push_back(entry.name);
    }
  }
  if (found.size() == 1) return found[0];
  // Beside which others may lie: "consolidated.safetensors", of another tool.
  if (std::find(found.begin(), found.end(), kOneFileName) != found.end()) return kOneFileName;
  return absl::NotFoundError(str_cat("'", folder, "' has neither ", kIndexName,
                                     " nor one *.safetensors file, but ", found.size()));
}

}  // namespace

absl::StatusOr<std::map<std::string, std::string, std::less<>>> parse_safetensors_index(
    std::string_view text) {
  absl::StatusOr<Json> json = parse_strict(text);
  if (!json.ok()) return json.status();
  if (!json->is_object() || !json->contains("weight_map") || !(*json)["weight_map"].is_object()) {
    return unexpected({}, "an object with \"weight_map\"", *json);
  }
  std::map<std::string, std::string, std::less<>> files;
  for (const auto& [name, file] : (*json)["weight_map"].items()) {
    const std::string text_of = file.is_string() ? file.get<std::string>() : "";
    if (text_of.empty() || text_of.front() == '.' || text_of.find('/') != std::string::npos ||
        text_of.find('\0') != std::string::npos) {
      return unexpected({"weight_map", name}, "the name of a file beside the index", file);
    }
    files[name] = text_of;
  }
  return files;
}

absl::StatusOr<std::unique_ptr<SafetensorsIndex>> SafetensorsIndex::open(
    const std::string& path, std::shared_ptr<FileSystem> fs) {
  auto result = std::make_unique<SafetensorsIndex>();
  result->fs_ = fs != nullptr ? std::move(fs) : posix_file_system();
  result->path_ = path;
  std::string name;
  bool is_file = path.ends_with(".json") || path.ends_with(".safetensors");
  absl::Status as_file;
  if (!is_file) {
    as_file = result->fs_->open(path, Symlinks::kFollow).status();
    is_file = as_file.ok();
  }
  if (is_file) {
    const size_t slash = path.find_last_of('/');
    result->folder_ = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    name = slash == std::string::npos ? path : path.substr(slash + 1);
  } else {
    result->folder_ = path;
    absl::StatusOr<std::string> found = model_in(*result->fs_, path);
    if (!found.ok()) return absl::IsNotFound(as_file) ? as_file : found.status();
    name = *std::move(found);
  }
  const std::string file = join_path(result->folder_, name);
  if (!name.ends_with(".json")) {
    absl::StatusOr<std::shared_ptr<SafetensorsFile>> opened =
        SafetensorsFile::open(file, result->fs_);
    if (!opened.ok()) return opened.status();
    for (const StoredTensor& info : (*opened)->tensors()) result->files_of_[info.name] = name;
    result->open_[name] = *std::move(opened);
    return result;
  }
  const absl::StatusOr<std::string> text =
      read_file(*result->fs_, file, kMostIndexBytes, Symlinks::kFollow);
  if (!text.ok()) return text.status();
  auto files = parse_safetensors_index(*text);
  if (!files.ok()) {
    return absl::Status(files.status().code(),
                        str_cat("'", file, "': ", std::string(files.status().message())));
  }
  result->files_of_ = *std::move(files);
  return result;
}

std::vector<std::string> SafetensorsIndex::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : files_of_) names.push_back(name);
  return names;
}

absl::StatusOr<SafetensorsIndex::Place> SafetensorsIndex::find(std::string_view name) {
  const auto it = files_of_.find(name);
  if (it == files_of_.end()) {
    return absl::NotFoundError(str_cat("'", path_, "' has no tensor \"", name, "\""));
  }
  const std::lock_guard lock(mutex_);
  std::shared_ptr<SafetensorsFile>& file = open_[it->second];
  if (file == nullptr) {
    absl::StatusOr<std::shared_ptr<SafetensorsFile>> opened =
        SafetensorsFile::open(join_path(folder_, it->second), fs_);
    if (!opened.ok()) return opened.status();
    file = *std::move(opened);
  }
  const StoredTensor* info = file->find(name);
  if (info == nullptr) {
    return absl::InvalidArgumentError(str_cat("'", file->path(), "' has no tensor \"", name,
                                              "\", which the index says is there"));
  }
  return Place{file, info};
}

}  // namespace shardweave

#include "shardweave/modules/checkpoint/checkpoint_directory.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <utility>

#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/checkpoint/checksum.h"

namespace shardweave {
namespace {

using namespace checkpoint_internal;

constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kTemporary = ".tmp-";
constexpr std::string_view kFilePrefix = "rank-", kFileSuffix = ".safetensors";
constexpr int64_t kMostManifestBytes = int64_t{1} << 28;  // of about two million pieces

absl::Status in_file(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), str_cat("'", path, "': ", std::string(status.message())));
}

bool is_file_of_checkpoint(std::string_view name) {
  return name.starts_with(kFilePrefix) && name.ends_with(kFileSuffix);
}

// What a directory is that is called as a checkpoint is.
enum class Kind : uint8_t {
  kCheckpoint,
  kCutShort,  // it has files of one, and no manifest: saving makes no such thing
  kForeign,   // somebody else's
  kGone,      // just now
};

Kind kind_of(const std::vector<DirectoryEntry>& entries) {
  Kind kind = Kind::kForeign;
  for (const DirectoryEntry& entry : entries) {
    if (entry.name == kManifestName) return Kind::kCheckpoint;
    if (is_file_of_checkpoint(entry.name)) kind = Kind::kCutShort;
  }
  return kind;
}

absl::StatusOr<Kind> kind_of(FileSystem& fs, const std::string& path) {
  const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs.list(path);
  if (absl::IsNotFound(entries.status())) return Kind::kGone;
  if (!entries.ok()) return entries.status();
  return kind_of(*entries);
}

// The steps of directories that are called as checkpoints are, from the first on.
std::vector<int64_t> steps_of(const std::vector<DirectoryEntry>& entries) {
  std::vector<int64_t> steps;
  for (const DirectoryEntry& entry : entries) {
    const std::optional<int64_t> step = checkpoint_step(entry.name);
    if (step.has_value() && entry.kind == EntryKind::kDirectory) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::shared_ptr<FileSystem> or_posix(FileSystem* fs) {
  if (fs == nullptr) return posix_file_system();
  return {fs, [](FileSystem*) {}};
}

}  // namespace

std::string checkpoint_name(int64_t step) {
  std::string digits = std::to_string(step);
  if (digits.size() < 6) digits.insert(0, 6 - digits.size(), '0');
  return str_cat(kStepPrefix, digits);
}

std::optional<int64_t> checkpoint_step(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kStepPrefix.size());
  if (digits.empty() || digits.size() > 18) return std::nullopt;
  int64_t step = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9') return std::nullopt;
    step = step * 10 + (c - '0');
  }
  if (checkpoint_name(step) != name) return std::nullopt;
  return step;
}

absl::StatusOr<std::vector<int64_t>> list_checkpoints(const std::string& directory,
                                                      FileSystem* fs) {
  const std::shared_ptr<FileSystem> its = or_posix(fs);
  const absl::StatusOr<std::vector<DirectoryEntry>> entries = its->list(directory);
  if (!entries.ok()) return entries.status();
  std::vector<int64_t> steps;
  for (const int64_t step : steps_of(*entries)) {
    const absl::StatusOr<Kind> kind = kind_of(*its, join_path(directory, checkpoint_name(step)));
    if (!kind.ok()) return kind.status();
    if (*kind == Kind::kCheckpoint) steps.push_back(step);
  }
  return steps;
}

absl::StatusOr<std::string> find_checkpoint(const std::string& path, FileSystem* fs) {
  const std::shared_ptr<FileSystem> its = or_posix(fs);
  constexpr int kTries = 8;  // a run that saves there removes what it had a newer one of
  bool has_gone = true;
  for (int i = 0; i < kTries && has_gone; ++i) {
    has_gone = false;
    const absl::StatusOr<std::vector<DirectoryEntry>> entries = its->list(path);
    if (!entries.ok()) return entries.status();
    const Kind own = kind_of(*entries);
    if (own == Kind::kCheckpoint) return path;
    std::string cut_short = own == Kind::kCutShort ? path : "", before;
    for (std::vector<int64_t> steps = steps_of(*entries); !steps.empty(); steps.pop_back()) {
      const std::string name = checkpoint_name(steps.back());
      std::string newest = join_path(path, name);
      const absl::StatusOr<Kind> kind = kind_of(*its, newest);
      if (!kind.ok()) return kind.status();
      if (*kind == Kind::kCheckpoint) {
        if (cut_short.empty()) return newest;
        before = str_cat("; '", name, "' beside it is the newest of those before");
        break;
      }
      if (*kind == Kind::kCutShort && cut_short.empty()) cut_short = std::move(newest);
      has_gone = has_gone || *kind == Kind::kGone;
    }
    if (!cut_short.empty()) {
      return absl::DataLossError(str_cat("'", cut_short, "' has files of a checkpoint and no ",
                                         kManifestName, ": not all of it is there", before));
    }
  }
  return absl::NotFoundError(str_cat("'", path, "' has no checkpoint: neither ", kManifestName,
                                     " nor a directory ", checkpoint_name(100), " with one"));
}

absl::StatusOr<Manifest> read_manifest(const std::string& checkpoint, FileSystem* fs,
                                       std::string* out_text) {
  const std::string path = join_path(checkpoint, kManifestName);
  absl::StatusOr<std::string> text =
      read_file(*or_posix(fs), path, kMostManifestBytes, Symlinks::kRefuse);
  if (!text.ok()) return text.status();
  absl::StatusOr<Manifest> manifest = parse_manifest_file(*text);
  if (!manifest.ok()) return in_file(path, manifest.status());
  const size_t slash = checkpoint.find_last_of('/');
  const std::optional<int64_t> step =
      checkpoint_step(slash == std::string::npos ? checkpoint : checkpoint.substr(slash + 1));
  if (step.has_value() && *step != manifest->step) {
    return absl::InvalidArgumentError(
        str_cat("'", path, "' is of step ", manifest->step, ", and its directory of another"));
  }
  if (out_text != nullptr) *out_text = *std::move(text);
  return manifest;
}

absl::StatusOr<std::shared_ptr<SafetensorsFile>> open_checkpoint_file(
    const std::string& checkpoint, const Manifest& manifest, const std::string& name,
    std::shared_ptr<FileSystem> fs) {
  const std::string path = join_path(checkpoint, name);
  absl::StatusOr<std::shared_ptr<SafetensorsFile>> file =
      SafetensorsFile::open(path, fs, Symlinks::kRefuse,
                            /*stays_open=*/manifest.files.size() <= kMostOpenFiles);
  const auto saved = manifest.files.find(name);
  if (saved == manifest.files.end()) {
    return absl::InternalError(str_cat("the manifest has no file '", name, "'"));
  }
  if (!file.ok()) {
    // NotFound would say that there is no checkpoint, and a run would begin anew.
    if (absl::IsNotFound(file.status())) {
      return absl::DataLossError(str_cat("'", path, "' is not there, and the manifest names it"));
    }
    // Cut short is the likelier reason for a header that does not fit.
    if (absl::IsInvalidArgument(file.status())) {
      if (fs == nullptr) fs = posix_file_system();
      const auto raw = fs->open(path, Symlinks::kRefuse);
      if (raw.ok() && (*raw)->size() != saved->second.bytes) {
        return absl::DataLossError(str_cat("'", path, "' has ", (*raw)->size(),
                                           " bytes; the manifest says ", saved->second.bytes));
      }
      return absl::DataLossError(
          str_cat("it is not as it was written: ", std::string(file.status().message())));
    }
    return file.status();
  }
  if ((*file)->bytes() != saved->second.bytes) {
    return absl::DataLossError(str_cat("'", path, "' has ", (*file)->bytes(),
                                       " bytes; the manifest says ", saved->second.bytes));
  }
  return file;
}

absl::Status verify_checkpoint(const std::string& path, std::shared_ptr<FileSystem> fs) {
  if (fs == nullptr) fs = posix_file_system();
  const absl::StatusOr<std::string> found = find_checkpoint(path, fs.get());
  if (!found.ok()) return found.status();
  const absl::StatusOr<Manifest> manifest = read_manifest(*found, fs.get());
  if (!manifest.ok()) return manifest.status();
  return verify_files(*found, *manifest, fs, 0, 1);
}

namespace checkpoint_internal {

std::string checkpoint_file_name(int64_t rank) {
  std::string digits = std::to_string(rank);
  if (digits.size() < 5) digits.insert(0, 5 - digits.size(), '0');
  return str_cat(kFilePrefix, digits, kFileSuffix);
}

absl::Status check_later_steps(FileSystem& fs, const std::string& directory, int64_t step) {
  const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs.list(directory);
  if (!entries.ok()) return entries.status();
  for (std::vector<int64_t> steps = steps_of(*entries); !steps.empty() && steps.back() > step;
       steps.pop_back()) {
    const std::string later = join_path(directory, checkpoint_name(steps.back()));
    const absl::StatusOr<Kind> kind = kind_of(fs, later);
    if (!kind.ok()) return kind.status();
    if (*kind != Kind::kCheckpoint) continue;
    return absl::FailedPreconditionError(
        str_cat("'", later, "' is of a later step than ", step,
                ", and would be taken for the newest; a run that goes back saves into another "
                "directory, or removes the later ones first"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Manifest> parse_manifest_file(std::string_view text) {
  if (static_cast<int64_t>(text.size()) > kMostManifestBytes) {
    return absl::OutOfRangeError(
        str_cat("a manifest of ", text.size(), " bytes; wanted at most ", kMostManifestBytes));
  }
  absl::StatusOr<Manifest> manifest = Manifest::parse(text);
  if (manifest.ok() && !has_its_checksum(text)) {
    return absl::DataLossError("it is not as it was written: its \"xxh3\" is that of another text");
  }
  // What a disk that was full, or has lost power, leaves of ours: nothing, zeros, the beginning.
  const std::string_view begins = std::string_view("{\n \"format\": \"shardweave-checkpoint\"");
  const std::string_view common = text.substr(0, std::min(text.size(), begins.size()));
  if (absl::IsInvalidArgument(manifest.status()) && !has_its_checksum(text) &&
      (begins.starts_with(common) || text.find('\0') != std::string_view::npos)) {
    return absl::DataLossError(str_cat("it is cut short, or not as it was written: ",
                                       std::string(manifest.status().message())));
  }
  return manifest;
}

absl::Status remove_leftovers(FileSystem& fs, const std::string& directory) {
  const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs.list(directory);
  if (!entries.ok()) return entries.status();
  absl::Status result;
  bool is_synced = false;
  for (const DirectoryEntry& entry : *entries) {
    const size_t temporary = entry.name.find(kTemporary);
    if (temporary == std::string::npos) continue;
    const std::string of = entry.name.substr(0, temporary);
    if (of != kLatestName && !checkpoint_step(of).has_value()) continue;  // somebody else's
    // A name that has been given up could come back after a power failure, without the files.
    if (!is_synced) result.Update(fs.sync_directory(directory));
    is_synced = true;
    const std::string path = join_path(directory, entry.name);
    // One that will not go does not keep the others.
    result.Update(entry.kind == EntryKind::kDirectory ? remove_all(fs, path)
                                                      : fs.remove_file(path));
  }
  return result;
}

absl::Status verify_files(const std::string& checkpoint, const Manifest& manifest,
                          const std::shared_ptr<FileSystem>& fs, int64_t rank, int64_t num_ranks) {
  std::map<std::string, std::vector<std::pair<std::string, const SavedPiece*>>> by_file;
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const SavedPiece& piece : tensor.pieces) by_file[piece.file].emplace_back(name, &piece);
  }
  std::vector<char> buffer(size_t{4} << 20);
  int64_t number = 0;
  for (const auto& [name, saved] : manifest.files) {
    if (number++ % num_ranks != rank) continue;
    const auto file = open_checkpoint_file(checkpoint, manifest, name, fs);
    if (!file.ok()) return file.status();
    for (const auto& [tensor_name, piece] : by_file[name]) {
      const SavedTensor& tensor = manifest.tensors.find(tensor_name)->second;
      const std::string key = piece_name(tensor_name, tensor.shape, piece->box);
      const StoredTensor* info = (*file)->find(key);
      if (info == nullptr || info->dtype != tensor.dtype || info->shape != piece->box.shape) {
        return absl::DataLossError(
            str_cat("'", (*file)->path(), "' has no \"", key, "\" as the manifest says"));
      }
    }
    const auto raw = fs->open((*file)->path(), Symlinks::kRefuse);
    if (!raw.ok()) return raw.status();
    Checksum sum;
    for (int64_t at = 0; at < (*raw)->size();) {
      const auto some = std::min<int64_t>(static_cast<int64_t>(buffer.size()), (*raw)->size() - at);
      const absl::Status status = (*raw)->read_at(at, buffer.data(), static_cast<size_t>(some));
      if (!status.ok()) return status;
      sum.add(buffer.data(), static_cast<size_t>(some));
      at += some;
    }
    if (sum.value() != saved.xxh3) {
      return absl::DataLossError(str_cat("'", (*file)->path(), "' has the checksum ",
                                         to_hex(sum.value()), "; the manifest says ",
                                         to_hex(saved.xxh3)));
    }
  }
  return absl::OkStatus();
}

absl::Status with_way_on(absl::Status status, std::string checkpoint, FileSystem& fs) {
  if (absl::IsNotFound(status)) status = absl::DataLossError(status.message());
  if (!absl::IsDataLoss(status)) return status;
  while (checkpoint.size() > 1 && checkpoint.back() == '/') checkpoint.pop_back();
  const size_t slash = checkpoint.find_last_of('/');
  const std::string above = slash == std::string::npos ? "." : checkpoint.substr(0, slash + 1);
  const std::optional<int64_t> step =
      checkpoint_step(slash == std::string::npos ? checkpoint : checkpoint.substr(slash + 1));
  const auto steps = list_checkpoints(above, &fs);
  if (!step.has_value() || !steps.ok()) return status;
  const auto its = std::lower_bound(steps->begin(), steps->end(), *step);
  if (its == steps->begin()) return status;
  return absl::Status(status.code(),
                      str_cat(std::string(status.message()), "; '", checkpoint_name(*(its - 1)),
                              "' beside it is the newest of those before it"));
}

absl::Status write_file(FileSystem& fs, const std::string& path, const std::string& content) {
  absl::StatusOr<std::unique_ptr<WritableFile>> file = fs.create(path);
  if (!file.ok()) return file.status();
  absl::Status status = write_all(**file, content.data(), content.size());
  if (status.ok()) status = (*file)->sync();
  if (status.ok()) status = (*file)->close();
  return status;
}

absl::StatusOr<std::unique_ptr<FileLock>> lock_directory(FileSystem& fs,
                                                         const std::string& directory) {
  std::array<char, 256> host = {};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '?';
  absl::StatusOr<std::unique_ptr<FileLock>> lock =
      fs.lock(join_path(directory, kLockName),
              str_cat("process ", ::getpid(), " on ", std::string_view(host.data())));
  if (absl::IsUnavailable(lock.status())) {
    return absl::FailedPreconditionError(str_cat("another run saves into '", directory,
                                                 "': ", std::string(lock.status().message())));
  }
  return lock;
}

absl::Status remove_old(FileSystem& fs, const std::string& directory, int64_t keep,
                        const std::string& nonce) {
  absl::StatusOr<std::vector<int64_t>> steps = list_checkpoints(directory, &fs);
  if (!steps.ok()) return steps.status();
  if (static_cast<int64_t>(steps->size()) <= keep) return absl::OkStatus();
  steps->resize(steps->size() - static_cast<size_t>(keep));
  absl::Status result;
  for (const int64_t step : *steps) {
    // By another name first: half of a checkpoint never bears that of a whole one.
    const std::string path = join_path(directory, checkpoint_name(step));
    const std::string going = str_cat(path, kTemporary, nonce);
    absl::Status status = fs.rename(path, going);
    // Else the old name could come back after a power failure, without the files.
    if (status.ok()) status = fs.sync_directory(directory);
    if (status.ok()) status = remove_all(fs, going);
    result.Update(status);
  }
  return result;
}

std::string new_nonce() {
  std::random_device random;
  return to_hex(uint64_t{random()} << 32 | random()).substr(4);
}

}  // namespace checkpoint_internal
}  // namespace shardweave

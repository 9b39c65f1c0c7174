#include "shardweave/modules/checkpoint/write_checkpoint.h"

#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/checkpoint/agree.h"
#include "shardweave/modules/checkpoint/checkpoint_directory.h"
#include "shardweave/modules/checkpoint/checksum.h"

namespace shardweave::checkpoint_internal {
namespace {

// What rank 0 has to know of a rank's file: its bytes and its checksum, then of each piece its checksum and the sum
// of its elements. Nothing of a rank without pieces.
struct Written {
  std::vector<uint64_t> numbers;
  uint64_t& xxh3(size_t piece) { return numbers.at(2 + 2 * piece); }
  uint64_t& sum(size_t piece) { return numbers.at(3 + 2 * piece); }
  std::string to_bytes() const {
    std::string text(numbers.size() * sizeof(uint64_t), '\0');
    if (!numbers.empty()) std::memcpy(text.data(), numbers.data(), text.size());
    return text;
  }
  static Written from_bytes(const std::string& text) {
    Written written;
    written.numbers.resize(text.size() / sizeof(uint64_t));
    if (!text.empty()) std::memcpy(written.numbers.data(), text.data(), text.size());
    return written;
  }
};

std::vector<size_t> pieces_of(const SaveRequest& request, int64_t rank) {
  std::vector<size_t> pieces;
  for (size_t i = 0; i < request.plan.size(); ++i) {
    if (request.plan[i].rank == rank) pieces.push_back(i);
  }
  return pieces;
}

absl::StatusOr<Written> write_part(const std::shared_ptr<FileSystem>& fs, SaveRequest& request,
                                   int64_t rank, const std::string& directory) {
  const std::vector<size_t> pieces = pieces_of(request, rank);
  Written written;
  if (pieces.empty()) return written;
  std::vector<StoredTensor> infos;
  std::map<std::string, size_t> places;  // among `pieces`
  for (size_t k = 0; k < pieces.size(); ++k) {
    const PlannedPiece& piece = request.plan[pieces[k]];
    const LaidOutTensor& tensor = request.tensors[piece.tensor];
    const std::string name = piece_name(tensor.name, tensor.shape, piece.box);
    infos.push_back({.name = name, .dtype = tensor.dtype, .shape = piece.box.shape});
    places.emplace(name, k);
  }
  absl::StatusOr<std::unique_ptr<SafetensorsWriter>> writer = SafetensorsWriter::create(
      join_path(directory, checkpoint_file_name(rank)), std::move(infos), {{"format", "pt"}}, fs);
  if (!writer.ok()) return writer.status();
  written.numbers.resize(2 + 2 * pieces.size());
  for (const StoredTensor& info : (*writer)->tensors()) {
    const size_t k = places.at(info.name);
    const std::shared_ptr<const void> bytes = std::exchange(request.bytes[k], nullptr)();
    const int64_t size = info.end - info.begin;
    absl::Status status = (*writer)->append(bytes.get(), size, &written.xxh3(k));
    if (!status.ok()) return status;
    const PlannedPiece& piece = request.plan[pieces[k]];
    written.sum(k) = element_sum(bytes.get(), info.dtype, piece.box, piece.box,
                                 request.tensors[piece.tensor].shape);
  }
  absl::Status status = (*writer)->finish();
  if (!status.ok()) return status;
  written.numbers[0] = static_cast<uint64_t>((*writer)->bytes());
  written.numbers[1] = (*writer)->checksum();
  return written;
}

absl::Status make_and_lock(FileSystem& fs, const std::string& directory,
                           std::unique_ptr<FileLock>& lock) {
  absl::Status status = create_directories(fs, directory);
  if (!status.ok() || lock != nullptr) return status;
  absl::StatusOr<std::unique_ptr<FileLock>> locked = lock_directory(fs, directory);
  if (locked.ok()) lock = *std::move(locked);
  return locked.status();
}

std::string temporary_name(int64_t step) {
  return str_cat(checkpoint_name(step), ".tmp-", new_nonce());
}

// Of rank 0: the name of the temporary directory.
absl::StatusOr<std::string> begin(FileSystem& fs, SaveRequest& request,
                                  std::unique_ptr<FileLock>& lock) {
  absl::Status status = make_and_lock(fs, request.directory, lock);
  if (!status.ok()) return status;
  request.not_removed = remove_leftovers(fs, request.directory);
  const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs.list(request.directory);
  if (!entries.ok()) return entries.status();
  const std::string name = checkpoint_name(request.manifest.step);
  for (const DirectoryEntry& entry : *entries) {
    if (entry.name == name) {
      const std::string path = join_path(request.directory, name);
      const bool is_one = fs.open(join_path(path, kManifestName), Symlinks::kRefuse).ok();
      return absl::AlreadyExistsError(
          str_cat("'", path, "' is there already",
                  is_one ? "" : ", and is no checkpoint, for it has no manifest",
                  "; remove it to save that step again"));
    }
  }
  status = check_later_steps(fs, request.directory, request.manifest.step);
  if (!status.ok()) return status;
  std::string temporary = temporary_name(request.manifest.step);
  status = fs.create_directory(join_path(request.directory, temporary));
  if (!status.ok()) return status;
  return temporary;
}

Manifest completed(SaveRequest& request, const std::vector<std::string>& reports) {
  Manifest manifest = std::move(request.manifest);
  std::vector<Written> written;
  for (const std::string& report : reports) written.push_back(Written::from_bytes(report));
  std::vector<size_t> next(reports.size(), 0);
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const std::vector<uint64_t>& numbers = written[rank].numbers;
    if (numbers.empty()) continue;
    manifest.files[checkpoint_file_name(static_cast<int64_t>(rank))] = {
        static_cast<int64_t>(numbers[0]), numbers[1]};
  }
  for (const PlannedPiece& piece : request.plan) {
    const auto rank = static_cast<size_t>(piece.rank);
    const size_t k = next[rank]++;
    manifest.tensors[request.tensors[piece.tensor].name].pieces.push_back(
        {checkpoint_file_name(piece.rank), piece.box, written[rank].xxh3(k), written[rank].sum(k)});
  }
  return manifest;
}

// Of rank 0: from here on it is there. `published`: set with the rename.
absl::Status commit(FileSystem& fs, SaveRequest& request, const std::vector<std::string>& reports,
                    const std::string& temporary, bool* published) {
  const std::string& directory = request.directory;
  const std::string name = checkpoint_name(request.manifest.step);
  const std::string from = join_path(directory, temporary);
  const std::string nonce = temporary.substr(name.size() + 5);
  const Manifest manifest = completed(request, reports);
  const std::string text = manifest.to_json();
  // What nobody could read does not take the place of what can be read.
  const absl::StatusOr<Manifest> read = parse_manifest_file(text);
  if (!read.ok()) return read.status();
  if (*read != manifest) return absl::InternalError("the manifest reads as another than was meant");
  absl::Status status = write_file(fs, join_path(from, kManifestName), text);
  if (status.ok()) status = fs.sync_directory(from);
  if (status.ok()) status = fs.rename(from, join_path(directory, name));
  if (!status.ok()) return status;
  *published = true;
  status = fs.sync_directory(directory);
  const std::string latest = str_cat(kLatestName, ".tmp-", nonce);
  if (status.ok()) status = write_file(fs, join_path(directory, latest), name + "\n");
  if (status.ok()) {
    status = fs.rename(join_path(directory, latest), join_path(directory, kLatestName));
  }
  if (status.ok()) status = fs.sync_directory(directory);
  if (status.ok() && request.keep_last > 0) {
    request.not_removed.Update(remove_old(fs, directory, request.keep_last, nonce));
  }
  if (status.ok()) return status;
  return absl::Status(status.code(), str_cat("'", join_path(directory, name),
                                             "' is whole, but after it was there: ",
                                             std::string(status.message())));
}

}  // namespace

absl::Status open_directory(FileSystem& fs, const std::string& directory,
                            std::optional<int64_t> done, std::unique_ptr<FileLock>& lock) {
  absl::Status status = make_and_lock(fs, directory, lock);
  if (status.ok() && done.has_value()) status = check_later_steps(fs, directory, *done);
  if (!status.ok()) return status;
  status = find_checkpoint(directory, &fs).status();
  if (!status.ok() && !absl::IsNotFound(status)) return status;
  // The lock alone does not tell: its file may have been there. By a name that the next save removes.
  const std::string probe = join_path(directory, temporary_name(done.value_or(0)));
  status = fs.create_directory(probe);
  return status.ok() ? fs.remove_directory(probe) : status;
}

absl::Status write_checkpoint(Communicator& comm, const std::shared_ptr<FileSystem>& fs,
                              SaveRequest& request, std::unique_ptr<FileLock>& lock,
                              absl::Duration timeout) {
  const absl::StatusOr<std::string> temporary =
      from_first(comm, [&] { return begin(*fs, request, lock); }, timeout);
  if (!temporary.ok()) return temporary.status();
  const std::string directory = join_path(request.directory, *temporary);
  Written mine;
  absl::Status status = agree(comm, status_of([&] {
                                absl::StatusOr<Written> part =
                                    write_part(fs, request, comm.rank(), directory);
                                if (part.ok()) mine = *std::move(part);
                                return part.status();
                              }),
                              timeout);
  bool published = false;
  if (status.ok()) {
    const absl::StatusOr<std::vector<std::string>> reports =
        exchange(comm, mine.to_bytes(), timeout);
    status = reports.status();
    if (status.ok()) {
      const absl::Status committed = status_of([&] {
        if (comm.rank() != 0) return absl::OkStatus();
        return commit(*fs, request, *reports, *temporary, &published);
      });
      status = agree(comm, committed, timeout);
    }
  }
  // What cannot be removed now the next save removes.
  if (!status.ok() && comm.rank() == 0 && !published) (void)remove_all(*fs, directory);
  return status;
}

}  // namespace shardweave::checkpoint_internal

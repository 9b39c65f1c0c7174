// A directory of checkpoints, as it lies on the disk (docs/checkpoints.md):
//
//   run/step-000100/manifest.json, rank-00000.safetensors, ...     whole, or not there
//   run/latest                                                     "step-000100"
//   run/step-000200.tmp-.../                                       begun; removed by the next save
//   run/lock                                                       held by the run that saves here
//
//   auto steps = list_checkpoints("run");                          // StatusOr: {100}
//   auto path = find_checkpoint("run");                            // "run/step-000100"
//   absl::Status whole = verify_checkpoint(*path);                 // every byte
//
// Without LibTorch and without communication. NULL for a file system: POSIX.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/modules/checkpoint/file_system.h"
#include "shardweave/modules/checkpoint/manifest.h"
#include "shardweave/modules/checkpoint/safetensors.h"

namespace shardweave {

// "step-000100"; and back.
std::string checkpoint_name(int64_t step);
std::optional<int64_t> checkpoint_step(std::string_view name);

// The steps that are there, ascending. What is a symbolic link, or has no manifest, is none of them.
// NotFound without the directory.
absl::StatusOr<std::vector<int64_t>> list_checkpoints(const std::string& directory,
                                                      FileSystem* fs = nullptr);

// `path` itself if it is a checkpoint, else the one of the highest step in it. NotFound; DataLoss if the directory
// of a higher step, or `path`, has files of a checkpoint and no manifest.
absl::StatusOr<std::string> find_checkpoint(const std::string& path, FileSystem* fs = nullptr);

// Of one checkpoint. Errors name the file. `out_text`, if given: as it stands there.
absl::StatusOr<Manifest> read_manifest(const std::string& checkpoint, FileSystem* fs = nullptr,
                                       std::string* out_text = nullptr);

// The file of a checkpoint, opened, of the size that the manifest says. Errors name it: DataLoss
// for one that is gone, shorter or longer, or is no safetensors file, FailedPrecondition for a symbolic link.
absl::StatusOr<std::shared_ptr<SafetensorsFile>> open_checkpoint_file(
    const std::string& checkpoint, const Manifest& manifest, const std::string& name,
    std::shared_ptr<FileSystem> fs = nullptr);

// Reads all of what find_checkpoint() finds: sizes, headers, pieces and checksums. The first thing that is wrong:
// DataLoss for a checksum, else as the functions above.
absl::Status verify_checkpoint(const std::string& path, std::shared_ptr<FileSystem> fs = nullptr);

namespace checkpoint_internal {

constexpr char kManifestName[] = "manifest.json";
constexpr char kLatestName[] = "latest";
constexpr char kLockName[] = "lock";

// Every file of which the number leaves `rank`, divided by `num_ranks`.
absl::Status verify_files(const std::string& checkpoint, const Manifest& manifest,
                          const std::shared_ptr<FileSystem>& fs, int64_t rank, int64_t num_ranks);
// What the file is to say, and does: as Manifest::parse(), and DataLoss if it has changed since it was
// written, or is cut short.
absl::StatusOr<Manifest> parse_manifest_file(std::string_view text);
// For a checkpoint that is damaged, one of several in a directory: where else a run could go on. That it is there is
// known: what is not found in it is lost.
absl::Status with_way_on(absl::Status status, std::string checkpoint, FileSystem& fs);
// "rank-00003.safetensors".
std::string checkpoint_file_name(int64_t rank);
// FailedPrecondition if there is a checkpoint of a later step than `step`. Others are not looked at.
absl::Status check_later_steps(FileSystem& fs, const std::string& directory, int64_t step);
// Removes what saves have begun and not ended. Of whoever holds the lock.
absl::Status remove_leftovers(FileSystem& fs, const std::string& directory);
// A new file with this content, on the disk.
absl::Status write_file(FileSystem& fs, const std::string& path, const std::string& content);
// FailedPrecondition: another run saves there.
absl::StatusOr<std::unique_ptr<FileLock>> lock_directory(FileSystem& fs,
                                                         const std::string& directory);
// All checkpoints but the `keep` (1 or more) of the highest steps go.
absl::Status remove_old(FileSystem& fs, const std::string& directory, int64_t keep,
                        const std::string& nonce);
// Different every time.
std::string new_nonce();

}  // namespace checkpoint_internal
}  // namespace shardweave

// A file system that fails, or stops dead, at an operation that a test chooses.
//
//   FaultyFileSystem fs({.kind = Fault::kFail, .at = 7});      // the 8th operation, of all ranks
//   ...
//   fs.operations();                                           // how many there were
//
// Threads: any.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "shardweave/modules/checkpoint/file_system.h"

namespace shardweave::testing {

enum class FaultKind : uint8_t {
  kNone,
  kFail,      // this operation alone; a write as on a full disk, after a part of the bytes
  kStopDead,  // this one and all after it, as when the process is killed there
  kLate,      // this one comes a second late
  kPowerCut,  // as kStopDead, and what was not synced is lost: bytes of files, names, and directories
};

struct Fault {
  FaultKind kind = FaultKind::kNone;
  int64_t at = 0;
  size_t most_written = 1 << 20;  // by one write
};

class FaultyFileSystem final : public FileSystem {
 public:
  explicit FaultyFileSystem(const Fault& fault) : fault_(fault) {}

  int64_t operations() const;  // that change something
  int64_t bytes_read() const;
  // What the operations were, by number: "rename step-000001.tmp-x step-000001".
  std::vector<std::string> log() const;
  // After kPowerCut: makes the disk what it is then. (Files that have no synced bytes are empty; names
  // in directories that were not synced since are as before.)
  void cut_power();

  absl::Status create_directory(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<WritableFile>> create(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<ReadableFile>> open(const std::string& path,
                                                     Symlinks symlinks) override;
  absl::Status sync_directory(const std::string& path) override;
  absl::Status rename(const std::string& from, const std::string& to) override;
  absl::StatusOr<std::vector<DirectoryEntry>> list(const std::string& path) override;
  absl::Status remove_file(const std::string& path) override;
  absl::Status remove_directory(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<FileLock>> lock(const std::string& path,
                                                 const std::string& holder) override;

 private:
  friend class FaultyFile;
  friend class CountedFile;
  // Whether the next operation fails; it is noted.
  absl::Status next(const std::string& what);
  bool is_dead() const;

  const Fault fault_;
  const std::shared_ptr<FileSystem> posix_ = posix_file_system();
  mutable std::mutex mutex_;
  int64_t count_ = 0;
  bool dead_ = false;
  int64_t bytes_read_ = 0;
  std::vector<std::string> log_;
  std::map<std::string, int64_t> synced_;  // bytes, of files that were written here
  struct Renamed {
    std::string from, to;
    std::string replaced;  // what `to` was; empty: nothing
    bool had_target = false;
  };
  std::vector<Renamed> unsynced_renames_;
  std::set<std::string> unsynced_directories_;  // that were made here
};

}  // namespace shardweave::testing

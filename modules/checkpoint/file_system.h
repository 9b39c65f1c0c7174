// The file operations that checkpoints are made of, few enough that a test can make each of them
// fail.
//
//   std::shared_ptr<FileSystem> fs = posix_file_system();
//   auto file = fs->create("a.tmp");                            // StatusOr
//   write_all(**file, bytes.data(), bytes.size());
//   (*file)->sync();                                            // survives a crash of the machine,
//   fs->rename("a.tmp", "a"); fs->sync_directory(".");          // and so does its name
//
// Errors name the path and what the system said: NotFound, PermissionDenied, AlreadyExists,
// ResourceExhausted (the disk or the quota is full, or a file may not be so large), DataLoss (EIO, ENODATA, ESTALE:
// what the disk or its server has lost), else as absl::ErrnoToStatus says. Threads: a FileSystem and a ReadableFile are
// used by several at once (rank threads, and those that read ahead), a WritableFile by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace shardweave {

class WritableFile {
 public:
  virtual ~WritableFile() = default;  // closes; what was not synced may be lost
  // The next of the file's bytes, at least one of them; how many. write_all() is what one wants.
  virtual absl::StatusOr<size_t> write_some(const void* data, size_t size) = 0;
  virtual absl::Status sync() = 0;
  virtual absl::Status close() = 0;
};
absl::Status write_all(WritableFile& file, const void* data, size_t size);

// What the disk and the system's cache deal in; of both, the largest that is common.
constexpr int64_t kFilePage = 4096;

class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  virtual int64_t size() const = 0;
  // Exactly so many bytes; OutOfRange beyond the end, DataLoss if the file has become shorter.
  virtual absl::Status read_at(int64_t offset, void* out, size_t size) const = 0;
  // All of it, mapped into memory as long as this lives; null if that cannot be done. Who touches a
  // mapped file that another program cuts short gets SIGBUS: read_at() does not.
  virtual const std::byte* mapped() const = 0;
  // As read_at(); many bytes that the system has not in its cache come past it by way of `through`, if the
  // kFilePages which they lie in go into that. It begins a page of memory.
  virtual absl::Status read_past_cache_at(int64_t offset, void* out, size_t size,
                                          absl::Span<char> through) const {
    (void)through;
    return read_at(offset, out, size);
  }
};

// How many files a reader of many keeps open: processes may have 1,024 descriptors, of which each may take
// two, and others want some.
constexpr size_t kMostOpenFiles = 256;

enum class EntryKind : uint8_t { kFile, kDirectory, kSymlink, kOther };
struct DirectoryEntry {
  std::string name;
  EntryKind kind;
};

// Held until it is dropped, or the process ends, however it does.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

enum class Symlinks : uint8_t { kFollow, kRefuse };  // of the path's last part

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual absl::Status create_directory(const std::string& path) = 0;
  // A file that is not there yet.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> create(const std::string& path) = 0;
  // FailedPrecondition for a symbolic link that is not wanted, InvalidArgument for what is no file.
  virtual absl::StatusOr<std::unique_ptr<ReadableFile>> open(const std::string& path,
                                                             Symlinks symlinks) = 0;
  virtual absl::Status sync_directory(const std::string& path) = 0;
  virtual absl::Status rename(const std::string& from, const std::string& to) = 0;
  // Sorted by name.
  virtual absl::StatusOr<std::vector<DirectoryEntry>> list(const std::string& path) = 0;
  virtual absl::Status remove_file(const std::string& path) = 0;       // or a symbolic link itself
  virtual absl::Status remove_directory(const std::string& path) = 0;  // an empty one
  // The file is made if it is not there. Unavailable: another has it (a process, or in this one
  // another lock); `holder` is what that one wrote into the file.
  virtual absl::StatusOr<std::unique_ptr<FileLock>> lock(const std::string& path,
                                                         const std::string& holder) = 0;
};

std::shared_ptr<FileSystem> posix_file_system();

// A file that is opened anew by each read, and closed: of which there are too many to keep open.
absl::StatusOr<std::unique_ptr<ReadableFile>> open_for_each_read(std::shared_ptr<FileSystem> fs,
                                                                 const std::string& path,
                                                                 Symlinks symlinks);

// All of a small file; OutOfRange for a larger one.
absl::StatusOr<std::string> read_file(FileSystem& fs, const std::string& path, int64_t most_bytes,
                                      Symlinks symlinks);
// The directory and those above it, as far as they are not there; synced.
absl::Status create_directories(FileSystem& fs, const std::string& path);
// A directory of files, and itself. Directories in it are an error.
absl::Status remove_all(FileSystem& fs, const std::string& path);
std::string join_path(const std::string& directory, const std::string& name);

}  // namespace shardweave

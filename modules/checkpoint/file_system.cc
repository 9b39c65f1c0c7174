#include "shardweave/modules/checkpoint/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

absl::Status failed(int error, std::string_view what, const std::string& path) {
  const absl::Status said = absl::ErrnoToStatus(error, "");
  std::string why = std::strerror(error);
  absl::StatusCode code = said.code();
  if (error == EDQUOT || error == EFBIG) code = absl::StatusCode::kResourceExhausted;
  // As disks say of what they cannot read, and servers of a file that was theirs.
  if (error == EIO || error == ENODATA || error == ESTALE) code = absl::StatusCode::kDataLoss;
  return absl::Status(code, str_cat("cannot ", what, " '", path, "': ", why));
}

template <typename F>
auto retried(F call) {
  while (true) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

class PosixWritableFile final : public WritableFile {
 public:
  PosixWritableFile(Descriptor fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  absl::StatusOr<size_t> write_some(const void* data, size_t size) override {
    constexpr size_t kMost = size_t{8} << 20;
    const ssize_t written =
        retried([&] { return ::write(fd_.get(), data, std::min(size, kMost)); });
    if (written < 0) return failed(errno, "write", path_);
    written_ += written;
    // The disk begins now instead of at sync().
    if (written_ - begun_ >= static_cast<int64_t>(kMost)) {
      ::sync_file_range(fd_.get(), begun_, written_ - begun_, SYNC_FILE_RANGE_WRITE);
      begun_ = written_;
    }
    return static_cast<size_t>(written);
  }
  absl::Status sync() override {
    if (retried([&] { return ::fsync(fd_.get()); }) == 0) return absl::OkStatus();
    return failed(errno, "sync", path_);
  }
  absl::Status close() override {
    if (::close(fd_.release()) == 0) return absl::OkStatus();
    return failed(errno, "close", path_);
  }

 private:
  Descriptor fd_;
  const std::string path_;
  int64_t written_ = 0;
  int64_t begun_ = 0;  // to go to the disk
};

class PosixReadableFile final : public ReadableFile {
 public:
  PosixReadableFile(Descriptor fd, std::string path, int64_t size)
      : fd_(std::move(fd)), path_(std::move(path)), size_(size) {}
  ~PosixReadableFile() override {
    if (map_ != nullptr) ::munmap(map_, static_cast<size_t>(size_));
  }

  int64_t size() const override { return size_; }
  absl::Status read_at(int64_t offset, void* out, size_t size) const override {
    if (offset < 0 || offset > size_ || size > static_cast<uint64_t>(size_ - offset)) {
      return absl::OutOfRangeError(
          str_cat("'", path_, "' has ", size_, " bytes; wanted ", size, " from ", offset, " on"));
    }
    auto* to = static_cast<char*>(out);
    while (size > 0) {
      const ssize_t got = retried([&] { return ::pread(fd_.get(), to, size, offset); });
      if (got < 0) return failed(errno, "read", path_);
      if (got == 0) {
        return absl::DataLossError(
            str_cat("'", path_, "' has become shorter than the ", size_, " bytes that it had"));
      }
      to += got;
      offset += got;
      size -= static_cast<size_t>(got);
    }
    return absl::OkStatus();
  }
  absl::Status read_past_cache_at(int64_t offset, void* out, size_t size,
                                  absl::Span<char> through) const override {
    constexpr auto kPage = static_cast<size_t>(kFilePage);
    constexpr size_t kWorthIt = 64 * kPage;
    if (size < kWorthIt || size > through.size() || offset < 0 || offset > size_ ||
        size > static_cast<uint64_t>(size_ - offset)) {
      return read_at(offset, out, size);
    }
    const size_t before = static_cast<size_t>(offset) % kPage;
    const size_t pages = (before + size + kPage - 1) / kPage * kPage;
    if (pages > through.size() || is_cached(offset, size)) return read_at(offset, out, size);
    const int direct = past_cache();
    const int64_t begin = offset - static_cast<int64_t>(before);
    size_t done = 0;
    while (direct >= 0 && done < pages) {
      const ssize_t got = retried([&] {
        return ::pread(direct, through.data() + done, pages - done,
                       begin + static_cast<int64_t>(done));
      });
      if (got <= 0) break;
      done += static_cast<size_t>(got);
      if (done % kPage != 0) break;  // the file's end
    }
    const size_t have = std::min(done - std::min(done, before), size);
    std::memcpy(out, through.data() + before, have);
    // What is left, such as all of it where the file system reads through its cache only. Errors are its.
    return read_at(offset + static_cast<int64_t>(have), static_cast<char*>(out) + have,
                   size - have);
  }
  const std::byte* mapped() const override {
    const std::lock_guard lock(mutex_);
    if (map_ == nullptr && size_ > 0) {
      void* map = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, fd_.get(), 0);
      if (map != MAP_FAILED) map_ = map;
    }
    return static_cast<const std::byte*>(map_);
  }

 private:
  // The same file, whatever its path names by now; negative where its file system does not do that.
  int past_cache() const {
    const std::lock_guard lock(mutex_);
    if (!past_cache_.has_value()) {
      past_cache_.emplace(
          ::open(str_cat("/proc/self/fd/", fd_.get()).c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
    }
    return past_cache_->get();
  }
  // Half of it or more; or nobody can say.
  bool is_cached(int64_t offset, size_t size) const {
    const std::byte* file = mapped();
    if (file == nullptr || offset >= size_) return true;
    const int64_t begin = offset / kFilePage * kFilePage;
    size = std::min(size + static_cast<size_t>(offset - begin), static_cast<size_t>(size_ - begin));
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> pages((size + page - 1) / page);
    void* const at = const_cast<std::byte*>(file + begin);
    if (page > static_cast<size_t>(kFilePage) || ::mincore(at, size, pages.data()) != 0)
      return true;
    const auto cached =
        std::count_if(pages.begin(), pages.end(), [](unsigned char of) { return (of & 1) != 0; });
    return 2 * static_cast<size_t>(cached) >= pages.size();
  }

  const Descriptor fd_;
  const std::string path_;
  const int64_t size_;
  mutable std::mutex mutex_;
  mutable void* map_ = nullptr;  // made on first use, as is
  mutable std::optional<Descriptor> past_cache_;
};

class PosixFileLock final : public FileLock {
 public:
  explicit PosixFileLock(Descriptor fd) : fd_(std::move(fd)) {}

 private:
  const Descriptor fd_;  // flock() goes with it
};

class PosixFileSystem final : public FileSystem {
 public:
  absl::Status create_directory(const std::string& path) override {
    if (::mkdir(path.c_str(), 0777) == 0) return absl::OkStatus();
    return failed(errno, "make the directory", path);
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> create(const std::string& path) override {
    Descriptor fd(retried([&] {
      return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    }));
    if (fd.get() < 0) return failed(errno, "make", path);
    return std::make_unique<PosixWritableFile>(std::move(fd), path);
  }
  absl::StatusOr<std::unique_ptr<ReadableFile>> open(const std::string& path,
                                                     Symlinks symlinks) override {
    // Without O_NONBLOCK opening a pipe would wait for its other end.
    const int flags =
        O_RDONLY | O_CLOEXEC | O_NONBLOCK | (symlinks == Symlinks::kRefuse ? O_NOFOLLOW : 0);
    Descriptor fd(retried([&] { return ::open(path.c_str(), flags); }));
    if (fd.get() < 0) {
      if (errno == ELOOP && symlinks == Symlinks::kRefuse) {
        return absl::FailedPreconditionError(
            str_cat("'", path, "' is a symbolic link; wanted the file itself"));
      }
      return failed(errno, "open", path);
    }
    struct stat about {};
    if (::fstat(fd.get(), &about) != 0) return failed(errno, "look at", path);
    if (!S_ISREG(about.st_mode)) {
      return absl::InvalidArgumentError(str_cat("'", path, "' is no regular file"));
    }
    return std::make_unique<PosixReadableFile>(std::move(fd), path, about.st_size);
  }
  absl::Status sync_directory(const std::string& path) override {
    const Descriptor fd(
        retried([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
    if (fd.get() < 0) return failed(errno, "open", path);
    // Some network file systems have no sync of directories.
    if (retried([&] { return ::fsync(fd.get()); }) != 0 && errno != EINVAL) {
      return failed(errno, "sync", path);
    }
    return absl::OkStatus();
  }
  absl::Status rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
    return failed(errno, str_cat("rename '", from, "' to"), to);
  }
  absl::StatusOr<std::vector<DirectoryEntry>> list(const std::string& path) override {
    DIR* directory = ::opendir(path.c_str());
    if (directory == nullptr) return failed(errno, "list", path);
    std::vector<DirectoryEntry> entries;
    int error = 0;
    while (true) {
      errno = 0;
      const dirent* entry = ::readdir(directory);
      if (entry == nullptr) {
        error = errno;
        break;
      }
      std::string name = entry->d_name;
      if (name == "." || name == "..") continue;
      struct stat about {};
      EntryKind kind = EntryKind::kOther;
      if (::fstatat(::dirfd(directory), name.c_str(), &about, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) continue;  // gone meanwhile
        error = errno;
        break;
      }
      if (S_ISREG(about.st_mode)) kind = EntryKind::kFile;
      if (S_ISDIR(about.st_mode)) kind = EntryKind::kDirectory;
      if (S_ISLNK(about.st_mode)) kind = EntryKind::kSymlink;
      entries.push_back({std::move(name), kind});
    }
    ::closedir(directory);
    if (error != 0) return failed(error, "list", path);
    std::sort(entries.begin(), entries.end(),
              [](const DirectoryEntry& a, const DirectoryEntry& b) { return a.name < b.name; });
    return entries;
  }
  absl::Status remove_file(const std::string& path) override {
    if (::unlink(path.c_str()) == 0) return absl::OkStatus();
    return failed(errno, "remove", path);
  }
  absl::Status remove_directory(const std::string& path) override {
    if (::rmdir(path.c_str()) == 0) return absl::OkStatus();
    return failed(errno, "remove", path);
  }
  absl::StatusOr<std::unique_ptr<FileLock>> lock(const std::string& path,
                                                 const std::string& holder) override {
    Descriptor fd(retried(
        [&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666); }));
    if (fd.get() < 0) return failed(errno, "open", path);
    if (retried([&] { return ::flock(fd.get(), LOCK_EX | LOCK_NB); }) != 0) {
      if (errno != EWOULDBLOCK) return failed(errno, "lock", path);
      std::string text(200, '\0');
      const ssize_t got = ::pread(fd.get(), text.data(), text.size(), 0);
      text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
      return absl::UnavailableError(str_cat("'", path, "' is held by ", text));
    }
    // Who it is, for the message above: what cannot be written is no error.
    if (::ftruncate(fd.get(), 0) == 0) {
      [[maybe_unused]] const ssize_t ignored = ::pwrite(fd.get(), holder.data(), holder.size(), 0);
    }
    return std::make_unique<PosixFileLock>(std::move(fd));
  }
};

}  // namespace

absl::Status write_all(WritableFile& file, const void* data, size_t size) {
  const auto* from = static_cast<const char*>(data);
  while (size > 0) {
    const absl::StatusOr<size_t> written = file.write_some(from, size);
    if (!written.ok()) return written.status();
    if (*written == 0 || *written > size) {
      return absl::InternalError(str_cat("a file took ", *written, " of ", size, " bytes"));
    }
    from += *written;
    size -= *written;
  }
  return absl::OkStatus();
}

std::shared_ptr<FileSystem> posix_file_system() {
  return std::make_shared<PosixFileSystem>();
}

absl::StatusOr<std::string> read_file(FileSystem& fs, const std::string& path, int64_t most_bytes,
                                      Symlinks symlinks) {
  const absl::StatusOr<std::unique_ptr<ReadableFile>> file = fs.open(path, symlinks);
  if (!file.ok()) return file.status();
  const int64_t size = (*file)->size();
  if (size > most_bytes) {
    return absl::OutOfRangeError(
        str_cat("'", path, "' has ", size, " bytes; wanted at most ", most_bytes));
  }
  std::string text(static_cast<size_t>(size), '\0');
  absl::Status status = (*file)->read_at(0, text.data(), text.size());
  if (!status.ok()) return status;
  return text;
}

namespace {

class FileOfEachRead final : public ReadableFile {
 public:
  FileOfEachRead(std::shared_ptr<FileSystem> fs, std::string path, Symlinks symlinks, int64_t size)
      : fs_(std::move(fs)), path_(std::move(path)), symlinks_(symlinks), size_(size) {}
  int64_t size() const override { return size_; }
  absl::Status read_at(int64_t offset, void* out, size_t size) const override {
    const auto file = fs_->open(path_, symlinks_);
    return file.ok() ? (*file)->read_at(offset, out, size) : file.status();
  }
  const std::byte* mapped() const override { return nullptr; }

 private:
  const std::shared_ptr<FileSystem> fs_;
  const std::string path_;
  const Symlinks symlinks_;
  const int64_t size_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ReadableFile>> open_for_each_read(std::shared_ptr<FileSystem> fs,
                                                                 const std::string& path,
                                                                 Symlinks symlinks) {
  const auto file = fs->open(path, symlinks);
  if (!file.ok()) return file.status();
  return std::make_unique<FileOfEachRead>(std::move(fs), path, symlinks, (*file)->size());
}

absl::Status create_directories(FileSystem& fs, const std::string& path) {
  if (path.size() > 1 && path.back() == '/') {  // "run/" is made in what "run" is made in
    return create_directories(fs, path.substr(0, path.size() - 1));
  }
  const size_t slash = path.find_last_of('/');
  const std::string above = slash == std::string::npos ? "."
                            : slash == 0               ? "/"
                                                       : path.substr(0, slash);
  absl::Status status = fs.create_directory(path);
  if (absl::IsNotFound(status) && slash != std::string::npos && slash != 0) {
    status = create_directories(fs, above);
    if (status.ok()) status = fs.create_directory(path);
  }
  if (absl::IsAlreadyExists(status)) return absl::OkStatus();
  // Or a power failure could take it, with all that is synced in it.
  return status.ok() ? fs.sync_directory(above) : status;
}

absl::Status remove_all(FileSystem& fs, const std::string& path) {
  const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs.list(path);
  if (!entries.ok()) return entries.status();
  for (const DirectoryEntry& entry : *entries) {
    absl::Status status = fs.remove_file(join_path(path, entry.name));
    if (!status.ok()) return status;
  }
  return fs.remove_directory(path);
}

std::string join_path(const std::string& directory, const std::string& name) {
  return directory.empty() || directory.back() == '/' ? directory + name : directory + "/" + name;
}

}  // namespace shardweave

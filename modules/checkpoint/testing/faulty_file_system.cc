#include "shardweave/modules/checkpoint/testing/faulty_file_system.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace shardweave::testing {
namespace {

std::string last_part(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

// Whether `path` is in `directory` itself.
bool lies_in(const std::string& path, std::string directory) {
  while (directory.size() > 1 && directory.back() == '/') directory.pop_back();
  return std::filesystem::path(path).parent_path() == directory;
}

}  // namespace

class FaultyFile final : public WritableFile {
 public:
  FaultyFile(FaultyFileSystem* fs, std::string path, std::unique_ptr<WritableFile> file)
      : fs_(fs), path_(std::move(path)), file_(std::move(file)) {}

  absl::StatusOr<size_t> write_some(const void* data, size_t size) override {
    const absl::Status status = fs_->next(absl::StrCat("write ", last_part(path_)));
    const size_t some = std::min(size, fs_->fault_.most_written);
    if (!status.ok()) {
      // A part of it has reached the file all the same.
      if (size > 1) (void)file_->write_some(data, size / 2);
      return status;
    }
    absl::StatusOr<size_t> written = file_->write_some(data, some);
    if (written.ok()) size_ += static_cast<int64_t>(*written);
    return written;
  }
  absl::Status sync() override {
    absl::Status status = fs_->next(absl::StrCat("sync ", last_part(path_)));
    if (!status.ok()) return status;
    status = file_->sync();
    const std::lock_guard lock(fs_->mutex_);
    if (status.ok()) fs_->synced_[path_] = size_;
    return status;
  }
  absl::Status close() override {
    absl::Status status = fs_->next(absl::StrCat("close ", last_part(path_)));
    absl::Status closed = file_->close();
    return status.ok() ? closed : status;
  }

 private:
  FaultyFileSystem* const fs_;
  const std::string path_;
  const std::unique_ptr<WritableFile> file_;
  int64_t size_ = 0;
};

class CountedFile final : public ReadableFile {
 public:
  CountedFile(FaultyFileSystem* fs, std::unique_ptr<ReadableFile> file)
      : fs_(fs), file_(std::move(file)) {}
  int64_t size() const override { return file_->size(); }
  absl::Status read_at(int64_t offset, void* out, size_t size) const override {
    if (fs_->is_dead()) return absl::UnavailableError("the process is dead");
    {
      const std::lock_guard lock(fs_->mutex_);
      fs_->bytes_read_ += static_cast<int64_t>(size);
    }
    return file_->read_at(offset, out, size);
  }
  const std::byte* mapped() const override { return nullptr; }  // every byte is to be counted

 private:
  FaultyFileSystem* const fs_;
  const std::unique_ptr<ReadableFile> file_;
};

int64_t FaultyFileSystem::operations() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

int64_t FaultyFileSystem::bytes_read() const {
  const std::lock_guard lock(mutex_);
  return bytes_read_;
}

std::vector<std::string> FaultyFileSystem::log() const {
  const std::lock_guard lock(mutex_);
  return log_;
}

bool FaultyFileSystem::is_dead() const {
  const std::lock_guard lock(mutex_);
  return dead_;
}

absl::Status FaultyFileSystem::next(const std::string& what) {
  std::unique_lock lock(mutex_);
  log_.push_back(what);
  const int64_t number = count_++;
  if (fault_.kind == FaultKind::kLate && number == fault_.at) {
    lock.unlock();
    absl::SleepFor(absl::Seconds(1));
    return absl::OkStatus();
  }
  if (fault_.kind == FaultKind::kFail && number == fault_.at) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot ", what, ": No space left on device (a test)"));
  }
  const bool stops = fault_.kind == FaultKind::kStopDead || fault_.kind == FaultKind::kPowerCut;
  if (stops && number >= fault_.at) dead_ = true;
  return dead_ ? absl::UnavailableError("the process is dead") : absl::OkStatus();
}

void FaultyFileSystem::cut_power() {
  namespace fs = std::filesystem;
  const std::lock_guard lock(mutex_);
  for (const auto& [path, bytes] : synced_) {
    if (fs::exists(path) && static_cast<int64_t>(fs::file_size(path)) > bytes) {
      fs::resize_file(path, static_cast<uintmax_t>(bytes));
    }
  }
  for (auto it = unsynced_renames_.rbegin(); it != unsynced_renames_.rend(); ++it) {
    if (!fs::exists(it->to)) continue;  // it was removed since
    fs::rename(it->to, it->from);
    if (it->had_target) std::ofstream(it->to, std::ios::binary) << it->replaced;
  }
  unsynced_renames_.clear();
  for (const std::string& path : unsynced_directories_) fs::remove_all(path);
}

absl::Status FaultyFileSystem::create_directory(const std::string& path) {
  absl::Status status = next(absl::StrCat("mkdir ", last_part(path)));
  if (status.ok()) status = posix_->create_directory(path);
  const std::lock_guard lock(mutex_);
  // "run/" is an entry of what "run" is one of.
  if (status.ok()) unsynced_directories_.insert(path.substr(0, path.find_last_not_of('/') + 1));
  return status;
}

absl::StatusOr<std::unique_ptr<WritableFile>> FaultyFileSystem::create(const std::string& path) {
  const absl::Status status = next(absl::StrCat("create ", last_part(path)));
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<WritableFile>> file = posix_->create(path);
  if (!file.ok()) return file.status();
  {
    const std::lock_guard lock(mutex_);
    synced_[path] = 0;
  }
  return std::make_unique<FaultyFile>(this, path, *std::move(file));
}

absl::StatusOr<std::unique_ptr<ReadableFile>> FaultyFileSystem::open(const std::string& path,
                                                                     Symlinks symlinks) {
  if (is_dead()) return absl::UnavailableError("the process is dead");
  absl::StatusOr<std::unique_ptr<ReadableFile>> file = posix_->open(path, symlinks);
  if (!file.ok()) return file.status();
  return std::make_unique<CountedFile>(this, *std::move(file));
}

absl::Status FaultyFileSystem::sync_directory(const std::string& path) {
  absl::Status status = next(absl::StrCat("sync directory ", last_part(path)));
  if (!status.ok()) return status;
  status = posix_->sync_directory(path);
  const std::lock_guard lock(mutex_);
  std::erase_if(unsynced_renames_, [&](const Renamed& it) { return lies_in(it.to, path); });
  std::erase_if(unsynced_directories_, [&](const std::string& it) { return lies_in(it, path); });
  return status;
}

absl::Status FaultyFileSystem::rename(const std::string& from, const std::string& to) {
  absl::Status status = next(absl::StrCat("rename ", last_part(from), " ", last_part(to)));
  if (!status.ok()) return status;
  Renamed renamed = {from, to};
  if (std::filesystem::is_regular_file(to)) {
    std::ifstream old(to, std::ios::binary);
    renamed.replaced = {std::istreambuf_iterator<char>(old), {}};
    renamed.had_target = true;
  }
  status = posix_->rename(from, to);
  const std::lock_guard lock(mutex_);
  if (!status.ok()) return status;
  unsynced_renames_.push_back(std::move(renamed));
  if (unsynced_directories_.erase(from) > 0) unsynced_directories_.insert(to);
  // Files that move keep what was synced of them.
  std::map<std::string, int64_t> moved;
  for (const auto& [path, bytes] : synced_) {
    const bool moves = path == from || path.starts_with(from + "/");
    moved[moves ? to + path.substr(from.size()) : path] = bytes;
  }
  synced_ = std::move(moved);
  return status;
}

absl::StatusOr<std::vector<DirectoryEntry>> FaultyFileSystem::list(const std::string& path) {
  if (is_dead()) return absl::UnavailableError("the process is dead");
  return posix_->list(path);
}

absl::Status FaultyFileSystem::remove_file(const std::string& path) {
  absl::Status status = next(absl::StrCat("remove ", last_part(path)));
  return status.ok() ? posix_->remove_file(path) : status;
}

absl::Status FaultyFileSystem::remove_directory(const std::string& path) {
  absl::Status status = next(absl::StrCat("remove directory ", last_part(path)));
  return status.ok() ? posix_->remove_directory(path) : status;
}

absl::StatusOr<std::unique_ptr<FileLock>> FaultyFileSystem::lock(const std::string& path,
                                                                 const std::string& holder) {
  absl::Status status = next(absl::StrCat("lock ", last_part(path)));
  if (!status.ok()) return status;
  return posix_->lock(path, holder);
}

}  // namespace shardweave::testing

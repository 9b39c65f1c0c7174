#include "shardweave/comm/store/file_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "shardweave/comm/store/file_store_log.h"
#include "shardweave/comm/store/store_errors.h"

namespace shardweave {
namespace {

constexpr absl::Duration kFirstPoll = absl::Milliseconds(1);
constexpr absl::Duration kLastPoll = absl::Milliseconds(20);
// A writer holds the lock for microseconds; only one that was stopped in between holds it longer.
constexpr absl::Duration kLockTimeout = absl::Seconds(30);
constexpr size_t kMaxSize = size_t{1} << 31;

class FileStore : public Store {
 public:
  FileStore(std::string path, int file) : path_(std::move(path)), file_(file) {}
  ~FileStore() override { ::close(file_); }

  // Writes the header into a new file, else checks it.
  absl::Status begin() {
    std::lock_guard lock(mutex_);
    if (absl::Status status = lock_file(); !status.ok()) return status;
    absl::Status status = check_header();
    ::flock(file_, LOCK_UN);
    return status;
  }

  std::string describe() const override { return absl::StrCat("file store ", path_); }

 private:
  absl::Status do_set(std::string_view key, std::string_view value) override {
    if (key.size() + value.size() >= kMaxSize) {
      return absl::InvalidArgumentError(absl::StrCat(describe(), ": key and value have ",
                                                     key.size() + value.size(),
                                                     " bytes; wanted less than 2 GiB"));
    }
    return write([&] { return file_log::encode_set(key, value); });
  }

  absl::StatusOr<std::string> do_get(std::string_view key, absl::Duration timeout) override {
    const std::string name(key);
    if (absl::Status status = do_wait({name}, timeout); !status.ok()) return status;
    std::lock_guard lock(mutex_);
    auto found = values_.find(name);
    // Removed since.
    if (found == values_.end()) return store_errors::missing_keys(*this, {name}, timeout);
    return found->second;
  }

  absl::StatusOr<int64_t> do_add(std::string_view key, int64_t delta) override {
    absl::StatusOr<int64_t> sum;
    absl::Status status = write([&]() -> std::string {
      auto found = values_.find(std::string(key));
      sum = store_errors::add_to_counter(*this, key, found == values_.end() ? "0" : found->second,
                                         delta);
      return sum.ok() ? file_log::encode_set(key, absl::StrCat(*sum)) : "";
    });
    if (!status.ok()) return status;
    return sum;
  }

  absl::Status do_wait(const std::vector<std::string>& keys, absl::Duration timeout) override {
    const absl::Time deadline = absl::Now() + timeout;
    for (absl::Duration pause = kFirstPoll;; pause = std::min(2 * pause, kLastPoll)) {
      absl::StatusOr<std::vector<std::string>> absent = missing(keys);
      if (!absent.ok()) return absent.status();
      if (absent->empty()) return absl::OkStatus();
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) return store_errors::missing_keys(*this, *absent, timeout);
      absl::SleepFor(std::min(pause, left));
    }
  }

  absl::StatusOr<bool> do_check(const std::vector<std::string>& keys) override {
    absl::StatusOr<std::vector<std::string>> absent = missing(keys);
    if (!absent.ok()) return absent.status();
    return absent->empty();
  }

  absl::StatusOr<bool> do_remove(std::string_view key) override {
    bool there = false;
    absl::Status status = write([&]() -> std::string {
      there = values_.contains(std::string(key));
      return there ? file_log::encode_remove(key) : "";
    });
    if (!status.ok()) return status;
    return there;
  }

  absl::StatusOr<std::vector<std::string>> missing(const std::vector<std::string>& keys) {
    std::lock_guard lock(mutex_);
    if (absl::Status status = read_new(); !status.ok()) return status;
    std::vector<std::string> result;
    for (const std::string& key : keys) {
      if (!values_.contains(key)) result.push_back(key);
    }
    return result;
  }

  absl::Status error(std::string_view what) const {
    return absl::UnavailableError(
        absl::StrCat(describe(), ": cannot ", std::string(what), ": ", std::strerror(errno)));
  }

  // Appends the record that `make` encodes from the newest values_; an empty one changes nothing.
  template <typename Make>
  absl::Status write(Make make) {
    std::lock_guard lock(mutex_);
    if (absl::Status status = lock_file(); !status.ok()) return status;
    absl::Status status = read_new();
    if (status.ok()) status = append(make());
    ::flock(file_, LOCK_UN);
    return status;
  }

  absl::Status lock_file() {
    const absl::Time deadline = absl::Now() + kLockTimeout;
    for (absl::Duration pause = kFirstPoll / 10; ::flock(file_, LOCK_EX | LOCK_NB) != 0;
         pause = std::min(2 * pause, kLastPoll)) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) return error("lock the file");
      if (absl::Now() > deadline) {
        return absl::UnavailableError(absl::StrCat(describe(),
                                                   ": another process holds its lock for ",
                                                   absl::FormatDuration(kLockTimeout)));
      }
      absl::SleepFor(pause);
    }
    return absl::OkStatus();
  }

  absl::Status check_header() {
    absl::StatusOr<std::string> start = read_at(0, file_log::kHeader.size());
    if (!start.ok()) return start.status();
    const std::string header(file_log::kHeader);
    if (*start == header) return absl::OkStatus();
    // Shorter: new, or its creator died here.
    if (header.compare(0, start->size(), *start) == 0) return write_at(0, header);
    return absl::FailedPreconditionError(
        absl::StrCat(describe(), ": the file is there, but is no store"));
  }

  // Takes in the records that were appended since the last time.
  absl::Status read_new() {
    struct stat info;
    if (::fstat(file_, &info) != 0) return error("look at the file");
    if (info.st_nlink == 0) {
      return absl::UnavailableError(absl::StrCat(describe(), ": the file was removed"));
    }
    if (info.st_size <= end_) return absl::OkStatus();
    absl::StatusOr<std::string> bytes = read_at(end_, info.st_size - end_);
    if (!bytes.ok()) return bytes.status();
    std::string_view rest = *bytes;
    while (std::optional<file_log::Record> record = file_log::next_record(rest)) {
      if (record->value) {
        values_.insert_or_assign(std::string(record->key), std::string(*record->value));
      } else {
        values_.erase(std::string(record->key));
      }
      rest.remove_prefix(record->size);
      end_ += static_cast<off_t>(record->size);
    }
    return absl::OkStatus();
  }

  // At the end of the last intact record; the caller has the lock and has read everything.
  absl::Status append(const std::string& record) {
    if (record.empty()) return absl::OkStatus();
    if (::ftruncate(file_, end_) != 0) return error("cut off a torn record");
    if (absl::Status status = write_at(end_, record); !status.ok()) return status;
    return read_new();
  }

  absl::StatusOr<std::string> read_at(off_t offset, size_t size) const {
    std::string bytes(size, '\0');
    size_t done = 0;
    while (done < size) {
      const ssize_t n = ::pread(file_, bytes.data() + done, size - done, offset + done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return error("read the file");
      if (n == 0) break;  // a torn record was cut off meanwhile
      done += n;
    }
    bytes.resize(done);
    return bytes;
  }

  absl::Status write_at(off_t offset, const std::string& bytes) {
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = ::pwrite(file_, bytes.data() + done, bytes.size() - done, offset + done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return error("write the file");
      done += n;
    }
    return absl::OkStatus();
  }

  const std::string path_;
  const int file_;
  std::mutex mutex_;  // flock() does not keep apart threads that share file_; guards what follows
  // What the log says up to the byte end_.
  absl::flat_hash_map<std::string, std::string> values_;
  off_t end_ = file_log::kHeader.size();
};

}  // namespace

absl::StatusOr<std::shared_ptr<Store>> open_file_store(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) {
    return absl::UnavailableError(
        absl::StrCat("file store ", path, ": cannot open the file: ", std::strerror(errno)));
  }
  auto store = std::make_shared<FileStore>(path, file);
  if (absl::Status status = store->begin(); !status.ok()) return status;
  return store;
}

}  // namespace shardweave

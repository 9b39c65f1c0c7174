#include "shardweave/modules/train/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "shardweave/comm/str_cat.h"

namespace shardweave::train_internal {

absl::Status system_error(const std::string& path, std::string_view what) {
  const int error = errno;
  return absl::Status(absl::ErrnoToStatus(error, "").code(),
                      str_cat(path, ": ", what, ": ", std::strerror(error)));
}

absl::StatusOr<OutputFile> OutputFile::open(const std::string& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_WRONLY | O_CLOEXEC, 0666);
  if (fd < 0) return system_error(path, "cannot be opened");
  return OutputFile(path, fd);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      error_(std::move(other.error_)) {}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
}

absl::Status OutputFile::append(std::string_view bytes) {
  while (error_.ok() && !bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      error_ = system_error(path_, "cannot be written");
    } else {
      bytes.remove_prefix(static_cast<size_t>(n));
    }
  }
  return error_;
}

}  // namespace shardweave::train_internal

// A file that is written at its end. Internal to modules/train.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardweave::train_internal {

absl::Status system_error(const std::string& path, std::string_view what);

class OutputFile {
 public:
  // `flags` as open()'s, beside O_WRONLY and O_CLOEXEC.
  static absl::StatusOr<OutputFile> open(const std::string& path, int flags);
  ~OutputFile();
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;

  const std::string& path() const { return path_; }
  int descriptor() const { return fd_; }
  // All of it, or an error, which is that of every later call.
  absl::Status append(std::string_view bytes);

 private:
  OutputFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_;
  absl::Status error_;
};

}  // namespace shardweave::train_internal

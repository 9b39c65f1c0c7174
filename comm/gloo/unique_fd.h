// A file descriptor that is closed with its owner.
//
//   UniqueFd fd(::socket(AF_INET, SOCK_STREAM, 0));
//   if (!fd) return errno_error("socket");
#pragma once

#include <unistd.h>

#include <utility>

namespace shardweave::gloo_internal {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

}  // namespace shardweave::gloo_internal

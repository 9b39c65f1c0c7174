#include "shardweave/comm/store/tcp_probe.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace shardweave {
namespace {

// A SYN that is dropped by a firewall is not answered at all.
constexpr absl::Duration kMaxConnect = absl::Seconds(3);
constexpr absl::Duration kFirstPause = absl::Milliseconds(10);
constexpr absl::Duration kLastPause = absl::Milliseconds(250);

int milliseconds(absl::Duration duration) {
  return static_cast<int>(std::max<int64_t>(absl::ToInt64Milliseconds(duration), 1));
}

// Empty if the connection came about, else why not.
std::string try_connect(const addrinfo& address, absl::Duration patience) {
  const int fd = ::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return std::strerror(errno);
  int error = 0;
  if (::connect(fd, address.ai_addr, address.ai_addrlen) != 0) {
    error = errno;
    if (error == EINPROGRESS) {
      pollfd ready = {fd, POLLOUT, 0};
      socklen_t size = sizeof(error);
      error = ETIMEDOUT;
      if (::poll(&ready, 1, milliseconds(patience)) > 0) {
        ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
      }
    }
  }
  ::close(fd);
  return error == 0 ? "" : std::strerror(error);
}

std::string try_host(const std::string& host, uint16_t port, absl::Duration patience) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* addresses = nullptr;
  const int failure = ::getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &addresses);
  if (failure != 0) return absl::StrCat("cannot resolve the name: ", ::gai_strerror(failure));
  std::string why = "no address";
  for (const addrinfo* each = addresses; each != nullptr && !why.empty(); each = each->ai_next) {
    why = try_connect(*each, patience);
  }
  ::freeaddrinfo(addresses);
  return why;
}

}  // namespace

absl::Status wait_for_listener(const std::string& host, uint16_t port, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  for (absl::Duration pause = kFirstPause;; pause = std::min(2 * pause, kLastPause)) {
    const std::string why = try_host(host, port, std::min(kMaxConnect, deadline - absl::Now()));
    if (why.empty()) return absl::OkStatus();
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::UnavailableError(absl::StrCat(host, ":", port, ": nobody answers in ",
                                                 absl::FormatDuration(timeout), ": ", why));
    }
    absl::SleepFor(std::min(pause, left));
  }
}

}  // namespace shardweave

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
#include "shardweave/comm/log.h"

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

// What getaddrinfo says; the addresses are the caller's.
int resolve(const std::string& host, uint16_t port, addrinfo** addresses) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  return ::getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, addresses);
}

std::string cannot_resolve(int failure) {
  return absl::StrCat("cannot resolve the name: ", ::gai_strerror(failure));
}

std::string try_host(const std::string& host, uint16_t port, absl::Duration patience,
                     int* resolved) {
  addrinfo* addresses = nullptr;
  const int failure = resolve(host, port, &addresses);
  *resolved = failure;
  if (failure != 0) return cannot_resolve(failure);
  std::string why = "no address";
  for (const addrinfo* each = addresses; each != nullptr && !why.empty(); each = each->ai_next) {
    why = try_connect(*each, patience);
  }
  ::freeaddrinfo(addresses);
  return why;
}

}  // namespace

absl::Status wait_for_name(const std::string& host, absl::Duration timeout,
                           const ListenerPatience& patience) {
  const absl::Time deadline = absl::Now() + std::min(timeout, patience.for_name);
  bool said = false;
  for (absl::Duration pause = kFirstPause;; pause = std::min(2 * pause, kLastPause)) {
    addrinfo* addresses = nullptr;
    const int failure = resolve(host, 0, &addresses);
    if (failure == 0) {
      ::freeaddrinfo(addresses);
      return absl::OkStatus();
    }
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::UnavailableError(absl::StrCat(host, ": ", cannot_resolve(failure)));
    }
    if (!said) {
      said = true;
      say(absl::StrCat("waiting for the name of this host, ", host, ": ", cannot_resolve(failure)));
    }
    absl::SleepFor(std::min(pause, left));
  }
}

absl::Status wait_for_listener(const std::string& host, uint16_t port, absl::Duration timeout,
                               const ListenerPatience& patience) {
  const absl::Time begin = absl::Now();
  const absl::Time deadline = begin + timeout;
  bool said = false, name_known = patience.names_come_later;
  for (absl::Duration pause = kFirstPause;; pause = std::min(2 * pause, kLastPause)) {
    int resolved = 0;
    const std::string why =
        try_host(host, port, std::min(kMaxConnect, deadline - absl::Now()), &resolved);
    if (why.empty()) return absl::OkStatus();
    name_known |= resolved == 0;
    const absl::Duration waited = absl::Now() - begin;
    if (!name_known && waited >= patience.for_name) {
      return absl::UnavailableError(absl::StrCat(host, ":", port, ": ", why));
    }
    if (!said && (resolved != 0 || waited >= patience.say_after)) {
      said = true;
      say(absl::StrCat("waiting for rank 0's store at ", host, ":", port, ": ", why));
    }
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::UnavailableError(absl::StrCat(host, ":", port, ": nobody answers in ",
                                                 absl::FormatDuration(timeout), ": ", why));
    }
    absl::SleepFor(std::min(pause, left));
  }
}

}  // namespace shardweave

#include "shardweave/comm/gloo/mesh.h"

#include <dirent.h>
#include <fcntl.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/device.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <future>
#include <memory>
#include <random>

#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::gloo_internal {
namespace {

using Clock = std::chrono::steady_clock;
using GlooAddress = ::gloo::transport::tcp::Address;

constexpr int64_t kNoLimitMs = int64_t{1000} * 3600 * 24 * 365;

int64_t milliseconds_left(Deadline deadline) {
  if (deadline == Deadline::max()) return kNoLimitMs;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  return std::clamp<int64_t>(left.count(), 0, kNoLimitMs);
}

// Ranks that can reach each other over loopback have the same: one kernel, one network namespace.
std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network {};
  ::stat("/proc/self/ns/net", &network);
  return str_cat(boot, "/", network.st_ino);
}

// The values that all ranks have put under one name.
class Exchange {
 public:
  Exchange(Store& store, std::string_view prefix, const GroupInfo& group, Deadline deadline)
      : store_(store), prefix_(prefix), group_(group), deadline_(deadline) {}

  // Puts this rank's value, waits for those of all.
  absl::StatusOr<std::vector<std::string>> all(std::string_view name, std::string_view mine) {
    const std::string my_key = key(name, group_.rank);
    if (absl::Status status = store_.set(my_key, mine); !status.ok()) return status;
    to_remove_.push_back(my_key);
    std::vector<std::string> keys;
    for (int rank = 0; rank < group_.size(); ++rank) keys.push_back(key(name, rank));
    const absl::Duration timeout = absl::Milliseconds(milliseconds_left(deadline_));
    if (absl::Status status = store_.wait(keys, timeout); !status.ok()) {
      return absl::IsDeadlineExceeded(status) ? name_missing(keys, status) : status;
    }
    std::vector<std::string> values;
    for (const std::string& each : keys) {
      absl::StatusOr<std::string> value = store_.get(each, absl::ZeroDuration());
      if (!value.ok()) return value.status();
      values.push_back(*std::move(value));
    }
    return values;
  }

  // When all ranks have read all of it.
  void clean_up() {
    for (const std::string& each : to_remove_) store_.remove(each).IgnoreError();
  }

 private:
  std::string key(std::string_view name, int rank) const {
    return str_cat(prefix_, "/", name, "/", rank);
  }

  absl::Status name_missing(const std::vector<std::string>& keys, const absl::Status& why) {
    std::vector<std::string> missing;
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (!store_.check({keys[rank]}).value_or(false)) {
        missing.push_back(str_cat("rank ", rank, " (world rank ", group_.world_ranks[rank], ")"));
      }
    }
    return absl::DeadlineExceededError(
        str_cat(absl::StrJoin(missing, ", "), " did not come to connect: ", why.message()));
  }

  Store& store_;
  const std::string_view prefix_;
  const GroupInfo& group_;
  const Deadline deadline_;
  std::vector<std::string> to_remove_;
};

// 1. Addresses.

bool same_address(const sockaddr_storage& a, const sockaddr_storage& b) {
  if (a.ss_family != b.ss_family) return false;
  if (a.ss_family == AF_INET) {
    const auto& x = reinterpret_cast<const sockaddr_in&>(a);
    const auto& y = reinterpret_cast<const sockaddr_in&>(b);
    return x.sin_port == y.sin_port && x.sin_addr.s_addr == y.sin_addr.s_addr;
  }
  const auto& x = reinterpret_cast<const sockaddr_in6&>(a);
  const auto& y = reinterpret_cast<const sockaddr_in6&>(b);
  return x.sin6_port == y.sin6_port &&
         std::memcmp(&x.sin6_addr, &y.sin6_addr, sizeof(x.sin6_addr)) == 0;
}

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return ntohl(v4.sin_addr.s_addr) >> 24 == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

sockaddr_storage address_in(const std::vector<char>& bytes) {
  return GlooAddress(bytes).getSockaddr();
}

// A copy of the descriptor of a connected pair. Gloo keeps it to itself, but no two connections
// have the same two ends.
absl::StatusOr<UniqueFd> take_socket(const sockaddr_storage& self,
                                     const sockaddr_storage& my_listener,
                                     const sockaddr_storage& their_listener) {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir("/proc/self/fd"), ::closedir);
  while (const dirent* entry = directory == nullptr ? nullptr : ::readdir(directory.get())) {
    const int fd = std::atoi(entry->d_name);
    sockaddr_storage local{}, remote{};
    socklen_t local_size = sizeof(local), remote_size = sizeof(remote);
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &local_size) != 0 ||
        ::getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &remote_size) != 0 ||
        !same_address(local, self)) {
      continue;
    }
    // One side has the address where it listened, the other side sees it.
    if (!same_address(local, my_listener) && !same_address(remote, their_listener)) continue;
    UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (copy && ::fcntl(copy.get(), F_SETFL, ::fcntl(copy.get(), F_GETFL) | O_NONBLOCK) == 0) {
      return copy;
    }
    break;
  }
  return absl::InternalError(str_cat("cannot take a connection from Gloo: ", std::strerror(errno)));
}

// 2. Greetings: the first bytes on each connection, so that no stranger is taken for a rank.

struct Greeting {
  char magic[8] = {'S', 'W', 'G', 'L', 'O', 'O', '0', '1'};
  int32_t from = 0;
  int32_t to = 0;
  char secret[16] = {};
};

std::string make_secret() {
  std::random_device random;
  std::string secret;
  while (secret.size() < sizeof(Greeting::secret)) {
    secret.push_back(static_cast<char>(random() & 0xff));
  }
  return secret;
}

absl::Status greet(const std::vector<UniqueFd>& sockets, const GroupInfo& group,
                   const std::string& secret, Deadline deadline) {
  Greeting mine{.from = group.rank};
  std::memcpy(mine.secret, secret.data(), std::min(secret.size(), sizeof(mine.secret)));
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer == group.rank) continue;
    mine.to = peer;
    if (::send(sockets[peer].get(), &mine, sizeof(mine), MSG_NOSIGNAL) != sizeof(mine)) {
      return absl::UnavailableError(
          str_cat("cannot greet rank ", peer, ": ", std::strerror(errno)));
    }
  }
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer == group.rank) continue;
    Greeting theirs{};
    for (size_t have = 0; have < sizeof(theirs);) {
      pollfd ready{.fd = sockets[peer].get(), .events = POLLIN};
      const int64_t left = std::min<int64_t>(milliseconds_left(deadline), 1000);
      if (::poll(&ready, 1, static_cast<int>(left)) == 0 && left == 0) {
        return absl::DeadlineExceededError(str_cat("rank ", peer, " did not greet"));
      }
      const ssize_t got = ::recv(sockets[peer].get(), reinterpret_cast<char*>(&theirs) + have,
                                 sizeof(theirs) - have, MSG_DONTWAIT);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (got <= 0) {
        return absl::UnavailableError(str_cat("rank ", peer, " closed its connection"));
      }
      have += got;
    }
    mine.from = peer;
    mine.to = group.rank;
    if (std::memcmp(&theirs, &mine, sizeof(mine)) != 0) {
      return absl::UnavailableError(
          str_cat("what connected as rank ", peer, " is not rank ", peer));
    }
  }
  return absl::OkStatus();
}

// 3. All of it.

absl::StatusOr<::gloo::transport::tcp::attr> choose_address(const std::string& interface,
                                                            Exchange& exchange) {
  ::gloo::transport::tcp::attr attr;
  if (!interface.empty()) {
    if (::if_nametoindex(interface.c_str()) == 0) {
      return absl::InvalidArgumentError(
          str_cat("there is no network interface '", interface, "' on this host"));
    }
    attr.iface = interface;
    return attr;
  }
  const absl::StatusOr<std::vector<std::string>> hosts = exchange.all("host", host_identity());
  if (!hosts.ok()) return hosts.status();
  const bool one_host = std::all_of(hosts->begin(), hosts->end(),
                                    [&](const std::string& h) { return h == hosts->front(); });
  if (one_host) attr.hostname = "127.0.0.1";
  return attr;
}

absl::StatusOr<std::vector<UniqueFd>> connect(Exchange& exchange, const GroupInfo& group,
                                              const std::string& interface, Deadline deadline) {
  const int size = group.size();
  absl::StatusOr<::gloo::transport::tcp::attr> attr = choose_address(interface, exchange);
  if (!attr.ok()) return attr.status();
  const std::shared_ptr<::gloo::transport::Device> device =
      ::gloo::transport::tcp::CreateDevice(*attr);
  const std::shared_ptr<::gloo::transport::Context> context =
      device->createContext(group.rank, size);
  // Pairs wait five times as long as this for their connection.
  context->setTimeout(
      std::chrono::milliseconds(std::max<int64_t>(milliseconds_left(deadline) / 5, 1)));

  // A pair listens at an address of its own.
  const size_t address_bytes = GlooAddress().bytes().size();
  std::vector<sockaddr_storage> my_listeners(size);
  std::string my_addresses(size * address_bytes, '\0');
  for (int peer = 0; peer < size; ++peer) {
    if (peer == group.rank) continue;
    const std::vector<char> address = context->createPair(peer)->address().bytes();
    std::copy(address.begin(), address.end(), my_addresses.begin() + peer * address_bytes);
    my_listeners[peer] = address_in(address);
    if (attr->hostname.empty() && attr->iface.empty() && is_loopback(my_listeners[peer])) {
      return absl::FailedPreconditionError(
          "the ranks are on several hosts, and this host's name leads to a loopback address: name "
          "the "
          "network interface to use");
    }
  }
  const absl::StatusOr<std::vector<std::string>> addresses = exchange.all("address", my_addresses);
  if (!addresses.ok()) return addresses.status();

  // Each takes one or two turns of Gloo's thread, which may be 10 ms: so all at once.
  std::vector<std::future<absl::StatusOr<UniqueFd>>> connecting(size);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == group.rank) continue;
    if ((*addresses)[peer].size() != my_addresses.size()) {
      return absl::InternalError(str_cat("rank ", peer, " has put down a malformed address"));
    }
    const char* theirs = (*addresses)[peer].data() + group.rank * address_bytes;
    connecting[peer] = std::async(
        std::launch::async, [&pair = *context->getPair(peer), my_listener = my_listeners[peer],
                             address = std::vector<char>(theirs, theirs + address_bytes)] {
          pair.connect(address);
          pair.setSync(true,
                       /*busyPoll=*/false);  // from now on Gloo's thread does not read from it
          return take_socket(address_in(pair.address().bytes()), my_listener, address_in(address));
        });
  }
  std::vector<UniqueFd> sockets(size);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == group.rank) continue;
    absl::StatusOr<UniqueFd> socket = connecting[peer].get();
    if (!socket.ok()) return socket.status();
    sockets[peer] = *std::move(socket);
  }

  // Nothing may be sent before all ranks have got so far: Gloo's thread there would read it.
  const absl::StatusOr<std::vector<std::string>> secrets = exchange.all("secret", make_secret());
  if (!secrets.ok()) return secrets.status();
  if (absl::Status status = greet(sockets, group, secrets->front(), deadline); !status.ok()) {
    return status;
  }
  exchange.clean_up();
  return sockets;
}

}  // namespace

absl::StatusOr<std::vector<UniqueFd>> connect_mesh(Store& store, std::string_view prefix,
                                                   const GroupInfo& group,
                                                   const std::string& interface,
                                                   Deadline deadline) {
  if (group.size() == 1) return std::vector<UniqueFd>(1);
  Exchange exchange(store, prefix, group, deadline);
  absl::StatusOr<std::vector<UniqueFd>> sockets;
  try {
    sockets = connect(exchange, group, interface, deadline);
  } catch (const std::exception& error) {  // Gloo's
    sockets = milliseconds_left(deadline) == 0 ? absl::DeadlineExceededError(error.what())
                                               : absl::UnavailableError(error.what());
  }
  if (sockets.ok()) return sockets;
  return absl::Status(sockets.status().code(),
                      str_cat("connecting group '", group.name, "' (rank ", group.rank, " of ",
                              group.size(), ") over Gloo: ", sockets.status().message()));
}

}  // namespace shardweave::gloo_internal

#include "shardweave/comm/gloo/mesh.h"

#include <dirent.h>
#include <fcntl.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/device.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <fstream>
#include <future>
#include <memory>
#include <numeric>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/log.h"
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

// How often a waiting rank looks up.
constexpr absl::Duration kLook = absl::Milliseconds(100);
// How soon it looks for a key again at first.
constexpr absl::Duration kFirstPause = absl::Milliseconds(1);

std::string name_rank(const GroupInfo& group, int rank) {
  return str_cat("rank ", rank, " (world rank ", group.world_ranks[rank], ")");
}

std::string name_ranks(const GroupInfo& group, absl::Span<const int> ranks) {
  std::vector<std::string> names;
  for (int rank : ranks) names.push_back(name_rank(group, rank));
  return absl::StrJoin(names, ", ");
}

// Ranks that can reach each other over loopback have the same: one kernel, one network namespace.
std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network {};
  ::stat("/proc/self/ns/net", &network);
  return str_cat(boot, "/", network.st_ino);
}

// Ranks that are threads of one process have the same.
std::string process_identity() {
  struct stat processes {};
  ::stat("/proc/self/ns/pid", &processes);
  return str_cat(host_identity(), "/", processes.st_ino, "/", ::getpid());
}

std::vector<int> nobody() {
  return {};
}

// What the ranks tell each other through the store: a value of each under one name; and the first
// error, which ends it for all.
class Exchange {
 public:
  Exchange(Store& store, std::string_view prefix, const GroupInfo& group,
           const ConnectOptions& options, Deadline deadline)
      : store_(store),
        prefix_(prefix),
        group_(group),
        options_(options),
        deadline_(deadline),
        begin_(Clock::now()) {}

  // Before the store is asked: it may have gone with a rank that is gone, of which LibTorch tells stderr at
  // length.
  absl::Status begin() {
    std::vector<int> all(static_cast<size_t>(group_.size()));
    std::iota(all.begin(), all.end(), 0);
    const absl::Status reason =
        options_.watch ? options_.watch([&] { return all; }) : absl::OkStatus();
    if (!reason.ok()) told_ = true;  // the others watch too
    return reason;
  }

  // Puts this rank's value, waits for those of all.
  absl::StatusOr<std::vector<std::string>> all(std::string_view name, std::string_view mine) {
    const std::string my_key = key(name, group_.rank);
    if (absl::Status status = store_.set(my_key, mine); !status.ok()) return status;
    to_remove_.push_back(my_key);
    std::vector<std::string> keys;
    for (int rank = 0; rank < group_.size(); ++rank) keys.push_back(key(name, rank));
    if (absl::Status status = wait(keys); !status.ok()) return status;
    std::vector<std::string> values;
    for (const std::string& each : keys) {
      absl::StatusOr<std::string> value = store_.get(each, absl::ZeroDuration());
      if (!value.ok()) return value.status();
      values.push_back(*std::move(value));
    }
    return values;
  }

  // To be called while waiting: an error is the reason to stop.
  absl::Status look(const ConnectOptions::Missing& missing) {
    const std::string error_key = str_cat(prefix_, "/error");
    if (store_.check({error_key}).value_or(false)) {
      // "9 2 the words": a status code, the world rank that failed, the message.
      const absl::StatusOr<std::string> error = store_.get(error_key, absl::ZeroDuration());
      told_ = true;
      if (!error.ok()) return error.status();
      const std::vector<std::string> parts = absl::StrSplit(*error, absl::MaxSplits(' ', 2));
      int code = 0, rank = 0;  // a code that would be no error
      if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &code) || code == 0 ||
          !absl::SimpleAtoi(parts[1], &rank)) {
        return absl::UnknownError(
            str_cat(error_key, " of ", store_.describe(), " is '", *error, "'"));
      }
      return of_rank(absl::Status(static_cast<absl::StatusCode>(code), parts[2]), rank);
    }
    const absl::Status reason = options_.watch ? options_.watch(missing) : absl::OkStatus();
    if (!reason.ok()) told_ = true;  // the others watch too
    return reason;
  }

  void say_after_patience(const ConnectOptions::Missing& missing) {
    if (said_ || absl::FromChrono(Clock::now() - begin_) < options_.patience) return;
    said_ = true;
    say(str_cat("rank ", group_.rank, " of ", group_.size(), " of group '", group_.name,
                "' has waited ", absl::FormatDuration(options_.patience), " for ",
                name_ranks(group_, missing()), " to connect"));
  }

  // This rank cannot go on: so nobody can.
  absl::Status fail(const absl::Status& why) {
    if (told_) return why;
    const absl::Status error =
        retold(why, str_cat(name_rank(group_, group_.rank), ": ", why.message()));
    // To the others it is this rank's failure, unless it is another's.
    const int64_t failed = failed_rank(error).value_or(group_.world_ranks[group_.rank]);
    store_
        .set(str_cat(prefix_, "/error"),
             str_cat(static_cast<int>(error.code()), " ", failed, " ", error.message()))
        .IgnoreError();
    return error;
  }

  // When all ranks have read all of it.
  void clean_up() {
    for (const std::string& each : to_remove_) store_.remove(each).IgnoreError();
  }

 private:
  std::string key(std::string_view name, int rank) const {
    return str_cat(prefix_, "/", name, "/", rank);
  }

  // Asks for one key at a time, and again only for one that was not there: many ranks wait for a few.
  absl::Status wait(const std::vector<std::string>& keys) {
    size_t next = 0;  // those before have come
    const auto missing = [&] { return find_missing(keys, next); };
    Clock::time_point looked = Clock::now();
    for (absl::Duration pause = kFirstPause;; pause = std::min(2 * pause, kLook)) {
      for (; next < keys.size(); ++next) {
        const absl::StatusOr<bool> there = store_.check({keys[next]});
        if (!there.ok()) return better_reason(there.status());
        if (!*there) break;
      }
      if (next == keys.size()) return absl::OkStatus();
      const absl::Duration left = absl::Milliseconds(milliseconds_left(deadline_));
      const bool late = left == absl::ZeroDuration();
      if (late || absl::FromChrono(Clock::now() - looked) >= kLook) {
        looked = Clock::now();
        if (absl::Status reason = look(missing); !reason.ok()) return reason;
      }
      if (late) {
        told_ = true;  // the others wait for the same ones
        const std::vector<int> absent = missing();
        const absl::Status error = absl::DeadlineExceededError(
            str_cat(name_ranks(group_, absent), " did not come to connect: nothing of them in ",
                    store_.describe()));
        return absent.empty() ? error : of_rank(error, group_.world_ranks[absent.front()]);
      }
      say_after_patience(missing);
      std::this_thread::sleep_for(absl::ToChronoMicroseconds(std::min(pause, left)));
    }
  }

  // Those before `first` have come.
  std::vector<int> find_missing(const std::vector<std::string>& keys, size_t first) {
    std::vector<int> missing;
    for (size_t rank = first; rank < keys.size(); ++rank) {
      if (!store_.check({keys[rank]}).value_or(false)) missing.push_back(static_cast<int>(rank));
    }
    return missing;
  }

  // The store may have gone with the rank that served it: the ranks' words tell more.
  absl::Status better_reason(const absl::Status& of_the_store) {
    told_ = true;  // nobody can be told
    for (int i = 0; options_.watch && i < 5; ++i) {
      if (absl::Status reason = options_.watch(nobody); !reason.ok()) return reason;
      std::this_thread::sleep_for(absl::ToChronoMilliseconds(kLook));
    }
    return of_the_store;
  }

  Store& store_;
  const std::string_view prefix_;
  const GroupInfo& group_;
  const ConnectOptions& options_;
  const Deadline deadline_;
  const Clock::time_point begin_;
  bool said_ = false;
  bool told_ = false;  // the error is known to the others, or cannot be told
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
    int fd = 0;
    if (!absl::SimpleAtoi(entry->d_name, &fd)) continue;  // "." and ".."
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
  char magic[8] = {'S', 'W', 'G', 'L', 'O', 'O', '0', '2'};
  int32_t from = 0;
  int32_t to = 0;
  int32_t is_control = 0;
  char secret[16] = {};
  char build[256] = {};  // of what the ranks will say, as text
};

std::string make_secret() {
  std::random_device random;
  std::string secret;
  while (secret.size() < sizeof(Greeting::secret)) {
    secret.push_back(static_cast<char>(random() & 0xff));
  }
  return secret;
}

// Sockets by connection: 2 * rank, and 2 * rank + 1 for control.
absl::Status greet(const std::vector<UniqueFd>& sockets, const GroupInfo& group,
                   const std::string& secret, const ConnectOptions& options, Exchange& exchange,
                   Deadline deadline) {
  Greeting mine{.from = group.rank};
  secret.copy(mine.secret, sizeof(mine.secret));
  options.build.copy(mine.build, sizeof(mine.build) - 1);
  const int count = static_cast<int>(sockets.size());
  for (int i = 0; i < count; ++i) {
    if (i / 2 == group.rank) continue;
    mine.to = i / 2;
    mine.is_control = i % 2;
    if (::send(sockets[i].get(), &mine, sizeof(mine), MSG_NOSIGNAL) != sizeof(mine)) {
      return absl::UnavailableError(
          str_cat("cannot greet ", name_rank(group, i / 2), ": ", std::strerror(errno)));
    }
  }
  for (int i = 0; i < count; ++i) {
    const int peer = i / 2;
    if (peer == group.rank) continue;
    Greeting theirs{};
    for (size_t have = 0; have < sizeof(theirs);) {
      pollfd ready{.fd = sockets[i].get(), .events = POLLIN};
      const int64_t left = std::min(milliseconds_left(deadline), absl::ToInt64Milliseconds(kLook));
      if (::poll(&ready, 1, static_cast<int>(left)) == 0) {
        if (absl::Status status = exchange.look(nobody); !status.ok()) return status;
        if (milliseconds_left(deadline) == 0) {
          return of_rank(
              absl::DeadlineExceededError(str_cat(name_rank(group, peer), " did not greet")),
              group.world_ranks[peer]);
        }
        exchange.say_after_patience([&] { return std::vector<int>{peer}; });
        continue;
      }
      const ssize_t got = ::recv(sockets[i].get(), reinterpret_cast<char*>(&theirs) + have,
                                 sizeof(theirs) - have, MSG_DONTWAIT);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (got <= 0) {
        return of_rank(
            absl::UnavailableError(str_cat(name_rank(group, peer), " closed its connection")),
            group.world_ranks[peer]);
      }
      have += got;
    }
    mine.from = peer;
    mine.to = group.rank;
    mine.is_control = i % 2;
    if (std::memcmp(&theirs, &mine, sizeof(mine)) != 0) {
      return absl::UnavailableError(
          str_cat("what connected as ", name_rank(group, peer), " is not that rank"));
    }
  }
  return absl::OkStatus();
}

// 3. All of it.

// What a rank says of itself before anything else; in all builds the build comes first.
struct Introduction {
  std::string build;
  std::string host;
  std::string process;

  std::string text() const { return str_cat(build, "\n", host, "\n", process); }
  static Introduction of(const std::string& text) {
    std::vector<std::string> lines = absl::StrSplit(text, '\n');
    lines.resize(3);
    return {lines[0], lines[1], lines[2]};
  }
};

absl::Status compare_builds(const std::vector<Introduction>& ranks, const GroupInfo& group) {
  const std::string& build = ranks[group.rank].build;
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::string& theirs = ranks[rank].build;
    if (theirs == build) continue;
    return absl::FailedPreconditionError(
        str_cat("the ranks run different builds of Shardweave: ", name_rank(group, group.rank),
                " has \"", build, "\", ", name_rank(group, rank), " has \"", theirs, "\""));
  }
  return absl::OkStatus();
}

bool have_threads(const std::vector<Introduction>& ranks) {
  absl::flat_hash_set<std::string> processes;
  for (const Introduction& rank : ranks) processes.insert(rank.process);
  return processes.size() < ranks.size();
}

absl::StatusOr<::gloo::transport::tcp::attr> choose_address(const std::vector<Introduction>& ranks,
                                                            const ConnectOptions& options) {
  ::gloo::transport::tcp::attr attr;
  if (!options.interface.empty()) {
    if (::if_nametoindex(options.interface.c_str()) == 0) {
      return absl::InvalidArgumentError(
          str_cat("there is no network interface '", options.interface, "' on this host"));
    }
    attr.iface = options.interface;
    return attr;
  }
  const bool one_host = std::all_of(ranks.begin(), ranks.end(), [&](const Introduction& rank) {
    return rank.host == ranks[0].host;
  });
  if (one_host) {
    attr.hostname = "127.0.0.1";
    return attr;
  }
  attr.hostname = options.host_name;
  if (attr.hostname.empty()) {
    char name[256] = {};
    if (::gethostname(name, sizeof(name) - 1) == 0) attr.hostname = name;
  }
  const std::string several =
      str_cat("the ranks are on several hosts, and the name of this one, '", attr.hostname, "', ");
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(attr.hostname.c_str(), nullptr, &hints, &found);
  if (error != 0) {
    return absl::FailedPreconditionError(str_cat(several, "has no address (", ::gai_strerror(error),
                                                 "): name the network interface to use"));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, ::freeaddrinfo);
  char text[NI_MAXHOST] = "?";
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    sockaddr_storage address{};
    std::memcpy(&address, each->ai_addr, std::min<size_t>(each->ai_addrlen, sizeof(address)));
    ::getnameinfo(each->ai_addr, each->ai_addrlen, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
    if (is_loopback(address)) continue;
    attr.hostname = text;  // this one: Gloo would take the name's first
    return attr;
  }
  return absl::FailedPreconditionError(str_cat(several, "leads only to itself (", text,
                                               ", as on Debian and Ubuntu): name the network "
                                               "interface to use"));
}

// Ends what still waits for its connection when this goes.
class Pairs {
 public:
  explicit Pairs(std::vector<std::shared_ptr<::gloo::transport::Context>> contexts)
      : contexts_(std::move(contexts)) {}
  ~Pairs() {
    for (const auto& context : contexts_) {
      for (int peer = 0; peer < context->size; ++peer) {
        const auto& pair = context->getPair(peer);
        if (pair == nullptr) continue;
        try {
          pair->close();
          // NOLINTNEXTLINE(bugprone-empty-catch): it is no use any more anyway
        } catch (const std::exception&) {
        }
      }
    }
    for (std::future<absl::StatusOr<UniqueFd>>& each : connecting) {
      if (each.valid()) each.wait();
    }
  }
  Pairs(const Pairs&) = delete;
  Pairs& operator=(const Pairs&) = delete;

  void set_timeout(std::chrono::milliseconds timeout) {
    for (const auto& context : contexts_) context->setTimeout(timeout);
  }
  ::gloo::transport::Pair& make(int i) { return *contexts_[i % 2]->createPair(i / 2); }
  ::gloo::transport::Pair& get(int i) { return *contexts_[i % 2]->getPair(i / 2); }

  std::vector<std::future<absl::StatusOr<UniqueFd>>> connecting;

 private:
  const std::vector<std::shared_ptr<::gloo::transport::Context>> contexts_;
};

absl::StatusOr<Channels> connect(Exchange& exchange, const GroupInfo& group,
                                 const ConnectOptions& options, Deadline deadline) {
  const int size = group.size();
  if (absl::Status status = exchange.begin(); !status.ok()) return status;
  const Introduction mine{options.build, options.host.empty() ? host_identity() : options.host,
                          process_identity()};
  const absl::StatusOr<std::vector<std::string>> texts = exchange.all("host", mine.text());
  if (!texts.ok()) return texts.status();
  std::vector<Introduction> ranks;
  for (const std::string& text : *texts) ranks.push_back(Introduction::of(text));
  if (absl::Status status = compare_builds(ranks, group); !status.ok()) return status;
  absl::StatusOr<::gloo::transport::tcp::attr> attr = choose_address(ranks, options);
  if (!attr.ok()) return attr.status();
  const std::shared_ptr<::gloo::transport::Device> device =
      ::gloo::transport::tcp::CreateDevice(*attr);
  // For data, and for control.
  Pairs pairs({device->createContext(group.rank, size), device->createContext(group.rank, size)});
  const auto is_own = [&](int i) { return i / 2 == group.rank; };

  // A pair listens at an address of its own.
  const size_t address_bytes = GlooAddress().bytes().size();
  const int count = 2 * size;
  std::vector<sockaddr_storage> my_listeners(count);
  std::string my_addresses(count * address_bytes, '\0');
  // Pairs wait five times as long as this for their connection.
  pairs.set_timeout(
      std::chrono::milliseconds(std::max<int64_t>(milliseconds_left(deadline) / 5, 1)));
  for (int i = 0; i < count; ++i) {
    if (is_own(i)) continue;
    const std::vector<char> address = pairs.make(i).address().bytes();
    std::copy(address.begin(), address.end(), my_addresses.begin() + i * address_bytes);
    my_listeners[i] = address_in(address);
  }
  const absl::StatusOr<std::vector<std::string>> addresses = exchange.all("address", my_addresses);
  if (!addresses.ok()) return addresses.status();

  // Each takes one or two turns of Gloo's thread, which may be 10 ms: so all at once.
  pairs.connecting.resize(count);
  for (int i = 0; i < count; ++i) {
    if (is_own(i)) continue;
    const std::string& all_of_peer = (*addresses)[i / 2];
    if (all_of_peer.size() != my_addresses.size()) {
      return absl::InternalError(
          str_cat(name_rank(group, i / 2), " has put down a malformed address"));
    }
    const char* theirs = all_of_peer.data() + (2 * group.rank + i % 2) * address_bytes;
    pairs.connecting[i] = std::async(
        std::launch::async, [&pair = pairs.get(i), my_listener = my_listeners[i],
                             address = std::vector<char>(theirs, theirs + address_bytes)] {
          pair.connect(address);
          pair.setSync(true,
                       /*busyPoll=*/false);  // from now on Gloo's thread does not read from it
          return take_socket(address_in(pair.address().bytes()), my_listener, address_in(address));
        });
  }
  std::vector<UniqueFd> sockets(count);
  for (int i = 0; i < count; ++i) {
    if (is_own(i)) continue;
    const int peer = i / 2;
    while (pairs.connecting[i].wait_for(absl::ToChronoMilliseconds(kLook)) !=
           std::future_status::ready) {
      if (absl::Status status = exchange.look(nobody); !status.ok()) return status;
      exchange.say_after_patience([&] { return std::vector<int>{peer}; });
    }
    absl::StatusOr<UniqueFd> socket = pairs.connecting[i].get();
    if (!socket.ok()) return socket.status();
    sockets[i] = *std::move(socket);
  }

  // Nothing may be sent before all ranks have got so far: Gloo's thread there would read it.
  const absl::StatusOr<std::vector<std::string>> secrets = exchange.all("secret", make_secret());
  if (!secrets.ok()) return secrets.status();
  if (absl::Status status = greet(sockets, group, secrets->front(), options, exchange, deadline);
      !status.ok()) {
    return status;
  }
  exchange.clean_up();
  Channels channels{std::vector<Channel>(size), have_threads(ranks)};
  for (int rank = 0; rank < size; ++rank) {
    channels.of_rank[rank] = {std::move(sockets[size_t{2} * rank]),
                              std::move(sockets[size_t{2} * rank + 1])};
  }
  return channels;
}

}  // namespace

absl::StatusOr<Channels> connect_mesh(Store& store, std::string_view prefix, const GroupInfo& group,
                                      const ConnectOptions& options, Deadline deadline) {
  if (group.size() == 1) return Channels{std::vector<Channel>(1)};
  Exchange exchange(store, prefix, group, options, deadline);
  absl::StatusOr<Channels> channels;
  try {
    channels = connect(exchange, group, options, deadline);
  } catch (const std::system_error& error) {  // of std::async
    channels = absl::ResourceExhaustedError(error.what());
  } catch (const std::exception& error) {  // Gloo's
    channels = milliseconds_left(deadline) == 0 ? absl::DeadlineExceededError(error.what())
                                                : absl::UnavailableError(error.what());
  }
  if (channels.ok()) {
    // When Gloo closes its own descriptor of a socket, it lets go of what is still on its way when
    // the last one is closed. But a rank that leaves owes that to the others.
    const linger none{};
    for (const Channel& channel : channels->of_rank) {
      for (int fd : {channel.data.get(), channel.control.get()}) {
        ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof(none));
      }
    }
    return channels;
  }
  const absl::Status told = exchange.fail(channels.status());
  return retold(told, str_cat("connecting group '", group.name, "' (rank ", group.rank, " of ",
                              group.size(), ") over Gloo: ", told.message()));
}

}  // namespace shardweave::gloo_internal

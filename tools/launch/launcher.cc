#include "shardweave/tools/launch/launcher.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "shardweave/comm/rendezvous/threads.h"
#include "shardweave/tools/launch/child_process.h"
#include "shardweave/tools/launch/prefixed_lines.h"
#include "shardweave/tools/launch/watchdog.h"

namespace shardweave {
namespace {

constexpr int kMaxRanks = 4096;

absl::Status system_error(const std::string& what) {
  return absl::UnavailableError(absl::StrCat("cannot ", what, ": ", std::strerror(errno)));
}

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() { reset(); }
  int get() const { return fd_; }
  void reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

// A socket that listens on loopback, on a port that the system chose.
struct Listener {
  FileDescriptor socket;
  int port = 0;
};

absl::StatusOr<Listener> listen_on_loopback() {
  Listener listener;
  listener.socket = FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  const int fd = listener.socket.get();
  if (fd < 0 || ::bind(fd, generic, size) != 0 || ::listen(fd, SOMAXCONN) != 0 ||
      ::getsockname(fd, generic, &size) != 0) {
    return system_error("listen on 127.0.0.1");
  }
  listener.port = ntohs(address.sin_port);
  return listener;
}

// As nohup and shells' background jobs have it: what is blocked would come all the same.
bool stays_ignored(int signal) {
  struct sigaction now = {};
  return (signal == SIGINT || signal == SIGHUP) && ::sigaction(signal, nullptr, &now) == 0 &&
         now.sa_handler == SIG_IGN;
}

// Blocks signals and reads them from a descriptor instead, for as long as it lives.
class Signals {
 public:
  Signals() {
    // Inherited as ignored, children would vanish unseen and a broken pipe would go unnoticed.
    old_child_ = ::signal(SIGCHLD, SIG_DFL);
    sigset_t set;
    ::sigemptyset(&set);
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD, SIGPIPE}) {
      if (!stays_ignored(signal)) ::sigaddset(&set, signal);
    }
    ::pthread_sigmask(SIG_BLOCK, &set, &old_mask_);
    fd_ = FileDescriptor(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  ~Signals() {
    while (next().number != 0) {
    }
    ::pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
    ::signal(SIGCHLD, old_child_);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int fd() const { return fd_.get(); }
  // The next signal that has come; its number is 0 if there is none.
  struct Signal {
    int number = 0;
    pid_t sender = 0;
  };
  Signal next() {
    signalfd_siginfo info;
    if (::read(fd_.get(), &info, sizeof(info)) != sizeof(info)) return {};
    return {static_cast<int>(info.ssi_signo), static_cast<pid_t>(info.ssi_pid)};
  }

 private:
  FileDescriptor fd_;
  sigset_t old_mask_;
  sighandler_t old_child_;
};

std::string prefix(int rank, int num_ranks, bool color) {
  constexpr int kColors[] = {36, 33, 32, 35, 34, 31};  // cyan first; red last
  const size_t width = absl::StrCat(num_ranks - 1).size();
  std::string number = absl::StrCat(rank);
  number.insert(0, width - number.size(), ' ');
  std::string text = absl::StrCat("[", number, "] ");
  return color ? absl::StrCat("\x1b[", kColors[rank % 6], "m", text, "\x1b[0m") : text;
}

bool wants_color(int fd) {
  return ::isatty(fd) != 0 && ::getenv("NO_COLOR") == nullptr;
}

// One rank's stdout or stderr on its way to ours.
class Stream {
 public:
  // `may_write` waits until the target takes PIPE_BUF bytes; false: it never will.
  Stream(int target, std::string prefix, std::function<bool(int)> may_write)
      : target_(target), lines_(std::move(prefix)), may_write_(std::move(may_write)) {}

  // Returns the end that the rank writes to.
  absl::StatusOr<FileDescriptor> open() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return system_error("make a pipe");
    source_ = FileDescriptor(ends[0]);
    ::fcntl(source_.get(), F_SETFL, O_NONBLOCK);
    return FileDescriptor(ends[1]);
  }

  int fd() const { return source_.get(); }  // -1 after its end

  // Passes on some of what is there, and sets `empty` if that was nothing. False: our own output is
  // closed.
  bool pump(bool& empty) {
    char buffer[1 << 16];
    const ssize_t n = fd() < 0 ? 0 : ::read(fd(), buffer, sizeof(buffer));
    empty = n <= 0;
    if (n > 0) return write(lines_.feed({buffer, static_cast<size_t>(n)}));
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return true;
    source_.reset();
    return write(lines_.finish());
  }

  // Passes on all that is there.
  void finish() {
    bool empty = false;
    while (!empty) {
      if (!pump(empty)) return;
    }
    write(lines_.finish());
  }

 private:
  bool write(std::string_view text) {
    while (!text.empty()) {
      if (!may_write_(target_)) return false;
      const ssize_t n = ::write(target_, text.data(), std::min<size_t>(text.size(), PIPE_BUF));
      if (n > 0) {
        text.remove_prefix(n);
      } else if (errno != EINTR && errno != EAGAIN) {
        return false;
      }
    }
    return true;
  }

  const int target_;
  FileDescriptor source_;
  PrefixedLines lines_;
  std::function<bool(int)> may_write_;
};

class Launch {
 public:
  explicit Launch(const LaunchOptions& options) : options_(options) {}

  ~Launch() {
    signal_all(SIGKILL);
    watchdog_.reset();
    for (pid_t pid : pids_) {
      while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
      }
    }
  }

  absl::Status start() {
    const int cores = available_cores();
    threads_ = threads_per_rank(Environment::of_process(), cores, options_.num_ranks);
    absl::StatusOr<Listener> listener = listen_on_loopback();
    if (!listener.ok()) return listener.status();
    run_id_ = absl::StrCat(::getpid(), "-", absl::Hex(std::random_device()()));
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
      absl::Status status = start_rank(rank, *listener);
      if (!status.ok()) return status;
      // From here on rank 0 alone holds it: if it dies, the others are refused and do not hang.
      listener->socket.reset();
    }
    watchdog_ = std::make_unique<Watchdog>(pids_);
    if (threads_ && options_.num_ranks > 1) {
      std::fprintf(stderr, "launch: %s\n",
                   describe_threads(*threads_, cores, options_.num_ranks).c_str());
    }
    return absl::OkStatus();
  }

  LaunchResult run() {
    while (running_ > 0) {
      wait_for_events();
      pump();
      attend();
    }
    signal_all(SIGKILL);  // what ranks have left behind
    for (const std::unique_ptr<Stream>& stream : streams_) stream->finish();
    result_.duration = absl::Now() - started_;
    return std::move(result_);
  }

 private:
  // Variables of our own, and none that would mean another store.
  std::vector<std::string> environment(int rank, const Listener& listener) const {
    std::vector<std::pair<std::string, std::string>> own = {
        {"RANK", absl::StrCat(rank)},
        {"WORLD_SIZE", absl::StrCat(options_.num_ranks)},
        {"LOCAL_RANK", absl::StrCat(rank)},
        {"LOCAL_WORLD_SIZE", absl::StrCat(options_.num_ranks)},
        {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", absl::StrCat(listener.port)},
        {"SHARDWEAVE_RUN_ID", run_id_},
        {"SHARDWEAVE_STORE_FD", rank == 0 ? absl::StrCat(listener.socket.get()) : ""},
        {"SHARDWEAVE_STORE_FILE", ""}};
    if (threads_) own.emplace_back("OMP_NUM_THREADS", absl::StrCat(*threads_));
    std::vector<std::string> all;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const bool replaced = std::any_of(own.begin(), own.end(), [&](const auto& variable) {
        return absl::StartsWith(*entry, variable.first + "=");
      });
      if (!replaced) all.emplace_back(*entry);
    }
    for (const auto& [name, value] : own) {
      if (!value.empty()) all.push_back(absl::StrCat(name, "=", value));
    }
    return all;
  }

  absl::Status start_rank(int rank, const Listener& listener) {
    ChildProcess child{.argv = options_.command,
                       .environment = environment(rank, listener),
                       .inherited = rank == 0 ? listener.socket.get() : -1};
    FileDescriptor writers[2];
    if (options_.prefix_output) {
      for (int target : {STDOUT_FILENO, STDERR_FILENO}) {
        streams_.push_back(
            std::make_unique<Stream>(target, prefix(rank, options_.num_ranks, wants_color(target)),
                                     [this](int output) { return may_write(output); }));
        absl::StatusOr<FileDescriptor> writer = streams_.back()->open();
        if (!writer.ok()) return writer.status();
        writers[target - STDOUT_FILENO] = *std::move(writer);
      }
      child.output = writers[0].get();
      child.error = writers[1].get();
    }
    absl::StatusOr<pid_t> pid = start_child(child);
    if (!pid.ok()) return pid.status();
    pids_.push_back(*pid);
    result_.ranks.push_back({.pid = *pid});
    ended_.push_back(false);
    ++running_;
    return absl::OkStatus();
  }

  void wait_for_events() {
    std::vector<pollfd> fds = {{signals_.fd(), POLLIN, 0}};
    for (const std::unique_ptr<Stream>& stream : streams_) {
      if (stream->fd() >= 0) fds.push_back({stream->fd(), POLLIN, 0});
    }
    ::poll(fds.data(), fds.size(), milliseconds_to_next());
  }

  // Until something is due, for poll().
  int milliseconds_to_next() const {
    const absl::Time next = std::min(ask_at_, kill_at_);
    if (next == absl::InfiniteFuture()) return -1;
    const absl::Duration left = absl::Ceil(next - absl::Now(), absl::Milliseconds(1));
    return static_cast<int>(std::clamp<int64_t>(absl::ToInt64Milliseconds(left), 0, 1 << 30));
  }

  // Signals that have come, and what is due. Streams are left alone: it runs while one is written to.
  void attend() {
    for (auto signal = signals_.next(); signal.number != 0; signal = signals_.next()) {
      if (signal.number == SIGCHLD) {
        collect_ended(signal.sender);
      } else if (signal.number != SIGPIPE) {
        is_message(signal.number) ? signal_all(signal.number) : interrupt(signal.number);
      }
    }
    if (absl::Now() >= ask_at_) ask_all(SIGTERM);
    if (absl::Now() >= kill_at_) {
      signal_all(SIGKILL);
      drops_output_ = is_interrupted_;
    }
  }

  // Whoever reads our output may stop reading: signals and deadlines count all the same.
  bool may_write(int output) {
    while (!drops_output_) {
      pollfd fds[] = {{output, POLLOUT, 0}, {signals_.fd(), POLLIN, 0}};
      ::poll(fds, 2, milliseconds_to_next());
      attend();
      if (fds[0].revents != 0) return true;
    }
    return false;
  }

  void pump() {
    for (const std::unique_ptr<Stream>& stream : streams_) {
      bool empty = false;
      if (stream->pump(empty)) continue;
      // Nobody reads our output any more: end as a program would that writes it itself.
      streams_.clear();
      interrupt(SIGPIPE);
      return;
    }
  }

  // Notes which ranks have ended, `first` before the others: one SIGCHLD may stand for several.
  // They are waited for only at the very end: until then their numbers, by which their groups are
  // killed, cannot become those of others.
  void collect_ended(pid_t first) {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (pids_[rank] == first) collect_if_ended(rank);
    }
    for (size_t rank = 0; rank < pids_.size(); ++rank) collect_if_ended(rank);
  }

  void collect_if_ended(size_t rank) {
    siginfo_t info = {};
    if (ended_[rank] || ::waitid(P_PID, pids_[rank], &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid == 0) {
      return;
    }
    ended_[rank] = true;
    --running_;
    RankResult& result = result_.ranks[rank];
    result.duration = absl::Now() - started_;
    (info.si_code == CLD_EXITED ? result.exit_code : result.signal) = info.si_status;
    if (result.failed() && result_.ok()) {
      result_.first_failure = static_cast<int>(rank);
      ask_at_ = absl::Now() + options_.notice;
    }
  }

  // Which a program makes of what it likes ("save and end", of batch systems): ranks get it, and no end is set
  // for them.
  static bool is_message(int signal) { return signal == SIGUSR1 || signal == SIGUSR2; }

  void interrupt(int signal) {
    is_interrupted_ = true;
    if (result_.interrupted_by != 0 || result_.first_failure) {
      kill_at_ = absl::Now();  // the user is impatient
      return;
    }
    result_.interrupted_by = signal;
    ask_all(signal == SIGPIPE ? SIGTERM : signal);
  }

  void ask_all(int signal) {
    signal_all(signal);
    ask_at_ = absl::InfiniteFuture();
    kill_at_ = absl::Now() + options_.grace;
  }

  void signal_all(int signal) {
    for (pid_t pid : pids_) ::kill(-pid, signal);
    if (signal == SIGKILL) kill_at_ = absl::InfiniteFuture();
  }

  const LaunchOptions& options_;
  const absl::Time started_ = absl::Now();
  Signals signals_;
  std::string run_id_;
  std::optional<int> threads_;  // for each rank, unless the user has chosen
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<pid_t> pids_;
  std::vector<bool> ended_;
  LaunchResult result_;
  int running_ = 0;
  bool is_interrupted_ = false;                  // from outside
  bool drops_output_ = false;                    // what nobody reads, after that and the kill
  absl::Time ask_at_ = absl::InfiniteFuture();   // when all get SIGTERM
  absl::Time kill_at_ = absl::InfiniteFuture();  // when all get SIGKILL
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace

absl::StatusOr<LaunchResult> launch(const LaunchOptions& options) {
  if (options.num_ranks < 1 || options.num_ranks > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("launch: ", options.num_ranks, " ranks: wanted 1 to ", kMaxRanks));
  }
  if (options.command.empty()) return absl::InvalidArgumentError("launch: no program given");
  Launch launch(options);
  if (absl::Status status = launch.start(); !status.ok()) return status;
  return launch.run();
}

}  // namespace shardweave

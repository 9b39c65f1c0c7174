#include "shardweave/tools/launch/watchdog.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

namespace shardweave {
namespace {

// After fork(): system calls only.
[[noreturn]] void watch(int pipe, const std::vector<pid_t>& groups) {
  ::setsid();  // out of reach of the terminal's signals
  // Nothing but the pipe: an open end of another one would keep its reader waiting.
  if (pipe > 0) ::close_range(0, pipe - 1, 0);
  ::close_range(pipe + 1, ~0U, 0);
  char released = 0;
  ssize_t n = 0;
  do {
    n = ::read(pipe, &released, 1);
  } while (n < 0 && errno == EINTR);
  if (n == 0) {
    for (pid_t group : groups) ::kill(-group, SIGKILL);
  }
  ::_exit(0);
}

}  // namespace

Watchdog::Watchdog(const std::vector<pid_t>& groups) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return;  // PR_SET_PDEATHSIG remains
  pid_ = ::fork();
  if (pid_ == 0) {
    ::close(ends[1]);
    watch(ends[0], groups);
  }
  ::close(ends[0]);
  alive_ = ends[1];
}

Watchdog::~Watchdog() {
  if (pid_ > 0) {
    (void)!::write(alive_, "", 1);
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  if (alive_ >= 0) ::close(alive_);
}

}  // namespace shardweave

#include "shardweave/tools/launch/child_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace shardweave {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

// After fork(), in a program that may have threads: system calls only, no memory from the heap.
// Returns only if something failed.
void become(const ChildProcess& child, char* const* argv, char* const* environment, pid_t parent) {
  if (::setpgid(0, 0) != 0 || ::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  if (::getppid() != parent) ::_exit(1);  // it died before PR_SET_PDEATHSIG

  const int null = ::open("/dev/null", O_RDONLY);
  if (null < 0 || ::dup2(null, STDIN_FILENO) < 0) return;
  if (child.output >= 0 && ::dup2(child.output, STDOUT_FILENO) < 0) return;
  if (child.error >= 0 && ::dup2(child.error, STDERR_FILENO) < 0) return;
  if (child.inherited >= 0 && ::fcntl(child.inherited, F_SETFD, 0) != 0) return;

  // Ignored signals stay ignored over exec, and so does the mask. (SIGINT and SIGHUP are to: nohup.)
  for (int signal : {SIGTERM, SIGPIPE, SIGCHLD}) ::signal(signal, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::execvpe(argv[0], argv, environment);
}

absl::Status cannot_start(const std::string& program, int error) {
  const std::string text = absl::StrCat("cannot start ", program, ": ", std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(text);
  if (error == EACCES || error == ENOEXEC) return absl::PermissionDeniedError(text);
  return absl::UnavailableError(text);
}

}  // namespace

absl::StatusOr<pid_t> start_child(const ChildProcess& child) {
  if (child.argv.empty())
    return absl::InvalidArgumentError("cannot start a child: no program given");
  const std::vector<char*> argv = pointers(child.argv);
  const std::vector<char*> environment = pointers(child.environment);

  // The child tells through it why it could not start; exec closes it.
  int failure[2];
  if (::pipe2(failure, O_CLOEXEC) != 0) return cannot_start(child.argv[0], errno);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) {
    become(child, argv.data(), environment.data(), parent);
    const int error = errno;
    (void)!::write(failure[1], &error, sizeof(error));
    ::_exit(127);
  }
  int error = pid < 0 ? errno : 0;
  ::close(failure[1]);
  if (pid > 0) {
    while (::read(failure[0], &error, sizeof(error)) < 0 && errno == EINTR) {
    }
  }
  ::close(failure[0]);
  if (error == 0) return pid;
  if (pid > 0) ::waitpid(pid, nullptr, 0);
  return cannot_start(child.argv[0], error);
}

}  // namespace shardweave

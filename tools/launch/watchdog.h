// Kills process groups when this process dies, even by SIGKILL.
//
//   Watchdog watchdog({pid_of_rank_0, pid_of_rank_1});
//   ...                                       // killed here: so are the two groups
//   // ~Watchdog: they are left alone
//
// PR_SET_PDEATHSIG reaches a rank, but not what the rank has started; the watchdog, a process that
// waits for the end of a pipe, reaches its whole group.
#pragma once

#include <sys/types.h>

#include <vector>

namespace shardweave {

class Watchdog {
 public:
  // The leaders' numbers must stay taken: they are not waited for while the watchdog lives.
  explicit Watchdog(const std::vector<pid_t>& groups);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  pid_t pid_ = -1;
  int alive_ = -1;  // the watchdog watches for its end
};

}  // namespace shardweave

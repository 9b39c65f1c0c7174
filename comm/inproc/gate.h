// A Gate is where the threads of one rank wait for what other ranks do: first awake, for a bounded
// time, as that takes a fraction of a microsecond; then asleep.
//
//   gate.wait(spin, [&] { return deadline; }, [&] { return done.load() >= 7; });   // the waiting rank
//   done.store(7);  gate.notify();                                 // the other rank
//
// The condition reads, and the other rank writes, sequentially consistent atomics: either the
// sleeper sees the change, or the notifier sees the sleeper.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "shardweave/comm/work.h"

namespace shardweave::inproc {

// How long to stay awake.
struct Spin {
  int pauses = 0;  // keeping the core
  int yields = 0;  // giving it to others that want it
};

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Gate {
 public:
  // Until ready() or until(), which is asked when this thread falls asleep; returns the last
  // ready(). ready() must not block.
  template <typename Until, typename Ready>
  bool wait(const Spin& spin, const Until& until, const Ready& ready) {
    for (int i = 0; i < spin.pauses; ++i) {
      if (ready()) return true;
      cpu_pause();
    }
    for (int i = 0; i < spin.yields; ++i) {
      if (ready()) return true;
      sched_yield();
    }
    const Deadline deadline = until();
    std::unique_lock lock(mutex_);
    sleepers_.fetch_add(1);
    bool is_ready = ready();
    while (!is_ready) {
      if (deadline == Deadline::max()) {  // which the clock's arithmetic cannot take
        wake_.wait(lock);
      } else if (wake_.wait_until(lock, deadline) == std::cv_status::timeout) {
        is_ready = ready();
        break;
      }
      is_ready = ready();
    }
    sleepers_.fetch_sub(1);
    return is_ready;
  }

  void notify() {
    if (sleepers_.load() == 0) return;
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  }

 private:
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace shardweave::inproc

#include "shardweave/comm/log.h"

#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace shardweave {
namespace {

struct Place {
  std::mutex mutex;
  std::shared_ptr<const Log> log;  // null: stderr
};

// Never destroyed: threads may speak while the process ends.
Place& place() {
  static Place* const instance = new Place;
  return *instance;
}

// Whether there is one: operators ask before each call.
constinit std::atomic<bool> is_set{false};

}  // namespace

void set_log(Log log) {
  auto made = log == nullptr ? nullptr : std::make_shared<const Log>(std::move(log));
  Place& p = place();
  {
    const std::lock_guard lock(p.mutex);
    p.log.swap(made);
    is_set.store(p.log != nullptr, std::memory_order_relaxed);
  }
  // `made` is the one before: it ends here, or in the last thread that is in it.
}

[[gnu::hot]] bool has_log() {
  return is_set.load(std::memory_order_relaxed);
}

void say(std::string_view line) {
  std::shared_ptr<const Log> log;
  {
    Place& p = place();
    const std::lock_guard lock(p.mutex);
    log = p.log;
  }
  if (log != nullptr) return (*log)(line);
  std::string text("shardweave: ");
  text.append(line).append("\n");
  std::fputs(text.c_str(), stderr);  // in one piece
}

}  // namespace shardweave

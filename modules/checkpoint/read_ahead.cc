#include "shardweave/modules/checkpoint/read_ahead.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "shardweave/modules/checkpoint/agree.h"

namespace shardweave::checkpoint_internal {

ReadAhead::ReadAhead(std::vector<Read> reads) : reads_(std::move(reads)), done_(reads_.size()) {
  threads_.reserve(kThreads);
  try {
    for (size_t i = 0; i < std::min(kThreads, reads_.size()); ++i) {
      threads_.emplace_back([this] {
        std::unique_lock lock(mutex_);
        while (do_next(lock)) {
        }
      });
    }
  } catch (const std::system_error&) {
    // With those that there are.
  }
}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard lock(mutex_);
    failed_.Update(absl::CancelledError("the rest is not wanted"));
  }
  for (std::thread& thread : threads_) thread.join();
}

bool ReadAhead::do_next(std::unique_lock<std::mutex>& lock) {
  if (begun_ == reads_.size() || !failed_.ok()) return false;
  const size_t mine = begun_++;
  lock.unlock();
  absl::Status status = status_of(reads_[mine]);
  lock.lock();
  failed_.Update(status);
  done_[mine] = std::move(status);
  changed_.notify_all();
  return true;
}

absl::Status ReadAhead::wait_for(size_t read) {
  std::unique_lock lock(mutex_);
  while (!done_[read].has_value() && (read < begun_ || failed_.ok())) {
    if (threads_.empty()) {
      do_next(lock);
    } else {
      changed_.wait(lock);
    }
  }
  return done_[read].value_or(failed_);
}

}  // namespace shardweave::checkpoint_internal

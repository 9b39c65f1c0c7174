#include "shardweave/modules/checkpoint/read_ahead.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "shardweave/modules/checkpoint/agree.h"

namespace shardweave::checkpoint_internal {

ReadAhead::ReadAhead(std::vector<Read> reads)
    : reads_(std::move(reads)),
      memory_(static_cast<int64_t>(std::min(kThreads, reads_.size())) * kThrough,
              StagingMemory::Pages::kHuge),
      done_(reads_.size()) {
  memory_.keep_from_children();
  threads_.reserve(kThreads);
  try {
    for (size_t i = 0; i < std::min(kThreads, reads_.size()); ++i) {
      threads_.emplace_back([this, through = absl::MakeSpan(memory_.take(kThrough), kThrough)] {
        std::unique_lock lock(mutex_);
        while (do_next(lock, through)) {
        }
      });
    }
  } catch (const std::exception&) {
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

bool ReadAhead::do_next(std::unique_lock<std::mutex>& lock, absl::Span<char> through) {
  if (begun_ == reads_.size() || !failed_.ok()) return false;
  const size_t mine = begun_++;
  lock.unlock();
  absl::Status status = status_of([&] { return reads_[mine](through); });
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
      do_next(lock, {});
    } else {
      changed_.wait(lock);
    }
  }
  return done_[read].value_or(failed_);
}

}  // namespace shardweave::checkpoint_internal

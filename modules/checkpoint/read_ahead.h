// Reads that are under way, several at once, before their bytes are asked for. Internal to modules/checkpoint/.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"

namespace shardweave::checkpoint_internal {

// Runs what it is given on a few threads of its own, beginning in the order in which it was given.
class ReadAhead {
 public:
  using Read = std::function<absl::Status()>;

  // Some wait for pages, and the disk is to have enough to do.
  static constexpr size_t kThreads = 6;

  // Without threads, if the system gives none, wait_for() does the reads.
  explicit ReadAhead(std::vector<Read> reads);
  ~ReadAhead();  // waits for what is under way; what has not begun is not done
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Waits until this one is done; what it says, or the one that failed before it began: none begins after that.
  absl::Status wait_for(size_t read);

 private:
  // Does the next one, without the lock meanwhile; false: there is none.
  bool do_next(std::unique_lock<std::mutex>& lock);

  const std::vector<Read> reads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t begun_ = 0;  // how many
  std::vector<std::optional<absl::Status>> done_;
  absl::Status failed_;  // the first that did: no other begins
  std::vector<std::thread> threads_;
};

}  // namespace shardweave::checkpoint_internal

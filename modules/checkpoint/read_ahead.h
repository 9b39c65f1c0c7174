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
#include "absl/types/span.h"
#include "shardweave/modules/checkpoint/staging_memory.h"

namespace shardweave::checkpoint_internal {

// Runs what it is given on a few threads of its own, beginning in the order in which it was given.
class ReadAhead {
 public:
  // `through`: memory for what is read past the system's cache, kThrough bytes of it, which nobody else has meanwhile.
  // It is few pages: a disk is a third slower to write to many that lie apart.
  using Read = std::function<absl::Status(absl::Span<char> through)>;
  static constexpr int64_t kThrough = int64_t{2} << 20;

  // Some copy while the disk is to have enough to do.
  static constexpr size_t kThreads = 6;

  // Without threads, if the system gives none, wait_for() does the reads. Throws Error (ResourceExhausted).
  explicit ReadAhead(std::vector<Read> reads);
  ~ReadAhead();  // waits for what is under way; what has not begun is not done
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Waits until this one is done; what it says, or the one that failed before it began: none begins after that.
  absl::Status wait_for(size_t read);

 private:
  // Does the next one, without the lock meanwhile; false: there is none.
  bool do_next(std::unique_lock<std::mutex>& lock, absl::Span<char> through);

  const std::vector<Read> reads_;
  StagingMemory memory_;  // `through` of each thread
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t begun_ = 0;  // how many
  std::vector<std::optional<absl::Status>> done_;
  absl::Status failed_;  // the first that did: no other begins
  std::vector<std::thread> threads_;
};

}  // namespace shardweave::checkpoint_internal

// A Group is what the rank threads of one in-process group share: who is there, whether it is
// broken, where they wait, and who is touching memory of others at this moment.
//
//   Group::Touch touch(group, rank);  // before reading or writing other ranks' buffers
//   if (group.broken()) return group.failure();
//   std::memcpy(...);
//
// Once broken, a group stays so, with its first error. A rank that returns an error to its caller
// first calls quiesce(): then nobody touches its buffers any more.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "shardweave/comm/inproc/gate.h"

namespace shardweave::inproc {

class Group {
 public:
  Group(std::string name, std::vector<int64_t> world_ranks, Spin spin);

  const std::string& name() const { return name_; }
  int size() const { return static_cast<int>(world_ranks_.size()); }
  const std::vector<int64_t>& world_ranks() const { return world_ranks_; }

  bool broken() const { return broken_.load(); }
  absl::Status failure() const;
  // Breaks the group, unless it is broken; wakes everybody.
  void fail(const absl::Status& error);

  // A rank that has left takes part in nothing more. Any thread.
  void leave(int rank);
  bool has_left(int rank) const { return ranks_[rank].left.load(); }
  // Changes when a rank leaves.
  int departures() const { return departures_.load(); }

  // The condition must become true when the group breaks.
  template <typename Until, typename Ready>
  bool wait(int rank, const Until& until, const Ready& ready) {
    return ranks_[rank].gate.wait(spin_, until, ready);
  }
  void notify(int rank) { ranks_[rank].gate.notify(); }
  void notify_all() {
    for (RankState& state : ranks_) state.gate.notify();
  }

  class Touch {
   public:
    Touch(Group& group, int rank) : touching_(group.ranks_[rank].touching) {
      touching_.fetch_add(1);
    }
    ~Touch() { touching_.fetch_sub(1); }
    Touch(const Touch&) = delete;
    Touch& operator=(const Touch&) = delete;

   private:
    std::atomic<int>& touching_;
  };
  // Returns when every Touch that was there has ended. In a broken group nothing is touched
  // afterwards: the one who touches looks at broken() after it has said so, and the one who breaks
  // waits after that.
  void quiesce() const;

 private:
  struct alignas(64) RankState {
    std::atomic<int> touching{0};
    std::atomic<bool> left{false};
    alignas(64) Gate gate;
  };

  const std::string name_;
  const std::vector<int64_t> world_ranks_;
  const Spin spin_;
  std::vector<RankState> ranks_;
  alignas(64) std::atomic<bool> broken_{false};
  std::atomic<int> departures_{0};
  mutable std::mutex mutex_;
  absl::Status failure_;  // guarded by mutex_
};

}  // namespace shardweave::inproc

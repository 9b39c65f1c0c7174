#include "shardweave/comm/inproc/group.h"

#include <sched.h>

#include <utility>

namespace shardweave::inproc {

Group::Group(std::string name, std::vector<int64_t> world_ranks, Spin spin)
    : name_(std::move(name)),
      world_ranks_(std::move(world_ranks)),
      spin_(spin),
      ranks_(world_ranks_.size()) {}

absl::Status Group::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Group::fail(const absl::Status& error) {
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return;
    failure_ = error;
    broken_.store(true);
  }
  notify_all();
}

void Group::leave(int rank) {
  if (ranks_[rank].left.exchange(true)) return;
  departures_.fetch_add(1);
  notify_all();
}

void Group::quiesce() const {
  for (const RankState& state : ranks_) {
    while (state.touching.load() != 0) sched_yield();
  }
}

}  // namespace shardweave::inproc

// Plans that are ready to run, and the memo of those that a mesh has found. Internal to dtensor/.
//
//   PlanRef plan = plan_for(context, from, to);   // searched once for a pair of specs (redistribute.h)
//   run_plan(context, *plan, local, sizes, cause);  // packs by schedules that are compiled once
//
// The memo is bounded (clock_cache.h), and keeps the specs of its keys, whose addresses would be
// given to others. A plan depends on the two layouts, the sizes, the element size and the cost model:
// set_cost_model() forgets all. Who has a plan keeps it; what is under way goes on with the old one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "shardweave/dtensor/engine/clock_cache.h"
#include "shardweave/dtensor/spec.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave::dtensor_internal {

struct StepSchedule;  // redistribute.cc

// A plan, and what its steps take on this rank. Of one rank: used by one thread at a time.
struct ReadyPlan {
  explicit ReadyPlan(RedistributePlan plan_in)
      : plan(std::move(plan_in)), is_local(plan.is_local()), schedules(plan.steps.size()) {}

  const RedistributePlan plan;
  const bool is_local;  // no step communicates
  // Of each step that does; null: it has not run yet, or it is too large to be kept.
  mutable std::vector<std::shared_ptr<const StepSchedule>> schedules;
};
using PlanRef = std::shared_ptr<const ReadyPlan>;

class PlanMemo {
 public:
  static constexpr size_t kMaxPlans = 4096;

  // Null: it has to be searched.
  PlanRef find(const SpecRef& from, const SpecRef& to) const {
    const Entry* entry = entries_.find(hash(from, to), Pair{from.get(), to.get()});
    return entry == nullptr ? nullptr : entry->plan;
  }
  void insert(SpecRef from, SpecRef to, PlanRef plan) {
    auto entry = std::make_unique<Entry>();
    const uint64_t at = hash(from, to);
    entry->key = {std::move(from), std::move(to)};
    entry->plan = std::move(plan);
    entries_.insert(at, std::move(entry));
    ++searches_;
  }
  void clear() { entries_.release(); }
  size_t size() const { return entries_.size(); }
  // How often the planner was asked, so far.
  int64_t searches() const { return searches_; }
  // Forgets all there is; for tests.
  void set_capacity(size_t capacity) {
    clear();
    entries_.set_capacity(capacity);
  }

 private:
  struct Pair {
    const Spec* from;
    const Spec* to;
  };
  struct Key {
    SpecRef from, to;
    bool operator==(const Pair& pair) const {
      return from.get() == pair.from && to.get() == pair.to;
    }
  };
  struct Entry : EntryOfClock {
    Key key;
    PlanRef plan;
  };
  static uint64_t hash(const SpecRef& from, const SpecRef& to) {
    return absl::HashOf(from.get(), to.get());
  }

  ClockCache<Entry> entries_{kMaxPlans};
  int64_t searches_ = 0;
};

}  // namespace shardweave::dtensor_internal

// What one rank tells of its work on one mesh: who looks on, which operator and module run, what was
// counted and what was said. Nothing is decided by it. Internal to dtensor/.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/module_names.h"

namespace shardweave::dtensor_internal {

class Observer;

struct Observation {
  DispatchCounters counters;
  ModuleNames modules;
  std::vector<Observer*> observers;              // observer.h; none, most of the time
  std::vector<std::string_view> operators_seen;  // by observers, that run; outermost first
  int64_t collectives_seen = 0;                  // by observers
  // Said once (dispatch.cc): operators without a rule; weights without a name that lose a cut.
  absl::flat_hash_set<std::string> said_gathered, said_unsharded;
  // Of weights that lose a cut the first is said in full; those that follow it are said together, when
  // it is there again: a step has gone by.
  struct Unsharded {
    std::string name;
    std::string op;
    int64_t bytes;  // for each rank, every time
  };
  struct {
    std::string first;  // "": there was none
    std::vector<Unsharded> more;
  } unsharded;
};

}  // namespace shardweave::dtensor_internal

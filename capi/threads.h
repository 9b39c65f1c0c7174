// What LibTorch keeps per thread and nothing here may depend on, for a rank may move between threads,
// as goroutines and tasks do: how many threads one operator may use, and what autograd numbers its
// operators with. Both are the process's here, and every thread that calls is brought into line.
#pragma once

#include <cstdint>

#include "shardweave/comm/world.h"

namespace shardweave::capi {

void set_num_threads(int num_threads);
// This process is a rank of `world`, whose making may have told LibTorch of fewer threads: they
// become the process's number, unless set_num_threads has said another.
void default_num_threads(const World& world);
// Before operators: what set_num_threads said holds on this thread. Costs a comparison.
void use_num_threads();

// While it lives, what autograd records has larger numbers than all that was recorded under another
// one that has ended, on whatever thread. Backward goes by the numbers: without this a rank that has
// moved would take operators in another order than the ranks that have not, and with them round
// otherwise and call other collectives. Catching up costs about a nanosecond for each operator that
// other threads have recorded.
class RecordedInOrder {
 public:
  [[gnu::hot]] RecordedInOrder();
  [[gnu::hot]] ~RecordedInOrder();
  RecordedInOrder(const RecordedInOrder&) = delete;
  RecordedInOrder& operator=(const RecordedInOrder&) = delete;

 private:
  uint64_t begun_;
};

}  // namespace shardweave::capi

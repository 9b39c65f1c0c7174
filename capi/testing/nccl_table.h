// The backend of NCCL's (comm/nccl) as a third party would write it in C: a swv_device_backend whose
// tables pass on what they get. For tests; the GPUs are those of the fake.
#pragma once

#include <atomic>

#include "shardweave.h"

namespace shardweave {

// What a test asks of the tables, and sees of them.
struct NcclTables {
  int connect_fails_on = -1;                    // the rank
  void (*spoil)(swv_backend& table) = nullptr;  // that of rank 1
  std::atomic<int> connected{0}, dropped{0}, makers_dropped{0};
  std::atomic<int> outlived{0};  // tables that were there when their maker was dropped
};

// Of rank `rank`, whose GPU is that of the same number. `tables` outlives it.
swv_device_backend nccl_in_c(NcclTables& tables, int rank);

}  // namespace shardweave

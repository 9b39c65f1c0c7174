// How many threads the operators of a rank may use, so that the ranks of one machine do not fight
// for its cores.
//
//   std::optional<int> threads = threads_per_rank(environment, available_cores(), /*ranks=*/4);
//   // 16 cores: 4. Nothing if OMP_NUM_THREADS is set: then the user has chosen.
//
// Processes that each start an OpenMP thread per core wait for each other at every operator: two
// ranks on two cores take twenty times as long as with one thread each.
#pragma once

#include <optional>
#include <string>

#include "shardweave/comm/rendezvous/environment.h"

namespace shardweave {

// Cores that this process may use: those of its affinity mask, but no more than the CPU quota of
// its cgroup and of those above (cpu.max, or version 1's cpu.cfs_quota_us) gives; at least 1.
int available_cores();
// The same for a process with `affinity` cores in its mask, and the files under `root`.
int available_cores(int affinity, const std::string& root);

// The share of one of `local_ranks` ranks, at least 1.
std::optional<int> threads_per_rank(const Environment& environment, int cores, int local_ranks);

// "2 ranks share 2 cores: 1 OpenMP thread each (OMP_NUM_THREADS chooses another number)".
std::string describe_threads(int threads, int cores, int local_ranks);

}  // namespace shardweave

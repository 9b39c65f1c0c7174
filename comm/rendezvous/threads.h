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
#include <vector>

#include "shardweave/comm/rendezvous/environment.h"

namespace shardweave {

// What bounds the cores that a process may use. Processes of one machine share those of a limit if
// it has the same name for them.
struct CpuLimit {
  std::string name;  // "cpus 0-7,16", or "cgroup" and the numbers of its folder
  double cores;
};

// The affinity mask first, then the CPU quotas of this process' cgroup and of those above (cpu.max,
// or version 1's cpu.cfs_quota_us).
std::vector<CpuLimit> cpu_limits();
// The same for a process with this affinity mask, and the files under `root`.
std::vector<CpuLimit> cpu_limits(const CpuLimit& affinity, const std::string& root);
// As ranks tell each other of them.
std::string names_of(const std::vector<CpuLimit>& limits);

// The tightest of them, at least 1.
int available_cores();
int available_cores(const std::vector<CpuLimit>& limits);

// The share of one of `local_ranks` ranks that all have the same limits, at least 1.
std::optional<int> threads_per_rank(const Environment& environment, int cores, int local_ranks);
// The share of a rank with these limits. `neighbors`: the names_of() the limits of each rank with
// this host name, this one too; no more than `local_ranks` of them are on this machine. What a
// launcher has divided already, as by binding each rank to cores of its own, is not divided again.
std::optional<int> threads_per_rank(const Environment& environment,
                                    const std::vector<CpuLimit>& limits,
                                    const std::vector<std::string>& neighbors, int local_ranks);

// "2 ranks share 2 cores: 1 OpenMP thread each (OMP_NUM_THREADS chooses another number)", or that
// they do not share the same ones.
std::string describe_threads(int threads, int cores, int local_ranks);

}  // namespace shardweave

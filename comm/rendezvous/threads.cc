#include "shardweave/comm/rendezvous/threads.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace shardweave {
namespace {

// "0-7,16", as the kernel writes it.
std::string name_cpus(const std::vector<int>& cpus) {
  std::string name;
  for (size_t i = 0, end = 0; i < cpus.size(); i = end) {
    for (end = i + 1; end < cpus.size() && cpus[end] == cpus[end - 1] + 1;) ++end;
    absl::StrAppend(&name, i == 0 ? "" : ",", cpus[i]);
    if (end - i > 1) absl::StrAppend(&name, "-", cpus[end - 1]);
  }
  return name;
}

// This process' affinity mask, also on machines with more cores than a cpu_set_t holds.
CpuLimit affinity_of_process() {
  for (int size = CPU_SETSIZE; size <= 1 << 20; size *= 2) {
    cpu_set_t* const set = CPU_ALLOC(size);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(size);
    const bool fits = ::sched_getaffinity(0, bytes, set) == 0;
    std::vector<int> cpus;
    for (int cpu = 0; fits && cpu < size; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (fits) {
      return {absl::StrCat("cpus ", name_cpus(cpus)), std::max<double>(cpus.size(), 1)};
    }
  }
  return {"cpus", std::max<double>(::sysconf(_SC_NPROCESSORS_ONLN), 1)};
}

std::string first_line(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// Cores that `quota` microseconds in each `period` are worth; negative: no limit.
double worth(std::string_view quota, std::string_view period) {
  int64_t q = 0, p = 0;
  if (!absl::SimpleAtoi(std::string(quota), &q) || !absl::SimpleAtoi(std::string(period), &p) ||
      q <= 0 || p <= 0) {
    return -1;
  }
  return static_cast<double>(q) / static_cast<double>(p);
}

double quota_in(const std::string& folder, bool version_2) {
  if (!version_2) {
    return worth(first_line(folder + "/cpu.cfs_quota_us"),
                 first_line(folder + "/cpu.cfs_period_us"));
  }
  const std::vector<std::string> words =
      absl::StrSplit(first_line(folder + "/cpu.max"), ' ', absl::SkipEmpty());
  return words.size() == 2 ? worth(words[0], words[1]) : -1;  // "max 100000"
}

// Adds the quotas from the group at `path` up to the root of its hierarchy. In a container the path
// may be that of the host, and only the root is to be seen. Whether there are any.
bool add_quotas(const std::string& mount, std::string path, bool version_2,
                std::vector<CpuLimit>& limits) {
  bool found = false;
  for (;;) {
    const std::string folder = mount + path;
    const double quota = quota_in(folder, version_2);
    if (quota > 0) {
      found = true;
      // Paths do not tell groups apart: in containers each sees its own as "/".
      struct stat group {};
      ::stat(folder.c_str(), &group);
      limits.push_back({absl::StrCat("cgroup ", group.st_dev, ":", group.st_ino), quota});
    }
    const size_t slash = path.rfind('/');
    if (path.empty() || slash == std::string::npos) return found;
    path.resize(slash);
  }
}

}  // namespace

std::vector<CpuLimit> cpu_limits(const CpuLimit& affinity, const std::string& root) {
  std::vector<CpuLimit> limits = {affinity};
  // Lines such as "0::/user.slice" (version 2) and "4:cpu,cpuacct:/docker/7".
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::string path = parts[2] == "/" ? "" : parts[2];
    if (parts[0] == "0" && parts[1].empty()) {
      add_quotas(root + "/sys/fs/cgroup", path, true, limits);
      continue;
    }
    for (absl::string_view controller : absl::StrSplit(parts[1], ',')) {
      if (controller != "cpu") continue;
      if (!add_quotas(absl::StrCat(root, "/sys/fs/cgroup/", parts[1]), path, false, limits)) {
        add_quotas(root + "/sys/fs/cgroup/cpu", path, false, limits);
      }
    }
  }
  return limits;
}

std::vector<CpuLimit> cpu_limits() {
  return cpu_limits(affinity_of_process(), "");
}

std::string names_of(const std::vector<CpuLimit>& limits) {
  return absl::StrJoin(limits, ";", [](std::string* out, const CpuLimit& limit) {
    absl::StrAppend(out, limit.name);
  });
}

int available_cores(const std::vector<CpuLimit>& limits) {
  double cores = std::numeric_limits<int>::max();
  for (const CpuLimit& limit : limits) cores = std::min(cores, limit.cores);
  return std::max(1, static_cast<int>(std::floor(cores)));
}

int available_cores() {
  return available_cores(cpu_limits());
}

std::optional<int> threads_per_rank(const Environment& environment, int cores, int local_ranks) {
  if (environment.get("OMP_NUM_THREADS")) return std::nullopt;
  return std::max(1, cores / std::max(1, local_ranks));
}

std::optional<int> threads_per_rank(const Environment& environment,
                                    const std::vector<CpuLimit>& limits,
                                    const std::vector<std::string>& neighbors, int local_ranks) {
  std::vector<CpuLimit> shares = limits;
  for (CpuLimit& share : shares) {
    const auto has_it = [&](const std::string& names) {
      const std::vector<std::string> all = absl::StrSplit(names, ';');
      return std::find(all.begin(), all.end(), share.name) != all.end();
    };
    const auto ranks = static_cast<int>(std::count_if(neighbors.begin(), neighbors.end(), has_it));
    share.cores /= std::max(1, std::min(ranks, local_ranks));
  }
  return threads_per_rank(environment, available_cores(shares), 1);
}

std::string describe_threads(int threads, int cores, int local_ranks) {
  if (threads != std::max(1, cores / std::max(1, local_ranks))) {
    return absl::StrCat("the ", local_ranks, " ranks do not share the same cores: ", threads,
                        threads == 1 ? " OpenMP thread" : " OpenMP threads",
                        " for this one (OMP_NUM_THREADS chooses another number)");
  }
  return absl::StrCat(local_ranks, local_ranks == 1 ? " rank has " : " ranks share ", cores,
                      cores == 1 ? " core: " : " cores: ", threads,
                      threads == 1 ? " OpenMP thread" : " OpenMP threads",
                      local_ranks == 1 ? "" : " each", " (OMP_NUM_THREADS chooses another number)");
}

}  // namespace shardweave

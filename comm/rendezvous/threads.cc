#include "shardweave/comm/rendezvous/threads.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace shardweave {
namespace {

// Cores in this process' affinity mask, also on machines with more than a cpu_set_t holds.
int cores_of_affinity() {
  for (int size = CPU_SETSIZE; size <= 1 << 20; size *= 2) {
    cpu_set_t* const set = CPU_ALLOC(size);
    if (set == nullptr) break;
    const bool fits = ::sched_getaffinity(0, CPU_ALLOC_SIZE(size), set) == 0;
    const int count = fits ? CPU_COUNT_S(CPU_ALLOC_SIZE(size), set) : 0;
    CPU_FREE(set);
    if (fits) return std::max(count, 1);
  }
  return static_cast<int>(std::max(::sysconf(_SC_NPROCESSORS_ONLN), 1L));
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

// The tightest quota from the group at `path` up to the root of its hierarchy. In a container the
// path may be that of the host, and only the root is to be seen.
double quota_above(const std::string& mount, std::string path, bool version_2) {
  double least = -1;
  for (;;) {
    const double here = quota_in(mount + path, version_2);
    if (here > 0 && (least < 0 || here < least)) least = here;
    const size_t slash = path.rfind('/');
    if (path.empty() || slash == std::string::npos) return least;
    path.resize(slash);
  }
}

}  // namespace

int available_cores(int affinity, const std::string& root) {
  double cores = affinity;
  // Lines such as "0::/user.slice" (version 2) and "4:cpu,cpuacct:/docker/7".
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::string path = parts[2] == "/" ? "" : parts[2];
    double quota = -1;
    if (parts[0] == "0" && parts[1].empty()) {
      quota = quota_above(root + "/sys/fs/cgroup", path, true);
    } else {
      for (absl::string_view controller : absl::StrSplit(parts[1], ',')) {
        if (controller != "cpu") continue;
        quota = quota_above(absl::StrCat(root, "/sys/fs/cgroup/", parts[1]), path, false);
        if (quota < 0) quota = quota_above(root + "/sys/fs/cgroup/cpu", path, false);
      }
    }
    if (quota > 0) cores = std::min(cores, quota);
  }
  return std::max(1, static_cast<int>(std::floor(cores)));
}

int available_cores() {
  return available_cores(cores_of_affinity(), "");
}

std::optional<int> threads_per_rank(const Environment& environment, int cores, int local_ranks) {
  if (environment.get("OMP_NUM_THREADS")) return std::nullopt;
  return std::max(1, cores / std::max(1, local_ranks));
}

std::string describe_threads(int threads, int cores, int local_ranks) {
  return absl::StrCat(local_ranks, local_ranks == 1 ? " rank has " : " ranks share ", cores,
                      cores == 1 ? " core: " : " cores: ", threads,
                      threads == 1 ? " OpenMP thread" : " OpenMP threads",
                      local_ranks == 1 ? "" : " each", " (OMP_NUM_THREADS chooses another number)");
}

}  // namespace shardweave

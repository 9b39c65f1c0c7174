#include "shardweave/comm/rendezvous/threads.h"

#include <sched.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace shardweave {
namespace {

using Variables = std::map<std::string, std::string, std::less<>>;

// A machine's files, under a folder of their own.
class Files {
 public:
  explicit Files(const std::map<std::string, std::string>& files) {
    root_ = testing::TempDir() + "/threads_XXXXXX";
    EXPECT_NE(::mkdtemp(root_.data()), nullptr);
    for (const auto& [name, text] : files) {
      std::filesystem::create_directories(std::filesystem::path(root_ + name).parent_path());
      std::ofstream(root_ + name) << text;
    }
  }
  ~Files() { std::filesystem::remove_all(root_); }
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  std::vector<CpuLimit> limits(const CpuLimit& affinity) const {
    return cpu_limits(affinity, root_);
  }
  int cores(int affinity) const {
    return available_cores(limits({"cpus", static_cast<double>(affinity)}));
  }

 private:
  std::string root_;
};

TEST(AvailableCoresTest, TheAffinityMaskWithoutCgroups) {
  const std::map<std::string, std::string> none;
  EXPECT_EQ(Files(none).cores(8), 8);
  EXPECT_EQ(
      Files(std::map<std::string, std::string>{{"/proc/self/cgroup", "0::/user.slice\n"}}).cores(8),
      8);
}

TEST(AvailableCoresTest, TheQuotaOfVersion2) {
  const auto with = [](const std::string& quota) {
    return Files({{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/cpu.max", quota}}).cores(16);
  };
  EXPECT_EQ(with("400000 100000\n"), 4);
  EXPECT_EQ(with("max 100000\n"), 16);
  EXPECT_EQ(with("250000 100000\n"), 2) << "a part of a core is no core";
  EXPECT_EQ(with("50000 100000\n"), 1);
  EXPECT_EQ(with("9900000 100000\n"), 16);
  for (const char* odd : {"", "max", "0 0", "-1 100000", "many 100000"}) EXPECT_EQ(with(odd), 16);
}

TEST(AvailableCoresTest, TheTightestQuotaAboveCounts) {
  const Files files({{"/proc/self/cgroup", "0::/job/step/task\n"},
                     {"/sys/fs/cgroup/job/step/task/cpu.max", "max 100000\n"},
                     {"/sys/fs/cgroup/job/step/cpu.max", "300000 100000\n"},
                     {"/sys/fs/cgroup/job/cpu.max", "600000 100000\n"}});
  EXPECT_EQ(files.cores(16), 3);
  EXPECT_EQ(files.cores(2), 2);
}

TEST(AvailableCoresTest, TheQuotaOfVersion1) {
  const std::string groups = "5:memory:/docker/7\n4:cpu,cpuacct:/docker/7\n0::/docker/7\n";
  EXPECT_EQ(Files({{"/proc/self/cgroup", groups},
                   {"/sys/fs/cgroup/cpu,cpuacct/docker/7/cpu.cfs_quota_us", "300000\n"},
                   {"/sys/fs/cgroup/cpu,cpuacct/docker/7/cpu.cfs_period_us", "100000\n"}})
                .cores(16),
            3);
  // In a container, which sees its own group as the root, under another name.
  EXPECT_EQ(Files({{"/proc/self/cgroup", groups},
                   {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n"},
                   {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}})
                .cores(16),
            2);
  EXPECT_EQ(Files({{"/proc/self/cgroup", groups},
                   {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"},
                   {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}})
                .cores(16),
            16);
}

TEST(AvailableCoresTest, OfThisProcess) {
  EXPECT_GE(available_cores(), 1);
  EXPECT_LE(available_cores(), static_cast<int>(std::thread::hardware_concurrency()));
}

TEST(ThreadsPerRankTest, SharesTheCores) {
  const Environment none(Variables{});
  EXPECT_EQ(threads_per_rank(none, 16, 4), 4);
  EXPECT_EQ(threads_per_rank(none, 16, 5), 3);
  EXPECT_EQ(threads_per_rank(none, 2, 4), 1);
  EXPECT_EQ(threads_per_rank(none, 7, 1), 7);
  EXPECT_EQ(threads_per_rank(Environment(Variables{{"OMP_NUM_THREADS", ""}}), 8, 2), 4);
  EXPECT_EQ(threads_per_rank(Environment(Variables{{"OMP_NUM_THREADS", "3"}}), 16, 4),
            std::nullopt);
}

// What a launcher has divided already: srun -c8 and mpirun PE=8 bind each rank, numactl some.
TEST(ThreadsPerRankTest, OnlyRanksThatShareCoresDivideThem) {
  const Environment none({});
  const std::vector<CpuLimit> low = {{"cpus 0-7", 8}}, high = {{"cpus 8-15", 8}},
                              all = {{"cpus 0-15", 16}};
  const auto names = [](std::initializer_list<std::vector<CpuLimit>> ranks) {
    std::vector<std::string> result;
    for (const auto& limits : ranks) result.push_back(names_of(limits));
    return result;
  };
  EXPECT_EQ(threads_per_rank(none, low, names({low, high}), 2), 8);
  EXPECT_EQ(threads_per_rank(none, high, names({low, high}), 2), 8);
  EXPECT_EQ(threads_per_rank(none, all, names({all, all}), 2), 8);
  EXPECT_EQ(threads_per_rank(none, low, names({low, high, low, high}), 4), 4);
  EXPECT_EQ(threads_per_rank(none, all, names({all, all, all}), 3), 5);
  EXPECT_EQ(threads_per_rank(none, all, names({all, all}), 1), 16) << "the launcher knows";
  EXPECT_EQ(threads_per_rank(Environment(Variables{{"OMP_NUM_THREADS", "3"}}), low,
                             names({low, high}), 2),
            std::nullopt);
}

TEST(ThreadsPerRankTest, AQuotaIsSharedByThoseUnderIt) {
  const Environment none({});
  const std::vector<CpuLimit> low = {{"cpus 0-7", 8}, {"cgroup 1:1", 12}},
                              high = {{"cpus 8-15", 8}, {"cgroup 1:1", 12}};
  EXPECT_EQ(threads_per_rank(none, low, {names_of(low), names_of(high)}, 2), 6);
  // A container for each rank, on all cores.
  const std::vector<CpuLimit> one = {{"cpus 0-15", 16}, {"cgroup 1:2", 4}},
                              other = {{"cpus 0-15", 16}, {"cgroup 1:3", 4}};
  EXPECT_EQ(threads_per_rank(none, one, {names_of(one), names_of(other)}, 2), 4);
}

TEST(CpuLimitsTest, GroupsAreToldApart) {
  const std::map<std::string, std::string> machine = {
      {"/proc/self/cgroup", "0::/job/task\n"},
      {"/sys/fs/cgroup/job/task/cpu.max", "200000 100000\n"},
      {"/sys/fs/cgroup/job/cpu.max", "600000 100000\n"}};
  const Files one(machine), other(machine);
  const std::vector<CpuLimit> limits = one.limits({"cpus 0-7", 8});
  ASSERT_EQ(limits.size(), 3u);
  EXPECT_EQ(limits[0].name, "cpus 0-7");
  EXPECT_EQ(limits[1].cores, 2);
  EXPECT_EQ(limits[2].cores, 6);
  EXPECT_NE(limits[1].name, limits[2].name);
  EXPECT_EQ(names_of(limits), names_of(one.limits({"cpus 0-7", 8})));
  EXPECT_NE(limits[1].name, other.limits({"cpus 0-7", 8})[1].name) << "of the same path";
}

// Where there is a second core: processes that taskset has bound are told apart.
TEST(CpuLimitsTest, OfThisProcessAndItsMask) {
  cpu_set_t before;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(before), &before), 0);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &before)) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    const std::vector<CpuLimit> limits = cpu_limits();
    EXPECT_EQ(limits[0].name, "cpus " + std::to_string(cpu));
    EXPECT_EQ(limits[0].cores, 1);
    EXPECT_EQ(available_cores(), 1);
  }
  ASSERT_EQ(::sched_setaffinity(0, sizeof(before), &before), 0);
}

TEST(ThreadsPerRankTest, IsDescribed) {
  EXPECT_EQ(describe_threads(1, 2, 2),
            "2 ranks share 2 cores: 1 OpenMP thread each (OMP_NUM_THREADS chooses another number)");
  EXPECT_EQ(describe_threads(3, 3, 1),
            "1 rank has 3 cores: 3 OpenMP threads (OMP_NUM_THREADS chooses another number)");
  EXPECT_EQ(describe_threads(8, 8, 2),
            "the 2 ranks do not share the same cores: 8 OpenMP threads for this one "
            "(OMP_NUM_THREADS chooses another number)");
}

}  // namespace
}  // namespace shardweave

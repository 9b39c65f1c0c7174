#include "shardweave/comm/rendezvous/threads.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include "gtest/gtest.h"

namespace shardweave {
namespace {

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

  int cores(int affinity) const { return available_cores(affinity, root_); }

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
  using Variables = std::map<std::string, std::string, std::less<>>;
  const Environment none(Variables{});
  EXPECT_EQ(threads_per_rank(none, 16, 4), 4);
  EXPECT_EQ(threads_per_rank(none, 16, 5), 3);
  EXPECT_EQ(threads_per_rank(none, 2, 4), 1);
  EXPECT_EQ(threads_per_rank(none, 7, 1), 7);
  EXPECT_EQ(threads_per_rank(Environment(Variables{{"OMP_NUM_THREADS", ""}}), 8, 2), 4);
  EXPECT_EQ(threads_per_rank(Environment(Variables{{"OMP_NUM_THREADS", "3"}}), 16, 4),
            std::nullopt);
}

TEST(ThreadsPerRankTest, IsDescribed) {
  EXPECT_EQ(describe_threads(1, 2, 2),
            "2 ranks share 2 cores: 1 OpenMP thread each (OMP_NUM_THREADS chooses another number)");
  EXPECT_EQ(describe_threads(3, 3, 1),
            "1 rank has 3 cores: 3 OpenMP threads (OMP_NUM_THREADS chooses another number)");
}

}  // namespace
}  // namespace shardweave

// Backend "nccl" by its name: ranks are threads with a GPU of the fake each, and meet over Gloo.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/environment/join_world.h"
#include "shardweave/comm/nccl/testing/fake_device.h"
#include "shardweave/comm/nccl/testing/fake_gpu.h"
#include "shardweave/comm/store/in_process_store.h"

namespace shardweave {
namespace {

class JoinNcclTest : public testing::Test {
 protected:
  void SetUp() override { use(fake_libraries()); }
  void TearDown() override { use({}); }

  static void use(const NcclLibraries& libraries) {
    ::setenv("SHARDWEAVE_NCCL_LIBRARY", libraries.nccl.c_str(), 1);
    ::setenv("SHARDWEAVE_CUDART_LIBRARY", libraries.runtime.c_str(), 1);
    ::setenv("SHARDWEAVE_CUDA_DRIVER_LIBRARY", libraries.driver.c_str(), 1);
  }

  static std::vector<absl::Status> join(int ranks, const FakeGpuScript& script,
                                        const WorldOptions& options,
                                        const std::function<absl::Status(World&)>& body = {}) {
    return join_as(script, std::vector<WorldOptions>(static_cast<size_t>(ranks), options), body);
  }
  static std::vector<absl::Status> join_as(const FakeGpuScript& script,
                                           const std::vector<WorldOptions>& options,
                                           const std::function<absl::Status(World&)>& body = {}) {
    fake_gpu_of_tests().reset(script);
    const std::shared_ptr<Store> store = make_in_process_store();
    const int ranks = static_cast<int>(options.size());
    std::vector<absl::Status> results(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        RendezvousInfo info;
        info.rank = rank;
        info.world_size = ranks;
        info.meeting_point.file = "not used: the store is given";
        auto world = join_world(store, info, options[static_cast<size_t>(rank)]);
        results[rank] = world.status();
        if (world.ok() && body) results[rank] = body(**world);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return results;
  }
};

TEST_F(JoinNcclTest, RanksHaveTheDeviceOfTheirLocalRank) {
  const auto results =
      join(3, {}, {.backend = "nccl", .timeout = absl::Seconds(30)}, [](World& world) {
        const auto device = fake_device(world.local_rank());
        const DeviceStream stream = device->make_stream();
        const int64_t mine = world.rank() + 1;
        Buffer x{fake_gpu_of_tests().allocate(world.local_rank(), 8), 1, DType::kI64,
                 device->device()};
        device->copy_to_device(x.data, &mine, 8, stream);
        const CallOptions options{.stream = stream};
        absl::Status status = world.comm()->all_reduce(x, x, ReduceOp::kSum, options).wait();
        EXPECT_EQ(std::memcmp(fake_gpu_of_tests().contents(x.data), "\6\0\0\0\0\0\0\0", 8), 0);
        // Memory of the CPU, and a group of a group.
        auto pair = world.comm()->split(world.rank() == 1 ? -1 : 0, 0, "pair");
        if (!pair.ok() || *pair == nullptr) return pair.status();
        int64_t here = 1;
        status.Update(
            (*pair)->all_reduce(Buffer::of(&here, 1), Buffer::of(&here, 1), ReduceOp::kSum).wait());
        EXPECT_EQ(here, 2);
        status.Update((*pair)->all_reduce(x, x, ReduceOp::kMax, options).wait());
        EXPECT_EQ(world.comm()->backend_name(), "nccl");
        return status;
      });
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
}

void expect_error(const std::vector<absl::Status>& results, absl::StatusCode code,
                  const std::string& part) {
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_TRUE(absl::StrContains(std::string(status.message()), part)) << status;
  }
}

TEST_F(JoinNcclTest, ADeviceThatIsNotThere) {
  const WorldOptions options{.backend = "nccl", .timeout = absl::Seconds(30)};
  expect_error(join(2, {.devices = 1}, options), absl::StatusCode::kInvalidArgument,
               "there is no device 1; CUDA sees 1");
}

TEST_F(JoinNcclTest, RanksThatAreGivenOneDevice) {
  const WorldOptions options{.backend = "nccl", .timeout = absl::Seconds(30), .device = 0};
  expect_error(join(2, {}, options), absl::StatusCode::kFailedPrecondition, "the same device");
}

TEST_F(JoinNcclTest, NoDriver) {
  use({.driver = "/no/libcuda.so.1"});
  const WorldOptions options{.backend = "nccl", .timeout = absl::Seconds(30)};
  expect_error(join(2, {}, options), absl::StatusCode::kFailedPrecondition, "no NVIDIA driver");
}

TEST_F(JoinNcclTest, DevicesThatAreNone) {
  expect_error(join(1, {}, {.device = -7}), absl::StatusCode::kInvalidArgument, "device -7");
  expect_error(join(1, {}, {.backend = "nccl", .device = -7}), absl::StatusCode::kInvalidArgument,
               "device -7");
}

// By way of the host, with each rank's device: needs no NCCL.
TEST_F(JoinNcclTest, GlooTakesMemoryOfADevice) {
  NcclLibraries libraries = fake_libraries();
  libraries.nccl = "/no/libnccl.so.2";
  use(libraries);
  const auto results =
      join(1, {}, {.timeout = absl::Seconds(30), .device = 2}, [](World& world) -> absl::Status {
        EXPECT_EQ(world.comm()->backend_name(), "gloo");
        const auto device = fake_device(2);
        const DeviceStream stream = device->make_stream();
        const float mine = 3;
        Buffer x{fake_gpu_of_tests().allocate(2, 4), 1, DType::kF32, device->device()};
        Buffer y{fake_gpu_of_tests().allocate(2, 4), 1, DType::kF32, device->device()};
        device->copy_to_device(x.data, &mine, 4, stream);
        absl::Status status =
            world.comm()->all_reduce(x, y, ReduceOp::kSum, {.stream = stream}).wait();
        float got = 0;
        std::memcpy(&got, fake_gpu_of_tests().contents(y.data), sizeof(got));
        EXPECT_EQ(got, 3);
        // Another device is not this rank's.
        x.device.index = 0;
        EXPECT_EQ(world.comm()->all_reduce(x, x, ReduceOp::kSum, {.stream = stream}).wait().code(),
                  absl::StatusCode::kInvalidArgument);
        return status;
      });
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
}

TEST_F(JoinNcclTest, RanksThatJoinInDifferentWays) {
  const WorldOptions gloo = {.timeout = absl::Seconds(30)};
  WorldOptions on_device = gloo;
  on_device.device = 2;
  expect_error(join_as({}, {gloo, gloo, on_device}), absl::StatusCode::kFailedPrecondition,
               "rank 0 has backend \"gloo\" without a device, rank 2 has backend \"gloo\" with a "
               "device");
}

// What one rank alone asks for wrongly the others hear at once.
TEST_F(JoinNcclTest, OneRanksBadOptionsAreAllRanksError) {
  const WorldOptions good = {.timeout = absl::Seconds(60)};
  WorldOptions device = good, backend = good;
  device.device = -5;
  backend.backend = "pigeons";
  const absl::Time start = absl::Now();
  expect_error(join_as({}, {good, device, good}), absl::StatusCode::kInvalidArgument,
               "device -5: wanted 0 or more, or -1");
  expect_error(join_as({}, {backend, good}), absl::StatusCode::kInvalidArgument,
               "backend \"pigeons\": wanted");
  const std::vector<absl::Status> results = join_as({}, {good, backend});
  EXPECT_THAT(std::string(results[0].message()),
              testing::HasSubstr("rank 1 does not join: backend"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));
}

// Processes may share a device there, threads of one must not.
TEST_F(JoinNcclTest, ThreadsThatAreGivenOneDevice) {
  expect_error(join(2, {}, {.timeout = absl::Seconds(30), .device = 0}),
               absl::StatusCode::kFailedPrecondition, "give each rank a process");
  use({.driver = "/no/libcuda.so.1"});
  expect_error(join(2, {}, {.timeout = absl::Seconds(30), .device = 0}),
               absl::StatusCode::kFailedPrecondition, "by way of the host: no NVIDIA driver");
}

}  // namespace
}  // namespace shardweave

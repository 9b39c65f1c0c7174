// What NCCL's backend promises beside the conformance suite: errors on every rank for whatever the
// machine or another rank does.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/nccl/library.h"
#include "shardweave/comm/nccl/testing/ranks.h"

namespace shardweave {
namespace {

absl::Status nothing(GpuRank&) {
  ADD_FAILURE() << "must not connect";
  return absl::OkStatus();
}

// 1. Machines without what is needed.

std::vector<absl::Status> connect(const FakeGpuScript& script,
                                  const std::function<void(int rank, NcclOptions&)>& change = {}) {
  Conditions conditions;
  conditions.connect = seconds(20);
  conditions.nccl = [&](int rank) {
    NcclOptions options{.device = rank, .libraries = fake_libraries()};
    if (change) change(rank, options);
    return options;
  };
  return run(3, nothing, script, conditions);
}

TEST(NcclMachineTest, NoDriver) {
  expect_all(connect({},
                     [](int rank, NcclOptions& o) {
                       if (rank == 1) o.libraries.driver = "/no/libcuda.so.1";
                     }),
             StatusCode::kFailedPrecondition,
             {"rank 1 of group 'world'", "no NVIDIA driver", "/no/libcuda.so.1"});
}

TEST(NcclMachineTest, NoRuntime) {
  expect_all(connect({}, [](int, NcclOptions& o) { o.libraries.runtime = "/no/libcudart.so"; }),
             StatusCode::kFailedPrecondition, {"rank 0", "no CUDA runtime", "LD_LIBRARY_PATH"});
}

TEST(NcclMachineTest, NoNccl) {
  expect_all(connect({},
                     [](int rank, NcclOptions& o) {
                       if (rank == 2) o.libraries.nccl = "/no/libnccl.so.2";
                     }),
             StatusCode::kFailedPrecondition, {"rank 2", "no NCCL", "SHARDWEAVE_NCCL_LIBRARY"});
}

TEST(NcclMachineTest, OtherLibraries) {
  expect_all(connect({}, [](int, NcclOptions& o) { o.libraries.nccl = empty_library(); }),
             StatusCode::kFailedPrecondition, {"libempty.so has no ncclGetVersion"});
}

TEST(NcclMachineTest, TheUsualNamesAreLookedForWhereNoneIsGiven) {
  // Whatever this machine has: it is said, or it works.
  const auto library = nccl_internal::Library::load({});
  if (!library.ok()) {
    EXPECT_EQ(library.status().code(), StatusCode::kFailedPrecondition) << library.status();
  }
}

// Its threads may run longer than its last user: they are code of the library.
TEST(NcclMachineTest, ALibraryStaysLoaded) {
  EXPECT_FALSE(nccl_internal::Library::load({.nccl = empty_library(),
                                             .runtime = fake_libraries().runtime,
                                             .driver = fake_libraries().driver})
                   .ok());
  EXPECT_NE(::dlopen(empty_library().c_str(), RTLD_NOW | RTLD_NOLOAD), nullptr);
}

TEST(NcclMachineTest, AnOldNccl) {
  for (const int version : {21403, 22605, 22702}) {
    expect_all(connect({.nccl_version = version}), StatusCode::kFailedPrecondition,
               {"NCCL is too old", "is 2.", "want 2.27.3 or newer"});
  }
}

TEST(NcclMachineTest, AnOldDriver) {
  expect_all(connect({.driver_version = 12040}), StatusCode::kFailedPrecondition,
             {"driver is too old", "12.4", "13.0"});
}

TEST(NcclMachineTest, ADriverThatDoesNotSayItsVersion) {
  expect_all(connect({.failing = "cuDriverGetVersion", .error = 3}),
             StatusCode::kFailedPrecondition, {"cuDriverGetVersion: error 3"});
}

TEST(NcclMachineTest, NoGpu) {
  expect_all(connect({.failing = "cuInit", .error = 100}), StatusCode::kFailedPrecondition,
             {"no GPU", "no device"});
}

TEST(NcclMachineTest, NoSuchDevice) {
  expect_all(connect({.devices = 2}), StatusCode::kInvalidArgument,
             {"rank 2", "there is no device 2; CUDA sees 2"});
}

TEST(NcclMachineTest, TwoRanksOnOneDevice) {
  expect_all(connect({.one_place = true}), StatusCode::kFailedPrecondition,
             {"ranks 0 and 1", "same device", "gloo"});
}

TEST(NcclMachineTest, VersionsAreSaid) {
  gpu().reset({});
  const auto library = nccl_internal::Library::load(fake_libraries());
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_TRUE(absl::StartsWith((*library)->versions(), "NCCL 2.28.9 (")) << (*library)->versions();
  EXPECT_TRUE(absl::EndsWith((*library)->versions(), "driver for CUDA 13.0"));
  ::setenv("SHARDWEAVE_NCCL_LIBRARY", "mine", 1);
  EXPECT_EQ(nccl_libraries_of_environment().nccl, "mine");
  EXPECT_EQ(nccl_libraries_of_environment().driver, "");
  ::unsetenv("SHARDWEAVE_NCCL_LIBRARY");
}

TEST(NcclMachineTest, OneRankThatCannotConnectIsAnErrorOnAll) {
  for (const bool later : {false, true}) {
    SCOPED_TRACE(later);
    const FakeGpuScript at_once{
        .failing = "ncclCommInitRankConfig", .failing_device = 1, .error = 2};
    const FakeGpuScript while_made{.faulty_device = 1, .broken_init = true};
    const auto results = connect(later ? while_made : at_once);
    for (const absl::Status& status : results) {
      EXPECT_FALSE(status.ok());
      EXPECT_NE(status.code(), StatusCode::kDeadlineExceeded) << "told, not waited for";
      EXPECT_TRUE(absl::StrContains(std::string(status.message()), "ncclCommInitRankConfig"))
          << status;
    }
    for (int rank : {0, 2}) EXPECT_EQ(failed_rank(results[rank]), 1) << results[rank];
  }
}

TEST(NcclMachineTest, ARankThatDoesNotConnectIsNamed) {
  gpu().reset({});
  InprocHub hub(2);
  const std::unique_ptr<Backend> other = hub.make_backend(1);
  const auto backend = make_paired_backend(
      hub.make_backend(0), connect_nccl({.device = 0, .libraries = fake_libraries()}), {},
      Clock::now() + milliseconds(300));
  EXPECT_EQ(backend.status().code(), StatusCode::kDeadlineExceeded) << backend.status();
  EXPECT_TRUE(absl::StrContains(std::string(backend.status().message()), "rank 1"));
}

// 2. What goes wrong under way.

TEST(NcclFaultTest, AnAsynchronousErrorReachesAllRanks) {
  const auto results = run(3,
                           [](GpuRank& rank) -> absl::Status {
                             Buffer x = rank.put<float>({1});
                             for (int i = 0; i < 5; ++i) {
                               if (absl::Status status = rank.sum(x, {.tag = "loss"}); !status.ok())
                                 return status;
                             }
                             return absl::OkStatus();
                           },
                           {.faulty_device = 1, .broken_operation = 3});
  expect_all(results, StatusCode::kUnavailable, {"all_reduce", "#3", "'loss'", "remote process"});
}

// The program waits for nothing on the host but its own stream, which ends all the same.
TEST(NcclFaultTest, AHangIsAnErrorAtTheDeadlineEvenIfNobodyAsks) {
  const auto results =
      run(2,
          [](GpuRank& rank) -> absl::Status {
            Buffer x = rank.put<float>({1});
            const Work work = rank.comm->all_reduce(
                x, x, ReduceOp::kSum, {.timeout = absl::Milliseconds(300), .stream = rank.stream});
            if (absl::Status status = work.wait_on(rank.stream); !status.ok()) return status;
            rank.synchronize();
            return work.wait();
          },
          {.faulty_device = 0, .hanging_operation = 1});
  expect_all(results, StatusCode::kDeadlineExceeded, {"all_reduce", "#1"});
}

// One stream's operation waits for another's that hangs, in whichever order they are aborted.
TEST(NcclFaultTest, AHangOnOneStreamThatAnotherWaitsFor) {
  for (const bool collective_first : {true, false}) {
    const auto results =
        run(2,
            [&](GpuRank& rank) -> absl::Status {
              Buffer x = rank.put<float>({1});
              const CallOptions options{.timeout = absl::Milliseconds(500), .stream = rank.stream};
              std::vector<Work> works;
              for (const bool collective : {collective_first, !collective_first}) {
                works.push_back(collective ? rank.comm->all_reduce(x, x, ReduceOp::kSum, options)
                                : rank.comm->rank() == 0 ? rank.comm->send(x, 1, 0, options)
                                                         : rank.comm->recv(x, 0, 0, options));
                absl::Status status = works.back().wait_on(rank.stream);
                if (!status.ok()) return status;
              }
              return works.back().wait();
            },
            {.faulty_device = 0, .hanging_operation = 1});
    expect_all(results, StatusCode::kDeadlineExceeded, {});
  }
}

// Nor is it given back while an abort has not come to its end: at the end of the communicator, or when a
// call that comes meanwhile looks for memory that can go.
TEST(NcclFaultTest, MemoryIsKeptUntilTheDeviceHasStopped) {
  for (const bool waits : {true, false}) {
    const auto results = run(
        2,
        [&](GpuRank& rank) -> absl::Status {
          Buffer x = rank.put<float>({1});
          const int me = rank.comm->rank();
          std::atomic<int> running{-1};
          std::shared_ptr<void> owner(x.data, [&](void*) { running = gpu().running(me); });
          rank.comm->all_reduce(x, x, ReduceOp::kSum,
                                {.timeout = me == 0 ? absl::Milliseconds(200) : absl::Seconds(20),
                                 .stream = rank.stream,
                                 .keep_alive = std::move(owner)});
          absl::Status status;
          while (status.ok()) {
            const Work call = rank.comm->barrier();
            if (waits || me == 0 || call.immediate()) status = call.wait();
            std::this_thread::sleep_for(milliseconds(1));
          }
          rank.comm.reset();
          EXPECT_EQ(running, 0);
          return status;
        },
        {.abort_milliseconds = 300, .faulty_device = 0, .hanging_operation = 1});
  }
}

TEST(NcclFaultTest, ACommunicatorThatCannotEndInOrderIsAborted) {
  expect_ok(run(2,
                [](GpuRank& rank) {
                  Buffer x = rank.put<float>({1});
                  return rank.sum(x);
                },
                {.failing = "ncclCommFinalize", .failing_device = 1}));
  EXPECT_EQ(gpu().calls("ncclCommAbort"), 1);
  EXPECT_EQ(gpu().calls("ncclCommDestroy"), 1);
}

TEST(NcclFaultTest, RanksThatDifferLearnItThoughNobodyWaits) {
  const auto results = run(2, [](GpuRank& rank) -> absl::Status {
    Buffer x = rank.put<float>({1, 2, 3});
    x.count = 2 + rank.comm->rank();
    const Work work = rank.comm->all_reduce(x, x, ReduceOp::kSum, {.stream = rank.stream});
    work.wait_on(rank.stream).IgnoreError();
    rank.synchronize();
    return work.wait();
  });
  expect_all(results, StatusCode::kFailedPrecondition,
             {"all_reduce(f32[2], sum)", "all_reduce(f32[3], sum)"});
}

TEST(NcclFaultTest, ComparedFirstNothingIsWritten) {
  Conditions conditions;
  conditions.paired.compare_first = true;
  const auto results = run(
      2,
      [](GpuRank& rank) -> absl::Status {
        Buffer x = rank.put<float>({1, 2});
        const ReduceOp op = rank.comm->rank() == 0 ? ReduceOp::kSum : ReduceOp::kMax;
        const absl::Status status = rank.comm->all_reduce(x, x, op, {.stream = rank.stream}).wait();
        EXPECT_EQ(rank.get<float>(x), (std::vector<float>{1, 2}));
        return status;
      },
      {}, conditions);
  expect_all(results, StatusCode::kFailedPrecondition, {"sum", "max"});
  EXPECT_EQ(gpu().calls("ncclAllReduce"), 0);
}

TEST(NcclFaultTest, MessageTagsThatAreNotInOrder) {
  const auto results = run(2, [](GpuRank& rank) -> absl::Status {
    Buffer x = rank.put<float>({1}), y = rank.put<float>({2});
    const CallOptions options{.stream = rank.stream};
    const bool sends = rank.comm->rank() == 0;
    const Work first =
        sends ? rank.comm->send(x, 1, 1, options) : rank.comm->recv(x, 0, 2, options);
    const Work second =
        sends ? rank.comm->send(y, 1, 2, options) : rank.comm->recv(y, 0, 1, options);
    absl::Status status = first.wait();
    status.Update(second.wait());
    // The sender may be done before the other one has looked.
    return sends && status.ok() ? rank.comm->barrier().wait() : status;
  });
  expect_all(results, StatusCode::kFailedPrecondition, {"message tag", "in order"});
}

TEST(NcclFaultTest, AMessageToItselfWithoutItsOtherSideEndsAtTheDeadline) {
  const auto results = run(1, [](GpuRank& rank) {
    Buffer x = rank.put<float>({1});
    return rank.comm->send(x, 0, 5, {.timeout = absl::Milliseconds(50), .stream = rank.stream})
        .wait();
  });
  expect_all(results, StatusCode::kDeadlineExceeded, {"this rank itself has to call recv", "5"});
}

TEST(NcclFaultTest, MemoryThatIsUsedUpSaysSo) {
  const auto results = run(
      2,
      [](GpuRank& rank) {
        Buffer x = rank.put<float>({1});
        absl::Status status = rank.sum(x);  // which the other rank may still see the end of
        return status.ok() ? rank.sum(x) : status;
      },
      {.failing = "cudaEventCreateWithFlags", .failing_after = 2, .failing_device = 1, .error = 2});
  EXPECT_EQ(results[1].code(), StatusCode::kResourceExhausted) << results[1];
  EXPECT_FALSE(results[0].ok());
}

// Whatever call fails, on whichever rank, when: all ranks end with an error and the streams too.
class NcclFailingCall : public testing::TestWithParam<const char*> {};

TEST_P(NcclFailingCall, IsAnErrorOnEveryRankAndNothingHangs) {
  for (const int after : {1, 2, 3, 4}) {
    SCOPED_TRACE(after);
    const auto results =
        run(2,
            [](GpuRank& rank) -> absl::Status {
              Buffer x = rank.put<float>({1, 2, 3}), y = rank.put<float>({0, 0, 0});
              Buffer all = rank.put(std::vector<float>(6));
              Buffer odd = rank.put<int16_t>({1});
              // Messages are not in the order of collectives, nor of each other.
              const Buffer sent = rank.put<float>({1}), got = rank.put<float>({0});
              const Buffer kept = rank.put<float>({1}), copy = rank.put<float>({0});
              const int other = 1 - rank.comm->rank();
              const CallOptions options{.stream = rank.stream};
              const DeviceStream side = rank.device->make_stream();
              for (int round = 0; round < 3; ++round) {
                std::vector<Work> works;
                works.push_back(rank.comm->all_reduce(x, y, ReduceOp::kSum, options));
                works.push_back(rank.comm->all_gather(x, all, options));
                works.push_back(rank.comm->reduce_scatter(all, x, ReduceOp::kAvg, options));
                works.push_back(rank.comm->broadcast(x, 1, options));
                works.push_back(rank.comm->reduce(x, y, ReduceOp::kMin, 0, options));
                works.push_back(rank.comm->all_reduce(odd, odd, ReduceOp::kSum, options));
                Coalescing group(*rank.comm);
                rank.comm->recv(got, other, 0, options);
                rank.comm->send(sent, other, 0, options);
                rank.comm->all_reduce(x, x, ReduceOp::kSum, options);
                rank.comm->all_reduce(x, x, ReduceOp::kMax, options);
                works.push_back(group.finish());
                works.push_back(rank.comm->recv(copy, rank.comm->rank(), 0, options));
                works.push_back(rank.comm->send(kept, rank.comm->rank(), 0, options));
                if (absl::Status status = works.back().wait_on(side); !status.ok()) return status;
                for (const Work& work : works) {
                  absl::Status status = work.wait_on(rank.stream);
                  status.Update(work.wait());
                  if (!status.ok()) return status;
                }
              }
              // Whoever is done learns of a rank that is not.
              return rank.comm->barrier().wait();
            },
            {.failing = GetParam(), .failing_after = after, .failing_device = 1},
            {.timeout = absl::Seconds(10), .connect = seconds(10)});
    // Calls that are made for the last time, or only when something is wrong.
    const std::string name = GetParam();
    const bool at_the_end =
        name == "ncclCommFinalize" || name == "ncclCommAbort" || name == "ncclCommDestroy";
    const bool is_reached = gpu().calls(GetParam()) > 0;
    ASSERT_TRUE(is_reached || at_the_end);
    if (results[1].ok()) continue;  // it was not called so often
    EXPECT_FALSE(results[0].ok());
    EXPECT_NE(results[1].code(), StatusCode::kDeadlineExceeded) << results[1];
    // NCCL's state is asked for on behalf of other calls.
    if (name == "ncclCommGetAsyncError") continue;
    EXPECT_TRUE(absl::StrContains(std::string(results[1].message()), name)) << results[1];
  }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, NcclFailingCall,
    testing::Values("ncclCommGetAsyncError", "ncclGroupStart", "ncclGroupEnd", "ncclAllReduce",
                    "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter", "ncclSend",
                    "ncclRecv", "cudaStreamCreateWithFlags", "cudaStreamWaitEvent", "cudaSetDevice",
                    "cudaEventRecord", "cudaMemcpyAsync", "ncclCommInitRankConfig", "ncclCommAbort",
                    "ncclCommDestroy", "cuDriverGetVersion", "cudaEventQuery",
                    "cudaStreamSynchronize", "cudaGetDeviceCount", "cudaDeviceGetPCIBusId",
                    "cudaRuntimeGetVersion", "ncclCommFinalize"),
    [](const auto& tested) { return std::string(tested.param); });

TEST(NcclFaultTest, NoUniqueId) {
  expect_all(connect({.failing = "ncclGetUniqueId", .error = 3}), StatusCode::kInternal,
             {"ncclGetUniqueId on rank 0"});
}

}  // namespace
}  // namespace shardweave

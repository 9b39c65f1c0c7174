// What NCCL's backend promises beside the conformance suite: order on the device without the host,
// and errors on every rank for whatever the machine or another rank does.
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/nccl/library.h"
#include "shardweave/comm/nccl/nccl_backend.h"
#include "shardweave/comm/nccl/testing/fake_device.h"
#include "shardweave/comm/nccl/testing/fake_gpu.h"

namespace shardweave {
namespace {

using absl::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

FakeGpu& gpu() {
  return fake_gpu_of_tests();
}

// One rank with its GPU.
class Rank {
 public:
  Rank(std::shared_ptr<Communicator> communicator, int index)
      : comm(std::move(communicator)),
        device(fake_device(index)),
        stream(device->make_stream()),
        index_(index) {}
  ~Rank() { synchronize(); }

  template <typename T>
  Buffer put(const std::vector<T>& values) {
    const auto count = static_cast<int64_t>(values.size());
    void* const memory = gpu().allocate(index_, count * sizeof(T));
    std::memcpy(gpu().contents(memory), values.data(), count * sizeof(T));
    return {memory, count, kDTypeOf<T>, device->device()};
  }
  // What is there when all that is on the stream has been done.
  template <typename T>
  std::vector<T> get(const Buffer& buffer) {
    std::vector<T> values(buffer.count);
    device->copy_to_host(values.data(), buffer.data, buffer.bytes(), stream);
    synchronize();
    return values;
  }
  void synchronize() {
    const uint64_t mark = device->mark(stream);
    const Deadline limit = Clock::now() + seconds(60);
    while (!device->has_reached(mark)) {
      ASSERT_LT(Clock::now(), limit) << "the stream never ends";
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  absl::Status sum(const Buffer& buffer, CallOptions options = {}) {
    options.stream = stream;
    return comm->all_reduce(buffer, buffer, ReduceOp::kSum, options).wait();
  }

  std::shared_ptr<Communicator> comm;
  std::shared_ptr<TestDevice> device;
  DeviceStream stream;

 private:
  const int index_;
};

struct Conditions {
  std::function<NcclOptions(int rank)> nccl = [](int rank) {
    return NcclOptions{.device = rank, .libraries = fake_libraries()};
  };
  PairedOptions paired;
  absl::Duration timeout = absl::Seconds(30);
  seconds connect = seconds(20);
};

using Body = std::function<absl::Status(Rank& rank)>;

// What each rank's body has returned, or its failure to connect.
std::vector<absl::Status> run(int ranks, const Body& body, const FakeGpuScript& script = {},
                              const Conditions& conditions = {}) {
  gpu().reset(script);
  InprocHub hub(ranks);
  std::vector<absl::Status> results(ranks);
  std::vector<std::thread> threads;
  const Clock::time_point begin = Clock::now();
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      absl::StatusOr<std::unique_ptr<Backend>> backend =
          make_paired_backend(hub.make_backend(rank), connect_nccl(conditions.nccl(rank)),
                              conditions.paired, begin + conditions.connect);
      if (!backend.ok()) {
        results[rank] = backend.status();
        return;
      }
      Rank mine(Communicator::create(*std::move(backend), {.timeout = conditions.timeout}), rank);
      results[rank] = body(mine);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(Clock::now() - begin, seconds(60)) << "nothing hangs";
  return results;
}

void expect_all(const std::vector<absl::Status>& results, StatusCode code,
                std::initializer_list<std::string> parts) {
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), code) << status;
    for (const std::string& part : parts) {
      EXPECT_TRUE(absl::StrContains(std::string(status.message()), part))
          << "want '" << part << "' in: " << status;
    }
  }
}

void expect_ok(const std::vector<absl::Status>& results) {
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
}

absl::Status nothing(Rank&) {
  ADD_FAILURE() << "must not connect";
  return absl::OkStatus();
}

// 1. The order of the device.

// The fake is the oracle of the tests: it must fault.
TEST(NcclDeathTest, TheHostCannotTouchTheDevicesMemory) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        gpu().reset({});
        std::memset(gpu().allocate(0, 8), 1, 8);
      },
      "");
}

TEST(NcclTest, StreamsWaitAndTheHostDoesNot) {
  expect_ok(run(2,
                [](Rank& rank) -> absl::Status {
                  const int me = rank.comm->rank();
                  Buffer x = rank.put<float>({0, 0, 0});
                  const std::vector<float> mine = {1.0f + me, 10.0f, 5.0f * me};
                  // All of it is put on the stream before any of it has begun.
                  rank.device->copy_to_device(x.data, mine.data(), x.bytes(), rank.stream);
                  for (int round = 0; round < 3; ++round) {
                    const Work work =
                        rank.comm->all_reduce(x, x, ReduceOp::kSum, {.stream = rank.stream});
                    EXPECT_FALSE(work.immediate());
                    if (absl::Status status = work.wait_on(rank.stream); !status.ok())
                      return status;
                  }
                  EXPECT_EQ(rank.get<float>(x), (std::vector<float>{12, 80, 20}));
                  return absl::OkStatus();
                },
                {.delay_microseconds = 5000}));
  EXPECT_EQ(gpu().calls("cudaStreamSynchronize"), 0);
}

TEST(NcclTest, CoalescingWaitsOnStreamsToo) {
  expect_ok(run(3, [](Rank& rank) -> absl::Status {
    std::vector<Buffer> buffers;
    for (int i = 0; i < 5; ++i) buffers.push_back(rank.put<int32_t>({i, rank.comm->rank()}));
    Buffer from = rank.put<int32_t>({0}), to = rank.put<int32_t>({rank.comm->rank()});
    Coalescing group(*rank.comm);
    for (const Buffer& b : buffers) {
      rank.comm->all_reduce(b, b, ReduceOp::kSum, {.stream = rank.stream});
    }
    const CallOptions options{.stream = rank.stream};
    rank.comm->recv(from, (rank.comm->rank() + 2) % 3, 0, options);
    rank.comm->send(to, (rank.comm->rank() + 1) % 3, 0, options);
    const Work work = group.finish();
    if (absl::Status status = work.wait_on(rank.stream); !status.ok()) return status;
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(rank.get<int32_t>(buffers[i]), (std::vector<int32_t>{3 * i, 3}));
    }
    EXPECT_EQ(rank.get<int32_t>(from), std::vector<int32_t>{(rank.comm->rank() + 2) % 3});
    return work.wait();
  }));
  EXPECT_EQ(gpu().calls("ncclGroupEnd"), 3) << "one group on each rank";
}

TEST(NcclTest, EvenCountsAreNcclsOwnCollectives) {
  const auto gather = [](const std::vector<int64_t>& counts) {
    return [=](Rank& rank) -> absl::Status {
      Buffer in = rank.put(std::vector<float>(counts[rank.comm->rank()], 1.0f));
      Buffer out = rank.put(std::vector<float>(counts[0] + counts[1], 0.0f));
      absl::Status status =
          rank.comm->all_gather_v(in, out, counts, {.stream = rank.stream}).wait();
      EXPECT_EQ(rank.get<float>(out), std::vector<float>(counts[0] + counts[1], 1.0f));
      if (!status.ok()) return status;
      status = rank.comm->reduce_scatter_v(out, in, counts, ReduceOp::kSum, {.stream = rank.stream})
                   .wait();
      EXPECT_EQ(rank.get<float>(in), std::vector<float>(counts[rank.comm->rank()], 2.0f));
      return status;
    };
  };
  expect_ok(run(2, gather({3, 3})));
  EXPECT_EQ(gpu().calls("ncclAllGather"), 2);
  EXPECT_EQ(gpu().calls("ncclReduceScatter"), 2);
  EXPECT_EQ(gpu().calls("ncclSend"), 0);
  expect_ok(run(2, gather({3, 4})));
  EXPECT_EQ(gpu().calls("ncclAllGather"), 0);
  EXPECT_EQ(gpu().calls("ncclSend"), 2);
  EXPECT_EQ(gpu().calls("ncclReduce"), 4);
}

TEST(NcclTest, WhatNcclCannotReduceGoesThroughTheHost) {
  expect_ok(run(3, [](Rank& rank) -> absl::Status {
    Buffer x = rank.put<int16_t>({7, -3, 1});
    const absl::Status status = rank.sum(x);
    EXPECT_EQ(rank.get<int16_t>(x), (std::vector<int16_t>{21, -9, 3}));
    if (!status.ok()) return status;
    Buffer part = rank.put<uint16_t>({0});
    Buffer all = rank.put<uint16_t>({1, 2, 3});
    absl::Status scattered =
        rank.comm->reduce_scatter(all, part, ReduceOp::kMax, {.stream = rank.stream}).wait();
    EXPECT_EQ(rank.get<uint16_t>(part),
              std::vector<uint16_t>{static_cast<uint16_t>(rank.comm->rank() + 1)});
    return scattered;
  }));
  EXPECT_EQ(gpu().calls("ncclAllReduce"), 0);
}

// Both ways at once, in either order: neither waits for the other.
TEST(NcclTest, RanksMaySendBeforeTheyReceive) {
  for (const bool send_first : {true, false}) {
    expect_ok(run(3, [&](Rank& rank) -> absl::Status {
      const int me = rank.comm->rank();
      std::vector<Buffer> in, out;
      std::vector<Work> works;
      const CallOptions options{.stream = rank.stream};
      for (int peer = 0; peer < 3; ++peer) {
        out.push_back(rank.put<int32_t>({me * 10 + peer}));
        in.push_back(rank.put<int32_t>({-1}));
      }
      for (const bool sends : {send_first, !send_first}) {
        for (int peer = 0; peer < 3; ++peer) {
          works.push_back(sends ? rank.comm->send(out[peer], peer, 0, options)
                                : rank.comm->recv(in[peer], peer, 0, options));
        }
      }
      for (const Work& work : works) {
        if (absl::Status status = work.wait(); !status.ok()) return status;
      }
      for (int peer = 0; peer < 3; ++peer) {
        EXPECT_EQ(rank.get<int32_t>(in[peer]), std::vector<int32_t>{peer * 10 + me});
      }
      return absl::OkStatus();
    }));
  }
}

// Before the operation is on the device, for its other side is missing.
TEST(NcclTest, AStreamWaitsForAMessageThatIsYetToCome) {
  for (const bool to_itself : {true, false}) {
    expect_ok(run(2, [&](Rank& rank) -> absl::Status {
      const int me = rank.comm->rank();
      const int peer = to_itself ? me : 1 - me;
      Buffer x = rank.put<float>({0}), y = rank.put<float>({5});
      const DeviceStream other = rank.device->make_stream();
      const Work recv = rank.comm->recv(x, peer, 5, {.stream = rank.stream});
      if (absl::Status status = recv.wait_on(rank.stream); !status.ok()) return status;
      absl::Status status = rank.comm->barrier().wait();  // the host has gone on, on all ranks
      if (!status.ok()) return status;
      const Work send = rank.comm->send(y, peer, 5, {.stream = other});
      EXPECT_EQ(rank.get<float>(x), std::vector<float>{5});
      return send.wait();
    }));
  }
}

TEST(NcclTest, SidesOfAMessageToItselfThatDiffer) {
  const auto results = run(1, [](Rank& rank) {
    Buffer x = rank.put<float>({1, 2}), y = rank.put<float>({1});
    const Work recv = rank.comm->recv(x, 0, 5, {.stream = rank.stream});
    return rank.comm->send(y, 0, 5, {.stream = rank.stream}).wait();
  });
  expect_all(results, StatusCode::kFailedPrecondition, {"send(f32[1]", "recv(f32[2]"});
}

TEST(NcclTest, MemoryIsKeptUntilTheDeviceIsDone) {
  expect_ok(run(2,
                [](Rank& rank) -> absl::Status {
                  Buffer x = rank.put<float>({1});
                  std::atomic<bool> freed{false};
                  std::shared_ptr<void> owner(x.data, [&](void*) { freed = true; });
                  const Work work = rank.comm->all_reduce(
                      x, x, ReduceOp::kSum,
                      {.stream = rank.stream, .keep_alive = std::move(owner)});
                  EXPECT_FALSE(freed);
                  if (absl::Status status = work.wait(); !status.ok()) return status;
                  absl::Status status = rank.comm->barrier().wait();  // the next call looks
                  EXPECT_TRUE(freed);
                  return status;
                },
                {.delay_microseconds = 5000}));
}

TEST(NcclTest, ADeviceOfAnotherRankIsRefused) {
  expect_ok(run(2, [](Rank& rank) -> absl::Status {
    Buffer x = rank.put<float>({1});
    x.device.index = 1 - rank.comm->rank();
    const absl::Status refused = rank.sum(x);
    EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(std::string(refused.message()), "this rank's device is cuda:"))
        << refused;
    x.device.index = rank.comm->rank();
    return rank.sum(x);
  }));
}

// 2. Machines without what is needed.

std::vector<absl::Status> connect(const FakeGpuScript& script,
                                  const std::function<void(int rank, NcclOptions&)>& change = {}) {
  Conditions conditions;
  conditions.connect = seconds(5);
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

TEST(NcclMachineTest, AnOldNccl) {
  expect_all(connect({.nccl_version = 21403}), StatusCode::kFailedPrecondition,
             {"NCCL is too old", "2.14.3", "want 2.18.0 or newer"});
}

TEST(NcclMachineTest, AnOldDriver) {
  expect_all(connect({.driver_version = 12040}), StatusCode::kFailedPrecondition,
             {"driver is too old", "12.4", "13.0"});
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

// 3. What goes wrong under way.

TEST(NcclFaultTest, AnAsynchronousErrorReachesAllRanks) {
  const auto results = run(3,
                           [](Rank& rank) -> absl::Status {
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
          [](Rank& rank) -> absl::Status {
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

TEST(NcclFaultTest, RanksThatDifferLearnItThoughNobodyWaits) {
  const auto results = run(2, [](Rank& rank) -> absl::Status {
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
      [](Rank& rank) -> absl::Status {
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
  const auto results = run(2, [](Rank& rank) -> absl::Status {
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
  const auto results = run(1, [](Rank& rank) {
    Buffer x = rank.put<float>({1});
    return rank.comm->send(x, 0, 5, {.timeout = absl::Milliseconds(50), .stream = rank.stream})
        .wait();
  });
  expect_all(results, StatusCode::kDeadlineExceeded, {"this rank itself has to call recv", "5"});
}

TEST(NcclFaultTest, MemoryThatIsUsedUpSaysSo) {
  const auto results = run(
      2,
      [](Rank& rank) {
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
  for (const int after : {1, 2, 3, 5}) {
    SCOPED_TRACE(after);
    const auto results =
        run(2,
            [](Rank& rank) -> absl::Status {
              Buffer x = rank.put<float>({1, 2, 3}), y = rank.put<float>({0, 0, 0});
              Buffer all = rank.put(std::vector<float>(6));
              Buffer odd = rank.put<int16_t>({1});
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
                rank.comm->recv(y, other, 0, options);
                rank.comm->send(x, other, 0, options);
                works.push_back(group.finish());
                works.push_back(rank.comm->recv(y, rank.comm->rank(), 0, options));
                if (absl::Status status = works.back().wait_on(side); !status.ok()) return status;
                works.push_back(rank.comm->send(x, rank.comm->rank(), 0, options));
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
    const bool at_the_end =
        std::string(GetParam()) == "ncclCommFinalize" || std::string(GetParam()) == "ncclCommAbort";
    const bool is_reached = gpu().calls(GetParam()) > 0;
    ASSERT_TRUE(is_reached || at_the_end);
    if (results[1].ok()) continue;  // it was not called so often
    EXPECT_FALSE(results[0].ok());
    EXPECT_NE(results[1].code(), StatusCode::kDeadlineExceeded) << results[1];
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, NcclFailingCall,
                         testing::Values("ncclCommGetAsyncError", "ncclGroupStart", "ncclGroupEnd",
                                         "ncclAllReduce", "ncclReduce", "ncclBroadcast",
                                         "ncclAllGather", "ncclReduceScatter", "ncclSend",
                                         "ncclRecv", "cudaStreamCreateWithFlags",
                                         "cudaStreamWaitEvent", "cudaLaunchHostFunc",
                                         "cudaEventQuery", "cudaStreamSynchronize",
                                         "cudaGetDeviceCount", "cudaDeviceGetPCIBusId",
                                         "cudaRuntimeGetVersion", "ncclCommFinalize"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST(NcclFaultTest, NoUniqueId) {
  expect_all(connect({.failing = "ncclGetUniqueId", .error = 3}), StatusCode::kInternal,
             {"ncclGetUniqueId on rank 0"});
}

}  // namespace
}  // namespace shardweave

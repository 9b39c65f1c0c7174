// What NCCL's backend promises beside the conformance suite: order on the device without the host, and
// groups of NCCL's that do not depend on timing.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "shardweave/comm/nccl/testing/ranks.h"

namespace shardweave {
namespace {

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
                [](GpuRank& rank) -> absl::Status {
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
  expect_ok(run(3, [](GpuRank& rank) -> absl::Status {
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
    return [=](GpuRank& rank) -> absl::Status {
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
  expect_ok(run(3, [](GpuRank& rank) -> absl::Status {
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
    expect_ok(run(3, [&](GpuRank& rank) -> absl::Status {
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

// Which operations are one group of NCCL's does not depend on a rank's timing: NCCL on rank 1 is slow
// to take what rank 0's has taken at once.
TEST(NcclTest, WhatPilesUpIsNoGroup) {
  expect_ok(run(2,
                [](GpuRank& rank) -> absl::Status {
                  std::vector<Work> works;
                  for (int i = 0; i < 5; ++i) {
                    Buffer x = rank.put<int32_t>({i});
                    works.push_back(
                        rank.comm->all_reduce(x, x, ReduceOp::kSum, {.stream = rank.stream}));
                  }
                  for (const Work& work : works) {
                    if (absl::Status status = work.wait(); !status.ok()) return status;
                  }
                  return absl::OkStatus();
                },
                {.looks = 100, .slow_device = 1}, {.timeout = absl::Seconds(20)}));
}

// Neither the thread that looks nor done() takes an open group apart.
TEST(NcclTest, ACoalescingOfOneRankThatTakesItsTime) {
  Conditions conditions{.timeout = absl::Seconds(20)};
  conditions.paired.look_every = absl::Milliseconds(1);
  expect_ok(run(
      2,
      [](GpuRank& rank) -> absl::Status {
        Buffer x = rank.put<int32_t>({1}), y = rank.put<int32_t>({2});
        Coalescing group(*rank.comm);
        const CallOptions options{.stream = rank.stream};
        const Work first = rank.comm->all_reduce(x, x, ReduceOp::kSum, options);
        if (rank.comm->rank() == 1) std::this_thread::sleep_for(milliseconds(50));
        EXPECT_FALSE(first.done());
        rank.comm->all_reduce(y, y, ReduceOp::kSum, options);
        return group.finish().wait();
      },
      {}, conditions));
  EXPECT_EQ(gpu().calls("ncclGroupEnd"), 2) << "one group on each rank";
}

TEST(NcclTest, AWaitInTheMiddleOfACoalescingEndsTheGroupSoFar) {
  for (const bool on_stream : {false, true}) {
    expect_ok(run(2, [&](GpuRank& rank) -> absl::Status {
      std::vector<Buffer> x;
      const CallOptions options{.stream = rank.stream};
      Coalescing group(*rank.comm);
      for (int i = 0; i < 4; ++i) {
        x.push_back(rank.put<int32_t>({i}));
        const Work work = rank.comm->all_reduce(x[i], x[i], ReduceOp::kSum, options);
        if (i != 1) continue;
        absl::Status status = on_stream ? work.wait_on(rank.stream) : work.wait();
        if (!status.ok()) return status;
        EXPECT_EQ(rank.get<int32_t>(x[1]), std::vector<int32_t>{2});
      }
      if (absl::Status status = group.finish().wait(); !status.ok()) return status;
      EXPECT_EQ(rank.get<int32_t>(x[3]), std::vector<int32_t>{6});
      return absl::OkStatus();
    }));
    EXPECT_EQ(gpu().calls("ncclGroupEnd"), 4);
  }
}

TEST(NcclFaultTest, RanksThatCoalesceDifferentlyLearnIt) {
  const auto results =
      run(2,
          [](GpuRank& rank) -> absl::Status {
            Buffer x = rank.put<int32_t>({1}), y = rank.put<int32_t>({2});
            const CallOptions options{.stream = rank.stream};
            std::vector<Work> works;
            const auto call = [&] {
              works.push_back(rank.comm->all_reduce(x, x, ReduceOp::kSum, options));
              works.push_back(rank.comm->all_reduce(y, y, ReduceOp::kSum, options));
            };
            if (rank.comm->rank() == 0) {
              call();
            } else {
              Coalescing group(*rank.comm);
              call();
              works.push_back(group.finish());
            }
            absl::Status status;
            for (const Work& work : works) status.Update(work.wait());
            return status;
          },
          {}, {.timeout = absl::Seconds(20)});
  expect_all(results, StatusCode::kFailedPrecondition, {"all_reduce #2", "coalesce"});
}

TEST(NcclFaultTest, AWaitInTheMiddleOfACoalescingOfOneRankIsAnError) {
  const auto results = run(2,
                           [](GpuRank& rank) -> absl::Status {
                             Buffer x = rank.put<int32_t>({1}), y = rank.put<int32_t>({2});
                             const CallOptions options{.stream = rank.stream};
                             Coalescing group(*rank.comm);
                             const Work first =
                                 rank.comm->all_reduce(x, x, ReduceOp::kSum, options);
                             if (rank.comm->rank() == 0) {
                               if (absl::Status status = first.wait_on(rank.stream); !status.ok())
                                 return status;
                             }
                             rank.comm->all_reduce(y, y, ReduceOp::kSum, options);
                             return group.finish().wait();
                           },
                           {}, {.timeout = absl::Seconds(20)});
  expect_all(results, StatusCode::kFailedPrecondition, {"all_reduce #2", "coalesce"});
}

// Each waits only for what was on the caller's stream when it was issued, and that stream for those
// before it.
TEST(NcclTest, OperationsThatNcclHasNotTakenDoNotWaitForLaterOnes) {
  for (const bool messages : {false, true}) {
    expect_ok(run(2,
                  [&](GpuRank& rank) -> absl::Status {
                    const int me = rank.comm->rank();
                    const CallOptions options{.stream = rank.stream};
                    Buffer x[4], self = rank.put<int32_t>({7}), out = rank.put<int32_t>({0});
                    std::vector<Work> works;
                    for (int i = 0; i < 4; ++i) {
                      x[i] = rank.put<int32_t>({me == 0 ? i : 0});
                      works.push_back(
                          !messages ? rank.comm->all_reduce(x[i], x[i], ReduceOp::kSum, options)
                          : me == 0 ? rank.comm->send(x[i], 1, 0, options)
                                    : rank.comm->recv(x[i], 0, 0, options));
                      absl::Status status = works.back().wait_on(rank.stream);
                      if (!status.ok()) return status;
                    }
                    works.push_back(rank.comm->recv(out, me, 0, options));
                    works.push_back(rank.comm->send(self, me, 0, options));
                    for (const Work& work : works) {
                      if (absl::Status status = work.wait(); !status.ok()) return status;
                    }
                    for (int i = 0; i < 4; ++i) {
                      EXPECT_EQ(rank.get<int32_t>(x[i]), std::vector<int32_t>{i});
                    }
                    EXPECT_EQ(rank.get<int32_t>(out), std::vector<int32_t>{7});
                    return absl::OkStatus();
                  },
                  {.looks = 100}, {.timeout = absl::Seconds(20)}));
  }
}

// The other rank comes to the collective when it has heard of the message.
TEST(NcclTest, AMessageToItselfDoesNotWaitForACollective) {
  std::atomic<bool> is_there{false};
  expect_ok(run(2,
                [&](GpuRank& rank) -> absl::Status {
                  const int me = rank.comm->rank();
                  const CallOptions options{.stream = rank.stream};
                  Buffer x = rank.put<int32_t>({1}), in = rank.put<int32_t>({7});
                  Buffer out = rank.put<int32_t>({0});
                  const Deadline limit = Clock::now() + seconds(10);
                  while (me == 1 && !is_there && Clock::now() < limit) {
                    std::this_thread::sleep_for(milliseconds(1));
                  }
                  const Work sum = rank.comm->all_reduce(x, x, ReduceOp::kSum, options);
                  if (me == 0) {
                    const Work recv = rank.comm->recv(out, me, 0, options);
                    rank.comm->send(in, me, 0, options);
                    if (absl::Status status = recv.wait(); !status.ok()) return status;
                    EXPECT_LT(Clock::now(), limit);
                    is_there = true;
                  }
                  return sum.wait();
                },
                {}, {.timeout = absl::Seconds(20)}));
}

// A program that only orders streams, and then lets go of the communicator.
TEST(NcclTest, WhatAStreamWaitsForIsNotAbortedAtTheEnd) {
  expect_ok(run(2,
                [](GpuRank& rank) -> absl::Status {
                  Buffer x = rank.put<float>({1.0f + rank.comm->rank()});
                  const absl::Status status =
                      rank.comm->all_reduce(x, x, ReduceOp::kSum, {.stream = rank.stream})
                          .wait_on(rank.stream);
                  if (!status.ok()) return status;
                  rank.comm.reset();
                  EXPECT_EQ(rank.get<float>(x), std::vector<float>{3});
                  return absl::OkStatus();
                },
                {.operation_milliseconds = 100}));
  EXPECT_EQ(gpu().calls("ncclCommAbort"), 0);
}

TEST(NcclTest, AFirstMessageMayTakeLongerThanItTookToConnect) {
  expect_ok(run(2,
                [](GpuRank& rank) -> absl::Status {
                  Buffer x = rank.put<float>({1}), y = rank.put<float>({1});
                  const CallOptions options{.stream = rank.stream};
                  const bool sends = rank.comm->rank() == 1;
                  Work message;
                  if (!sends) message = rank.comm->recv(x, 1, 0, options);
                  // With these the one that waits looks at its message.
                  for (int i = 0; i < 70; ++i) {
                    if (absl::Status status = rank.sum(y); !status.ok()) return status;
                    std::this_thread::sleep_for(milliseconds(50));
                  }
                  if (sends) message = rank.comm->send(x, 0, 0, options);
                  return message.wait();
                },
                {}, {.connect = seconds(3)}));
}

// Threads whose device is another one, of which they have made nothing yet, make no context there.
TEST(NcclTest, OnlyTheRanksDeviceGetsAContext) {
  Conditions conditions;
  conditions.nccl = [](int) { return NcclOptions{.device = 3, .libraries = fake_libraries()}; };
  gpu().reset({});
  InprocHub hub(1);
  std::thread([&] {
    absl::StatusOr<std::unique_ptr<Backend>> backend = make_paired_backend(
        hub.make_backend(0), connect_nccl(conditions.nccl(0)), {}, Clock::now() + seconds(20));
    ASSERT_TRUE(backend.ok()) << backend.status();
    const auto comm = Communicator::create(*std::move(backend));
    Buffer x{gpu().allocate(3, 4), 1, DType::kF32, {DeviceType::kCuda, 3}};
    EXPECT_TRUE(comm->all_reduce(x, x, ReduceOp::kSum).wait().ok());
  }).join();
  EXPECT_TRUE(gpu().has_context(3));
  EXPECT_FALSE(gpu().has_context(0));
}

TEST(NcclTest, AnotherThreadMayCaptureAGraph) {
  expect_ok(run(2,
                [](GpuRank& rank) {
                  Buffer x = rank.put<float>({1});
                  return rank.sum(x);
                },
                {.foreign_capture = true}));
}

TEST(NcclTest, EventsOfHalfAMessageToItselfGoToo) {
  expect_ok(run(1, [](GpuRank& rank) -> absl::Status {
    Buffer x = rank.put<float>({1});
    rank.comm->send(x, 0, 5, {.stream = rank.stream});
    return absl::OkStatus();
  }));
}

// The host waits until the device can be told to.
TEST(NcclTest, AStreamWaitsForAMessageThatIsYetToCome) {
  for (const bool to_itself : {true, false}) {
    expect_ok(run(2, [&](GpuRank& rank) -> absl::Status {
      const int me = rank.comm->rank();
      const int peer = to_itself ? me : 1 - me;
      Buffer x = rank.put<float>({0}), y = rank.put<float>({5});
      const DeviceStream other = rank.device->make_stream();
      const Work recv = rank.comm->recv(x, peer, 5, {.stream = rank.stream});
      absl::Status waited;
      std::thread waits([&] { waited = recv.wait_on(rank.stream); });
      std::this_thread::sleep_for(milliseconds(50));
      EXPECT_FALSE(recv.done());
      EXPECT_TRUE(rank.comm->barrier().wait().ok());  // the other one's message may come now
      const Work send = rank.comm->send(y, peer, 5, {.stream = other});
      waits.join();
      if (!waited.ok()) return waited;
      EXPECT_EQ(rank.get<float>(x), std::vector<float>{5});
      return send.wait();
    }));
  }
}

TEST(NcclTest, AStreamsWaitForAMessageThatNeverComesEndsAtTheDeadline) {
  for (const bool to_itself : {true, false}) {
    const auto results = run(2, [&](GpuRank& rank) -> absl::Status {
      const int peer = to_itself ? rank.comm->rank() : 1 - rank.comm->rank();
      Buffer x = rank.put<float>({0});
      const Work recv =
          rank.comm->recv(x, peer, 5, {.timeout = absl::Milliseconds(100), .stream = rank.stream});
      const absl::Status status = recv.wait_on(rank.stream);
      // Who leaves at once would be the other one's reason.
      std::this_thread::sleep_for(milliseconds(300));
      return status;
    });
    expect_all(results, StatusCode::kDeadlineExceeded,
               {to_itself ? "this rank itself has to call send" : "recv"});
  }
}

// NCCL connects with the first collective, and waits for the others to issue it.
TEST(NcclTest, AStreamsWaitForACollectiveThatARankDoesNotIssueNamesIt) {
  std::atomic<bool> has_ended{false};
  const auto results =
      run(2,
          [&](GpuRank& rank) -> absl::Status {
            if (rank.comm->rank() == 1) {
              while (!has_ended) std::this_thread::sleep_for(milliseconds(1));
              return absl::OkStatus();
            }
            Buffer x = rank.put<float>({0});
            const absl::Status status =
                rank.comm
                    ->all_reduce(x, x, ReduceOp::kSum,
                                 {.timeout = absl::Milliseconds(200), .stream = rank.stream})
                    .wait_on(rank.stream);
            has_ended = true;
            return status;
          },
          {.looks = 1 << 30, .slow_device = 0});
  expect_all({results[0]}, StatusCode::kDeadlineExceeded, {"all_reduce", "rank 1"});
}

TEST(NcclTest, SidesOfAMessageToItselfThatDiffer) {
  const auto results = run(1, [](GpuRank& rank) {
    Buffer x = rank.put<float>({1, 2}), y = rank.put<float>({1});
    std::string tag = "word";  // which lives for the call
    const Work recv = rank.comm->recv(x, 0, 5, {.tag = tag, .stream = rank.stream});
    tag = "gone";
    return rank.comm->send(y, 0, 5, {.stream = rank.stream}).wait();
  });
  expect_all(results, StatusCode::kFailedPrecondition, {"send(f32[1]", "recv(f32[2]"});
  EXPECT_FALSE(absl::StrContains(std::string(results[0].message()), "gone")) << results[0];
}

TEST(NcclTest, MemoryIsKeptUntilTheDeviceIsDone) {
  expect_ok(run(2,
                [](GpuRank& rank) -> absl::Status {
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
  expect_ok(run(2, [](GpuRank& rank) -> absl::Status {
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

}  // namespace
}  // namespace shardweave

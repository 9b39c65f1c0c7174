// By way of the host: several operations under way, in any order of waiting, polled, dropped and failed.
// (nccl_test.cc runs the conformance suite on it.)
#include "shardweave/comm/nccl/staged_backend.h"

#include <atomic>
#include <vector>

#include "shardweave/comm/nccl/testing/ranks.h"

namespace shardweave {
namespace {

const Conditions kStaged = {.backend = connect_staged};
constexpr int kRanks = 3;

CallOptions on(const GpuRank& rank) {
  return {.stream = rank.stream};
}

TEST(StagedTest, OperationsAreUnderWayTogether) {
  expect_ok(run(
      kRanks,
      [](GpuRank& rank) -> absl::Status {
        const auto mine = static_cast<float>(rank.comm->rank());
        std::vector<Buffer> in, out;
        std::vector<Work> works;
        for (int i = 0; i < 3; ++i) {
          in.push_back(rank.put<float>({mine, static_cast<float>(i)}));
          out.push_back(rank.put<float>({-1, -1}));
          works.push_back(rank.comm->all_reduce(in[i], out[i], ReduceOp::kSum, on(rank)));
        }
        // The last first; one by looking; and what is waited for twice.
        for (const int i : {2, 0, 0}) {
          if (absl::Status s = works[i].wait(); !s.ok()) return s;
        }
        const Deadline limit = Clock::now() + seconds(20);
        while (!works[1].done() && Clock::now() < limit)
          std::this_thread::sleep_for(milliseconds(1));
        for (int i = 0; i < 3; ++i) {
          EXPECT_EQ(rank.get<float>(out[i]), (std::vector<float>{3, 3.f * static_cast<float>(i)}));
          EXPECT_EQ(rank.get<float>(in[i])[0], mine) << "what was sent stays";
        }
        return absl::OkStatus();
      },
      {}, kStaged));
}

// A Work that nobody asks: the memory has the result all the same, once there are later calls.
TEST(StagedTest, WorksThatAreDropped) {
  expect_ok(run(
      2,
      [](GpuRank& rank) -> absl::Status {
        const Buffer x = rank.put<int64_t>({rank.comm->rank() + 1});
        const Buffer got = rank.put<int64_t>({0});
        rank.comm->all_reduce(x, x, ReduceOp::kSum, on(rank));
        if (rank.comm->rank() == 0) {
          rank.comm->send(x, 1, 7, on(rank));
        } else {
          rank.comm->recv(got, 0, 7, on(rank));
        }
        const Deadline limit = Clock::now() + seconds(20);
        int64_t sum = 0;
        while (sum != 3 && Clock::now() < limit) {
          if (absl::Status s = rank.comm->barrier().wait(); !s.ok()) return s;
          sum = rank.get<int64_t>(x)[0];
          // Both leave together.
          if (absl::Status s =
                  rank.comm->all_reduce(Buffer::of(&sum, 1), Buffer::of(&sum, 1), ReduceOp::kMin)
                      .wait();
              !s.ok()) {
            return s;
          }
        }
        EXPECT_EQ(sum, 3);
        return absl::OkStatus();
      },
      {}, kStaged));
}

// One that is under way when the communicator goes: its memory outlives whoever writes to it.
TEST(StagedTest, ACommunicatorThatIsLeftWithAnOperationUnderWay) {
  const std::vector<absl::Status> results = run(
      2,
      [](GpuRank& rank) -> absl::Status {
        const Buffer x = rank.put<float>(std::vector<float>(1000, 1));
        if (rank.comm->rank() == 0) {
          rank.comm->all_reduce(x, x, ReduceOp::kSum, on(rank));
          rank.comm.reset();
          return absl::OkStatus();
        }
        return rank.sum(x);
      },
      {}, kStaged);
  EXPECT_TRUE(results[0].ok());
  EXPECT_TRUE(results[1].ok() || results[1].code() == StatusCode::kUnavailable) << results[1];
}

TEST(StagedTest, WhatFailsWhileOthersAreUnderWay) {
  // Ranks that call different things; and a copy that fails on one rank.
  const std::vector<absl::Status> differ = run(
      2,
      [](GpuRank& rank) -> absl::Status {
        const Buffer x = rank.put<float>({1}), y = rank.put<float>({1, 2});
        const Work first = rank.comm->all_reduce(x, x, ReduceOp::kSum, on(rank));
        const Buffer& other = rank.comm->rank() == 0 ? x : y;
        const Work second = rank.comm->all_reduce(other, other, ReduceOp::kSum, on(rank));
        absl::Status status = second.wait();
        first.wait().IgnoreError();
        return status;
      },
      {}, kStaged);
  expect_all(differ, StatusCode::kFailedPrecondition, {"f32[1]", "f32[2]"});

  const std::vector<absl::Status> broken = run(
      2,
      [](GpuRank& rank) -> absl::Status {
        const Buffer x = rank.put<float>({1});
        absl::Status status;
        for (int i = 0; i < 20 && status.ok(); ++i) status = rank.sum(x);
        return status;
      },
      {.failing = "cudaMemcpyAsync", .failing_after = 5, .failing_device = 1}, kStaged);
  expect_all(broken, StatusCode::kInternal, {"cudaMemcpyAsync: an error of the fake"});
}

}  // namespace
}  // namespace shardweave

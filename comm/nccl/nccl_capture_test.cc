// Operations on a stream that is captured into a graph: they do not run then, and run as often as it
// is replayed.
#include <chrono>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "shardweave/comm/nccl/testing/ranks.h"

namespace shardweave {
namespace {

using Graph = std::shared_ptr<const FakeGraph>;

int index_of(const GpuRank& rank) {
  return rank.device->device().index;
}

Graph captured(GpuRank& rank, const std::function<absl::Status()>& body, absl::Status& status) {
  rank.synchronize();
  EXPECT_EQ(gpu().begin_capture(index_of(rank), rank.stream), 0);
  status = body();
  return gpu().end_capture(index_of(rank), rank.stream);
}

TEST(NcclCaptureTest, CollectivesRunWhenTheGraphIsReplayed) {
  for (const bool calls_go_on : {true, false}) {
    expect_ok(run(3,
                  [](GpuRank& rank) -> absl::Status {
                    const int me = rank.comm->rank();
                    Buffer x = rank.put<float>({1.0f + me, 2});
                    Buffer all = rank.put<float>({0, 0, 0, 0, 0, 0});
                    Buffer from = rank.put<float>({0});
                    const CallOptions options{.stream = rank.stream};
                    // Eager before, so that all have connected.
                    if (absl::Status status = rank.sum(from); !status.ok()) return status;
                    std::vector<Work> works;
                    absl::Status status;
                    const Graph graph = captured(
                        rank,
                        [&]() -> absl::Status {
                          works.push_back(rank.comm->all_reduce(x, x, ReduceOp::kSum, options));
                          if (absl::Status s = works[0].wait_on(rank.stream); !s.ok()) return s;
                          works.push_back(rank.comm->all_gather(x, all, options));
                          Coalescing group(*rank.comm);
                          rank.comm->recv(from, (me + 2) % 3, 0, options);
                          rank.comm->send({x.data, 1, x.dtype, x.device}, (me + 1) % 3, 0, options);
                          works.push_back(group.finish());
                          // The watchdog looks meanwhile, and forgets nothing that is to be waited for.
                          std::this_thread::sleep_for(milliseconds(30));
                          EXPECT_FALSE(works[1].done());
                          for (const Work& work : works) {
                            if (absl::Status s = work.wait_on(rank.stream); !s.ok()) return s;
                          }
                          return absl::OkStatus();
                        },
                        status);
                    if (!status.ok()) return status;
                    if (graph == nullptr) return absl::InternalError("the capture is spoilt");
                    for (const Work& work : works) {
                      if (absl::Status s = work.wait(); !s.ok()) return s;
                    }
                    EXPECT_EQ(rank.get<float>(x), (std::vector<float>{1.0f + me, 2})) << "not run";
                    float sum = 6, two = 6;
                    for (int round = 0; round < 3; ++round) {
                      gpu().replay(graph, index_of(rank), rank.stream);
                      EXPECT_EQ(rank.get<float>(x), (std::vector<float>{sum, two}));
                      EXPECT_EQ(rank.get<float>(all),
                                (std::vector<float>{sum, two, sum, two, sum, two}));
                      EXPECT_EQ(rank.get<float>(from), (std::vector<float>{sum}));
                      // What is not captured goes between replays.
                      if (absl::Status s = rank.sum(x); !s.ok()) return s;
                      sum *= 9, two *= 9;
                    }
                    return absl::OkStatus();
                  },
                  {.delay_microseconds = 2000, .calls_go_on = calls_go_on}));
  }
}

TEST(NcclCaptureTest, AMessageToItself) {
  expect_ok(run(1, [](GpuRank& rank) -> absl::Status {
    Buffer x = rank.put<int32_t>({5}), y = rank.put<int32_t>({0});
    const CallOptions options{.stream = rank.stream};
    absl::Status status;
    const Graph graph = captured(
        rank,
        [&]() -> absl::Status {
          const Work send = rank.comm->send(x, 0, 0, options);
          const Work recv = rank.comm->recv(y, 0, 0, options);
          if (absl::Status s = send.wait_on(rank.stream); !s.ok()) return s;
          return recv.wait_on(rank.stream);
        },
        status);
    if (!status.ok()) return status;
    if (graph == nullptr) return absl::InternalError("the capture is spoilt");
    EXPECT_EQ(rank.get<int32_t>(y), std::vector<int32_t>{0});
    gpu().replay(graph, index_of(rank), rank.stream);
    EXPECT_EQ(rank.get<int32_t>(y), std::vector<int32_t>{5});
    return absl::OkStatus();
  }));
}

TEST(NcclCaptureTest, TheHostDoesNotWaitForWhatDoesNotRun) {
  const Clock::time_point begin = Clock::now();
  expect_all(run(2,
                 [](GpuRank& rank) -> absl::Status {
                   Buffer x = rank.put<float>({1});
                   absl::Status status;
                   captured(
                       rank,
                       [&] {
                         return rank.comm->all_reduce(x, x, ReduceOp::kSum, {.stream = rank.stream})
                             .wait();
                       },
                       status);
                   return status;
                 }),
             StatusCode::kFailedPrecondition, {"all_reduce", "being captured"});
  EXPECT_LT(Clock::now() - begin, seconds(10));
}

// As on a real device: what has gone its own way in a capture has to be waited for.
TEST(NcclCaptureTest, AnOperationThatNobodyWaitsForSpoilsTheCapture) {
  expect_ok(run(2, [](GpuRank& rank) -> absl::Status {
    Buffer x = rank.put<float>({1});
    absl::Status status;
    const Graph graph = captured(
        rank,
        [&] {
          const Work work = rank.comm->all_reduce(x, x, ReduceOp::kSum, {.stream = rank.stream});
          while (gpu().calls("ncclAllReduce") < 2) std::this_thread::sleep_for(milliseconds(1));
          std::this_thread::sleep_for(milliseconds(30));  // NCCL has taken it
          return absl::OkStatus();
        },
        status);
    EXPECT_EQ(graph, nullptr);
    return status;
  }));
}

}  // namespace
}  // namespace shardweave

// Schedules of all ranks against each other, with a memcpy for a network.
#include "shardweave/comm/gloo/schedule.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"

namespace shardweave::gloo_internal {
namespace {

using Data = std::vector<int32_t>;

constexpr CollectiveSchedule::Limits kSmall{.extra_work = 0, .scratch = 24};  // many steps
constexpr CollectiveSchedule::Limits kWhole{.extra_work = 1 << 20, .scratch = 24};
constexpr CollectiveSchedule::Limits kLarge{};

class World {
 public:
  World(int size, const CollectiveSchedule::Limits& limits) {
    for (int rank = 0; rank < size; ++rank) {
      groups_.push_back({.name = "g", .rank = rank, .world_ranks = std::vector<int64_t>(size)});
      schedules_.emplace_back(limits);
    }
  }
  int size() const { return static_cast<int>(groups_.size()); }

  // Returns the number of steps, or the first error.
  absl::StatusOr<int> run(const std::vector<Call>& calls) {
    for (int rank = 0; rank < size(); ++rank) {
      schedules_[rank].start(groups_[rank], calls[rank]);
      schedules_[rank].copy_own_part();
    }
    for (int steps = 1;; ++steps) {
      exchange();
      int going_on = 0;
      for (CollectiveSchedule& schedule : schedules_) {
        absl::StatusOr<bool> more = schedule.finish_step();
        if (!more.ok()) return more.status();
        going_on += *more;
      }
      if (going_on == 0) return steps;
      EXPECT_EQ(going_on, size()) << "all ranks take the same number of steps";
    }
  }

 private:
  void exchange() {
    for (int from = 0; from < size(); ++from) {
      for (int to = 0; to < size(); ++to) {
        if (from == to) continue;
        const Transfer& sent = schedules_[from].with(to);
        const Transfer& received = schedules_[to].with(from);
        ASSERT_EQ(sent.send_bytes, received.recv_bytes) << from << " to " << to;
        if (sent.send_bytes > 0) std::memcpy(received.recv, sent.send, sent.send_bytes);
      }
    }
  }

  std::vector<GroupInfo> groups_;
  std::vector<CollectiveSchedule> schedules_;
};

ConstBuffer in_of(const Data& data) {
  return ConstBuffer::of(data.data(), data.size());
}
Buffer out_of(Data& data) {
  return Buffer::of(data.data(), data.size());
}

int32_t value(int rank, int64_t i) {
  return static_cast<int32_t>(1000 * (rank + 1) + i);
}
Data values(int rank, int64_t count) {
  Data data(count);
  for (int64_t i = 0; i < count; ++i) data[i] = value(rank, i);
  return data;
}
int32_t sum(int size, int64_t i) {
  int32_t total = 0;
  for (int rank = 0; rank < size; ++rank) total += value(rank, i);
  return total;
}

class ScheduleTest : public testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }
};

TEST_P(ScheduleTest, AllReduceInPlaceAndNot) {
  for (const CollectiveSchedule::Limits& limits : {kSmall, kWhole, kLarge}) {
    World world(size(), limits);
    for (int64_t count : {0, 1, 5, 6, 31, 100}) {
      for (bool in_place : {true, false}) {
        std::vector<Data> in, out;
        std::vector<Call> calls;
        for (int rank = 0; rank < size(); ++rank) {
          in.push_back(values(rank, count));
          out.push_back(Data(count));
        }
        for (int rank = 0; rank < size(); ++rank) {
          calls.push_back({.op = OpKind::kAllReduce,
                           .in = in_of(in[rank]),
                           .out = out_of(in_place ? in[rank] : out[rank])});
        }
        ASSERT_TRUE(world.run(calls).ok());
        for (int rank = 0; rank < size(); ++rank) {
          for (int64_t i = 0; i < count; ++i) {
            EXPECT_EQ((in_place ? in : out)[rank][i], sum(size(), i)) << rank << " " << i;
          }
        }
      }
    }
  }
}

TEST_P(ScheduleTest, ReduceScatterOfUnevenParts) {
  std::vector<int64_t> counts;
  for (int rank = 0; rank < size(); ++rank) counts.push_back(rank == 1 ? 0 : 3 * rank + 2);
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  for (const CollectiveSchedule::Limits& limits : {kSmall, kLarge}) {
    for (bool in_place : {true, false}) {
      World world(size(), limits);
      std::vector<Data> in, out;
      std::vector<Call> calls;
      for (int rank = 0; rank < size(); ++rank) {
        in.push_back(values(rank, total));
        out.push_back(Data(counts[rank]));
      }
      int64_t begin = 0;
      for (int rank = 0; rank < size(); ++rank) {
        calls.push_back({.op = OpKind::kReduceScatterV,
                         .in = in_of(in[rank]),
                         .out = in_place ? Buffer::of(in[rank].data() + begin, counts[rank])
                                         : out_of(out[rank]),
                         .in_counts = counts});
        begin += counts[rank];
      }
      ASSERT_TRUE(world.run(calls).ok());
      begin = 0;
      for (int rank = 0; rank < size(); ++rank) {
        for (int64_t i = 0; i < counts[rank]; ++i) {
          EXPECT_EQ(in_place ? in[rank][begin + i] : out[rank][i], sum(size(), begin + i));
        }
        begin += counts[rank];
      }
    }
  }
}

TEST_P(ScheduleTest, ReduceIsComputedByTheRootAlone) {
  for (const CollectiveSchedule::Limits& limits : {kSmall, kLarge}) {
    World world(size(), limits);
    const int root = size() - 1;
    std::vector<Data> in;
    for (int rank = 0; rank < size(); ++rank) in.push_back(values(rank, 17));
    std::vector<Call> calls;
    for (int rank = 0; rank < size(); ++rank) {
      calls.push_back({.op = OpKind::kReduce, .in = in_of(in[rank]), .peer = root});
      calls.back().out = rank == root ? out_of(in[rank]) : Buffer{.dtype = DType::kI32};
    }
    ASSERT_TRUE(world.run(calls).ok());
    for (int64_t i = 0; i < 17; ++i) EXPECT_EQ(in[root][i], sum(size(), i));
    if (size() > 1) {
      EXPECT_EQ(in[0], values(0, 17));
    }
  }
}

TEST_P(ScheduleTest, AllToAllOfUnevenPartsAnnouncesFirst) {
  World world(size(), kLarge);
  // From a to b: a + 2 * b elements.
  std::vector<Data> in(size()), out(size());
  std::vector<std::vector<int64_t>> send(size()), recv(size());
  for (int a = 0; a < size(); ++a) {
    for (int b = 0; b < size(); ++b) {
      send[a].push_back(a + 2 * b);
      recv[a].push_back(b + 2 * a);
      in[a].insert(in[a].end(), a + 2 * b, 100 * a + b);
      out[a].resize(out[a].size() + b + 2 * a);
    }
  }
  std::vector<Call> calls;
  for (int rank = 0; rank < size(); ++rank) {
    calls.push_back({.op = OpKind::kAllToAllV,
                     .in = in_of(in[rank]),
                     .out = out_of(out[rank]),
                     .in_counts = send[rank],
                     .out_counts = recv[rank]});
  }
  EXPECT_EQ(*world.run(calls), 2);
  for (int b = 0; b < size(); ++b) {
    Data want;
    for (int a = 0; a < size(); ++a) want.insert(want.end(), a + 2 * b, 100 * a + b);
    EXPECT_EQ(out[b], want);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ScheduleTest, testing::Range(1, 6));

TEST(ScheduleStepsTest, SmallAllReduceTakesOneStepAndLargeTwo) {
  World world(2, kLarge);
  for (const auto& [count, steps] : std::vector<std::pair<int64_t, int>>{
           {1, 1}, {32 * 1024, 1}, {32 * 1024 + 2, 2}, {128 * 1024, 2}, {128 * 1024 + 1, 4}}) {
    std::vector<Data> data = {values(0, count), values(1, count)};
    std::vector<Call> calls;
    for (Data& mine : data) {
      calls.push_back({.op = OpKind::kAllReduce, .in = in_of(mine), .out = out_of(mine)});
    }
    EXPECT_EQ(*world.run(calls), steps) << count;
    EXPECT_EQ(data[1].back(), sum(2, count - 1));
  }
}

TEST(ScheduleStepsTest, AllToAllThatDisagreesMovesNothing) {
  World world(2, kLarge);
  Data in(3, 7), out0(3), out1(4);
  const std::vector<int64_t> one_two = {1, 2}, one_three = {1, 3};
  const absl::StatusOr<int> steps = world.run({{.op = OpKind::kAllToAllV,
                                                .in = in_of(in),
                                                .out = out_of(out0),
                                                .in_counts = one_two,
                                                .out_counts = one_two},
                                               {.op = OpKind::kAllToAllV,
                                                .in = in_of(in),
                                                .out = out_of(out1),
                                                .in_counts = {2, 1},
                                                .out_counts = one_three}});
  EXPECT_EQ(steps.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(steps.status().message().find("rank 0 sends 2 elements to rank 1, which expects 1"),
            std::string::npos)
      << steps.status();
}

}  // namespace
}  // namespace shardweave::gloo_internal

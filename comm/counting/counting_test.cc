#include "shardweave/comm/counting/counting.h"

#include "gtest/gtest.h"

namespace shardweave {
namespace {

constexpr int kRanks = 65'536;

TEST(CountingTest, RecordsOperationBytesAndGroup) {
  auto log = std::make_shared<CountingLog>();
  auto world = count_communication(7, kRanks, log);
  ASSERT_TRUE(world.ok()) << world.status();
  EXPECT_EQ((*world)->rank(), 7);
  EXPECT_EQ((*world)->size(), kRanks);
  auto pair = (*world)->subgroup({65'535, 7}, "pair");
  ASSERT_TRUE(pair.ok()) << pair.status();
  EXPECT_EQ((*pair)->rank(), 1);

  float x[4] = {1, 2, 3, 4};
  float y[2] = {5, 6};
  Work work =
      (*world)->all_reduce(Buffer::of(x, 4), Buffer::of(x, 4), ReduceOp::kSum, {.tag = "grads"});
  EXPECT_TRUE(work.done());
  EXPECT_TRUE(work.wait().ok());
  EXPECT_TRUE((*pair)->all_gather(Buffer::of(y, 2), Buffer::of(x, 4)).wait().ok());
  EXPECT_TRUE((*pair)->all_gather(Buffer::of(y, 2), Buffer::of(x, 4)).wait().ok());
  EXPECT_TRUE((*pair)->barrier().wait().ok());
  EXPECT_EQ(x[3], 4) << "nothing moves";

  const std::vector<CountedOperation> operations = log->operations();
  ASSERT_EQ(operations.size(), 4u);
  EXPECT_EQ(operations[0].op, OpKind::kAllReduce);
  EXPECT_EQ(operations[0].dtype, DType::kF32);
  EXPECT_EQ(operations[0].bytes, 16);
  EXPECT_EQ(operations[0].tag, "grads");
  EXPECT_EQ(operations[0].group->size(), kRanks);
  EXPECT_EQ(operations[1].group->world_ranks, (std::vector<int64_t>{65'535, 7}));

  const auto totals = log->totals();
  EXPECT_EQ(totals.size(), 3u);
  EXPECT_EQ(totals.at({"world", OpKind::kAllReduce}), (OpCounter{1, 16}));
  EXPECT_EQ(totals.at({"pair", OpKind::kAllGather}), (OpCounter{2, 32}));
  EXPECT_EQ(totals.at({"pair", OpKind::kBarrier}), (OpCounter{1, 0}));
  EXPECT_EQ((*world)->flight_recorder().counters().total(), (OpCounter{4, 48}));

  log->clear();
  EXPECT_TRUE(log->operations().empty());
}

TEST(CountingTest, TakesMemoryOfAnyDevice) {
  auto log = std::make_shared<CountingLog>();
  auto world = count_communication(0, 8, log);
  ASSERT_TRUE(world.ok()) << world.status();
  const Buffer on_gpu{
      reinterpret_cast<void*>(0x1000), 1 << 20, DType::kBF16, {DeviceType::kCuda, 3}};
  EXPECT_TRUE((*world)->broadcast(on_gpu, 5).wait().ok());
  EXPECT_EQ(log->operations()[0].bytes, 2 << 20);
}

// Of rank 1 of 2, as if rank 0 gave the same.
TEST(CountingTest, ItsOwnMayStandInForOthers) {
  auto world = count_communication(1, 2, std::make_shared<CountingLog>(), {.stand_in = true});
  ASSERT_TRUE(world.ok()) << world.status();
  const float mine[4] = {1, 2, 3, 4};
  const ConstBuffer in = ConstBuffer::of(mine, 4), half = ConstBuffer::of(mine, 2);
  const auto filled = [](int64_t count, const auto& run) {
    std::vector<float> out(count, 99);
    EXPECT_TRUE(run(Buffer::of(out.data(), count)).wait().ok());
    return out;
  };
  using Values = std::vector<float>;
  Communicator& comm = **world;
  EXPECT_EQ(filled(4, [&](Buffer out) { return comm.all_reduce(in, out, ReduceOp::kSum); }),
            (Values{1, 2, 3, 4}));
  EXPECT_EQ(filled(4, [&](Buffer out) { return comm.all_gather(half, out); }),
            (Values{1, 2, 1, 2}));
  EXPECT_EQ(filled(5, [&](Buffer out) { return comm.all_gather_v(half, out, {3, 2}); }),
            (Values{1, 2, 0, 1, 2}));
  EXPECT_EQ(filled(2, [&](Buffer out) { return comm.reduce_scatter(in, out, ReduceOp::kSum); }),
            (Values{3, 4}));
  EXPECT_EQ(filled(4, [&](Buffer out) { return comm.all_to_all(in, out); }), (Values{3, 4, 3, 4}));
  EXPECT_EQ(filled(3, [&](Buffer out) { return comm.all_to_all_v(in, {3, 1}, out, {2, 1}); }),
            (Values{4, 0, 4}));
}

TEST(CountingTest, StillRefusesBadArguments) {
  auto log = std::make_shared<CountingLog>();
  auto world = count_communication(0, 8, log);
  ASSERT_TRUE(world.ok()) << world.status();
  float x = 0;
  EXPECT_EQ((*world)->broadcast(Buffer::of(&x, 1), 8).wait().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(log->operations().empty());
}

TEST(CountingTest, CannotSplit) {
  auto world = count_communication(0, 8, std::make_shared<CountingLog>());
  ASSERT_TRUE(world.ok()) << world.status();
  const absl::Status status = (*world)->split(0, 0, "half").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("subgroup"), status.message().npos) << status;
}

TEST(CountingTest, RankMustBeInTheWorld) {
  for (int rank : {-1, 8}) {
    const absl::Status status = count_communication(rank, 8, nullptr).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("world of 8"), status.message().npos) << status;
  }
}

}  // namespace
}  // namespace shardweave

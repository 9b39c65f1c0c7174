#include "shardweave/comm/inproc/movement.h"

#include "gtest/gtest.h"
#include "shardweave/comm/testing/values.h"

namespace shardweave::inproc {
namespace {

constexpr int kRanks = 3;

// One collective of three ranks, on memory of its own.
struct Collective {
  explicit Collective(OpKind op) {
    const std::vector<int64_t> counts = {5, 0, 8};
    for (int rank = 0; rank < kRanks; ++rank) {
      Call call{.op = op, .peer = 1, .in_counts = counts, .out_counts = counts};
      int64_t in_count = 13;
      int64_t out_count = 13;
      if (op == OpKind::kAllGather || op == OpKind::kGather) out_count = 39;
      if (op == OpKind::kReduceScatter || op == OpKind::kScatter) in_count = 39;
      if (op == OpKind::kAllGatherV) in_count = counts[rank];
      if (op == OpKind::kReduceScatterV) out_count = counts[rank];
      if (op == OpKind::kAllToAll) in_count = out_count = 12;
      if (op == OpKind::kAllToAllV) {
        // Rank r sends counts[r] elements to each.
        sent[rank].assign(kRanks, counts[rank]);
        call.in_counts = sent[rank];
        in_count = 3 * counts[rank];
      }
      ins.emplace_back(DType::kI32, in_count, [=](int64_t i) { return 100 * rank + i; });
      outs.emplace_back(DType::kI32, out_count);
      call.in = ins.back().buffer();
      call.out = outs.back().buffer();
      calls[rank].keep(call);
      pointers[rank] = &calls[rank];
    }
    movement.reset(pointers);
  }

  std::vector<int64_t> sent[kRanks];
  std::vector<Values> ins;
  std::vector<Values> outs;
  KeptCall calls[kRanks];
  const KeptCall* pointers[kRanks];
  Movement movement;
};

class MovementTest : public testing::TestWithParam<OpKind> {};

TEST_P(MovementTest, MayBeCutAnywhereAndRunInAnyOrder) {
  Collective whole(GetParam());
  ASSERT_TRUE(check_calls("g", whole.pointers).ok());
  whole.movement.run(0, whole.movement.length());
  for (int64_t piece : {1, 4, 7, 1000}) {
    Collective cut(GetParam());
    const int64_t length = cut.movement.length();
    for (int64_t begin = length - 1 - (length - 1) % piece; begin >= 0; begin -= piece) {
      cut.movement.run(begin, std::min(begin + piece, length));
    }
    EXPECT_EQ(cut.outs, whole.outs) << "in pieces of " << piece;
    EXPECT_EQ(cut.ins, whole.ins);
  }
}

INSTANTIATE_TEST_SUITE_P(Collectives, MovementTest,
                         testing::Values(OpKind::kAllReduce, OpKind::kAllGather,
                                         OpKind::kAllGatherV, OpKind::kReduceScatter,
                                         OpKind::kReduceScatterV, OpKind::kAllToAll,
                                         OpKind::kAllToAllV, OpKind::kBroadcast, OpKind::kReduce,
                                         OpKind::kGather, OpKind::kScatter),
                         [](const auto& tested) { return std::string(to_string(tested.param)); });

TEST(MovementTest, HasTheLengthOfWhatMoves) {
  EXPECT_EQ(Collective(OpKind::kAllReduce).movement.length(), 13);
  EXPECT_EQ(Collective(OpKind::kAllGather).movement.length(), 39);
  EXPECT_EQ(Collective(OpKind::kAllGatherV).movement.length(), 13);
  EXPECT_EQ(Collective(OpKind::kAllToAll).movement.length(), 36);
  EXPECT_EQ(Collective(OpKind::kBarrier).movement.length(), 0);
}

}  // namespace
}  // namespace shardweave::inproc

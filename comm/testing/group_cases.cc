// Groups made from groups.
#include "shardweave/comm/testing/cases.h"

namespace shardweave {
namespace {

absl::StatusOr<std::vector<int64_t>> who_is_there(Communicator& comm, int64_t me) {
  std::vector<int64_t> all(comm.size());
  absl::Status status =
      comm.all_gather(Buffer::of(&me, 1), Buffer::of(all.data(), comm.size())).wait();
  if (!status.ok()) return status;
  return all;
}

TEST_P(CommConformance, SplitOrdersByKeyThenRank) {
  run([](const auto& comm) -> absl::Status {
    const int rank = comm->rank();
    auto group = comm->split(rank % 2, -(rank / 2 % 2), "parity");
    if (!group.ok()) return group.status();
    std::vector<int64_t> want;
    for (int key : {-1, 0}) {
      for (int r = rank % 2; r < comm->size(); r += 2) {
        if (-(r / 2 % 2) == key) want.push_back(r);
      }
    }
    EXPECT_EQ((*group)->world_ranks(), want);
    EXPECT_EQ((*group)->size(), static_cast<int>(want.size()));
    EXPECT_EQ(want[(*group)->rank()], rank);
    EXPECT_EQ((*group)->name(), "parity");
    auto there = who_is_there(**group, rank);
    if (!there.ok()) return there.status();
    EXPECT_EQ(*there, want);
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, NegativeColorsStayOut) {
  run([](const auto& comm) -> absl::Status {
    auto group = comm->split(comm->rank() == 0 ? -1 : 4, 0, "rest");
    if (!group.ok()) return group.status();
    if (comm->rank() == 0) {
      EXPECT_EQ(*group, nullptr);
      return absl::OkStatus();
    }
    EXPECT_EQ((*group)->size(), comm->size() - 1);
    return (*group)->barrier().wait();
  });
}

TEST_P(CommConformance, OnlyMembersMakeASubgroup) {
  run([](const auto& comm) -> absl::Status {
    // The last rank takes no part; the others are in the opposite order.
    std::vector<int64_t> members;
    for (int r = comm->size() - 2; r >= 0; --r) members.push_back(r);
    if (comm->rank() == comm->size() - 1) return comm->barrier().wait();
    auto group = comm->subgroup(members, "turned");
    if (!group.ok()) return group.status();
    auto there = who_is_there(**group, comm->rank());
    if (!there.ok()) return there.status();
    EXPECT_EQ(*there, members);
    EXPECT_EQ((*group)->world_ranks(), members);
    return comm->barrier().wait();
  });
}

TEST_P(CommConformance, GroupsOfGroupsKnowTheirWorldRanks) {
  run([](const auto& comm) -> absl::Status {
    std::vector<int64_t> turned;
    for (int r = comm->size() - 1; r >= 0; --r) turned.push_back(r);
    auto outer = comm->subgroup(turned, "outer");
    if (!outer.ok()) return outer.status();
    auto inner = (*outer)->split((*outer)->rank() / 2, 0, "pairs");
    if (!inner.ok()) return inner.status();
    auto there = who_is_there(**inner, comm->rank());
    if (!there.ok()) return there.status();
    EXPECT_EQ(*there, (*inner)->world_ranks());
    EXPECT_EQ((*inner)->world_ranks()[(*inner)->rank()], comm->rank());
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, TheSameSubgroupTwiceIsTwoGroups) {
  run([this](const auto& comm) -> absl::Status {
    std::vector<int64_t> everyone;
    for (int r = 0; r < comm->size(); ++r) everyone.push_back(r);
    auto first = comm->subgroup(everyone, "same");
    if (!first.ok()) return first.status();
    auto second = comm->subgroup(everyone, "same");
    if (!second.ok()) return second.status();
    int64_t x = comm->rank();
    int64_t y = 10 + comm->rank();
    // Issued in different orders on different ranks: fine, if issuing does not block.
    const bool in_turn = backend().blocks_at_issue || comm->rank() % 2;
    Communicator& a = in_turn ? **first : **second;
    Communicator& b = in_turn ? **second : **first;
    int64_t& on_a = in_turn ? x : y;
    int64_t& on_b = in_turn ? y : x;
    Work work_a = a.broadcast(Buffer::of(&on_a, 1), 0);
    Work work_b = b.broadcast(Buffer::of(&on_b, 1), 0);
    SHARDWEAVE_RETURN_IF_ERROR(work_a.wait());
    SHARDWEAVE_RETURN_IF_ERROR(work_b.wait());
    EXPECT_EQ(x, 0);
    EXPECT_EQ(y, 10);
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, AGroupOutlivesTheOneItWasMadeFrom) {
  run([](const auto& comm) -> absl::Status {
    std::shared_ptr<Communicator> last = comm;
    for (int i = 0; i < 5; ++i) {
      auto next = last->split(0, 0, "next");
      if (!next.ok()) return next.status();
      last = *std::move(next);
    }
    EXPECT_EQ(last->size(), comm->size());
    return last->barrier().wait();
  });
}

TEST_P(CommConformance, GroupsShareOneFlightRecord) {
  run([](const auto& comm) -> absl::Status {
    const CommCounters before = comm->flight_recorder().counters();
    auto group = comm->split(0, 0, "all");
    if (!group.ok()) return group.status();
    float x = 0;
    SHARDWEAVE_RETURN_IF_ERROR(
        (*group)->all_reduce(Buffer::of(&x, 1), Buffer::of(&x, 1), ReduceOp::kSum).wait());
    EXPECT_EQ(&(*group)->flight_recorder(), &comm->flight_recorder());
    EXPECT_EQ((*group)->counters().of(OpKind::kAllReduce), (OpCounter{1, 4}));
    const CommCounters during = comm->flight_recorder().counters() - before;
    EXPECT_EQ(during.of(OpKind::kAllReduce), (OpCounter{1, 4}));
    EXPECT_EQ(during.of(OpKind::kAllGather).calls, 1) << "of split";
    *group = nullptr;
    EXPECT_EQ(comm->flight_recorder().counters() - before, during) << "also of those that are gone";
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace shardweave

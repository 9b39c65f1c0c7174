#include "shardweave/comm/rendezvous/check_in.h"

#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/store/in_process_store.h"

namespace shardweave {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

RendezvousInfo member(int rank, int world_size, std::string run = "job7") {
  RendezvousInfo info{.rank = rank, .world_size = world_size, .run = std::move(run)};
  info.meeting_point.file = "unused";
  return info;
}

// Each of `infos` checks in on a thread of its own.
std::vector<absl::StatusOr<Roster>> check_in_all(Store& store,
                                                 const std::vector<RendezvousInfo>& infos,
                                                 absl::Duration timeout = absl::Seconds(30)) {
  std::vector<absl::StatusOr<Roster>> results(infos.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < infos.size(); ++i) {
    threads.emplace_back([&, i] {
      results[i] = check_in(store, infos[i], absl::StrCat("host", infos[i].rank / 2), timeout);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(CheckInTest, EveryRankGetsAllHosts) {
  auto store = make_in_process_store();
  for (const absl::StatusOr<Roster>& roster :
       check_in_all(*store, {member(2, 3), member(0, 3), member(1, 3)})) {
    ASSERT_TRUE(roster.ok()) << roster.status();
    EXPECT_THAT(roster->hosts, ElementsAre("host0", "host0", "host1"));
    EXPECT_EQ(roster->local_rank(0), 0);
    EXPECT_EQ(roster->local_rank(1), 1);
    EXPECT_EQ(roster->local_rank(2), 0);
  }
}

TEST(CheckInTest, EveryRankHearsOfTheCpusOfItsHost) {
  auto store = make_in_process_store();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      absl::StatusOr<Roster> roster =
          check_in(*store, member(rank, 3), rank == 1 ? "b" : "a", absl::Seconds(30),
                   absl::Seconds(10), absl::StrCat("cpus ", rank, ";cgroup 7:8"));
      ASSERT_TRUE(roster.ok()) << roster.status();
      EXPECT_THAT(roster->hosts, ElementsAre("a", "b", "a"));
      EXPECT_THAT(roster->local_cpus(0), ElementsAre("cpus 0;cgroup 7:8", "cpus 2;cgroup 7:8"));
      EXPECT_THAT(roster->local_cpus(1), ElementsAre("cpus 1;cgroup 7:8"));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CheckInTest, OneRankIsEnough) {
  auto store = make_in_process_store();
  absl::StatusOr<Roster> roster = check_in(*store, member(0, 1), this_host(), absl::Seconds(1));
  ASSERT_TRUE(roster.ok());
  EXPECT_THAT(roster->hosts, ElementsAre(this_host()));
}

TEST(CheckInTest, RunsShareAStore) {
  auto store = make_in_process_store();
  for (const auto& roster :
       check_in_all(*store, {member(0, 2, "a"), member(1, 2, "a"), member(0, 1, "b")})) {
    EXPECT_TRUE(roster.ok()) << roster.status();
  }
}

TEST(CheckInTest, EveryRankHearsWhoIsMissing) {
  auto store = make_in_process_store();
  for (const auto& roster :
       check_in_all(*store, {member(0, 4), member(2, 4)}, absl::Milliseconds(100))) {
    EXPECT_EQ(roster.status().code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(roster.status().message(),
              "ranks 1, 3 of 4 did not come to in-process store in 100ms (run \"job7\")");
  }
}

TEST(CheckInTest, WhoeverIsTiredOfWaitingSaysForWhomOnce) {
  auto store = make_in_process_store();
  const auto enter = [&](int rank) {
    return check_in(*store, member(rank, 3), "host", absl::Seconds(60), absl::Milliseconds(100));
  };
  testing::internal::CaptureStderr();
  std::vector<std::thread> threads;
  for (int rank : {0, 2}) {
    threads.emplace_back([&, rank] { EXPECT_TRUE(enter(rank).ok()); });
  }
  absl::SleepFor(absl::Milliseconds(600));
  EXPECT_TRUE(enter(1).ok());
  for (std::thread& thread : threads) thread.join();
  const std::string said = testing::internal::GetCapturedStderr();
  for (const char* rank : {"0", "2"}) {
    const std::string line = absl::StrCat("shardweave: rank ", rank,
                                          " of 3 has waited 100ms for rank 1 at in-process store");
    EXPECT_THAT(said, HasSubstr(line));
    EXPECT_EQ(said.find(line), said.rfind(line)) << "once";
  }
}

TEST(CheckInTest, LongListsOfMissingRanksAreCut) {
  auto store = make_in_process_store();
  const absl::Status status = check_in(*store, member(0, 100), "h", absl::ZeroDuration()).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("ranks 1, 2, 3,"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("15, 16 and 83 more of 100"));
}

TEST(CheckInTest, MissingRankZeroIsNamed) {
  auto store = make_in_process_store();
  const absl::Status status = check_in(*store, member(1, 2), "h", absl::ZeroDuration()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 of 2 did not come"));
}

TEST(CheckInTest, TwoProcessesWithOneRank) {
  auto store = make_in_process_store();
  ASSERT_TRUE(check_in(*store, member(0, 1), "h", absl::Seconds(1)).ok());
  const absl::Status status = check_in(*store, member(0, 1), "h", absl::Seconds(1)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 of run \"job7\" has come to"));
}

TEST(CheckInTest, DifferentWorldSizes) {
  auto store = make_in_process_store();
  for (const auto& roster : check_in_all(*store, {member(0, 2), member(1, 3)})) {
    EXPECT_EQ(roster.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(roster.status().message(), "rank 0 was told of 2 ranks, rank 1 of 3");
  }
  // A rank that rank 0 does not expect learns it too.
  auto other = make_in_process_store();
  const auto results = check_in_all(*other, {member(0, 1), member(1, 2)});
  EXPECT_TRUE(results[0].ok());
  EXPECT_EQ(results[1].status().message(), "rank 1 was told of 2 ranks, rank 0 of 1");
}

// Of those that rank 0 waits for some have not been told that they exist: found before the deadline.
TEST(CheckInTest, RankZeroWaitsForNoRankThatOthersDoNotKnow) {
  auto store = make_in_process_store();
  const absl::Time start = absl::Now();
  absl::Status zero;
  std::thread first([&] {
    zero = check_in(*store, member(0, 4), "h", absl::Seconds(60), absl::Milliseconds(200)).status();
  });
  const absl::Status one =
      check_in(*store, member(1, 2), "h", absl::Seconds(60), absl::Milliseconds(200)).status();
  first.join();
  for (const absl::Status& status : {zero, one}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(status.message(), "rank 0 was told of 4 ranks, rank 1 of 2");
  }
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));
}

// Whoever declines, the others hear why at once; so does whoever comes later.
TEST(CheckInTest, EveryRankHearsWhyOneDeclines) {
  for (int who = 0; who < 3; ++who) {
    auto store = make_in_process_store();
    const absl::Time start = absl::Now();
    std::vector<absl::Status> answers(3);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        answers[rank] =
            rank == who ? decline(*store, member(rank, 3), absl::InvalidArgumentError("no\nway"))
                        : check_in(*store, member(rank, 3), "h", absl::Seconds(60)).status();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(answers[rank].code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(answers[rank].message(),
                rank == who ? "no\nway" : absl::StrCat("rank ", who, " does not join: no\nway"));
    }
    EXPECT_LT(absl::Now() - start, absl::Seconds(4)) << "rank " << who;
  }
}

TEST(CheckInTest, RanksThatAllDeclineDoNotWait) {
  auto store = make_in_process_store();
  const absl::Time start = absl::Now();
  std::thread other([&] { decline(*store, member(1, 2), absl::InternalError("b")).IgnoreError(); });
  EXPECT_EQ(decline(*store, member(0, 2), absl::InternalError("a")).message(), "a");
  other.join();
  EXPECT_EQ(decline(*make_in_process_store(), member(0, 1), absl::InternalError("a")).message(),
            "a");
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));
}

TEST(CheckInTest, RefusesInvalidNumbers) {
  auto store = make_in_process_store();
  EXPECT_EQ(check_in(*store, member(3, 2), "h", absl::Seconds(1)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace shardweave

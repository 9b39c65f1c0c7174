#include <pthread.h>

#include <atomic>
#include <limits>
#include <stdexcept>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/status_exception.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/comm/world.h"

namespace shardweave {
namespace {

bool contains(const absl::Status& status, std::string_view part) {
  return status.message().find(absl::string_view(part.data(), part.size())) !=
         status.message().npos;
}

absl::Status wait_for_others(World& world) {
  return world.comm()->barrier().wait();
}

TEST(RunRanksTest, RunsEveryRankOnce) {
  for (int num_ranks : {1, 2, 5}) {
    std::atomic<int> ranks{0};
    const absl::Status status = run_ranks(num_ranks, [&](World& world) -> absl::Status {
      EXPECT_EQ(world.size(), num_ranks);
      EXPECT_EQ(world.local_rank(), world.rank());
      EXPECT_EQ(world.comm()->world_ranks()[world.rank()], world.rank());
      ranks.fetch_add(1 << (4 * world.rank()));
      return wait_for_others(world);
    });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(ranks.load(), 0x11111 & ((1 << 4 * num_ranks) - 1));
  }
}

TEST(RunRanksTest, ThreadsAreNamedByTheirRanks) {
  const absl::Status status = run_ranks(12, [](World& world) {
    char name[16];
    EXPECT_EQ(pthread_getname_np(pthread_self(), name, sizeof(name)), 0);
    EXPECT_EQ(std::string(name), "rank " + std::to_string(world.rank()));
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(RunRanksTest, TakesABodyThatReturnsNothing) {
  std::atomic<int> ranks{0};
  EXPECT_TRUE(run_ranks(3, [&](World&) { ranks.fetch_add(1); }).ok());
  EXPECT_EQ(ranks.load(), 3);
}

TEST(RunRanksTest, NeedsARank) {
  for (const int num_ranks : {-1, 0, kMaxInprocRanks + 1, std::numeric_limits<int>::max()}) {
    const absl::Status status = run_ranks(num_ranks, [](World&) {});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(contains(status, str_cat("is ", num_ranks, ": wanted 1 to 4096"))) << status;
  }
}

TEST(RunRanksTest, AFailureEndsAllAndIsTheResult) {
  std::atomic<int> told{0};
  const absl::Status status = run_ranks(4, [&](World& world) -> absl::Status {
    if (world.rank() == 2) return absl::DataLossError("torn file");
    const absl::Status others = wait_for_others(world);
    EXPECT_EQ(others.code(), absl::StatusCode::kAborted);
    EXPECT_TRUE(contains(others, "rank 2 failed: DATA_LOSS: torn file")) << others;
    told.fetch_add(1);
    return others;
  });
  EXPECT_EQ(told.load(), 3);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "rank 2: torn file");
}

TEST(RunRanksTest, AnExceptionIsAFailure) {
  const absl::Status status = run_ranks(2, [](World& world) {
    if (world.rank() == 1) throw std::runtime_error("no such layer");
    EXPECT_EQ(wait_for_others(world).code(), absl::StatusCode::kAborted);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(contains(status, "rank 1: exception: no such layer")) << status;

  // As dtensor's Error does: what() begins with the function that was called.
  class Error : public std::runtime_error, public StatusException {
   public:
    Error() : std::runtime_error("redistribute: no such dimension") {}
    const absl::Status& status() const override { return status_; }

   private:
    const absl::Status status_ = absl::InvalidArgumentError("no such dimension");
  };
  const absl::Status coded = run_ranks(2, [](World& world) {
    if (world.rank() == 1) throw Error();
    const absl::Status others = wait_for_others(world);
    EXPECT_TRUE(contains(others, "rank 1 failed: INVALID_ARGUMENT: redistribute: no such"))
        << others;
  });
  EXPECT_EQ(coded.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(coded.message(), "rank 1: redistribute: no such dimension");

  // c10::Error: not its backtrace, here and where the others hear of it.
  const absl::Status torn = run_ranks(2, [](World& world) {
    if (world.rank() == 1) {
      throw std::runtime_error(
          "sizes differ\nby two\nException raised from mm at m.cc:7 (most recent call first):\n"
          "frame #0: c10::Error::Error + 0x9d (0x7f in libc10.so)\n");
    }
    const absl::Status others = wait_for_others(world);
    EXPECT_TRUE(absl::EndsWith(others.message(), "sizes differ\nby two")) << others;
  });
  EXPECT_EQ(torn.message(), "rank 1: exception: sizes differ\nby two");

  const absl::Status strange = run_ranks(2, [](World& world) {
    if (world.rank() == 0) throw 7;
  });
  EXPECT_EQ(strange.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(contains(strange, "rank 0")) << strange;
}

// In a group that is made after the failure, too.
TEST(RunRanksTest, AFailureReachesEveryGroup) {
  const absl::Status status = run_ranks(3, [](World& world) -> absl::Status {
    if (world.rank() == 2) return absl::DataLossError("torn file");
    if (world.rank() == 1) absl::SleepFor(absl::Milliseconds(50));
    auto pair = world.comm()->subgroup({0, 1, 2}, "late");
    const absl::Status others = pair.ok() ? (*pair)->barrier().wait() : pair.status();
    EXPECT_EQ(others.code(), absl::StatusCode::kAborted);
    EXPECT_TRUE(contains(others, "rank 2 failed")) << others;
    return absl::OkStatus();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
}

// A body that ends well too early leaves the others no less stuck.
TEST(RunRanksTest, ARankThatHasEndedIsNotWaitedFor) {
  std::shared_ptr<Communicator> kept;  // so that it does not leave by its destructor
  const absl::Status status = run_ranks(2, [&](World& world) -> absl::Status {
    if (world.rank() == 1) {
      kept = world.comm();
      return absl::OkStatus();
    }
    auto group = world.comm()->subgroup({1, 0}, "turned");
    if (!group.ok()) return group.status();
    const absl::Status alone = (*group)->barrier().wait();
    EXPECT_EQ(alone.code(), absl::StatusCode::kUnavailable);
    EXPECT_TRUE(contains(alone, "rank 0 (world rank 1), which has left")) << alone;
    return wait_for_others(world);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(contains(status, "rank 0: ")) << status;
}

TEST(RunRanksTest, TheTimeoutIsTheDefaultDeadline) {
  std::atomic<bool> done{false};
  const auto body = [&](World& world) -> absl::Status {
    if (world.rank() == 1) {
      while (!done.load()) absl::SleepFor(absl::Milliseconds(1));
      return absl::OkStatus();
    }
    const absl::Status alone = wait_for_others(world);
    done.store(true);
    return alone;
  };
  const absl::Time begin = absl::Now();
  const absl::Status status = run_ranks(2, body, {.timeout = absl::Milliseconds(100)});
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
}

TEST(RunRanksTest, WorldsInOneProcessAreIndependent) {
  const absl::Status status = run_ranks(2, [](World& outer) -> absl::Status {
    const absl::Status inner = run_ranks(3, [](World& world) -> absl::Status {
      if (world.rank() == 0) return absl::DataLossError("inside");
      return wait_for_others(world);
    });
    EXPECT_EQ(inner.code(), absl::StatusCode::kDataLoss);
    return wait_for_others(outer);
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace shardweave

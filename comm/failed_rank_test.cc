#include "shardweave/comm/failed_rank.h"

#include <atomic>
#include <optional>
#include <string>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/world.h"

namespace shardweave {
namespace {

TEST(FailedRankTest, IsCarriedByAStatus) {
  const absl::Status plain = absl::AbortedError("no");
  EXPECT_EQ(failed_rank(plain), std::nullopt);
  EXPECT_EQ(failed_rank(retold(plain, "not")), std::nullopt);
  const absl::Status third = of_rank(plain, 3);
  EXPECT_EQ(failed_rank(third), 3);
  EXPECT_EQ(third.message(), "no");
  const absl::Status again = retold(third, "it says: no");
  EXPECT_EQ(again.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(again.message(), "it says: no");
  EXPECT_EQ(failed_rank(again), 3);
  EXPECT_EQ(failed_rank(of_rank(absl::OkStatus(), 1)), std::nullopt);
}

// Whose failure it is, and what the others hear of it.
TEST(FailedRankTest, OfRanksThatAreThreads) {
  std::optional<int> heard;
  const absl::Status failed = run_ranks(3, [&](World& world) -> absl::Status {
    if (world.rank() == 2) return absl::DataLossError("gone bad");
    const absl::Status status = world.comm()->barrier().wait();
    if (world.rank() == 0) heard = failed_rank(status);
    return status;
  });
  EXPECT_EQ(failed_rank(failed), 2) << failed;
  EXPECT_EQ(heard, 2);
}

TEST(FailedRankTest, OfWhoAborts) {
  std::optional<int> heard[2];
  run_ranks(2, [&](World& world) -> absl::Status {
    if (world.rank() == 1) world.comm()->abort(absl::AbortedError("enough"));
    heard[world.rank()] = failed_rank(world.comm()->barrier().wait());
    return absl::OkStatus();
  }).IgnoreError();
  EXPECT_EQ(heard[0], 1);
  EXPECT_EQ(heard[1], 1);
}

TEST(FailedRankTest, OfWhoIsLate) {
  for (const bool by_message : {false, true}) {
    std::optional<int> heard[2];
    std::atomic<bool> is_over{false};
    run_ranks(2, [&](World& world) -> absl::Status {
      Communicator& comm = *world.comm();
      while (world.rank() == 1 && !is_over) absl::SleepFor(absl::Milliseconds(1));
      const CallOptions options{.timeout = absl::Milliseconds(50)};
      float x = 0;
      const bool receives = by_message && world.rank() == 0;
      heard[world.rank()] =
          failed_rank(receives ? comm.recv(Buffer::of(&x, 1), 1, 0, options).wait()
                               : comm.barrier(options).wait());
      is_over = true;
      return absl::OkStatus();
    }).IgnoreError();
    EXPECT_EQ(heard[0], 1) << by_message;
    EXPECT_EQ(heard[1], 1) << by_message;
  }
}

TEST(FailedRankTest, OfWhoLeaves) {
  std::optional<int> heard;
  run_ranks(2, [&](World& world) -> absl::Status {
    if (world.rank() == 0) heard = failed_rank(world.comm()->barrier().wait());
    return absl::OkStatus();
  }).IgnoreError();
  EXPECT_EQ(heard, 1);
}

}  // namespace
}  // namespace shardweave

// What goes wrong while ranks are being connected is said on every rank, at once.
#include "shardweave/comm/gloo/mesh.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/store/in_process_store.h"

namespace shardweave::gloo_internal {
namespace {

// Ranks that are threads; what each of them got. `before` is called by each when it begins.
std::vector<absl::Status> connect_all(
    int size, const std::function<ConnectOptions(int rank)>& options,
    absl::Duration timeout = absl::Seconds(60), const std::function<void(int rank)>& before = {},
    const std::shared_ptr<Store>& store = make_in_process_store()) {
  const Deadline deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout);
  std::vector<absl::Status> results(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      if (before) before(rank);
      GroupInfo group{.name = "world", .rank = rank, .world_ranks = std::vector<int64_t>(size)};
      std::iota(group.world_ranks.begin(), group.world_ranks.end(), 0);
      results[rank] = connect_mesh(*store, "run", group, options(rank), deadline).status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

void expect_everywhere(const std::vector<absl::Status>& results, absl::StatusCode code,
                       const std::vector<std::string>& parts) {
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), code) << status;
    for (const std::string& part : parts) {
      EXPECT_TRUE(absl::StrContains(std::string(status.message()), part))
          << "want '" << part << "' in: " << status;
    }
  }
}

TEST(ConnectMeshTest, RanksOfOneHostMeetOnLoopback) {
  for (const absl::Status& status : connect_all(3, [](int) { return ConnectOptions(); })) {
    EXPECT_TRUE(status.ok()) << status;
  }
}

// As on Debian and Ubuntu, where the host's name is 127.0.1.1 in /etc/hosts.
TEST(ConnectMeshTest, ANameThatLeadsToLoopbackIsSaidEverywhere) {
  const absl::Time begin = absl::Now();
  const std::vector<absl::Status> results = connect_all(3, [](int rank) -> ConnectOptions {
    if (rank == 1) return {.host = "another machine", .host_name = "127.0.1.1"};
    return {.interface = "lo"};
  });
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  expect_everywhere(results, absl::StatusCode::kFailedPrecondition,
                    {"rank 1 (world rank 1)", "several hosts", "127.0.1.1", "name the network"});
}

TEST(ConnectMeshTest, ANameWithoutAddressIsSaidEverywhere) {
  const absl::Time begin = absl::Now();
  const std::vector<absl::Status> results = connect_all(3, [](int rank) -> ConnectOptions {
    if (rank == 2) return {.host = "another machine", .host_name = "no such host"};
    return {.interface = "lo"};
  });
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  expect_everywhere(results, absl::StatusCode::kFailedPrecondition,
                    {"rank 2 (world rank 2)", "'no such host'", "has no address"});
}

TEST(ConnectMeshTest, AnInterfaceThatOneRankLacksIsSaidEverywhere) {
  const absl::Time begin = absl::Now();
  const std::vector<absl::Status> results = connect_all(
      3, [](int rank) { return ConnectOptions{.interface = rank == 0 ? "abacus7" : "lo"}; });
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  expect_everywhere(results, absl::StatusCode::kInvalidArgument,
                    {"rank 0 (world rank 0)", "no network interface 'abacus7'"});
}

TEST(ConnectMeshTest, AnotherBuildIsSaidEverywhere) {
  const std::vector<absl::Status> results = connect_all(
      2, [](int rank) { return ConnectOptions{.build = rank == 0 ? "protocol 1" : "protocol 2"}; });
  expect_everywhere(results, absl::StatusCode::kFailedPrecondition,
                    {"different builds", "\"protocol 1\"", "\"protocol 2\""});
}

TEST(ConnectMeshTest, WhoeverIsTiredOfWaitingSaysForWhomOnce) {
  constexpr absl::Duration kPatience = absl::Milliseconds(200);
  // How often each rank has looked since its patience has passed: the second time it has said so.
  std::vector<std::atomic<int>> looks(3);
  testing::internal::CaptureStderr();
  const std::vector<absl::Status> results = connect_all(
      3,
      [&](int rank) {
        return ConnectOptions{.watch =
                                  [&, rank, began = absl::Now()](const auto&) {
                                    if (absl::Now() - began >= 2 * kPatience) ++looks[rank];
                                    return absl::OkStatus();
                                  },
                              .patience = kPatience};
      },
      absl::Seconds(60),
      [&](int rank) {
        while (rank == 1 && (looks[0] < 2 || looks[2] < 2)) absl::SleepFor(absl::Milliseconds(5));
      });
  const std::string said = testing::internal::GetCapturedStderr();
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
  for (const char* rank : {"0", "2"}) {
    const std::string line = std::string("shardweave: rank ") + rank +
                             " of 3 of group 'world' has waited 200ms for rank 1 (world rank 1)";
    const size_t at = said.find(line);
    EXPECT_NE(at, std::string::npos) << said;
    EXPECT_EQ(said.find(line, at + 1), std::string::npos) << "once: " << said;
  }
}

// As a store over TCP, where each look of one that waits is a request; and how many keys were asked
// for.
class CountingStore : public Store {
 public:
  std::string describe() const override { return "counting store"; }
  int64_t asked() const { return asked_; }

 private:
  absl::Status do_set(std::string_view key, std::string_view value) override {
    return store_->set(key, value);
  }
  absl::StatusOr<std::string> do_get(std::string_view key, absl::Duration timeout) override {
    ++asked_;
    return store_->get(key, timeout);
  }
  absl::StatusOr<int64_t> do_add(std::string_view key, int64_t delta) override {
    return store_->add(key, delta);
  }
  absl::Status do_wait(const std::vector<std::string>& keys, absl::Duration timeout) override {
    const absl::Time deadline = absl::Now() + timeout;
    for (absl::Duration pause = absl::Milliseconds(1);; pause *= 2) {
      if (do_check(keys).value_or(false)) return absl::OkStatus();
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) return absl::DeadlineExceededError("not there");
      absl::SleepFor(std::min(pause, left));
    }
  }
  absl::StatusOr<bool> do_check(const std::vector<std::string>& keys) override {
    asked_ += static_cast<int64_t>(keys.size());
    return store_->check(keys);
  }
  absl::StatusOr<bool> do_remove(std::string_view key) override { return store_->remove(key); }

  const std::shared_ptr<Store> store_ = make_in_process_store();
  std::atomic<int64_t> asked_ = 0;
};

TEST(ConnectMeshTest, WaitingAsksTheStoreForLittle) {
  constexpr int kSize = 8;
  const auto store = std::make_shared<CountingStore>();
  const absl::Time begin = absl::Now();
  const std::vector<absl::Status> results = connect_all(
      kSize, [](int) { return ConnectOptions(); }, absl::Seconds(60),
      [](int rank) {
        if (rank == 3) absl::SleepFor(absl::Seconds(2));
      },
      store);
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
  // Each key twice in each of three exchanges; and what comes of waiting, whatever the size.
  const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  EXPECT_LT(store->asked(), kSize * (3 * 2 * kSize + 60 + 30 * seconds));
}

TEST(ConnectMeshTest, StopsWhenTheWatchKnowsBetter) {
  const absl::Time begin = absl::Now();
  const std::vector<absl::Status> results = connect_all(
      2,
      [&](int) {
        return ConnectOptions{.watch = [&](const ConnectOptions::Missing& missing) {
          (void)missing();
          if (absl::Now() - begin < absl::Milliseconds(250)) return absl::OkStatus();
          return absl::DataLossError("it will not come");
        }};
      },
      absl::Seconds(60),
      [](int rank) {
        if (rank == 1) absl::SleepFor(absl::Milliseconds(600));
      });
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  expect_everywhere(results, absl::StatusCode::kDataLoss, {"it will not come"});
}

TEST(ConnectMeshTest, ErrorsSayWhichRankFailed) {
  const std::vector<absl::Status> watched = connect_all(2, [](int) {
    return ConnectOptions{
        .watch = [](const auto&) { return of_rank(absl::UnavailableError("it has left"), 5); }};
  });
  for (const absl::Status& status : watched) EXPECT_EQ(failed_rank(status), 5) << status;
  const std::vector<absl::Status> told = connect_all(
      3, [](int rank) { return ConnectOptions{.interface = rank == 1 ? "abacus7" : "lo"}; });
  for (const int rank : {0, 2}) EXPECT_EQ(failed_rank(told[rank]), 1) << told[rank];
}

// What stands there is a code, a rank and words; a key that somebody else has written is no "all is well".
TEST(ConnectMeshTest, AnErrorThatIsNoStatusIsOne) {
  for (const std::string written : {"", "out of memory", "0 all is well"}) {
    const auto store = make_in_process_store();
    ASSERT_TRUE(store->set("run/error", written).ok());
    const std::vector<absl::Status> results = connect_all(
        2, [](int) { return ConnectOptions(); }, absl::Seconds(60),
        [](int rank) {
          if (rank == 1) absl::SleepFor(absl::Milliseconds(600));
        },
        store);
    expect_everywhere(results, absl::StatusCode::kUnknown, {"run/error", "'" + written + "'"});
  }
}

}  // namespace
}  // namespace shardweave::gloo_internal

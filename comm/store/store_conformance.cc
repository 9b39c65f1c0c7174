#include "shardweave/comm/store/store_conformance.h"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"

namespace shardweave {

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(StoreConformance);

namespace {

using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;

constexpr absl::Duration kLong = absl::Seconds(30);
constexpr absl::Duration kShort = absl::Milliseconds(60);
constexpr int kClients = 4;

std::string message(const absl::Status& status) {
  return std::string(status.message());
}

void run_clients(const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

TEST_P(StoreConformance, GetReturnsWhatWasSet) {
  ASSERT_TRUE(store_->set("key", "value").ok());
  EXPECT_EQ(store_->get("key", kLong).value(), "value");
  ASSERT_TRUE(store_->set("key", "other").ok());
  EXPECT_EQ(store_->get("key", absl::ZeroDuration()).value(), "other");
}

TEST_P(StoreConformance, KeysAndValuesAreAnyBytes) {
  const std::vector<std::string> odd = {
      std::string("\0\xff\n", 3), "a/b", "a/", "..", ".",     "a%2Fb", "a b", "ключ",
      std::string(300, 'k'),      "/a",  "A",  "a",  "a.tmp", "lock",  "%",   "-"};
  for (const std::string& bytes : odd) {
    ASSERT_TRUE(store_->set(bytes, absl::StrCat("value of ", bytes)).ok()) << bytes;
  }
  for (const std::string& bytes : odd) {
    EXPECT_EQ(store_->get(bytes, absl::ZeroDuration()).value(), absl::StrCat("value of ", bytes));
  }
  ASSERT_TRUE(store_->set("empty", "").ok());
  EXPECT_EQ(store_->get("empty", absl::ZeroDuration()).value(), "");
  const std::string large(1 << 20, 'x');
  ASSERT_TRUE(store_->set("large", large).ok());
  EXPECT_EQ(store_->get("large", kLong).value(), large);
}

TEST_P(StoreConformance, EmptyKeyIsInvalid) {
  for (const absl::Status& status : {store_->set("", "x"), store_->get("", kLong).status(),
                                     store_->add("", 1).status(), store_->wait({"a", ""}, kLong),
                                     store_->check({""}).status(), store_->remove("").status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(message(status), HasSubstr("empty string is not a key"));
    EXPECT_THAT(message(status), HasSubstr(store_->describe()));
  }
}

TEST_P(StoreConformance, GetGivesUpAtTheDeadline) {
  const absl::Time start = absl::Now();
  const absl::Status status = store_->get("never", kShort).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(message(status), HasSubstr("never\""));
  EXPECT_THAT(message(status), HasSubstr("60ms"));
  EXPECT_GE(absl::Now() - start, kShort);
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  // And goes on working.
  ASSERT_TRUE(store_->set("never", "late").ok());
  EXPECT_EQ(store_->get("never", kShort).value(), "late");
}

TEST_P(StoreConformance, GetWaitsForAnotherClient) {
  std::thread setter([store = clients_(1)] {
    absl::SleepFor(kShort);
    EXPECT_TRUE(store->set("later", "here").ok());
  });
  EXPECT_EQ(store_->get("later", kLong).value(), "here");
  setter.join();
}

TEST_P(StoreConformance, WaitNamesOnlyTheMissingKeys) {
  ASSERT_TRUE(store_->set("there", "1").ok());
  EXPECT_TRUE(store_->wait({}, absl::ZeroDuration()).ok());
  EXPECT_TRUE(store_->wait({"there"}, absl::ZeroDuration()).ok());
  const absl::Status status = store_->wait({"there", "absent", "gone"}, kShort);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(message(status), MatchesRegex(".*absent\", .*gone\""));
  EXPECT_THAT(message(status), Not(HasSubstr("there\"")));
}

TEST_P(StoreConformance, CheckDoesNotWait) {
  EXPECT_TRUE(store_->check({}).value());
  EXPECT_FALSE(store_->check({"a"}).value());
  ASSERT_TRUE(store_->set("a", "").ok());
  EXPECT_TRUE(store_->check({"a"}).value());
  EXPECT_FALSE(store_->check({"a", "b"}).value());
}

TEST_P(StoreConformance, RemoveSaysWhetherTheKeyWasThere) {
  EXPECT_FALSE(store_->remove("a").value());
  ASSERT_TRUE(store_->set("a", "1").ok());
  EXPECT_TRUE(store_->remove("a").value());
  EXPECT_FALSE(store_->check({"a"}).value());
  EXPECT_FALSE(store_->remove("a").value());
}

TEST_P(StoreConformance, AddCounts) {
  EXPECT_EQ(store_->add("n", 0).value(), 0);
  EXPECT_EQ(store_->add("n", 5).value(), 5);
  EXPECT_EQ(store_->add("n", -7).value(), -2);
  EXPECT_EQ(store_->get("n", kLong).value(), "-2");
  EXPECT_TRUE(store_->check({"n"}).value());
  ASSERT_TRUE(store_->set("m", "40").ok());
  EXPECT_EQ(store_->add("m", 2).value(), 42);
}

TEST_P(StoreConformance, AddRefusesWhatIsNoNumber) {
  ASSERT_TRUE(store_->set("text", "seven").ok());
  const absl::Status status = store_->add("text", 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(message(status), HasSubstr("text\""));
  EXPECT_THAT(message(status), HasSubstr("\"seven\" is not a decimal number"));
  EXPECT_EQ(store_->get("text", kLong).value(), "seven");
}

TEST_P(StoreConformance, AddIsAtomicAmongClients) {
  constexpr int kAdds = 50;
  run_clients([&](int i) {
    std::shared_ptr<Store> store = clients_(i);
    for (int n = 0; n < kAdds; ++n) ASSERT_TRUE(store->add("sum", i + 1).ok());
  });
  EXPECT_EQ(store_->add("sum", 0).value(), kAdds * kClients * (kClients + 1) / 2);
}

TEST_P(StoreConformance, ReadersNeverSeeHalfAValue) {
  constexpr size_t kSize = 100'000;
  ASSERT_TRUE(store_->set("v", std::string(kSize, 'a')).ok());
  std::atomic<bool> stop = false;
  std::thread writer([&, store = clients_(1)] {
    for (int n = 0; n < 50; ++n) {
      ASSERT_TRUE(store->set("v", std::string(kSize, n % 2 == 0 ? 'b' : 'a')).ok());
    }
    stop = true;
  });
  while (!stop) {
    const std::string value = store_->get("v", kLong).value();
    EXPECT_EQ(value, std::string(kSize, value.at(0)));
  }
  writer.join();
}

TEST_P(StoreConformance, ClientsMeetAtABarrier) {
  std::atomic<int> arrived = 0;
  run_clients([&](int i) {
    std::shared_ptr<Store> store = clients_(i);
    for (int round = 0; round < 5; ++round) {
      ++arrived;
      const std::string prefix = absl::StrCat("round", round, "/");
      ASSERT_TRUE(store->set(absl::StrCat(prefix, i), "here").ok());
      std::vector<std::string> all;
      for (int peer = 0; peer < kClients; ++peer) all.push_back(absl::StrCat(prefix, peer));
      ASSERT_TRUE(store->wait(all, kLong).ok());
      EXPECT_GE(arrived, kClients * (round + 1));
    }
  });
}

TEST_P(StoreConformance, AWaitingClientStopsNobody) {
  std::thread waiter([store = clients_(1)] { EXPECT_TRUE(store->get("go", kLong).ok()); });
  const absl::Time start = absl::Now();
  for (int n = 0; n < 10; ++n) ASSERT_TRUE(store_->set(absl::StrCat("k", n), "v").ok());
  ASSERT_TRUE(store_->set("go", "").ok());
  waiter.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

// Two threads that make groups in opposite order wait for each other's keys.
TEST_P(StoreConformance, AWaitingThreadStopsNoOtherThread) {
  const absl::Time start = absl::Now();
  std::thread waiter([&] { EXPECT_TRUE(store_->get("go", absl::Seconds(20)).ok()); });
  std::thread other([&] {
    EXPECT_TRUE(store_->get("gone", absl::Seconds(20)).ok());
    EXPECT_TRUE(store_->set("go", "").ok());
  });
  absl::SleepFor(absl::Milliseconds(200));  // both wait by now
  EXPECT_FALSE(store_->check({"absent"}).value());
  ASSERT_TRUE(store_->set("gone", "").ok());
  waiter.join();
  other.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

}  // namespace
}  // namespace shardweave

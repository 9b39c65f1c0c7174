#include "shardweave/modules/checkpoint/read_ahead.h"

#include <algorithm>
#include <atomic>
#include <latch>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "shardweave/modules/checkpoint/file_system.h"

namespace shardweave::checkpoint_internal {
namespace {

TEST(ReadAheadTest, AllAreDoneAndSeveralAtOnce) {
  std::latch together(ReadAhead::kThreads);
  std::atomic<int> done = 0;
  std::vector<ReadAhead::Read> reads;
  for (int i = 0; i < 100; ++i) {
    reads.emplace_back([&, i](absl::Span<char> through) {
      EXPECT_EQ(through.size(), ReadAhead::kThrough);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(through.data()) % kFilePage, 0U);
      std::fill(through.begin(), through.end(), static_cast<char>(i));
      if (i < static_cast<int>(ReadAhead::kThreads)) together.arrive_and_wait();
      EXPECT_TRUE(std::all_of(through.begin(), through.end(),
                              [&](char byte) { return byte == static_cast<char>(i); }));
      ++done;
      return absl::OkStatus();
    });
  }
  ReadAhead ahead(std::move(reads));
  for (const size_t i : {size_t{99}, size_t{0}, size_t{50}}) EXPECT_TRUE(ahead.wait_for(i).ok());
  for (size_t i = 0; i < 100; ++i) EXPECT_TRUE(ahead.wait_for(i).ok());
  EXPECT_EQ(done, 100);
}

TEST(ReadAheadTest, NothingBeginsAfterAFailure) {
  std::latch failed(1);
  std::atomic<int> begun = 0;
  std::vector<ReadAhead::Read> reads;
  for (int i = 0; i < 1000; ++i) {
    reads.emplace_back([&, i](absl::Span<char>) -> absl::Status {
      ++begun;
      if (i == 3) {
        failed.count_down();
        return absl::DataLossError("the fourth");
      }
      failed.wait();
      // Before it is known elsewhere that one has failed, a few more begin.
      if (i > 3) absl::SleepFor(absl::Milliseconds(5));
      if (i == 2) throw std::bad_alloc();
      return absl::OkStatus();
    });
  }
  ReadAhead ahead(std::move(reads));
  EXPECT_TRUE(ahead.wait_for(0).ok());
  EXPECT_EQ(ahead.wait_for(2).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ahead.wait_for(3).message(), "the fourth");
  EXPECT_FALSE(ahead.wait_for(999).ok());
  const int then = begun;  // but for those that threads were about to begin
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_LE(begun, then + static_cast<int>(ReadAhead::kThreads));
}

TEST(ReadAheadTest, WhatIsNotWantedIsNotDone) {
  std::latch go(1);
  std::atomic<int> begun = 0;
  std::thread later;
  {
    std::vector<ReadAhead::Read> reads;
    for (int i = 0; i < 1000; ++i) {
      reads.emplace_back([&](absl::Span<char>) {
        if (++begun > static_cast<int>(ReadAhead::kThreads)) absl::SleepFor(absl::Milliseconds(5));
        go.wait();
        return absl::OkStatus();
      });
    }
    ReadAhead ahead(std::move(reads));
    while (begun < static_cast<int>(ReadAhead::kThreads)) std::this_thread::yield();
    later = std::thread([&] { go.count_down(); });
  }
  later.join();
  EXPECT_LT(begun, 1000);
}

TEST(ReadAheadTest, Nothing) {
  ReadAhead ahead({});
}

}  // namespace
}  // namespace shardweave::checkpoint_internal

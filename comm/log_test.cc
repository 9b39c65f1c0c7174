#include "shardweave/comm/log.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace shardweave {
namespace {

TEST(LogTest, GoesWhereItIsTold) {
  testing::internal::CaptureStderr();
  say("one");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "shardweave: one\n");
  const auto lines = std::make_shared<std::vector<std::string>>();
  testing::internal::CaptureStderr();
  set_log([lines](std::string_view line) { lines->emplace_back(line); });
  say("two");
  EXPECT_EQ(lines.use_count(), 2);
  // One that replaces itself while it is called lives until the call ends.
  set_log([lines](std::string_view) {
    set_log(nullptr);
    lines->emplace_back("the last");
  });
  say("three");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(*lines, (std::vector<std::string>{"two", "the last"}));
  EXPECT_EQ(lines.use_count(), 1);
  testing::internal::CaptureStderr();
  say("four");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "shardweave: four\n");
}

// Threads speak, and others say where to, all at once: each line is said once, whole, and a place
// ends when the last thread has left it. (What ThreadSanitizer is for: --config=tsan.)
TEST(LogTest, IsSetWhileThreadsSpeak) {
  constexpr int kLines = 2000, kSpeakers = 3, kSetters = 2;
  struct Place {
    explicit Place(std::atomic<int>& lines_in, std::atomic<int>& ended_in)
        : lines(lines_in), ended(ended_in) {}
    ~Place() { ended.fetch_add(1); }
    std::atomic<int>& lines;
    std::atomic<int>& ended;
  };
  std::atomic<int> lines{0}, ended{0}, made{0}, speaking{kSpeakers};
  const auto set = [&] {
    made.fetch_add(1);
    set_log([place = std::make_shared<Place>(lines, ended)](std::string_view line) {
      EXPECT_EQ(line, "a line");
      place->lines.fetch_add(1);
    });
  };
  set();
  std::vector<std::thread> threads;
  for (int i = 0; i < kSpeakers; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < kLines; ++n) say("a line");
      speaking.fetch_sub(1);
    });
  }
  for (int i = 0; i < kSetters; ++i) {
    threads.emplace_back([&] {
      while (speaking.load() > 0) set();
    });
  }
  for (std::thread& thread : threads) thread.join();
  set_log(nullptr);
  EXPECT_EQ(lines.load(), kLines * kSpeakers);
  EXPECT_EQ(ended.load(), made.load());
  EXPECT_FALSE(has_log());
}

}  // namespace
}  // namespace shardweave

#include "shardweave/comm/log.h"

#include <memory>
#include <string>
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

}  // namespace
}  // namespace shardweave

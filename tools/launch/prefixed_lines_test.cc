#include "shardweave/tools/launch/prefixed_lines.h"

#include <random>

#include "gtest/gtest.h"

namespace shardweave {
namespace {

TEST(PrefixedLinesTest, ExampleOfTheHeader) {
  PrefixedLines lines("[3] ");
  EXPECT_EQ(lines.feed("loss 2."), "");
  EXPECT_EQ(lines.feed("17\nstep 8"), "[3] loss 2.17\n");
  EXPECT_EQ(lines.finish(), "[3] step 8\n");
  EXPECT_EQ(lines.finish(), "");
}

TEST(PrefixedLinesTest, EmptyLinesCount) {
  PrefixedLines lines("> ");
  EXPECT_EQ(lines.feed("\n\na\n"), "> \n> \n> a\n");
  EXPECT_EQ(lines.feed(""), "");
  EXPECT_EQ(lines.finish(), "");
}

TEST(PrefixedLinesTest, AnyPiecesGiveTheSame) {
  std::mt19937 random(1);
  std::string text;
  for (int i = 0; i < 300; ++i) text += random() % 4 == 0 ? '\n' : static_cast<char>('a' + i % 26);
  PrefixedLines whole("p");
  std::string expected = whole.feed(text);
  expected += whole.finish();
  for (int round = 0; round < 50; ++round) {
    PrefixedLines lines("p");
    std::string result;
    for (size_t at = 0; at < text.size();) {
      const size_t size = 1 + random() % 9;
      result += lines.feed(std::string_view(text).substr(at, size));
      at += size;
    }
    result += lines.finish();
    EXPECT_EQ(result, expected);
  }
}

TEST(PrefixedLinesTest, EndlessLinesAreCut) {
  PrefixedLines lines("> ");
  const std::string cut = "> " + std::string(PrefixedLines::kMaxLine, 'x') + "\n";
  EXPECT_EQ(lines.feed(std::string(2 * PrefixedLines::kMaxLine + 3, 'x')), cut + cut);
  EXPECT_EQ(lines.finish(), "> xxx\n");
}

TEST(PrefixedLinesTest, NewlineAfterALineOfTheLargestSize) {
  PrefixedLines lines("> ");
  lines.feed(std::string(PrefixedLines::kMaxLine - 1, 'x'));
  EXPECT_EQ(lines.feed("\n").size(), 2 + PrefixedLines::kMaxLine);
  EXPECT_EQ(lines.finish(), "");
}

}  // namespace
}  // namespace shardweave

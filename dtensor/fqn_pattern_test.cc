#include "shardweave/dtensor/fqn_pattern.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardweave {
namespace {

FqnPattern parsed(std::string_view text) {
  absl::StatusOr<FqnPattern> pattern = FqnPattern::parse(text);
  EXPECT_TRUE(pattern.ok()) << text << ": " << pattern.status();
  return pattern.ok() ? *std::move(pattern) : FqnPattern();
}

TEST(FqnPatternTest, SpeaksOfTheWholeName) {
  struct Case {
    const char* pattern;
    std::vector<std::string> matches, others;
  };
  const Case cases[] = {
      {"a.b", {"a.b"}, {"", "a", "a.b.", "xa.b", "a-b"}},
      {"", {""}, {"a"}},
      {"*", {"", "a", "a.b"}, {}},
      {"**", {"", "a.b"}, {}},
      {"blocks.?.n*", {"blocks.1.norm", "blocks.1.n"}, {"blocks.10.norm", "blocks..norm"}},
      {"*.{q,k}.weight",
       {"blocks.0.attn.k.weight", ".q.weight"},
       {"blocks.0.attn.o.weight", "q.weight", "a.qk.weight"}},
      {"{a,ab,}c", {"c", "ac", "abc"}, {"bc", "aabc"}},
      {"*a*a", {"aa", "baba"}, {"a", "ab"}},
      {"re:h\\.[0-9]+\\.w", {"h.0.w", "h.12.w"}, {"h.x.w", "xh.0.w", "h.0.ww"}},
      {"re:(q|k)_proj", {"q_proj", "k_proj"}, {"v_proj"}},
      {"re:", {""}, {"a"}},
  };
  for (const Case& c : cases) {
    const FqnPattern pattern = parsed(c.pattern);
    for (const std::string& fqn : c.matches) {
      EXPECT_TRUE(pattern.matches(fqn)) << c.pattern << " " << fqn;
      EXPECT_TRUE(matches_fqn(c.pattern, fqn)) << c.pattern << " " << fqn;
    }
    for (const std::string& fqn : c.others) {
      EXPECT_FALSE(pattern.matches(fqn)) << c.pattern << " " << fqn;
      EXPECT_FALSE(matches_fqn(c.pattern, fqn)) << c.pattern << " " << fqn;
    }
  }
}

TEST(FqnPatternTest, SaysWhatIsNoPattern) {
  const std::pair<const char*, const char*> cases[] = {
      {"{a", "has a '{' without a '}' behind it"}, {"a}", "has a '}' without a '{' before it"},
      {"{a,{b}}", "has a '{' inside of '{...}'"},  {"{*.a,b}", "has a wildcard inside of '{...}'"},
      {"re:(a", "is no regular expression: "},     {"re:[z-a]", "is no regular expression: "},
  };
  for (const auto& [text, why] : cases) {
    const absl::Status status = FqnPattern::parse(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(why)) << text;
    EXPECT_FALSE(matches_fqn(text, "a"));
  }
}

TEST(FqnPatternTest, TheMoreSpecificIsGreater) {
  const char* ascending[] = {"re:.*weight", "*",           "*.q",        "*.{q,k}.bias",
                             "*.q.bias",    "*h.0.q.bia?", "h.0.q.bia?", "q"};
  for (size_t i = 0; i + 1 < std::size(ascending); ++i) {
    EXPECT_LT(parsed(ascending[i]).specificity(), parsed(ascending[i + 1]).specificity())
        << ascending[i] << " " << ascending[i + 1];
  }
  const std::pair<const char*, const char*> equal[] = {
      {"re:a", "re:.*"}, {"a*", "*b"}, {"a.b", "c"}, {"{a,bcd}", "?e"}};
  for (const auto& [a, b] : equal) {
    // Exact names are told apart by what they match.
    EXPECT_EQ(parsed(a).specificity().kind, parsed(b).specificity().kind) << a << " " << b;
  }
  EXPECT_EQ(parsed("a*").specificity(), parsed("*b").specificity());
  EXPECT_EQ(parsed("re:abc").specificity(), parsed("re:.*").specificity());
}

TEST(FqnPatternTest, DistanceCountsEditsPastWildcards) {
  const auto distance = [](const char* pattern, const char* fqn) {
    return parsed(pattern).distance(fqn, 5);
  };
  EXPECT_EQ(distance("*.q_proj.weight", "h.0.q_proj.weight"), 0);
  EXPECT_EQ(distance("*.q_porj.weight", "h.0.q_proj.weight"), 2);
  EXPECT_EQ(distance("*.q_proj.weigh", "h.0.q_proj.weight"), 1);
  EXPECT_EQ(distance("*.{up,down}.weight", "mlp.dwn.weight"), 1);
  EXPECT_EQ(distance("h.?.b", "h.3.bias"), 3);
  EXPECT_EQ(distance("abc", ""), 3);
  EXPECT_EQ(distance("", "abcdefgh"), 6);  // more than the limit
  EXPECT_EQ(distance("re:abc", "abc"), 6);
}

// Depth first this is 2^50 steps.
TEST(FqnPatternTest, NoRegularExpressionTakesForEver) {
  EXPECT_FALSE(parsed("re:(a+)+b").matches(std::string(50, 'a')));
  EXPECT_FALSE(parsed("*a*a*a*a*a*a*a*a*a*a*a*a*b").matches(std::string(200, 'a')));
}

}  // namespace
}  // namespace shardweave

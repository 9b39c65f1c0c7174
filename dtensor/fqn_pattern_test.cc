#include "shardweave/dtensor/fqn_pattern.h"

#include <ctime>
#include <regex>
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
      {"x{a}y", {"xay"}, {"x", "xa", "xy", "xbay"}},
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

// What is compared before the regular expression never decides otherwise than that.
TEST(FqnPatternTest, RegularExpressionsMatchAsTheirLibraryDoes) {
  const std::vector<std::string> bodies = {"h\\.[0-9]+\\.w",
                                           "a",
                                           "a+",
                                           "a*b",
                                           "ab*",
                                           "ab?c",
                                           "ab{2}c",
                                           "ab{0,1}",
                                           "(ab)?c",
                                           "(ab)+c",
                                           "a|b",
                                           "xa|b",
                                           "(a|b)c",
                                           "[ab]c",
                                           "[^]ab]c",
                                           "[\\]a]c",
                                           "[[:alpha:]]c",
                                           "[[:digit:]\\]]+.c",
                                           ".*",
                                           ".*c",
                                           "c.*",
                                           ".+b.+",
                                           "a.?c",
                                           "a.*?c",
                                           "ab+?c",
                                           "a+?",
                                           "^ab$",
                                           "^a",
                                           "c$",
                                           "a^b",
                                           "a$b",
                                           "(?:a)b",
                                           "(?=a)ab",
                                           "(?!b)ab",
                                           "a(?=b)b",

                                           "\\w+c",
                                           "a\\dc",
                                           "\\ba\\b",
                                           "a\\.c",
                                           "\\x61b",
                                           "\\u0061b",
                                           "a\\{2\\}",
                                           "a-b",
                                           "\\-a",
                                           "\\/c",
                                           "ab.*ab",
                                           "aab",
                                           ".a",
                                           "a.b.c",
                                           "(a(b|c))?d",
                                           "a{2,}b",
                                           "[a-c]{2}",
                                           "(\\))a",
                                           "([)])a",
                                           "\\(a",
                                           "a{1}b{1}",
                                           ".*\\.(q|k)_proj\\..*",
                                           ""};
  std::vector<std::string> names = {
      "h.0.w", "h.12.w", "h..w", "xh.0.w", "a-b",   "-a",         "/c",         "a{2}", "(a",  ")a",
      "a.c",   "a1c",    "]c",   "]ab",    "ab.ab", "a.q_proj.w", "a.v_proj.w", "7]xc", "a\nc"};
  const std::string letters = "abcd";  // all words of up to four of them
  std::vector<std::string> words = {""};
  for (int length = 0; length < 4; ++length) {
    std::vector<std::string> longer;
    for (const std::string& word : words) {
      names.push_back(word);
      for (const char c : letters) longer.push_back(word + c);
    }
    words = longer;
  }
  int checked = 0;
  for (const std::string& body : bodies) {
    std::regex library;
    try {
      library = std::regex(body);
    } catch (const std::regex_error&) {
      EXPECT_FALSE(FqnPattern::parse("re:" + body).ok()) << body;
      continue;
    }
    const FqnPattern pattern = parsed("re:" + body);
    for (const std::string& name : names) {
      EXPECT_EQ(pattern.matches(name), std::regex_match(name, library)) << body << " " << name;
      ++checked;
    }
  }
  EXPECT_GT(checked, 5000);
}

constexpr std::regex::flag_type kAsPatterns = std::regex::ECMAScript
#ifdef __GLIBCXX__
                                              | std::regex_constants::__polynomial
#endif
    ;

// A plan of 100 regular expressions for 10,000 parameters is a million questions, nearly all of which
// a look at the name answers.
TEST(FqnPatternTest, MostNamesNeedNoRegularExpression) {
  constexpr int kLayers = 20, kNames = 20;
  std::vector<std::string> names, bodies;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int i = 0; i < kNames; ++i) {
      names.push_back("model.layers." + std::to_string(layer) + ".mlp.experts.part" +
                      std::to_string(i) + ".weight");
    }
  }
  for (int i = 0; i < kNames; ++i) {
    bodies.push_back("model\\.layers\\.[0-9]+\\.mlp\\..*\\.part" + std::to_string(i) + "\\.weight");
  }
  // This thread's processor time: what else runs on the machine does not count.
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  double ours = 0, library = 0;
  int matches = 0, expected = 0;
  for (const std::string& body : bodies) {
    const FqnPattern pattern = parsed("re:" + body);
    const std::regex regex(body, kAsPatterns);
    const double start = now();
    for (const std::string& name : names) matches += pattern.matches(name);
    const double between = now();
    for (const std::string& name : names) expected += std::regex_match(name, regex);
    library += now() - between;
    ours += between - start;
  }
  EXPECT_EQ(matches, expected);
  EXPECT_EQ(matches, kLayers * kNames);
  const double ratio = library / ours;
  RecordProperty("times_faster", std::to_string(ratio));
  EXPECT_GT(ratio, 8);  // 20 times fewer regular expressions
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
  const std::string nested = "re:" + std::string(100'000, '(') + std::string(100'000, ')');
  EXPECT_THAT(
      std::string(FqnPattern::parse(nested).status().message()),
      ::testing::HasSubstr("is a regular expression of 200000 characters; wanted at most 4096"));
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
  EXPECT_EQ(distance("layers.*.mlp", "model.layers.0.mlp"), 1);
  EXPECT_EQ(distance("layrs.*.mlp", "a.model.layers.0.mlp"), 2);
  EXPECT_EQ(distance("weight", "model.head.weight"), 1);
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

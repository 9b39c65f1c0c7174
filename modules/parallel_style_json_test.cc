#include "shardweave/modules/parallel_style_json.h"

#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;

TEST(ParallelStyleJsonTest, ReadsEveryStyle) {
  const auto styles = parallel_styles_from_json(R"json({
      "layers.*.mlp": "pairwise",
      "layers.*.attn": {"style": "pairwise", "heads": 8, "output": "S(1)"},
      "norm": {"style": "sequence", "sequence_dim": -2, "heads": 3},
      "up": {"style": "colwise", "input": "R"},
      "out": {"style": "rowwise", "input": "S(-1)", "output": "P"},
      "blocks.*": {"style": "prepare_input", "input": ["S(1)", null, "R"], "mask": "S(0)"},
      "re:h\\.[0-9]+": {"style": "prepare_output", "output": "R"}})json");
  ASSERT_TRUE(styles.ok()) << styles.status();
  const std::pair<const char*, ParallelStyle> expected[] = {
      {"layers.*.mlp", PairwiseParallel()},
      {"layers.*.attn", PairwiseParallel{.output = Shard(1), .heads = 8}},
      {"norm", SequenceParallel{.sequence_dim = -2, .heads = 3}},
      {"up", ColwiseParallel{.input = Replicate(), .output = std::nullopt}},
      {"out", RowwiseParallel{.input = Shard(-1), .output = Partial()}},
      {"blocks.*", PrepareModuleInput{.inputs = {Shard(1), std::nullopt, Replicate()},
                                      .by_name = {{"mask", Shard(0)}}}},
      {"re:h\\.[0-9]+", PrepareModuleOutput{.outputs = {Replicate()}}},
  };
  ASSERT_EQ(styles->size(), std::size(expected));
  for (size_t i = 0; i < styles->size(); ++i) {
    EXPECT_EQ((*styles)[i].pattern, expected[i].first);
    EXPECT_EQ((*styles)[i].style, expected[i].second) << expected[i].first;
  }
}

TEST(ParallelStyleJsonTest, OneStyleForTheWhole) {
  const auto styles = parallel_styles_from_json(R"json({"style": "pairwise", "heads": 4})json");
  ASSERT_TRUE(styles.ok()) << styles.status();
  ASSERT_EQ(styles->size(), 1u);
  EXPECT_EQ((*styles)[0].pattern, "");
  EXPECT_EQ((*styles)[0].style,
            ParallelStyle(PairwiseParallel{.output = std::nullopt, .heads = 4}));
  // A module may be called so.
  const auto module = parallel_styles_from_json(R"json({"style": {"style": "colwise"}})json");
  ASSERT_TRUE(module.ok()) << module.status();
  EXPECT_EQ((*module)[0].pattern, "style");
}

TEST(ParallelStyleJsonTest, SaysWhatIsWrong) {
  const std::pair<const char*, const char*> cases[] = {
      {"{\n", "no JSON on line 2"},
      {"[]", "wanted an object, not []"},
      {R"({"a": 1})", "line 1, \"a\": wanted a style such as \"colwise\", or an object"},
      {R"({"a": {"output": "R"}})", "line 1, \"a\": wanted a style such as"},
      {"{\"a\":\n\"colwize\"}",
       "the style \"colwize\" is not known; there are: colwise, rowwise, pairwise, sequence"},
      {R"({"a": {"style": 3}})", "\"a\", \"style\": wanted a style"},
      {"{\"a\": {\"style\": \"colwise\",\n\"heads\": 3}}",
       "line 2, \"a\", \"heads\": is no option of \"colwise\", which has input, output"},
      {R"({"a": {"style": "colwise", "input": "X"}})", "\"a\", \"input\": "},
      {R"({"a": {"style": "colwise", "input": ["R"]}})", "\"input\": wanted a placement"},
      {R"({"a": {"style": "pairwise", "heads": 0}})", "\"heads\": wanted a whole number from 1"},
      {R"({"a": {"style": "pairwise", "heads": 99999999999}})", "wanted a whole number from 1"},
      {R"({"a": {"style": "sequence", "sequence_dim": 0.5}})", "wanted a whole number"},
      {R"({"a": {"style": "sequence", "sequence_dim": 18446744073709551615}})",
       "wanted a whole number"},
      {R"({"a": {"style": "prepare_input", "mask": 3}})", "\"mask\": wanted a placement"},
      {R"({"a{": "colwise"})", "has a '{' without"},
      {R"({"a": "colwise", "a": "rowwise"})", "stands twice"},
  };
  for (const auto& [text, why] : cases) {
    const absl::Status status = parallel_styles_from_json(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why)) << text;
  }
}

}  // namespace
}  // namespace shardweave

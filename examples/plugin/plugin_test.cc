// The operator's rules are right, and the program trains on every mesh as one device does.

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "linear_gelu.h"
#include "shardweave/dtensor/testing/rule_validator.h"
#include "shardweave/examples/common/run_program.h"

namespace plugin_example {
namespace {

using examples::file_with;
using examples::Ran;
using shardweave::testing::in;
using shardweave::testing::Sample;
using shardweave::testing::validate_strategies;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(PluginTest, TheRulesAreRight) {
  const Sample forward = {"example::linear_gelu", {in({3, 7, 5}), in({6, 5}), in({6})}};
  EXPECT_THAT(validate_strategies(forward, linear_gelu_rule()).wrong, IsEmpty());
  const Sample backward = {"example::linear_gelu_backward",
                           {in({3, 7, 6}), in({3, 7, 5}), in({6, 5}), in({6})}};
  EXPECT_THAT(validate_strategies(backward, linear_gelu_backward_rule()).wrong, IsEmpty());
}

Ran train(std::vector<std::string> more) {
  std::vector<std::string> args = {"--steps=8", "--dim=10", "--hidden=14", "--batch=6"};
  args.insert(args.end(), more.begin(), more.end());
  return examples::run_program("examples/plugin/plugin", args);
}

void expect_as_on_one_rank(std::vector<std::string> args, int ranks) {
  SCOPED_TRACE(::testing::PrintToString(args));
  args.insert(args.end(), {"--check", "--json"});
  const Ran ran = train(args);
  ASSERT_EQ(ran.code, 0) << ran.err;
  ASSERT_EQ(ran.json.size(), 9u) << ran.out;  // a step a line, and the end
  const nlohmann::json& end = ran.json.back();
  EXPECT_EQ(end["ranks"], ranks);
  EXPECT_LE(end["first_steps_loss_diff"], 1e-5);
  EXPECT_LE(end["max_loss_diff"], 1e-4);
}

TEST(PluginTest, SameLossesOnEveryMesh) {
  expect_as_on_one_rank({"--mesh=tp=2"}, 2);
  expect_as_on_one_rank({"--mesh=tp=3"}, 3);
  expect_as_on_one_rank({"--mesh=dp=2,tp=2"}, 4);
  expect_as_on_one_rank({"--mesh=tp=2", "--backend=gloo"}, 2);
}

TEST(PluginTest, TakesAPlansFile) {
  expect_as_on_one_rank(
      {"--mesh=tp=2", "--plan=" + file_with("plan.json", R"({"module": {"1": "tp"}})")}, 2);
}

TEST(PluginTest, SaysWhatIsWrong) {
  const std::string other = file_with("other.json", R"({"module": {"2": "tp"}})");
  EXPECT_THAT(train({"--mesh=tp=2", "--plan=" + other}).err,
              HasSubstr("no plug-in says how '2' (torch::nn::LayerNormImpl) shards"));
  EXPECT_THAT(train({"--dim=2"}).err, HasSubstr("--dim=2: wanted 3 or more"));
  EXPECT_THAT(train({"--sequence_parallel"}).err, HasSubstr("--sequence_parallel"));
  EXPECT_THAT(train({"--plan=hf"}).err, HasSubstr("--plan=hf"));
}

}  // namespace
}  // namespace plugin_example

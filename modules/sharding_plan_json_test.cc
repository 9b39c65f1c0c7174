#include "shardweave/modules/sharding_plan_json.h"

#include "gtest/gtest.h"
#include "shardweave/modules/plugin.h"

namespace shardweave {
namespace {

TEST(ShardingPlanJsonTest, KeepsTheOrderOfTheText) {
  const auto plan = parse_sharding_plan(
      R"json({"parameter": {"z.*": {"tp": "S(0)", "dp": "R"}, "a": {},
                        "*": {"dp": "S(1, sf=3)"}}})json");
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->parameter.size(), 3u);
  EXPECT_EQ(plan->parameter[0].pattern, "z.*");
  EXPECT_EQ(plan->parameter[0].placements, PlanPlacements({{"tp", Shard(0)}, {"dp", Replicate()}}));
  EXPECT_EQ(plan->parameter[1].placements, PlanPlacements(NamedPlacements()));
  EXPECT_EQ(plan->parameter[2].placements, PlanPlacements({{"dp", StridedShard(1, 3)}}));
  EXPECT_EQ(
      to_json(*plan),
      R"json({"parameter":{"z.*":{"tp":"S(0)","dp":"R"},"a":{},"*":{"dp":"S(1, sf=3)"}}})json");
}

TEST(ShardingPlanJsonTest, PlacementsByPosition) {
  const auto plan = parse_sharding_plan(
      R"json({"parameter": {"a": ["R", "S(0)"], "b": "[S(0)@1, S(0)@0]", "c": []}})json");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->parameter[0].placements, PlanPlacements({Replicate(), Shard(0)}));
  EXPECT_EQ(plan->parameter[1].placements,
            PlanPlacements(*Layout::create({Shard(0), Shard(0)}, {1, 0})));
  EXPECT_EQ(plan->parameter[2].placements, PlanPlacements(Placements()));
  const std::string text = to_json(*plan);
  EXPECT_EQ(text, R"json({"parameter":{"a":"[R, S(0)]","b":"[S(0)@1, S(0)@0]","c":"[]"}})json");
  EXPECT_EQ(to_json(*parse_sharding_plan(text)), text);
}

TEST(ShardingPlanJsonTest, WhatAModuleSaysOfItself) {
  const auto all = parse_module_sharding(
      R"json({"parameter": {"up": "S(0)", "down": "S(1)"}, "forward": {"output": "R"},
              "styles": {"experts": {"parameter": {"up": "S(-3)"}}, "whole": {}}})json");
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), 3u);
  using Answer = std::vector<std::pair<std::string, Placement>>;
  EXPECT_EQ(all->at("").parameter, Answer({{"up", Shard(0)}, {"down", Shard(1)}}));
  EXPECT_EQ(all->at("").forward, Answer({{"output", Replicate()}}));
  EXPECT_EQ(all->at("experts").parameter, Answer({{"up", Shard(-3)}}));
  EXPECT_TRUE(all->at("whole").parameter.empty());
  const auto styled = parse_module_sharding(R"json({"styles": {"rows": {}}})json");
  ASSERT_TRUE(styled.ok()) << styled.status();
  EXPECT_FALSE(styled->contains(""));  // nothing is said without a style
}

TEST(ShardingPlanJsonTest, Forward) {
  const std::string text =
      R"json({"parameter":{},"forward":{"*.norm.input":{"tp":"S(1)"},"head.output.0":"[S(0), R]"}})json";
  const auto plan = parse_sharding_plan(text);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->forward.size(), 2u);
  EXPECT_EQ(plan->forward[0].pattern, "*.norm.input");
  EXPECT_EQ(plan->forward[1].placements, PlanPlacements({Shard(0), Replicate()}));
  EXPECT_EQ(to_json(*plan), text);
}

TEST(ShardingPlanJsonTest, Modules) {
  const auto plan = parse_sharding_plan(
      R"json({"module":{"a":"tp","b.*":["tp","dp"],"c":{"tp":"experts"}}})json");
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->module.size(), 3u);
  using Along = std::vector<ModuleEntry::Along>;
  EXPECT_EQ(plan->module[0].along, (Along{{"tp", ""}}));
  EXPECT_EQ(plan->module[1].along, (Along{{"tp", ""}, {"dp", ""}}));
  EXPECT_EQ(plan->module[2].along, (Along{{"tp", "experts"}}));
  EXPECT_EQ(
      to_json(*plan),
      R"json({"parameter":{},"module":{"a":["tp"],"b.*":["tp","dp"],"c":{"tp":"experts"}}})json");
}

TEST(ShardingPlanJsonTest, OfTwoLinesWithOnePatternTheFirstIsWritten) {
  EXPECT_EQ(to_json({.parameter = {{"w", {{"tp", Shard(0)}}}, {"w", {{"tp", Shard(1)}}}}}),
            R"json({"parameter":{"w":{"tp":"S(0)"}}})json");
  EXPECT_EQ(to_json({}), R"json({"parameter":{}})json");
}

TEST(ShardingPlanJsonTest, SaysWhatIsNoPlan) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "no JSON on line 1: "},
      {"{\n\"parameter\": {", "no JSON on line 2: "},
      {"{\n\"parameter\"\n: {} 3", "no JSON on line 3: "},
      {"[]", "the text: wanted an object, not []"},
      {"{\"forwards\": {}}", "line 1, \"forwards\": is not known"},
      {"{\"parameter\": 3}", "line 1, \"parameter\": wanted an object, not 3"},
      {"{\"parameter\":\n {\"w\": 3}}", "line 2, \"parameter\", \"w\": wanted placements such as"},
      {"{\"parameter\": {\"w\":\n\n {\"tp\": 0}}}",
       "line 3, \"parameter\", \"w\", \"tp\": wanted a placement"},
      {"{\"parameter\": {\"w\": {\"tp\": \"S(x)\"}}}", "\"w\", \"tp\": "},
      {"{\"parameter\": {\"w\": [\"S(0)\", 0]}}",
       "\"w\": wanted a placement such as \"S(0)\", not 0"},
      {"{\"parameter\": {\"w\": \"S(0)\"}}", "\"w\": cannot read the layout"},
      {"{\"parameter\": {\"a\": {},\n\"b\": {},\n\"a\": {}}}",
       "line 1, \"parameter\", \"a\": stands twice"},
      {R"json({"parameter": {"w": [{"a": 1}, {"a": 1}]}})json", "wanted a placement such as"},
      {"{\"module\": {\n\"a\": 3}}", "line 2, \"module\", \"a\": wanted mesh dimensions"},
      {"{\"module\": {\"a\": [3]}}", "\"a\": wanted mesh dimensions"},
      {"{\"module\": {\"{a\": \"tp\"}}", "\"{a\": has a '{' without"},
      {"{\"parameter\": {\"re:(a\": {}}}", "\"re:(a\": is no regular expression"},
      {"{\"parameter\": {\"{a\": {}}}", "\"{a\": has a '{' without"},
  };
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  EXPECT_EQ(parse_sharding_plan(deep).status().message(),
            "the text: is nested deeper than 100 times");
  for (const auto& [text, part] : cases) {
    const absl::Status status = parse_sharding_plan(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace shardweave

#include "shardweave/modules/parameter_plan_json.h"

#include "gtest/gtest.h"

namespace shardweave {
namespace {

TEST(ParameterPlanJsonTest, KeepsTheOrderOfTheText) {
  const auto plan = parse_parameter_plan(
      R"json({"parameter": {"z.*": {"tp": "S(0)", "dp": "R"}, "a": {},
                        "*": {"dp": "S(1, sf=3)"}}})json");
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->size(), 3u);
  EXPECT_EQ((*plan)[0].pattern, "z.*");
  EXPECT_EQ((*plan)[0].placements, (NamedPlacements{{"tp", Shard(0)}, {"dp", Replicate()}}));
  EXPECT_EQ((*plan)[1].placements, NamedPlacements());
  EXPECT_EQ((*plan)[2].placements, (NamedPlacements{{"dp", StridedShard(1, 3)}}));
  EXPECT_EQ(
      to_json(*plan),
      R"json({"parameter":{"z.*":{"tp":"S(0)","dp":"R"},"a":{},"*":{"dp":"S(1, sf=3)"}}})json");
}

TEST(ParameterPlanJsonTest, OfTwoLinesWithOnePatternTheFirstIsWritten) {
  EXPECT_EQ(to_json({{"w", {{"tp", Shard(0)}}}, {"w", {{"tp", Shard(1)}}}}),
            R"json({"parameter":{"w":{"tp":"S(0)"}}})json");
  EXPECT_EQ(to_json({}), R"json({"parameter":{}})json");
}

TEST(ParameterPlanJsonTest, SaysWhatIsNoPlan) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "no JSON at byte 1"},
      {"{\"parameter\": {", "no JSON at byte"},
      {"[]", "the text: wanted an object, not []"},
      {"{\"forward\": {}}", "\"forward\" is not known"},
      {"{\"parameter\": 3}", "\"parameter\": wanted an object, not 3"},
      {"{\"parameter\": {\"w\": \"S(0)\"}}", "\"w\": wanted an object such as"},
      {"{\"parameter\": {\"w\": {\"tp\": 0}}}", "\"w\", \"tp\": wanted a placement"},
      {"{\"parameter\": {\"w\": {\"tp\": \"S(x)\"}}}", "\"w\", \"tp\": "},
  };
  for (const auto& [text, part] : cases) {
    const absl::Status status = parse_parameter_plan(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace shardweave

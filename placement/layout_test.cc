#include "shardweave/placement/layout.h"

#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/placement/layout_samples.h"

namespace shardweave {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Layout layout(std::string_view text) {
  return Layout::parse(text).value();
}

TEST(LayoutTest, CutsInTheOrderOfTheMeshUnlessToldOtherwise) {
  const Layout plain({Shard(0), Replicate(), Shard(0), Shard(1)});
  EXPECT_TRUE(plain.default_order());
  EXPECT_THAT(plain.shards_of(0), ElementsAre(0, 2));
  EXPECT_THAT(plain.shards_of(1), ElementsAre(3));
  EXPECT_THAT(plain.shards_of(2), IsEmpty());
  const auto other = Layout::create({Shard(0), Replicate(), Shard(0), Shard(1)}, {2, 0, 1, 3});
  EXPECT_FALSE(other->default_order());
  EXPECT_THAT(other->shards_of(0), ElementsAre(2, 0));
  EXPECT_NE(*other, plain);
}

TEST(LayoutTest, OrdersThatMeanTheSameAreEqual) {
  const Placements placements = {Shard(0), Shard(1), Shard(0), Partial()};
  absl::flat_hash_set<Layout> different;
  std::vector<int> order = {0, 1, 2, 3};
  do {
    const auto l = Layout::create(placements, order);
    const bool first =
        std::find(order.begin(), order.end(), 0) < std::find(order.begin(), order.end(), 2);
    EXPECT_EQ(l->default_order(), first);
    EXPECT_EQ(*l == Layout(placements), first);
    different.insert(*l);
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(different.size(), 2u);
}

TEST(LayoutTest, RefusesOrdersThatAreNoPermutations) {
  const std::vector<std::vector<int>> orders = {{0}, {0, 0}, {0, 2}, {-1, 0}, {0, 1, 2}};
  for (const std::vector<int>& order : orders) {
    const auto l = Layout::create({Shard(0), Shard(0)}, order);
    EXPECT_EQ(l.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(l.status().message(),
                HasSubstr("[S(0), S(0)] is not a permutation of its 2 mesh dimensions"));
  }
}

TEST(LayoutTest, KnowsReplicatedAndPartial) {
  EXPECT_TRUE(layout("[R, R]").is_replicated());
  EXPECT_TRUE(Layout().is_replicated());
  EXPECT_FALSE(layout("[R, P]").is_replicated());
  EXPECT_TRUE(layout("[R, P]").has_partial());
  EXPECT_FALSE(layout("[S(0), R]").has_partial());
}

TEST(LayoutTest, PrintsTheOrderWhereItMatters) {
  EXPECT_EQ(layout("[S(0), S(0)]").to_string(), "[S(0), S(0)]");
  EXPECT_EQ(Layout::create({Shard(0), Shard(0)}, {1, 0})->to_string(), "[S(0)@1, S(0)@0]");
  EXPECT_EQ(Layout::create({Shard(0), Shard(1), Shard(0), Shard(1)}, {1, 3, 2, 0})->to_string(),
            "[S(0)@1, S(1), S(0)@0, S(1)]");
  EXPECT_EQ(Layout::create({Shard(0), Shard(0), StridedShard(0, 2)}, {2, 0, 1})->to_string(),
            "[S(0)@1, S(0)@2, S(0, sf=2)@0]");
}

TEST(LayoutTest, PrintedLayoutsReadTheSame) {
  const Dims mesh_shape = {3, 2, 4};
  const Dims shape = {24, 12};
  std::vector<Placements> placements;
  for (int64_t n : mesh_shape) placements.push_back(all_placements(n, shape, {ReduceOp::kAvg}));
  const std::vector<Layout> layouts = all_layouts(placements, mesh_shape, shape);
  EXPECT_GT(layouts.size(), 500u);
  for (const Layout& l : layouts) EXPECT_EQ(layout(l.to_string()), l);
}

TEST(LayoutTest, ParsesTurns) {
  EXPECT_EQ(layout("[ S(0) @ 0 , S(0)@1 ]"), layout("[S(0), S(0)]"));
  EXPECT_EQ(layout("[S(0)@0]"), layout("[S(0)]"));
}

TEST(LayoutTest, SaysWhereATextIsWrong) {
  const struct {
    const char* text;
    const char* message;
  } cases[] = {
      {"[S(0)@1, S(0)@1]",
       "the 2 cuts of tensor dimension 0 must have either no \"@\" or the turns"},
      {"[S(0)@1, S(0)]", "must have either no \"@\""},
      {"[S(0), S(0)@1]", "must have either no \"@\""},
      {"[S(0)@2, S(0)@0]", "the turns 0 to 1, each once"},
      {"[S(1)@1]", "the 1 cuts of tensor dimension 1"},
      {"[R@0]", "expected \"]\" at position 2"},
      {"[S(0)@]", "expected the turn of the cut"},
      {"[S(0)@-1]", "expected the turn of the cut"},
      {"S(0)", "cannot read the layout \"S(0)\": expected \"[\" at position 0"},
      {"[S(0)] ]", "expected the end at position 7"},
      {"[Shard(0)]", "found \"hard(0)]\"; placements are written R, S(0), P or P(max)"},
  };
  for (const auto& c : cases) {
    const auto l = Layout::parse(c.text);
    EXPECT_EQ(l.status().code(), absl::StatusCode::kInvalidArgument) << c.text;
    EXPECT_THAT(l.status().message(), HasSubstr(c.message));
  }
}

TEST(LayoutTest, MutatedTextsAreReadOrRefused) {
  std::mt19937_64 random(5);
  constexpr std::string_view kAlphabet = "RS()[],@012 ";
  int read = 0;
  for (int i = 0; i < 50'000; ++i) {
    std::string text = "[S(0)@1, S(1), S(0)@0]";
    for (int n = static_cast<int>(random() % 3); n >= 0; --n) {
      text[random() % text.size()] = kAlphabet[random() % kAlphabet.size()];
    }
    const auto parsed = Layout::parse(text);
    if (!parsed.ok()) continue;
    ++read;
    ASSERT_EQ(layout(parsed->to_string()), *parsed) << text;
  }
  EXPECT_GT(read, 500);
}

TEST(ValidateTest, AcceptsWhatFits) {
  EXPECT_TRUE(validate(layout("[S(0), P(max)]"), {2, 3}, {7, 5}).ok());
  EXPECT_TRUE(validate(layout("[S(0), S(0, sizes=[1,3])]"), {2, 2}, {8}).ok());
  EXPECT_TRUE(validate(layout("[S(0, sizes=[0,8]), S(0)]"), {2, 2}, {8}).ok());
  EXPECT_TRUE(validate(layout("[S(0, sizes=[4,4]), S(0, sizes=[0,4])]"), {2, 2}, {8}).ok());
  EXPECT_TRUE(validate(layout("[S(0, sf=2), S(0, sizes=[4,0])]"), {2, 2}, {8}).ok());
  EXPECT_TRUE(validate(layout("[R, P]"), {2, 3}, {}).ok());
  EXPECT_TRUE(validate(layout("[S(0), S(0, sizes=[0,0])]"), {2, 2}, {0}).ok());
}

TEST(LayoutTest, DimensionsAreCountedFromTheEndOfATensor) {
  EXPECT_EQ(with_dims_of(layout("[S(-1), R, S(-2, sf=3), S(-1, sizes=[1,2]), P]"), 2).value(),
            layout("[S(1), R, S(0, sf=3), S(1, sizes=[1,2]), P]"));
  EXPECT_EQ(with_dims_of(layout("[S(0), S(1)]"), 2).value(), layout("[S(0), S(1)]"));
  // The order of the cuts stays; dimensions that become one are cut in the mesh's order.
  EXPECT_EQ(with_dims_of(layout("[S(-1)@1, S(-1)@0]"), 3).value(), layout("[S(2)@1, S(2)@0]"));
  EXPECT_EQ(with_dims_of(layout("[S(-2), S(0)]"), 2).value(), layout("[S(0), S(0)]"));
  EXPECT_EQ(layout("[S(-1)@1, S(-1)@0]").to_string(), "[S(-1)@1, S(-1)@0]");

  for (const char* text : {"[R, S(2)]", "[R, S(-3)]"}) {
    const absl::Status status = with_dims_of(layout(text), 2).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("on mesh dimension 1 cuts tensor dimension "));
    EXPECT_THAT(status.message(), HasSubstr("but there are 2 (wanted: -2 to 1)"));
  }
  EXPECT_THAT(with_dims_of(layout("[S(-1)]"), 0).status().message(),
              HasSubstr("cuts tensor dimension -1, but there are 0"));
}

TEST(LayoutTest, AnOrderOfDimensionsCountedFromBothEndsIsAnError) {
  EXPECT_TRUE(Layout::create({Shard(0), Shard(-1)}, {0, 1}).ok());
  EXPECT_TRUE(Layout::create({Shard(0), Shard(-1), Shard(-1)}, {0, 2, 1}).ok());
  const absl::Status mixed = Layout::create({Shard(0), Shard(-1)}, {1, 0}).status();
  EXPECT_EQ(mixed.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(mixed.message(), HasSubstr("count all of them from the front"));
  EXPECT_FALSE(Layout::parse("[S(-1)@1, S(0), S(-1)@0]").ok());
  EXPECT_TRUE(Layout::parse("[S(0), S(-1)]").ok());
  EXPECT_TRUE(Layout::parse("[S(-1), S(0)]").ok());
}

TEST(FitLocalShapesTest, UnevenPartsAreRagged) {
  const auto fit = [](const char* text, Dims mesh, const std::vector<Dims>& parts) {
    const auto fitted = fit_local_shapes(layout(text), mesh, parts);
    return fitted.ok()
               ? fitted->layout.to_string() + " of [" + absl::StrJoin(fitted->shape, ",") + "]"
               : std::string(fitted.status().message());
  };
  EXPECT_EQ(fit("[S(0)]", {2}, {{1, 5}, {2, 5}}), "[S(0, sizes=[1,2])] of [3,5]");
  EXPECT_EQ(fit("[S(0)]", {3}, {{3}, {3}, {1}}), "[S(0)] of [7]");
  EXPECT_EQ(fit("[S(0)]", {3}, {{0}, {0}, {4}}), "[S(0, sizes=[0,0,4])] of [4]");
  EXPECT_EQ(fit("[S(0), S(0)]", {2, 2}, {{1}, {2}, {1}, {2}}), "[S(0), S(0, sizes=[1,2])] of [6]");
  EXPECT_EQ(fit("[S(0)@1, S(0)@0]", {2, 2}, {{1}, {1}, {2}, {2}}),
            "[S(0, sizes=[1,2])@1, S(0)@0] of [6]");
  EXPECT_EQ(fit("[P, S(1)]", {2, 2}, {{2, 1}, {2, 3}, {2, 1}, {2, 3}}),
            "[P(sum), S(1, sizes=[1,3])] of [2,4]");
  // What is said stands: strided and ragged cuts, and parts that contradict each other.
  EXPECT_THAT(fit("[S(0, sf=2)]", {2}, {{1}, {3}}), HasSubstr("has the local shape"));
  EXPECT_THAT(fit("[S(0, sizes=[2,2])]", {2}, {{1}, {3}}), HasSubstr("has the local shape"));
  EXPECT_THAT(fit("[S(0), R]", {2, 2}, {{1}, {1}, {2}, {3}}), HasSubstr("has the local shape"));
  EXPECT_THAT(fit("[S(0)]", {2}, {{1, 5}, {2, 4}}), HasSubstr("has the local shape"));
  EXPECT_THAT(fit("[S(0)]", {2}, {{1, 5}, {2}}), HasSubstr("has the local shape"));
  EXPECT_THAT(fit("[S(0)]", {2}, {{1}, {2}, {3}}), HasSubstr("one local shape per rank"));
}

TEST(ValidateTest, NamesWhatDoesNotFit) {
  const struct {
    Layout layout;
    Dims mesh_shape;
    Dims shape;
    const char* message;
  } cases[] = {
      {layout("[S(0)]"), {2, 2}, {7}, "has 1 placements, but the mesh [2, 2] has 2 dimensions"},
      {layout("[R, R]"), {2, 0}, {7}, "the mesh [2, 0] has a dimension without ranks"},
      {layout("[R]"), {2}, {7, -1}, "the tensor shape [7, -1] has a negative size"},
      {layout("[R, S(2)]"),
       {2, 2},
       {7, 5},
       "the layout [R, S(2)] does not fit a tensor of shape [7, 5]: S(2) on mesh dimension 1 cuts "
       "tensor dimension 2, but there are 2"},
      {Layout({Shard(-1)}), {2}, {7}, "S(-1) on mesh dimension 0 cuts tensor dimension -1"},
      {layout("[S(0)]"), {2}, {}, "but there are 0"},
      {Layout({StridedShard(0, 0)}), {2}, {7}, "has a split factor below 1"},
      {Layout({StridedShard(0, -4)}), {2}, {7}, "has a split factor below 1"},
      {layout("[S(0, sizes=[3,4])]"), {3}, {7}, "has 2 sizes for 3 ranks"},
      {layout("[S(0, sizes=[3,3])]"), {2}, {7}, "sum up to 6, not to the 7 elements to cut"},
      {layout("[S(0, sizes=[3,5])]"), {2}, {7}, "sum up to more than the 7 elements to cut"},
      {layout("[S(0, sizes=[9223372036854775807,2])]"), {2}, {7}, "sum up to more than the 7"},
      {Layout({RaggedShard(0, {8, -1})}), {2}, {7}, "sum up to more than the 7"},
      {Layout({RaggedShard(0, {-1, 8})}), {2}, {7}, "has a negative size"},
      {layout("[S(0), S(0, sizes=[2,2])]"),
       {2, 2},
       {7},
       "S(0, sizes=[2,2]) on mesh dimension 1 cuts pieces of different sizes"},
      {layout("[S(0, sizes=[3,5]), S(0, sizes=[2,2])]"), {2, 2}, {8}, "pieces of different sizes"},
      // The order counts: here the ragged shard cuts first.
      {layout("[S(0)@1, S(0, sizes=[2,2])@0]"), {2, 2}, {8}, "sum up to 4, not to the 8"},
  };
  for (const auto& c : cases) {
    const absl::Status status = validate(c.layout, c.mesh_shape, c.shape);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.layout;
    EXPECT_THAT(status.message(), HasSubstr(c.message));
  }
}

}  // namespace
}  // namespace shardweave

#include "shardweave/placement/placement.h"

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardweave {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr ReduceOp kAllReductions[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin,
                                       ReduceOp::kMax, ReduceOp::kProduct};

TEST(ReduceOpTest, NamesGoThereAndBack) {
  for (ReduceOp op : kAllReductions) EXPECT_EQ(parse_reduce_op(to_string(op)), op);
  EXPECT_EQ(to_string(ReduceOp::kProduct), "product");
  EXPECT_EQ(parse_reduce_op("mean"), std::nullopt);
  EXPECT_EQ(parse_reduce_op(""), std::nullopt);
}

TEST(ReduceOpTest, OnlySumAndAvgCommuteWithEachOther) {
  for (ReduceOp a : kAllReductions) {
    for (ReduceOp b : kAllReductions) {
      const bool linear = a <= ReduceOp::kAvg && b <= ReduceOp::kAvg;
      EXPECT_EQ(commute(a, b), a == b || linear) << to_string(a) << ", " << to_string(b);
    }
  }
}

TEST(PlacementTest, SaysWhatItIs) {
  EXPECT_TRUE(Placement().is_replicate());
  EXPECT_TRUE(Shard(1).is_shard());
  EXPECT_TRUE(Shard(1).is_shard(1));
  EXPECT_FALSE(Shard(1).is_shard(0));
  EXPECT_TRUE(Shard(1).is_plain_shard());
  EXPECT_TRUE(StridedShard(0, 2).is_shard(0));
  EXPECT_FALSE(StridedShard(0, 2).is_plain_shard());
  EXPECT_EQ(StridedShard(0, 2).split_factor(), 2);
  EXPECT_THAT(RaggedShard(0, {3, 0, 4}).sizes(), ElementsAre(3, 0, 4));
  EXPECT_FALSE(RaggedShard(0, {1}).is_plain_shard());
  EXPECT_TRUE(Partial(ReduceOp::kMax).is_partial(ReduceOp::kMax));
  EXPECT_FALSE(Partial(ReduceOp::kMax).is_partial(ReduceOp::kSum));
  // The default dimension and reduction of other kinds do not shine through.
  EXPECT_FALSE(Replicate().is_shard(0));
  EXPECT_FALSE(Partial().is_shard(0));
  EXPECT_FALSE(Replicate().is_partial(ReduceOp::kSum));
}

TEST(PlacementTest, DifferentPlacementsDiffer) {
  const Placements all = {Replicate(),
                          Shard(0),
                          Shard(1),
                          StridedShard(0, 2),
                          StridedShard(0, 3),
                          StridedShard(1, 2),
                          RaggedShard(0, {}),
                          RaggedShard(0, {1, 2}),
                          RaggedShard(0, {2, 1}),
                          RaggedShard(1, {1, 2}),
                          Partial(),
                          Partial(ReduceOp::kAvg)};
  absl::flat_hash_set<Placement> set(all.begin(), all.end());
  EXPECT_EQ(set.size(), all.size());
  for (const Placement& p : all) EXPECT_TRUE(set.contains(p)) << p;
}

TEST(PlacementTest, AStrideOfOneIsAPlainShard) {
  EXPECT_EQ(StridedShard(2, 1), Shard(2));
  EXPECT_EQ(parse_placement("S(2, sf=1)").value(), Shard(2));
}

TEST(PlacementTest, Prints) {
  EXPECT_EQ(to_string({Shard(0), Replicate()}), "[S(0), R]");
  EXPECT_EQ(to_string({Partial()}), "[P(sum)]");
  EXPECT_EQ(to_string({StridedShard(1, 3)}), "[S(1, sf=3)]");
  EXPECT_EQ(to_string({RaggedShard(0, {3, 0, 4})}), "[S(0, sizes=[3,0,4])]");
  EXPECT_EQ(to_string(Placements()), "[]");
}

TEST(PlacementTest, ParsesWhatPeopleWrite) {
  EXPECT_EQ(parse_placements(" [ S( 0 ) ,R,P ] ").value(),
            (Placements{Shard(0), Replicate(), Partial()}));
  EXPECT_EQ(parse_placements("[]").value(), Placements());
  EXPECT_EQ(parse_placement("S(1,sizes=[ 3 , 0 ])").value(), RaggedShard(1, {3, 0}));
  EXPECT_EQ(parse_placement("S(1, sizes=[])").value(), RaggedShard(1, {}));
  EXPECT_EQ(parse_placement("P( product )").value(), Partial(ReduceOp::kProduct));
  EXPECT_EQ(parse_placement("S(-1)").value(), Shard(-1));
  EXPECT_EQ(parse_placement("S( -2 , sf=3)").value(), StridedShard(-2, 3));
  EXPECT_EQ(parse_placement("S(-1, sizes=[1,2])").value(), RaggedShard(-1, {1, 2}));
  for (const Placement& p : {Shard(-1), StridedShard(-2, 3), RaggedShard(-1, {1, 2})}) {
    EXPECT_EQ(parse_placement(p.to_string()).value(), p);
  }
}

struct BadText {
  const char* text;
  const char* message;
};

TEST(PlacementTest, SaysWhereATextIsWrong) {
  const BadText cases[] = {
      {"", "expected R, S(...) or P(...) at position 0, found the end"},
      {"X", "expected R, S(...) or P(...) at position 0, found \"X\""},
      {"S", "expected \"(\" at position 1, found the end"},
      {"S()", "expected a tensor dimension"},
      {"S(-99999999999)", "expected a tensor dimension (an integer from -2147483648 to"},
      {"S(-)", "expected a tensor dimension"},
      {"S(99999999999)", "expected a tensor dimension"},
      {"S(0", "expected \")\" at position 3"},
      {"S(0, 3)", "expected sf= or sizes= at position 5"},
      {"S(0, sf=0)", "expected a split factor (an integer from 1"},
      {"S(0, sf=99999999999999999999)", "expected a split factor"},
      {"S(0, sizes=[1,)", "expected the size of a rank's piece"},
      {"S(0, sizes=[-1])", "expected the size of a rank's piece (an integer from 0"},
      {"S(0, sizes=[1 2])", "expected \"]\" at position 14"},
      {"P()", "expected sum, avg, min, max or product at position 2"},
      {"P(summ)", "expected sum, avg, min, max or product at position 2, found \"summ)\""},
      {"P(sum", "expected \")\" at position 5"},
      {"R R", "expected the end at position 2, found \"R\""},
      {"R\n", "found \"\\n\""},
  };
  for (const BadText& c : cases) {
    const auto placement = parse_placement(c.text);
    EXPECT_EQ(placement.status().code(), absl::StatusCode::kInvalidArgument) << c.text;
    EXPECT_THAT(placement.status().message(), HasSubstr(c.message));
    EXPECT_THAT(placement.status().message(), HasSubstr("cannot read the placement"));
  }
  for (const char* text : {"", "R", "[", "[R", "[R,", "[R,]", "[R]]", "[,R]", "[[R]]", "[R R]"}) {
    EXPECT_EQ(parse_placements(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(PlacementTest, ErrorsAboutLongTextsAreShort) {
  EXPECT_LT(parse_placement("R" + std::string(100'000, '!')).status().message().size(), 300u);
}

Placement random_placement(std::mt19937_64& random) {
  auto below = [&](int n) { return static_cast<int>(random() % n); };
  switch (below(5)) {
    case 0:
      return Replicate();
    case 1:
      return Shard(below(1000));
    case 2:
      return StridedShard(below(9), 1 + static_cast<int64_t>(random() >> 1) % (int64_t{1} << 62));
    case 3: {
      std::vector<int64_t> sizes(below(5));
      for (int64_t& size : sizes) size = static_cast<int64_t>(random() >> 1) >> below(63);
      return RaggedShard(below(9), sizes);
    }
    default:
      return Partial(kAllReductions[below(5)]);
  }
}

TEST(PlacementTest, RandomPlacementsGoThereAndBack) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 5000; ++i) {
    Placements placements(random() % 4);
    for (Placement& p : placements) p = random_placement(random);
    const auto parsed = parse_placements(to_string(placements));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, placements);
  }
}

// Broken texts: an error or a value that prints as something that reads the same, never a crash.
TEST(PlacementTest, MutatedTextsAreReadOrRefused) {
  std::mt19937_64 random(2);
  constexpr std::string_view kAlphabet = "RSP()[]=,@0123456789 sumavginxprodctfze-\0\n";
  int read = 0;
  for (int i = 0; i < 100'000; ++i) {
    std::string text = to_string({random_placement(random), random_placement(random)});
    for (int n = static_cast<int>(random() % 3); n >= 0; --n) {
      const size_t at = random() % (text.size() + 1);
      switch (random() % 3) {
        case 0:
          text.insert(at, 1, kAlphabet[random() % kAlphabet.size()]);
          break;
        case 1:
          text.erase(at, 1 + random() % 3);
          break;
        default:
          if (at < text.size()) text[at] = kAlphabet[random() % kAlphabet.size()];
      }
    }
    const auto parsed = parse_placements(text);
    if (!parsed.ok()) {
      ASSERT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
      continue;
    }
    ++read;
    ASSERT_EQ(parse_placements(to_string(*parsed)).value(), *parsed) << text;
  }
  EXPECT_GT(read, 1000);  // else the mutations are too wild to test anything
}

}  // namespace
}  // namespace shardweave

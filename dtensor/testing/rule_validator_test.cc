// That the validator can fail: rules that are wrong, incomplete or nonsense.
#include "shardweave/dtensor/testing/rule_validator.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/error.h"

namespace shardweave::testing {
namespace {

using namespace dtensor_internal;

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const Sample kMm = {"aten::mm", {in({7, 4}), in({4, 5})}};

TEST(RuleValidatorTest, FindsNothingWrongInARightRule) {
  const Validation found = validate_strategies(kMm, einsum("mk,kn->mn"));
  EXPECT_THAT(found.wrong, IsEmpty());
  EXPECT_THAT(found.missing, IsEmpty());
  EXPECT_GT(found.combinations, 100);
}

TEST(RuleValidatorTest, FindsAStrategyThatIsWrong) {
  const Validation found =
      validate_strategies(kMm, sharded([](const OpCall&, Strategies& out) {
                            out.add({Shard(1), Shard(0)}, {Partial(ReduceOp::kAvg)});
                            out.add({Shard(0), Replicate()}, {Shard(1)});
                          }));
  EXPECT_THAT(found.wrong, Contains(HasSubstr("[7, 4] S(1), [4, 5] S(0) -> P(avg): output 0: other "
                                              "values after the reduction")));
  EXPECT_THAT(found.wrong,
              Contains(HasSubstr("[4, 5] R -> S(1): output 0: rank 0 has Double [4, 5] "
                                 "instead of Double [7, 3]")));
}

// A mean of means is right for even shards only.
TEST(RuleValidatorTest, FindsWhatIsWrongForUnevenShards) {
  const Validation found =
      validate_strategies({"aten::mean", {in({6})}}, sharded([](const OpCall&, Strategies& out) {
                            out.add({Shard(0)}, {Partial(ReduceOp::kAvg)});
                          }));
  EXPECT_THAT(found.wrong, Contains(HasSubstr("on 4 ranks: [6] S(0) -> P(avg)")));
  EXPECT_THAT(found.wrong, Not(Contains(HasSubstr("on 3 ranks: [6] S(0) ->"))));
}

// A mean of means is right where the ranks of one mesh dimension have equal shards: those of two need
// not.
TEST(RuleValidatorTest, FindsWhatIsWrongForTwoMeshDimensionsTogether) {
  const Sample mean = {"aten::mean", {in({6})}};
  const Rule alone = sharded([](const OpCall& call, Strategies& out) {
                       if (call.input(0).sizes[0] % call.num_ranks != 0) return;
                       out.add({Shard(0)}, {Partial(ReduceOp::kAvg)});
                     }).chunks_only();
  const Rule together = sharded([](const OpCall& call, Strategies& out) {
                          if (call.input(0).sizes[0] % call.pieces(call.input(0), 0) != 0) return;
                          out.add({Shard(0)}, {Partial(ReduceOp::kAvg)});
                        }).chunks_only();
  EXPECT_THAT(validate_strategies(mean, alone).wrong, IsEmpty());
  EXPECT_THAT(validate_decisions(mean, alone).wrong,
              Contains(HasSubstr("[S(0), S(0)] -> [P(avg), P(avg)]: output 0: other values")));
  EXPECT_THAT(validate_decisions(mean, together).wrong, IsEmpty());
}

// Every rank has to come to the same decision.
TEST(RuleValidatorTest, FindsARuleThatLooksAtItsOwnRank) {
  const Validation found = validate_decisions(
      {"aten::neg", {in({6, 5})}}, sharded([](const OpCall& call, Strategies& out) {
        if (call.input(0).spec->context->coordinate()[0] == 0) out.add({Shard(0)}, {Shard(0)});
      }));
  EXPECT_THAT(found.wrong, Contains(HasSubstr("at rank 0")));
}

TEST(RuleValidatorTest, FindsWhatIsMissing) {
  const Validation found = validate_strategies(kMm, sharded([](const OpCall&, Strategies& out) {
                                                 out.add({Shard(0), Replicate()}, {Shard(0)});
                                               }));
  EXPECT_THAT(found.wrong, IsEmpty());
  EXPECT_THAT(found.missing, Contains("aten::mm: [7, 4] S(1), [4, 5] S(0) -> P(sum)"));
  EXPECT_THAT(found.missing, Contains("aten::mm: [7, 4] R, [4, 5] S(1) -> S(1)"));
  EXPECT_THAT(found.missing, Contains("aten::mm: [7, 4] P(sum), [4, 5] R -> P(sum)"));
  EXPECT_THAT(found.missing, Not(Contains(HasSubstr("[7, 4] S(0), [4, 5] R"))));
}

TEST(RuleValidatorTest, NamesTheOperatorOfARuleThatIsNonsense) {
  const auto first_wrong = [](Rule rule) {
    const Validation found = validate_strategies(kMm, rule);
    return found.wrong.empty() ? "" : found.wrong[0];
  };
  EXPECT_THAT(
      first_wrong(sharded([](const OpCall&, Strategies& out) { out.add({Shard(0)}, {Shard(0)}); })),
      HasSubstr("the sharding rule of aten::mm gives 1 input placements for 2 inputs"));
  EXPECT_THAT(first_wrong(sharded([](const OpCall&, Strategies& out) {
                out.add({Shard(2), Replicate()}, {Shard(0)});
              })),
              HasSubstr("shards input 0 with 2 dimensions as S(2)"));
  EXPECT_THAT(
      first_wrong(sharded([](const OpCall&, Strategies&) { throw std::out_of_range("at"); })),
      HasSubstr("the sharding rule of aten::mm throws: at"));
}

TEST(RuleValidatorTest, ChecksEveryFormOfAnOperator) {
  const Validation found =
      validate_end_to_end({"aten::add.Tensor", {in({7, 5}), in({5})}}, {{{"x", 3}}});
  EXPECT_THAT(found.wrong, IsEmpty());
  EXPECT_THAT(found.operators, ::testing::UnorderedElementsAre(
                                   "aten::add.Tensor", "aten::add_.Tensor", "aten::add.out"));
}

TEST(RuleValidatorTest, CountsSecondGradientsAndNamesWhatHasNone) {
  const std::vector<std::vector<MeshDim>> meshes = {{{"x", 2}}, {{"x", 3}}};
  Validation found = validate_end_to_end({"aten::mul.Tensor", {in({7, 5}), in({5})}}, meshes);
  EXPECT_GT(found.second_gradients, 0);
  EXPECT_LT(found.second_gradients, found.combinations);
  EXPECT_THAT(found.no_second_derivative, IsEmpty());
  found.merge(validate_end_to_end({"aten::hardsigmoid", {in({7, 5})}}, meshes));
  EXPECT_THAT(found.wrong, IsEmpty());
  EXPECT_THAT(found.no_second_derivative,
              ElementsAre("aten::hardsigmoid: derivative for aten::hardsigmoid_backward is not "
                          "implemented"));
}

TEST(RuleValidatorTest, TablesThatDoNotFitTheirSchemaAreErrors) {
  EXPECT_THROW(SampleCall({"aten::no_such_operator", {}}), Error);
  EXPECT_THROW(SampleCall({"aten::mm", {in({7, 4})}}), Error);
  EXPECT_THROW(SampleCall({"aten::mm", {in({7, 4}), in({4, 5})}, {{"colour", 1}}}), Error);
  EXPECT_THROW(SampleCall({"aten::mm", {in({7, 4}), in({4, 5}), in({3})}}), Error);
}

}  // namespace
}  // namespace shardweave::testing

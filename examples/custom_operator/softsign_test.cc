// The rules of an operator of one's own: tried like those of the library, and used by the mesh that
// they were given to.
#include "softsign.h"

#include "ATen/ops/abs.h"
#include "ATen/ops/allclose.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/rule_validator.h"

namespace custom_operator {
namespace {

using shardweave::add_rule;
using shardweave::dispatch_counters;
using shardweave::Error;
using shardweave::MeshPtr;
using shardweave::OpCall;
using shardweave::Partial;
using shardweave::Placements;
using shardweave::Replicate;
using shardweave::replicated;
using shardweave::Rule;
using shardweave::Shard;
using shardweave::sharded;
using shardweave::Strategies;
using shardweave::testing::in;
using shardweave::testing::on_mesh;
using shardweave::testing::Sample;
using shardweave::testing::try_on_mesh;
using shardweave::testing::validate_strategies;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const Sample kForward = {"mylib::softsign", {in({4, 7, 5}), in({5}).uniform(0.5, 2)}};
const Sample kBackward = {"mylib::softsign_backward",
                          {in({4, 7, 5}), in({4, 7, 5}), in({5}).uniform(0.5, 2)}};

TEST(CustomOperatorTest, TheRulesAreRight) {
  EXPECT_THAT(validate_strategies(kForward, softsign_rule()).wrong, IsEmpty());
  EXPECT_THAT(validate_strategies(kBackward, softsign_backward_rule()).wrong, IsEmpty());
}

TEST(CustomOperatorTest, TheRulesMissNothing) {
  // (For positive scales the function rises; but the maximum of a rank without elements is -inf, of
  // which it makes a NaN.)
  EXPECT_THAT(validate_strategies(kForward, softsign_rule()).missing, IsEmpty());
  EXPECT_THAT(validate_strategies(kBackward, softsign_backward_rule()).missing, IsEmpty());
}

at::Tensor make(const MeshPtr& mesh, const shardweave::testing::Input& input, uint64_t seed,
                const Placements& placements) {
  return shardweave::distribute_tensor(input.make(seed), mesh, placements)
      .detach()
      .requires_grad_();
}

TEST(CustomOperatorTest, ValuesAndGradientsWithoutCommunication) {
  const at::Tensor x = in({7, 5}).make(1).requires_grad_();
  const at::Tensor scale = in({5}).uniform(0.5, 2).make(2).requires_grad_();
  const at::Tensor y = softsign(x, scale);
  y.sum().backward();
  on_mesh({{"x", 2}, {"y", 2}}, [&](const MeshPtr& mesh) {
    add_rule(mesh, "mylib::softsign", softsign_rule());
    add_rule(mesh, "mylib::softsign_backward", softsign_backward_rule());
    at::Tensor dx = make(mesh, in({7, 5}), 1, {Shard(0), Shard(1)});
    at::Tensor dscale = make(mesh, in({5}).uniform(0.5, 2), 2, {Replicate(), Shard(0)});
    const at::Tensor dy = softsign(dx, dscale);
    dy.sum().backward();
    EXPECT_EQ(dispatch_counters(mesh).implicit_redistributions, 0);
    EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 0);
    EXPECT_EQ(shardweave::layout_of(dscale.grad()).placements(), (Placements{Partial(), Shard(0)}));
    EXPECT_TRUE(at::allclose(shardweave::full_tensor(dy), y));
    EXPECT_TRUE(at::allclose(shardweave::full_tensor(dx.grad()), x.grad()));
    EXPECT_TRUE(at::allclose(shardweave::full_tensor(dscale.grad()), scale.grad()));
  });
}

// Before a mesh has the rule it gathers, from then on it does not; another mesh is not concerned.
TEST(CustomOperatorTest, ARuleBelongsToItsMesh) {
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    const at::Tensor x = make(mesh, in({7, 5}), 1, {Shard(0)}).detach();
    const at::Tensor scale = make(mesh, in({5}), 2, {Replicate()}).detach().abs();
    softsign(x, scale);
    EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 1);
    add_rule(mesh, "mylib::softsign", softsign_rule());
    const at::Tensor y = softsign(x, scale);
    EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 1);
    EXPECT_EQ(shardweave::layout_of(y).placements(), (Placements{Shard(0)}));
  });
}

TEST(CustomOperatorTest, ARuleMayReplaceOneOfTheLibrary) {
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    const at::Tensor x = make(mesh, in({7, 5}), 1, {Shard(0)}).detach();
    EXPECT_EQ(shardweave::layout_of(x.abs()).placements(), (Placements{Shard(0)}));
    add_rule(mesh, "aten::abs", replicated().shapes_like({"self"}));
    EXPECT_EQ(shardweave::layout_of(x.abs()).placements(), (Placements{Replicate()}));
  });
}

absl::Status with_rule(Rule rule) {
  return try_on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    add_rule(mesh, "mylib::softsign", rule);
    softsign(make(mesh, in({7, 5}), 1, {Shard(0)}), make(mesh, in({5}), 2, {Replicate()}));
  });
}

TEST(CustomOperatorTest, NonsenseIsAnErrorThatNamesTheOperator) {
  const absl::Status inputs = with_rule(sharded([](const OpCall&, Strategies& out) {
                                          out.add({Shard(0)}, {Shard(0)});
                                        }).shapes_like({"x"}));
  EXPECT_THAT(std::string(inputs.message()),
              AllOf(HasSubstr("the sharding rule of mylib::softsign"),
                    HasSubstr("1 input placements for 2 inputs")));
  const absl::Status dim = with_rule(sharded([](const OpCall&, Strategies& out) {
                                       out.add({Shard(5), Replicate()}, {Shard(0)});
                                     }).shapes_like({"x"}));
  EXPECT_THAT(std::string(dim.message()), HasSubstr("shards input 0 with 2 dimensions as S(5)"));
  // What the operator gives is not what the rule promises.
  const absl::Status promise = with_rule(sharded([](const OpCall&, Strategies& out) {
                                           out.add({Shard(0), Replicate()}, {Shard(1)});
                                         }).shapes_like({"x"}));
  EXPECT_THAT(std::string(promise.message()),
              AllOf(HasSubstr("mylib::softsign"), HasSubstr("the sharding rule promised")));
}

TEST(CustomOperatorTest, NamesAreChecked) {
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    EXPECT_THROW(add_rule(mesh, "softsign", softsign_rule()), Error);
    EXPECT_THROW(add_rule(mesh, "mylib::", softsign_rule()), Error);
    add_rule(mesh, "mylib::softsign", softsign_rule());
    EXPECT_THROW(add_rule(mesh, "mylib::softsign", softsign_rule()), Error);
  });
}

}  // namespace
}  // namespace custom_operator

// What rules are made of: inputs by name, broadcasting, the three ways and the conditions between
// them. What the library's own rules say is what validate_rules tries.
#include "shardweave/dtensor/rule.h"

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/cos.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/sin.h"
#include "ATen/ops/tan.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;

// A call as the engine shows it to a rule, of tensors of these shapes.
class Call {
 public:
  Call(const char* name, const char* overload, std::vector<std::pair<const char*, Dims>> inputs)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)) {
    const auto& arguments = op_.schema().arguments();
    args_.resize(arguments.size());
    call_.op = &op_;
    call_.args = args_;
    for (const auto& [argument, sizes] : inputs) {
      TensorInfo info;
      info.sizes = sizes;
      info.defined = true;
      call_.inputs.push_back(info);
      call_.input_arg.push_back(call_.arguments().index(argument));
    }
  }
  OpCall& operator*() { return call_; }
  OpCall* operator->() { return &call_; }

 private:
  const c10::OperatorHandle op_;
  c10::Stack args_;
  OpCall call_;
};

Call addmm() {
  return {"aten::addmm", "", {{"self", {5}}, {"mat1", {7, 4}}, {"mat2", {4, 5}}}};
}

// --- names ---------------------------------------------------------------------------------------

TEST(OpCallTest, InputsHaveTheNamesOfTheSchema) {
  Call call = addmm();
  EXPECT_EQ(call->input("mat2").sizes, (Dims{4, 5}));
  EXPECT_EQ(call->input_index("mat2"), 2);
  EXPECT_THAT(call->placements({{"mat2", Shard(1)}}),
              ElementsAre(Replicate(), Replicate(), Shard(1)));
  EXPECT_THAT(call->placements({}), ElementsAre(Replicate(), Replicate(), Replicate()));
}

TEST(OpCallTest, TheNameOfAListMeansAllItsTensors) {
  Call call("aten::index_put", "",
            {{"self", {7, 5}}, {"indices", {3}}, {"indices", {3}}, {"values", {3}}});
  EXPECT_EQ(call->list("indices").size(), 2u);
  EXPECT_EQ(call->input_index("values"), 3);
  EXPECT_THAT(call->placements({{"indices", Shard(0)}}),
              ElementsAre(Replicate(), Shard(0), Shard(0), Replicate()));
  Call without("aten::index_put", "", {{"self", {7, 5}}, {"values", {3}}});
  EXPECT_TRUE(without->list("indices").empty());
}

TEST(OpCallTest, AnUnknownNameIsAnErrorThatSaysWhichThereAre) {
  Call call = addmm();
  const auto message_of = [](auto f) -> std::string {
    try {
      f();
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInternal);
      return std::string(error.status().message());
    }
    return "no error";
  };
  const auto names_all =
      HasSubstr("aten::addmm has no argument 'weight'; it has self, mat1, mat2, beta, alpha");
  EXPECT_THAT(message_of([&] { call->input("weight"); }), names_all);
  EXPECT_THAT(message_of([&] { call->list("weight"); }), names_all);
  EXPECT_THAT(message_of([&] { call->arg("weight"); }), names_all);
  EXPECT_THAT(message_of([&] { call->placements({{"weight", Shard(0)}}); }), names_all);
  EXPECT_THAT(message_of([&] { Strategies(*call).add_linear({{"weight"}}); }), names_all);
  EXPECT_THAT(message_of([&] { call->input("beta"); }),
              HasSubstr("argument 'beta' of aten::addmm is no tensor"));
}

// On every rank, from the operator that was called.
TEST(OpCallTest, ARuleThatAsksForAnUnknownInputFailsTheOperator) {
  const absl::Status status = try_on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    add_rule(mesh, "aten::tan", sharded([](const OpCall& call, Strategies& out) {
               out.add({{"weight", Shard(0)}}, {Shard(0)});
               out.add({{"self", Shard(call.int_arg("dim"))}}, {Shard(0)});
             }));
    at::tan(distribute_tensor(at::ones({4}), mesh, {Shard(0)}));
  });
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("aten::tan has no argument 'weight'; it has self"));
}

// --- strategies ----------------------------------------------------------------------------------

TEST(StrategiesTest, WhatIsNotNamedIsWhole) {
  Call call = addmm();
  Strategies out(*call);
  out.add({{"self", Shard(0)}, {"mat2", Shard(1)}}, {Shard(1)});
  ASSERT_EQ(out.list().size(), 1u);
  EXPECT_THAT(out.list()[0].inputs, ElementsAre(Shard(0), Replicate(), Shard(1)));
  EXPECT_THAT(out.list()[0].outputs, ElementsAre(Shard(1)));
}

TEST(StrategiesTest, LinearInEachSet) {
  Call call = addmm();
  Strategies out(*call);
  out.add_linear({{"self", "mat1"}, {"self", "mat2"}});
  ASSERT_EQ(out.list().size(), 4u);
  const Placement sum = Partial(), avg = Partial(ReduceOp::kAvg);
  EXPECT_THAT(out.list()[0].inputs, ElementsAre(sum, sum, Replicate()));
  EXPECT_THAT(out.list()[1].inputs, ElementsAre(sum, Replicate(), sum));
  EXPECT_THAT(out.list()[3].inputs, ElementsAre(avg, Replicate(), avg));
  EXPECT_THAT(out.list()[3].outputs, ElementsAre(avg));
}

TEST(BroadcastTest, DimensionsAreCountedFromTheLast) {
  const auto cut = [](Dims sizes, const Dims& shape, int dim) {
    TensorInfo info;
    info.sizes = std::move(sizes);
    info.defined = true;
    return broadcast_cut(info, shape, dim);
  };
  EXPECT_EQ(cut({7, 5}, {7, 5}, 1), Shard(1));
  EXPECT_EQ(cut({5}, {7, 5}, 1), Shard(0));
  EXPECT_EQ(cut({5}, {7, 5}, 0), Replicate());     // repeated for each of 7
  EXPECT_EQ(cut({7, 1}, {7, 5}, 1), Replicate());  // repeated 5 times
  EXPECT_EQ(cut({7, 1}, {7, 5}, 0), Shard(0));
  EXPECT_EQ(cut({1, 5}, {1, 5}, 0), Shard(0));  // as it is
  EXPECT_EQ(cut({}, {7, 5}, 0), Replicate());
  EXPECT_EQ(broadcast_cut(TensorInfo(), {7, 5}, 0), Replicate());  // None
}

TEST(BroadcastTest, OfAllInputs) {
  Call call("aten::where", "self", {{"condition", {7, 1}}, {"self", {5}}, {"other", {7, 5}}});
  EXPECT_THAT(broadcast_cuts(*call, {7, 5}, 0), ElementsAre(Shard(0), Replicate(), Shard(0)));
  EXPECT_THAT(broadcast_cuts(*call, {7, 5}, 1), ElementsAre(Replicate(), Shard(0), Shard(1)));
}

// --- the three ways ------------------------------------------------------------------------------

bool is_long(const Arguments& args) {
  return args.tensor("self").scalar_type() == at::kLong;
}

// A tangent that can be told from LibTorch's.
void by_others(const c10::OperatorHandle& op, c10::Stack& stack) {
  const Arguments args(op, absl::MakeConstSpan(stack).last(1));
  const at::Tensor result = at::sin(args.tensor("self")).div(at::cos(args.tensor("self"))).add(1);
  stack.back() = result;
}

TEST(RuleTest, AConditionChoosesTheWay) {
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::tan", "");
  const c10::Stack ints = {at::arange(3)}, floats = {at::ones({3})};
  const Arguments of_ints(op, ints), of_floats(op, floats);

  const Rule only = pointwise();
  EXPECT_NE(only.sharded(of_ints), nullptr);
  EXPECT_EQ(only.composed(of_ints), nullptr);

  const Rule composed_ints = pointwise().when(is_long, composed(by_others));
  ASSERT_NE(composed_ints.composed(of_ints), nullptr);
  EXPECT_EQ(composed_ints.composed(of_ints)->run, &by_others);
  EXPECT_EQ(composed_ints.composed(of_floats), nullptr);
  EXPECT_NE(composed_ints.sharded(of_floats), nullptr);

  const Rule gathered_ints = pointwise().when(is_long, gathered());
  EXPECT_EQ(gathered_ints.composed(of_ints), nullptr);
  EXPECT_EQ(gathered_ints.sharded(of_ints), nullptr);
  EXPECT_NE(gathered_ints.sharded(of_floats), nullptr);

  const Rule else_gathered = gathered().when(is_long, composed(by_others));
  EXPECT_NE(else_gathered.composed(of_ints), nullptr);
  EXPECT_EQ(else_gathered.composed(of_floats), nullptr);
  EXPECT_EQ(else_gathered.sharded(of_floats), nullptr);

  const Rule refuses_ints = pointwise().refuses(is_long);
  EXPECT_TRUE(refuses_ints.is_refused(of_ints));
  EXPECT_FALSE(refuses_ints.is_refused(of_floats));
  EXPECT_FALSE(only.is_refused(of_ints));
}

TEST(RuleTest, TheEngineGoesTheWayOfTheCall) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    add_rule(mesh, "aten::tan", pointwise().when(is_long, composed(by_others)));
    const at::Tensor ints = distribute_tensor(at::arange(5), mesh, {Shard(0)});
    const at::Tensor floats = distribute_tensor(at::ones({5}), mesh, {Shard(0)});
    EXPECT_TRUE(full_tensor(at::tan(ints)).allclose(at::arange(5).tan().add(1)));
    EXPECT_TRUE(full_tensor(at::tan(floats)).allclose(at::ones({5}).tan()));
    EXPECT_EQ(layout_of(at::tan(ints)).placements(), Placements{Shard(0)});
    EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 0);
  });
}

TEST(RuleTest, GatheredIsNoWarning) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    add_rule(mesh, "aten::tan", gathered());
    const at::Tensor x = distribute_tensor(at::ones({5}), mesh, {Shard(0)});
    EXPECT_EQ(layout_of(at::tan(x)).placements(), Placements{Replicate()});
    EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 0);
  });
}

TEST(RuleTest, TheLastShapesCount) {
  const ShardedRule rule = pointwise().shapes([](OpCall&) {});
  EXPECT_FALSE(rule.options().shapes_only_if_no_meta);
  EXPECT_TRUE(pointwise().options().shapes_only_if_no_meta);
}

// --- the table -----------------------------------------------------------------------------------

TEST(RuleTableTest, FormsOfAnOperatorShareItsRule) {
  RuleTable table;
  table.add("aten::add", pointwise());
  table.add("aten::add.Scalar", gathered());
  EXPECT_NE(table.find({"aten::add", "Tensor"})->sharded(), nullptr);
  EXPECT_NE(table.find({"aten::add_", "Tensor"})->sharded(), nullptr);
  EXPECT_NE(table.find({"aten::add", "out"})->sharded(), nullptr);
  EXPECT_EQ(table.find({"aten::add", "Scalar"})->sharded(), nullptr);
  EXPECT_EQ(table.find({"aten::add_", "Scalar"})->sharded(), nullptr);
  EXPECT_EQ(table.find({"aten::mul", "Tensor"}), nullptr);
  EXPECT_THROW(table.add("aten::add", pointwise()), Error);
}

}  // namespace
}  // namespace shardweave

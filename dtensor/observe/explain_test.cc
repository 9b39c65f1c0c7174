// explain(): the strategies, what was chosen and what follows; that it agrees with what then
// happens.

#include "shardweave/dtensor/observe/explain.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ATen/ATen.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/cost_model.h"
#include "shardweave/dtensor/testing/expect_comms.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::on_mesh;
using testing::scattered;

at::Tensor numbers(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return at::arange(1, n + 1, at::kDouble).view(sizes);
}

absl::Status status_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.status();
  }
  return absl::OkStatus();
}

TEST(ExplainTest, SaysWhatWasChosenAndWhatElseThereWas) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({8, 12}), mesh, {Shard(1)});
    const at::Tensor w = scattered(numbers({12, 6}), mesh, {Shard(0)});
    const CommTrace trace(mesh);
    const DispatchCounters before = dispatch_counters(mesh);
    const Explanation e = explain("aten::mm", {x, w});
    EXPECT_COMMS(trace, {});
    EXPECT_EQ(dispatch_counters(mesh), before);

    EXPECT_EQ(e.op, "aten::mm");
    EXPECT_EQ(e.mesh, "DeviceMesh(tp=4)");
    EXPECT_TRUE(e.has_rule);
    EXPECT_EQ(e.bytes(), 0);
    ASSERT_EQ(e.dims.size(), 1u);
    EXPECT_EQ(e.dims[0].name, "tp");
    EXPECT_EQ(e.dims[0].num_ranks, 4);
    const Explanation::Option& chosen = e.dims[0].options[e.dims[0].chosen];
    EXPECT_EQ(chosen.inputs, (Placements{Shard(1), Shard(0)}));
    EXPECT_EQ(chosen.outputs, Placements{Partial()});
    EXPECT_EQ(chosen.move, 0);
    EXPECT_EQ(chosen.bytes, 0);
    // The others: nothing is cheaper, Replicate is the first and gathers both.
    const Explanation::Option& replicate = e.dims[0].options[0];
    EXPECT_EQ(replicate.inputs, (Placements{Replicate(), Replicate()}));
    EXPECT_EQ(replicate.bytes, (8 * 9 + 9 * 6) * 8);
    EXPECT_GE(e.dims[0].options.size(), 4u);
    for (const Explanation::Option& option : e.dims[0].options) {
      EXPECT_GE(option.seconds(), chosen.seconds());
    }
    ASSERT_EQ(e.inputs.size(), 2u);
    EXPECT_EQ(e.inputs[0].name, "self");
    EXPECT_EQ(e.inputs[1].name, "mat2");
    EXPECT_EQ(e.inputs[1].shape, (std::vector<int64_t>{12, 6}));
    ASSERT_EQ(e.outputs.size(), 1u);
    EXPECT_EQ(e.outputs[0].after, Layout({Partial()}));
  });
}

// A link takes 8 s and a second for 2 bytes, a rank does 4 flops and touches 16 bytes in a second.
void set_round_costs(const MeshPtr& mesh) {
  CostModel model;
  model.links = {{.latency = 8, .bandwidth = 2}};
  model.device = {.flops = 4, .bandwidth = 16};
  set_cost_model(mesh, model);
}

// An option that takes these and leaves this: "S(0), R -> S(0)".
const Explanation::Option& option_of(const Explanation::Dim& dim, const std::string& placements) {
  const auto is_it = [&](const Explanation::Option& o) {
    return absl::StrCat(absl::StrJoin(o.inputs, ", ", absl::StreamFormatter()), " -> ",
                        absl::StrJoin(o.outputs, ", ", absl::StreamFormatter())) == placements;
  };
  const auto found = std::find_if(dim.options.begin(), dim.options.end(), is_it);
  if (found == dim.options.end()) throw std::runtime_error(absl::StrCat("no ", placements));
  return *found;
}

// What moves nothing between ranks still counts 1e-7 s: see strategy_cost.cc.
void expect_terms(const Explanation::Option& o, double move, double compute, double owed,
                  const std::string& gives_up, int64_t bytes) {
  SCOPED_TRACE(absl::StrJoin(o.inputs, ", ", absl::StreamFormatter()));
  EXPECT_NEAR(o.move, move, 1e-6);
  EXPECT_NEAR(o.compute, compute, 1e-9);
  EXPECT_NEAR(o.owed, owed, 1e-9);
  EXPECT_EQ(o.gives_up, gives_up);
  EXPECT_EQ(o.bytes, bytes);
  EXPECT_EQ(o.obstacle, "");
}

// 2 * 8 * 4 * 2 = 128 flops. x has 128 bytes, w 32, the result 64.
TEST(ExplainTest, EachTermIsWhatTheCostModelSays) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    set_round_costs(mesh);
    const at::Tensor x = empty({8, 4}, mesh, {Replicate()});
    const at::Tensor w = empty({4, 2}, mesh, {Shard(0)}).requires_grad_();  // a weight that is cut
    const Explanation e = explain("aten::mm", {x, w});
    const Explanation::Dim& tp = e.dims[0];
    EXPECT_EQ(&option_of(tp, "S(1), S(0) -> P(sum)"), &tp.options[tp.chosen]);
    // Half the flops, half of x and of w, all of the result; an all-reduce of 64 bytes takes
    // 8 + 64 / 2, of which half is counted.
    expect_terms(option_of(tp, "S(1), S(0) -> P(sum)"), 0, 16 + 9, 20, "", 0);
    // To gather w: 8 + 16 / 2.
    expect_terms(option_of(tp, "R, R -> R"), 16, 32 + 14, 0, "weight", 16);
    // The result is cut as nobody asked: twice its gathering, 8 + 32 / 2.
    expect_terms(option_of(tp, "S(0), R -> S(0)"), 16, 16 + 8, 48, "weight", 16);
    // w goes from rows to columns: 8 + 8 / 2.
    expect_terms(option_of(tp, "R, S(1) -> S(1)"), 12, 16 + 11, 48, "weight", 8);
    // Other products would owe the same reduction, 40 s, again.
    expect_terms(option_of(tp, "P(sum), R -> P(sum)"), 16, 32 + 14, 42, "weight", 16);
    const auto json = nlohmann::json::parse(e.to_json())["dims"][0];
    const auto& chosen = json["options"][json["chosen"].get<size_t>()];
    EXPECT_EQ(chosen["inputs"], (nlohmann::json{"S(1)", "S(0)"}));
    EXPECT_NEAR(chosen["move"], 0, 1e-6);
    EXPECT_EQ(chosen["compute"], 25);
    EXPECT_EQ(chosen["owed"], 20);
    EXPECT_NEAR(chosen["seconds"], 45, 1e-6);
    EXPECT_EQ(chosen["gives_up"], "");
    EXPECT_EQ(json["options"][0]["gives_up"], "weight");
    EXPECT_THAT(e.to_string(),
                HasSubstr("     seconds   move  compute  owed  bytes  self    mat2    result  "
                          "gives up\n"
                          "  *       45  1e-07       25    20      0  S(1)    S(0)    P(sum)\n"
                          "          62     16       46     0     16  R       R       R       "
                          "weight\n"));
  });
}

// A batch of 4 products of 2 x 2 by 2 x 16: 512 flops; 64, 512 and 512 bytes.
TEST(ExplainTest, WhatGivesUpLessComesFirstHoweverDear) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    set_round_costs(mesh);
    const at::Tensor x = empty({4, 2, 2}, mesh, {Shard(0)});
    const at::Tensor w = empty({4, 2, 16}, mesh, {Shard(2)}).requires_grad_();
    const Explanation e = explain("aten::bmm", {x, w});
    const Explanation::Dim& dp = e.dims[0];
    expect_terms(option_of(dp, "S(0), S(0) -> S(0)"), 72, 64 + 34, 0, "", 128);
    expect_terms(option_of(dp, "S(1), R -> S(1)"), 16 + 136, 64 + 50, 0.45 * 136, "data's place",
                 16 + 256);
    expect_terms(option_of(dp, "R, S(2) -> S(2)"), 24, 64 + 36, 0, "data", 32);
    ASSERT_EQ(dp.order.size(), dp.options.size());
    const auto at = [&](size_t i) { return &dp.options[dp.order[i]]; };
    EXPECT_EQ(at(0), &option_of(dp, "S(0), S(0) -> S(0)"));    // 170 s
    EXPECT_EQ(at(1), &option_of(dp, "S(1), R -> S(1)"));       // 327.2 s
    EXPECT_EQ(at(2), &option_of(dp, "R, S(2) -> S(2)"));       // 124 s
    EXPECT_EQ(at(3), &option_of(dp, "S(2), S(1) -> P(sum)"));  // 334 s
    const std::string text = e.to_string();
    EXPECT_LT(text.find("data's place"), text.find("  124 ")) << text;
  });
}

TEST(ExplainTest, ThePlansAreWhatIsSent) {
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{2}, {3}, {4}}) {
    on_mesh({{"x", sizes[0]}}, [](const MeshPtr& mesh) {
      for (const Placement& p : testing::all_placements(2, true)) {
        for (const Placement& q : testing::all_placements(2, true)) {
          SCOPED_TRACE(p.to_string() + " " + q.to_string());
          const at::Tensor a = scattered(numbers({5, 7}), mesh, {p});
          const at::Tensor b = scattered(numbers({5, 7}), mesh, {q});
          for (const char* op : {"aten::mul.Tensor", "aten::add.Tensor", "aten::maximum"}) {
            const Explanation e = explain(op, {a, b});
            const CommTrace trace(mesh);
            std::vector<c10::IValue> stack = {a, b};
            if (std::string(op) == "aten::add.Tensor") stack.emplace_back(1);
            const std::string full(op);
            const size_t dot = full.find('.');
            c10::Dispatcher::singleton()
                .findSchemaOrThrow(full.substr(0, dot).c_str(),
                                   dot == full.npos ? "" : full.substr(dot + 1).c_str())
                .callBoxed(stack);
            EXPECT_EQ(trace.bytes(), e.bytes()) << e.to_string() << trace.to_string();
            EXPECT_EQ(layout_of(stack[0].toTensor()), e.outputs[0].after);
          }
        }
      }
    });
  }
}

TEST(ExplainTest, SaysWhichCutTheRuleDoesNotTake) {
  on_mesh({{"x", 4}}, [](const MeshPtr& mesh) {
    const at::Tensor weight = scattered(numbers({2, 1, 3, 3}), mesh, {Replicate()});
    const auto of = [&](const at::Tensor& image) {
      return explain("aten::convolution", {image, weight, c10::nullopt, std::vector<int64_t>{1, 1},
                                           std::vector<int64_t>{1, 1}, std::vector<int64_t>{1, 1},
                                           false, std::vector<int64_t>{0, 0}, 1});
    };
    // Windows overlap; some parts of a dimension of 3 are empty besides.
    const Explanation rows = of(scattered(numbers({2, 1, 8, 5}), mesh, {Shard(2)}));
    EXPECT_THAT(rows.dims[0].not_offered,
                ElementsAre("input S(2): the operator's rule offers nothing that takes it so"));
    EXPECT_THAT(rows.to_string(), HasSubstr(rows.dims[0].not_offered[0]));
    const Explanation few = of(scattered(numbers({2, 1, 3, 5}), mesh, {Shard(2)}));
    EXPECT_THAT(few.dims[0].not_offered,
                ElementsAre("input S(2): the operator's rule offers nothing that takes it so; "
                            "dimension 2 has 3 elements for 4 ranks, and some parts are empty"));
    EXPECT_EQ(nlohmann::json::parse(few.to_json())["dims"][0]["not_offered"].size(), 1u);
    // Samples, fewer than ranks, it does take.
    EXPECT_THAT(of(scattered(numbers({3, 1, 4, 5}), mesh, {Shard(0)})).dims[0].not_offered,
                IsEmpty());
  });
}

TEST(ExplainTest, SaysWhyAStrategyIsNotPossible) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({8, 12}), mesh, {Shard(0), Replicate()});
    const Explanation e = explain("aten::relu", {x});
    ASSERT_EQ(e.dims.size(), 2u);
    EXPECT_EQ(e.dims[1].name, "tp");
    EXPECT_EQ(e.dims[1].chosen, 0u);
    bool found = false;
    for (const Explanation::Option& option : e.dims[1].options) {
      if (option.inputs[0] != Shard(0)) continue;
      found = true;
      EXPECT_THAT(option.obstacle, HasSubstr("nothing is sharded over this mesh dimension"));
    }
    EXPECT_TRUE(found);
    EXPECT_THAT(e.to_string(), HasSubstr("  not possible because\n"));
    EXPECT_THAT(e.to_string(), HasSubstr("nothing is sharded over this mesh dimension"));
  });
}

TEST(ExplainTest, ExplainsWhatACallIsMadeOf) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({3, 4}), mesh, {Replicate()});
    at::Tensor w = scattered(numbers({6, 4}), mesh, {Shard(0)}).detach().requires_grad_();
    const at::Tensor b = scattered(numbers({6}), mesh, {Shard(0)});
    const auto ops = [&](const std::function<void()>& call) {
      std::vector<std::string> names;
      for (const Explanation& e : explain(mesh, call)) names.push_back(e.op);
      return names;
    };
    EXPECT_THAT(ops([&] { at::linear(x, w, b); }), ElementsAre("aten::t", "aten::addmm"));
    EXPECT_THAT(ops([&] { at::linear(x, w, b).sum().backward(); }),
                ::testing::Contains("aten::mm"));  // in backward
    EXPECT_THAT(ops([] {}), IsEmpty());
    EXPECT_THAT(ops([&] { at::ones({2}).add(1); }), IsEmpty());  // not a DTensor
    const absl::Status composite = status_of([&] { explain("aten::linear", {x, w, b}); });
    EXPECT_EQ(composite.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(composite.message()), HasSubstr("made of others, which can be traced"));
  });
}

TEST(ExplainTest, OperatorsWithoutARuleAreGathered) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({4, 4}), mesh, {Shard(0)});
    const Explanation e = explain("aten::_aminmax", {x});
    EXPECT_FALSE(e.has_rule);
    EXPECT_THAT(e.dims, IsEmpty());
    EXPECT_EQ(e.bytes(), 8 * 8);
    EXPECT_EQ(e.inputs[0].after, Layout({Replicate()}));
    EXPECT_THAT(e.to_string(), HasSubstr("no sharding rule"));

    const Explanation by_rule = explain("aten::_unique2", {x});
    EXPECT_TRUE(by_rule.has_rule);
    EXPECT_EQ(by_rule.inputs[0].after, Layout({Replicate()}));
    EXPECT_THAT(by_rule.to_string(), HasSubstr("by its sharding rule every input is gathered"));
  });
}

TEST(ExplainTest, AWrittenResultHasToGoBack) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor a = scattered(numbers({4, 6}), mesh, {Replicate()});
    const at::Tensor b = scattered(numbers({4, 6}), mesh, {Shard(0)});
    const Explanation e = explain("aten::exp.out", {b, a});
    ASSERT_EQ(e.outputs.size(), 1u);
    EXPECT_EQ(e.outputs[0].before, Layout({Shard(0)}));
    EXPECT_EQ(e.outputs[0].after, Layout({Replicate()}));
    EXPECT_EQ(e.bytes(), 12 * 8);
  });
}

TEST(ExplainTest, ListsAndNones) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor a = scattered(numbers({4, 6}), mesh, {Shard(0)});
    const at::Tensor b = scattered(numbers({4, 6}), mesh, {Replicate()});
    const Explanation e = explain("aten::cat", {std::vector<at::Tensor>{a, b}, 1});
    ASSERT_EQ(e.inputs.size(), 2u);
    EXPECT_EQ(e.inputs[0].name, "tensors[0]");
    EXPECT_EQ(e.inputs[1].name, "tensors[1]");
    const Explanation clamp = explain("aten::clamp.Tensor", {a, c10::IValue(), b});
    ASSERT_EQ(clamp.inputs.size(), 2u);
    EXPECT_EQ(clamp.inputs[1].name, "max");
  });
}

TEST(ExplainTest, TensorsNeedNotExist) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    // 16 GiB each.
    const at::Tensor x =
        empty({65536, 65536}, mesh, {Shard(0), Replicate()}, at::TensorOptions(at::kMeta));
    const at::Tensor w =
        empty({65536, 65536}, mesh, {Replicate(), Shard(0)}, at::TensorOptions(at::kMeta));
    const Explanation e = explain("aten::mm", {x, w});
    EXPECT_EQ(e.outputs[0].shape, (std::vector<int64_t>{65536, 65536}));
    EXPECT_EQ(e.outputs[0].after[1], Partial());
  });
}

// As masks are that a model makes: nothing is compared.
TEST(ExplainTest, PlainTensorsCountAsReplicated) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({4, 3}), mesh, {Shard(0)});
    const at::Tensor mask = numbers({4, 3}).gt(5);
    const CommTrace trace(mesh);
    const Explanation one = explain("aten::masked_fill.Scalar", {x, mask, 0.0});
    EXPECT_COMMS(trace, {});
    EXPECT_EQ(one.inputs[1].before, Layout(Placements{Replicate()}));
    EXPECT_EQ(one.outputs[0].after, Layout(Placements{Shard(0)}));
    const std::vector<Explanation> all = explain(mesh, [&] { x.masked_fill(mask, 0).sum(); });
    ASSERT_EQ(all.size(), 2u);
    EXPECT_EQ(all[0].outputs[0].after, Layout(Placements{Shard(0)}));
  });
}

TEST(ExplainTest, BadCallsAreErrors) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({4, 6}), mesh, {Shard(0)});
    const auto message = [](const std::function<void()>& call) {
      const absl::Status status = status_of(call);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      return std::string(status.message());
    };
    EXPECT_THAT(message([&] { explain("aten::no_such", {x}); }),
                HasSubstr("'aten::no_such': there is no such operator"));
    EXPECT_THAT(message([&] { explain("aten::add", {x, x}); }), HasSubstr("aten::add.Tensor"));
    EXPECT_THAT(message([&] { explain("aten::relu", {at::ones({2})}); }),
                HasSubstr("none of the arguments is a DTensor"));
    EXPECT_THAT(message([&] { explain("aten::mul.Tensor", {x, at::ones({4, 6}).to_sparse()}); }),
                HasSubstr("argument 'other' is a plain tensor of shape [4, 6]"));
    EXPECT_THROW(explain("aten::mm", {x}), c10::Error);     // an argument is missing
    EXPECT_THROW(explain("aten::mm", {x, 3}), c10::Error);  // and of the wrong type
    EXPECT_THROW(explain("aten::mm", {x, x}), c10::Error);  // and of the wrong shape
    EXPECT_THROW(explain(mesh, [&] { at::mm(x, x); }), c10::Error);
    const CommTrace trace(mesh);  // the observer of the call that threw is gone
    x.cumsum(0);
    EXPECT_COMMS(trace, {{"all_to_all", 1}});
  });
}

TEST(ExplainTest, TextAndJson) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({4, 6}), mesh, {Shard(0)});
    const Explanation e = explain("aten::cumsum", {x, 0, c10::IValue()});
    const std::string text = e.to_string();
    EXPECT_THAT(text, ::testing::StartsWith("aten::cumsum on DeviceMesh(tp=2)\n"
                                            "along tp (2 ranks):\n"));
    EXPECT_THAT(text, HasSubstr("  *  "));
    EXPECT_THAT(text,
                HasSubstr("[S(0)] -> [S(1)]  all_to_all(mesh dim 0, S(0) -> S(1)): 48 bytes\n"))
        << text;
    const auto json = nlohmann::json::parse(e.to_json());
    EXPECT_EQ(json["op"], "aten::cumsum");
    EXPECT_EQ(json["bytes"], 48);
    EXPECT_EQ(json["dims"][0]["options"].size(), e.dims[0].options.size());
    EXPECT_EQ(json["dims"][0]["chosen"], e.dims[0].chosen);
    EXPECT_EQ(json["inputs"][0]["steps"][0]["kind"], "all_to_all");
    EXPECT_EQ(json["outputs"][0]["after"], "[S(1)]");
  });
}

}  // namespace
}  // namespace shardweave

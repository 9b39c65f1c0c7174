// What a plan says of each tensor, before anything is touched.
#include "shardweave/dtensor/parameter_plan.h"

#include <functional>
#include <string>
#include <utility>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::on_mesh;

// Two layers, a tied head, a buffer.
struct Model : torch::nn::Module {
  Model() {
    for (int i = 0; i < 2; ++i) {
      auto layer = std::make_shared<torch::nn::Module>();
      layer->register_parameter("q", at::ones({4, 6}));
      layer->register_parameter("b", at::ones({5}));
      register_module("h" + std::to_string(i), layer);
    }
    embedding = register_parameter("embedding", at::ones({7, 4}));
    register_parameter("head", embedding);
    register_buffer("mask", at::ones({3}));
  }
  at::Tensor embedding;
};

DeviceMesh mesh() {
  return *DeviceMesh::create({{"dp", 2}, {"tp", 3}});
}

// "name: layout by pattern" of each.
std::vector<std::string> rows(const ParameterPlan& plan) {
  std::vector<std::string> result;
  for (const ResolvedTensor& tensor : resolve_plan(Model(), mesh(), plan)) {
    std::string row = tensor.fqns[0] + ": " + tensor.layout.to_string();
    if (tensor.entry.has_value()) row += " by " + plan[*tensor.entry].pattern;
    result.push_back(std::move(row));
  }
  return result;
}

std::string error_of(const ParameterPlan& plan, absl::StatusCode code) {
  try {
    resolve_plan(Model(), mesh(), plan);
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), code);
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(ParameterPlanTest, TheMostSpecificEntryCountsWhateverTheOrder) {
  ParameterPlan plan = {{"*", {{"dp", Shard(0)}}},
                        {"re:.*", {{"tp", Shard(0)}}},
                        {"*.q", {{"tp", Shard(0)}}},
                        {"h1.q", {Replicate(), Shard(-1)}}};
  plan.erase(plan.begin() + 1);  // '*' is more specific everywhere
  for (int turn = 0; turn < 2; ++turn) {
    EXPECT_THAT(rows(plan),
                ::testing::UnorderedElementsAre(
                    "embedding: [S(0), R] by *", "h0.q: [R, S(0)] by *.q", "h0.b: [S(0), R] by *",
                    "h1.q: [R, S(1)] by h1.q", "h1.b: [S(0), R] by *", "mask: [S(0), R] by *"));
    std::reverse(plan.begin(), plan.end());
  }
}

TEST(ParameterPlanTest, TiedNamesAreOneTensor) {
  // Either name decides; the other one matches less specific entries, or none.
  for (const ParameterPlan& plan : std::vector<ParameterPlan>{
           {{"head", {{"tp", Shard(0)}}}},
           {{"embedding", {{"tp", Shard(0)}}}},
           {{"head", {{"tp", Shard(0)}}}, {"*", {}}},
           {{"*", {}}, {"head", {{"tp", Shard(0)}}}},
           {{"head", {{"tp", Shard(0)}}}, {"{head,embedding}", {}}},
           {{"head", {{"tp", Shard(0)}}}, {"embedding", {{"tp", Shard(0)}}}}}) {
    const std::vector<ResolvedTensor> resolved = resolve_plan(Model(), mesh(), plan);
    const auto tied = std::find_if(resolved.begin(), resolved.end(),
                                   [](const ResolvedTensor& t) { return t.fqns.size() == 2; });
    ASSERT_NE(tied, resolved.end());
    EXPECT_THAT(tied->fqns, ::testing::UnorderedElementsAre("embedding", "head"));
    EXPECT_EQ(tied->layout.placements(), (Placements{Replicate(), Shard(0)}));
    EXPECT_THAT(tied->local_sizes, ElementsAre(3, 4));
  }
  EXPECT_THAT(error_of({{"head", {}}, {"embedding", {{"tp", Shard(0)}}}},
                       absl::StatusCode::kInvalidArgument),
              HasSubstr("are one tensor, and the plan gives it two placements: "));
  EXPECT_THAT(
      error_of({{"hea?", {}}, {"emb*", {{"tp", Shard(0)}}}}, absl::StatusCode::kInvalidArgument),
      HasSubstr("are one tensor"));
}

TEST(ParameterPlanTest, ATieIsAnErrorUnlessBothSayTheSame) {
  const std::string text = error_of({{"*.q", {{"tp", Shard(0)}}}, {"h0*", {{"dp", Shard(0)}}}},
                                    absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(text, AllOf(HasSubstr("resolve_plan: 'h0.q' is given two placements: "),
                          HasSubstr("[R, S(0)] by the plan's entry 1, '*.q'"),
                          HasSubstr("[S(0), R] by the plan's entry 2, 'h0*'"),
                          HasSubstr("equally specific")));
  EXPECT_THAT(error_of({{"re:h0.*", {}}, {"re:.*q", {{"dp", Shard(0)}}}},
                       absl::StatusCode::kInvalidArgument),
              HasSubstr("equally specific"));
  EXPECT_THAT(
      error_of({{"mask", {}}, {"mask", {{"dp", Shard(0)}}}}, absl::StatusCode::kInvalidArgument),
      HasSubstr("equally specific"));
  EXPECT_THAT(rows({{"*.q", {{"tp", Shard(0)}}}, {"h0*", {{"tp", Shard(0)}}}}),
              AllOf(::testing::Contains("h0.q: [R, S(0)] by *.q"),
                    ::testing::Contains("h0.b: [R, S(0)] by h0*")));
}

TEST(ParameterPlanTest, AnEntryThatDecidesNothingIsAnError) {
  EXPECT_THAT(
      error_of({{"*.q", {}}, {"h0.q", {}}, {"h1.q", {}}}, absl::StatusCode::kInvalidArgument),
      AllOf(HasSubstr("the plan's entry 1, '*.q', decides nothing"),
            HasSubstr("'h0.q' by the plan's entry 2, 'h0.q'")));
}

TEST(ParameterPlanTest, AnEntryThatMatchesNothingSaysWhatIsNearlyTheSame) {
  const auto text = [](const char* pattern) {
    return error_of({{pattern, {}}}, absl::StatusCode::kNotFound);
  };
  EXPECT_THAT(text("h1.qq"),
              HasSubstr("entry 1, 'h1.qq' matches no parameter or buffer; did you mean "
                        "'h1.q', 'h0.q', 'h1.b'?"));
  EXPECT_THAT(text("*bedink"), HasSubstr("did you mean 'embedding'?"));
  EXPECT_THAT(text("re:x"), HasSubstr("matches no parameter or buffer; there are: "));
  EXPECT_THAT(text("decoder.layers.0.weight"), HasSubstr("there are: "));
}

TEST(ParameterPlanTest, PlacementsThatTheMeshOrTheTensorCannotHave) {
  const std::pair<ParameterPlan, std::string> cases[] = {
      {{{"*.q", {Shard(0)}}},
       "'*.q' ('h0.q'): [S(0)] has 1 placements; DeviceMesh(dp=2, tp=3) wants 2"},
      {{{"mask", {Shard(0), Shard(0), Shard(0)}}}, "has 3 placements; "},
      {{{"mask", {{"tp", Shard(1)}}}}, "'mask': the layout [R, S(1)] does not fit"},
      {{{"mask", {{"tp", Partial()}}}}, "has a Partial; wanted Shard or Replicate"},
  };
  for (const auto& [plan, text] : cases) {
    EXPECT_THAT(error_of(plan, absl::StatusCode::kInvalidArgument), HasSubstr(text));
  }
  EXPECT_THAT(error_of({{"mask", {{"pp", Shard(0)}}}}, absl::StatusCode::kNotFound),
              HasSubstr("has no dimension \"pp\""));
}

TEST(ParameterPlanTest, AsATable) {
  EXPECT_THAT(
      to_string(resolve_plan(Model(), mesh(), {{"*.q", {{"tp", Shard(0)}}}})),
      AllOf(HasSubstr("tensor "), HasSubstr("a rank's part"), HasSubstr("h0.q "),
            HasSubstr("[2, 6]"), HasSubstr("'*.q'"), HasSubstr("= "), HasSubstr("no entry")));
}

// The dimensions cut in the order that the layout says.
TEST(ParameterPlanTest, ALayoutSaysWhoCutsFirst) {
  on_mesh({{"dp", 2}, {"tp", 3}}, [](const MeshPtr& on) {
    Model model;
    const at::Tensor whole = at::arange(28, at::kFloat).reshape({7, 4});
    {
      const at::NoGradGuard no_grad;
      model.embedding.copy_(whole);
    }
    const Layout layout = *Layout::create({Shard(0), Shard(0)}, {1, 0});
    distribute_module(model, on, {{"embedding", layout}});
    EXPECT_EQ(layout_of(model.embedding), layout);
    EXPECT_TRUE(at::equal(full_tensor(model.embedding), whole));
    // tp cuts 7 rows into 3, 3, 1; dp those into 2, 1 and 1, 0.
    const int64_t rows[2][3] = {{2, 2, 1}, {1, 1, 0}};
    EXPECT_EQ(to_local(model.embedding).size(0), rows[on->coordinate()[0]][on->coordinate()[1]]);
  });
}

}  // namespace
}  // namespace shardweave

// A weight that a plan cut and an operator needs whole: said once, counted, refused by the strict
// scope, which says what to write instead.
#include <memory>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::on_mesh;

class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    said.push_back(warning.msg());
    functions.emplace_back(warning.source_location().function);
  }
  std::vector<std::string> said, functions;
};

struct Mlp : torch::nn::Module {
  at::Tensor up = register_parameter("up", at::arange(48, at::kFloat).reshape({6, 8}) / 48);
  at::Tensor down = register_parameter("down", at::ones({8, 6}));
  at::Tensor forward(const at::Tensor& x) { return x.mm(up).relu().mm(down); }
};

int64_t unsharded(const MeshPtr& mesh) {
  return dispatch_counters(mesh).unsharded_weights;
}

TEST(WeightsTest, AWeightThatMeetsACutBatchIsSaidOnceAndCountedEachTime) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    Mlp mlp;
    distribute_module(mlp, mesh, {{"*", {{"dp", Shard(0)}}}});
    const at::Tensor x = distribute_tensor(at::ones({4, 6}), mesh, {{"dp", Shard(0)}});
    for (int step = 1; step <= 3; ++step) {
      mlp.forward(x).sum().backward();
      EXPECT_EQ(unsharded(mesh), 2 * step);  // backward has what forward gathered
      finish_grad_sync(mlp);
      const c10::NoGradGuard no_grad;
      for (at::Tensor& w : mlp.parameters()) {
        w.sub_(w.grad(), 0.1);
        w.mutable_grad() = at::Tensor();
      }
    }
    if (mesh->coordinate()[0] != 0) {
      EXPECT_THAT(warnings.said, IsEmpty());
      return;
    }
    // 6 x 8 floats, of which the other rank has half. What follows the first is said when that is
    // there again.
    EXPECT_THAT(
        warnings.said,
        ElementsAre("shardweave: aten::mm needs the weight 'up', DTensor[6, 8] Float [S(0)], whole "
                    "along dp: 96 bytes for each rank, every time (the counter unsharded_weights "
                    "counts each)",
                    "shardweave: as 'up' is, 1 more weight is brought elsewhere where operators "
                    "need them, 96 bytes for each rank, every time (the counter "
                    "unsharded_weights counts each): down (aten::mm, 96 bytes)"));
    // Users do not know our functions.
    EXPECT_THAT(warnings.functions, ElementsAre("aten::mm", "aten::mm"));
  });
}

struct Deep : torch::nn::Module {
  explicit Deep(int layers) {
    for (int i = 0; i < layers; ++i) layers_->push_back(std::make_shared<Mlp>());
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers_) x = layer->as<Mlp>()->forward(x);
    return x.matmul(head.t());
  }
  at::Tensor head = register_parameter("head", at::ones({5, 6}));
  torch::nn::ModuleList layers_ = register_module("layers", torch::nn::ModuleList());
};

// A plan that cuts every parameter and means it.
TEST(WeightsTest, ManyWeightsAreTwoLines) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    Deep model(12);
    distribute_module(model, mesh, {{"*", {{"dp", Shard(0)}}}});
    const at::Tensor x = distribute_tensor(at::ones({4, 6}), mesh, {{"dp", Shard(0)}});
    for (int step = 1; step <= 4; ++step) {
      model.forward(x).sum().backward();
      EXPECT_EQ(unsharded(mesh), 25 * step);
      const c10::NoGradGuard no_grad;
      for (at::Tensor& w : model.parameters()) {
        w.mul_(0.5);
        w.mutable_grad() = at::Tensor();
      }
    }
    if (mesh->coordinate()[0] != 0) return;
    ASSERT_EQ(warnings.said.size(), 2u);
    EXPECT_THAT(warnings.said[0], HasSubstr("the weight 'layers.0.up'"));
    // 23 of 6 x 8 floats and one of 5 x 6, of which the first rank lacks less than half.
    EXPECT_THAT(warnings.said[1], AllOf(HasSubstr("as 'layers.0.up' is, 24 more weights are"),
                                        HasSubstr(absl::StrCat(23 * 96 + 3 * 6 * 4, " bytes")),
                                        HasSubstr(": layers.*.down (12, aten::mm, 1152 bytes), "
                                                  "layers.*.up (11, aten::mm, 1056 bytes), "
                                                  "head (aten::mm, 72 bytes)")));
  });
}

// What the operator gets is a transposed view: the layout is the parameter's.
TEST(WeightsTest, TheLayoutIsThatOfTheParameter) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    Deep model(0);
    distribute_module(model, mesh, {{"head", {{"dp", Shard(0)}}}});
    model.forward(distribute_tensor(at::ones({4, 6}), mesh, {{"dp", Shard(0)}}));
    if (mesh->coordinate()[0] != 0) return;
    EXPECT_THAT(warnings.said,
                ElementsAre(HasSubstr("the weight 'head', DTensor[5, 6] Float [S(0)], whole")));
  });
}

TEST(WeightsTest, TheModuleThatRunsIsNamed) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    Mlp mlp;
    distribute_module(mlp, mesh, {{"up", {{"dp", Shard(0)}}}});
    const at::Tensor x = distribute_tensor(at::ones({4, 6}), mesh, {{"dp", Shard(0)}});
    const ModuleScope scope(mesh, "layers.0.mlp");
    // In another precision it is another tensor, made anew each time.
    for (int i = 0; i < 3; ++i) x.to(at::kDouble).mm(mlp.up.to(at::kDouble));
    EXPECT_EQ(unsharded(mesh), 3);
    if (mesh->coordinate()[0] != 0) return;
    EXPECT_THAT(warnings.said, ElementsAre(AllOf(HasSubstr("in module 'layers.0.mlp'"),
                                                 HasSubstr("Double"), HasSubstr("whole"))));
  });
}

TEST(WeightsTest, WhatThePlanMeantIsNotSaid) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    Mlp mlp;
    distribute_module(mlp, mesh, {{"up", {{"tp", Shard(1)}}}, {"down", {{"tp", Shard(0)}}}});
    const at::Tensor x = distribute_tensor(at::ones({4, 6}), mesh, {{"dp", Shard(0)}});
    mlp.forward(x).sum().backward();
    finish_grad_sync(mlp);
    EXPECT_EQ(unsharded(mesh), 0);
    EXPECT_THAT(warnings.said, IsEmpty());
    // Nor what the user asks for, and what the optimizer's states do.
    full_tensor(mlp.up);
    at::zeros_like(mlp.up).add_(mlp.up.grad());
    EXPECT_EQ(unsharded(mesh), 0);
  });
}

TEST(WeightsTest, TheStrictScopeNamesIt) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Mlp mlp;
    distribute_module(mlp, mesh, {{"up", {{"dp", Shard(0)}}}});
    const at::Tensor x = distribute_tensor(at::ones({4, 6}), mesh, {{"dp", Shard(0)}});
    const StrictScope strict(mesh);
    try {
      x.mm(mlp.up);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(std::string(error.status().message()),
                  AllOf(HasSubstr("argument 'mat2' (the weight 'up')"), HasSubstr("96 bytes"),
                        HasSubstr("; write redistribute(mat2, [R]) in front of it")));
    }
    x.mm(redistribute(mlp.up, {Replicate()}));  // as it says
    EXPECT_EQ(unsharded(mesh), 0);
  });
}

}  // namespace
}  // namespace shardweave

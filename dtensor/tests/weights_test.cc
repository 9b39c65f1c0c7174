// A weight that a plan cut and an operator needs whole: said once, counted, refused by the strict
// scope.
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::on_mesh;

class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { said.push_back(warning.msg()); }
  std::vector<std::string> said;
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
    // 6 x 8 floats, of which the other rank has half.
    EXPECT_THAT(warnings.said,
                ElementsAre(AllOf(HasSubstr("aten::mm"), HasSubstr("'up'"), HasSubstr("96 bytes")),
                            AllOf(HasSubstr("aten::mm"), HasSubstr("'down'"), HasSubstr("[R]"))));
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
                                                 HasSubstr("Double"), HasSubstr("as [R]"))));
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
                  AllOf(HasSubstr("argument 'mat2' (the weight 'up')"), HasSubstr("96 bytes")));
    }
    EXPECT_EQ(unsharded(mesh), 0);
  });
}

}  // namespace
}  // namespace shardweave

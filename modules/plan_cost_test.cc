#include "shardweave/modules/plan_cost.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/cost_model.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/counted_mesh.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/module_memory.h"
#include "shardweave/modules/nn/causal_lm.h"
#include "shardweave/modules/nn/registry.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {
namespace {

using testing::Carrier;
using ::testing::HasSubstr;
using testing::on_counted_mesh;
using testing::on_mesh;
using testing::Sent;

constexpr char kGpt2[] = R"json({"model_type": "gpt2", "vocab_size": 32, "n_positions": 8,
    "n_embd": 16, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.1, "embd_pdrop": 0,
    "attn_pdrop": 0})json";
constexpr char kLlama[] = R"json({"model_type": "llama", "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4})json";

// A language model and the mean loss of a batch of 4 x 8 tokens, cut along "dp" if there is one.
MakeModel language_model(const char* config) {
  const at::Tensor ids = (at::arange(4 * 8, at::kLong) * 7).remainder(32).view({4, 8});
  return [config, ids] {
    const nn::Model model = value_or_throw(nn::make_model("", config));
    return StepModel{model.module, [model, ids](const MeshPtr& mesh) {
                       NamedPlacements rows;
                       if (mesh->mesh().dim("dp").ok()) rows.emplace_back("dp", Shard(0));
                       const at::Tensor on =
                           distribute_tensor(ids, mesh, rows, {.source = std::nullopt});
                       return nn::next_token_loss(model.forward({on})[0], on);
                     }};
  };
}

ShardingPlan zoo_plan(const char* config, const DeviceMesh& mesh, bool sequence_parallel) {
  return deferred_init([&] { return value_or_throw(nn::make_model("", config)); })
      .plan(mesh, {.sequence_parallel = sequence_parallel});
}

using Sums =
    std::map<std::pair<std::string, std::vector<std::string>>, std::pair<int64_t, int64_t>>;

Sums sums_of(const PlanCost& cost) {
  Sums sums;
  for (const PlanCost::Traffic& t : cost.traffic) {
    sums[{t.collective, t.mesh_dims}] = {t.calls, t.bytes};
  }
  return sums;
}

DeviceMesh mesh_of(const std::vector<MeshDim>& dims) {
  return value_or_throw(DeviceMesh::create(dims));
}

absl::Status error_of(const MakeModel& make, const ShardingPlan& plan = {},
                      const CostModel& model = {}) {
  try {
    plan_cost(make, mesh_of({{"tp", 2}}), plan, model);
  } catch (const Error& error) {
    return error.status();
  }
  return absl::OkStatus();
}

// What every rank thread gives to its backend in the same step.
TEST(PlanCostTest, SendsWhatRanksSend) {
  const std::vector<std::vector<MeshDim>> meshes = {
      {{"tp", 2}}, {{"tp", 4}}, {{"dp", 2}, {"tp", 2}}};
  for (const char* config : {kGpt2, kLlama}) {
    for (const std::vector<MeshDim>& dims : meshes) {
      for (const bool sequence_parallel : {false, true}) {
        const DeviceMesh mesh = mesh_of(dims);
        SCOPED_TRACE(mesh.to_string() + config + (sequence_parallel ? " along the sequence" : ""));
        const ShardingPlan plan = zoo_plan(config, mesh, sequence_parallel);
        const PlanCost cost = plan_cost(language_model(config), mesh, plan);
        EXPECT_GT(cost.bytes_sent(), 0);
        const MakeModel make = language_model(config);
        const auto sent =
            on_counted_mesh(dims, Carrier::kInproc, [&](const MeshPtr& on, Sent& mine) {
              StepModel step;
              deferred_init([&] { step = make(); });
              parallelize_module(*step.module, on, plan);
              materialize(*step.module, {.seed = 0});
              const auto run = [&] {
                step.loss(on).backward();
                finish_grad_sync(*step.module);
                step.module->zero_grad();
              };
              run();  // in which plain tensors are compared
              mine.clear();
              const CommTrace trace(on);
              run();
              Sums sums;
              for (const CommEvent& event : trace.events()) {
                auto& [calls, bytes] = sums[{event.collective, event.mesh_dims}];
                calls += 1;
                bytes += event.bytes;
              }
              EXPECT_EQ(sums, sums_of(cost));
            });
        for (const Sent& mine : sent) {
          int64_t calls = 0, bytes = 0;
          for (const auto& collective : mine) {
            if (collective.op == OpKind::kBarrier) continue;  // ranks leave together
            calls += 1;
            bytes += collective.bytes;
          }
          EXPECT_EQ(calls, cost.collectives());
          EXPECT_EQ(bytes, cost.bytes_sent());
        }
      }
    }
  }
}

StepModel linear_model() {
  torch::nn::Linear linear(torch::nn::LinearOptions(8, 12).bias(false));
  return {linear.ptr(), [linear](const MeshPtr& /*mesh*/) mutable {
            return linear->forward(at::ones({4, 8})).square().sum();
          }};
}

// A product forward, and one for the weight's gradient.
TEST(PlanCostTest, CountsOperationsOfThisRank) {
  const DeviceMesh mesh = mesh_of({{"tp", 2}});
  const PlanCost whole = plan_cost(linear_model, mesh, {});
  EXPECT_EQ(whole.flops, 2 * (2 * 4 * 8 * 12));
  EXPECT_EQ(whole.bytes_sent(), 0);
  EXPECT_EQ(whole.traffic.size(), 0u);
  const PlanCost cut =
      plan_cost(linear_model, mesh, {.parameter = {{"weight", {{"tp", Shard(0)}}}}});
  EXPECT_EQ(cut.flops, whole.flops / 2);
  EXPECT_LT(cut.bytes_touched, whole.bytes_touched);
  // Its own: every operator's inputs and outputs, and the optimizer's 7 numbers a parameter.
  const int64_t product = 4 * 8 + 8 * 12 + 4 * 12;
  EXPECT_GE(whole.bytes_touched, 4 * (7 * 8 * 12 + 2 * product));
  EXPECT_LE(whole.bytes_touched, 4 * (7 * 8 * 12 + 8 * product));

  const auto convolution = [] {
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 6, 2).stride(2).bias(false));
    return StepModel{conv.ptr(), [conv](const MeshPtr&) mutable {
                       return conv->forward(at::ones({5, 3, 8, 8})).sum();
                     }};
  };
  const double forward = 2.0 * (5 * 6 * 4 * 4) * (3 * 2 * 2);
  const double flops = plan_cost(convolution, mesh, {}).flops;
  EXPECT_GE(flops, 2 * forward);
  EXPECT_LE(flops, 3 * forward);
}

TEST(PlanCostTest, SecondsAreTheCostModels) {
  const DeviceMesh mesh = mesh_of({{"dp", 2}, {"tp", 2}});
  const ShardingPlan plan = {.parameter = {{"weight", {{"tp", Shard(1)}}}},
                             .forward = {{"output", {{"tp", Replicate()}}}}};
  CostModel model;
  model.links = {{.latency = 1, .bandwidth = 1}, {.latency = 0.5, .bandwidth = 2}};
  model.device = {.flops = 4, .bandwidth = 8};
  const PlanCost cost = plan_cost(linear_model, mesh, plan, model, {.optimizer_states = 1});
  ASSERT_EQ(cost.traffic.size(), 1u);  // one sum of [4, 12]
  EXPECT_EQ(cost.traffic[0].collective, "all_reduce");
  EXPECT_EQ(cost.traffic[0].mesh_dims, std::vector<std::string>{"tp"});
  EXPECT_EQ(cost.bytes_sent(), 4 * 12 * 4);
  EXPECT_DOUBLE_EQ(cost.communication_seconds(), 0.5 + 4 * 12 * 4 / 2.0);
  EXPECT_DOUBLE_EQ(cost.compute_seconds,
                   cost.flops / 4 + static_cast<double>(cost.bytes_touched) / 8);
  EXPECT_DOUBLE_EQ(cost.seconds(), cost.communication_seconds() + cost.compute_seconds);
  EXPECT_EQ(cost.optimizer, cost.parameters);
}

TEST(PlanCostTest, WhatIsFrozenHasNoOptimizer) {
  const auto make = [] {
    torch::nn::Linear linear(8, 4);
    linear->bias.requires_grad_(false);
    return StepModel{linear.ptr(), [linear](const MeshPtr&) mutable {
                       return linear->forward(at::ones({2, 8})).sum();
                     }};
  };
  const PlanCost cost = plan_cost(make, mesh_of({{"tp", 2}}), {});
  EXPECT_EQ(cost.parameters, (8 * 4 + 4) * 4);
  EXPECT_EQ(cost.optimizer, 2 * 8 * 4 * 4);
}

TEST(PlanCostTest, MemoryIsThatOfARank) {
  const std::vector<MeshDim> dims = {{"tp", 4}};
  const ShardingPlan plan = zoo_plan(kLlama, mesh_of(dims), false);
  const MakeModel make = language_model(kLlama);
  const PlanCost cost = plan_cost(make, mesh_of(dims), plan);
  const PlanCost whole = plan_cost(make, mesh_of(dims), {});
  EXPECT_LT(cost.parameters, whole.parameters);
  EXPECT_LT(cost.activations, whole.activations);
  EXPECT_EQ(cost.gradients, cost.parameters);
  EXPECT_EQ(cost.optimizer, 2 * cost.parameters);
  EXPECT_EQ(cost.memory(), cost.buffers + 4 * cost.parameters + cost.activations);
  on_mesh(dims, [&](const MeshPtr& mesh) {
    const StepModel step = make();
    parallelize_module(*step.module, mesh, plan);
    const ModuleMemory memory = module_memory(*step.module, [&] { return step.loss(mesh); });
    if (mesh->rank().value != 0) return;
    EXPECT_EQ(memory.rows[0].parameters, cost.parameters);
    EXPECT_EQ(memory.rows[0].buffers, cost.buffers);
    EXPECT_EQ(memory.rows[0].activations, cost.activations);
  });
}

TEST(PlanCostTest, IsTheSameEveryTime) {
  const DeviceMesh mesh = mesh_of({{"dp", 2}, {"tp", 2}});
  const auto cost = [&] {
    return plan_cost(language_model(kGpt2), mesh, zoo_plan(kGpt2, mesh, true));
  };
  EXPECT_EQ(cost(), cost());
}

TEST(PlanCostTest, TellsItAsTextAndJson) {
  const DeviceMesh mesh = mesh_of({{"tp", 2}});
  const PlanCost cost = plan_cost(language_model(kLlama), mesh, zoo_plan(kLlama, mesh, false));
  EXPECT_THAT(cost.to_string(), HasSubstr("all_reduce"));
  const auto json = nlohmann::json::parse(cost.to_json());
  EXPECT_EQ(json["bytes_sent"], cost.bytes_sent());
  EXPECT_EQ(json["memory"], cost.memory());
  EXPECT_EQ(json["traffic"][0]["mesh_dims"][0], "tp");
}

TEST(PlanCostTest, SaysWhatCannotBe) {
  const absl::Status reads = error_of([] {
    StepModel step = linear_model();
    return StepModel{step.module, [loss = step.loss](const MeshPtr& mesh) {
                       const at::Tensor value = loss(mesh);
                       return value / value.item<double>();
                     }};
  });
  EXPECT_EQ(reads.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(reads.message()), HasSubstr("reads values"));

  const absl::Status none = error_of([] { return StepModel{nullptr, linear_model().loss}; });
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(none.message()), HasSubstr("a module that is null"));
  const absl::Status many = error_of([] {
    StepModel step = linear_model();
    return StepModel{step.module,
                     [loss = step.loss](const MeshPtr& mesh) { return loss(mesh).expand({3}); }};
  });
  EXPECT_THAT(std::string(many.message()), HasSubstr("not one number"));
  CostModel model;
  model.links.resize(2);
  EXPECT_THAT(std::string(error_of(linear_model, {}, model).message()), HasSubstr("2 links"));
  EXPECT_EQ(error_of(linear_model, {.parameter = {{"nothing", {{"tp", Shard(0)}}}}}).code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(error_of(linear_model).ok());
}

}  // namespace
}  // namespace shardweave

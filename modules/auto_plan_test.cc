#include "shardweave/modules/auto_plan.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/nn/causal_lm.h"
#include "shardweave/modules/nn/registry.h"
#include "shardweave/modules/sharding_plan_json.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::on_mesh;

constexpr char kGpt2[] = R"json({"model_type": "gpt2", "vocab_size": 40, "n_positions": 8,
    "n_embd": 16, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0,
    "attn_pdrop": 0})json";
constexpr char kLlama[] = R"json({"model_type": "llama", "vocab_size": 40, "hidden_size": 16,
    "intermediate_size": 27, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1})json";
constexpr char kVit[] = R"json({"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 27, "image_size": 6, "patch_size": 2,
    "num_channels": 1, "num_labels": 5})json";

constexpr int64_t kRows = 4;

struct TestBatch {
  at::Tensor inputs, labels;
};
TestBatch batch_for(const char* config) {
  if (config == kVit) {
    return {at::arange(kRows * 36.0).sin().view({kRows, 1, 6, 6}), at::arange(kRows) % 5};
  }
  const at::Tensor ids = (at::arange(kRows * 8, at::kLong) * 7).remainder(40).view({kRows, 8});
  return {ids, ids};
}

at::Tensor on(const at::Tensor& tensor, const MeshPtr& mesh) {
  if (mesh == nullptr) return tensor;
  NamedPlacements rows;
  if (mesh->mesh().dim("dp").ok()) rows.emplace_back("dp", Shard(0));
  return distribute_tensor(tensor, mesh, rows, {.source = std::nullopt});
}

// Without a mesh: on one device.
MakeModel maker(const char* config) {
  return [config, batch = batch_for(config)] {
    const nn::Model model = value_or_throw(nn::make_model("", config));
    return StepModel{model.module, [=](const MeshPtr& mesh) {
                       const at::Tensor logits = model.forward({on(batch.inputs, mesh)})[0];
                       const at::Tensor labels = on(batch.labels, mesh);
                       return config == kVit ? at::cross_entropy_loss(logits, labels)
                                             : nn::next_token_loss(logits, labels);
                     }};
  };
}

ShardingPlan zoo_plan(const char* config, const DeviceMesh& mesh, bool sequence_parallel) {
  return deferred_init([&] { return value_or_throw(nn::make_model("", config)); })
      .plan(mesh, {.sequence_parallel = sequence_parallel});
}

DeviceMesh mesh_of(const std::vector<MeshDim>& dims) {
  return value_or_throw(DeviceMesh::create(dims));
}

// Computing takes long, so that cutting pays.
CostModel slow_devices(size_t dims) {
  CostModel model;
  model.links.assign(dims, {.latency = 1e-8, .bandwidth = 1e8});
  model.device = {.flops = 1e9, .bandwidth = 1e9};
  return model;
}

// Nothing counts but what is sent.
CostModel slow_links(size_t dims) {
  CostModel model;
  model.links.assign(dims, {.latency = 1e-9, .bandwidth = 1e3});
  return model;
}

// The same values everywhere.
void fill(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  double phase = 0;
  for (const at::Tensor& p : unique_parameters(module)) {
    p.copy_(at::sin(at::arange(p.numel(), at::kDouble) * 12.9898 + phase++).view(p.sizes()) * 0.2);
  }
}

using Tensors = std::map<std::string, at::Tensor>;
// Of two steps of gradient descent: gradients of the second, then parameters.
std::pair<Tensors, Tensors> trained(const StepModel& step, const MeshPtr& mesh) {
  Tensors gradients, parameters;
  const auto whole = [](const at::Tensor& t) { return is_dtensor(t) ? full_tensor(t) : t; };
  for (int i = 0; i < 2; ++i) {
    step.module->zero_grad();
    step.loss(mesh).backward();
    finish_grad_sync(*step.module);
    const at::NoGradGuard no_grad;
    for (at::Tensor p : unique_parameters(*step.module)) p.sub_(p.grad() * 0.5);
  }
  for (const auto& item : step.module->named_parameters()) {
    gradients[item.key()] = whole(item.value().grad());
    parameters[item.key()] = whole(item.value().detach());
  }
  return {gradients, parameters};
}

void trains_as_one_device(const char* config, const std::vector<MeshDim>& dims,
                          const ShardingPlan& plan) {
  const auto made = [&] {
    StepModel step = maker(config)();
    step.module->to(at::kDouble);
    fill(*step.module);
    return step;
  };
  // Labels and ids are whole numbers, images become doubles in the first layer of one that is.
  const auto run = [&](const MeshPtr& mesh) {
    StepModel step = made();
    if (config == kVit) step.module->to(at::kFloat);
    if (mesh != nullptr) parallelize_module(*step.module, mesh, plan);
    return trained(step, mesh);
  };
  const auto [gradients, parameters] = run(nullptr);
  const double tolerance = config == kVit ? 1e-5 : 1e-11;
  on_mesh(dims, [&](const MeshPtr& mesh) {
    const auto [its_gradients, its_parameters] = run(mesh);
    double largest = 0;
    for (const auto& [name, gradient] : gradients) {
      largest = std::max(largest, gradient.abs().max().item<double>());
    }
    for (const auto& [name, gradient] : gradients) {
      EXPECT_LE((its_gradients.at(name) - gradient).abs().max().item<double>(), tolerance * largest)
          << "the gradient of " << name;
      EXPECT_LE((its_parameters.at(name) - parameters.at(name)).abs().max().item<double>(),
                tolerance * std::max(1.0, largest))
          << name;
    }
  });
}

void as_good_as_the_zoos(const char* config) {
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"tp", 2}}, std::vector<MeshDim>{{"dp", 2}, {"tp", 2}}}) {
    const DeviceMesh mesh = mesh_of(dims);
    SCOPED_TRACE(mesh.to_string());
    const CostModel model = slow_devices(dims.size());
    const AutoPlan found = auto_plan(maker(config), mesh, model, {.max_evaluations = 40});
    const PlanCost whole = plan_cost(maker(config), mesh, {}, model);
    EXPECT_LT(found.cost.seconds(), whole.seconds()) << "nothing is cut";
    const CostModel links = slow_links(dims.size());
    const AutoPlan silent = auto_plan(maker(config), mesh, links, {.max_evaluations = 16});
    for (const bool sequence_parallel : {false, true}) {
      const ShardingPlan plan = zoo_plan(config, mesh, sequence_parallel);
      const PlanCost zoo = plan_cost(maker(config), mesh, plan, model);
      const std::string both = "found:\n" + found.to_string() + "zoo:\n" + zoo.to_string();
      EXPECT_LE(found.cost.seconds(), zoo.seconds()) << both;
      const PlanCost sent = plan_cost(maker(config), mesh, plan, links);
      EXPECT_LE(silent.cost.bytes_sent(), sent.bytes_sent()) << silent.to_string();
      EXPECT_LE(silent.cost.seconds(), sent.seconds()) << silent.to_string();
    }
    EXPECT_EQ(plan_cost(maker(config), mesh, found.plan, model), found.cost);
    trains_as_one_device(config, dims, found.plan);
  }
}

TEST(AutoPlanTest, Gpt2) {
  as_good_as_the_zoos(kGpt2);
}
TEST(AutoPlanTest, Llama) {
  as_good_as_the_zoos(kLlama);
}
TEST(AutoPlanTest, Vit) {
  as_good_as_the_zoos(kVit);
}

TEST(AutoPlanTest, DecidesEqualLayersOnce) {
  const DeviceMesh mesh = mesh_of({{"tp", 2}});
  const AutoPlan found = auto_plan(maker(kGpt2), mesh, slow_devices(1), {.max_evaluations = 6});
  std::vector<std::pair<std::string, int64_t>> groups;
  for (const AutoPlan::Group& group : found.groups) groups.emplace_back(group.modules, group.count);
  EXPECT_THAT(
      groups,
      ElementsAre(std::pair("transformer.wte", 1), std::pair("transformer.wpe", 1),
                  std::pair("transformer.h.0.input", 1), std::pair("transformer.h.*.attn", 2),
                  std::pair("transformer.h.*.mlp", 2), std::pair("transformer.ln_f", 1)));
  // Entries for all of them, however many layers there are.
  EXPECT_LE(found.plan.parameter.size(), 10u);
  for (const PlanEntry& entry : found.plan.parameter) {
    EXPECT_EQ(entry.pattern.find(".1."), std::string::npos) << entry.pattern;
  }
}

// Nothing pays where messages take long, but what does not fit has to be cut.
TEST(AutoPlanTest, AMemoryLimitForcesCuts) {
  const DeviceMesh mesh = mesh_of({{"tp", 2}});
  CostModel slow;
  slow.links = {{.latency = 1, .bandwidth = 1e6}};
  const AutoPlan free = auto_plan(maker(kLlama), mesh, slow, {.max_evaluations = 16});
  EXPECT_EQ(free.cost.bytes_sent(), 0);
  EXPECT_TRUE(free.plan.parameter.empty());
  const int64_t limit = free.cost.memory() * 8 / 10;
  const AutoPlan tight =
      auto_plan(maker(kLlama), mesh, slow, {.memory_limit = limit, .max_evaluations = 16});
  EXPECT_LE(tight.cost.memory(), limit);
  EXPECT_GT(tight.cost.seconds(), free.cost.seconds());
  EXPECT_FALSE(tight.plan.parameter.empty());
  try {
    auto_plan(maker(kLlama), mesh, slow, {.memory_limit = 1000, .max_evaluations = 6});
    ADD_FAILURE() << "1000 bytes are enough?";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(error.status().message()), HasSubstr("the smallest takes "));
  }
}

TEST(AutoPlanTest, IsTheSameEveryTimeAndReadsBack) {
  const DeviceMesh mesh = mesh_of({{"tp", 2}});
  const auto find = [&] {
    return auto_plan(maker(kGpt2), mesh, slow_devices(1), {.max_evaluations = 12});
  };
  const AutoPlan found = find();
  EXPECT_EQ(found.to_json(), find().to_json());
  EXPECT_FALSE(found.finished);
  EXPECT_EQ(found.evaluations, 12);
  const auto json = nlohmann::json::parse(found.to_json());
  const ShardingPlan plan = value_or_throw(parse_sharding_plan(json["plan"].dump()));
  EXPECT_EQ(to_json(plan), to_json(found.plan));
  EXPECT_EQ(plan_cost(maker(kGpt2), mesh, plan, slow_devices(1)), found.cost);
  EXPECT_EQ(json["groups"].size(), found.groups.size());
  EXPECT_THAT(found.to_string(), HasSubstr("transformer.h.*.attn"));
}

TEST(AutoPlanTest, SaysWhatIsNotPossible) {
  const DeviceMesh mesh = mesh_of({{"tp", 2}});
  const AutoPlan found =
      auto_plan(maker(kGpt2), mesh, slow_devices(1), {.heads = 5, .max_evaluations = 6});
  EXPECT_THAT(found.to_string(), HasSubstr("transformer.h.*.attn: no PairwiseParallel: "));
  EXPECT_THAT(found.to_string(), HasSubstr("heads = 5"));

  const auto error_of = [&](const DeviceMesh& on_mesh, const AutoPlanOptions& options) {
    try {
      auto_plan(maker(kGpt2), on_mesh, {}, options);
    } catch (const Error& error) {
      return error.status();
    }
    return absl::OkStatus();
  };
  EXPECT_EQ(error_of(mesh, {.tp_mesh_dim = "pp"}).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(error_of(mesh_of({{"dp", 2}, {"pp", 2}}), {}).code(), absl::StatusCode::kNotFound);
  for (const AutoPlanOptions& options : std::vector<AutoPlanOptions>{
           {.max_evaluations = 0}, {.memory_limit = -1}, {.sequence_dim = -1}, {.heads = -1}}) {
    EXPECT_EQ(error_of(mesh, options).code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace shardweave

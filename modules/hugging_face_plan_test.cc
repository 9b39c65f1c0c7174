#include "shardweave/modules/hugging_face_plan.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;

constexpr int64_t kDim = 8, kInner = 12, kExperts = 4, kVocabulary = 10;

nn::Linear linear(int64_t from, int64_t to, bool bias) {
  return nn::Linear(nn::LinearOptions(from, to).bias(bias));
}

// Names as transformers has them. A gated MLP whose gate and up are one weight, an expert layer in
// which every token takes every expert, and a head.
struct LayerImpl : nn::Module {
  LayerImpl() {
    auto mlp = std::make_shared<nn::Module>();
    gate_up = mlp->register_module("gate_up_proj", linear(kDim, 2 * kInner, false));
    down = mlp->register_module("down_proj", linear(kInner, kDim, true));
    auto experts = std::make_shared<nn::Module>();
    expert_up =
        experts->register_parameter("gate_up_proj", at::randn({kExperts, kDim, 2 * kInner}) / 4);
    expert_down = experts->register_parameter("down_proj", at::randn({kExperts, kInner, kDim}) / 4);
    mlp->register_module("experts", experts);
    register_module("mlp", mlp);
    auto attention = std::make_shared<nn::Module>();
    q = attention->register_module("q_proj", linear(kDim, kDim, true));
    o = attention->register_module("o_proj", linear(kDim, kDim, true));
    register_module("self_attn", attention);
  }
  at::Tensor forward(at::Tensor x) {
    x = x + o(at::tanh(q(x)));
    x = x + down(gated(gate_up(x)));
    const at::Tensor all = at::matmul(x.unsqueeze(0), expert_up.unsqueeze(1));
    return x + at::matmul(gated(all), expert_down.unsqueeze(1)).sum(0);
  }
  static at::Tensor gated(const at::Tensor& both) {
    const std::vector<at::Tensor> halves = both.chunk(2, -1);
    return at::silu(halves[0]) * halves[1];
  }
  nn::Linear gate_up{nullptr}, down{nullptr}, q{nullptr}, o{nullptr};
  at::Tensor expert_up, expert_down;
};
TORCH_MODULE(Layer);

struct ModelImpl : nn::Module {
  explicit ModelImpl(const std::string& base = "model") {
    static std::mutex one_at_a_time;  // ranks are threads, which share LibTorch's generator
    const std::lock_guard lock(one_at_a_time);
    torch::manual_seed(3);
    auto body = std::make_shared<nn::Module>();
    embedding = body->register_module("embed_tokens", nn::Embedding(kVocabulary, kDim));
    auto list = std::make_shared<nn::Module>();
    for (int i = 0; i < 2; ++i) {
      layers.push_back(list->register_module(std::to_string(i), Layer()));
    }
    body->register_module("layers", list);
    register_module(base, body);
    head = register_module("lm_head", linear(kDim, kVocabulary, false));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embedding(tokens);
    for (Layer& layer : layers) x = layer(x);
    return head(x);
  }
  nn::Embedding embedding{nullptr};
  std::vector<Layer> layers;
  nn::Linear head{nullptr};
};
TORCH_MODULE(Model);

constexpr char kPlan[] = R"json({
    "embed_tokens": "embedding_rowwise",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_up_proj": "packed_colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "layers.*.mlp.experts.gate_up_proj": "packed_rowwise",
    "layers.*.mlp.experts.down_proj": "colwise",
    "layers.*.mlp.experts": "moe_tp_experts",
    "lm_head": "colwise_gather_output"})json";

TEST(HuggingFacePlanTest, PlacesParametersAndOutputs) {
  const DeviceMesh mesh = *DeviceMesh::create({{"dp", 2}, {"tp", 2}});
  Model model;
  const auto plan = hugging_face_plan(*model, kPlan);
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::map<std::string, std::string> layouts;
  for (const ResolvedTensor& tensor : resolve_plan(*model, mesh, plan->parameter)) {
    layouts[tensor.fqns[0]] = tensor.layout.to_string();
  }
  const std::pair<const char*, const char*> expected[] = {
      {"model.embed_tokens.weight", "[R, S(0)]"},
      {"model.layers.1.self_attn.q_proj.weight", "[R, S(0)]"},
      {"model.layers.1.self_attn.q_proj.bias", "[R, S(0)]"},
      {"model.layers.0.self_attn.o_proj.weight", "[R, S(1)]"},
      {"model.layers.0.self_attn.o_proj.bias", "[R, R]"},
      {"model.layers.0.mlp.gate_up_proj.weight", "[R, S(0, sf=2)]"},
      {"model.layers.0.mlp.experts.gate_up_proj", "[R, S(2, sf=2)]"},
      {"model.layers.0.mlp.experts.down_proj", "[R, S(1)]"},
      {"lm_head.weight", "[R, S(0)]"},
  };
  for (const auto& [fqn, layout] : expected) EXPECT_EQ(layouts[fqn], layout) << fqn;
  ASSERT_EQ(plan->forward.size(), 1u);
  EXPECT_EQ(plan->forward[0].pattern, "lm_head.output");
}

TEST(HuggingFacePlanTest, GivesTheNumbersOfOneDevice) {
  const at::Tensor tokens = at::arange(12, at::kLong).view({3, 4}) % kVocabulary;
  Model reference;
  const at::Tensor expected = reference(tokens);
  expected.pow(2).sum().backward();
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"tp", 2}}, {{"tp", 3}}, {{"dp", 2}, {"tp", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Model model;
      parallelize_module(*model, mesh, *hugging_face_plan(*model, kPlan), {.source = std::nullopt});
      NamedPlacements rows;
      if (dims.size() == 2) rows.emplace_back("dp", Shard(0));
      const at::Tensor logits =
          model(distribute_tensor(tokens, mesh, rows, {.source = std::nullopt}));
      EXPECT_TRUE(layout_of(logits).placements().back().is_replicate());
      EXPECT_TRUE(at::allclose(full_tensor(logits.detach()), expected.detach(), 1e-4, 1e-5));
      logits.pow(2).sum().backward();
      finish_grad_sync(*model);
      const auto parameters = model->parameters(), whole = reference->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(at::allclose(full_tensor(parameters[i].grad()), whole[i].grad(), 1e-3, 1e-3))
            << model->named_parameters().keys()[i];
      }
    });
  }
}

TEST(HuggingFacePlanTest, TakesAConfigurationAndTheBaseModelItself) {
  Model model;
  const auto of_config = hugging_face_plan(*model, R"json({"model_type": "llama", "hidden_size": 8,
                      "base_model_tp_plan": {"layers.*.self_attn.q_proj": "colwise"}})json");
  ASSERT_TRUE(of_config.ok()) << of_config.status();
  ASSERT_EQ(of_config->parameter.size(), 2u);
  EXPECT_EQ(of_config->parameter[0].pattern, "model.layers.*.self_attn.q_proj.weight");
  const auto of_base = hugging_face_plan(*model->children()[0],
                                         R"json({"layers.*.mlp.down_proj": "rowwise"})json", "x");
  ASSERT_TRUE(of_base.ok()) << of_base.status();
  ASSERT_EQ(of_base->parameter.size(), 1u);
  EXPECT_EQ(of_base->parameter[0].pattern, "layers.*.mlp.down_proj.weight");
  EXPECT_EQ(of_base->parameter[0].placements, PlanPlacements({{"x", Shard(-1)}}));
}

// DeepSeek's has the experts of models with experts, and layers of those without.
TEST(HuggingFacePlanTest, AConfigurationSpeaksOfAllModelsOfItsType) {
  Model model;
  const auto plan = hugging_face_plan(*model, R"json({"base_model_tp_plan": {
      "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
      "layers.*.mlp.shared_experts.up_proj": "colwise", "layers.*.mlp.shared_experts": "all_reduce"}})json");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->parameter.size(), 2u);
  const auto none = hugging_face_plan(
      *model, R"json({"base_model_tp_plan": {"h.*.attn.c_attn": "packed_colwise"}})json");
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("no module of any of these names"));
}

TEST(HuggingFacePlanTest, SaysWhatIsWrong) {
  Model model;
  const std::pair<const char*, const char*> cases[] = {
      {"{\n", "no JSON on line 2"},
      {"3", "wanted an object, not 3"},
      {R"json({"model_type": "gpt2"})json", "has no \"base_model_tp_plan\""},
      {R"json({"base_model_tp_plan": null})json", "\"base_model_tp_plan\": wanted an object"},
      {R"json({"lm_head": 1})json", "line 1, \"lm_head\": wanted a style such as"},
      {R"json({"lm_heat": "colwise"})json", "\"lm_heat\": the module has no parameter"},
      {"{\"lm_head\":\n\"colwize\"}", "the style \"colwize\" is not known; there are: colwise, "},
  };
  for (const auto& [text, why] : cases) {
    const absl::Status status = hugging_face_plan(*model, text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why)) << text;
  }
}

}  // namespace
}  // namespace shardweave

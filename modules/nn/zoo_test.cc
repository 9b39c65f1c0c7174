// The library's models under the zoo's plans: losses, gradients and parameters of 20 steps are one
// device's, and the collectives are those of the theory.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/hugging_face_plan.h"
#include "shardweave/modules/nn/causal_lm.h"
#include "shardweave/modules/nn/registry.h"
#include "shardweave/modules/optim/fused_optimizer.h"

namespace shardweave::nn {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;

constexpr int kSteps = 20;
constexpr int64_t kVocabulary = 29, kClasses = 5;
// Nothing divides by anything but the heads.
constexpr char kGpt2[] = R"json({"model_type": "gpt2", "vocab_size": 29, "n_positions": 9,
    "n_embd": 24, "n_layer": 2, "n_head": 12, "n_inner": 23, "resid_pdrop": 0, "embd_pdrop": 0,
    "attn_pdrop": 0})json";
constexpr char kLlama[] = R"json({"model_type": "llama", "vocab_size": 29, "hidden_size": 22,
    "intermediate_size": 23, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 4, "rope_scaling": {"type": "linear", "factor": 2}})json";
// Fewer keys than ranks; one matrix is embedding and head.
constexpr char kTiedLlama[] = R"json({"model_type": "llama", "vocab_size": 29, "hidden_size": 22,
    "intermediate_size": 23, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": true, "attention_bias": true,
    "mlp_bias": true, "max_position_embeddings": 5,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2}})json";
constexpr char kMixtral[] = R"json({"model_type": "mixtral", "vocab_size": 29, "hidden_size": 22,
    "intermediate_size": 11, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 2, "num_local_experts": 5})json";
constexpr char kVit[] = R"json({"model_type": "vit", "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 12, "intermediate_size": 23, "image_size": 7, "patch_size": 2,
    "num_labels": 5})json";

// The same values on every rank, whatever other threads draw.
void fill(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  double phase = 0;
  for (const auto& item : module.named_parameters()) {
    at::Tensor p = item.value();
    const bool is_norm = p.dim() == 1 && !item.key().ends_with("bias");
    // As good as random: waves alone are matrices of rank 2, and lose digits.
    const at::Tensor waves = at::sin(at::arange(p.numel(), at::kDouble) * 12.9898 + phase);
    p.copy_((waves * 43758.5453).frac().view(p.sizes()) * 0.3 + (is_norm ? 1.0 : 0.0));
    phase += 1;
  }
}

Model made(const char* config, at::ScalarType dtype) {
  Model model = *make_model("", config);
  model.module->to(dtype);
  fill(*model.module);
  return model;
}

struct Batch {
  at::Tensor inputs, labels;
};
Batch batch_of(const Model& model, int step, at::ScalarType dtype) {
  constexpr int64_t kRows = 3, kLength = 7;
  if (model.inputs[0] == "pixel_values") {
    return {
        at::sin(at::arange(kRows * 3 * 7 * 7, dtype) * (0.3 + 0.01 * step)).view({kRows, 3, 7, 7}),
        at::arange(kRows, at::kLong) % kClasses};
  }
  const at::Tensor ids = (at::arange(kRows * kLength, at::kLong) * 7 + step * 13)
                             .remainder(kVocabulary)
                             .view({kRows, kLength});
  at::Tensor labels = ids.clone();
  labels.index_put_({at::tensor({1}), at::tensor({3})}, at::tensor({int64_t{-100}}));
  return {ids, labels};
}

at::Tensor loss_of(const Model& model, const Batch& batch) {
  const at::Tensor logits = model.forward({batch.inputs})[0];
  return model.inputs[0] == "pixel_values" ? at::cross_entropy_loss(logits, batch.labels)
                                           : next_token_loss(logits, batch.labels);
}

using Tensors = std::map<std::string, at::Tensor>;
struct Training {
  std::vector<double> losses;
  Tensors first_gradients, last_gradients, parameters;
};
at::Tensor whole(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? full_tensor(tensor) : tensor;
}

template <typename Lay>
Training train(const Model& model, at::ScalarType dtype, const Lay& lay) {
  // With a smaller eps steps of the keys' biases would be rounding's: their gradients are zero but for it.
  FusedOptimizer optimizer(unique_parameters(*model.module), AdamWOptions{.lr = 3e-3, .eps = 1e-5});
  Training training;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const Batch batch = batch_of(model, step, dtype);
    const at::Tensor loss = loss_of(model, {lay(batch.inputs), lay(batch.labels)});
    loss.backward();
    finish_grad_sync(*model.module);
    if (step == 0 || step == kSteps - 1) {
      Tensors& gradients = step == 0 ? training.first_gradients : training.last_gradients;
      for (const auto& item : model.module->named_parameters()) {
        gradients[item.key()] = whole(item.value().grad()).clone();
      }
    }
    optimizer.step();
    training.losses.push_back(loss.item<double>());
  }
  for (const auto& item : model.module->named_parameters()) {
    training.parameters[item.key()] = whole(item.value().detach());
  }
  return training;
}

double l2(const at::Tensor& x) {
  return x.norm().item<double>();
}

// Gradients that are zero but for rounding (of the keys' biases: softmax does not see a shift) are
// measured by the others.
void expect_close(const Tensors& got, const Tensors& want, double relative, const char* what) {
  double all = 0;
  for (const auto& [name, tensor] : want) all = std::max(all, l2(tensor));
  for (const auto& [name, tensor] : want) {
    EXPECT_LE(l2(got.at(name) - tensor), relative * std::max(l2(tensor), 0.01 * all))
        << what << " " << name << " of norm " << l2(tensor);
  }
}

struct Case {
  const char* config;
  std::vector<MeshDim> mesh;
  PlanOptions options = {};
  at::ScalarType dtype = at::kDouble;
  const char* hugging_face = nullptr;  // a plan in place of the zoo's
};

void trains_as_one_device(const std::vector<Case>& cases) {
  std::map<std::pair<std::string, at::ScalarType>, Training> one_device;
  for (const Case& c : cases) {
    Training& want = one_device[{c.config, c.dtype}];
    // Rounding, by 20 steps of AdamW enlarged.
    const bool single = c.dtype == at::kFloat;
    const double relative = single ? 1e-5 : 1e-11, at_last = single ? 1e-3 : 1e-9;
    if (want.losses.empty()) {
      want = train(made(c.config, c.dtype), c.dtype, [](const at::Tensor& x) { return x; });
      EXPECT_LT(want.losses.back(), want.losses.front());
    }
    on_mesh(c.mesh, [&](const MeshPtr& mesh) {
      SCOPED_TRACE(mesh->mesh().to_string() +
                   (c.options.sequence_parallel ? ", sequence parallel" : "") +
                   (single ? ", single precision" : ""));
      const Model model = made(c.config, c.dtype);
      parallelize_module(*model.module, mesh,
                         c.hugging_face != nullptr
                             ? *hugging_face_plan(*model.module, c.hugging_face)
                             : model.plan(mesh->mesh(), c.options));
      NamedPlacements rows;
      if (mesh->mesh().dim("dp").ok()) rows.emplace_back("dp", Shard(0));
      const Training got = train(
          model, c.dtype, [&](const at::Tensor& x) { return distribute_tensor(x, mesh, rows); });
      for (int step = 0; step < kSteps; ++step) {
        EXPECT_NEAR(got.losses[step], want.losses[step], relative * want.losses[step])
            << "step " << step;
      }
      expect_close(got.first_gradients, want.first_gradients, relative, "the first gradient of");
      expect_close(got.last_gradients, want.last_gradients, at_last, "the last gradient of");
      expect_close(got.parameters, want.parameters, at_last, "after all steps");
      EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 0) << "an operator has no rule";
    });
  }
}

// Every mesh, whole and along the sequence, with the vocabulary whole and cut.
std::vector<Case> everywhere(const char* config) {
  return {
      {config, {{"tp", 2}}},
      {config, {{"tp", 2}}, {.shard_vocabulary = false}},
      {config, {{"tp", 3}}, {.sequence_parallel = true}},
      {config, {{"tp", 4}}},
      {config, {{"tp", 4}}, {.sequence_parallel = true, .shard_vocabulary = false}},
      {config, {{"dp", 2}, {"tp", 2}}},
      {config, {{"dp", 2}, {"tp", 2}}, {.sequence_parallel = true}},
      {config, {{"tp", 2}}, {}, at::kFloat},
      {config, {{"dp", 2}, {"tp", 2}}, {.sequence_parallel = true}, at::kFloat},
  };
}

TEST(ZooTest, Gpt2TrainsAsOnOneDevice) {
  trains_as_one_device(everywhere(kGpt2));
}
TEST(ZooTest, LlamaTrainsAsOnOneDevice) {
  trains_as_one_device(everywhere(kLlama));
  trains_as_one_device({{kLlama, {{"dp", 2}, {"x", 1}, {"tp", 2}}, {.sequence_parallel = true}}});
}
TEST(ZooTest, TiedLlamaWithOneKeyHeadTrainsAsOnOneDevice) {
  trains_as_one_device(everywhere(kTiedLlama));
}
TEST(ZooTest, MixtralTrainsAsOnOneDevice) {
  trains_as_one_device(everywhere(kMixtral));
  trains_as_one_device(
      {{kMixtral, {{"tp", 2}}, {.expert_parallel = true}},
       {kMixtral, {{"dp", 2}, {"tp", 2}}, {.sequence_parallel = true, .expert_parallel = true}}});
}
TEST(ZooTest, VitTrainsAsOnOneDevice) {
  trains_as_one_device(everywhere(kVit));
}

// The names are theirs, so their plans fit: the base_model_tp_plan of transformers 5.
// The row of the padding is 0 at first and learns nothing, wherever it lies.
TEST(ZooTest, PaddingLearnsNothing) {
  for (const int64_t pad : {3, -1}) {
    const std::string text =
        "{\"pad_token_id\": " + std::to_string(pad) + ", " + std::string(kLlama).substr(1);
    const int64_t row = pad < 0 ? kVocabulary + pad : pad;
    for (const bool cut : {false, true}) {
      on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
        const Model model = deferred_init([&] { return *make_model("", text); });
        parallelize_module(*model.module, mesh,
                           cut ? model.plan(mesh->mesh(), {}) : ShardingPlan());
        materialize(*model.module, {.seed = 3});
        const at::Tensor embedding = model.module->named_parameters()["model.embed_tokens.weight"];
        const at::Tensor before = full_tensor(embedding.detach());
        EXPECT_EQ(before[row].abs().max().item<double>(), 0);
        EXPECT_GT(before[row - 1].abs().max().item<double>(), 0);
        const at::Tensor ids = (at::arange(20) + row - 2).remainder(kVocabulary).view({4, 5});
        const at::Tensor there = distribute_tensor(ids, mesh, {{"dp", Shard(0)}});
        next_token_loss(model.forward({there})[0], there).backward();
        finish_grad_sync(*model.module);
        const at::Tensor grad = full_tensor(embedding.grad());
        EXPECT_EQ(grad[row].abs().max().item<double>(), 0);
        EXPECT_GT(grad[row - 1].abs().max().item<double>(), 0);
      });
    }
  }
}

// Sums of 16 bits would be infinite.
TEST(ZooTest, LossesOfHalfPrecisionOverManyTokens) {
  constexpr int64_t kTokens = 20'000, kWords = 4;
  const at::Tensor logits =
      at::sin(at::arange(4 * kTokens * kWords, at::kFloat)).view({4, kTokens, kWords}) * 20;
  const at::Tensor labels = at::arange(4 * kTokens).remainder(kWords).view({4, kTokens});
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    const at::Tensor rounded = logits.to(dtype);
    const auto wanted = next_token_loss(rounded.to(at::kFloat), labels).item<double>();
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      const at::Tensor there =
          distribute_tensor(rounded, mesh, {{"dp", Shard(0)}}).requires_grad_();
      const at::Tensor on = distribute_tensor(labels, mesh, {{"dp", Shard(0)}});
      const at::Tensor loss = next_token_loss(there, on);
      EXPECT_EQ(loss.scalar_type(), at::kFloat);
      EXPECT_NEAR(loss.item<double>(), wanted, 1e-4);
      loss.backward();
      EXPECT_EQ(there.grad().scalar_type(), dtype);
      EXPECT_GT(full_tensor(there.grad()).abs().max().item<double>(), 0);
      const at::Tensor direct =
          at::cross_entropy_loss(there.slice(1, 0, -1).flatten(0, 1), on.slice(1, 1).flatten());
      EXPECT_NEAR(direct.item<double>(), wanted, wanted / 100);
    });
  }
}

TEST(ZooTest, HuggingFacesPlansFit) {
  constexpr char kPlanOfLlama[] = R"json({"layers.*.self_attn.q_proj": "colwise",
      "layers.*.self_attn.k_proj": "colwise", "layers.*.self_attn.v_proj": "colwise",
      "layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.gate_proj": "colwise",
      "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"})json";
  constexpr char kPlanOfMixtral[] = R"json({"layers.*.self_attn.q_proj": "colwise",
      "layers.*.self_attn.k_proj": "colwise", "layers.*.self_attn.v_proj": "colwise",
      "layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
      "layers.*.mlp.experts.down_proj": "rowwise", "layers.*.mlp.experts": "moe_tp_experts"})json";
  trains_as_one_device({{kLlama, {{"tp", 2}}, {}, at::kDouble, kPlanOfLlama},
                        {kMixtral, {{"dp", 2}, {"tp", 2}}, {}, at::kDouble, kPlanOfMixtral}});
}

// What one step sends, by phase and kind. Comparisons of plain tensors do not count.
using Counts = std::map<std::string, int>;
Counts collectives(const char* config, const PlanOptions& options) {
  Counts counts;
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    const Model model = made(config, at::kFloat);
    parallelize_module(*model.module, mesh, model.plan(mesh->mesh(), options));
    const Batch plain = batch_of(model, 0, at::kFloat);
    const Batch batch = {distribute_tensor(plain.inputs, mesh, NamedPlacements{}),
                         distribute_tensor(plain.labels, mesh, NamedPlacements{})};
    const CommTrace trace(mesh);
    loss_of(model, batch).backward();
    finish_grad_sync(*model.module);
    if (mesh->coordinate()[0] != 0) return;
    for (const CommEvent& event : trace.events()) {
      if (!event.is_check) ++counts[std::string(to_string(event.phase)) + " " + event.collective];
    }
  });
  return counts;
}

// With two layers. Nothing but what Megatron-LM sends: two sums a layer forward and two backward.
TEST(ZooTest, TwoSumsALayerForwardAndTwoBackward) {
  const Counts megatron = {{"forward all_reduce", 4}, {"backward all_reduce", 4}};
  for (const char* config : {kGpt2, kLlama, kVit}) {
    EXPECT_EQ(collectives(config, {.shard_vocabulary = false}), megatron) << config;
  }
}

// A sum more of the embeddings' parts, and backward one of the head's input; the cross entropy's
// maximum and sums, of one number a row.
TEST(ZooTest, AVocabularyThatIsCutGathersNoLogits) {
  const Counts expected = {{"forward all_reduce", 4 + 1 + 3}, {"backward all_reduce", 4 + 1 + 1}};
  for (const char* config : {kGpt2, kLlama}) EXPECT_EQ(collectives(config, {}), expected) << config;
}

// In place of each sum a gather and a scatter; one gather more before the head and backward at the
// embedding, and the gradients of norms and biases in one bucket.
TEST(ZooTest, SequenceParallelGathersAndScatters) {
  const Counts pairs = {{"forward all_gather", 4 + 1},
                        {"forward reduce_scatter", 4},
                        {"backward all_gather", 4 + 1},
                        {"backward reduce_scatter", 4},
                        {"gradient sync all_reduce", 1}};
  for (const char* config : {kGpt2, kLlama, kVit}) {
    EXPECT_EQ(collectives(config, {.sequence_parallel = true, .shard_vocabulary = false}), pairs)
        << config;
  }
  const Counts with_vocabulary = {{"forward all_gather", 4 + 1},  {"forward reduce_scatter", 4 + 1},
                                  {"forward all_reduce", 3},      {"backward all_gather", 4 + 1},
                                  {"backward reduce_scatter", 5}, {"backward all_reduce", 1},
                                  {"gradient sync all_reduce", 1}};
  for (const char* config : {kGpt2, kLlama}) {
    EXPECT_EQ(collectives(config, {.sequence_parallel = true}), with_vocabulary) << config;
  }
}

// Keys and values that every rank has whole: their gradients, small ones, are summed, too.
TEST(ZooTest, KeysThatAreWholeAreSummedBackward) {
  EXPECT_EQ(collectives(kTiedLlama, {.shard_vocabulary = false}),
            (Counts{{"forward all_reduce", 4},
                    {"backward all_reduce", 4 + 4},
                    {"gradient sync all_reduce", 1}}));
}

// And the gradients of the router's choice.
TEST(ZooTest, ExpertsAreSummedAsAnMlpIs) {
  const Counts counts = collectives(kMixtral, {.shard_vocabulary = false});
  EXPECT_EQ(counts, (Counts{{"forward all_reduce", 4}, {"backward all_reduce", 4 + 2}}));
}

TEST(ZooTest, PlansThatCannotBe) {
  const auto mesh = *DeviceMesh::create({{"dp", 2}, {"tp", 5}});
  const auto error_of = [&](const char* config, const PlanOptions& options) {
    const Model model = *make_model("", config);
    try {
      model.plan(mesh, options);
    } catch (const Error& error) {
      return error.status();
    }
    return absl::OkStatus();
  };
  for (const char* config : {kGpt2, kLlama, kMixtral, kVit}) {
    const absl::Status heads = error_of(config, {});
    EXPECT_EQ(heads.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(heads.message()),
                HasSubstr("12 heads do not divide by the 5 ranks of mesh dimension \"tp\""));
    EXPECT_EQ(error_of(config, {.mesh_dim = "pp"}).code(), absl::StatusCode::kNotFound);
    EXPECT_TRUE(error_of(config, {.mesh_dim = "dp"}).ok());
  }
}

}  // namespace
}  // namespace shardweave::nn

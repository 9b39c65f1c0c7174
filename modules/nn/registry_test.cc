// Models by name and configuration: what is read, what is refused and how.
#include "shardweave/modules/nn/registry.h"

#include <string>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/nn/gpt2.h"
#include "shardweave/modules/nn/layer_registry.h"
#include "shardweave/modules/nn/llama.h"
#include "shardweave/modules/nn/mixtral.h"
#include "shardweave/modules/nn/vit.h"

namespace shardweave::nn {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string error_of(const char* kind, const std::string& config) {
  const absl::StatusOr<Model> model = make_model(kind, config);
  EXPECT_FALSE(model.ok()) << config;
  EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(model.status().message());
}

TEST(RegistryTest, ReadsWhatConfigurationsOfBothGenerationsSay) {
  const LlamaOptions old = *LlamaOptions::from_json(
      R"json({"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 5e5, "pad_token_id": null,
              "rope_scaling": {"type": "linear", "factor": 3}})json");
  EXPECT_EQ(old.hidden_size, 64);
  EXPECT_EQ(old.vocab_size, 32000);
  EXPECT_EQ(old.rope_parameters.rope_type, "linear");
  EXPECT_EQ(old.rope_parameters.rope_theta, 5e5);
  EXPECT_EQ(old.rope_parameters.factor, 3);
  const LlamaOptions now = *LlamaOptions::from_json(
      R"json({"model_type": "llama", "hidden_act": "gelu_new", "head_dim": 2,
              "rope_parameters": {"rope_type": "yarn", "rope_theta": 7, "factor": 2}})json");
  EXPECT_EQ(now.rope_parameters.rope_type, "yarn");
  EXPECT_EQ(now.rope_parameters.rope_theta, 7);
  EXPECT_EQ(now.hidden_act, Activation::kGeluTanh);
  EXPECT_EQ(VitOptions::from_json(R"json({"id2label": {"0": "cat", "1": "dog", "2": "owl"}})json")
                ->num_labels,
            3);
}

TEST(RegistryTest, ErrorsSayWhereAndWhat) {
  EXPECT_THAT(error_of("bert", "{}"),
              HasSubstr("no model \"bert\"; there are: gpt2, llama, mixtral, vit"));
  EXPECT_THAT(error_of("", "{}"), HasSubstr("no \"model_type\""));
  EXPECT_THAT(error_of("", "[]"), HasSubstr("wanted an object"));
  EXPECT_THAT(error_of("llama", "{"), HasSubstr("no JSON"));
  EXPECT_THAT(error_of("llama", "{\n\"model_type\": \"gpt2\"}"),
              HasSubstr("line 2, \"model_type\": wanted \"llama\", not \"gpt2\""));
  EXPECT_THAT(error_of("llama", "{\n\n\"hidden_size\": \"big\"}"),
              HasSubstr("line 3, \"hidden_size\": wanted an integer, not \"big\""));
  EXPECT_THAT(error_of("llama", R"({"rope_parameters": {"factor": []}})"),
              HasSubstr("\"rope_parameters\", \"factor\": wanted a number"));
  EXPECT_THAT(error_of("llama", R"({"rope_parameters": {"rope_type": "spiral"}})"),
              AllOf(HasSubstr("\"spiral\" is not known"), HasSubstr("longrope, llama3")));
  EXPECT_THAT(error_of("llama", R"({"rope_parameters": {"rope_type": "yarn"}})"),
              HasSubstr("wants a factor"));
  EXPECT_THAT(error_of("llama", R"({"rope_parameters": {"rope_type": "longrope",
                                    "short_factor": [1], "long_factor": [1]}})"),
              HasSubstr("wants 64 numbers in short_factor, not 1"));
  EXPECT_THAT(error_of("llama", R"({"rope_parameters": {"rope_type": "yarn", "factor": 2,
                                    "original_max_position_embeddings": 0}})"),
              HasSubstr("an original_max_position_embeddings of at least 1, not 0"));
  EXPECT_THAT(error_of("llama", R"({"rope_parameters": {"rope_type": "longrope",
                                    "original_max_position_embeddings": 1}})"),
              HasSubstr("an original_max_position_embeddings of at least 2, not 1"));
  EXPECT_THAT(error_of("llama", R"({"rope_parameters": {"rope_type": "llama3", "factor": 8,
                                    "low_freq_factor": 0, "high_freq_factor": 4}})"),
              HasSubstr("wants a positive low_freq_factor"));
  EXPECT_THAT(error_of("llama", R"({"partial_rotary_factor": 0.5})"), HasSubstr("only whole"));
  EXPECT_THAT(error_of("llama", R"({"hidden_act": "warp"})"),
              HasSubstr("\"hidden_act\": the activation \"warp\" is not known"));
  EXPECT_THAT(error_of("llama", R"({"num_key_value_heads": 5})"),
              HasSubstr("num_attention_heads 32 does not divide by num_key_value_heads 5"));
  EXPECT_THAT(error_of("llama", R"({"hidden_size": 0})"), HasSubstr("hidden_size is 0"));
  EXPECT_THAT(error_of("mixtral", R"({"pad_token_id": 32000})"),
              HasSubstr("pad_token_id is 32000; the vocab_size is 32000"));
  EXPECT_THAT(error_of("mixtral", R"({"sliding_window": 4096})"), HasSubstr("sliding_window"));
  EXPECT_THAT(error_of("mixtral", R"({"num_experts_per_tok": 9})"),
              HasSubstr("num_experts_per_tok is 9, but there are 8 experts"));
  EXPECT_THAT(error_of("gpt2", R"({"add_cross_attention": true})"), HasSubstr("cross_attention"));
  EXPECT_THAT(error_of("gpt2", R"({"n_head": 7})"), HasSubstr("768 does not divide by 7 heads"));
  EXPECT_THAT(error_of("gpt2", R"({"attn_pdrop": 1})"), HasSubstr("attn_pdrop is 1"));
  EXPECT_THAT(error_of("vit", R"({"patch_size": 500})"), HasSubstr("has no patch of 500"));
}

TEST(RegistryTest, PaddingIsOneOfTheRows) {
  for (const char* index : {"4", "-5"}) {
    const absl::Status status =
        make_layer("Embedding", std::string(R"({"num_embeddings": 4, "embedding_dim": 2,
                                                "padding_idx": )") +
                                    index + "}")
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(std::string("is ") + index + "; there are 4 embeddings"));
  }
}

// Options that were not read are checked, too.
TEST(RegistryTest, ConstructorsThrowTheSame) {
  const auto error = [](const auto& make) -> std::string {
    try {
      make();
    } catch (const Error& e) {
      return e.what_without_backtrace();
    }
    return "no error";
  };
  EXPECT_THAT(error([] { Llama(LlamaOptions{.head_dim = 3}); }),
              HasSubstr("Llama: rotary embeddings turn pairs: wanted an even head_dim, not 3"));
  EXPECT_THAT(error([] { Mixtral(MixtralOptions{.num_local_experts = 0}); }),
              HasSubstr("Mixtral: num_experts is 0"));
  EXPECT_THAT(error([] { Gpt2(Gpt2Options{.n_layer = -1}); }), HasSubstr("Gpt2: n_layer is -1"));
  EXPECT_THAT(error([] { Vit(VitOptions{.num_labels = 0}); }), HasSubstr("Vit: num_labels is 0"));
}

TEST(RegistryTest, ForwardByNames) {
  const Model model = *make_model("gpt2", R"json({"vocab_size": 7, "n_positions": 4, "n_embd": 6,
                                                  "n_layer": 1, "n_head": 2})json");
  EXPECT_THAT(model.inputs, ElementsAre("input_ids"));
  EXPECT_THAT(model.outputs, ElementsAre("logits"));
  EXPECT_EQ(model.forward({at::ones({2, 3}, at::kLong)})[0].sizes(), at::IntArrayRef({2, 3, 7}));
  EXPECT_THROW(model.forward({}), Error);
  EXPECT_THROW(model.forward({at::ones({2, 5}, at::kLong)}), Error);  // 4 positions
  // Tied, it is one parameter with two names; another initialisation would be another model.
  const auto parameters = model.module->named_parameters();
  EXPECT_TRUE(parameters["lm_head.weight"].is_same(parameters["transformer.wte.weight"]));
  EXPECT_NEAR(parameters["transformer.wte.weight"].std().item<double>(), 0.02, 0.01);
  EXPECT_EQ(parameters["transformer.h.0.ln_1.weight"].min().item<double>(), 1);
  // Dropout in training alone.
  const at::Tensor ids = at::ones({2, 3}, at::kLong);
  EXPECT_FALSE(at::equal(model.forward({ids})[0], model.forward({ids})[0]));
  model.module->eval();
  EXPECT_TRUE(at::equal(model.forward({ids})[0], model.forward({ids})[0]));
}

}  // namespace
}  // namespace shardweave::nn

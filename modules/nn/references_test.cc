// The library's models beside what transformers computed of the same weights (references/): logits,
// gradients and some steps of AdamW.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/modules/nn/causal_lm.h"
#include "shardweave/modules/nn/llama.h"
#include "shardweave/modules/nn/registry.h"
#include "shardweave/modules/nn/rotary_embedding.h"
#include "shardweave/modules/optim/fused_optimizer.h"

namespace shardweave::nn {
namespace {

constexpr double kRelative = 1e-5;

struct Reference {
  std::map<std::string, at::Tensor> tensors;
  nlohmann::json metadata;
};

// A safetensors file: the length of a JSON header, the header, the tensors' bytes.
Reference read(const std::string& name) {
  std::ifstream file("modules/nn/references/" + name + ".safetensors", std::ios::binary);
  EXPECT_TRUE(file.is_open()) << name;
  std::stringstream content;
  content << file.rdbuf();
  const std::string bytes = content.str();
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  const auto header = nlohmann::json::parse(bytes.substr(sizeof(length), length));
  Reference reference;
  for (const auto& [key, value] : header.items()) {
    if (key == "__metadata__") {
      reference.metadata = value;
      continue;
    }
    const auto dtype = value["dtype"] == "I64" ? at::kLong : at::kFloat;
    const at::Tensor tensor = at::empty(value["shape"].get<std::vector<int64_t>>(), dtype);
    const auto begin = value["data_offsets"][0].get<uint64_t>();
    std::memcpy(tensor.data_ptr(), bytes.data() + sizeof(length) + length + begin, tensor.nbytes());
    reference.tensors[key] = tensor;
  }
  return reference;
}

double largest(const at::Tensor& tensor) {
  return tensor.abs().max().item<double>();
}

// To kRelative of the largest value, or of `scale` where that is larger.
void expect_close(const at::Tensor& got, const at::Tensor& want, const std::string& what,
                  double scale = 0) {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  scale = std::max(scale, largest(want));
  const double off = (got.detach() - want).abs().max().item<double>();
  EXPECT_LE(off, kRelative * scale + 1e-7) << what << " of up to " << scale;
}

// The gradient of the keys' biases is zero but for rounding (softmax does not see a shift), which is
// the processor's: it is measured by the gradient of the keys' weights. AdamW scales it up.
// -> where they stand in a parameter.
std::pair<int64_t, int64_t> biases_of_keys(const std::string& kind, const std::string& name,
                                           int64_t size) {
  if (kind == "gpt2" && name.ends_with("c_attn.bias")) return {size / 3, 2 * (size / 3)};
  if (kind == "vit" && name.ends_with("k_proj.bias")) return {0, size};
  return {0, 0};
}

void is_as_transformers_computed(const std::string& kind) {
  SCOPED_TRACE(kind);
  Reference reference = read(kind);
  auto& want = reference.tensors;
  const std::string config = reference.metadata["config.json"];
  const absl::StatusOr<Model> made = make_model("", config);
  ASSERT_TRUE(made.ok()) << made.status();
  const auto named = made->module->named_parameters();
  size_t parameters = 0;
  for (const auto& [key, value] : want) parameters += key.starts_with("parameter.") ? 1 : 0;
  // transformers has tied weights once.
  EXPECT_EQ(parameters, unique_parameters(*made->module).size());
  for (const auto& item : named) {
    const auto found = want.find("parameter." + item.key());
    if (found == want.end()) {
      EXPECT_EQ(item.key(), "lm_head.weight");
      continue;
    }
    ASSERT_EQ(item.value().sizes(), found->second.sizes()) << item.key();
    const at::NoGradGuard no_grad;
    item.value().copy_(found->second);
  }
  FusedOptimizer optimizer(made->module->parameters(),
                           AdamWOptions{.lr = 1e-2, .weight_decay = 0.01});
  std::vector<at::Tensor> losses;
  for (int64_t step = 0; step < want["inputs"].size(0); ++step) {
    optimizer.zero_grad();
    const at::Tensor logits = made->forward({want["inputs"][step]})[0];
    const at::Tensor labels = want["labels"][step];
    const at::Tensor loss =
        kind == "vit" ? at::cross_entropy_loss(logits, labels) : next_token_loss(logits, labels);
    loss.backward();
    losses.push_back(loss.detach());
    if (step == 0) {
      expect_close(logits, want["logits"], "logits");
      for (const auto& item : named) {
        const auto found = want.find("gradient." + item.key());
        if (found == want.end()) continue;
        const auto [begin, end] = biases_of_keys(kind, item.key(), item.value().size(0));
        std::string weight = item.key();
        if (begin < end) weight.replace(weight.rfind("bias"), 4, "weight");
        expect_close(item.value().grad(), found->second, "the gradient of " + item.key(),
                     begin < end ? largest(named[weight].grad()) : 0);
      }
    }
    optimizer.step();
  }
  expect_close(at::stack(losses), want["losses"], "losses");
  for (const auto& item : named) {
    const auto found = want.find("stepped." + item.key());
    if (found == want.end()) continue;
    const auto [begin, end] = biases_of_keys(kind, item.key(), item.value().size(0));
    at::Tensor got = item.value().detach().clone();
    got.slice(0, begin, end).copy_(found->second.slice(0, begin, end));
    expect_close(got, found->second, item.key() + " after AdamW");
  }
}

TEST(ReferencesTest, Llama) {
  is_as_transformers_computed("llama");
}
TEST(ReferencesTest, Mixtral) {
  is_as_transformers_computed("mixtral");
}
TEST(ReferencesTest, Gpt2) {
  is_as_transformers_computed("gpt2");
}
TEST(ReferencesTest, Vit) {
  is_as_transformers_computed("vit");
}

// Before and after the length that they were trained for.
TEST(ReferencesTest, RotaryEmbeddings) {
  const Reference reference = read("ropes");
  const auto configs = nlohmann::json::parse(reference.metadata["configs"].get<std::string>());
  EXPECT_EQ(configs.size(), 7);
  for (const auto& [name, config] : configs.items()) {
    SCOPED_TRACE(name);
    const absl::StatusOr<LlamaOptions> options = LlamaOptions::from_json(config.dump());
    ASSERT_TRUE(options.ok()) << options.status();
    RotaryEmbedding rotary(options->decoder().attention.head_size(),
                           options->max_position_embeddings, options->rope_parameters);
    for (const int64_t length : {9, 150}) {
      const auto [cos, sin] = rotary(length, at::kFloat);
      const at::Tensor want_cos =
          reference.tensors.at(name + "." + std::to_string(length) + ".cos");
      const at::Tensor want_sin =
          reference.tensors.at(name + "." + std::to_string(length) + ".sin");
      const int64_t first = length - want_cos.size(0), half = want_sin.size(1) / 2;
      // Angles of 150 radians in single precision.
      const auto close = [&](const at::Tensor& got, const at::Tensor& want) {
        EXPECT_LE((got - want).abs().max().item<double>(), 3e-5) << length;
      };
      close(cos.squeeze(1).slice(0, first), want_cos);
      const at::Tensor signs = at::cat({at::full({half}, -1.f), at::full({half}, 1.f)});
      close(sin.squeeze(1).slice(0, first) * signs, want_sin);
    }
    // Frequencies stay in single precision.
    rotary->to(at::kBFloat16);
    EXPECT_EQ(rotary->inv_freq.scalar_type(), at::kFloat);
    EXPECT_EQ(rotary(4, at::kBFloat16).first.scalar_type(), at::kBFloat16);
  }
}

}  // namespace
}  // namespace shardweave::nn

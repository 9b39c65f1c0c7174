#include "models.h"

#include <mutex>
#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/nn/registry.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/script.h"

namespace shardweave_tool {
namespace {

using shardweave::DeviceMesh;
using shardweave::Replicate;
using shardweave::Shard;
using shardweave::ShardingPlan;
namespace nn = shardweave::nn;

// LibTorch's generator, and its loader of TorchScript, are the process's; ranks are threads.
std::mutex& one_at_a_time() {
  static std::mutex mutex;
  return mutex;
}

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({16})};
  torch::nn::Linear up{16, 64}, down{64, 16};
};

Model make_mlp() {
  const std::lock_guard lock(one_at_a_time());
  torch::manual_seed(1);
  auto mlp = std::make_shared<MlpImpl>();
  return {mlp, [mlp](const std::vector<at::Tensor>& in) { return mlp->forward(in.at(0)); }};
}

ShardingPlan mlp_plan(const DeviceMesh&) {
  return {.parameter = {{"up.*", {{"tp", Shard(0)}}}, {"down.weight", {{"tp", Shard(1)}}}},
          .forward = {{"down.output", {{"tp", Replicate()}}}}};
}

// One of modules/nn, by its configuration.
ModelKind of_library(const char* name, const char* description, const char* config,
                     std::function<std::vector<at::Tensor>()> inputs) {
  return {.name = name,
          .description = description,
          .make =
              [config] {
                const std::lock_guard lock(one_at_a_time());
                torch::manual_seed(1);
                nn::Model model = shardweave::value_or_throw(nn::make_model("", config));
                return Model{model.module,
                             [forward = std::move(model.forward)](
                                 const std::vector<at::Tensor>& in) { return forward(in)[0]; }};
              },
          .inputs = std::move(inputs),
          // Of a model without memory: only its shapes count.
          .plan =
              [config](const DeviceMesh& mesh) {
                const nn::Model model = shardweave::deferred_init(
                    [&] { return shardweave::value_or_throw(nn::make_model("", config)); });
                return model.plan(mesh, {});
              }};
}

// Small, with 12 heads, which divide by many a mesh's ranks; the rest divides by little.
constexpr char kLlama[] = R"json({"model_type": "llama", "vocab_size": 101, "hidden_size": 48,
    "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 4, "max_position_embeddings": 32})json";
constexpr char kGpt2[] = R"json({"model_type": "gpt2", "vocab_size": 101, "n_positions": 32,
    "n_embd": 48, "n_layer": 2, "n_head": 12, "resid_pdrop": 0, "embd_pdrop": 0,
    "attn_pdrop": 0})json";
constexpr char kMixtral[] = R"json({"model_type": "mixtral", "vocab_size": 101, "hidden_size": 48,
    "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 4, "num_local_experts": 4, "max_position_embeddings": 32})json";
constexpr char kVit[] = R"json({"model_type": "vit", "hidden_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 12, "intermediate_size": 70, "image_size": 8, "patch_size": 2,
    "num_channels": 1, "num_labels": 10})json";

std::vector<at::Tensor> tokens() {
  return {(at::arange(4 * 11, at::kLong) * 7).remainder(101).view({4, 11})};
}

std::vector<at::Tensor> pictures() {
  return {at::arange(4.0 * 8 * 8).sin().view({4, 1, 8, 8})};
}

// A TorchScript module's tree, with its own tensors: what is done to these is done to it.
struct ScriptModule : torch::nn::Module {
  explicit ScriptModule(const torch::jit::Module& script)
      : torch::nn::Module(script.type()->name().has_value() ? script.type()->name()->name()
                                                            : std::string("ScriptModule")) {
    for (const auto& p : script.named_parameters(/*recurse=*/false)) {
      register_parameter(p.name, p.value, p.value.requires_grad());
    }
    for (const auto& b : script.named_buffers(/*recurse=*/false)) register_buffer(b.name, b.value);
    for (const auto& child : script.named_children()) {
      register_module(child.name, std::make_shared<ScriptModule>(child.value));
    }
  }
};

}  // namespace

const std::vector<ModelKind>& models() {
  static const std::vector<ModelKind> table = {
      {.name = "mlp",
       .description = "a norm and two linear layers, 16 features",
       .make = make_mlp,
       .inputs = [] { return std::vector{at::arange(96.0).sin().view({6, 16})}; },
       .plan = mlp_plan},
      of_library("llama", "Llama, 2 layers of 48 features, 12 heads, 4 of keys", kLlama, tokens),
      of_library("gpt2", "GPT-2, 2 layers of 48 features, 12 heads", kGpt2, tokens),
      of_library("mixtral", "Mixtral, 2 layers of 48 features, 12 heads, 4 experts", kMixtral,
                 tokens),
      of_library("vit", "ViT, 2 layers of 48 features, 12 heads, images of 8 x 8", kVit, pictures),
  };
  return table;
}

absl::StatusOr<ModelKind> find_model(const std::string& name) {
  std::vector<std::string> names;
  for (const ModelKind& kind : models()) {
    if (kind.name == name) return kind;
    names.push_back(kind.name);
  }
  return absl::NotFoundError(
      absl::StrCat("--model=", name, ": there are ", absl::StrJoin(names, ", ")));
}

absl::StatusOr<ModelKind> script_model(const std::string& file) {
  const auto load = [file] {
    const std::lock_guard lock(one_at_a_time());
    auto script = std::make_shared<torch::jit::Module>(torch::jit::load(file));
    return Model{std::make_shared<ScriptModule>(*script),
                 [script](const std::vector<at::Tensor>& inputs) {
                   const c10::IValue result =
                       script->forward(std::vector<c10::IValue>(inputs.begin(), inputs.end()));
                   if (result.isTensor()) return result.toTensor();
                   throw shardweave::Error(absl::InvalidArgumentError(absl::StrCat(
                       "the script's forward gives a ", result.tagKind(), "; wanted one tensor")));
                 }};
  };
  try {
    load();
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("--script=", file, ": ", shardweave::message_of(error)));
  }
  return ModelKind{.name = file, .description = "TorchScript", .make = load};
}

}  // namespace shardweave_tool

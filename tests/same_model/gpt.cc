#include "gpt.h"

#include "ATen/ATen.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/sharding_plan_json.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

namespace same_model {
namespace {

namespace nn = torch::nn;

nn::LayerNorm norm_of_dim() {
  return nn::LayerNorm(nn::LayerNormOptions({kDim}));
}

struct BlockImpl : nn::Module {
  BlockImpl() {
    register_module("norm1", norm1);
    register_module("q", q);
    register_module("k", k);
    register_module("v", v);
    register_module("o", o);
    register_module("norm2", norm2);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](const at::Tensor& t) {
      return t.view({x.size(0), x.size(1), kHeads, kDim / kHeads}).transpose(1, 2);
    };
    const at::Tensor n = norm1(x);
    const at::Tensor mixed = at::scaled_dot_product_attention(
        heads(q(n)), heads(k(n)), heads(v(n)), {}, /*dropout_p=*/0, /*is_causal=*/true);
    const at::Tensor y = x + o(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), kDim}));
    return y + down(at::gelu(up(norm2(y))));
  }
  nn::LayerNorm norm1 = norm_of_dim(), norm2 = norm_of_dim();
  nn::Linear q{kDim, kDim}, k{kDim, kDim}, v{kDim, kDim}, o{kDim, kDim}, up{kDim, 4 * kDim},
      down{4 * kDim, kDim};
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  GptImpl() {
    embedding = register_module("embedding", nn::Embedding(kVocabulary, kDim));
    positions = register_module("positions", nn::Embedding(kLength, kDim));
    blocks = register_module("blocks", nn::ModuleList());
    for (int64_t i = 0; i < kLayers; ++i) blocks->push_back(Block());
    norm = register_module("norm", norm_of_dim());
    head = register_module("head", nn::Linear(nn::LinearOptions(kDim, kVocabulary).bias(false)));
    const at::NoGradGuard no_grad;
    auto parameters = named_parameters();
    const auto shapes = parameter_shapes();
    TORCH_CHECK(parameters.size() == shapes.size(), "of parameters there are ", parameters.size());
    for (size_t i = 0; i < shapes.size(); ++i) {
      at::Tensor& parameter = parameters[shapes[i].first];
      TORCH_CHECK(parameter.sizes() == shapes[i].second, shapes[i].first);
      parameter.copy_(initial_value(i));
    }
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embedding(tokens) + positions->weight;
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(norm(x));
  }
  nn::Embedding embedding{nullptr}, positions{nullptr};
  nn::ModuleList blocks{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
};

// As LibTorch's own layers would be written in a file of TorchScript.
torch::jit::Module script_layer(const std::string& kind, const std::string& forward,
                                const std::string& fqn) {
  torch::jit::Module layer(kind);
  layer.register_attribute("training", c10::BoolType::get(), true);
  const auto shapes = parameter_shapes();
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (!shapes[i].first.starts_with(fqn + ".")) continue;
    layer.register_parameter(shapes[i].first.substr(fqn.size() + 1),
                             initial_value(i).requires_grad_(), false);
  }
  layer.define("def forward(self, x):\n  return " + forward + "\n");
  return layer;
}

}  // namespace

std::vector<std::pair<std::string, std::vector<int64_t>>> parameter_shapes() {
  std::vector<std::pair<std::string, std::vector<int64_t>>> all = {
      {"embedding.weight", {kVocabulary, kDim}}, {"positions.weight", {kLength, kDim}}};
  const auto add = [&](const std::string& layer, int64_t out, int64_t in) {
    if (in > 0) all.push_back({layer + ".weight", {out, in}});
    if (in == 0) all.push_back({layer + ".weight", {out}});
    all.push_back({layer + ".bias", {out}});
  };
  for (int64_t i = 0; i < kLayers; ++i) {
    const std::string block = "blocks." + std::to_string(i) + ".";
    add(block + "norm1", kDim, 0);
    for (const char* name : {"q", "k", "v", "o"}) add(block + name, kDim, kDim);
    add(block + "norm2", kDim, 0);
    add(block + "up", 4 * kDim, kDim);
    add(block + "down", kDim, 4 * kDim);
  }
  add("norm", kDim, 0);
  all.push_back({"head.weight", {kVocabulary, kDim}});
  return all;
}

at::Tensor initial_value(size_t index) {
  const auto [name, sizes] = parameter_shapes()[index];
  const bool is_norm = name.find("norm") != std::string::npos && name.ends_with("weight");
  at::Tensor value = at::empty(sizes, at::kFloat);
  float* const data = value.mutable_data_ptr<float>();
  for (int64_t i = 0; i < value.numel(); ++i) {
    const uint32_t mixed = static_cast<uint32_t>(i) * 2654435761U +
                           static_cast<uint32_t>(index) * 2246822519U + 374761393U;
    const uint32_t bits = (mixed ^ (mixed >> 15)) * 2246822519U;
    // 24 bits: exact in every language. From -0.25 to 0.25.
    data[i] = static_cast<float>(bits >> 8) / 33554432.0F - 0.25F + (is_norm ? 1.0F : 0.0F);
  }
  return value;
}

std::pair<at::Tensor, at::Tensor> batch() {
  at::Tensor tokens = at::empty({kBatch, kLength + 1}, at::kLong);
  int64_t* const data = tokens.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t t = 0; t <= kLength; ++t) {
      data[b * (kLength + 1) + t] = (5 * b + 3 * t + b * t) % kVocabulary;
    }
  }
  return {tokens.narrow(1, 0, kLength).contiguous(), tokens.narrow(1, 1, kLength).contiguous()};
}

Gpt make_gpt() {
  const auto model = std::make_shared<GptImpl>();
  return {model, [model](const at::Tensor& tokens) { return model->forward(tokens); }};
}

torch::jit::Module make_script() {
  const std::string linear = "torch.linear(x, self.weight, self.bias)";
  const std::string norm =
      "torch.layer_norm(x, [" + std::to_string(kDim) + "], self.weight, self.bias)";
  const std::string embedding = "torch.embedding(self.weight, x)";
  torch::jit::Module root("Gpt");
  root.register_attribute("training", c10::BoolType::get(), true);
  root.register_module("embedding", script_layer("Embedding", embedding, "embedding"));
  root.register_module("positions", script_layer("Positions", "self.weight", "positions"));
  torch::jit::Module blocks("Blocks");
  blocks.register_attribute("training", c10::BoolType::get(), true);
  std::string calls;
  for (int64_t i = 0; i < kLayers; ++i) {
    const std::string number = std::to_string(i), fqn = "blocks." + number + ".";
    torch::jit::Module block("Block" + number);
    block.register_attribute("training", c10::BoolType::get(), true);
    for (const char* name : {"norm1", "q", "k", "v", "o", "norm2", "up", "down"}) {
      const bool is_norm = std::string(name).starts_with("norm");
      block.register_module(
          name, script_layer(name + ("_" + number), is_norm ? norm : linear, fqn + name));
    }
    block.define("def heads(self, t):\n  return t.view([t.size(0), t.size(1), " +
                 std::to_string(kHeads) + ", " + std::to_string(kDim / kHeads) +
                 "]).transpose(1, 2)\n");
    block.define(
        "def forward(self, x):\n"
        "  n = self.norm1.forward(x)\n"
        "  mixed = torch.scaled_dot_product_attention(self.heads(self.q.forward(n)), "
        "self.heads(self.k.forward(n)), self.heads(self.v.forward(n)), None, 0.0, True)\n"
        "  y = x + self.o.forward(mixed.transpose(1, 2).reshape([x.size(0), x.size(1), " +
        std::to_string(kDim) +
        "]))\n"
        "  return y + self.down.forward(torch.gelu(self.up.forward(self.norm2.forward(y))))\n");
    blocks.register_module(number, block);
    calls += "  x = getattr(self, '" + number + "').forward(x)\n";
  }
  blocks.define("def forward(self, x):\n" + calls + "  return x\n");
  root.register_module("blocks", blocks);
  root.register_module("norm", script_layer("LastNorm", norm, "norm"));
  root.register_module("head", script_layer("Head", "torch.linear(x, self.weight)", "head"));
  root.define(
      "def forward(self, tokens):\n"
      "  x = self.embedding.forward(tokens) + self.positions.forward(tokens)\n"
      "  return self.head.forward(self.norm.forward(self.blocks.forward(x)))\n");
  return root;
}

std::vector<double> train(const Gpt& gpt, const shardweave::MeshPtr& mesh,
                          const std::string& plan) {
  auto [tokens, targets] = batch();
  if (mesh != nullptr) {
    shardweave::parallelize_module(
        *gpt.module, mesh, shardweave::value_or_throw(shardweave::parse_sharding_plan(plan)),
        {.source = std::nullopt});
    shardweave::NamedPlacements rows;
    if (mesh->mesh().dim("dp").ok()) rows.emplace_back("dp", shardweave::Shard(0));
    for (at::Tensor* tensor : {&tokens, &targets}) {
      *tensor = shardweave::distribute_tensor(*tensor, mesh, rows, {.source = std::nullopt});
    }
  }
  shardweave::FusedOptimizer optimizer(gpt.module->parameters(),
                                       shardweave::AdamWOptions{.lr = kLearningRate});
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor loss =
        at::cross_entropy_loss(gpt.forward(tokens).view({-1, kVocabulary}), targets.view({-1}));
    loss.backward();
    shardweave::finish_grad_sync(*gpt.module);
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace same_model

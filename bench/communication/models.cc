#include "models.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/CPUGeneratorImpl.h"
#include "c10/core/GradMode.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"

namespace communication_bench {
namespace {

namespace nn = torch::nn;

nn::Linear linear(int64_t in, int64_t out, bool bias = true) {
  return nn::Linear(nn::LinearOptions(in, out).bias(bias));
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target) {
  return at::cross_entropy_loss(logits.view({-1, logits.size(-1)}), target.reshape({-1}));
}

// --- GPT, and GPT with experts -------------------------------------------------------------------

struct SelfAttentionImpl : nn::Module {
  int64_t heads;
  nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr};

  explicit SelfAttentionImpl(const Sizes& s) : heads(s.heads) {
    q = register_module("q", linear(s.dim, s.dim));
    k = register_module("k", linear(s.dim, s.dim));
    v = register_module("v", linear(s.dim, s.dim));
    o = register_module("o", linear(s.dim, s.dim));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto split = [&](const at::Tensor& y) {
      return y.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
    };
    const at::Tensor y = at::scaled_dot_product_attention(split(q(x)), split(k(x)), split(v(x)),
                                                          /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                          /*is_causal=*/true);
    return o(y.transpose(1, 2).reshape(x.sizes()));
  }
};
TORCH_MODULE(SelfAttention);

struct FeedForwardImpl : nn::Module {
  nn::Linear up{nullptr}, down{nullptr};

  explicit FeedForwardImpl(const Sizes& s) {
    up = register_module("up", linear(s.dim, s.hidden));
    down = register_module("down", linear(s.hidden, s.dim));
  }
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x))); }
};

// Every expert sees every token; a token's weights are zero but for its best experts.
struct ExpertsImpl : nn::Module {
  int64_t top_k;
  nn::Linear gate{nullptr};
  at::Tensor up, down;  // [experts, dim, hidden], [experts, hidden, dim]

  explicit ExpertsImpl(const Sizes& s) : top_k(s.top_k) {
    gate = register_module("gate", linear(s.dim, s.experts, false));
    up = register_parameter("up", at::empty({s.experts, s.dim, s.expert_hidden}));
    down = register_parameter("down", at::empty({s.experts, s.expert_hidden, s.dim}));
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor x = input.reshape({-1, input.size(-1)});  // [N, D]
    const at::Tensor chances = at::softmax(gate(x), -1);       // [N, E]
    const at::Tensor best = std::get<1>(chances.topk(top_k, -1));
    const at::Tensor mask = at::zeros_like(chances).scatter(1, best, 1.0);
    at::Tensor weights = chances * mask;
    weights = weights / weights.sum(-1, /*keepdim=*/true);
    const at::Tensor hidden = at::gelu(at::einsum("nd,edf->enf", {x, up}));
    const at::Tensor y = at::einsum("enf,efd->end", {hidden, down});
    return (y * weights.t().unsqueeze(-1)).sum(0).view(input.sizes());
  }
};

template <typename FeedForwardPart>
struct GptBlockImpl : nn::Module {
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  SelfAttention attention{nullptr};
  std::shared_ptr<FeedForwardPart> feed_forward;

  explicit GptBlockImpl(const Sizes& s) {
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({s.dim})));
    attention = register_module("attention", SelfAttention(s));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({s.dim})));
    feed_forward = register_module("feed_forward", std::make_shared<FeedForwardPart>(s));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = x + attention(norm1(x));
    return y + feed_forward->forward(norm2(y));
  }
};

template <typename FeedForwardPart>
struct Gpt : Model {
  using Block = GptBlockImpl<FeedForwardPart>;
  nn::Embedding tokens{nullptr}, positions{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};

  explicit Gpt(const Sizes& s) {
    tokens = register_module("tokens", nn::Embedding(s.vocabulary, s.dim));
    positions = register_module("positions", nn::Embedding(s.tokens, s.dim));
    for (int64_t i = 0; i < s.layers; ++i) {
      blocks.push_back(register_module("blocks" + std::to_string(i), std::make_shared<Block>(s)));
    }
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({s.dim})));
    head = register_module("head", linear(s.dim, s.vocabulary, false));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    at::Tensor x = tokens(input) + positions(at::arange(input.size(1), at::kLong));
    for (const auto& block : blocks) x = block->forward(x);
    return cross_entropy(head(norm(x)), target);
  }
};

// --- Llama ---------------------------------------------------------------------------------------

struct RmsNormImpl : nn::Module {
  at::Tensor weight;

  explicit RmsNormImpl(int64_t dim) { weight = register_parameter("weight", at::ones({dim})); }
  at::Tensor forward(const at::Tensor& x) {
    return x * at::rsqrt(x.pow(2).mean(-1, /*keepdim=*/true) + 1e-5) * weight;
  }
};
TORCH_MODULE(RmsNorm);

// Cosine and sine of the angles of every position, [tokens, head_dim].
struct Rotary {
  at::Tensor cos, sin;

  Rotary(int64_t tokens, int64_t head_dim) {
    const at::Tensor frequencies =
        at::pow(10000.0, at::arange(0, head_dim, 2, at::kFloat) / -static_cast<double>(head_dim));
    const at::Tensor angles = at::outer(at::arange(tokens, at::kFloat), frequencies);
    cos = at::cat({angles.cos(), angles.cos()}, -1);
    sin = at::cat({angles.sin(), angles.sin()}, -1);
  }
  at::Tensor rotate(const at::Tensor& x) const {  // [batch, heads, tokens, head_dim]
    const std::vector<at::Tensor> halves = x.chunk(2, -1);
    return x * cos.slice(0, 0, x.size(2)) +
           at::cat({-halves[1], halves[0]}, -1) * sin.slice(0, 0, x.size(2));
  }
};

struct LlamaLayerImpl : nn::Module {
  int64_t heads, kv_heads;
  RmsNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr}, gate{nullptr}, up{nullptr},
      down{nullptr};

  explicit LlamaLayerImpl(const Sizes& s) : heads(s.heads), kv_heads(s.kv_heads) {
    const int64_t kv_dim = s.dim / heads * kv_heads;
    norm1 = register_module("norm1", RmsNorm(s.dim));
    q = register_module("q", linear(s.dim, s.dim, false));
    k = register_module("k", linear(s.dim, kv_dim, false));
    v = register_module("v", linear(s.dim, kv_dim, false));
    o = register_module("o", linear(s.dim, s.dim, false));
    norm2 = register_module("norm2", RmsNorm(s.dim));
    gate = register_module("gate", linear(s.dim, s.hidden, false));
    up = register_module("up", linear(s.dim, s.hidden, false));
    down = register_module("down", linear(s.hidden, s.dim, false));
  }
  at::Tensor attention(const at::Tensor& x, const Rotary& rotary) {
    const auto split = [&](const at::Tensor& y, int64_t n) {
      return y.view({x.size(0), x.size(1), n, -1}).transpose(1, 2);
    };
    const at::Tensor queries = rotary.rotate(split(q(x), heads));
    const at::Tensor keys =
        rotary.rotate(split(k(x), kv_heads)).repeat_interleave(heads / kv_heads, 1);
    const at::Tensor values = split(v(x), kv_heads).repeat_interleave(heads / kv_heads, 1);
    const at::Tensor y = at::scaled_dot_product_attention(queries, keys, values, /*attn_mask=*/{},
                                                          /*dropout_p=*/0.0, /*is_causal=*/true);
    return o(y.transpose(1, 2).reshape(x.sizes()));
  }
  at::Tensor forward(const at::Tensor& x, const Rotary& rotary) {
    const at::Tensor y = x + attention(norm1(x), rotary);
    const at::Tensor z = norm2(y);
    return y + down(at::silu(gate(z)) * up(z));
  }
};

struct Llama : Model {
  nn::Embedding tokens{nullptr};
  std::vector<std::shared_ptr<LlamaLayerImpl>> layers;
  RmsNorm norm{nullptr};
  nn::Linear head{nullptr};  // null: tied
  Rotary rotary;             // for sequences of twice the length

  explicit Llama(const Sizes& s) : rotary(2 * s.tokens, s.dim / s.heads) {
    tokens = register_module("tokens", nn::Embedding(s.vocabulary, s.dim));
    for (int64_t i = 0; i < s.layers; ++i) {
      layers.push_back(
          register_module("layers" + std::to_string(i), std::make_shared<LlamaLayerImpl>(s)));
    }
    norm = register_module("norm", RmsNorm(s.dim));
    if (!s.tied) head = register_module("head", linear(s.dim, s.vocabulary, false));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    at::Tensor x = tokens(input);
    for (const auto& layer : layers) x = layer->forward(x, rotary);
    x = norm(x);
    return cross_entropy(head.is_empty() ? at::linear(x, tokens->weight) : head(x), target);
  }
};

// --- vision transformer --------------------------------------------------------------------------

struct VitBlockImpl : nn::Module {
  int64_t heads;
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear qkv{nullptr}, o{nullptr};
  std::shared_ptr<FeedForwardImpl> feed_forward;

  explicit VitBlockImpl(const Sizes& s) : heads(s.heads) {
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({s.dim})));
    qkv = register_module("qkv", linear(s.dim, 3 * s.dim));
    o = register_module("o", linear(s.dim, s.dim));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({s.dim})));
    feed_forward = register_module("feed_forward", std::make_shared<FeedForwardImpl>(s));
  }
  at::Tensor attention(const at::Tensor& x) {
    const at::Tensor parts =
        qkv(x).reshape({x.size(0), x.size(1), 3, heads, -1}).permute({2, 0, 3, 1, 4});
    const at::Tensor y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
    return o(y.transpose(1, 2).reshape(x.sizes()));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = x + attention(norm1(x));
    return y + feed_forward->forward(norm2(y));
  }
};

struct Vit : Model {
  nn::Conv2d patches{nullptr};
  at::Tensor cls, positions;  // [1, 1, dim], [1, 1 + number of patches, dim]
  std::vector<std::shared_ptr<VitBlockImpl>> blocks;
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};

  explicit Vit(const Sizes& s) {
    const int64_t side = s.image / s.patch;
    patches = register_module("patches",
                              nn::Conv2d(nn::Conv2dOptions(3, s.dim, s.patch).stride(s.patch)));
    cls = register_parameter("cls", at::empty({1, 1, s.dim}));
    positions = register_parameter("positions", at::empty({1, 1 + side * side, s.dim}));
    for (int64_t i = 0; i < s.layers; ++i) {
      blocks.push_back(
          register_module("blocks" + std::to_string(i), std::make_shared<VitBlockImpl>(s)));
    }
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({s.dim})));
    head = register_module("head", linear(s.dim, s.classes));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    at::Tensor x = patches(input).flatten(2).transpose(1, 2);
    x = at::cat({cls.expand({x.size(0), -1, -1}), x}, 1) + positions;
    for (const auto& block : blocks) x = block->forward(x);
    return cross_entropy(head(norm(x).select(1, 0)), target);
  }
};

// --- convolutional net ---------------------------------------------------------------------------

struct ConvNet : Model {
  nn::Conv2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr};
  nn::BatchNorm2d norm1{nullptr}, norm2{nullptr}, norm3{nullptr};
  nn::Linear head{nullptr};

  explicit ConvNet(const Sizes& s) {
    const auto conv = [](int64_t in, int64_t out) {
      return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1).bias(false));
    };
    conv1 = register_module("conv1", conv(3, s.channels));
    norm1 = register_module("norm1", nn::BatchNorm2d(s.channels));
    conv2 = register_module("conv2", conv(s.channels, 2 * s.channels));
    norm2 = register_module("norm2", nn::BatchNorm2d(2 * s.channels));
    conv3 = register_module("conv3", conv(2 * s.channels, 4 * s.channels));
    norm3 = register_module("norm3", nn::BatchNorm2d(4 * s.channels));
    head = register_module("head", linear(4 * s.channels, s.classes));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    at::Tensor x = at::max_pool2d(at::relu(norm1(conv1(input))), {2, 2});
    x = at::max_pool2d(at::relu(norm2(conv2(x))), {2, 2});
    x = at::adaptive_avg_pool2d(at::relu(norm3(conv3(x))), {1, 1});
    return cross_entropy(head(x.flatten(1)), target);
  }
};

// -------------------------------------------------------------------------------------------------

std::shared_ptr<Model> make(ModelKind kind, const Sizes& sizes) {
  switch (kind) {
    case ModelKind::kGpt:
      return std::make_shared<Gpt<FeedForwardImpl>>(sizes);
    case ModelKind::kLlama:
      return std::make_shared<Llama>(sizes);
    case ModelKind::kVit:
      return std::make_shared<Vit>(sizes);
    case ModelKind::kMoe:
      return std::make_shared<Gpt<ExpertsImpl>>(sizes);
    case ModelKind::kConvNet:
      return std::make_shared<ConvNet>(sizes);
  }
  return nullptr;
}

bool reads_images(ModelKind kind) {
  return kind == ModelKind::kVit || kind == ModelKind::kConvNet;
}

}  // namespace

std::string_view to_string(ModelKind kind) {
  switch (kind) {
    case ModelKind::kGpt:
      return "gpt";
    case ModelKind::kLlama:
      return "llama";
    case ModelKind::kVit:
      return "vit";
    case ModelKind::kMoe:
      return "moe";
    case ModelKind::kConvNet:
      return "conv net";
  }
  return "";
}

std::shared_ptr<Model> make_model(ModelKind kind, const Sizes& sizes) {
  std::shared_ptr<Model> model = make(kind, sizes);
  const c10::AutoGradMode no_grad(false);
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(/*seed=*/17);
  for (const auto& item : model->named_parameters()) {
    at::Tensor parameter = item.value();
    const bool is_norm_weight = parameter.dim() == 1 && item.key().ends_with("weight");
    const bool is_embedding = item.key() == "tokens.weight";
    // Of an expert's [experts, inputs, outputs], of a linear's or a convolution's [outputs, ...].
    const int64_t inputs =
        parameter.dim() == 3 ? parameter.size(1) : parameter.numel() / parameter.size(0);
    // One that is the head, too, is as a head is: probabilities that are no normal numbers any more take
    // a processor many times as long.
    const bool is_head = is_embedding && kind == ModelKind::kLlama && sizes.tied;
    if (parameter.dim() == 1 || (is_embedding && !is_head)) {
      parameter.normal_(is_norm_weight ? 1 : 0, is_embedding ? 0.5 : 0.1, generator);
    } else {
      parameter.normal_(0, 1 / std::sqrt(static_cast<double>(inputs)), generator);
    }
  }
  return model;
}

Batch make_batch(ModelKind kind, const Sizes& sizes) {
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(/*seed=*/5);
  if (reads_images(kind)) {
    return {at::randn({sizes.batch, 3, sizes.image, sizes.image}, generator),
            at::randint(sizes.classes, {sizes.batch}, generator, at::kLong)};
  }
  return {at::randint(sizes.vocabulary, {sizes.batch, sizes.tokens}, generator, at::kLong),
          at::randint(sizes.vocabulary, {sizes.batch, sizes.tokens}, generator, at::kLong)};
}

}  // namespace communication_bench

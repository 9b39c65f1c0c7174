#include "model.h"

#include <cmath>
#include <memory>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/gelu.h"
#include "ATen/ops/scaled_dot_product_attention.h"
#include "c10/core/GradMode.h"

namespace train_gpt {

namespace nn = torch::nn;

BlockImpl::BlockImpl(const GptOptions& options) : head_dim_(options.dim / options.heads) {
  const int64_t dim = options.dim;
  norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({dim})));
  q = register_module("q", nn::Linear(dim, dim));
  k = register_module("k", nn::Linear(dim, dim));
  v = register_module("v", nn::Linear(dim, dim));
  o = register_module("o", nn::Linear(dim, dim));
  norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({dim})));
  up = register_module("up", nn::Linear(dim, 4 * dim));
  down = register_module("down", nn::Linear(4 * dim, dim));
}

at::Tensor BlockImpl::attention(const at::Tensor& x) {
  const int64_t batch = x.size(0), seq = x.size(1);
  const auto heads = [&](const at::Tensor& y) {
    return y.view({batch, seq, -1, head_dim_}).transpose(1, 2);
  };
  const at::Tensor y =
      at::scaled_dot_product_attention(heads(q(x)), heads(k(x)), heads(v(x)), /*attn_mask=*/{},
                                       /*dropout_p=*/0.0, /*is_causal=*/true);
  return o(y.transpose(1, 2).reshape({batch, seq, -1}));
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const at::Tensor y = x + attention(norm1(x));
  return y + down(at::gelu(up(norm2(y))));
}

GptImpl::GptImpl(const GptOptions& options) {
  tokens = register_module("tokens", nn::Embedding(kVocabulary, options.dim));
  positions = register_module("positions", nn::Embedding(options.seq, options.dim));
  blocks = register_module("blocks", nn::ModuleList());
  for (int64_t i = 0; i < options.layers; ++i) blocks->push_back(Block(options));
  norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({options.dim})));
  head =
      register_module("head", nn::Linear(nn::LinearOptions(options.dim, kVocabulary).bias(false)));
  index = register_buffer("index", at::arange(options.seq, at::kLong));
}

at::Tensor GptImpl::forward(const at::Tensor& input) {
  at::Tensor x = tokens(input) + positions(index.narrow(0, 0, input.size(1)));
  for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
  return head(norm(x));
}

at::Tensor GptImpl::loss(const at::Tensor& input, const at::Tensor& targets) {
  return at::cross_entropy_loss(forward(input).view({-1, kVocabulary}), targets.view({-1}));
}

void init_weights(nn::Module& model, uint64_t seed) {
  const c10::AutoGradMode no_grad(false);
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (const std::shared_ptr<nn::Module>& module : model.modules()) {
    if (auto* embedding = module->as<nn::Embedding>()) {
      embedding->weight.normal_(0, 0.3, generator);
    } else if (auto* linear = module->as<nn::Linear>()) {
      const auto inputs = static_cast<double>(linear->weight.size(1));
      linear->weight.normal_(0, 0.5 / std::sqrt(inputs), generator);
      if (linear->bias.defined()) linear->bias.zero_();
    }
  }  // norms start as 1 and 0 anyway
}

}  // namespace train_gpt

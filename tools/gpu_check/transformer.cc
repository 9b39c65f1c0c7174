#include "transformer.h"

#include <cmath>

#include "ATen/ATen.h"
#include "c10/core/GradMode.h"
#include "torch/nn/functional/loss.h"

namespace shardweave_tool {

namespace nn = torch::nn;
using shardweave::NamedPlacements;
using shardweave::Shard;

TransformerBlockImpl::TransformerBlockImpl(const TransformerSizes& sizes)
    : heads(sizes.heads), fused_attention(sizes.fused_attention) {
  const int64_t dim = sizes.dim;
  norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({dim})));
  norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({dim})));
  q = register_module("q", nn::Linear(dim, dim));
  k = register_module("k", nn::Linear(dim, dim));
  v = register_module("v", nn::Linear(dim, dim));
  o = register_module("o", nn::Linear(dim, dim));
  up = register_module("up", nn::Linear(dim, 4 * dim));
  down = register_module("down", nn::Linear(4 * dim, dim));
}

at::Tensor TransformerBlockImpl::forward(const at::Tensor& x) {
  const int64_t batch = x.size(0), length = x.size(1), dim = x.size(2);
  const auto split = [&](const at::Tensor& t) {
    return t.view({batch, length, heads, dim / heads}).transpose(1, 2);
  };
  const at::Tensor h = norm1(x);
  const at::Tensor queries = split(q(h)), keys = split(k(h)), values = split(v(h));
  at::Tensor mixed;
  if (fused_attention) {
    mixed = at::scaled_dot_product_attention(queries, keys, values);
  } else {
    const double scale = 1 / std::sqrt(static_cast<double>(dim / heads));
    mixed = at::matmul(at::softmax(at::matmul(queries, keys.transpose(2, 3)) * scale, -1), values);
  }
  const at::Tensor y = x + o(mixed.transpose(1, 2).reshape({batch, length, dim}));
  return y + down(at::gelu(up(norm2(y))));
}

TransformerImpl::TransformerImpl(const TransformerSizes& sizes) {
  embed = register_module("embed", nn::Embedding(sizes.words, sizes.dim));
  blocks = register_module("blocks", nn::ModuleList());
  for (int64_t i = 0; i < sizes.layers; ++i) blocks->push_back(TransformerBlock(sizes));
  norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({sizes.dim})));
  head = register_module("head", nn::Linear(sizes.dim, sizes.words));
}

at::Tensor TransformerImpl::forward(const at::Tensor& words) {
  at::Tensor x = embed(words);
  for (const auto& block : *blocks) x = block->as<TransformerBlock>()->forward(x);
  return head(norm(x));
}

void fill(nn::Module& module) {
  const c10::AutoGradMode no_grad(false);
  double k = 0;
  for (at::Tensor p : module.parameters()) {
    p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.2);
  }
}

shardweave::ShardingPlan tensor_parallel_plan() {
  shardweave::ShardingPlan plan;
  plan.parameter = {{"blocks.*.{q,k,v,up}.*", NamedPlacements{{"tp", Shard(0)}}},
                    {"blocks.*.{o,down}.weight", NamedPlacements{{"tp", Shard(1)}}}};
  return plan;
}

Words make_words(int64_t batch, int64_t length, int64_t words) {
  const at::Tensor given = at::arange(batch * length).mul(7).remainder(words).view({batch, length});
  return {given, given.roll(1, 1)};
}

at::Tensor loss_of(Transformer& model, const Words& words) {
  const at::Tensor logits = model(words.given);
  return nn::functional::cross_entropy(logits.view({-1, logits.size(2)}), words.next.view({-1}));
}

}  // namespace shardweave_tool

#include "shardweave/modules/testing/words_net.h"
#include "torch/nn/functional/loss.h"

namespace shardweave::testing {

namespace nn = torch::nn;

WordsBlockImpl::WordsBlockImpl() {
  norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kDim})));
  up = register_module("up", nn::Linear(kDim, kHidden));
  down = register_module("down", nn::Linear(kHidden, kDim));
}

WordsNetImpl::WordsNetImpl(int num_blocks) {
  embed = register_module("embed", nn::Embedding(kWords, kDim));
  blocks = register_module("blocks", nn::ModuleList());
  for (int i = 0; i < num_blocks; ++i) blocks->push_back(WordsBlock());
  head = register_module("head", nn::Linear(kDim, kWords));
}

at::Tensor WordsNetImpl::forward(const at::Tensor& words) {
  at::Tensor x = embed(words);
  for (const auto& block : *blocks) x = block->as<WordsBlock>()->forward(x);
  return head(x);
}

WordsNet make_words_net(int num_blocks) {
  WordsNet net(num_blocks);
  const c10::AutoGradMode no_grad(false);
  double k = 0;
  for (at::Tensor p : net->parameters()) {
    p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
  }
  return net;
}

at::Tensor words_of(int step) {
  return at::arange(kBatch * kLength).mul(7).add(step).remainder(kWords).view({kBatch, kLength});
}

at::Tensor loss_of(WordsNet& net, const at::Tensor& words, const at::Tensor& wanted) {
  return nn::functional::cross_entropy(net(words).view({-1, kWords}), wanted.view({-1}));
}

}  // namespace shardweave::testing

// A model for tests of training: words in, words out, odd sizes, several units; always the same
// numbers.
//
//   WordsNet net = make_words_net();
//   loss_of(net, words_of(0), words_of(1)).backward();
#pragma once

#include <cstdint>
#include <string>

#include "ATen/ATen.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"

namespace shardweave::testing {

inline constexpr int64_t kDim = 6, kHidden = 10, kWords = 11, kBatch = 4, kLength = 3;

struct WordsBlockImpl : torch::nn::Module {
  WordsBlockImpl();
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(WordsBlock);

struct WordsNetImpl : torch::nn::Module {
  explicit WordsNetImpl(int num_blocks);
  at::Tensor forward(const at::Tensor& words);
  torch::nn::Embedding embed{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(WordsNet);

// On the CPU.
WordsNet make_words_net(int num_blocks = 3);

// [kBatch, kLength], other ones in each step.
at::Tensor words_of(int step);

// Scalar.
at::Tensor loss_of(WordsNet& net, const at::Tensor& words, const at::Tensor& wanted);

}  // namespace shardweave::testing

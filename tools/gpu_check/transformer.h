// A small transformer as users of LibTorch write them, for what is trained and measured here.
// Internal to gpu_check.
#pragma once

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"

namespace shardweave_tool {

struct TransformerSizes {
  int64_t words = 61, dim = 32, heads = 4, layers = 3;
  // By scaled_dot_product_attention; else by matmul and softmax.
  bool fused_attention = false;
};

// x: [batch, length, dim].
struct TransformerBlockImpl : torch::nn::Module {
  explicit TransformerBlockImpl(const TransformerSizes& sizes);
  at::Tensor forward(const at::Tensor& x);

  const int64_t heads;
  const bool fused_attention;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(TransformerBlock);

// words: [batch, length] of int64 -> [batch, length, words].
struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const TransformerSizes& sizes);
  at::Tensor forward(const at::Tensor& words);

  torch::nn::Embedding embed{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Transformer);

// Numbers that are the same on every rank and machine.
void fill(torch::nn::Module& module);

// Heads and hidden units along mesh dimension "tp".
shardweave::ShardingPlan tensor_parallel_plan();

// Words, and the next ones. On the CPU.
struct Words {
  at::Tensor given, next;
};
Words make_words(int64_t batch, int64_t length, int64_t words);
at::Tensor loss_of(Transformer& model, const Words& words);

}  // namespace shardweave_tool

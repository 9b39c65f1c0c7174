// A byte-level GPT in ordinary torch::nn, written for one device: nothing in it knows of ranks or
// meshes.
//
//   Gpt model(GptOptions{.layers = 2, .dim = 64, .heads = 4, .seq = 64});
//   init_weights(*model, /*seed=*/1);
//   at::Tensor loss = model->loss(tokens, targets);      // both [batch, seq], of dtype int64
//   loss.backward();
//
// Threads: a model belongs to one thread. Errors: those of LibTorch, as exceptions.
#pragma once

#include <cstdint>

#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

namespace train_gpt {

struct GptOptions {
  int64_t layers = 1;
  int64_t dim = 64;
  int64_t heads = 4;  // divides dim
  int64_t seq = 64;   // longest sequence
};

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GptOptions& options);
  at::Tensor forward(const at::Tensor& x);  // [batch, seq, dim], as is the result

 private:
  at::Tensor attention(const at::Tensor& x);

  const int64_t head_dim_;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

class GptImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kVocabulary = 256;  // bytes

  explicit GptImpl(const GptOptions& options);
  // Scores of the next byte, [batch, seq, kVocabulary], for tokens [batch, seq].
  at::Tensor forward(const at::Tensor& tokens);
  // The mean cross entropy, in nats per byte.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);

 private:
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
  // 0 .. seq-1. A buffer, so that it lies on the mesh with the parameters: a plain tensor next to
  // DTensors would first have to be compared over the ranks.
  at::Tensor index;
};
TORCH_MODULE(Gpt);

// Sets every parameter from a generator of its own. LibTorch's default generator is one for the
// whole process: with it, rank threads would draw from each other's numbers.
void init_weights(torch::nn::Module& model, uint64_t seed);

}  // namespace train_gpt

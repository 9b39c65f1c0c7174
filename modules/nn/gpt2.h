// GPT-2 (Radford et al.), with the names, the numerics and the configurations of transformers'
// GPT2LMHeadModel.
//
//   const nn::Gpt2Options options = {.vocab_size = 50257, .n_positions = 1024, .n_embd = 768,
//                                    .n_layer = 12, .n_head = 12};  // or from_json(text)
//   nn::Gpt2 model(options);
//   parallelize_module(*model, mesh, nn::gpt2_plan(options, mesh->mesh()));
//   nn::next_token_loss(model(input_ids), input_ids).backward();
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/nn/activation.h"
#include "shardweave/modules/nn/causal_lm.h"
#include "shardweave/modules/nn/conv1d.h"
#include "shardweave/modules/nn/plan_options.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"

namespace shardweave::nn {

// The names and defaults of transformers' GPT2Config.
struct Gpt2Options {
  int64_t vocab_size = 50257;
  int64_t n_positions = 1024;
  int64_t n_embd = 768;
  int64_t n_layer = 12;
  int64_t n_head = 12;
  std::optional<int64_t> n_inner;  // absent: 4 n_embd
  Activation activation_function = Activation::kGeluTanh;
  double resid_pdrop = 0.1, embd_pdrop = 0.1, attn_pdrop = 0.1;  // in training
  double layer_norm_epsilon = 1e-5;
  double initializer_range = 0.02;
  bool scale_attn_weights = true;
  bool scale_attn_by_inverse_layer_idx = false;
  bool tie_word_embeddings = true;

  // Of a config.json with "model_type": "gpt2". InvalidArgument, with its line: a value of another
  // type, an unknown activation, cross attention, what check() says.
  static absl::StatusOr<Gpt2Options> from_json(std::string_view text);

  int64_t inner() const { return n_inner.value_or(4 * n_embd); }
};

// InvalidArgument: sizes that are not positive or do not divide, a dropout that is no probability.
absl::Status check(const Gpt2Options& options);

struct Gpt2AttentionImpl : torch::nn::Module {
  Gpt2AttentionImpl(const Gpt2Options& options, int64_t layer);
  at::Tensor forward(const at::Tensor& x);

  Conv1d c_attn{nullptr}, c_proj{nullptr};

 private:
  const int64_t heads_;
  const double scale_, attn_pdrop_, resid_pdrop_;
};
using Gpt2Attention = torch::nn::ModuleHolder<Hooked<Gpt2AttentionImpl>>;

struct Gpt2MlpImpl : torch::nn::Module {
  explicit Gpt2MlpImpl(const Gpt2Options& options);
  at::Tensor forward(const at::Tensor& x);

  Conv1d c_fc{nullptr}, c_proj{nullptr};

 private:
  const Activation activation_;
  const double resid_pdrop_;
};
using Gpt2Mlp = torch::nn::ModuleHolder<Hooked<Gpt2MlpImpl>>;

struct Gpt2BlockImpl : torch::nn::Module {
  Gpt2BlockImpl(const Gpt2Options& options, int64_t layer);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::LayerNorm ln_1{nullptr}, ln_2{nullptr};
  Gpt2Attention attn{nullptr};
  Gpt2Mlp mlp{nullptr};
};
using Gpt2Block = torch::nn::ModuleHolder<Hooked<Gpt2BlockImpl>>;

// Without the head: "transformer" in its FQNs.
struct Gpt2TransformerImpl : torch::nn::Module {
  explicit Gpt2TransformerImpl(const Gpt2Options& options);
  // Throws Error (InvalidArgument) for more tokens than n_positions.
  at::Tensor forward(const at::Tensor& input_ids);

  torch::nn::Embedding wte{nullptr}, wpe{nullptr};
  std::vector<Gpt2Block> h;
  torch::nn::LayerNorm ln_f{nullptr};

 private:
  const double embd_pdrop_;
};
using Gpt2Transformer = torch::nn::ModuleHolder<Hooked<Gpt2TransformerImpl>>;

// transformer.{wte,wpe}, transformer.h.N.{ln_1,attn,ln_2,mlp}, transformer.ln_f, lm_head. forward:
// input_ids [batch, length] -> logits [batch, length, vocab_size].
struct Gpt2Impl : torch::nn::Module {
  // Throws Error (InvalidArgument): check()
  explicit Gpt2Impl(const Gpt2Options& options);
  at::Tensor forward(const at::Tensor& input_ids);

  Gpt2Transformer transformer{nullptr};
  LmHead lm_head{nullptr};
};
using Gpt2 = torch::nn::ModuleHolder<Hooked<Gpt2Impl>>;

// Throws Error: InvalidArgument if the heads do not divide by the ranks; NotFound if the mesh has
// no such dimension.
ShardingPlan gpt2_plan(const Gpt2Options& options, const DeviceMesh& mesh,
                       const PlanOptions& plan_options = {});

}  // namespace shardweave::nn

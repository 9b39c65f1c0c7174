// Rotary position embeddings (Su et al., RoFormer), with the scalings that Hugging Face's models
// use to reach beyond the length they were trained for.
//
//   const nn::RopeOptions options = {.rope_type = "llama3", .rope_theta = 500000, .factor = 8,
//                                    .original_max_position_embeddings = 8192};
//   nn::RotaryEmbedding rotary(/*head_dim=*/128, /*max_position_embeddings=*/131072, options);
//   const auto [cos, sin] = rotary->forward(/*length=*/x.size(1), x.scalar_type());
//   const at::Tensor q = nn::rotate(queries, cos, sin);  // [batch, length, heads, head_dim]
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "shardweave/modules/non_persistent_buffers.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"

namespace shardweave::nn {

// As a configuration's "rope_parameters" (or, before transformers 5, "rope_scaling").
struct RopeOptions {
  // "default", "linear" (Chen et al.), "dynamic" (NTK, by the sequence's length), "yarn" (Peng et
  // al.), "llama3", "longrope" (Ding et al.).
  std::string rope_type = "default";
  double rope_theta = 10000;
  std::optional<double> factor;                             // of all but "default"
  std::optional<int64_t> original_max_position_embeddings;  // absent: max_position_embeddings
  std::optional<double> attention_factor;                   // yarn, longrope; absent: by factor
  std::optional<double> beta_fast, beta_slow;               // yarn; absent: 32 and 1
  std::optional<double> mscale, mscale_all_dim;             // yarn
  bool truncate = true;                                     // yarn
  std::optional<double> low_freq_factor, high_freq_factor;  // llama3
  std::vector<double> short_factor, long_factor;            // longrope: head_dim / 2 each
};

// InvalidArgument: an unknown type, or what it wants and does not have.
absl::Status check(const RopeOptions& options, int64_t head_dim);

// Cosines and sines of the angles that positions 0, 1, ... turn by.
//
// Its frequencies are the buffer `inv_freq` (and, of longrope, `long_inv_freq`), which neither
// checkpoints nor files of weights have. They stay in single precision when a model goes to another.
// With "dynamic" they are those of this sequence's length, whichever came before (transformers keeps
// those of the longest until one shorter than max_position_embeddings comes).
class RotaryEmbeddingImpl : public torch::nn::Module, public NonPersistentBuffers {
 public:
  // Throws Error (InvalidArgument): check()
  RotaryEmbeddingImpl(int64_t head_dim, int64_t max_position_embeddings,
                      const RopeOptions& options);

  // Both [length, 1, head_dim], for rotate().
  std::pair<at::Tensor, at::Tensor> forward(int64_t length, at::ScalarType dtype);

  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  std::vector<std::string> non_persistent_buffers() const override;

  at::Tensor inv_freq, long_inv_freq;

 private:
  at::Tensor frequencies(int64_t length) const;

  const RopeOptions options_;
  const int64_t head_dim_, max_position_embeddings_;
  int64_t original_length_;  // longrope: frequencies are long_inv_freq beyond
  double attention_factor_ = 1;
};
TORCH_MODULE(RotaryEmbedding);

// [batch, length, heads, head_dim], turned. The sines' first half has its sign changed (as
// RotaryEmbedding gives it): x cos + roll(x) sin is transformers' x cos + rotate_half(x) sin in
// three operators.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

}  // namespace shardweave::nn

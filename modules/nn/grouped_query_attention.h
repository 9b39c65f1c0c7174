// Attention of several heads, some of which may share keys and values (Ainslie et al.), with the
// names of transformers: q_proj, k_proj, v_proj, o_proj.
//
//   nn::GroupedQueryAttention attention(nn::AttentionOptions{
//       .hidden_size = 4096, .num_attention_heads = 32, .num_key_value_heads = 8});
//   const at::Tensor y = attention(x, cos, sin);  // [batch, length, hidden_size]
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/nn/plan_options.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"

namespace shardweave::nn {

struct AttentionOptions {
  int64_t hidden_size = 0;
  int64_t num_attention_heads = 0;
  std::optional<int64_t> num_key_value_heads;  // absent: as many
  std::optional<int64_t> head_dim;             // absent: hidden_size / num_attention_heads
  bool is_causal = true;
  bool qkv_bias = false, o_bias = false;
  double dropout = 0;  // of the scores, in training

  int64_t key_value_heads() const { return num_key_value_heads.value_or(num_attention_heads); }
  int64_t head_size() const;  // 0 if there are no heads
};

// InvalidArgument: sizes that are not positive or do not divide, a dropout that is no probability.
absl::Status check(const AttentionOptions& options);

struct GroupedQueryAttentionImpl : torch::nn::Module {
  // Throws Error (InvalidArgument): check()
  explicit GroupedQueryAttentionImpl(const AttentionOptions& options);
  // x: [batch, length, hidden_size]; cos, sin: a RotaryEmbedding's, undefined: nothing turns.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};

 private:
  const AttentionOptions options_;
};
using GroupedQueryAttention = torch::nn::ModuleHolder<Hooked<GroupedQueryAttentionImpl>>;

// Heads are cut; keys and values that are fewer than ranks, or do not divide by them, are whole.
// `fqn`: a pattern of the attention's name in the model; "": it is the model. Throws Error:
// InvalidArgument if the heads do not divide by the ranks, NotFound if the mesh has no such
// dimension.
ShardingPlan attention_plan(const AttentionOptions& options, const DeviceMesh& mesh,
                            const PlanOptions& plan_options = {}, std::string_view fqn = "");

}  // namespace shardweave::nn

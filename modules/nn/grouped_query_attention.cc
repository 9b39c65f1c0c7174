#include "shardweave/modules/nn/grouped_query_attention.h"

#include <string>
#include <utility>

#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/nn/attention.h"
#include "shardweave/modules/nn/plan_entries.h"
#include "shardweave/modules/nn/rotary_embedding.h"

namespace shardweave::nn {
namespace {

// Every head of keys or values as often as there are heads of queries for it.
at::Tensor repeated(const at::Tensor& x, int64_t times) {  // [batch, length, heads, head_dim]
  if (times == 1) return x;
  return x.unsqueeze(3)
      .expand({x.size(0), x.size(1), x.size(2), times, x.size(3)})
      .reshape({x.size(0), x.size(1), x.size(2) * times, x.size(3)});
}

}  // namespace

int64_t AttentionOptions::head_size() const {
  if (head_dim.has_value()) return *head_dim;
  return num_attention_heads > 0 ? hidden_size / num_attention_heads : 0;
}

absl::Status check(const AttentionOptions& options) {
  const int64_t heads = options.num_attention_heads, shared = options.key_value_heads();
  for (const auto& [name, value] : {std::pair("hidden_size", options.hidden_size),
                                    {"num_attention_heads", heads},
                                    {"num_key_value_heads", shared},
                                    {"head_dim", options.head_size()}}) {
    if (value > 0) continue;
    return absl::InvalidArgumentError(str_cat(name, " is ", value, "; wanted a positive number"));
  }
  if (!options.head_dim.has_value() && options.hidden_size % heads != 0) {
    return absl::InvalidArgumentError(
        str_cat("hidden_size ", options.hidden_size, " does not divide by ", heads, " heads"));
  }
  if (heads % shared != 0) {
    return absl::InvalidArgumentError(
        str_cat("num_attention_heads ", heads, " does not divide by num_key_value_heads ", shared));
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    return absl::InvalidArgumentError(
        str_cat("the dropout of attention is ", options.dropout, "; wanted 0 or more, below 1"));
  }
  return absl::OkStatus();
}

GroupedQueryAttentionImpl::GroupedQueryAttentionImpl(const AttentionOptions& options)
    : options_(options) {
  const absl::Status status = check(options);
  if (!status.ok()) throw Error("GroupedQueryAttention", status);
  const auto linear = [&](const char* name, int64_t in, int64_t out, bool bias) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias)));
  };
  const int64_t queries = options.num_attention_heads * options.head_size();
  const int64_t keys = options.key_value_heads() * options.head_size();
  q_proj = linear("q_proj", options.hidden_size, queries, options.qkv_bias);
  k_proj = linear("k_proj", options.hidden_size, keys, options.qkv_bias);
  v_proj = linear("v_proj", options.hidden_size, keys, options.qkv_bias);
  o_proj = linear("o_proj", queries, options.hidden_size, options.o_bias);
}

at::Tensor GroupedQueryAttentionImpl::forward(const at::Tensor& x, const at::Tensor& cos,
                                              const at::Tensor& sin) {
  const int64_t batch = x.size(0), length = x.size(1);
  const int64_t heads = options_.num_attention_heads, shared = options_.key_value_heads();
  const auto split = [&](const at::Tensor& y, int64_t n) {
    return y.view({batch, length, n, options_.head_size()});
  };
  at::Tensor q = split(q_proj(x), heads), k = split(k_proj(x), shared);
  if (cos.defined()) {
    q = rotate(q, cos, sin);
    k = rotate(k, cos, sin);
  }
  k = repeated(k, heads / shared);
  const at::Tensor v = repeated(split(v_proj(x), shared), heads / shared);
  const at::Tensor mixed =
      nn_internal::attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                             is_training() ? options_.dropout : 0.0, options_.is_causal);
  return o_proj(mixed.transpose(1, 2).reshape({batch, length, -1}));
}

ShardingPlan attention_plan(const AttentionOptions& options, const DeviceMesh& mesh,
                            const PlanOptions& plan_options, std::string_view fqn) {
  ShardingPlan plan;
  nn_internal::PlanEntries entries(plan, mesh, plan_options, std::string(fqn));
  nn_internal::check_heads_divide(fqn, options.num_attention_heads, entries.ranks(),
                                  plan_options.mesh_dim);
  const bool whole_keys = options.key_value_heads() % entries.ranks() != 0;
  entries.parameter(whole_keys ? "q_proj.*" : "{q,k,v}_proj.*", Shard(0))
      .parameter("o_proj.weight", Shard(1))
      .sums();
  return plan;
}

}  // namespace shardweave::nn

// Scaled dot product attention on CPUs: batches and heads are independent, and so are queries unless the
// mask is causal (which depends on a query's position). Dropout is refused by the operator itself.
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave {
namespace {

constexpr int kBatch = 0, kHead = 1, kQuery = 2;

// The mask is broadcast to [batch, head, query, key].
Placement mask_placement(const TensorInfo& mask, const TensorInfo& query, int dim) {
  const int mask_dim = dim - (4 - mask.ndim());
  if (!mask.defined || mask_dim < 0 || mask.sizes[mask_dim] != query.sizes[dim]) return Replicate();
  return Shard(mask_dim);
}

// Calls add(dim) for every dimension of the query that may be sharded.
template <typename F>
void for_each_sharded(const OpCall& call, int query, F add) {
  const TensorInfo& q = call.input(query);
  const TensorInfo& k = call.input(query + 1);
  const TensorInfo& v = call.input(query + 2);
  for (int dim : {kBatch, kHead}) {
    if (q.sizes[dim] == k.sizes[dim] && q.sizes[dim] == v.sizes[dim]) add(dim);
  }
  if (!call.bool_arg("is_causal")) add(kQuery);
}

// Keys and values are cut with the batch and the heads, not with the queries.
Placement key_placement(int dim) {
  return dim == kQuery ? Replicate() : Shard(dim);
}

void attention(const OpCall& call, Strategies& out) {
  const TensorInfo& mask = call.input(3);
  for_each_sharded(call, 0, [&](int dim) {
    const Placement key = key_placement(dim);
    out.add({Shard(dim), key, key, mask_placement(mask, call.input(0), dim)}, {Shard(dim)},
            zeros_if_empty);
  });
}

void check_4d(const OpCall& call, int query) {
  for (int i = query; i < query + 3; ++i) {
    if (call.input(i).ndim() == 4) continue;
    throw Error(absl::InvalidArgumentError(absl::StrCat(
        "attention: query, key and value must have 4 dimensions (batch, head, sequence, "
        "features), not ",
        call.input(i).ndim())));
  }
}

void attention_shapes(OpCall& call) {
  check_4d(call, 0);
  const TensorInfo& q = call.input(0);
  call.outputs.push_back(like_info(q));
  // Laid out as [batch, query, head].
  const int64_t batch = q.sizes[0], heads = q.sizes[1], length = q.sizes[2];
  const bool half = q.dtype == at::kHalf || q.dtype == at::kBFloat16;
  TensorInfo logsumexp = contiguous_info({batch, heads, length}, half ? at::kFloat : q.dtype);
  logsumexp.strides = {length * heads, 1, heads};
  call.outputs.push_back(std::move(logsumexp));
}

// grad_out, query, key, value, out, logsumexp, mask -> gradients of query, key, value.
void attention_backward(const OpCall& call, Strategies& out) {
  const TensorInfo& mask = call.input(6);
  for_each_sharded(call, 1, [&](int dim) {
    const Placement key = key_placement(dim);
    const Placement key_grad = dim == kQuery ? Partial() : Shard(dim);
    out.add({Shard(dim), Shard(dim), key, key, Shard(dim), Shard(dim),
             mask_placement(mask, call.input(1), dim)},
            {Shard(dim), key_grad, key_grad}, zeros_if_empty);
  });
}

void attention_backward_shapes(OpCall& call) {
  check_4d(call, 1);
  for (int i = 1; i <= 3; ++i) {
    // Laid out as [batch, sequence, head, features].
    const Dims& s = call.input(i).sizes;
    TensorInfo grad = contiguous_info(s, call.input(i).dtype);
    grad.strides = {s[2] * s[1] * s[3], s[3], s[1] * s[3], 1};
    call.outputs.push_back(std::move(grad));
  }
}

}  // namespace

void add_attention_rules(RuleTable& table) {
  table.add("aten::_scaled_dot_product_flash_attention_for_cpu",
            Rule(attention).shapes(attention_shapes));
  table.add("aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            Rule(attention_backward).shapes(attention_backward_shapes));
}

}  // namespace shardweave

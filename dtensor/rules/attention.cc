// Scaled dot product attention on CPUs: batches and heads are independent, and so are queries
// (where the mask is causal, a rank makes that of its own). Dropout is refused by the operator
// itself.
#include <limits>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

constexpr int kBatch = 0, kHead = 1, kQuery = 2;

// The mask is broadcast to [batch, head, query, key].
Placement mask_placement(const TensorInfo& mask, const TensorInfo& query, int dim) {
  const int mask_dim = dim - (4 - mask.ndim());
  if (!mask.defined || mask_dim < 0 || mask.sizes[mask_dim] != query.sizes[dim]) return Replicate();
  return Shard(mask_dim);
}

// The causal mask of the queries that this rank has: key j for query i if j <= i.
at::Tensor causal_mask(const Spec& query, const at::Tensor& key, const at::Tensor& like) {
  const MeshContext& context = *query.context;
  std::vector<at::Tensor> positions;
  for (const Interval& held : local_intervals(query.layout, context.mesh().shape(),
                                              context.coordinate(), query.sizes, kQuery)) {
    positions.push_back(
        at::arange(held.begin, held.end, at::TensorOptions(at::kLong).device(key.device())));
  }
  const at::Tensor rows = at::cat(positions).unsqueeze(1);
  const at::Tensor columns =
      at::arange(key.size(2), at::TensorOptions(at::kLong).device(key.device()));
  return at::zeros({rows.size(0), columns.size(0)}, like.options())
      .masked_fill_(columns.gt(rows), -std::numeric_limits<double>::infinity());
}

// Causal attention of a part of the queries: the operator itself would take them for the first
// ones.
void causal_part(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::Tensor query = boxed.tensor("query");
  const Spec& spec = *call.inputs[boxed.has("grad_out") ? 1 : 0];
  const bool part = !spec.layout.shards_of(kQuery).empty();
  if (part && boxed.flag("is_causal") && query.numel() != 0) {
    boxed["attn_mask"] = causal_mask(spec, boxed.tensor("key"), query);
    boxed["is_causal"] = false;
  }
  zeros_if_empty(op, stack, call);
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
  add(kQuery);
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
            causal_part);
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
    // What was gathered goes back to where it was.
    const auto home = [&](int i) {
      const Placement placement = call.placement(i);
      return dim == kQuery && placement.is_shard() ? placement : key_grad;
    };
    out.add({Shard(dim), Shard(dim), key, key, Shard(dim), Shard(dim),
             mask_placement(mask, call.input(1), dim)},
            {Shard(dim), key_grad, key_grad}, causal_part, {Shard(dim), home(2), home(3)});
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

// Of `products` products of queries with keys, or of scores with values; causal ones are computed by
// blocks, about half of them.
double attention_flops(const OpCall& call, int query, double products) {
  const int64_t numel = call.input(query).numel() * call.input(query + 1).sizes[2];
  return products * 2 * static_cast<double>(numel) * (call.bool_arg("is_causal") ? 0.5 : 1);
}
double forward_flops(const OpCall& call) {
  return attention_flops(call, 0, 2);
}
// The scores once more, and their gradient; those of query, key and value.
double backward_flops(const OpCall& call) {
  return attention_flops(call, 1, 5);
}

}  // namespace

void add_attention_rules(RuleTable& table) {
  table.add("aten::_scaled_dot_product_flash_attention_for_cpu",
            Rule(attention).shapes(attention_shapes).flops(forward_flops));
  table.add("aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            Rule(attention_backward).shapes(attention_backward_shapes).flops(backward_flops));
}

}  // namespace shardweave::dtensor_internal

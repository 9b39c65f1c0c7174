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

constexpr int kBatch = 0, kHead = 1, kQuery = 2, kKey = 3;

// The mask is broadcast to [batch, head, query, key].
Placement mask_placement(const OpCall& call, int dim) {
  Dims scores = call.input("query").sizes;
  scores[kKey] = call.input("key").sizes[kQuery];
  return broadcast_cut(call.input("attn_mask"), scores, dim);
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
  const Spec& spec = boxed.spec(call, "query");
  const bool part = !spec.layout.shards_of(kQuery).empty();
  if (part && boxed.flag("is_causal") && query.numel() != 0) {
    boxed["attn_mask"] = causal_mask(spec, boxed.tensor("key"), query);
    boxed["is_causal"] = false;
  }
  zeros_if_empty(op, stack, call);
}

// Calls add(dim) for every dimension of the query that may be sharded.
template <typename F>
void for_each_sharded(const OpCall& call, F add) {
  const Dims& q = call.input("query").sizes;
  const Dims& k = call.input("key").sizes;
  const Dims& v = call.input("value").sizes;
  for (int dim : {kBatch, kHead}) {
    if (q[dim] == k[dim] && q[dim] == v[dim]) add(dim);
  }
  add(kQuery);
}

// Keys and values are cut with the batch and the heads, not with the queries.
Placement key_placement(int dim) {
  return dim == kQuery ? Replicate() : Shard(dim);
}

void attention(const OpCall& call, Strategies& out) {
  for_each_sharded(call, [&](int dim) {
    const Placement key = key_placement(dim);
    out.add({{"query", Shard(dim)},
             {"key", key},
             {"value", key},
             {"attn_mask", mask_placement(call, dim)}},
            {Shard(dim)}, causal_part);
  });
}

constexpr const char* kQueryKeyValue[] = {"query", "key", "value"};

void check_4d(const OpCall& call) {
  for (const char* name : kQueryKeyValue) {
    if (call.input(name).ndim() == 4) continue;
    throw Error(absl::InvalidArgumentError(absl::StrCat(
        "attention: query, key and value must have 4 dimensions (batch, head, sequence, "
        "features), not ",
        call.input(name).ndim())));
  }
}

void attention_shapes(OpCall& call) {
  check_4d(call);
  const TensorInfo& q = call.input("query");
  call.outputs.push_back(like_info(q));
  // Laid out as [batch, query, head].
  const int64_t batch = q.sizes[0], heads = q.sizes[1], length = q.sizes[2];
  const bool half = q.dtype == at::kHalf || q.dtype == at::kBFloat16;
  TensorInfo logsumexp = contiguous_info({batch, heads, length}, half ? at::kFloat : q.dtype);
  logsumexp.strides = {length * heads, 1, heads};
  call.outputs.push_back(std::move(logsumexp));
}

// Gradients of query, key and value.
void attention_backward(const OpCall& call, Strategies& out) {
  for_each_sharded(call, [&](int dim) {
    const Placement key = key_placement(dim);
    const Placement key_grad = dim == kQuery ? Partial() : Shard(dim);
    // What was gathered goes back to where it was.
    const auto home = [&](std::string_view name) {
      const Placement placement = call.placement(name);
      return dim == kQuery && placement.is_shard() ? placement : key_grad;
    };
    out.add({{"grad_out", Shard(dim)},
             {"query", Shard(dim)},
             {"key", key},
             {"value", key},
             {"out", Shard(dim)},
             {"logsumexp", Shard(dim)},
             {"attn_mask", mask_placement(call, dim)}},
            {Shard(dim), key_grad, key_grad}, causal_part,
            {Shard(dim), home("key"), home("value")});
  });
}

void attention_backward_shapes(OpCall& call) {
  check_4d(call);
  for (const char* name : kQueryKeyValue) {
    // Laid out as [batch, sequence, head, features].
    const Dims& s = call.input(name).sizes;
    TensorInfo grad = contiguous_info(s, call.input(name).dtype);
    grad.strides = {s[2] * s[1] * s[3], s[3], s[1] * s[3], 1};
    call.outputs.push_back(std::move(grad));
  }
}

// Of `products` products of queries with keys, or of scores with values; causal ones are computed by
// blocks, about half of them.
double attention_flops(const OpCall& call, double products) {
  const int64_t numel = call.input("query").numel() * call.input("key").sizes[kQuery];
  return products * 2 * static_cast<double>(numel) * (call.bool_arg("is_causal") ? 0.5 : 1);
}
double attention_forward_flops(const OpCall& call) {
  return attention_flops(call, 2);
}
// The scores once more, and their gradient; those of query, key and value.
double attention_backward_flops(const OpCall& call) {
  return attention_flops(call, 5);
}

}  // namespace

void add_attention_rules(RuleTable& table) {
  table.add("aten::_scaled_dot_product_flash_attention_for_cpu",
            sharded(attention).shapes(attention_shapes).flops(attention_forward_flops));
  table.add("aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            sharded(attention_backward)
                .shapes(attention_backward_shapes)
                .flops(attention_backward_flops));
}

}  // namespace shardweave::dtensor_internal

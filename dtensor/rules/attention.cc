// Scaled dot product attention: batches and heads are independent. LibTorch has an operator for CPUs, and
// for GPUs one for each kernel.
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/constant_pad_nd.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

constexpr int kBatch = 0, kHead = 1, kQuery = 2, kKey = 3;

// `mask` is broadcast to [batch, head, query, key].
Placement mask_placement(const OpCall& call, std::string_view mask, int dim) {
  Dims scores = call.input("query").sizes;
  scores[kKey] = call.input("key").sizes[kQuery];
  return broadcast_cut(call.input(mask), scores, dim);
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

// Calls add(dim) for every dimension that query, key and value have in common; also heads of keys that
// several heads of queries share, as long as every rank has whole ones.
template <typename F>
void for_batch_and_heads(const OpCall& call, F add) {
  const Dims& q = call.input("query").sizes;
  const Dims& k = call.input("key").sizes;
  const Dims& v = call.input("value").sizes;
  for (int dim : {kBatch, kHead}) {
    const bool shared = dim == kHead && k[dim] > 0 && q[dim] % k[dim] == 0 &&
                        k[dim] % call.pieces(call.input("key"), dim) == 0;
    if (k[dim] == v[dim] && (q[dim] == k[dim] || shared)) add(dim);
  }
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

// --- on CPUs -------------------------------------------------------------------------------------
//
// Queries are independent, too (where the mask is causal, a rank makes that of its own). Dropout is
// refused by the operator itself.

template <typename F>
void for_each_sharded(const OpCall& call, F add) {
  for_batch_and_heads(call, add);
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
             {"attn_mask", mask_placement(call, "attn_mask", dim)}},
            {Shard(dim)}, causal_part);
  });
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
             {"attn_mask", mask_placement(call, "attn_mask", dim)}},
            {Shard(dim), key_grad, key_grad}, causal_part,
            {Shard(dim), home("key"), home("value")});
  });
}

// Laid out as [batch, sequence, head, features].
TensorInfo by_sequence(const TensorInfo& like) {
  const Dims& s = like.sizes;
  TensorInfo info = contiguous_info(s, like.dtype);
  info.strides = {s[2] * s[1] * s[3], s[3], s[1] * s[3], 1};
  return info;
}

void attention_backward_shapes(OpCall& call) {
  check_4d(call);
  for (const char* name : kQueryKeyValue) call.outputs.push_back(by_sequence(call.input(name)));
}

// --- on GPUs -------------------------------------------------------------------------------------
//
// The numbers that come with the results (a generator's state, lengths of packed sequences) say nothing
// without dropout, which is refused: each rank would draw its own.

void refuse_dropout(const OpCall& call) {
  if (call.arg("dropout_p").toDouble() <= 0) return;
  throw Error(absl::UnimplementedError(absl::StrCat(
      "dropout_p is ", call.arg("dropout_p").toDouble(),
      ": CUDA's attention kernels draw their own random numbers on each rank; wanted 0 "
      "(at::dropout draws those of the mesh)")));
}

// Its result where the local part is not empty, with what comes with it as it has been announced.
void on_gpu(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const size_t base = stack.size() - op.schema().arguments().size();
  const at::Tensor query = boxed.tensor("query");
  const int64_t lengths[] = {query.size(2), boxed.tensor("key").size(2)};
  if (query.numel() != 0) {
    at::Tensor bias = boxed.has("attn_bias") ? boxed.tensor("attn_bias") : at::Tensor();
    if (bias.defined() &&
        (bias.stride(-1) != 1 || bias.stride(-2) % 16 != 0)) {  // as sdpa makes it
      const int64_t last = bias.size(-1);
      boxed["attn_bias"] = at::constant_pad_nd(bias, {0, (last + 15) / 16 * 16 - last})
                               .contiguous()
                               .narrow(-1, 0, last);
    }
    boxed.run();
  } else {
    stack.resize(base);
    int next_length = 0;
    for (const c10::Argument& result : op.schema().returns()) {
      const bool is_tensor = result.type()->isSubtypeOf(*c10::TensorType::get());
      stack.push_back(is_tensor ? c10::IValue(at::Tensor()) : c10::IValue(lengths[next_length++]));
    }
  }
  size_t k = 0;  // of tensors
  for (c10::IValue& result : absl::MakeSpan(stack).subspan(base)) {
    if (!result.isTensor()) continue;
    const SpecRef& spec = call.outputs[k++];
    if (spec == nullptr) continue;
    at::Tensor tensor = result.toTensor();
    const at::IntArrayRef sizes(spec->local_sizes.data(), spec->local_sizes.size());
    const bool says_nothing = spec->sizes.size() < 3;
    if (!tensor.defined() || says_nothing) {
      tensor = at::zeros(sizes, query.options().dtype(spec->dtype));
    }
    const bool is_by_sequence = tensor.dim() == 4 && spec->strides[1] < spec->strides[2];
    result =
        is_by_sequence ? tensor.transpose(1, 2).contiguous().transpose(1, 2) : tensor.contiguous();
  }
}

TensorInfo no_tensor() {
  return {};
}

void flash_shapes(OpCall& call) {
  check_4d(call);
  const TensorInfo& q = call.input("query");
  call.outputs = {by_sequence(q),
                  contiguous_info({q.sizes[0], q.sizes[1], q.sizes[2]}, at::kFloat),
                  no_tensor(),  // of packed sequences: cum_seq_q, cum_seq_k
                  no_tensor(),
                  contiguous_info({2}, at::kUInt64),  // rng_state
                  contiguous_info({}, at::kUInt64),
                  contiguous_info({0}, q.dtype)};  // debug_attn_mask
}

void flash(const OpCall& call, Strategies& out) {
  refuse_dropout(call);
  for_batch_and_heads(call, [&](int dim) {
    std::vector<Placement> results(7, Replicate());
    results[0] = results[1] = Shard(dim);
    out.add({{"query", Shard(dim)}, {"key", Shard(dim)}, {"value", Shard(dim)}},
            std::move(results));
  });
}

void flash_backward(const OpCall& call, Strategies& out) {
  refuse_dropout(call);
  for_batch_and_heads(call, [&](int dim) {
    out.add({{"grad_out", Shard(dim)},
             {"query", Shard(dim)},
             {"key", Shard(dim)},
             {"value", Shard(dim)},
             {"out", Shard(dim)},
             {"logsumexp", Shard(dim)}},
            {Shard(dim)});
  });
}

void efficient_shapes(OpCall& call) {
  check_4d(call);
  const TensorInfo &q = call.input("query"), &v = call.input("value");
  TensorInfo out = contiguous_info({q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]}, q.dtype);
  // Rows of it begin at multiples of 32 numbers.
  const int64_t rows = call.bool_arg("compute_log_sumexp") ? (q.sizes[2] + 31) / 32 * 32 : 0;
  call.outputs = {by_sequence(out), contiguous_info({q.sizes[0], q.sizes[1], rows}, at::kFloat),
                  contiguous_info({}, at::kLong),  // philox_seed, philox_offset
                  contiguous_info({}, at::kLong)};
}

void efficient(const OpCall& call, Strategies& out) {
  refuse_dropout(call);
  for_batch_and_heads(call, [&](int dim) {
    out.add({{"query", Shard(dim)},
             {"key", Shard(dim)},
             {"value", Shard(dim)},
             {"attn_bias", mask_placement(call, "attn_bias", dim)}},
            {Shard(dim), Shard(dim), Replicate(), Replicate()});
  });
}

bool wants_bias_gradient(const OpCall& call) {
  return call.input("attn_bias").defined && call.arg("grad_input_mask").toBoolList()[3];
}

void efficient_backward_shapes(OpCall& call) {
  attention_backward_shapes(call);
  const TensorInfo& bias = call.input("attn_bias");
  call.outputs.push_back(wants_bias_gradient(call) ? contiguous_info(bias.sizes, bias.dtype)
                                                   : no_tensor());
}

void efficient_backward(const OpCall& call, Strategies& out) {
  refuse_dropout(call);
  for_batch_and_heads(call, [&](int dim) {
    const Placement bias = mask_placement(call, "attn_bias", dim);
    out.add({{"grad_out_", Shard(dim)},
             {"query", Shard(dim)},
             {"key", Shard(dim)},
             {"value", Shard(dim)},
             {"attn_bias", bias},
             {"out", Shard(dim)},
             {"logsumexp", Shard(dim)}},
            {Shard(dim), Shard(dim), Shard(dim), bias.is_shard() ? bias : Partial()});
  });
}

// What it gives beside the result differs between versions of cuDNN.
void cudnn_shapes(OpCall&) {
  throw Error(absl::UnimplementedError(
      "DTensors have no rule for cuDNN's attention; at::globalContext().setSDPUseCuDNN(false) "
      "leaves "
      "the choice to the flash and the memory-efficient kernels, which have one"));
}
void cudnn(const OpCall&, Strategies&) {}

ShardedRule on_gpus(ShardedRule::Function strategies) {
  return sharded(std::move(strategies)).reads({"dropout_p"}).runs(on_gpu);
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
  table.add("aten::_scaled_dot_product_flash_attention",
            on_gpus(flash).shapes(flash_shapes).flops(attention_forward_flops));
  table.add(
      "aten::_scaled_dot_product_flash_attention_backward",
      on_gpus(flash_backward).shapes(attention_backward_shapes).flops(attention_backward_flops));
  table.add("aten::_scaled_dot_product_efficient_attention",
            on_gpus(efficient).shapes(efficient_shapes).flops(attention_forward_flops));
  table.add("aten::_scaled_dot_product_efficient_attention_backward",
            on_gpus(efficient_backward)
                .shapes(efficient_backward_shapes)
                .flops(attention_backward_flops));
  table.add("aten::_scaled_dot_product_cudnn_attention", sharded(cudnn).shapes(cudnn_shapes));
}

}  // namespace shardweave::dtensor_internal

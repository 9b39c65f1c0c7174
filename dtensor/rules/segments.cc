// Sums, means and maxima over segments: bags of rows of a table (embedding_bag), and segments of a
// dimension (segment_reduce).
//
// A table of bags may be cut by columns, or by rows: then a rank adds up the rows that it has. The
// indices may be cut anywhere, also within a bag: a rank adds up what its indices name. Either is a
// Partial sum. For a mean it is divided by what the bag has on all ranks together. Or the indices,
// which are little, are gathered, and each rank has some of the bags: a batch stays cut.
#include <algorithm>
#include <utility>
#include <vector>

#include "ATen/ops/_embedding_bag_dense_backward.h"
#include "ATen/ops/_embedding_bag_forward_only.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/bincount.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/full.h"
#include "ATen/ops/isin.h"
#include "ATen/ops/searchsorted.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"
#include "shardweave/dtensor/rules/rows.h"

namespace shardweave::dtensor_internal {
namespace {

enum Mode : int64_t { kSum = 0, kMean = 1, kMax = 2 };

// --- the bags of this rank's indices -------------------------------------------------------------

// Which of 0 ... size - 1 this rank holds of dimension 0.
at::Tensor held(const Spec& spec, const at::TensorOptions& options) {
  const MeshContext& context = *spec.context;
  std::vector<at::Tensor> runs;
  for (const Interval& run :
       local_intervals(spec.layout, context.mesh().shape(), context.coordinate(), spec.sizes, 0)) {
    runs.push_back(at::arange(run.begin, run.end, options));
  }
  return runs.empty() ? at::zeros({0}, options) : at::cat(runs);
}

// The bag of each of this rank's indices. `offsets`: where each bag begins, and perhaps the end.
at::Tensor bags_of(const Spec& indices, const at::Tensor& offsets, int64_t num_bags) {
  const at::Tensor position = held(indices, offsets.options());
  if (num_bags == 0) return at::zeros_like(position);
  // An empty bag begins where the next one does, and the last of these has the index.
  return at::searchsorted(offsets.narrow(0, 0, num_bags).contiguous(), position,
                          /*out_int32=*/false, /*right=*/true)
      .sub(1)
      .to(offsets.scalar_type());
}

at::ScalarType index_type(at::ScalarType indices, at::ScalarType offsets) {
  return c10::promoteTypes(indices, offsets);
}

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

c10::IntArrayRef local_sizes(const SpecRef& spec) {
  return c10::IntArrayRef(spec->local_sizes.data(), spec->local_sizes.size());
}

// --- embedding_bag -------------------------------------------------------------------------------
// weight [V, D], indices [N], offsets [bags (+ 1)], weights of the indices [N] -> result [bags, D],
// and what the derivative needs: the bag of each index, how many a bag has, whose maximum it is.

// What LibTorch's kernel looks for, and would not find in offsets into a part of the indices.
void check_offsets(const at::Tensor& offsets, int64_t num_indices) {
  if (!offsets.is_cpu()) return;
  const int64_t first = offsets[0].item().toLong(), last = offsets[-1].item().toLong();
  if (first != 0 || last > num_indices) {
    throw Error(absl::InvalidArgumentError(absl::StrCat(
        "embedding_bag: offsets must begin with 0 and not exceed the number of indices, ",
        num_indices, "; they go from ", first, " to ", last)));
  }
}

// The results on this rank. LibTorch's kernel leaves some of those for the derivative out, or
// undefined, as it pleases; here they are what they should be, in the sizes that it gives them.
void embedding_bag(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::Tensor weight = boxed.tensor("weight");
  const Spec& table = boxed.spec(call, "weight");
  const Spec& all_indices = boxed.spec(call, "indices");
  const at::ScalarType type =
      index_type(boxed.tensor("indices").scalar_type(), boxed.tensor("offsets").scalar_type());
  const at::Tensor indices = boxed.tensor("indices").to(type);
  const at::Tensor offsets = boxed.tensor("offsets").to(type);
  const at::Tensor scales = boxed.tensor("per_sample_weights");
  const int64_t mode = boxed["mode"].toInt();
  const int64_t padding = boxed["padding_idx"].toInt();
  const int64_t num_bags = call.outputs[0]->sizes[0];

  const at::Tensor bag = bags_of(all_indices, offsets, num_bags);
  const at::Tensor counted = padding < 0 ? at::Tensor() : indices.ne(padding);
  at::Tensor bag_size = at::zeros(local_sizes(call.outputs[2]), offsets.options());
  if (mode != kSum && num_bags > 0) {
    if (counted.defined()) {  // all indices are here
      bag_size = at::bincount(bag.masked_select(counted), {}, num_bags).to(type);
    } else {
      const at::Tensor ends = at::cat({offsets.narrow(0, 1, num_bags - 1),
                                       at::full({1}, all_indices.sizes[0], offsets.options())});
      bag_size = ends.sub(offsets.narrow(0, 0, num_bags));
    }
  }
  const bool all_rows = table.local_sizes[0] == table.sizes[0];
  const bool all_indices_here = indices.numel() == all_indices.sizes[0];
  const bool all_bags = call.outputs[0]->local_sizes[0] == num_bags;
  at::Tensor result, positions = at::zeros(local_sizes(call.outputs[3]), offsets.options());
  if (all_rows && all_indices_here && all_bags) {
    auto whole = at::_embedding_bag_forward_only(
        weight, indices, offsets, boxed.flag("scale_grad_by_freq"), mode, /*sparse=*/false,
        optional(scales), boxed.flag("include_last_offset"), padding);
    result = std::get<0>(whole);
    if (mode == kMax) positions = std::get<3>(whole);
  } else {
    check_offsets(offsets, all_indices.sizes[0]);
    const HeldRows rows = held_rows(indices, table, "embedding_bag");
    at::Tensor mine = rows.here.defined() ? rows.here : at::zeros_like(indices, at::kBool);
    if (counted.defined()) mine = mine.logical_and(counted);
    const at::Tensor own = held(*call.outputs[0], offsets.options());
    if (!all_bags) {
      mine = mine.logical_and(at::isin(bag, own));
      if (mode != kSum) bag_size = bag_size.index_select(0, own);
    }
    const at::Tensor kept = bag.masked_select(mine);
    result = at::zeros(local_sizes(call.outputs[0]), weight.options());
    if (kept.numel() > 0) {
      auto part = at::_embedding_bag_forward_only(
          weight, rows.local.masked_select(mine), at::searchsorted(kept, own).to(type), false,
          mode == kMax ? kMax : kSum, false,
          scales.defined() ? optional(scales.masked_select(mine)) : std::nullopt);
      result = std::get<0>(part);
      if (mode == kMean) result.div_(bag_size.clamp_min(1).unsqueeze(1));
      if (mode == kMax) positions = std::get<3>(part);
    }
  }
  const bool no_bags = call.outputs[1]->numel() == 0;
  boxed.finish({result, no_bags ? bag.narrow(0, 0, 0) : bag, bag_size, positions});
}

void embedding_bag_strategies(const OpCall& call, Strategies& out) {
  const int64_t mode = call.int_arg("mode");
  const Placement whole = Replicate();
  out.add({{"weight", Shard(1)}}, {Shard(1), whole, whole, mode == kMax ? Shard(1) : whole});
  // A batch stays cut: the indices are gathered, or the sums scattered.
  const int64_t bags = call.output(0).sizes[0];
  const auto of_bags = [&](int output) {
    return call.output(output).sizes[0] == bags ? Shard(0) : whole;
  };
  const bool scatters = bags >= call.num_ranks;
  if (call.placement("indices").is_shard() && scatters) {
    out.add({}, {Shard(0), whole, of_bags(2), of_bags(3)});
  }
  if (mode == kMax) return;
  out.add({{"weight", Shard(0)}}, {Partial(), whole, whole, whole});
  // How many of a bag are no padding is only known to who has them all.
  if (mode == kSum || call.int_arg("padding_idx") < 0) {
    const Placement of_indices = call.output(1).numel() == 0 ? whole : Shard(0);
    out.add({{"indices", Shard(0)}, {"per_sample_weights", Shard(0)}},
            {Partial(), of_indices, whole, whole}, nullptr,
            {scatters ? Shard(0) : Partial(), of_indices, whole, whole});
  }
  for (ReduceOp op : kLinearOps) {
    out.add({{"weight", Partial(op)}}, {Partial(op), whole, whole, whole});
    if (call.input("per_sample_weights").defined) {
      out.add({{"per_sample_weights", Partial(op)}}, {Partial(op), whole, whole, whole});
    }
  }
}

// As large as LibTorch's kernel makes them.
void embedding_bag_shapes(OpCall& call) {
  const TensorInfo& weight = call.input("weight");
  const TensorInfo& indices = call.input("indices");
  const TensorInfo& scales = call.input("per_sample_weights");
  const int64_t mode = call.int_arg("mode");
  const int64_t offsets = call.input("offsets").numel();
  const int64_t bags = offsets - (call.bool_arg("include_last_offset") ? 1 : 0);
  const bool forward_only = call.op->schema().name() == "aten::_embedding_bag_forward_only";
  const bool is_small =
      weight.dtype == at::kFloat || weight.dtype == at::kHalf || weight.dtype == at::kBFloat16;
  const bool fast = mode == kSum && is_small && call.int_arg("padding_idx") < 0 &&
                    weight.strides[1] == 1 && (!scales.defined || scales.strides[0] == 1);
  const at::ScalarType type = index_type(indices.dtype, call.input("offsets").dtype);
  const TensorInfo sizes = contiguous_info({forward_only && mode == kSum ? offsets : bags}, type);
  call.outputs = {contiguous_info({bags, weight.sizes[1]}, weight.dtype),
                  contiguous_info({fast ? 0 : indices.numel()}, type), sizes,
                  mode == kMax ? contiguous_info({bags, weight.sizes[1]}, type) : sizes};
}

// --- its derivatives -----------------------------------------------------------------------------
// grad [bags, D], indices [N], offsets, the bag of each index [N], how many a bag has [bags], whose
// maximum it is [bags, D], weights of the indices [N] -> the gradient of the table [V, D], a sum
// over the indices.

void embedding_bag_backward(const c10::OperatorHandle& op, c10::Stack& stack,
                            const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::Tensor grad = boxed.tensor("grad");
  const at::Tensor scales = boxed.tensor("per_sample_weights");
  const Spec& all_grad = boxed.spec(call, "grad");
  at::Tensor indices = boxed.tensor("indices");
  at::Tensor bag = boxed.tensor("offset2bag");
  if (boxed.has("offsets")) {
    const at::Tensor offsets = boxed.tensor("offsets");
    const at::ScalarType type = index_type(indices.scalar_type(), offsets.scalar_type());
    indices = indices.to(type);
    bag = bags_of(boxed.spec(call, "indices"), offsets.to(type), all_grad.sizes[0]);
  }
  at::Tensor own_scales = scales;
  if (grad.size(0) != all_grad.sizes[0]) {  // some of the bags
    const HeldRows bags = held_rows(bag, all_grad, "embedding_bag");
    const at::Tensor mine = bags.here.defined() ? bags.here : at::zeros_like(bag, at::kBool);
    bag = bags.local.masked_select(mine);
    indices = indices.masked_select(mine);
    if (scales.defined()) own_scales = scales.masked_select(mine);
  }
  if (grad.numel() == 0 || indices.numel() == 0) {
    boxed.finish({at::zeros(local_sizes(call.outputs[0]), grad.options())});
    return;
  }
  boxed.finish({at::_embedding_bag_dense_backward(
      grad.contiguous(), indices, bag, boxed.tensor("bag_size"), boxed.tensor("maximum_indices"),
      boxed["num_weights"].toInt(), boxed.flag("scale_grad_by_freq"), boxed["mode"].toInt(),
      optional(own_scales), boxed["padding_idx"].toInt())});
}

void embedding_bag_backward_strategies(const OpCall& call, Strategies& out) {
  const int64_t mode = call.int_arg("mode");
  if (mode == kMax) {
    out.add({{"grad", Shard(1)}, {"maximum_indices", Shard(1)}}, {Shard(1)});
  } else {
    out.add({{"grad", Shard(1)}}, {Shard(1)});
  }
  // Scaling by frequency needs the counts over all indices.
  if (!call.bool_arg("scale_grad_by_freq")) {
    const bool has_bags = call.input("offset2bag").numel() > 0;
    if (mode != kMax) {
      out.add({{"indices", Shard(0)},
               {"offset2bag", has_bags ? Shard(0) : Replicate()},
               {"per_sample_weights", Shard(0)}},
              {Partial()});
    }
    const int64_t bags = call.input("grad").sizes[0];
    if (call.input("bag_size").sizes[0] == bags && call.input("maximum_indices").sizes[0] == bags) {
      out.add({{"grad", Shard(0)}, {"bag_size", Shard(0)}, {"maximum_indices", Shard(0)}},
              {Partial()});
    }
  }
  out.add_linear({{"grad"}});
}

void embedding_bag_backward_shape(OpCall& call) {
  const TensorInfo& grad = call.input("grad");
  call.outputs.push_back(contiguous_info({call.int_arg("num_weights"), grad.sizes[1]}, grad.dtype));
}

// grad [bags, D], weight [V, D], indices [N], offsets, the bag of each index [N] -> the gradient of
// the indices' weights [N]: each a product of a row of grad and one of the table.
void scales_backward(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::Tensor grad = boxed.tensor("grad");
  const at::Tensor weight = boxed.tensor("weight");
  const at::Tensor indices = boxed.tensor("indices");
  const at::Tensor bag = bags_of(boxed.spec(call, "indices"),
                                 boxed.tensor("offsets").to(indices.scalar_type()), grad.size(0));
  const HeldRows rows = held_rows(indices, boxed.spec(call, "weight"), "embedding_bag");
  if (!rows.here.defined() || grad.numel() == 0 || indices.numel() == 0) {
    boxed.finish({at::zeros(local_sizes(call.outputs[0]), grad.options())});
    return;
  }
  const at::Tensor wanted = rows.here.logical_and(indices.ne(boxed["padding_idx"].toInt()));
  const at::Tensor products =
      grad.index_select(0, bag).mul(weight.index_select(0, rows.local)).sum(1);
  boxed.finish({products.masked_fill(wanted.logical_not(), 0)});
}

void scales_backward_strategies(const OpCall& call, Strategies& out) {
  const bool has_bags = call.input("offset2bag").numel() > 0;
  out.add({{"indices", Shard(0)}, {"offset2bag", has_bags ? Shard(0) : Replicate()}}, {Shard(0)});
  out.add({{"grad", Shard(1)}, {"weight", Shard(1)}}, {Partial()});
  out.add({{"weight", Shard(0)}}, {Partial()});
  out.add_linear({{"grad"}, {"weight"}});
}

void scales_backward_shape(OpCall& call) {
  call.outputs.push_back(
      contiguous_info({call.input("indices").numel()}, call.input("grad").dtype));
}

// Shapes and numbers that LibTorch refuses, in its words.
bool are_no_bags(const Arguments& args) {
  const at::Tensor& weight = args.tensor("weight");
  const at::Tensor& indices = args.tensor("indices");
  const at::Tensor& offsets = args.tensor("offsets");
  return weight.dim() != 2 || indices.dim() != 1 || offsets.dim() != 1 || offsets.numel() == 0 ||
         !c10::isIntegralType(indices.scalar_type(), false) ||
         !c10::isIntegralType(offsets.scalar_type(), false);
}

// A sparse gradient has no layout.
bool is_sparse(const Arguments& args) {
  return args.has("sparse") && args["sparse"].toBool();
}

// --- segment_reduce ------------------------------------------------------------------------------
// data [..., n, ...], lengths or offsets [..., segments]: dimensions before "axis" are batches of
// both, those behind it of data alone.

// `like_data`: the inputs with all dimensions of data; the others are lengths and offsets.
void segment_reduce(const OpCall& call, Strategies& out,
                    std::initializer_list<std::string_view> like_data) {
  const TensorInfo& data = call.input("data");
  const int axis = data.wrap_dim(call.int_arg("axis"));
  for (int d = 0; d < data.ndim(); ++d) {
    if (d == axis) continue;
    std::vector<Placement> inputs(call.num_inputs(), d < axis ? Shard(d) : Replicate());
    for (std::string_view name : like_data) inputs[call.input_index(name)] = Shard(d);
    out.add(std::move(inputs), {Shard(d)}, zeros_if_empty);
  }
}

void segment_reduce_forward(const OpCall& call, Strategies& out) {
  segment_reduce(call, out, {"data"});
}

// The gradient of data.
void segment_reduce_backward(const OpCall& call, Strategies& out) {
  segment_reduce(call, out, {"grad", "output", "data"});
  out.add_linear({{"grad"}});
}

void segment_reduce_shape(OpCall& call) {
  const TensorInfo& data = call.input("data");
  const int axis = data.wrap_dim(call.int_arg("axis"));
  const TensorInfo& lengths = call.input("lengths");
  const TensorInfo& offsets = call.input("offsets");
  Dims sizes = data.sizes;
  sizes[axis] = lengths.defined ? lengths.sizes[axis] : offsets.sizes[axis] - 1;
  call.outputs.push_back(contiguous_info(std::move(sizes), data.dtype));
}

void segment_reduce_backward_shape(OpCall& call) {
  call.outputs.push_back(contiguous_info(call.input("data").sizes, call.input("data").dtype));
}

bool are_no_segments(const Arguments& args) {
  const at::Tensor& data = args.tensor("data");
  const c10::IValue& segments = args[args["lengths"].isTensor() ? "lengths" : "offsets"];
  if (data.dim() == 0 || args["indices"].isTensor() || !segments.isTensor()) return true;
  const int64_t axis = args["axis"].toInt();
  return axis < 0 || axis >= data.dim() || segments.toTensor().dim() != axis + 1;
}

}  // namespace

void add_segment_rules(RuleTable& table) {
  table.add({"aten::_embedding_bag", "aten::_embedding_bag_forward_only"},
            sharded(embedding_bag_strategies)
                .shapes(embedding_bag_shapes)
                .runs(embedding_bag)
                .refuses(are_no_bags));
  table.add({"aten::_embedding_bag_backward", "aten::_embedding_bag_dense_backward"},
            sharded(embedding_bag_backward_strategies)
                .shapes(embedding_bag_backward_shape)
                .runs(embedding_bag_backward)
                .when(is_sparse, gathered()));
  table.add(
      "aten::_embedding_bag_per_sample_weights_backward",
      sharded(scales_backward_strategies).shapes(scales_backward_shape).runs(scales_backward));
  table.add("aten::segment_reduce",
            sharded(segment_reduce_forward).shapes(segment_reduce_shape).refuses(are_no_segments));
  table.add("aten::_segment_reduce_backward",
            sharded(segment_reduce_backward).shapes(segment_reduce_backward_shape));
}

}  // namespace shardweave::dtensor_internal

// Reductions. Along a dimension that is not reduced every operator may be sharded; along one that
// is, the result of a shard is a Partial where a reduction of the field can finish it.
#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "ATen/OpMathType.h"
#include "ATen/ops/full.h"
#include "ATen/ops/max.h"
#include "ATen/ops/min.h"
#include "ATen/ops/real.h"
#include "ATen/ops/squeeze.h"
#include "ATen/ops/sum.h"
#include "ATen/ops/where.h"
#include "c10/core/DefaultDtype.h"
#include "c10/core/GradMode.h"
#include "c10/core/WrapDimMinimal.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

struct Reduction {
  // What is left to do over the ranks after each reduced its shard.
  ReduceOp over_ranks = ReduceOp::kSum;
  // Replaces the operator on shards of reduced dimensions.
  LocalKernel kernel = nullptr;
  // Partials of the input that the operator passes on.
  std::vector<ReduceOp> commutes_with = {};
  // Of several outputs: the reduction of the second.
  ReduceOp second_over_ranks = over_ranks;
};

void add_reduction_strategies(const Reduction& r, const OpCall& call, Strategies& out) {
  const ReducedDims dims(call);
  std::vector<Placement> partials = {Partial(r.over_ranks)};
  if (call.num_outputs() == 2) partials.push_back(Partial(r.second_over_ranks));
  for (int d = 0; d < dims.ndim(); ++d) {
    if (dims.contains(d)) {
      out.add({Shard(d)}, partials, r.kernel);
    } else {
      out.add({Shard(d)}, {Shard(dims.in_output(d, call.output().ndim()))});
    }
  }
  for (ReduceOp op : r.commutes_with) out.add({Partial(op)}, {Partial(op)});
}

ShardedRule reduction(Reduction r) {
  return sharded([r = std::move(r)](const OpCall& call, Strategies& out) {
    add_reduction_strategies(r, call, out);
  });
}

// any and all over an explicit empty list of dimensions convert to bool and reduce nothing.
ShardedRule any_all_dims(ReduceOp over_ranks) {
  return sharded([over_ranks](const OpCall& call, Strategies& out) {
    if (call.arg("dim").isIntList() && call.arg("dim").toIntVector().empty()) {
      for (int d = 0; d < call.input("self").ndim(); ++d) out.add({Shard(d)}, {Shard(d)});
    } else {
      add_reduction_strategies({over_ranks}, call, out);
    }
  });
}

// --- shapes --------------------------------------------------------------------------------------

// Outputs of operators without a kernel for meta tensors. Here for the dtype that "dtype" asks for,
// or else that of the input.
void reduced_shape(OpCall& call) {
  const ReducedDims dims(call);
  at::ScalarType dtype = call.input("self").dtype;
  if (call.has_arg("dtype") && !call.arg("dtype").isNone()) {
    dtype = call.arg("dtype").toScalarType();
  } else if (call.has_arg("dtype") && c10::isIntegralType(dtype, /*includeBool=*/true)) {
    dtype = at::kLong;  // sums and products of integers
  }
  call.outputs.push_back(contiguous_info(dims.sizes(call.input("self")), dtype));
}

// The largest of nothing is none, also where a part is empty.
void extreme_shape(OpCall& call) {
  const Dims& sizes = call.input("self").sizes;
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    throw Error(absl::InvalidArgumentError(
        absl::StrCat(c10::toString(call.op->operator_name()), ": the tensor has no elements")));
  }
  reduced_shape(call);
}

void logsumexp_shape(OpCall& call) {
  reduced_shape(call);
  if (c10::isIntegralType(call.input("self").dtype, /*includeBool=*/true)) {
    call.outputs[0].dtype = c10::get_default_dtype_as_scalartype();
  }
}

void count_shape(OpCall& call) {
  call.outputs.push_back(contiguous_info(ReducedDims(call).sizes(call.input("self")), at::kLong));
}

// The variance of complex numbers is real.
void variance_shape(OpCall& call) {
  reduced_shape(call);
  call.outputs[0].dtype = c10::toRealValueType(call.outputs[0].dtype);
}

void variance_mean_shapes(OpCall& call) {
  variance_shape(call);
  reduced_shape(call);
}

// median, mode, kthvalue along a dimension: values and indices.
void values_indices_shape(OpCall& call) {
  reduced_shape(call);
  count_shape(call);
}

void same_shape(OpCall& call) {
  call.outputs.push_back(contiguous_info(call.input("self").sizes, call.input("self").dtype));
}

void cumulative_values_indices_shape(OpCall& call) {
  same_shape(call);
  call.outputs.push_back(contiguous_info(call.input("self").sizes, at::kLong));
}

// --- kernels for shards of reduced dimensions ----------------------------------------------------

// The sum of the shard over the global count: shards of different sizes weigh what they should.
// Half precision is accumulated in single, as the operator itself does.
void mean_of_shard(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::Tensor self = boxed.tensor("self");
  const std::vector<int64_t> dims = boxed.dims();
  const bool keepdim = boxed.flag("keepdim");
  const at::ScalarType dtype = call.outputs[0]->dtype;

  double count = 1;
  const Dims& sizes = boxed.spec(call, "self").sizes;
  if (dims.empty()) {
    for (int64_t size : sizes) count *= size;
  } else {
    for (int64_t d : dims) count *= sizes[d < 0 ? d + sizes.size() : d];
  }
  at::Tensor sum = at::sum(self, dims, keepdim, at::toOpMathType(dtype));
  boxed.finish({sum.div_(count).to(dtype)});
}

// The identity of max or min.
at::Scalar extreme(ReduceOp op, at::ScalarType dtype) {
  const bool max = op == ReduceOp::kMax;
  if (c10::isFloatingType(dtype)) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    return max ? -kInfinity : kInfinity;
  }
  switch (dtype) {
    case at::kBool:
      return !max;
    case at::kByte:
      return max ? 0 : 255;
    case at::kChar:
      return max ? -128 : 127;
    case at::kShort:
      return max ? -32768 : 32767;
    case at::kInt:
      return max ? std::numeric_limits<int32_t>::min() : std::numeric_limits<int32_t>::max();
    default:
      return max ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
  }
}

// amax and its like refuse to reduce nothing; a rank with an empty shard contributes the identity.
void extreme_of_shard(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::Tensor self = boxed.tensor("self");
  if (self.numel() != 0) {
    boxed.run();
    return;
  }
  std::vector<at::Tensor> results;
  for (const SpecRef& output : call.outputs) {
    ReduceOp reduce = ReduceOp::kMax;
    for (const Placement& p : output->layout.placements()) {
      if (p.is_partial()) reduce = p.reduce_op();
    }
    const c10::IntArrayRef sizes(output->local_sizes.data(), output->local_sizes.size());
    results.push_back(at::full(sizes, extreme(reduce, output->dtype), self.options()));
  }
  if (results.size() == 2) {
    boxed.finish({results[0], results[1]});
  } else {
    boxed.finish({results[0]});
  }
}

// --- composites for reduced dimensions that are sharded ------------------------------------------

bool reduces_sharded(const Arguments& args) {
  const at::Tensor& self = args.tensor("self");
  if (!is_dtensor(self)) return false;
  std::vector<int64_t> dims;
  if (args.has("dim") && args["dim"].isInt()) dims = {args["dim"].toInt()};
  if (args.has("dim") && args["dim"].isIntList()) dims = args["dim"].toIntVector();
  for (const Placement& p : layout_of(self).placements()) {
    if (!p.is_shard()) continue;
    if (dims.empty()) return true;
    for (int64_t d : dims) {
      if (p.dim() == d || p.dim() == d + self.dim()) return true;
    }
  }
  return false;
}

// Of lines that are cut, each by itself. (Backward puts a gradient where the largest was: it goes with the
// lines, which had better be whole.)
bool finds_in_cut_lines(const Arguments& args) {
  const at::Tensor& self = args.tensor("self");
  if (!args["dim"].isInt() || !reduces_sharded(args) || layout_of(self).has_partial() ||
      self.is_complex() || self.numel() == 0 ||
      (c10::GradMode::is_enabled() && self.requires_grad())) {
    return false;
  }
  // Of a line an element and its place are reduced, which is two collectives.
  const int64_t size = self.element_size();
  return self.size(args["dim"].toInt()) * size >= 4 * (size + int64_t{sizeof(int64_t)});
}

// Where, along `dim`, the elements are that this rank has at `local`.
at::Tensor global_positions(const at::Tensor& local, const Spec& spec, int dim) {
  const MeshContext& context = *spec.context;
  at::Tensor result = local;
  int64_t offset = 0;
  for (const Interval& held : local_intervals(spec.layout, context.mesh().shape(),
                                              context.coordinate(), spec.sizes, dim)) {
    result = at::where(local.ge(offset), local.add(held.begin - offset), result);
    offset += held.size();
  }
  return result;
}

// The largest, or the least, and the first place where it is: each rank's own first, so that two
// numbers for each line are sent, and not the line.
template <ReduceOp kExtreme, bool kWithValues>
void extreme_and_place(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const auto dim = static_cast<int>(c10::maybe_wrap_dim(call["dim"].toInt(), self.dim()));
  const Spec& spec = *meta_of(self).spec;
  const at::Tensor& part = meta_of(self).local();
  Dims sizes = spec.sizes;
  sizes[dim] = 1;
  const auto over_ranks = [&](at::Tensor mine, ReduceOp reduce) {
    Placements placements = spec.layout.placements();
    for (Placement& p : placements) {
      if (p.is_shard(dim)) p = Partial(reduce);
    }
    return reduce_over_ranks(op, self, std::move(mine), std::move(placements), sizes);
  };

  constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();
  at::Tensor value, place;
  if (part.size(dim) > 0) {
    std::tie(value, place) = kExtreme == ReduceOp::kMax ? at::max(part, dim, /*keepdim=*/true)
                                                        : at::min(part, dim, /*keepdim=*/true);
    place = global_positions(place, spec, dim);
  } else {
    std::vector<int64_t> of_lines = part.sizes().vec();
    of_lines[dim] = 1;
    value = at::full(of_lines, extreme(kExtreme, spec.dtype), part.options());
    place = at::full(of_lines, kNowhere, part.options().dtype(at::kLong));
  }
  at::Tensor best = over_ranks(value, kExtreme);
  // A NaN is the best there is.
  const at::Tensor is_best = value.eq(meta_of(best).local()).logical_or_(value.ne(value));
  at::Tensor where = over_ranks(at::where(is_best, place, kNowhere), ReduceOp::kMin);
  if (!call.flag("keepdim")) {
    best = best.squeeze(dim);
    where = where.squeeze(dim);
  }
  if constexpr (kWithValues) {
    call.finish({best, where});
  } else {
    call.finish({where});
  }
}

// Complex numbers have no largest one.
bool reduces_sharded_reals(const Arguments& args) {
  return reduces_sharded(args) && !args.tensor("self").is_complex();
}

// norm and linalg_vector_norm: the norm of norms is no reduction of the field, but powers add up.
void vector_norm(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const std::vector<int64_t> dims = call.dims();
  const bool keepdim = call.flag("keepdim");
  const c10::IValue& order = call[call.has("ord") ? "ord" : "p"];
  const double p = order.isNone() ? 2 : order.toScalar().toDouble();
  at::ScalarType dtype = c10::toRealValueType(self.scalar_type());
  at::Tensor x = self;
  if (call.has("dtype") && !call["dtype"].isNone()) {
    dtype = c10::toRealValueType(call["dtype"].toScalarType());
    x = x.to(call["dtype"].toScalarType());
  }
  if (!c10::isFloatingType(dtype)) {
    throw Error(absl::InvalidArgumentError(absl::StrCat(
        c10::toString(op.operator_name()), ": wanted floating-point or complex numbers; got ",
        c10::toString(self.scalar_type()))));
  }
  const at::ScalarType accumulate = at::toOpMathType(dtype);
  x = x.abs().to(accumulate);

  at::Tensor result;
  if (p == std::numeric_limits<double>::infinity()) {
    result = x.amax(dims, keepdim);
  } else if (p == -std::numeric_limits<double>::infinity()) {
    result = x.amin(dims, keepdim);
  } else if (p == 0) {
    result = x.ne(0).sum(dims, keepdim, accumulate);
  } else if (p == 1) {
    result = x.sum(dims, keepdim);
  } else if (p == 2) {
    result = x.mul(x).sum(dims, keepdim).sqrt();
  } else {
    result = x.pow(p).sum(dims, keepdim).pow(1 / p);
  }
  call.finish({result.to(dtype)});
}

// Mean first, then the mean square distance from it.
std::tuple<at::Tensor, at::Tensor> variance_and_mean(BoxedCall& call) {
  const at::Tensor self = call.tensor("self");
  const at::Tensor x = self.to(at::toOpMathType(self.scalar_type()));
  const std::vector<int64_t> dims = call.dims();
  const bool keepdim = call.flag("keepdim");
  const c10::IValue& correction = call["correction"];
  double count = 1;
  if (dims.empty()) {
    count = static_cast<double>(x.numel());
  } else {
    for (int64_t d : dims) count *= static_cast<double>(x.size(d));
  }
  count -= correction.isNone() ? 1 : correction.toScalar().toDouble();

  const at::Tensor mean = x.mean(dims, /*keepdim=*/true);
  const at::Tensor distance = x.sub(mean);
  const at::Tensor square =
      x.is_complex() ? at::real(distance.mul(distance.conj())) : distance.mul(distance);
  const at::Tensor sum = square.sum(dims, keepdim);
  at::Tensor squeezed = mean;
  if (!keepdim) squeezed = dims.empty() ? mean.squeeze() : at::squeeze(mean, dims);
  return {sum.div(std::max(count, 0.0)), squeezed};
}

template <bool kRoot, bool kWithMean>
void variance(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::ScalarType dtype = call.tensor("self").scalar_type();
  auto [var, mean] = variance_and_mean(call);
  if (kRoot) var = var.sqrt();
  var = var.to(c10::toRealValueType(dtype));
  if (kWithMean) {
    call.finish({var, mean.to(dtype)});
  } else {
    call.finish({var});
  }
}

void logsumexp(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  at::Tensor x = call.tensor("self");
  if (c10::isIntegralType(x.scalar_type(), /*includeBool=*/true)) {
    x = x.to(c10::get_default_dtype_as_scalartype());
  }
  const std::vector<int64_t> dims = call.dims();
  const bool keepdim = call.flag("keepdim");
  at::Tensor max = x.amax(dims, /*keepdim=*/true);
  // A line of nothing but -inf, or with an inf, is its own answer: do not make a nan of inf - inf.
  max = max.masked_fill(max.abs().eq(std::numeric_limits<double>::infinity()), 0);
  const at::Tensor log = x.sub(max).exp().sum(dims, keepdim).log();
  if (!keepdim) max = dims.empty() ? max.squeeze() : at::squeeze(max, dims);
  call.finish({log.add(max)});
}

}  // namespace

void add_reduction_rules(RuleTable& table) {
  using enum ReduceOp;
  table.add("aten::sum", reduction({kSum, nullptr, {kSum, kAvg}}));
  table.add("aten::nansum", reduction({kSum}).shapes(reduced_shape));
  table.add("aten::mean", reduction({kSum, mean_of_shard, {kSum, kAvg}}));
  table.add("aten::prod", reduction({kProduct, nullptr, {kProduct}}).shapes(reduced_shape));
  table.add("aten::count_nonzero", reduction({kSum}).shapes(count_shape));

  table.add("aten::amax", reduction({kMax, extreme_of_shard, {kMax}}));
  table.add("aten::amin", reduction({kMin, extreme_of_shard, {kMin}}));
  table.add("aten::max", reduction({kMax, extreme_of_shard, {kMax}}).shapes(extreme_shape));
  table.add("aten::min", reduction({kMin, extreme_of_shard, {kMin}}).shapes(extreme_shape));
  // These overloads are maximum and minimum of two tensors.
  table.add({"aten::max.other", "aten::max.out", "aten::min.other", "aten::min.out"}, pointwise());
  table.add("aten::aminmax", reduction({kMin, extreme_of_shard, {}, kMax}));
  table.add("aten::any", reduction({kMax}));
  table.add("aten::all", reduction({kMin}));
  table.add("aten::any.dims", any_all_dims(kMax));
  table.add("aten::all.dims", any_all_dims(kMin));

  table.add("aten::argmax",
            along_dim().when(finds_in_cut_lines, composed(extreme_and_place<kMax, false>)));
  table.add("aten::argmin",
            along_dim().when(finds_in_cut_lines, composed(extreme_and_place<kMin, false>)));
  table.add({"aten::max.dim", "aten::max.dim_max"},
            along_dim().when(finds_in_cut_lines, composed(extreme_and_place<kMax, true>)));
  table.add({"aten::min.dim", "aten::min.dim_min"},
            along_dim().when(finds_in_cut_lines, composed(extreme_and_place<kMin, true>)));
  // The position of an element is only known to who has the whole line.
  table.add({"aten::median.dim", "aten::median.dim_values", "aten::nanmedian.dim",
             "aten::nanmedian.dim_values", "aten::mode", "aten::kthvalue"},
            along_dim().shapes(values_indices_shape));
  // The middle of all elements is known to nobody who has some of them.
  table.add({"aten::median", "aten::nanmedian"}, replicated().shapes(reduced_shape));
  table.add({"aten::cumsum", "aten::cumprod"}, along_dim());
  table.add("aten::logcumsumexp", along_dim().shapes(same_shape));
  table.add({"aten::cummax", "aten::cummin"}, along_dim().shapes(cumulative_values_indices_shape));

  table.add({"aten::norm", "aten::linalg_vector_norm"},
            along_dim().when(reduces_sharded, composed(vector_norm)));
  table.add("aten::logsumexp",
            along_dim().shapes(logsumexp_shape).when(reduces_sharded_reals, composed(logsumexp)));
  // LibTorch makes the other overloads of these of the one with a correction.
  table.add(
      "aten::var.correction",
      along_dim().shapes(variance_shape).when(reduces_sharded, composed(variance<false, false>)));
  table.add(
      "aten::std.correction",
      along_dim().shapes(variance_shape).when(reduces_sharded, composed(variance<true, false>)));
  table.add("aten::var_mean.correction",
            along_dim()
                .shapes(variance_mean_shapes)
                .when(reduces_sharded, composed(variance<false, true>)));
  table.add("aten::std_mean.correction",
            along_dim()
                .shapes(variance_mean_shapes)
                .when(reduces_sharded, composed(variance<true, true>)));
}

}  // namespace shardweave::dtensor_internal

// Layer, group and batch normalization and their gradients.
#include <algorithm>
#include <vector>

#include "shardweave/dtensor/mesh_context.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

TensorInfo none() {
  return {};
}

// Mean and 1/deviation of half precision are kept in single on GPUs, and on CPUs where the weight
// is.
at::ScalarType statistics_dtype(const TensorInfo& input, const TensorInfo& weight) {
  const bool half = input.dtype == at::kHalf || input.dtype == at::kBFloat16;
  const bool gpu = input.spec != nullptr && input.spec->device.is_cuda();
  const bool mixed = weight.defined && weight.dtype == at::kFloat;
  return half && (gpu || mixed) ? at::kFloat : input.dtype;
}

// --- layer norm ----------------------------------------------------------------------------------

int leading_dims(const OpCall& call, const TensorInfo& input) {
  return input.ndim() - static_cast<int>(call.arg("normalized_shape").toIntVector().size());
}

// The dimensions before the normalized ones are independent. input, weight, bias.
void layer_norm(const OpCall& call, Strategies& out) {
  for (int d = 0; d < leading_dims(call, call.input(0)); ++d) {
    out.add({Shard(d), Replicate(), Replicate()}, {Shard(d)});
  }
}

void layer_norm_shapes(OpCall& call) {
  const TensorInfo& input = call.input(0);
  Dims reduced = input.sizes;
  std::fill(reduced.begin() + std::clamp(leading_dims(call, input), 0, input.ndim()), reduced.end(),
            1);
  const at::ScalarType dtype = statistics_dtype(input, call.input(1));
  call.outputs = {contiguous_info(input.sizes, input.dtype), contiguous_info(reduced, dtype),
                  contiguous_info(reduced, dtype)};
}

// grad_out, input, mean, rstd, weight, bias -> gradients of input, weight, bias.
void layer_norm_backward(const OpCall& call, Strategies& out) {
  for (int d = 0; d < leading_dims(call, call.input(1)); ++d) {
    out.add({Shard(d), Shard(d), Shard(d), Shard(d), Replicate(), Replicate()},
            {Shard(d), Partial(), Partial()});
  }
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
    out.add({Partial(op), Replicate(), Replicate(), Replicate(), Replicate(), Replicate()},
            {Partial(op)});
  }
}

void layer_norm_backward_shapes(OpCall& call) {
  const auto mask = call.arg("output_mask").toBoolList();
  const TensorInfo& input = call.input(1);
  const TensorInfo& weight = call.input(4);
  const TensorInfo& bias = call.input(5);
  call.outputs.push_back(mask[0] ? contiguous_info(input.sizes, input.dtype) : none());
  call.outputs.push_back(mask[1] && weight.defined ? contiguous_info(weight.sizes, weight.dtype)
                                                   : none());
  // Its own dtype if it is given, else that of its kin.
  const TensorInfo& like = bias.defined ? bias : weight;
  call.outputs.push_back(mask[2] && like.defined ? contiguous_info(like.sizes, like.dtype)
                                                 : none());
}

// --- group norm ----------------------------------------------------------------------------------

// Whole groups per rank, by all mesh dimensions that cut the channels together.
bool groups_divide(const OpCall& call, int input) {
  return call.int_arg("group") % call.pieces(input, 1) == 0;
}

// The sizes among the arguments become those of the local tensor.
void localize_group_norm(BoxedCall& boxed, const at::Tensor& input, const Spec& spec) {
  const int64_t groups = boxed["group"].toInt() * input.size(1) / spec.sizes[1];
  boxed["N"] = input.size(0);
  boxed["C"] = input.size(1);
  boxed["group"] = groups;
}

void group_norm_of_shard(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  localize_group_norm(boxed, boxed.tensor("input"), *call.inputs[0]);
  zeros_if_empty(op, stack, call);
}

void group_norm_backward_of_shard(const c10::OperatorHandle& op, c10::Stack& stack,
                                  const LocalCall& call) {
  BoxedCall boxed(op, stack);
  localize_group_norm(boxed, boxed.tensor("input"), *call.inputs[1]);
  zeros_if_empty(op, stack, call);
}

// input, weight, bias -> output, mean, rstd.
void group_norm(const OpCall& call, Strategies& out) {
  out.add({Shard(0), Replicate(), Replicate()}, {Shard(0)}, group_norm_of_shard);
  if (!groups_divide(call, 0)) return;
  out.add({Shard(1), Shard(0), Shard(0)}, {Shard(1)}, group_norm_of_shard);
}

void group_norm_shapes(OpCall& call) {
  const TensorInfo& input = call.input(0);
  const at::ScalarType dtype = statistics_dtype(input, call.input(1));
  const Dims groups = {call.int_arg("N"), call.int_arg("group")};
  call.outputs = {like_info(input), contiguous_info(groups, dtype), contiguous_info(groups, dtype)};
}

// grad_out, input, mean, rstd, weight -> gradients of input, weight, bias.
void group_norm_backward(const OpCall& call, Strategies& out) {
  out.add({Shard(0), Shard(0), Shard(0), Shard(0), Replicate()}, {Shard(0), Partial(), Partial()},
          group_norm_backward_of_shard);
  if (!groups_divide(call, 1)) return;
  out.add({Shard(1), Shard(1), Shard(1), Shard(1), Shard(0)}, {Shard(1), Shard(0), Shard(0)},
          group_norm_backward_of_shard);
}

void group_norm_backward_shapes(OpCall& call) {
  const auto mask = call.arg("output_mask").toBoolList();
  const TensorInfo& input = call.input(1);
  const TensorInfo& weight = call.input(4);
  const TensorInfo per_channel =
      contiguous_info({call.int_arg("C")}, weight.defined ? weight.dtype : input.dtype);
  call.outputs = {mask[0] ? like_info(input) : none(), mask[1] ? per_channel : none(),
                  mask[2] ? per_channel : none()};
}

// --- batch norm ----------------------------------------------------------------------------------
// In operators that shard themselves: the statistics are those of the whole batch, and the running
// ones are written wherever they lie.

// [C] as [1, C, 1, 1...].
at::Tensor over_channels(const at::Tensor& tensor, int64_t ndim) {
  std::vector<int64_t> sizes(ndim, 1);
  sizes[1] = tensor.size(0);
  return tensor.view(sizes);
}

std::vector<int64_t> all_but_channels(int64_t ndim) {
  std::vector<int64_t> dims = {0};
  for (int64_t d = 2; d < ndim; ++d) dims.push_back(d);
  return dims;
}

double count_per_channel(const at::Tensor& input) {
  return static_cast<double>(input.numel()) /
         static_cast<double>(std::max<int64_t>(input.size(1), 1));
}

void batch_norm(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor input = call.tensor("input");
  const at::Tensor weight = call.tensor("weight");
  const at::Tensor bias = call.tensor("bias");
  const bool has_statistics = call.has("running_mean");
  const at::Tensor running_mean = has_statistics ? call.tensor("running_mean") : at::Tensor();
  const at::Tensor running_var = has_statistics ? call.tensor("running_var") : at::Tensor();
  const bool training = call.flag("training");
  const double momentum = call["momentum"].toDouble();
  const double eps = call["eps"].toDouble();
  const int64_t ndim = input.dim();

  at::Tensor mean = running_mean, var = running_var;
  const at::Tensor x = weight.defined() && weight.scalar_type() != input.scalar_type()
                           ? input.to(weight.scalar_type())
                           : input;
  if (training) {
    const std::vector<int64_t> dims = all_but_channels(ndim);
    mean = x.mean(dims);
    const at::Tensor distance = x.sub(over_channels(mean, ndim));
    var = distance.mul(distance).mean(dims);
    const double n = count_per_channel(input);
    if (running_mean.defined()) running_mean.mul_(1 - momentum).add_(mean, momentum);
    if (running_var.defined()) {
      running_var.mul_(1 - momentum).add_(var, momentum * (n / (n - 1)));
    }
  }
  const at::Tensor invstd = var.add(eps).rsqrt();
  at::Tensor scale = weight.defined() ? invstd.mul(weight) : invstd;
  at::Tensor output = x.sub(over_channels(mean, ndim)).mul(over_channels(scale, ndim));
  if (bias.defined()) output = output.add(over_channels(bias, ndim));
  output = output.to(input.scalar_type());
  if (training) {
    call.finish({output, mean, invstd});
  } else {
    call.finish({output, input.new_empty({0}), input.new_empty({0})});
  }
}

void batch_norm_backward(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor input = call.tensor("input");
  const at::Tensor weight = call.tensor("weight");
  const bool train = call.flag("train");
  const auto mask = call["output_mask"].toBoolList();
  const int64_t ndim = input.dim();
  const std::vector<int64_t> dims = all_but_channels(ndim);
  const at::ScalarType dtype = weight.defined() ? weight.scalar_type() : input.scalar_type();
  const at::Tensor grad = call.tensor("grad_out").to(dtype);

  at::Tensor mean, invstd;
  if (train) {
    mean = call.tensor("save_mean");
    invstd = call.tensor("save_invstd");
  } else {
    mean = call.tensor("running_mean");
    invstd = call.tensor("running_var").add(call["eps"].toDouble()).rsqrt();
  }
  const at::Tensor normalized =
      input.to(dtype).sub(over_channels(mean, ndim)).mul(over_channels(invstd, ndim));
  const at::Tensor grad_bias = grad.sum(dims);
  const at::Tensor grad_weight = grad.mul(normalized).sum(dims);
  at::Tensor grad_input;
  if (mask[0]) {
    grad_input = grad;
    if (train) {
      const double n = count_per_channel(input);
      grad_input = grad.sub(over_channels(grad_bias.div(n), ndim))
                       .sub(normalized.mul(over_channels(grad_weight.div(n), ndim)));
    }
    const at::Tensor scale = weight.defined() ? invstd.mul(weight) : invstd;
    grad_input = grad_input.mul(over_channels(scale, ndim)).to(input.scalar_type());
  }
  call.finish(
      {grad_input, mask[1] ? grad_weight : at::Tensor(), mask[2] ? grad_bias : at::Tensor()});
}

// The normalized shape is that of the last dimensions, and of the weights.
bool is_not_the_last_dims(const c10::OperatorHandle& /*op*/, absl::Span<const c10::IValue> args) {
  const c10::IntArrayRef input = args[0].toTensor().sizes();
  const std::vector<int64_t> shape = args[1].toIntVector();
  if (shape.empty() || shape.size() > input.size()) return true;
  if (input.slice(input.size() - shape.size()) != c10::IntArrayRef(shape)) return true;
  for (const c10::IValue& weight : args.subspan(2, 2)) {
    if (weight.isTensor() && weight.toTensor().sizes() != c10::IntArrayRef(shape)) return true;
  }
  return false;
}

}  // namespace

void add_norm_rules(RuleTable& table) {
  table.add("aten::native_layer_norm",
            Rule(layer_norm).shapes(layer_norm_shapes).refuses(is_not_the_last_dims));
  table.add("aten::native_layer_norm_backward",
            Rule(layer_norm_backward).shapes(layer_norm_backward_shapes));
  table.add("aten::native_group_norm", Rule(group_norm).shapes(group_norm_shapes).chunks_only());
  table.add("aten::native_group_norm_backward",
            Rule(group_norm_backward).shapes(group_norm_backward_shapes).chunks_only());
  table.add({"aten::native_batch_norm", "aten::_native_batch_norm_legit"},
            Rule::composed(batch_norm));
  table.add("aten::native_batch_norm_backward", Rule::composed(batch_norm_backward));
}

}  // namespace shardweave::dtensor_internal

// Layer, group and batch normalization and their gradients.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/OpMathType.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/native_batch_norm.h"
#include "ATen/ops/native_batch_norm_backward.h"
#include "ATen/ops/ones_like.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
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
  const bool mixed = weight.defined && weight.dtype == at::kFloat;
  return half && (is_on_gpu(input) || mixed) ? at::kFloat : input.dtype;
}

// Group norm's: on GPUs as on CPUs.
at::ScalarType group_statistics_dtype(const TensorInfo& input, const TensorInfo& weight) {
  const bool mixed = weight.defined && weight.dtype == at::kFloat;
  return mixed ? statistics_dtype(input, weight) : input.dtype;
}

// --- layer norm ----------------------------------------------------------------------------------

int leading_dims(const OpCall& call) {
  return call.input("input").ndim() -
         static_cast<int>(call.arg("normalized_shape").toIntVector().size());
}

// The dimensions before the normalized ones are independent.
void layer_norm(const OpCall& call, Strategies& out) {
  for (int d = 0; d < leading_dims(call); ++d) out.add({{"input", Shard(d)}}, {Shard(d)});
}

// Mean and 1/deviation have a number for each that is normalized.
Dims statistics_sizes(const OpCall& call) {
  const TensorInfo& input = call.input("input");
  Dims sizes = input.sizes;
  std::fill(sizes.begin() + std::clamp(leading_dims(call), 0, input.ndim()), sizes.end(), 1);
  return sizes;
}

void layer_norm_shapes(OpCall& call) {
  const TensorInfo& input = call.input("input");
  const TensorInfo statistics =
      contiguous_info(statistics_sizes(call), statistics_dtype(input, call.input("weight")));
  call.outputs = {contiguous_info(input.sizes, input.dtype), statistics, statistics};
}

// Gradients of input, weight and bias.
void layer_norm_backward(const OpCall& call, Strategies& out) {
  for (int d = 0; d < leading_dims(call); ++d) {
    out.add({{"grad_out", Shard(d)}, {"input", Shard(d)}, {"mean", Shard(d)}, {"rstd", Shard(d)}},
            {Shard(d), Partial(), Partial()});
  }
  out.add_linear({{"grad_out"}});
}

void layer_norm_backward_shapes(OpCall& call) {
  const auto mask = call.arg("output_mask").toBoolList();
  const TensorInfo& input = call.input("input");
  const TensorInfo& weight = call.input("weight");
  const TensorInfo& bias = call.input("bias");
  call.outputs.push_back(mask[0] ? contiguous_info(input.sizes, input.dtype) : none());
  call.outputs.push_back(mask[1] && weight.defined ? contiguous_info(weight.sizes, weight.dtype)
                                                   : none());
  // Its own dtype if it is given, else that of its kin.
  const TensorInfo& like = bias.defined ? bias : weight;
  call.outputs.push_back(mask[2] && like.defined ? contiguous_info(like.sizes, like.dtype)
                                                 : none());
}

// --- RMS norm ------------------------------------------------------------------------------------
// LibTorch has it fused for GPUs; elsewhere it is other operators.

// The output and 1/deviation.
void rms_norm(const OpCall& call, Strategies& out) {
  for (int d = 0; d < leading_dims(call); ++d) {
    out.add({{"input", Shard(d)}}, {Shard(d)}, zeros_if_empty);
  }
}

void rms_norm_shapes(OpCall& call) {
  const TensorInfo& input = call.input("input");
  call.outputs = {contiguous_info(input.sizes, input.dtype),
                  contiguous_info(statistics_sizes(call), at::toOpMathType(input.dtype))};
}

// Gradients of input and weight.
void rms_norm_backward(const OpCall& call, Strategies& out) {
  for (int d = 0; d < leading_dims(call); ++d) {
    out.add({{"grad_out", Shard(d)}, {"input", Shard(d)}, {"rstd", Shard(d)}},
            {Shard(d), Partial()}, zeros_if_empty);
  }
  out.add_linear({{"grad_out"}});
}

void rms_norm_backward_shapes(OpCall& call) {
  const auto mask = call.arg("output_mask").toBoolList();
  const TensorInfo& input = call.input("input");
  const TensorInfo& weight = call.input("weight");
  call.outputs = {mask[0] ? contiguous_info(input.sizes, input.dtype) : none(),
                  mask[1] && weight.defined ? contiguous_info(weight.sizes, weight.dtype) : none()};
}

// --- group norm ----------------------------------------------------------------------------------

// Whole groups per rank, by all mesh dimensions that cut the channels together.
bool groups_divide(const OpCall& call) {
  return call.int_arg("group") % call.pieces(call.input("input"), 1) == 0;
}

// The sizes among the arguments become those of the local tensor.
void group_norm_of_shard(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::Tensor input = boxed.tensor("input");
  boxed["group"] = boxed["group"].toInt() * input.size(1) / boxed.spec(call, "input").sizes[1];
  boxed["N"] = input.size(0);
  boxed["C"] = input.size(1);
  zeros_if_empty(op, stack, call);
}

// The output, mean and 1/deviation.
void group_norm(const OpCall& call, Strategies& out) {
  for (const Placement& batch : cuts_of(call, {{"input", 0}})) {
    out.add({{"input", batch}}, {batch}, group_norm_of_shard);
  }
  if (!groups_divide(call)) return;
  out.add({{"input", Shard(1)}, {"weight", Shard(0)}, {"bias", Shard(0)}}, {Shard(1)},
          group_norm_of_shard);
}

void group_norm_shapes(OpCall& call) {
  const TensorInfo& input = call.input("input");
  const at::ScalarType dtype = group_statistics_dtype(input, call.input("weight"));
  const Dims groups = {call.int_arg("N"), call.int_arg("group")};
  call.outputs = {like_info(input), contiguous_info(groups, dtype), contiguous_info(groups, dtype)};
}

// Gradients of input, weight and bias.
void group_norm_backward(const OpCall& call, Strategies& out) {
  for (const Placement& batch : cuts_of(call, {{"grad_out", 0}, {"input", 0}})) {
    out.add({{"grad_out", batch}, {"input", batch}, {"mean", batch}, {"rstd", batch}},
            {batch, Partial(), Partial()}, group_norm_of_shard);
  }
  if (!groups_divide(call)) return;
  out.add({{"grad_out", Shard(1)},
           {"input", Shard(1)},
           {"mean", Shard(1)},
           {"rstd", Shard(1)},
           {"weight", Shard(0)}},
          {Shard(1), Shard(0), Shard(0)}, group_norm_of_shard);
}

void group_norm_backward_shapes(OpCall& call) {
  const auto mask = call.arg("output_mask").toBoolList();
  const TensorInfo& input = call.input("input");
  const TensorInfo& weight = call.input("weight");
  const TensorInfo per_channel =
      contiguous_info({call.int_arg("C")}, weight.defined ? weight.dtype : input.dtype);
  call.outputs = {mask[0] ? like_info(input) : none(), mask[1] ? per_channel : none(),
                  mask[2] ? per_channel : none()};
}

// --- batch norm ----------------------------------------------------------------------------------
// In training the statistics are those of the whole batch: sums of what the ranks have, all in one
// collective, forward and backward. With statistics that are given, channels are independent.

std::vector<int64_t> all_but_channels(int64_t ndim) {
  std::vector<int64_t> dims = {0};
  for (int64_t d = 2; d < ndim; ++d) dims.push_back(d);
  return dims;
}

double count_per_channel(const at::Tensor& input) {
  return static_cast<double>(input.numel()) /
         static_cast<double>(std::max<int64_t>(input.size(1), 1));
}

at::Tensor as(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() ? tensor.to(dtype) : tensor;
}

// LibTorch's kernels want all that is per channel to be of one type, and look at the weight alone. Where
// the others differ (fully_shard() casts parameters, and no buffers) they become of single precision,
// which the kernels take with halves.
void unify_types(BoxedCall& boxed, std::initializer_list<const char*> per_channel) {
  std::optional<at::ScalarType> first;
  bool differ = false;
  for (const char* name : per_channel) {
    const at::Tensor tensor = boxed.tensor(name);
    if (!tensor.defined()) continue;
    differ = differ || tensor.scalar_type() != first.value_or(tensor.scalar_type());
    first = tensor.scalar_type();
  }
  if (!differ || !at::isReducedFloatingType(boxed.tensor("input").scalar_type())) return;
  for (const char* name : per_channel) {
    const at::Tensor tensor = boxed.tensor(name);
    if (tensor.defined()) boxed[name] = tensor.to(at::kFloat);
  }
}

// With given statistics no others are returned; LibTorch's kernels for GPUs repeat those.
void normalize_shard(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  unify_types(boxed, {"weight", "bias", "running_mean", "running_var"});
  const at::Tensor input = boxed.tensor("input");
  const bool repeats = input.is_cuda();
  if (repeats && input.numel() != 0) return boxed.run();
  const at::TensorOptions options = input.options().dtype(call.outputs[1]->dtype);
  at::Tensor mean = at::empty({0}, options), invstd = mean.clone();
  if (repeats) {
    mean = boxed.tensor("running_mean").to(options.dtype(), /*non_blocking=*/false, /*copy=*/true);
    invstd = boxed.tensor("running_var").to(options.dtype()).add(boxed["eps"].toDouble()).rsqrt_();
  }
  if (input.numel() == 0) return boxed.finish({at::empty_like(input), mean, invstd});
  c10::Stack arguments = boxed.arguments();
  op.callBoxed(arguments);
  boxed.finish({arguments.end()[-3].toTensor(), mean, invstd});
}

void normalize_shard_backward(const c10::OperatorHandle& op, c10::Stack& stack,
                              const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::Tensor input = boxed.tensor("input");
  if (input.numel() != 0) {
    // Kernels for GPUs want to know that nothing was saved.
    for (const char* name : {"save_mean", "save_invstd"}) {
      if (input.is_cuda() && !boxed.has(name)) boxed[name] = at::empty({0}, input.options());
    }
    unify_types(boxed, {"weight", "running_mean", "running_var", "save_mean", "save_invstd"});
  }
  at::Tensor results[3];
  if (input.numel() != 0) {
    c10::Stack arguments = boxed.arguments();
    op.callBoxed(arguments);
    for (size_t i = 0; i < 3; ++i) {
      results[i] = arguments.end()[static_cast<ptrdiff_t>(i) - 3].toTensor();
      if (call.outputs[i] != nullptr) results[i] = as(results[i], call.outputs[i]->dtype);
    }
    return boxed.finish({results[0], results[1], results[2]});
  }
  for (size_t i = 0; i < 3; ++i) {
    if (call.outputs[i] == nullptr) continue;
    const Dims& sizes = call.outputs[i]->local_sizes;
    results[i] = at::zeros(c10::IntArrayRef(sizes.data(), sizes.size()),
                           input.options().dtype(call.outputs[i]->dtype));
  }
  boxed.finish({results[0], results[1], results[2]});
}

// The output, and no statistics; on GPUs those that were given.
void batch_norm(const OpCall& call, Strategies& out) {
  if (call.bool_arg("training")) return;  // composed
  for (int d = 0; d < call.input("input").ndim(); ++d) {
    // All other inputs have an element for each channel.
    const bool channels = d == 1;
    std::vector<Placement> inputs(call.num_inputs(), channels ? Shard(0) : Replicate());
    inputs[call.input_index("input")] = Shard(d);
    const Placement saved = channels && is_on_gpu(call.input("input")) ? Shard(0) : Replicate();
    out.add(std::move(inputs), {Shard(d), saved, saved}, normalize_shard);
  }
}

void batch_norm_shapes(OpCall& call) {
  const TensorInfo& input = call.input("input");
  const bool saves = call.bool_arg("training") || is_on_gpu(input);
  const int64_t channels = saves ? input.sizes[1] : 0;
  const TensorInfo statistics =
      contiguous_info({channels}, statistics_dtype(input, call.input("weight")));
  call.outputs = {like_info(input), statistics, statistics};
}

// Gradients of input, weight and bias.
void batch_norm_backward(const OpCall& call, Strategies& out) {
  if (call.bool_arg("train")) return;  // composed
  for (int d = 0; d < call.input("input").ndim(); ++d) {
    const bool channels = d == 1;
    const Placement each = channels ? Shard(0) : Replicate();
    const Placement sum = channels ? Shard(0) : Partial();
    // What forward has saved, on GPUs, is read there.
    const TensorInfo& mean = call.input("save_mean");
    const bool saved = mean.defined && mean.sizes[0] == call.input("input").sizes[1];
    const Placement each_saved = saved ? each : Replicate();
    out.add({{"grad_out", Shard(d)},
             {"input", Shard(d)},
             {"weight", each},
             {"running_mean", each},
             {"running_var", each},
             {"save_mean", each_saved},
             {"save_invstd", each_saved}},
            {Shard(d), sum, sum}, normalize_shard_backward);
  }
  out.add_linear({{"grad_out"}});
}

void batch_norm_backward_shapes(OpCall& call) {
  const auto mask = call.arg("output_mask").toBoolList();
  const TensorInfo& input = call.input("input");
  const TensorInfo& weight = call.input("weight");
  const TensorInfo channel = contiguous_info(
      {input.sizes[1]}, weight.defined ? weight.dtype : statistics_dtype(input, weight));
  call.outputs = {mask[0] ? like_info(input) : none(), mask[1] ? channel : none(),
                  mask[2] ? channel : none()};
}

bool is_training(const Arguments& args) {
  return args["training"].toBool();
}

bool is_training_backward(const Arguments& args) {
  return args["train"].toBool();
}

// Without Partials: the statistics are of the values.
at::Tensor with_values(const c10::OperatorHandle& op, const at::Tensor& tensor, const char* name) {
  return move_input(op, tensor, gradient_layout(layout_of(tensor)), name);
}

// How [2, channels] of a tensor lies of which each rank has summed its part.
Placements of_channel_sums(const Layout& layout) {
  Placements placements = layout.placements();
  for (Placement& p : placements) {
    if (p.is_shard() && !p.is_shard(1)) p = Partial();
  }
  return placements;
}

// A weight or a bias as the channels of the input are cut.
at::Tensor with_channels(const c10::OperatorHandle& op, const at::Tensor& tensor,
                         const at::Tensor& input, const char* name) {
  if (!tensor.defined()) return tensor;
  const Layout& layout = layout_of(input);
  Placements placements(layout.mesh_ndim());
  for (int m = 0; m < layout.mesh_ndim(); ++m) {
    if (layout[m].is_shard(1)) placements[m] = layout[m].with_dim(0);
  }
  return move_input(op, tensor,
                    value_or_throw(Layout::create(std::move(placements), layout.order())), name);
}

struct Moments {
  at::Tensor mean, var;  // doubles, one per channel
};

// Around a center of its own each rank sums up distances and their squares; in double precision,
// where large means leave enough digits, these become sums around 0 that may be added.
Moments moments(const c10::OperatorHandle& op, const at::Tensor& input) {
  const at::Tensor& part = meta_of(input).local();
  const std::vector<int64_t> dims = all_but_channels(input.dim());
  at::Tensor sums;
  if (part.numel() == 0) {
    sums = at::zeros({2, part.size(1)}, part.options().dtype(at::kDouble));
  } else {
    const double n = count_per_channel(part);
    const at::Tensor x = part.to(at::toOpMathType(part.scalar_type()));
    const at::Tensor center = x.mean(dims, /*keepdim=*/true);
    const at::Tensor distance = x.sub(center);
    const at::Tensor c = center.flatten().to(at::kDouble);
    const at::Tensor first = distance.sum(dims).to(at::kDouble);
    const at::Tensor second = distance.mul_(distance).sum(dims).to(at::kDouble);
    sums = at::stack({c.mul(n).add_(first), c.mul(c).mul_(n).add_(c.mul(first), 2).add_(second)});
  }
  sums = reduce_over_ranks(op, input, std::move(sums), of_channel_sums(layout_of(input)),
                           {2, input.size(1)})
             .div_(count_per_channel(input));
  const at::Tensor mean = sums.select(0, 0).clone();
  return {mean, sums.select(0, 1).sub(mean.mul(mean)).clamp_min_(0)};
}

std::optional<at::Tensor> given(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// (x - mean) * scale + shift, each per channel, in the dtype of x.
at::Tensor affine(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift,
                  const at::Tensor& mean) {
  return std::get<0>(at::native_batch_norm(x, given(scale), given(shift), mean, at::ones_like(mean),
                                           /*training=*/false, 0, 0));
}

// The dtype of the saved statistics, as LibTorch has it.
at::ScalarType saved_dtype(const at::Tensor& input, const at::Tensor& weight) {
  const bool half = input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
  const bool mixed = weight.defined() && weight.scalar_type() == at::kFloat;
  return half && (input.is_cuda() || mixed) ? at::kFloat : input.scalar_type();
}

void batch_norm_training(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor input = with_values(op, call.dtensor("input"), "input");
  const at::Tensor weight = with_channels(op, call.tensor("weight"), input, "weight");
  const at::Tensor bias = with_channels(op, call.tensor("bias"), input, "bias");
  const bool has_statistics = call.has("running_mean");
  const at::Tensor running_mean = has_statistics ? call.tensor("running_mean") : at::Tensor();
  const at::Tensor running_var = has_statistics ? call.tensor("running_var") : at::Tensor();
  const double momentum = call["momentum"].toDouble();

  const auto [mean, var] = moments(op, input);
  const double n = count_per_channel(input);
  if (running_mean.defined()) {
    running_mean.mul_(1 - momentum).add_(mean.to(running_mean.scalar_type()), momentum);
  }
  if (running_var.defined()) {
    running_var.mul_(1 - momentum)
        .add_(var.to(running_var.scalar_type()), momentum * (n / (n - 1)));
  }
  // LibTorch's kernels take parameters of single precision with halves.
  const at::ScalarType dtype = at::toOpMathType(input.scalar_type());
  const at::Tensor invstd = var.add(call["eps"].toDouble()).rsqrt_().to(dtype);
  const at::Tensor scale = weight.defined() ? invstd.mul(weight.to(dtype)) : invstd;
  const at::Tensor saved_mean = mean.to(dtype);
  const at::ScalarType saved = saved_dtype(input, weight);
  call.finish(
      {affine(input, scale, as(bias, dtype), saved_mean), saved_mean.to(saved), invstd.to(saved)});
}

void batch_norm_training_backward(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor input = with_values(op, call.dtensor("input"), "input");
  const at::Tensor weight = with_channels(op, call.tensor("weight"), input, "weight");
  const auto mask = call["output_mask"].toBoolList();
  const at::ScalarType dtype = at::toOpMathType(input.scalar_type());
  const at::Tensor mean = call.tensor("save_mean").to(dtype);
  const at::Tensor invstd = call.tensor("save_invstd").to(dtype);
  const at::Tensor grad = move_input(op, call.tensor("grad_out"), layout_of(input), "grad_out");

  // With a deviation of 1: sums of the gradient times the distance, and of the gradient. CPUs take
  // the running statistics, GPUs the saved ones.
  const at::Tensor ones = at::ones_like(mean);
  auto [unused, weighted, sum] = at::native_batch_norm_backward(
      grad, input, ones, mean, ones, mean, ones, /*train=*/false, 0, {false, true, true});
  at::Tensor both = at::stack({weighted, sum});
  // The gradient of the input needs them whole; by themselves they may stay summands.
  if (mask[0]) both = with_values(op, both, "result");
  weighted = both.select(0, 0).mul(invstd);
  sum = both.select(0, 1).clone();
  at::Tensor grad_input;
  if (mask[0]) {
    const double n = count_per_channel(input);
    const at::Tensor scale = weight.defined() ? invstd.mul(weight.to(dtype)) : invstd;
    const at::Tensor of_distance = weighted.mul(invstd).mul_(scale).div_(-n);
    const at::Tensor constant = sum.mul(scale).div_(-n);
    grad_input = affine(input, of_distance, constant, mean)
                     .add_(affine(grad, scale, {}, at::zeros_like(mean)));
  }
  const at::ScalarType of_weight =
      weight.defined() ? weight.scalar_type() : saved_dtype(input, weight);
  call.finish({grad_input, mask[1] ? weighted.to(of_weight) : at::Tensor(),
               mask[2] ? sum.to(of_weight) : at::Tensor()});
}

// The normalized shape is that of the last dimensions, and of the weights.
bool is_not_the_last_dims(const Arguments& args) {
  const c10::IntArrayRef input = args.tensor("input").sizes();
  const std::vector<int64_t> shape = args["normalized_shape"].toIntVector();
  if (shape.empty() || shape.size() > input.size()) return true;
  if (input.slice(input.size() - shape.size()) != c10::IntArrayRef(shape)) return true;
  for (const char* name : {"weight", "bias"}) {
    const c10::IValue& weight = args[name];
    if (weight.isTensor() && weight.toTensor().sizes() != c10::IntArrayRef(shape)) return true;
  }
  return false;
}

// cuDNN's forms, which LibTorch takes for images on GPUs: more arguments, the same numbers.
void cudnn_batch_norm(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor input = call.dtensor("input");
  const auto [output, mean, invstd] = at::native_batch_norm(
      input, call.tensor("weight"), given(call.tensor("bias")), given(call.tensor("running_mean")),
      given(call.tensor("running_var")), call.flag("training"),
      call["exponential_average_factor"].toDouble(), call["epsilon"].toDouble());
  const at::Tensor nothing_reserved = input.new_empty({0}, at::TensorOptions(at::kByte));
  call.finish({output, mean, invstd, nothing_reserved});
}

void cudnn_batch_norm_backward(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const auto [input, weight, bias] = at::native_batch_norm_backward(
      call.tensor("grad_output"), call.dtensor("input"), call.tensor("weight"),
      given(call.tensor("running_mean")), given(call.tensor("running_var")),
      given(call.tensor("save_mean")), given(call.tensor("save_var")), /*train=*/true,
      call["epsilon"].toDouble(), {true, true, true});
  call.finish({input, weight, bias});
}

}  // namespace

void add_norm_rules(RuleTable& table) {
  table.add("aten::native_layer_norm",
            sharded(layer_norm).shapes(layer_norm_shapes).refuses(is_not_the_last_dims));
  table.add("aten::native_layer_norm_backward",
            sharded(layer_norm_backward).shapes(layer_norm_backward_shapes));
  table.add("aten::_fused_rms_norm", sharded(rms_norm).shapes(rms_norm_shapes));
  table.add("aten::_fused_rms_norm_backward",
            sharded(rms_norm_backward).shapes(rms_norm_backward_shapes));
  table.add("aten::native_group_norm", sharded(group_norm).shapes(group_norm_shapes).chunks_only());
  table.add("aten::native_group_norm_backward",
            sharded(group_norm_backward).shapes(group_norm_backward_shapes).chunks_only());
  const ShardedRule forward = sharded(batch_norm).shapes(batch_norm_shapes);
  table.add({"aten::native_batch_norm", "aten::_native_batch_norm_legit"},
            ShardedRule(forward).when(is_training, composed(batch_norm_training)));
  table.add("aten::native_batch_norm_backward",
            sharded(batch_norm_backward)
                .shapes(batch_norm_backward_shapes)
                .when(is_training_backward, composed(batch_norm_training_backward)));
  table.add("aten::cudnn_batch_norm", composed(cudnn_batch_norm));
  table.add("aten::cudnn_batch_norm_backward", composed(cudnn_batch_norm_backward));
}

}  // namespace shardweave::dtensor_internal

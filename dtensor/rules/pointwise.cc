// Elementwise operators: every dimension may be sharded. What differs is in which operands they are
// linear, so that Partials pass through.
#include <utility>
#include <vector>

#include "ATen/native/TypeProperties.h"
#include "c10/core/DefaultDtype.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// Elementwise, and linear in each of these sets of operands: where one is Partial together, and all
// others are whole.
ShardedRule linear_in(std::vector<std::vector<std::string_view>> sets) {
  return sharded(
      [sets = std::move(sets), elementwise = pointwise()](const OpCall& call, Strategies& out) {
        elementwise(call, out);
        for (ReduceOp op : kLinearOps) {
          for (const std::vector<std::string_view>& set : sets) {
            std::vector<Placement> inputs(call.num_inputs(), Replicate());
            for (std::string_view name : set) inputs[call.input_index(name)] = Partial(op);
            out.add(std::move(inputs), {Partial(op)});
          }
        }
      });
}

// A function that never falls (rises) keeps (exchanges) minima and maxima.
enum class Monotone { kRising, kFalling };

// Of one operand. (Of integers none falls: the largest that -x could be of the smallest is not there.)
ShardedRule monotone(Monotone m, Linearity linearity = Linearity::kNone) {
  return sharded([m, elementwise = pointwise(linearity)](const OpCall& call, Strategies& out) {
    elementwise(call, out);
    const bool falls = m == Monotone::kFalling;
    if (falls && c10::isIntegralType(call.output().dtype, /*includeBool=*/true)) return;
    const ReduceOp min = m == Monotone::kRising ? ReduceOp::kMin : ReduceOp::kMax;
    const ReduceOp max = m == Monotone::kRising ? ReduceOp::kMax : ReduceOp::kMin;
    out.add({Partial(ReduceOp::kMin)}, {Partial(min)});
    out.add({Partial(ReduceOp::kMax)}, {Partial(max)});
  });
}

// Minimum and maximum of two: rising in each operand, and `own` of both is passed on.
ShardedRule extremum(ReduceOp own) {
  return sharded([own, elementwise = pointwise()](const OpCall& call, Strategies& out) {
    elementwise(call, out);
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      out.add({Partial(op), Replicate()}, {Partial(op)});
      out.add({Replicate(), Partial(op)}, {Partial(op)});
    }
    out.add({Partial(own), Partial(own)}, {Partial(own)});
  });
}

// Rising in two operands.
void rising_in_both(const OpCall& call, Strategies& out) {
  pointwise()(call, out);
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    out.add({Partial(op), Replicate()}, {Partial(op)});
    out.add({Replicate(), Partial(op)}, {Partial(op)});
  }
}

// self + number, self - number: added once to a mean, not to every summand. (A sum keeps the order as
// well. But the minimum of a rank that has no elements is infinity, or the largest integer, which does
// not keep its place when something is added.)
void add_number(const OpCall& call, Strategies& out) {
  pointwise()(call, out);
  pass_partials(call, out, {ReduceOp::kAvg});
}

// where(condition, self, other): with the same condition on all ranks every reduction commutes.
void where(const OpCall& call, Strategies& out) {
  pointwise()(call, out);
  for (ReduceOp op : kAllReduceOps) {
    out.add({{"self", Partial(op)}, {"other", Partial(op)}}, {Partial(op)});
  }
}

// Of the ranks that hold summands one fills with the value, the others with 0.
void fill_once(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const Spec& spec = boxed.spec(call, "self");
  for (int m = 0; m < spec.layout.mesh_ndim(); ++m) {
    if (!spec.layout[m].is_partial(ReduceOp::kSum) || spec.context->coordinate()[m] == 0) continue;
    boxed["value"] = c10::Scalar(0);
  }
  boxed.run();
}

// The value is not read: it may be another one in every step.
void masked_fill(const OpCall& call, Strategies& out) {
  pointwise()(call, out);
  for (ReduceOp op : kLinearOps) {
    out.add({{"self", Partial(op)}}, {Partial(op)}, fill_once);
  }
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    out.add({{"self", Partial(op)}}, {Partial(op)});
  }
}

// --- shapes of results, for operators without a kernel for meta tensors --------------------------

void like_input_real(OpCall& call) {
  like_input(call);
  call.outputs[0].dtype = c10::toRealValueType(call.outputs[0].dtype);
}

// The common dtype of these inputs.
at::ScalarType promoted(const OpCall& call, std::initializer_list<std::string_view> inputs) {
  at::native::ResultTypeState state;
  for (std::string_view name : inputs) {
    state = at::native::update_result_type_state(call.arg(name).toTensor(), state);
  }
  return at::native::result_type(state);
}

// Of a tensor and a number, in either order.
void like_input_promoted(OpCall& call) {
  like_input(call);
  at::native::ResultTypeState state;
  for (size_t i = 0; i < 2; ++i) {
    const c10::IValue& given = call.args[i];
    state = given.isTensor() ? at::native::update_result_type_state(given.toTensor(), state)
                             : at::native::update_result_type_state(given.toScalar(), state);
  }
  call.outputs[0].dtype = at::native::result_type(state);
}

void broadcast(OpCall& call) {
  call.outputs.push_back(broadcast_info(call, {"self", "other"}));
  call.outputs[0].dtype = promoted(call, {"self", "other"});
}

void broadcast_bool(OpCall& call) {
  call.outputs.push_back(broadcast_info(call));
  call.outputs[0].dtype = at::kBool;
}

void broadcast_complex(OpCall& call) {
  call.outputs.push_back(broadcast_info(call));
  call.outputs[0].dtype = c10::toComplexType(call.outputs[0].dtype);
}

void like_input_bool(OpCall& call) {
  like_input(call);
  call.outputs.back().dtype = at::kBool;
}

void like_input_floating(OpCall& call) {
  like_input(call);
  if (c10::isIntegralType(call.outputs[0].dtype, /*includeBool=*/true)) {
    call.outputs[0].dtype = c10::get_default_dtype_as_scalartype();
  }
}

// angle: of complex numbers real ones.
void angle_shape(OpCall& call) {
  like_input_floating(call);
  call.outputs[0].dtype = c10::toRealValueType(call.outputs[0].dtype);
}

void where_shape(OpCall& call) {
  call.outputs.push_back(broadcast_info(call, {"self", "other", "condition"}));
  call.outputs[0].dtype = promoted(call, {"self", "other"});
}

void frexp_shapes(OpCall& call) {
  like_input(call);
  like_input(call);
  call.outputs[1].dtype = at::kInt;
}

// The output and a buffer as large; on GPUs it is of nothing.
void log_sigmoid_shapes(OpCall& call) {
  like_input(call);
  const TensorInfo& self = call.input("self");
  call.outputs.push_back(is_on_gpu(self) ? contiguous_info({0}, self.dtype) : like_info(self));
}

void log_sigmoid(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  for (int d = 0; d < self.ndim(); ++d) {
    out.add({{"self", Shard(d)}}, {Shard(d), is_on_gpu(self) ? Replicate() : Shard(d)});
  }
}

void log_sigmoid_backward(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  for (int d = 0; d < self.ndim(); ++d) {
    out.add({{"grad_output", Shard(d)},
             {"self", Shard(d)},
             {"buffer", is_on_gpu(self) ? Replicate() : Shard(d)}},
            {Shard(d)});
  }
  out.add_linear({{"grad_output"}});
}

// self with a weight that broadcasts to it.
void prelu_gradient_shapes(OpCall& call) {
  call.outputs = {like_info(call.input("self")), like_info(call.input("self"))};
}

}  // namespace

void add_pointwise_rules(RuleTable& table) {
  // --- one operand ---
  table.add({"aten::acos",        "aten::acosh",      "aten::asin",   "aten::atanh",
             "aten::bitwise_not", "aten::celu",       "aten::cos",    "aten::cosh",
             "aten::digamma",     "aten::elu",        "aten::erfinv", "aten::frac",
             "aten::gelu",        "aten::hardshrink", "aten::i0",     "aten::isneginf",
             "aten::isposinf",    "aten::leaky_relu", "aten::lgamma", "aten::log",
             "aten::log10",       "aten::log1p",      "aten::log2",   "aten::mish",
             "aten::polygamma",   "aten::reciprocal", "aten::rsqrt",  "aten::selu",
             "aten::sgn",         "aten::signbit",    "aten::silu",   "aten::sin",
             "aten::sinc",        "aten::softshrink", "aten::sqrt",   "aten::tan",
             "aten::threshold"},
            pointwise());
  // (leaky_relu and celu rise too, unless their numbers are negative.)
  table.add({"aten::asinh", "aten::atan", "aten::ceil", "aten::erf", "aten::exp", "aten::exp2",
             "aten::expm1", "aten::floor", "aten::hardsigmoid", "aten::round", "aten::sigmoid",
             "aten::sign", "aten::sinh", "aten::softplus", "aten::tanh", "aten::trunc"},
            monotone(Monotone::kRising));
  table.add("aten::erfc", monotone(Monotone::kFalling));
  table.add({"aten::special_airy_ai", "aten::special_bessel_j0", "aten::special_bessel_j1",
             "aten::special_bessel_y0", "aten::special_bessel_y1", "aten::special_entr",
             "aten::special_erfcx", "aten::special_i0e", "aten::special_i1", "aten::special_i1e",
             "aten::special_log_ndtr", "aten::special_modified_bessel_i0",
             "aten::special_modified_bessel_i1", "aten::special_modified_bessel_k0",
             "aten::special_modified_bessel_k1", "aten::special_ndtri",
             "aten::special_scaled_modified_bessel_k0", "aten::special_scaled_modified_bessel_k1",
             "aten::special_spherical_bessel_j0"},
            pointwise());
  table.add({"aten::hardswish", "aten::nan_to_num"}, pointwise().shapes(like_input));
  table.add({"aten::hardtanh", "aten::relu"}, monotone(Monotone::kRising).shapes(like_input));
  table.add("aten::abs", pointwise().shapes(like_input_real));
  table.add({"aten::isinf", "aten::isnan", "aten::logical_not"},
            pointwise().shapes(like_input_bool));
  table.add({"aten::logit", "aten::mvlgamma"}, pointwise().shapes(like_input_floating));
  table.add("aten::frexp", pointwise().shapes(frexp_shapes));
  table.add("aten::angle", pointwise().shapes(angle_shape));
  table.add("aten::log_sigmoid_forward", sharded(log_sigmoid).shapes(log_sigmoid_shapes));

  // --- two operands ---
  table.add({"aten::__and__",     "aten::__or__",
             "aten::__xor__",     "aten::__ilshift__",
             "aten::__irshift__", "aten::atan2",
             "aten::bitwise_and", "aten::bitwise_left_shift",
             "aten::bitwise_or",  "aten::bitwise_right_shift",
             "aten::bitwise_xor", "aten::clamp",
             "aten::copysign",    "aten::eq",
             "aten::fmod",        "aten::gcd",
             "aten::ge",          "aten::gt",
             "aten::heaviside",   "aten::hypot",
             "aten::igamma",      "aten::igammac",
             "aten::lcm",         "aten::ldexp",
             "aten::le",          "aten::lt",
             "aten::ne",          "aten::nextafter",
             "aten::pow",         "aten::remainder",
             "aten::xlogy"},
            pointwise());
  table.add({"aten::fmax", "aten::maximum", "aten::clamp_min.Tensor"}, extremum(ReduceOp::kMax));
  table.add({"aten::fmin", "aten::minimum", "aten::clamp_max.Tensor"}, extremum(ReduceOp::kMin));
  table.add({"aten::clamp_max", "aten::clamp_min"}, monotone(Monotone::kRising));
  table.add({"aten::logaddexp", "aten::logaddexp2"}, sharded(rising_in_both));
  table.add({"aten::special_chebyshev_polynomial_t", "aten::special_chebyshev_polynomial_u",
             "aten::special_chebyshev_polynomial_v", "aten::special_chebyshev_polynomial_w",
             "aten::special_hermite_polynomial_h", "aten::special_hermite_polynomial_he",
             "aten::special_laguerre_polynomial_l", "aten::special_legendre_polynomial_p",
             "aten::special_shifted_chebyshev_polynomial_t",
             "aten::special_shifted_chebyshev_polynomial_u",
             "aten::special_shifted_chebyshev_polynomial_v",
             "aten::special_shifted_chebyshev_polynomial_w", "aten::special_xlog1py",
             "aten::special_zeta"},
            pointwise());
  table.add({"aten::logical_and", "aten::logical_or", "aten::logical_xor"},
            pointwise().shapes(broadcast_bool));
  table.add({"aten::complex", "aten::polar"}, pointwise().shapes(broadcast_complex));
  table.add({"aten::__lshift__.Tensor", "aten::__rshift__.Tensor", "aten::floor_divide",
             "aten::_add_relu.Tensor"},
            pointwise().shapes(broadcast));
  table.add({"aten::__lshift__.Scalar", "aten::__rshift__.Scalar", "aten::_add_relu.Scalar"},
            pointwise().shapes(like_input));
  table.add({"aten::floor_divide.Scalar", "aten::remainder.Scalar_Tensor"},
            pointwise().shapes(like_input_promoted));
  table.add("aten::_prelu_kernel", pointwise().shapes(like_input));

  // --- linear ---
  table.add("aten::neg", monotone(Monotone::kFalling, Linearity::kAdditive));
  table.add({"aten::deg2rad", "aten::rad2deg"}, monotone(Monotone::kRising, Linearity::kAdditive));
  table.add({"aten::conj_physical", "aten::_conj_physical"},
            pointwise(Linearity::kAdditive).shapes(like_input));
  table.add({"aten::add", "aten::sub"}, pointwise(Linearity::kAdditive));
  table.add("aten::rsub", pointwise(Linearity::kAdditive).shapes(broadcast));
  // A number is added once, not once per rank.
  table.add({"aten::add.Scalar", "aten::sub.Scalar"}, sharded(add_number));
  table.add("aten::rsub.Scalar", pointwise());
  table.add("aten::mul", pointwise(Linearity::kMultilinear));
  table.add("aten::div", pointwise(Linearity::kFirst));
  // Rounding is not linear.
  table.add({"aten::div.Tensor_mode", "aten::div.Scalar_mode", "aten::div.out_mode"}, pointwise());
  // self + value * a * b, self + value * a / b
  table.add("aten::addcmul", linear_in({{"self", "tensor1"}, {"self", "tensor2"}}));
  table.add("aten::addcdiv", linear_in({{"self", "tensor1"}}));
  // self + weight * (end - self)
  table.add("aten::lerp", linear_in({{"self", "end"}}));

  // --- choices ---
  // The others are made of this one, and of nonzero.
  table.add("aten::where.self", sharded(where).shapes(where_shape));
  table.add("aten::masked_fill.Scalar", sharded(masked_fill));
  table.add("aten::masked_fill.Tensor", linear_in({{"self", "value"}}));

  // --- gradients: linear in the incoming one ---
  table.add({"aten::elu_backward", "aten::gelu_backward", "aten::hardshrink_backward",
             "aten::hardsigmoid_backward", "aten::leaky_relu_backward", "aten::logit_backward",
             "aten::mish_backward", "aten::sigmoid_backward", "aten::silu_backward",
             "aten::softplus_backward", "aten::softshrink_backward", "aten::tanh_backward",
             "aten::rrelu_with_noise_backward", "aten::threshold_backward"},
            pointwise(Linearity::kFirst));
  // A value and a flag.
  table.add("aten::fake_quantize_per_tensor_affine_cachemask", pointwise().shapes([](OpCall& call) {
    like_input(call);
    like_input_bool(call);
  }));
  table.add({"aten::hardswish_backward", "aten::hardtanh_backward"},
            pointwise(Linearity::kFirst).shapes(like_input));
  table.add("aten::log_sigmoid_backward", sharded(log_sigmoid_backward).shapes(like_input));
  table.add("aten::native_dropout_backward", pointwise(Linearity::kFirst).shapes([](OpCall& call) {
    like_input(call);
    at::ScalarType& dtype = call.outputs[0].dtype;
    if (c10::isIntegralType(dtype, /*includeBool=*/true)) {
      dtype = c10::get_default_dtype_as_scalartype();
    }
  }));
  table.add("aten::_prelu_kernel_backward",
            pointwise(Linearity::kFirst).shapes(prelu_gradient_shapes));
}

}  // namespace shardweave::dtensor_internal

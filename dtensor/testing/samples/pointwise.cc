// Elementwise operators.
#include "shardweave/dtensor/testing/samples/families.h"

namespace shardweave::testing {
namespace {

// self, and another one that broadcasts to it.
Operand wide() {
  return in({7, 5});
}
Operand narrow() {
  return in({5});
}
Operand positive(std::vector<int64_t> sizes, double low = 0.5, double high = 3) {
  return in(std::move(sizes)).uniform(low, high);
}
Operand whole_numbers(std::vector<int64_t> sizes, int64_t low = 0, int64_t high = 9) {
  return in(std::move(sizes)).integers(low, high);
}

}  // namespace

std::vector<Sample> pointwise_samples() {
  std::vector<Sample> samples;

  // --- one operand ---
  append(samples, each({"aten::abs",
                        "aten::asinh",
                        "aten::atan",
                        "aten::ceil",
                        "aten::celu",
                        "aten::conj_physical",
                        "aten::cos",
                        "aten::cosh",
                        "aten::deg2rad",
                        "aten::elu",
                        "aten::erf",
                        "aten::erfc",
                        "aten::exp",
                        "aten::exp2",
                        "aten::expm1",
                        "aten::floor",
                        "aten::frac",
                        "aten::gelu",
                        "aten::hardshrink",
                        "aten::hardsigmoid",
                        "aten::hardswish",
                        "aten::hardtanh",
                        "aten::i0",
                        "aten::isinf",
                        "aten::isnan",
                        "aten::isneginf",
                        "aten::isposinf",
                        "aten::leaky_relu",
                        "aten::log_sigmoid_forward",
                        "aten::logical_not",
                        "aten::mish",
                        "aten::nan_to_num",
                        "aten::neg",
                        "aten::rad2deg",
                        "aten::relu",
                        "aten::round",
                        "aten::selu",
                        "aten::sgn",
                        "aten::sigmoid",
                        "aten::sign",
                        "aten::signbit",
                        "aten::silu",
                        "aten::sin",
                        "aten::sinc",
                        "aten::sinh",
                        "aten::softplus",
                        "aten::softshrink",
                        "aten::tan",
                        "aten::tanh",
                        "aten::trunc",
                        "aten::angle",
                        "aten::frexp.Tensor",
                        "aten::positive"},
                       {"", {wide()}}));
  append(samples,
         each({"aten::special_airy_ai", "aten::special_bessel_j0", "aten::special_bessel_j1",
               "aten::special_bessel_y0", "aten::special_bessel_y1", "aten::special_entr",
               "aten::special_erfcx", "aten::special_i0e", "aten::special_i1", "aten::special_i1e",
               "aten::special_log_ndtr", "aten::special_modified_bessel_i0",
               "aten::special_modified_bessel_i1", "aten::special_modified_bessel_k0",
               "aten::special_modified_bessel_k1", "aten::special_scaled_modified_bessel_k0",
               "aten::special_scaled_modified_bessel_k1", "aten::special_spherical_bessel_j0"},
              {"", {positive({5, 3})}, {}, 1e-7}));
  append(samples, each({"aten::acos", "aten::asin", "aten::atanh", "aten::erfinv"},
                       {"", {positive({7, 5}, -0.9, 0.9)}}));
  append(samples,
         each({"aten::digamma", "aten::lgamma", "aten::log", "aten::log10", "aten::log1p",
               "aten::log2", "aten::reciprocal", "aten::rsqrt", "aten::sqrt", "aten::acosh"},
              {"", {positive({7, 5}, 1.1, 3)}}));
  append(samples, each({"aten::logit", "aten::special_ndtri"}, {"", {positive({7, 5}, 0.1, 0.9)}}));
  append(samples, each({"aten::bitwise_not", "aten::neg", "aten::abs", "aten::sign", "aten::relu"},
                       {"", {whole_numbers({7, 5}, -9, 9)}}));
  append(samples, each({"aten::bitwise_not", "aten::logical_not"}, {"", {in({7, 5}).flags()}}));
  append(samples, each({"aten::abs", "aten::angle", "aten::conj_physical", "aten::exp", "aten::neg",
                        "aten::reciprocal", "aten::sgn", "aten::sigmoid", "aten::sqrt",
                        "aten::tanh", "aten::_conj_physical", "aten::isnan"},
                       {"", {in({5, 3}).complex()}}));
  append(samples, {
                      {"aten::mvlgamma", {positive({7, 5}, 3, 5)}, {{"p", 2}}},
                      {"aten::polygamma", {positive({7, 5}, 1, 3)}, {{"n", 1}}},
                      {"aten::round.decimals", {wide()}, {{"decimals", 1}}},
                      {"aten::threshold", {wide()}, {{"threshold", 0.1}, {"value", 2.0}}},
                      {"aten::gelu", {wide()}, {{"approximate", "tanh"}}},
                      {"aten::clamp", {wide()}, {{"min", -0.5}, {"max", 0.7}}},
                      {"aten::clamp_min", {wide()}, {{"min", -0.5}}},
                      {"aten::clamp_max", {wide()}, {{"max", 0.5}}},
                      {"aten::relu", {in({7, 5}).dtype(at::kFloat)}, {}, 1e-5},
                      {"aten::exp", {in({})}},
                      {"aten::exp", {in({1, 3})}},
                      {"aten::neg", {in({3, 5}).transposed()}},
                      {"aten::fake_quantize_per_tensor_affine_cachemask",
                       {in({7, 5}).dtype(at::kFloat)},
                       {{"scale", 0.1}, {"zero_point", 3}, {"quant_min", -8}, {"quant_max", 7}},
                       1e-5},
                  });

  // --- two operands ---
  append(samples, each({"aten::add.Tensor",
                        "aten::sub.Tensor",
                        "aten::mul.Tensor",
                        "aten::rsub.Tensor",
                        "aten::atan2",
                        "aten::copysign.Tensor",
                        "aten::eq.Tensor",
                        "aten::ne.Tensor",
                        "aten::ge.Tensor",
                        "aten::gt.Tensor",
                        "aten::le.Tensor",
                        "aten::lt.Tensor",
                        "aten::fmax",
                        "aten::fmin",
                        "aten::maximum",
                        "aten::minimum",
                        "aten::heaviside",
                        "aten::hypot",
                        "aten::logaddexp",
                        "aten::logaddexp2",
                        "aten::nextafter",
                        "aten::logical_and",
                        "aten::logical_or",
                        "aten::logical_xor",
                        "aten::clamp_min.Tensor",
                        "aten::clamp_max.Tensor",
                        "aten::complex",
                        "aten::polar",
                        "aten::max.other",
                        "aten::min.other",
                        "aten::xlogy.Tensor",
                        "aten::_add_relu.Tensor",
                        "aten::ldexp.Tensor"},
                       {"", {wide(), narrow()}}));
  append(samples,
         each({"aten::add.Tensor", "aten::sub.Tensor", "aten::mul.Tensor", "aten::maximum"},
              {"", {in({7, 1}), in({1, 5})}}));
  append(samples, each({"aten::add.Tensor", "aten::mul.Tensor", "aten::div.Tensor",
                        "aten::pow.Tensor_Tensor", "aten::eq.Tensor", "aten::sub.Tensor"},
                       {"", {in({5, 3}).complex(), in({3}).complex()}}));
  append(samples, each({"aten::div.Tensor", "aten::fmod.Tensor", "aten::remainder.Tensor",
                        "aten::floor_divide", "aten::pow.Tensor_Tensor", "aten::igamma",
                        "aten::igammac", "aten::special_xlog1py", "aten::special_zeta"},
                       {"", {positive({7, 5}, 1.1, 5), positive({5}, 1.1, 3)}}));
  for (const char* mode : {"floor", "trunc"}) {
    append(samples, {{"aten::div.Tensor_mode",
                      {wide(), positive({5})},
                      {{"rounding_mode", std::string(mode)}}}});
  }
  append(samples,
         each({"aten::__and__.Tensor", "aten::__or__.Tensor", "aten::__xor__.Tensor",
               "aten::__lshift__.Tensor", "aten::__rshift__.Tensor", "aten::bitwise_and.Tensor",
               "aten::bitwise_or.Tensor", "aten::bitwise_xor.Tensor",
               "aten::bitwise_left_shift.Tensor", "aten::bitwise_right_shift.Tensor", "aten::gcd",
               "aten::lcm", "aten::add.Tensor", "aten::mul.Tensor", "aten::maximum"},
              {"", {whole_numbers({7, 5}), whole_numbers({5}, 0, 4)}}));
  append(samples, each({"aten::__ilshift__.Tensor", "aten::__irshift__.Tensor"},
                       {"", {whole_numbers({7, 5}), whole_numbers({7, 5}, 0, 4)}}));
  append(samples,
         each({"aten::special_chebyshev_polynomial_t", "aten::special_chebyshev_polynomial_u",
               "aten::special_chebyshev_polynomial_v", "aten::special_chebyshev_polynomial_w",
               "aten::special_hermite_polynomial_h", "aten::special_hermite_polynomial_he",
               "aten::special_laguerre_polynomial_l", "aten::special_legendre_polynomial_p",
               "aten::special_shifted_chebyshev_polynomial_t",
               "aten::special_shifted_chebyshev_polynomial_u",
               "aten::special_shifted_chebyshev_polynomial_v",
               "aten::special_shifted_chebyshev_polynomial_w"},
              {"", {positive({5, 3}, 0.1, 0.9), whole_numbers({3}, 0, 4)}, {}, 1e-7}));

  // --- an operand and a number ---
  append(samples, each({"aten::add.Scalar", "aten::sub.Scalar", "aten::rsub.Scalar",
                        "aten::mul.Scalar", "aten::div.Scalar", "aten::fmod.Scalar",
                        "aten::remainder.Scalar", "aten::floor_divide.Scalar", "aten::eq.Scalar",
                        "aten::ne.Scalar", "aten::ge.Scalar", "aten::gt.Scalar", "aten::le.Scalar",
                        "aten::lt.Scalar", "aten::copysign.Scalar", "aten::xlogy.Scalar_Other",
                        "aten::special_xlog1py.other_scalar", "aten::_add_relu.Scalar"},
                       {"", {wide()}, {{"other", 0.7}}}));
  append(samples, each({"aten::special_zeta.other_scalar"},
                       {"", {positive({7, 5}, 1.1, 3)}, {{"other", 1.7}}}));
  append(samples, each({"aten::xlogy.Scalar_Self", "aten::special_xlog1py.self_scalar",
                        "aten::special_zeta.self_scalar", "aten::remainder.Scalar_Tensor",
                        "aten::pow.Scalar"},
                       {"", {positive({7, 5}, 1.1, 3)}, {{"self", 1.7}}}));
  append(samples,
         each({"aten::bitwise_and.Scalar", "aten::bitwise_or.Scalar", "aten::bitwise_xor.Scalar",
               "aten::bitwise_left_shift.Tensor_Scalar", "aten::bitwise_right_shift.Tensor_Scalar",
               "aten::__and__.Scalar", "aten::__or__.Scalar", "aten::__xor__.Scalar",
               "aten::__lshift__.Scalar", "aten::__rshift__.Scalar", "aten::__ilshift__.Scalar",
               "aten::__irshift__.Scalar"},
              {"", {whole_numbers({7, 5})}, {{"other", 2}}}));
  append(samples, each({"aten::bitwise_and.Scalar_Tensor", "aten::bitwise_or.Scalar_Tensor",
                        "aten::bitwise_xor.Scalar_Tensor", "aten::bitwise_left_shift.Scalar_Tensor",
                        "aten::bitwise_right_shift.Scalar_Tensor"},
                       {"", {whole_numbers({7, 5}, 0, 4)}, {{"self", 6}}}));
  append(samples,
         {
             {"aten::pow.Tensor_Scalar", {wide()}, {{"exponent", 3}}},
             {"aten::div.Scalar_mode", {wide()}, {{"other", 0.7}, {"rounding_mode", "floor"}}},
             {"aten::add.Tensor", {wide(), wide()}, {{"alpha", -0.5}}},
             // What is cast in the operator: of truth values, and of integers that wrap around.
             {"aten::add.Tensor", {in({7, 5}).flags(), narrow()}},
             {"aten::mul.Tensor", {in({7, 5}).flags(), narrow()}},
             {"aten::mul.Tensor", {in({7, 5}).flags(), in({5}).flags()}},
             {"aten::mul.Scalar", {in({7, 5}).flags()}, {{"other", 0.5}}},
             {"aten::mul.Tensor", {in({7, 5}).uniform(0, 90).dtype(at::kChar), narrow()}},
             {"aten::div.Tensor", {in({7, 5}).uniform(0, 90).dtype(at::kChar), positive({5})}},
             {"aten::add.Scalar", {whole_numbers({7, 5})}, {{"other", 2}}},
             {"aten::mul.Scalar", {whole_numbers({7, 5})}, {{"other", 2}}},
             {"aten::add.Scalar", {in({7, 5}).uniform(1, 99).dtype(at::kByte)}, {{"other", 2}}},
             {"aten::clamp.Tensor", {wide(), positive({5}, -1, 0), positive({7, 5}, 0, 1)}},
             {"aten::clamp.Tensor", {wide(), none(), positive({7, 5}, 0, 1)}},
             // lists of special functions of a number and a tensor
         });
  for (const char* name :
       {"chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v",
        "chebyshev_polynomial_w", "hermite_polynomial_h", "hermite_polynomial_he",
        "laguerre_polynomial_l", "legendre_polynomial_p"}) {
    const std::string op = std::string("aten::special_") + name;
    append(samples, {{op + ".n_scalar", {positive({5, 3}, 0.1, 0.9)}, {{"n", 3}}, 1e-7},
                     {op + ".x_scalar", {whole_numbers({5, 3}, 0, 4)}, {{"x", 0.3}}, 1e-7}});
  }

  // --- three operands ---
  append(samples, {
                      {"aten::addcmul", {wide(), wide(), narrow()}, {{"value", 0.5}}},
                      {"aten::addcdiv", {wide(), wide(), positive({5})}, {{"value", 0.5}}},
                      {"aten::lerp.Scalar", {wide(), narrow()}, {{"weight", 0.3}}},
                      {"aten::lerp.Tensor", {wide(), wide(), positive({5}, 0, 1)}},
                      {"aten::where.self", {in({7, 5}).flags(), wide(), narrow()}},
                      {"aten::where.self", {in({5}).flags(), wide(), wide()}},
                      {"aten::where.self", {in({5}).flags(), in({7, 5}).flags(), wide()}},
                      {"aten::masked_fill.Scalar", {wide(), in({5}).flags()}, {{"value", 0.0}}},
                      {"aten::masked_fill.Scalar", {wide(), in({7, 5}).flags()}, {{"value", 2.0}}},
                      {"aten::masked_fill.Tensor", {wide(), in({5}).flags(), in({})}},
                      {"aten::_prelu_kernel", {in({4, 3, 5}), in({1, 3, 1})}},
                  });

  // --- gradients ---
  append(samples, each({"aten::hardsigmoid_backward", "aten::hardswish_backward",
                        "aten::mish_backward", "aten::sigmoid_backward", "aten::silu_backward",
                        "aten::tanh_backward", "aten::gelu_backward", "aten::logit_backward"},
                       {"", {wide(), positive({7, 5}, 0.1, 0.9)}}));
  append(samples,
         {
             {"aten::elu_backward",
              {wide(), wide()},
              {{"alpha", 1.1}, {"scale", 1.0}, {"input_scale", 1.0}, {"is_result", false}}},
             {"aten::hardshrink_backward", {wide(), wide()}, {{"lambd", 0.5}}},
             {"aten::softshrink_backward", {wide(), wide()}, {{"lambd", 0.5}}},
             {"aten::hardtanh_backward", {wide(), wide()}, {{"min_val", -0.5}, {"max_val", 0.5}}},
             {"aten::leaky_relu_backward",
              {wide(), wide()},
              {{"negative_slope", 0.1}, {"self_is_result", false}}},
             {"aten::softplus_backward", {wide(), wide()}, {{"beta", 1}, {"threshold", 20}}},
             {"aten::threshold_backward", {wide(), wide()}, {{"threshold", 0}}},
             {"aten::log_sigmoid_backward", {wide(), wide(), wide()}},
             {"aten::native_dropout_backward", {wide(), in({7, 5}).flags()}, {{"scale", 2.0}}},
             {"aten::_prelu_kernel_backward", {in({4, 3, 5}), in({4, 3, 5}), in({1, 3, 1})}},
             {"aten::rrelu_with_noise_backward",
              {wide(), wide(), positive({7, 5})},
              {{"lower", 0.1}, {"upper", 0.3}, {"training", true}, {"self_is_result", false}}},
         });
  return samples;
}

}  // namespace shardweave::testing

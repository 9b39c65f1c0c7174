// What a random operator draws, as a value: which distribution, of which elements. The host and GPUs
// draw it alike.
//
//   RandomDraw draw = RandomDraw::normal(DType::kBF16, /*mean=*/0, /*std=*/0.02);
//   draw_numbers(draw, PhiloxStream(seed, stream), memory, [&](RunVisitor run) {
//     run(0, 1000);                          // the tensor has elements 0 to 999 of the whole,
//     run(5000, 24);                         // and then 5000 to 5023
//   });
//
// On a GPU: shardweave/dtensor/cuda/random_fill.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/dtensor/engine/philox.h"
#include "shardweave/dtensor/engine/random_arithmetic.h"

namespace shardweave::dtensor_internal {

enum class RandomKind : uint8_t {
  kUniform,        // in [a, b)
  kNormal,         // mean a, standard deviation b
  kLogNormal,      // exp of a normal number with mean a, standard deviation b
  kExponential,    // rate a
  kCauchy,         // median a, half width b
  kGeometric,      // trials up to the first success; a = log(1 - p)
  kBernoulli,      // 1 with probability a, to multiples of 2^-32
  kBernoulliEach,  // 1 with the probability that `each` has for the element
  kIntegers,       // from `from` on, `range` numbers; 0 stands for 2^64
};
inline constexpr int kNumRandomKinds = 9;
// "uniform", "log_normal", "bernoulli_each", ...
std::string_view to_string(RandomKind kind);

struct RandomDraw {
  RandomKind kind = RandomKind::kUniform;
  DType dtype = DType::kF32;
  double a = 0, b = 0;
  int64_t from = 0;
  uint64_t range = 0;
  // Borrowed. Where the elements are, on the host or on the GPU, and laid out as they are.
  const double* each = nullptr;

  static RandomDraw uniform(DType dtype, double from, double to) {
    return {.kind = RandomKind::kUniform, .dtype = dtype, .a = from, .b = to};
  }
  static RandomDraw normal(DType dtype, double mean, double std) {
    return {.kind = RandomKind::kNormal, .dtype = dtype, .a = mean, .b = std};
  }
  static RandomDraw log_normal(DType dtype, double mean, double std) {
    return {.kind = RandomKind::kLogNormal, .dtype = dtype, .a = mean, .b = std};
  }
  static RandomDraw exponential(DType dtype, double rate) {
    return {.kind = RandomKind::kExponential, .dtype = dtype, .a = rate};
  }
  static RandomDraw cauchy(DType dtype, double median, double sigma) {
    return {.kind = RandomKind::kCauchy, .dtype = dtype, .a = median, .b = sigma};
  }
  static RandomDraw geometric(DType dtype, double p);
  static RandomDraw bernoulli(DType dtype, double p) {
    return {.kind = RandomKind::kBernoulli, .dtype = dtype, .a = p};
  }
  static RandomDraw bernoulli_each(DType dtype, const double* each) {
    return {.kind = RandomKind::kBernoulliEach, .dtype = dtype, .each = each};
  }
  // Those below `end`; all there are if from = 0 and end = 0.
  static RandomDraw integers(DType dtype, int64_t from, uint64_t end) {
    return {.kind = RandomKind::kIntegers,
            .dtype = dtype,
            .from = from,
            .range = end - static_cast<uint64_t>(from)};
  }
};

// Whether there are such numbers: of f64, f32, f16 and bf16, and of kinds whose numbers are integers
// also of i64, i32, i16, i8, u8 and bool.
bool can_draw(RandomKind kind, DType dtype);
// "uniform_bf16", "bernoulli_bool": the name of its CUDA kernel.
std::string kernel_name(const RandomDraw& draw);

// Global indices first, first + 1, ... of `count` elements; both >= 0.
using RunVisitor = absl::FunctionRef<void(int64_t first, int64_t count)>;

// Writes to `out`, memory of the host, one element after the other: those of the runs for which
// `runs` calls its argument. Wants can_draw().
void draw_numbers(const RandomDraw& draw, PhiloxStream stream, void* out,
                  absl::FunctionRef<void(RunVisitor)> runs);

// Calls f with the functor of random_arithmetic.h that `draw` describes, and returns true; false if
// there is none.
template <typename F>
bool with_functor(const RandomDraw& draw, F f) {
  namespace functors = random_functors;
  const auto floating = [&](auto make) {
    switch (draw.dtype) {
      case DType::kF64:
        f(make.template operator()<double>());
        return true;
      case DType::kF32:
        f(make.template operator()<float>());
        return true;
      case DType::kF16:
        f(make.template operator()<F16>());
        return true;
      case DType::kBF16:
        f(make.template operator()<BF16>());
        return true;
      default:
        return false;
    }
  };
  const auto any = [&](auto make) {
    switch (draw.dtype) {
      case DType::kI64:
        f(make.template operator()<int64_t>());
        return true;
      case DType::kI32:
        f(make.template operator()<int32_t>());
        return true;
      case DType::kI16:
        f(make.template operator()<int16_t>());
        return true;
      case DType::kI8:
        f(make.template operator()<int8_t>());
        return true;
      case DType::kU8:
        f(make.template operator()<uint8_t>());
        return true;
      case DType::kBool:
        f(make.template operator()<bool>());
        return true;
      default:
        return floating(make);
    }
  };
  switch (draw.kind) {
    case RandomKind::kUniform:
      return floating([&]<typename T>() {
        using Math = OpMath<T>;
        return functors::Uniform<T>{static_cast<Math>(draw.a), static_cast<Math>(draw.b)};
      });
    case RandomKind::kNormal:
      return floating([&]<typename T>() {
        using Math = OpMath<T>;
        return functors::Normal<T>{static_cast<Math>(draw.a), static_cast<Math>(draw.b)};
      });
    case RandomKind::kLogNormal:
      return floating([&]<typename T>() { return functors::LogNormal<T>{draw.a, draw.b}; });
    case RandomKind::kExponential:
      return floating([&]<typename T>() { return functors::Exponential<T>{draw.a}; });
    case RandomKind::kCauchy:
      return floating([&]<typename T>() { return functors::Cauchy<T>{draw.a, draw.b}; });
    case RandomKind::kGeometric:
      return any([&]<typename T>() { return functors::Geometric<T>{draw.a}; });
    case RandomKind::kBernoulli: {
      // NOLINTNEXTLINE(bugprone-incorrect-roundings): it is not negative.
      const uint64_t threshold = static_cast<uint64_t>(draw.a * 0x1p32 + 0.5);
      return any([&]<typename T>() { return functors::Bernoulli<T>{threshold}; });
    }
    case RandomKind::kBernoulliEach:
      return any([&]<typename T>() { return functors::BernoulliEach<T>{draw.each}; });
    case RandomKind::kIntegers:
      return any([&]<typename T>() { return functors::Integers<T>{draw.from, draw.range}; });
  }
  return false;
}

}  // namespace shardweave::dtensor_internal

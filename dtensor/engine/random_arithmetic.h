// The arithmetic of random numbers, one text for the host and for CUDA's kernels: the same numbers,
// bit for bit, wherever an element is drawn.
//
//   uint32_t words[4];
//   philox_block(seed, stream, /*block=*/7, words);
//   float numbers[4];
//   numbers_of_block(words, numbers);                       // normal, by Box and Muller
//   random_functors::Normal<BF16> scaled{.mean = 0, .std = 0.02f};
//   BF16 x = scaled(numbers[0], 0);                          // what an element of the tensor becomes
//
// Which is number n of a stream: numbers lie in groups of four blocks. Of 32 bits and float, n is
// number n / 4 % 4 of block n / 16 * 4 + n % 4; of 64 bits and double, n / 4 % 2 of n / 8 * 4 + n % 4.
//
// Bits are equal because all of it is IEEE's additions, multiplications, divisions and square roots,
// each rounded by itself: whoever includes this compiles without fused multiplications (GCC:
// -ffp-contract=off; nvcc: -fmad=false) and calls no function of a mathematical library.
//
// log_of, exp_of and sin_cos_of_quarters follow fdlibm: Copyright (C) 1993 by Sun Microsystems, Inc.
// All rights reserved. Developed at SunPro, a Sun Microsystems, Inc. business. Permission to use,
// copy, modify, and distribute this software is freely granted, provided that this notice is
// preserved.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#if defined(__CUDACC__)
#define SHARDWEAVE_EVERYWHERE __host__ __device__ __forceinline__
#else
#define SHARDWEAVE_EVERYWHERE inline __attribute__((always_inline))
#endif

namespace shardweave::dtensor_internal {

template <typename To, typename From>
SHARDWEAVE_EVERYWHERE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// --- one number at a time, or several ------------------------------------------------------------
// The functions of `Lanes` below work on its types. Here they are single numbers; philox.cc has
// vectors.

struct OneLane {
  using I32 = int32_t;
  using F32 = float;
  using U64 = uint64_t;
  using F64 = double;

  static SHARDWEAVE_EVERYWHERE F32 to_float(I32 x) { return static_cast<F32>(x); }
  // Towards zero.
  static SHARDWEAVE_EVERYWHERE I32 to_int(F32 x) { return static_cast<I32>(x); }
  static SHARDWEAVE_EVERYWHERE F32 square_root(F32 x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return std::sqrt(x);
#endif
  }
  static SHARDWEAVE_EVERYWHERE F64 square_root(F64 x) {
#if defined(__CUDA_ARCH__)
    return __dsqrt_rn(x);
#else
    return std::sqrt(x);
#endif
  }
};

// --- Philox4x32-10 -------------------------------------------------------------------------------

// Ten rounds. multiply(factor, x, high, low) gives the halves of the product of 32 by 32 bits.
template <typename Word, typename Multiply>
SHARDWEAVE_EVERYWHERE void philox_rounds(uint64_t seed, Word (&x)[4], Multiply multiply) {
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    Word high0, low0, high1, low1;
    multiply(uint32_t{0xD2511F53}, x[0], high0, low0);
    multiply(uint32_t{0xCD9E8D57}, x[2], high1, low1);
    x[0] = high1 ^ x[1] ^ key0;
    x[1] = low1;
    x[2] = high0 ^ x[3] ^ key1;
    x[3] = low0;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

struct MultiplyWords {
  SHARDWEAVE_EVERYWHERE void operator()(uint32_t factor, uint32_t x, uint32_t& high,
                                        uint32_t& low) const {
    const uint64_t product = static_cast<uint64_t>(factor) * x;
    high = static_cast<uint32_t>(product >> 32);
    low = static_cast<uint32_t>(product);
  }
};

SHARDWEAVE_EVERYWHERE void philox_block(uint64_t seed, uint64_t stream, uint64_t block,
                                        uint32_t (&words)[4]) {
  words[0] = static_cast<uint32_t>(block);
  words[1] = static_cast<uint32_t>(block >> 32);
  words[2] = static_cast<uint32_t>(stream);
  words[3] = static_cast<uint32_t>(stream >> 32);
  philox_rounds(seed, words, MultiplyWords());
}

// --- functions of float --------------------------------------------------------------------------

// -2 log(u) of u in (0, 1]. The logarithm is that of Cephes (logf): a polynomial on [sqrt(1/2),
// sqrt(2)).
template <typename Lanes>
SHARDWEAVE_EVERYWHERE typename Lanes::F32 minus_two_log(typename Lanes::F32 u) {
  using I32 = typename Lanes::I32;
  using F32 = typename Lanes::F32;
  const I32 bits = bits_as<I32>(u);
  // u = m * 2^e with m in [sqrt(1/2), sqrt(2)).
  const I32 e = (bits - 0x3F3504F3) >> 23;
  const I32 mantissa = bits - (e << 23);
  const F32 m = bits_as<F32>(mantissa);
  const F32 x = m - 1.0f;
  const F32 x2 = x * x;
  F32 p = x * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * x + 1.1676998740e-1f;
  p = p * x - 1.2420140846e-1f;
  p = p * x + 1.4249322787e-1f;
  p = p * x - 1.6668057665e-1f;
  p = p * x + 2.0000714765e-1f;
  p = p * x - 2.4999993993e-1f;
  p = p * x + 3.3333331174e-1f;
  const F32 exponent = Lanes::to_float(e);
  const F32 tail = x2 * x * p + exponent * -2.12194440e-4f - 0.5f * x2;
  return -2.0f * (x + tail + exponent * 0.693359375f);
}

// Sine and cosine of a full turn times `turn` in [0, 1): polynomials of Cephes (sinf, cosf) on an
// eighth.
template <typename Lanes>
SHARDWEAVE_EVERYWHERE void sin_cos_of_turn(typename Lanes::F32 turn, typename Lanes::F32& sine,
                                           typename Lanes::F32& cosine) {
  using I32 = typename Lanes::I32;
  using F32 = typename Lanes::F32;
  const I32 quarter = Lanes::to_int(turn * 4.0f + 0.5f);
  const F32 a = (turn * 4.0f - Lanes::to_float(quarter)) * 1.57079632679f;
  const F32 z = a * a;
  F32 s = z * -1.9515295891e-4f + 8.3321608736e-3f;
  s = (s * z - 1.6666654611e-1f) * z * a + a;
  F32 c = z * 2.443315711809948e-5f - 1.388731625493765e-3f;
  c = (c * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1.0f;
  const auto swap = (quarter & 1) != 0;
  sine = swap ? c : s;
  cosine = swap ? s : c;
  sine = (quarter & 2) != 0 ? -sine : sine;
  cosine = ((quarter + 1) & 2) != 0 ? -cosine : cosine;
}

// Box and Muller: two words, as numbers without their lowest bits, give two normal numbers.
template <typename Lanes>
SHARDWEAVE_EVERYWHERE void box_muller(typename Lanes::I32 word0_shifted_by_1,
                                      typename Lanes::I32 word1_shifted_by_8,
                                      typename Lanes::F32& first, typename Lanes::F32& second) {
  using F32 = typename Lanes::F32;
  const F32 u = (Lanes::to_float(word0_shifted_by_1) + 0.5f) * 0x1p-31f;
  const F32 turn = Lanes::to_float(word1_shifted_by_8) * 0x1p-24f;
  const F32 radius = Lanes::square_root(minus_two_log<Lanes>(u));
  F32 sine, cosine;
  sin_cos_of_turn<Lanes>(turn, sine, cosine);
  first = cosine * radius;
  second = sine * radius;
}

// --- functions of double -------------------------------------------------------------------------

// In (0, 1), both ends excluded: 2^-52 times (the upper 52 bits plus a half). Exact.
template <typename Lanes>
SHARDWEAVE_EVERYWHERE typename Lanes::F64 open_unit(typename Lanes::U64 bits) {
  using U64 = typename Lanes::U64;
  using F64 = typename Lanes::F64;
  const U64 one_and = (bits >> 12) | uint64_t{0x3FF0000000000000};
  return bits_as<F64>(one_and) - 1.0 + 0x1p-53;
}

// log(x) of a positive number that is not subnormal, to one unit in the last place.
template <typename Lanes>
SHARDWEAVE_EVERYWHERE typename Lanes::F64 log_of(typename Lanes::F64 x) {
  using U64 = typename Lanes::U64;
  using F64 = typename Lanes::F64;
  constexpr uint64_t kOne = 0x3FF0000000000000, kRootOfHalf = 0x3FE6A09E667F3BCD;
  const U64 bits = bits_as<U64>(x);
  // x = m * 2^k with m in [sqrt(1/2), sqrt(2)). The exponent becomes a number as the last bits of
  // one above 2^52: there are instructions for that everywhere.
  const U64 biased = (bits + (kOne - kRootOfHalf)) >> 52;
  const U64 mantissa = bits - (biased << 52) + kOne;
  const U64 above = biased | uint64_t{0x4330000000000000};
  const F64 k = bits_as<F64>(above) - (0x1p52 + 1023.0);
  const F64 f = bits_as<F64>(mantissa) - 1.0;
  const F64 half_square = 0.5 * f * f;
  const F64 s = f / (2.0 + f);
  const F64 z = s * s;
  const F64 w = z * z;
  const F64 even = w * (3.999999999940941908e-01 +
                        w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const F64 odd = z * (6.666666666666735130e-01 +
                       w * (2.857142874366239149e-01 +
                            w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  return s * (half_square + (even + odd)) + k * 1.90821492927058770002e-10 - half_square + f +
         k * 6.93147180369123816490e-01;
}

// Sine and cosine of `quarters` quarter turns, of at most 2^50.
template <typename Lanes>
SHARDWEAVE_EVERYWHERE void sin_cos_of_quarters(typename Lanes::F64 quarters,
                                               typename Lanes::F64& sine,
                                               typename Lanes::F64& cosine) {
  using U64 = typename Lanes::U64;
  using F64 = typename Lanes::F64;
  // The nearest integer, whose last bits are those of a number above 2^52.
  const F64 above = quarters + 0x1.8p52;
  const U64 quarter = bits_as<U64>(above);
  const F64 a = (quarters - (above - 0x1.8p52)) * 1.57079632679489661923;
  const F64 z = a * a;
  const F64 s_tail =
      -1.66666666666666324348e-01 +
      z * (8.33333333332248946124e-03 +
           z * (-1.98412698298579493134e-04 +
                z * (2.75573137070700676789e-06 +
                     z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10))));
  const F64 s = a + (z * a) * s_tail;
  const F64 c_tail =
      z * (4.16666666666666019037e-02 +
           z * (-1.38888888888741095749e-03 +
                z * (2.48015872894767294178e-05 +
                     z * (-2.75573143513906633035e-07 +
                          z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11)))));
  const F64 half = 0.5 * z;
  const F64 w = 1.0 - half;
  const F64 c = w + (((1.0 - w) - half) + z * c_tail);
  // Swapped in odd quarters; the signs are the upper bits.
  const U64 s_bits = bits_as<U64>(s);
  const U64 c_bits = bits_as<U64>(c);
  const U64 swap = uint64_t{0} - (quarter & uint64_t{1});
  const U64 sine_bits = ((s_bits & ~swap) | (c_bits & swap)) ^ ((quarter & uint64_t{2}) << 62);
  const U64 cosine_bits =
      ((c_bits & ~swap) | (s_bits & swap)) ^ (((quarter + uint64_t{1}) & uint64_t{2}) << 62);
  sine = bits_as<F64>(sine_bits);
  cosine = bits_as<F64>(cosine_bits);
}

// Box and Muller: two numbers of 64 bits give two normal numbers.
template <typename Lanes>
SHARDWEAVE_EVERYWHERE void box_muller(typename Lanes::U64 bits0, typename Lanes::U64 bits1,
                                      typename Lanes::F64& first, typename Lanes::F64& second) {
  using U64 = typename Lanes::U64;
  using F64 = typename Lanes::F64;
  const F64 radius = Lanes::square_root(-2.0 * log_of<Lanes>(open_unit<Lanes>(bits0)));
  // The upper 53 bits, as a number in [0, 1): 52 of them and then the last.
  const U64 one_and = (bits1 >> 12) | uint64_t{0x3FF0000000000000};
  const U64 last = (uint64_t{0} - ((bits1 >> 11) & uint64_t{1})) & uint64_t{0x3CA0000000000000};
  const F64 turn = bits_as<F64>(one_and) - 1.0 + bits_as<F64>(last);
  F64 sine, cosine;
  sin_cos_of_quarters<Lanes>(turn * 4.0, sine, cosine);
  first = radius * cosine;
  second = radius * sine;
}

// exp(x), to one unit in the last place; infinity and 0 where it has to be.
SHARDWEAVE_EVERYWHERE double exp_of(double x) {
  if (x > 710) x = 710;
  if (x < -746) x = -746;
  const double above = x * 1.44269504088896338700e+00 + 0x1.8p52;
  const double k = above - 0x1.8p52;
  const int64_t e = static_cast<int64_t>(bits_as<uint64_t>(above) - bits_as<uint64_t>(0x1.8p52));
  const double high = x - k * 6.93147180369123816490e-01;
  const double low = k * 1.90821492927058770002e-10;
  const double r = high - low;
  const double t = r * r;
  const double c =
      r - t * (1.66666666666666019037e-01 +
               t * (-2.77777777770155933842e-03 +
                    t * (6.61375632143793436117e-05 +
                         t * (-1.65339022054652515390e-06 + t * 4.13813679705723846039e-08))));
  const double y = 1.0 - ((low - (r * c) / (2.0 - c)) - high);
  // 2^e in two steps, the first of which is exact.
  const int64_t first = e / 2;
  const uint64_t one = 0x3FF0000000000000;
  return y * bits_as<double>(one + (static_cast<uint64_t>(first) << 52)) *
         bits_as<double>(one + (static_cast<uint64_t>(e - first) << 52));
}

// --- the numbers of a block ----------------------------------------------------------------------

SHARDWEAVE_EVERYWHERE void numbers_of_block(const uint32_t (&words)[4], uint32_t (&numbers)[4]) {
  for (int i = 0; i < 4; ++i) numbers[i] = words[i];
}
SHARDWEAVE_EVERYWHERE void numbers_of_block(const uint32_t (&words)[4], uint64_t (&numbers)[2]) {
  for (int64_t i = 0; i < 2; ++i) {
    numbers[i] = static_cast<uint64_t>(words[2 * i]) << 32 | words[2 * i + 1];
  }
}
SHARDWEAVE_EVERYWHERE void numbers_of_block(const uint32_t (&words)[4], float (&numbers)[4]) {
  for (int i = 0; i < 4; i += 2) {
    box_muller<OneLane>(static_cast<int32_t>(words[i] >> 1),
                        static_cast<int32_t>(words[i + 1] >> 8), numbers[i], numbers[i + 1]);
  }
}
SHARDWEAVE_EVERYWHERE void numbers_of_block(const uint32_t (&words)[4], double (&numbers)[2]) {
  uint64_t bits[2];
  numbers_of_block(words, bits);
  box_muller<OneLane>(bits[0], bits[1], numbers[0], numbers[1]);
}

// --- element types -------------------------------------------------------------------------------

// Half precision, as at::Half has it: rounded to the nearest, ties to even.
struct F16 {
  uint16_t bits;

  F16() = default;
  explicit SHARDWEAVE_EVERYWHERE F16(float value) {
    const uint32_t all = bits_as<uint32_t>(value);
    const uint32_t sign = all >> 16 & 0x8000;
    const uint32_t size = all & 0x7FFFFFFF;
    uint32_t half;
    if (size > 0x7F800000) {
      half = 0x7E00;  // NaN
    } else if (size >= 0x477FF000) {
      half = 0x7C00;
    } else if (size < 0x38800000) {
      // Subnormal: an addition rounds where the last bit is to be.
      half = bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - bits_as<uint32_t>(0.5f);
    } else {
      half = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
    }
    bits = static_cast<uint16_t>(sign | half);
  }
  explicit SHARDWEAVE_EVERYWHERE operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t size = bits & 0x7FFF;
    uint32_t all;
    if (size >= 0x7C00) {
      all = size << 13 | 0x7F800000;
    } else if (size < 0x400) {
      all = bits_as<uint32_t>(static_cast<float>(static_cast<int32_t>(size)) * 0x1p-24f);
    } else {
      all = (size << 13) + 0x38000000;
    }
    return bits_as<float>(sign | all);
  }
};

// The upper half of a float, as at::BFloat16 has it: rounded to the nearest, ties to even.
struct BF16 {
  uint16_t bits;

  BF16() = default;
  explicit SHARDWEAVE_EVERYWHERE BF16(float value) {
    const uint32_t all = bits_as<uint32_t>(value);
    bits = (all & 0x7FFFFFFF) > 0x7F800000
               ? uint16_t{0x7FC0}
               : static_cast<uint16_t>((all + 0x7FFF + (all >> 16 & 1)) >> 16);
  }
  explicit SHARDWEAVE_EVERYWHERE operator float() const {
    return bits_as<float>(static_cast<uint32_t>(bits) << 16);
  }
};

template <typename T>
inline constexpr bool is_16_bit_float_v = std::is_same_v<T, F16> || std::is_same_v<T, BF16>;

// Digits of the significand.
template <typename T>
inline constexpr int kDigits = std::numeric_limits<T>::digits;
template <>
inline constexpr int kDigits<F16> = 11;
template <>
inline constexpr int kDigits<BF16> = 8;

// What elements of type T are computed in.
template <typename T>
using OpMath = std::conditional_t<std::is_same_v<T, double>, double, float>;

// As LibTorch converts. Integers take what is beyond them modulo their size.
template <typename T>
SHARDWEAVE_EVERYWHERE T element_of(double x) {
  if constexpr (is_16_bit_float_v<T>) {
    return T(static_cast<float>(x));
  } else if constexpr (std::is_same_v<T, bool>) {
    return x != 0;
  } else if constexpr (std::is_integral_v<T>) {
    const int64_t i = x >= 0x1p63 ? INT64_MAX : x >= -0x1p63 ? static_cast<int64_t>(x) : INT64_MIN;
    return static_cast<T>(i);
  } else {
    return static_cast<T>(x);
  }
}
template <typename T>
SHARDWEAVE_EVERYWHERE T element_of(int64_t x) {
  if constexpr (is_16_bit_float_v<T>) {
    return T(static_cast<float>(x));
  } else if constexpr (std::is_same_v<T, bool>) {
    return x != 0;
  } else {
    return static_cast<T>(x);
  }
}
template <typename T>
SHARDWEAVE_EVERYWHERE T element_of(bool x) {
  if constexpr (is_16_bit_float_v<T>) {
    return T(x ? 1.0f : 0.0f);
  } else {
    return static_cast<T>(x);
  }
}

// --- from the numbers of a stream to what was asked for ------------------------------------------
// Number: which numbers of the stream: uint32_t and uint64_t for bits, float and double for normal
// ones. (number, at) gives the element, which is element `at` of its tensor in memory.

namespace random_functors {

// In [from, to), with as many random digits as T has.
template <typename T>
struct Uniform {
  using Element = T;
  using Math = OpMath<T>;
  using Number = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;
  Math from, to;

  SHARDWEAVE_EVERYWHERE T operator()(Number bits, int64_t) const {
    constexpr int kShift = static_cast<int>(sizeof(Number)) * 8 - kDigits<T>;
    constexpr Math kUnit = Math{1} / static_cast<Math>(uint64_t{1} << kDigits<T>);
    const T x = static_cast<T>(static_cast<Math>(bits >> kShift) * kUnit * (to - from) + from);
    return static_cast<Math>(x) < to ? x : static_cast<T>(from);  // rounded up to the end
  }
};

template <typename T>
struct Normal {
  using Element = T;
  using Number = OpMath<T>;
  Number mean, std;

  SHARDWEAVE_EVERYWHERE T operator()(Number z, int64_t) const {
    return static_cast<T>(z * std + mean);
  }
};

template <typename T>
struct LogNormal {
  using Element = T;
  using Number = double;
  double mean, std;

  SHARDWEAVE_EVERYWHERE T operator()(double z, int64_t) const {
    return element_of<T>(exp_of(z * std + mean));
  }
};

template <typename T>
struct Exponential {
  using Element = T;
  using Number = uint64_t;
  double rate;

  SHARDWEAVE_EVERYWHERE T operator()(uint64_t bits, int64_t) const {
    return element_of<T>(-log_of<OneLane>(open_unit<OneLane>(bits)) / rate);
  }
};

template <typename T>
struct Cauchy {
  using Element = T;
  using Number = uint64_t;
  double median, sigma;

  SHARDWEAVE_EVERYWHERE T operator()(uint64_t bits, int64_t) const {
    // tan(pi * (u - 1/2))
    double sine, cosine;
    sin_cos_of_quarters<OneLane>((open_unit<OneLane>(bits) - 0.5) * 2, sine, cosine);
    return element_of<T>(median + sigma * (sine / cosine));
  }
};

// The number of trials up to the first success. log_failure = log(1 - p).
template <typename T>
struct Geometric {
  using Element = T;
  using Number = uint64_t;
  double log_failure;

  SHARDWEAVE_EVERYWHERE T operator()(uint64_t bits, int64_t) const {
    const double trials = log_of<OneLane>(open_unit<OneLane>(bits)) / log_failure;
    return element_of<T>(trials < 1 ? 1.0 : std::ceil(trials));
  }
};

// 1 with a probability of threshold / 2^32.
template <typename T>
struct Bernoulli {
  using Element = T;
  using Number = uint32_t;
  uint64_t threshold;

  SHARDWEAVE_EVERYWHERE T operator()(uint32_t bits, int64_t) const {
    return element_of<T>(bits < threshold);
  }
};

// 1 with the probability that `each`, laid out as the tensor, has for this element.
template <typename T>
struct BernoulliEach {
  using Element = T;
  using Number = uint32_t;
  const double* each;

  SHARDWEAVE_EVERYWHERE T operator()(uint32_t bits, int64_t at) const {
    return element_of<T>(static_cast<double>(bits) * 0x1p-32 < each[at]);
  }
};

// From `from` on, `range` numbers; 0 stands for 2^64.
template <typename T>
struct Integers {
  using Element = T;
  using Number = uint64_t;
  int64_t from;
  uint64_t range;

  SHARDWEAVE_EVERYWHERE T operator()(uint64_t bits, int64_t) const {
    const uint64_t i =
        range == 0 ? bits
                   : static_cast<uint64_t>((static_cast<unsigned __int128>(bits) * range) >> 64);
    return element_of<T>(static_cast<int64_t>(static_cast<uint64_t>(from) + i));
  }
};

}  // namespace random_functors
}  // namespace shardweave::dtensor_internal

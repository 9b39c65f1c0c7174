#include "shardweave/comm/reduction.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

namespace shardweave {
namespace {

// Each kind of element is a struct: Stored in memory, Accumulator while reducing.

template <typename T>
struct Number {
  using Stored = T;
  using Accumulator = T;
  static T load(T x) { return x; }
  static T store(T x) { return x; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Accumulator = float;
  static float load(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
  static uint16_t store(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded =
        (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    const uint32_t quiet = (bits >> 16) | 0x40;      // rounding could carry a NaN to infinity
    return static_cast<uint16_t>(x != x ? quiet : rounded);
  }
};

// Without branches and with signed numbers only, which the SIMD units of all x86-64 can compare.
struct Float16 {
  using Stored = uint16_t;
  using Accumulator = float;
  static int32_t mask_if_less(int32_t a, int32_t b) { return (a - b) >> 31; }  // all ones, or 0
  static int32_t select(int32_t mask, int32_t a, int32_t b) { return (a & mask) | (b & ~mask); }

  // A float's exponent and mantissa hold a half's, shifted; a multiplication by 2^112 fixes the
  // bias, and makes normal numbers of the subnormal ones (F. Giesen, "half_to_float_fast5").
  static float load(uint16_t x) {
    const int32_t magnitude = (x & 0x7fff) << 13;
    const int32_t scaled = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    const int32_t infinity_or_nan = mask_if_less(0x0f7fffff, magnitude) & 0x7f800000;
    return std::bit_cast<float>(scaled | infinity_or_nan | (x & 0x8000) << 16);
  }
  // Rounds to nearest, ties to even (F. Giesen, "float_to_half_fast3_rtne").
  static uint16_t store(float x) {
    const int32_t all = std::bit_cast<int32_t>(x);
    const int32_t bits = all & 0x7fffffff;
    // Subnormal halves: adding this constant lets the float unit do the rounding at the right bit.
    constexpr int32_t kMagic = (127 - 15 + 23 - 10 + 1) << 23;
    const int32_t subnormal =
        std::bit_cast<int32_t>(std::bit_cast<float>(bits) + std::bit_cast<float>(kMagic)) - kMagic;
    const int32_t normal = (bits - (112 << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
    const int32_t overflow = select(mask_if_less(0x7f800000, bits), 0x7e00, 0x7c00);
    const int32_t finite = select(mask_if_less(bits, 113 << 23), subnormal, normal);
    const int32_t half = select(mask_if_less(bits, 143 << 23), finite, overflow);
    return static_cast<uint16_t>(half | ((all >> 16) & 0x8000));
  }
};

struct Bool {
  using Stored = uint8_t;
  using Accumulator = uint8_t;
  static uint8_t load(uint8_t x) { return x != 0; }
  static uint8_t store(uint8_t x) { return x; }
};

// Integers wrap around: computed without sign, and never promoted to a signed int that could
// overflow.
template <typename T, bool = std::is_integral_v<T>>
struct Wrapping {
  using Type = T;
};
template <typename T>
struct Wrapping<T, true> {
  using Type = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
};

// What an average is divided in: the number of ranks may be more than a small integer holds.
template <typename T>
struct Quotient {
  using Type = std::conditional_t<std::is_floating_point_v<T> || sizeof(T) >= 4, T, int32_t>;
};

struct Sum {
  template <typename T>
  static T combine(T a, T b) {
    using W = typename Wrapping<T>::Type;
    return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
  }
};
struct Product {
  template <typename T>
  static T combine(T a, T b) {
    using W = typename Wrapping<T>::Type;
    return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
  }
};
// `a` wins if it is NaN, and `b` if that is: no comparison with NaN is true.
struct Min {
  template <typename T>
  static T combine(T a, T b) {
    return a < b || a != a ? a : b;  // NOLINT(misc-redundant-expression): NaN
  }
};
struct Max {
  template <typename T>
  static T combine(T a, T b) {
    return a > b || a != a ? a : b;  // NOLINT(misc-redundant-expression): NaN
  }
};

// The accumulators of one block stay in the first-level cache while the ranks' inputs go by.
constexpr int64_t kBlockBytes = 4096;

// Functions that are not inlined: so the compiler believes __restrict, and makes SIMD code of the
// loops.
template <typename Element, typename Op>
struct Block {
  using Stored = typename Element::Stored;
  using Accumulator = typename Element::Accumulator;
  static constexpr int64_t kCount = kBlockBytes / sizeof(Accumulator);

  [[gnu::noinline]] static void load(const Stored* __restrict in, Accumulator* __restrict sum,
                                     int64_t n) {
    for (int64_t i = 0; i < n; ++i) sum[i] = Element::load(in[i]);
  }
  [[gnu::noinline]] static void combine(const Stored* __restrict in, Accumulator* __restrict sum,
                                        int64_t n) {
    for (int64_t i = 0; i < n; ++i) sum[i] = Op::combine(sum[i], Element::load(in[i]));
  }
  [[gnu::noinline]] static void divide(Accumulator* __restrict sum, int64_t n, size_t by) {
    const auto divisor = static_cast<typename Quotient<Accumulator>::Type>(by);
    for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<Accumulator>(sum[i] / divisor);
  }
  [[gnu::noinline]] static void store(const Accumulator* __restrict sum, Stored* __restrict out,
                                      int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = Element::store(sum[i]);
  }
};

template <typename Element, typename Op>
void reduce_blocks(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   int64_t count, bool average) {
  using B = Block<Element, Op>;
  using Stored = typename B::Stored;
  alignas(64) typename B::Accumulator sum[B::kCount];
  for (int64_t begin = 0; begin < count; begin += B::kCount) {
    const int64_t n = std::min(B::kCount, count - begin);
    B::load(static_cast<const Stored*>(inputs[0]) + begin, sum, n);
    for (const void* input : inputs.subspan(1)) {
      B::combine(static_cast<const Stored*>(input) + begin, sum, n);
    }
    if (average) B::divide(sum, n, inputs.size());
    // All inputs have been read: now an output may be one of them.
    Stored* const first = static_cast<Stored*>(outputs[0]) + begin;
    B::store(sum, first, n);
    for (void* output : outputs.subspan(1)) {
      std::memcpy(static_cast<Stored*>(output) + begin, first, n * sizeof(Stored));
    }
  }
}

template <typename Element>
void reduce_elements(ReduceOp op, absl::Span<const void* const> inputs,
                     absl::Span<void* const> outputs, int64_t count) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_blocks<Element, Sum>(inputs, outputs, count, false);
    case ReduceOp::kAvg:
      return reduce_blocks<Element, Sum>(inputs, outputs, count, true);
    case ReduceOp::kMin:
      return reduce_blocks<Element, Min>(inputs, outputs, count, false);
    case ReduceOp::kMax:
      return reduce_blocks<Element, Max>(inputs, outputs, count, false);
    case ReduceOp::kProduct:
      return reduce_blocks<Element, Product>(inputs, outputs, count, false);
  }
}

}  // namespace

bool is_reduction_defined(DType dtype, ReduceOp op) {
  if (dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2) return false;
  return dtype != DType::kBool || op != ReduceOp::kAvg;
}

void reduce_ranks(DType dtype, ReduceOp op, absl::Span<const void* const> inputs,
                  absl::Span<void* const> outputs, int64_t count) {
  switch (dtype) {
    case DType::kF64:
      return reduce_elements<Number<double>>(op, inputs, outputs, count);
    case DType::kF32:
      return reduce_elements<Number<float>>(op, inputs, outputs, count);
    case DType::kF16:
      return reduce_elements<Float16>(op, inputs, outputs, count);
    case DType::kBF16:
      return reduce_elements<BFloat16>(op, inputs, outputs, count);
    case DType::kI64:
      return reduce_elements<Number<int64_t>>(op, inputs, outputs, count);
    case DType::kI32:
      return reduce_elements<Number<int32_t>>(op, inputs, outputs, count);
    case DType::kI16:
      return reduce_elements<Number<int16_t>>(op, inputs, outputs, count);
    case DType::kI8:
      return reduce_elements<Number<int8_t>>(op, inputs, outputs, count);
    case DType::kU64:
      return reduce_elements<Number<uint64_t>>(op, inputs, outputs, count);
    case DType::kU32:
      return reduce_elements<Number<uint32_t>>(op, inputs, outputs, count);
    case DType::kU16:
      return reduce_elements<Number<uint16_t>>(op, inputs, outputs, count);
    case DType::kU8:
      return reduce_elements<Number<uint8_t>>(op, inputs, outputs, count);
    case DType::kBool: {
      // On 0 and 1, or and and are the larger and the smaller; a sum would wrap around at 256
      // ranks.
      const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax;
      return reduce_elements<Bool>(any ? ReduceOp::kMax : ReduceOp::kMin, inputs, outputs, count);
    }
    case DType::kF8E4M3:
    case DType::kF8E5M2:
      return;
  }
}

}  // namespace shardweave

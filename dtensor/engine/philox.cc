#include "shardweave/dtensor/engine/philox.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define SHARDWEAVE_INLINE inline __attribute__((always_inline))

namespace shardweave::dtensor_internal {
namespace {

constexpr int kBlocks = PhiloxStream::kBlocks;
using Group = PhiloxStream::Group;

// One element per block, in GCC's and Clang's portable vectors: a register of SSE2, which every x86
// has.
using U32s = uint32_t __attribute__((vector_size(4 * kBlocks)));
using I32s = int32_t __attribute__((vector_size(4 * kBlocks)));
using F32s = float __attribute__((vector_size(4 * kBlocks)));

constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;

// Products of 32 by 32 bits.
SHARDWEAVE_INLINE void multiply(uint32_t factor, const U32s& x, U32s& high, U32s& low) {
#if defined(__SSE2__)
  const __m128i factors = _mm_set1_epi32(static_cast<int>(factor));
  const __m128i low_half = _mm_set1_epi64x(0xFFFFFFFF);
  const __m128i even = _mm_mul_epu32(__m128i(x), factors);
  const __m128i odd = _mm_mul_epu32(_mm_srli_epi64(__m128i(x), 32), factors);
  low = U32s(_mm_or_si128(_mm_and_si128(even, low_half), _mm_slli_epi64(odd, 32)));
  high = U32s(_mm_or_si128(_mm_srli_epi64(even, 32), _mm_andnot_si128(low_half, odd)));
#else
  for (int b = 0; b < kBlocks; ++b) {
    const uint64_t product = static_cast<uint64_t>(factor) * x[b];
    high[b] = static_cast<uint32_t>(product >> 32);
    low[b] = static_cast<uint32_t>(product);
  }
#endif
}

// Words of blocks kBlocks * group, kBlocks * group + 1, ... of a stream.
SHARDWEAVE_INLINE void make_group(uint64_t seed, uint64_t stream, int64_t group, Group& words) {
  const uint64_t block = static_cast<uint64_t>(group) * kBlocks;
  U32s x0 = {0, 1, 2, 3};
  x0 += static_cast<uint32_t>(block);  // no carry: kBlocks divides 2^32
  U32s x1 = U32s{} + static_cast<uint32_t>(block >> 32);
  U32s x2 = U32s{} + static_cast<uint32_t>(stream);
  U32s x3 = U32s{} + static_cast<uint32_t>(stream >> 32);
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    U32s high0, low0, high1, low1;
    multiply(kMultiplier0, x0, high0, low0);
    multiply(kMultiplier1, x2, high1, low1);
    x0 = high1 ^ x1 ^ key0;
    x1 = low1;
    x2 = high0 ^ x3 ^ key1;
    x3 = low0;
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  words = {x0, x1, x2, x3};
}

// --- what becomes of the words of a group --------------------------------------------------------
// A transform makes kPerGroup numbers of a group.

struct Bits32 {
  using Number = uint32_t;
  static constexpr int kPerGroup = 4 * kBlocks;
  static SHARDWEAVE_INLINE void apply(const Group& x, uint32_t* out) {
    std::memcpy(out, x.data(), sizeof(x));
  }
};

struct Bits64 {
  using Number = uint64_t;
  static constexpr int kPerGroup = 2 * kBlocks;
  static SHARDWEAVE_INLINE void apply(const Group& x, uint64_t* out) {
    for (size_t w = 0; w < 2; ++w) {
      for (int b = 0; b < kBlocks; ++b) {
        out[w * kBlocks + b] = static_cast<uint64_t>(x[2 * w][b]) << 32 | x[2 * w + 1][b];
      }
    }
  }
};

// -2 log(u) of u in (0, 1]. The logarithm is that of Cephes (logf): a polynomial on [sqrt(1/2),
// sqrt(2)).
SHARDWEAVE_INLINE void minus_two_log(const F32s& u, F32s& result) {
  I32s bits;
  std::memcpy(&bits, &u, sizeof(bits));
  // u = m * 2^e with m in [sqrt(1/2), sqrt(2)).
  const I32s e = (bits - 0x3F3504F3) >> 23;
  const I32s mantissa = bits - (e << 23);
  F32s m;
  std::memcpy(&m, &mantissa, sizeof(m));
  const F32s x = m - 1.0f;
  const F32s x2 = x * x;
  F32s p = x * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * x + 1.1676998740e-1f;
  p = p * x - 1.2420140846e-1f;
  p = p * x + 1.4249322787e-1f;
  p = p * x - 1.6668057665e-1f;
  p = p * x + 2.0000714765e-1f;
  p = p * x - 2.4999993993e-1f;
  p = p * x + 3.3333331174e-1f;
  const F32s exponent = __builtin_convertvector(e, F32s);
  const F32s tail = x2 * x * p + exponent * -2.12194440e-4f - 0.5f * x2;
  result = -2.0f * (x + tail + exponent * 0.693359375f);
}

// Sine and cosine of a full turn times `turn` in [0, 1): polynomials of Cephes (sinf, cosf) on an
// eighth.
SHARDWEAVE_INLINE void sin_cos_of_turn(const F32s& turn, F32s& sine, F32s& cosine) {
  const I32s quarter = __builtin_convertvector(turn * 4.0f + 0.5f, I32s);
  const F32s a = (turn * 4.0f - __builtin_convertvector(quarter, F32s)) * 1.57079632679f;
  const F32s z = a * a;
  F32s s = z * -1.9515295891e-4f + 8.3321608736e-3f;
  s = (s * z - 1.6666654611e-1f) * z * a + a;
  F32s c = z * 2.443315711809948e-5f - 1.388731625493765e-3f;
  c = (c * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1.0f;
  const I32s swap = (quarter & 1) != 0;
  sine = swap ? c : s;
  cosine = swap ? s : c;
  sine = (quarter & 2) != 0 ? -sine : sine;
  cosine = ((quarter + 1) & 2) != 0 ? -cosine : cosine;
}

SHARDWEAVE_INLINE void square_root(F32s& x) {
#if defined(__SSE2__)
  x = _mm_sqrt_ps(x);
#else
  for (int b = 0; b < kBlocks; ++b) x[b] = std::sqrt(x[b]);
#endif
}

// Box and Muller: two words give two numbers.
struct NormalFloat {
  using Number = float;
  static constexpr int kPerGroup = 4 * kBlocks;
  static SHARDWEAVE_INLINE void apply(const Group& x, float* out) {
    for (size_t w = 0; w < 4; w += 2) {
      const F32s u = (__builtin_convertvector(I32s(x[w] >> 1), F32s) + 0.5f) * 0x1p-31f;
      const F32s turn = __builtin_convertvector(I32s(x[w + 1] >> 8), F32s) * 0x1p-24f;
      F32s radius, sine, cosine;
      minus_two_log(u, radius);
      square_root(radius);
      sin_cos_of_turn(turn, sine, cosine);
      sine *= radius;
      cosine *= radius;
      std::memcpy(out + w * kBlocks, &cosine, sizeof(cosine));
      std::memcpy(out + (w + 1) * kBlocks, &sine, sizeof(sine));
    }
  }
};

struct NormalDouble {
  using Number = double;
  static constexpr int kPerGroup = 2 * kBlocks;
  static SHARDWEAVE_INLINE void apply(const Group& x, double* out) {
    uint64_t bits[2 * kBlocks];
    Bits64::apply(x, bits);
    for (int b = 0; b < kBlocks; ++b) {
      const double u = (static_cast<double>(bits[b] >> 12) + 0.5) * 0x1p-52;
      const double radius = std::sqrt(-2 * std::log(u));
      const double angle =
          static_cast<double>(bits[kBlocks + b] >> 11) * 0x1p-53 * 2 * std::numbers::pi;
      out[b] = radius * std::cos(angle);
      out[kBlocks + b] = radius * std::sin(angle);
    }
  }
};

}  // namespace

std::array<uint32_t, 4> philox4x32_10(std::array<uint32_t, 4> counter,
                                      std::array<uint32_t, 2> key) {
  const auto join = [](uint32_t low, uint32_t high) {
    return static_cast<uint64_t>(high) << 32 | low;
  };
  const uint64_t block = join(counter[0], counter[1]);
  Group x;
  make_group(join(key[0], key[1]), join(counter[2], counter[3]),
             static_cast<int64_t>(block / kBlocks), x);
  const uint64_t b = block % kBlocks;
  return {x[0][b], x[1][b], x[2][b], x[3][b]};
}

template <typename Transform>
void PhiloxStream::fill(int64_t first, absl::Span<typename Transform::Number> out) {
  constexpr int64_t kPerGroup = Transform::kPerGroup;
  while (!out.empty()) {
    const int64_t group = first / kPerGroup;
    const int64_t skip = first % kPerGroup;
    int64_t count = 0;
    if (skip == 0 && out.size() >= kPerGroup) {
      count = static_cast<int64_t>(out.size()) / kPerGroup * kPerGroup;
      for (int64_t g = 0; g < count / kPerGroup; ++g) {
        Group x;
        make_group(seed_, stream_, group + g, x);
        Transform::apply(x, out.data() + g * kPerGroup);
      }
    } else {
      // Part of a group. Short runs often come from the same one.
      if (group != cached_group_) {
        make_group(seed_, stream_, group, cache_);
        cached_group_ = group;
      }
      typename Transform::Number numbers[kPerGroup];
      Transform::apply(cache_, numbers);
      count = std::min<int64_t>(kPerGroup - skip, static_cast<int64_t>(out.size()));
      std::copy_n(numbers + skip, count, out.data());
    }
    first += count;
    out.remove_prefix(static_cast<size_t>(count));
  }
}

void PhiloxStream::bits(int64_t first, absl::Span<uint32_t> out) {
  fill<Bits32>(first, out);
}
void PhiloxStream::bits(int64_t first, absl::Span<uint64_t> out) {
  fill<Bits64>(first, out);
}
void PhiloxStream::normal(int64_t first, absl::Span<float> out) {
  fill<NormalFloat>(first, out);
}
void PhiloxStream::normal(int64_t first, absl::Span<double> out) {
  fill<NormalDouble>(first, out);
}

}  // namespace shardweave::dtensor_internal

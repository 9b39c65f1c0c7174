#include "shardweave/dtensor/engine/philox.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "shardweave/dtensor/engine/random_arithmetic.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace shardweave::dtensor_internal {
namespace {

constexpr int kBlocks = PhiloxStream::kBlocks;
using Group = PhiloxStream::Group;

// One element per block, in GCC's and Clang's portable vectors: a register of SSE2, which every x86
// has.
using U32s = PhiloxStream::Words;
using I32s = int32_t __attribute__((vector_size(4 * kBlocks)));
using F32s = float __attribute__((vector_size(4 * kBlocks)));

// Of 64 bits there are two in a register.
constexpr int kPair = 2;
using U64s = uint64_t __attribute__((vector_size(8 * kPair)));
using F64s = double __attribute__((vector_size(8 * kPair)));

struct Vectors {
  using I32 = I32s;
  using F32 = F32s;
  using U64 = U64s;
  using F64 = F64s;

  static SHARDWEAVE_EVERYWHERE F32 to_float(const I32& x) {
    return __builtin_convertvector(x, F32);
  }
  static SHARDWEAVE_EVERYWHERE I32 to_int(const F32& x) { return __builtin_convertvector(x, I32); }
#if defined(__SSE2__)
  static SHARDWEAVE_EVERYWHERE F32 square_root(const F32& x) { return _mm_sqrt_ps(x); }
  static SHARDWEAVE_EVERYWHERE F64 square_root(const F64& x) { return _mm_sqrt_pd(x); }
#else
  static SHARDWEAVE_EVERYWHERE F32 square_root(F32 x) {
    for (int b = 0; b < kBlocks; ++b) x[b] = std::sqrt(x[b]);
    return x;
  }
  static SHARDWEAVE_EVERYWHERE F64 square_root(F64 x) {
    for (int b = 0; b < kPair; ++b) x[b] = std::sqrt(x[b]);
    return x;
  }
#endif
};

// Products of 32 by 32 bits.
SHARDWEAVE_EVERYWHERE void multiply(uint32_t factor, const U32s& x, U32s& high, U32s& low) {
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
SHARDWEAVE_EVERYWHERE void make_group(uint64_t seed, uint64_t stream, int64_t group, Group& words) {
  const uint64_t block = static_cast<uint64_t>(group) * kBlocks;
  U32s x[4] = {{0, 1, 2, 3}, {}, {}, {}};
  x[0] += static_cast<uint32_t>(block);  // no carry: kBlocks divides 2^32
  x[1] += static_cast<uint32_t>(block >> 32);
  x[2] += static_cast<uint32_t>(stream);
  x[3] += static_cast<uint32_t>(stream >> 32);
  philox_rounds(
      seed, x,
      [](uint32_t factor, const U32s& from, U32s& high, U32s& low)
          __attribute__((always_inline)) { multiply(factor, from, high, low); });
  words = {x[0], x[1], x[2], x[3]};
}

// --- what becomes of the words of a group --------------------------------------------------------
// A transform makes kPerGroup numbers of a group: what random_arithmetic.h says, several at a time.

struct Bits32 {
  using Number = uint32_t;
  static constexpr int kPerGroup = 4 * kBlocks;
  static SHARDWEAVE_EVERYWHERE void apply(const Group& x, uint32_t* out) {
    std::memcpy(out, x.data(), sizeof(x));
  }
};

struct Bits64 {
  using Number = uint64_t;
  static constexpr int kPerGroup = 2 * kBlocks;
  static SHARDWEAVE_EVERYWHERE void apply(const Group& x, uint64_t* out) {
    for (size_t w = 0; w < 2; ++w) {
      for (int b = 0; b < kBlocks; ++b) {
        out[w * kBlocks + b] = static_cast<uint64_t>(x[2 * w][b]) << 32 | x[2 * w + 1][b];
      }
    }
  }
};

struct NormalFloat {
  using Number = float;
  static constexpr int kPerGroup = 4 * kBlocks;
  static SHARDWEAVE_EVERYWHERE void apply(const Group& x, float* out) {
    for (size_t w = 0; w < 4; w += 2) {
      F32s first, second;
      box_muller<Vectors>(I32s(x[w] >> 1), I32s(x[w + 1] >> 8), first, second);
      std::memcpy(out + w * kBlocks, &first, sizeof(first));
      std::memcpy(out + (w + 1) * kBlocks, &second, sizeof(second));
    }
  }
};

struct NormalDouble {
  using Number = double;
  static constexpr int kPerGroup = 2 * kBlocks;
  static SHARDWEAVE_EVERYWHERE void apply(const Group& x, double* out) {
    uint64_t bits[2 * kBlocks];
    Bits64::apply(x, bits);
    for (int b = 0; b < kBlocks; b += kPair) {
      U64s bits0, bits1;
      std::memcpy(&bits0, bits + b, sizeof(bits0));
      std::memcpy(&bits1, bits + kBlocks + b, sizeof(bits1));
      F64s first, second;
      box_muller<Vectors>(bits0, bits1, first, second);
      std::memcpy(out + b, &first, sizeof(first));
      std::memcpy(out + kBlocks + b, &second, sizeof(second));
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

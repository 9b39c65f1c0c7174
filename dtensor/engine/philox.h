// Random numbers by index: number i of stream k is a function of (seed, k, i), so that ranks draw
// the same numbers however they share them out.
//
//   PhiloxStream stream(seed, k);
//   std::vector<float> a(1000), b(10);
//   stream.normal(0, absl::MakeSpan(a));      // numbers 0 to 999
//   stream.normal(990, absl::MakeSpan(b));    // the last ten of them again
//
// The generator is Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
// easy as 1, 2, 3" (SC 2011): ten rounds of multiplications that turn a counter into four words.
// Counters hold the block's number (64 bits) and the stream's (64 bits); the key is the seed. The
// numbers are the same on every machine with IEEE arithmetic, whatever vector instructions it has,
// and on GPUs: random_arithmetic.h says how, and which word of which block is number i. Not for
// cryptography.
#pragma once

#include <array>
#include <cstdint>

#include "absl/types/span.h"

namespace shardweave::dtensor_internal {

// One block: the function of the paper.
std::array<uint32_t, 4> philox4x32_10(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Not to be shared between threads: it keeps the block that was used last.
class PhiloxStream {
 public:
  PhiloxStream(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}

  // Numbers first, first + 1, ... (first >= 0): uniform bits, or normal with mean 0 and variance 1.
  // Numbers of different kinds from one stream depend on each other: use a stream for one kind
  // only.
  void bits(int64_t first, absl::Span<uint32_t> out);
  void bits(int64_t first, absl::Span<uint64_t> out);
  void normal(int64_t first, absl::Span<float> out);
  void normal(int64_t first, absl::Span<double> out);

  // Four blocks are made at once: word w of block b is group[w][b].
  static constexpr int kBlocks = 4;
  using Words = uint32_t __attribute__((vector_size(4 * kBlocks)));
  using Group = std::array<Words, 4>;

 private:
  template <typename Transform>
  void fill(int64_t first, absl::Span<typename Transform::Number> out);

  const uint64_t seed_;
  const uint64_t stream_;
  int64_t cached_group_ = -1;  // whose words are in cache_
  Group cache_;
};

}  // namespace shardweave::dtensor_internal

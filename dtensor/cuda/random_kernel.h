// The body of the kernels that fill memory with random numbers: what each thread does, for the
// host's compiler too, so that a test runs it without a GPU.
//
//   IndexBox box{.first = 100, .length = 24};             // global indices 100 to 123, in a row
//   for (uint64_t i = 0; i < num_items<float>(box); ++i) {
//     fill_item(source, random_functors::Normal<float>{0, 1}, box, i, memory);
//   }
//
// Internal to dtensor/cuda.
#pragma once

#include "shardweave/dtensor/engine/random_arithmetic.h"

namespace shardweave::dtensor_internal {

// Rows of `length` consecutive global indices each, and where their elements lie, in elements.
// There are sizes[0] * ... * sizes[ndim - 1] rows.
struct IndexBox {
  static constexpr int kMaxDims = 8;

  int64_t first = 0;  // global index of the first element
  int64_t at = 0;     // where it lies
  int64_t length = 1;
  int64_t step = 1;  // in memory, along a row
  int32_t ndim = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t index_strides[kMaxDims] = {};   // of global indices
  int64_t memory_strides[kMaxDims] = {};  // in memory
};

// Which numbers: those of stream number `stream` of the seed.
struct RandomSource {
  uint64_t seed = 0;
  uint64_t stream = 0;
  const uint64_t* added = nullptr;  // on the GPU; if not null, added to `stream`
};

SHARDWEAVE_EVERYWHERE uint64_t stream_of(const RandomSource& source) {
  return source.stream + (source.added == nullptr ? 0 : *source.added);
}

// How many of a group's 16 or 8 numbers come from one block.
template <typename Number>
inline constexpr int64_t kNumbersOfBlock = sizeof(Number) == 8 ? 2 : 4;

// An item is a block of the stream for a row: so many there may be for a row, wherever it begins.
template <typename Number>
SHARDWEAVE_EVERYWHERE uint64_t items_of_row(const IndexBox& box) {
  constexpr uint64_t kGroup = 4 * kNumbersOfBlock<Number>;
  return 4 * ((static_cast<uint64_t>(box.length) + kGroup - 2) / kGroup + 1);
}
template <typename Number>
SHARDWEAVE_EVERYWHERE uint64_t num_items(const IndexBox& box) {
  uint64_t rows = 1;
  for (int d = 0; d < box.ndim; ++d) rows *= static_cast<uint64_t>(box.sizes[d]);
  return rows * items_of_row<Number>(box);
}

// Divisions of 64 bits take a GPU many times as long as those of 32.
SHARDWEAVE_EVERYWHERE void divide(uint64_t x, uint64_t by, uint64_t& quotient,
                                  uint64_t& remainder) {
  if (((x | by) >> 32) == 0) {
    quotient = static_cast<uint32_t>(x) / static_cast<uint32_t>(by);
  } else {
    quotient = x / by;
  }
  remainder = x - quotient * by;
}

// Writes the elements that item `item` of `box` has. `stream` is stream_of(source).
template <typename Functor>
SHARDWEAVE_EVERYWHERE void fill_item(uint64_t seed, uint64_t stream, const Functor& functor,
                                     const IndexBox& box, uint64_t item,
                                     typename Functor::Element* out) {
  using Number = typename Functor::Number;
  constexpr int64_t kCount = kNumbersOfBlock<Number>;
  uint64_t row = 0, in_row = item;
  int64_t first = box.first, at = box.at;
  if (box.ndim > 0) {
    divide(item, items_of_row<Number>(box), row, in_row);
    for (int d = box.ndim - 1; d > 0; --d) {
      uint64_t rest, i;
      divide(row, static_cast<uint64_t>(box.sizes[d]), rest, i);
      row = rest;
      first += static_cast<int64_t>(i) * box.index_strides[d];
      at += static_cast<int64_t>(i) * box.memory_strides[d];
    }
    first += static_cast<int64_t>(row) * box.index_strides[0];
    at += static_cast<int64_t>(row) * box.memory_strides[0];
  }
  const int64_t group = first / (4 * kCount) + static_cast<int64_t>(in_row / 4);
  const int64_t lane = static_cast<int64_t>(in_row % 4);
  // The block's numbers are in_row_0, in_row_0 + 4, ... of the row.
  const int64_t in_row_0 = group * (4 * kCount) + lane - first;
  if (in_row_0 + 4 * (kCount - 1) < 0 || in_row_0 >= box.length) return;
  uint32_t words[4];
  philox_block(seed, stream, static_cast<uint64_t>(group * 4 + lane), words);
  Number numbers[kCount];
  numbers_of_block(words, numbers);
  for (int64_t n = 0; n < kCount; ++n) {
    const int64_t i = in_row_0 + 4 * n;
    if (i < 0 || i >= box.length) continue;
    const int64_t where = at + i * box.step;
    out[where] = functor(numbers[n], where);
  }
}

// What thread `thread` of `threads` does.
template <typename Functor>
SHARDWEAVE_EVERYWHERE void fill_items(uint64_t thread, uint64_t threads, const RandomSource& source,
                                      const Functor& functor, const IndexBox& box,
                                      typename Functor::Element* out) {
  const uint64_t stream = stream_of(source);
  const uint64_t items = num_items<typename Functor::Number>(box);
  for (uint64_t item = thread; item < items; item += threads) {
    fill_item(source.seed, stream, functor, box, item, out);
  }
}

// All there are: F(kernel's name, functor), whose parameters are a RandomSource, the functor, an
// IndexBox and the pointer to the elements.
// NOLINTBEGIN(bugprone-macro-parentheses): they are types.
#define SHARDWEAVE_RANDOM_KERNELS_OF_FLOATS(F, name, functor) \
  F(name##_f64, functor<double>)                              \
  F(name##_f32, functor<float>)                               \
  F(name##_f16, functor<F16>)                                 \
  F(name##_bf16, functor<BF16>)
#define SHARDWEAVE_RANDOM_KERNELS_OF_ANY(F, name, functor) \
  SHARDWEAVE_RANDOM_KERNELS_OF_FLOATS(F, name, functor)    \
  F(name##_i64, functor<int64_t>)                          \
  F(name##_i32, functor<int32_t>)                          \
  F(name##_i16, functor<int16_t>)                          \
  F(name##_i8, functor<int8_t>)                            \
  F(name##_u8, functor<uint8_t>)                           \
  F(name##_bool, functor<bool>)
// NOLINTEND(bugprone-macro-parentheses)
#define SHARDWEAVE_RANDOM_KERNELS(F)                                 \
  SHARDWEAVE_RANDOM_KERNELS_OF_FLOATS(F, uniform, Uniform)           \
  SHARDWEAVE_RANDOM_KERNELS_OF_FLOATS(F, normal, Normal)             \
  SHARDWEAVE_RANDOM_KERNELS_OF_FLOATS(F, log_normal, LogNormal)      \
  SHARDWEAVE_RANDOM_KERNELS_OF_FLOATS(F, exponential, Exponential)   \
  SHARDWEAVE_RANDOM_KERNELS_OF_FLOATS(F, cauchy, Cauchy)             \
  SHARDWEAVE_RANDOM_KERNELS_OF_ANY(F, geometric, Geometric)          \
  SHARDWEAVE_RANDOM_KERNELS_OF_ANY(F, bernoulli, Bernoulli)          \
  SHARDWEAVE_RANDOM_KERNELS_OF_ANY(F, bernoulli_each, BernoulliEach) \
  SHARDWEAVE_RANDOM_KERNELS_OF_ANY(F, integers, Integers)

}  // namespace shardweave::dtensor_internal

// XXH3 (64 bits), what checkpoints are checked with: `xxhsum -H3` gives the same.
//
//   Checksum sum;
//   sum.add(data, size);
//   to_hex(sum.value());                       // "2d06800538d394c2"
//
// Internal to modules/checkpoint/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "shardweave/comm/buffer.h"
#include "shardweave/modules/checkpoint/box.h"

namespace shardweave::checkpoint_internal {

class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(Checksum&& other) noexcept;
  Checksum& operator=(Checksum&&) noexcept;
  void add(const void* data, size_t size);
  uint64_t value() const;  // of all so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

uint64_t checksum_of(const void* data, size_t size);

// A checksum of a tensor's elements that adds up (modulo 2^64), however the tensor is cut: each element times an
// odd number that is its place's. Any change within one word of 32 bits
// changes it. `common`, which lies in a row-major
// array at `data` that holds the box `held`, both of a tensor of `shape`.
uint64_t element_sum(const void* data, DType dtype, const Box& common, const Box& held,
                     const Dims& shape);
std::string to_hex(uint64_t value);  // 16 digits
std::optional<uint64_t> from_hex(std::string_view text);

}  // namespace shardweave::checkpoint_internal

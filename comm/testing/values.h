// Memory of any dtype, and the slow, obvious way to compute what a collective should give: in
// double.
//
//   Values in(DType::kBF16, 7, [](int64_t i) { return i; });
//   comm.all_reduce(in.buffer(), in.buffer(), ReduceOp::kSum).wait();
//   in[3];                                   // as double
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <vector>

#include "absl/types/span.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/placement/reduce_op.h"

namespace shardweave {

// All of them, fp8 too.
absl::Span<const DType> all_dtypes();
absl::Span<const ReduceOp> all_reduce_ops();

// An element from and to double; to: rounded to nearest even by way of float, as backends do. fp8
// counts as a byte: for memory that is only moved.
double decode(DType dtype, const std::byte* element);
void encode(DType dtype, double value, std::byte* element);
// What encode() and decode() make of `value`.
double rounded(DType dtype, double value);

class Values {
 public:
  Values(DType dtype, int64_t count, const std::function<double(int64_t)>& value);
  // Filled with a value that no case expects.
  Values(DType dtype, int64_t count);

  Buffer buffer() { return part(0, count_); }
  Buffer part(int64_t begin, int64_t count);
  int64_t count() const { return count_; }
  DType dtype() const { return dtype_; }
  double operator[](int64_t i) const { return decode(dtype_, data() + i * element_size(dtype_)); }

  friend bool operator==(const Values& a, const Values& b);
  friend void PrintTo(const Values& values, std::ostream* os);

 private:
  const std::byte* data() const { return reinterpret_cast<const std::byte*>(memory_.data()); }

  DType dtype_;
  int64_t count_;
  std::vector<uint64_t> memory_;  // aligned for every dtype
};

// A small whole number, different between ranks and indices, that every dtype holds exactly; so do
// the sums and, for kProduct, the products of five of them.
double sample(DType dtype, ReduceOp op, int rank, int64_t index);
inline double sample(DType dtype, int rank, int64_t index) {
  return sample(dtype, ReduceOp::kSum, rank, index);
}

// The reduction of sample(..., rank, index) over `num_ranks` ranks.
double reduced_sample(DType dtype, ReduceOp op, int num_ranks, int64_t index);

}  // namespace shardweave

// A Movement is the data movement of one collective, once all ranks' buffers are known: a range of
// elements that can be cut anywhere and run by any threads, in any order, with the same result.
//
//   Movement movement;
//   movement.reset(calls);                                    // one per rank
//   movement.run(0, movement.length() / 2);                   // one thread
//   movement.run(movement.length() / 2, movement.length());   // another
//
// Each element is one step of one thread, and reduced in rank order: deterministic, and right in
// place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "shardweave/comm/backend.h"

namespace shardweave::inproc {

// A Call as it is kept while it is pending. Its vectors keep their memory from call to call.
struct KeptCall {
  CallSignature signature;
  std::byte* in = nullptr;  // read only
  std::byte* out = nullptr;
  std::vector<int64_t> in_counts;
  std::vector<int64_t> out_counts;

  void keep(const Call& call);
};

// OK if the ranks' calls (in rank order) fit each other, else FailedPrecondition as in
// check_same_call().
absl::Status check_calls(std::string_view group, absl::Span<const KeptCall* const> calls);

class Movement {
 public:
  // For calls that fit each other; their buffers must outlive the use.
  void reset(absl::Span<const KeptCall* const> calls);

  int64_t length() const { return length_; }         // elements
  int64_t element_size() const { return element_; }  // bytes
  int num_ranks() const { return static_cast<int>(ins_.size()); }
  void run(int64_t begin, int64_t end) const;

 private:
  // Elements that go from one rank to one rank; either may be all ranks: then it is a reduction, or
  // goes to all.
  static constexpr int kAll = -1;
  struct Segment {
    int64_t begin;  // in the range
    int64_t length;
    int from;
    int64_t from_offset;
    int to;
    int64_t to_offset;
  };
  void add(int64_t length, int from, int64_t from_offset, int to, int64_t to_offset);
  void run_segment(const Segment& segment, int64_t begin, int64_t end) const;

  std::vector<const std::byte*> ins_;
  std::vector<std::byte*> outs_;
  std::vector<Segment> segments_;
  int64_t length_ = 0;
  int64_t element_ = 1;
  DType dtype_ = DType::kU8;
  ReduceOp reduce_op_ = ReduceOp::kSum;
};

}  // namespace shardweave::inproc

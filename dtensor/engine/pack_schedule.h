// How the parts that a collective sends or receives lie in a tensor: which stretches of its memory
// are copied where. Worked out once for a step of a plan; packing makes no tensor and no view for a
// part.
//
//   PackSchedule schedule({6, 4});              // of a contiguous tensor
//   schedule.add_part(1, {{0, 2}});             // columns 0 and 1 are the first part, row by row,
//   schedule.add_part(1, {{2, 4}});             // columns 2 and 3 the second
//   schedule.finish();
//   schedule.pack(tensor, buffer);              // buffer: 24 elements, part after part
//   schedule.unpack(buffer, tensor);            // the inverse
//
// Parts that lie in the same way, as those of an even cut do, are one entry however many they are.
// On CPU the copies go over the threads of at::parallel_for; elsewhere each entry is one operator.
// Internal to dtensor/.
#pragma once

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "shardweave/placement/layout.h"

namespace shardweave::dtensor_internal {

class PackSchedule {
 public:
  explicit PackSchedule(Dims sizes) : sizes_(std::move(sizes)) {}

  // The next part: the indices of dimension `dim` that `intervals` name, and all of the others.
  void add_part(int dim, const Intervals& intervals);
  // The next part: a box. (Of several boxes for one peer, one after the other.)
  void add_part(absl::Span<const int64_t> offset, absl::Span<const int64_t> shape);
  // The next parts, all alike: `shape` at the origin, and a step further along a dimension for each
  // count of `repeats`, of which the last one counts fastest. Costs as much as one part, however many
  // there are. `sizes`: the tensor's, where a dimension may stand as several.
  struct Repeat {
    int64_t count;
    size_t dim;  // of `sizes`
    int64_t step;
  };
  void add_even_parts(absl::Span<const int64_t> sizes, absl::Span<const int64_t> shape,
                      absl::Span<const Repeat> repeats);
  // After the last part.
  void finish();

  int64_t numel() const { return numel_; }
  // The parts are the tensor, as it lies.
  bool is_in_order() const {
    return numel_ == total_ &&
           (copies_.empty() ||
            (copies_.size() == 1 && copies_[0].loops.empty() && copies_[0].tensor_offset == 0));
  }
  // How many copies of their own the parts are; what does not depend on the number of even parts.
  size_t num_entries() const { return copies_.size(); }
  // What keeping it takes.
  int64_t bytes() const;

  // `tensor`: contiguous, of the sizes; `buffer`: contiguous, numel() elements of the same type. All
  // of `buffer`, or of what the parts name, is written.
  void pack(const at::Tensor& tensor, const at::Tensor& buffer) const;
  void unpack(const at::Tensor& buffer, const at::Tensor& tensor) const;

 private:
  // `run` elements that lie together in tensor and buffer, as often as the loops say.
  struct Loop {
    int64_t count, tensor_stride, buffer_stride;
    friend bool operator==(const Loop&, const Loop&) = default;
  };
  struct Copy {
    int64_t tensor_offset = 0;
    int64_t buffer_offset = 0;
    int64_t run = 1;
    absl::InlinedVector<Loop, 3> loops;  // outermost first
    int64_t first_row = 0;               // runs of the copies before
    int64_t rows() const;
    void enclose(const Loop& loop);
  };

  void add_box(absl::Span<const int64_t> offset, absl::Span<const int64_t> shape,
               absl::Span<const int64_t> part_sizes, absl::Span<const int64_t> offset_in_part);
  bool merge();
  void copy(const at::Tensor& tensor, const at::Tensor& buffer, bool to_buffer) const;
  static void copy_on_device(Copy c, const at::Tensor& tensor, const at::Tensor& buffer,
                             bool to_buffer);
  template <bool to_buffer>
  void copy_rows(char* tensor, char* buffer, int64_t element_size, int64_t begin,
                 int64_t end) const;

  Dims sizes_;
  std::vector<Copy> copies_;
  int64_t numel_ = 0;  // of the parts
  int64_t total_ = 0;  // of the tensor
  int64_t rows_ = 0;
};

}  // namespace shardweave::dtensor_internal

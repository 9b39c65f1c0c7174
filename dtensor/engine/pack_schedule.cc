#include "shardweave/dtensor/engine/pack_schedule.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/Parallel.h"
#include "ATen/ops/as_strided.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/util/accumulate.h"
#include "shardweave/dtensor/error.h"

namespace shardweave::dtensor_internal {
namespace {

// A thread is not worth it for less.
constexpr int64_t kBytesOfThread = 1 << 17;

Dims row_major(absl::Span<const int64_t> sizes) {
  Dims strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];
  return strides;
}

}  // namespace

int64_t PackSchedule::Copy::rows() const {
  int64_t n = 1;
  for (const Loop& loop : loops) n *= loop.count;
  return n;
}

// With one more loop around it.
void PackSchedule::Copy::enclose(const Loop& loop) {
  if (loop.count == 1) return;
  if (loops.empty() && loop.tensor_stride == run && loop.buffer_stride == run) {
    run *= loop.count;
    return;
  }
  if (!loops.empty()) {
    Loop& inner = loops.front();
    if (loop.tensor_stride == inner.count * inner.tensor_stride &&
        loop.buffer_stride == inner.count * inner.buffer_stride) {
      inner.count *= loop.count;
      return;
    }
  }
  loops.insert(loops.begin(), loop);
}

void PackSchedule::add_part(int dim, const Intervals& intervals) {
  Dims part_sizes = sizes_;
  part_sizes[dim] = 0;
  for (const Interval& i : intervals) part_sizes[dim] += i.size();
  Dims offset(sizes_.size(), 0), shape = sizes_, offset_in_part(sizes_.size(), 0);
  for (const Interval& i : intervals) {
    offset[dim] = i.begin;
    shape[dim] = i.size();
    add_box(offset, shape, part_sizes, offset_in_part);
    offset_in_part[dim] += i.size();
  }
  numel_ += c10::multiply_integers(part_sizes);
}

void PackSchedule::add_part(absl::Span<const int64_t> offset, absl::Span<const int64_t> shape) {
  add_box(offset, shape, shape, Dims(shape.size(), 0));
  numel_ += c10::multiply_integers(shape);
}

void PackSchedule::add_box(absl::Span<const int64_t> offset, absl::Span<const int64_t> shape,
                           absl::Span<const int64_t> part_sizes,
                           absl::Span<const int64_t> offset_in_part) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return;
  const Dims in_tensor = row_major(sizes_), in_part = row_major(part_sizes);
  Copy copy;
  copy.buffer_offset = numel_;
  for (size_t d = shape.size(); d-- > 0;) {
    copy.tensor_offset += offset[d] * in_tensor[d];
    copy.buffer_offset += offset_in_part[d] * in_part[d];
    copy.enclose({shape[d], in_tensor[d], in_part[d]});
  }
  copies_.push_back(std::move(copy));
}

void PackSchedule::add_even_parts(absl::Span<const int64_t> sizes, absl::Span<const int64_t> shape,
                                  absl::Span<const Repeat> repeats) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return;
  const Dims in_tensor = row_major(sizes), in_part = row_major(shape);
  Copy copy;
  copy.buffer_offset = numel_;
  for (size_t d = shape.size(); d-- > 0;) copy.enclose({shape[d], in_tensor[d], in_part[d]});
  int64_t in_buffer = c10::multiply_integers(shape);
  for (size_t i = repeats.size(); i-- > 0;) {
    const auto& [count, dim, step] = repeats[i];
    copy.enclose({count, step * in_tensor[dim], in_buffer});
    in_buffer *= count;
  }
  copies_.push_back(std::move(copy));
  numel_ += in_buffer;
}

// Copies that follow each other at a constant distance become one, with a loop around; false if there
// were none.
bool PackSchedule::merge() {
  std::vector<Copy> merged;
  for (size_t i = 0; i < copies_.size();) {
    Copy& first = copies_[i];
    auto follows = [&](size_t k, int64_t tensor_stride, int64_t buffer_stride) {
      const Copy& c = copies_[k];
      const auto n = static_cast<int64_t>(k - i);
      return c.run == first.run && c.loops == first.loops &&
             c.tensor_offset == first.tensor_offset + n * tensor_stride &&
             c.buffer_offset == first.buffer_offset + n * buffer_stride;
    };
    size_t end = i + 1;
    if (end < copies_.size()) {
      const int64_t tensor_stride = copies_[end].tensor_offset - first.tensor_offset;
      const int64_t buffer_stride = copies_[end].buffer_offset - first.buffer_offset;
      while (end < copies_.size() && follows(end, tensor_stride, buffer_stride)) ++end;
      if (const auto count = static_cast<int64_t>(end - i); count > 1) {
        if (first.loops.empty() && tensor_stride == first.run && buffer_stride == first.run) {
          first.run *= count;
        } else {
          first.loops.insert(first.loops.begin(), {count, tensor_stride, buffer_stride});
        }
      }
    }
    merged.push_back(std::move(first));
    i = end;
  }
  const bool fewer = merged.size() < copies_.size();
  copies_ = std::move(merged);
  return fewer;
}

void PackSchedule::finish() {
  while (merge()) {
  }
  copies_.shrink_to_fit();
  total_ = c10::multiply_integers(sizes_);
  rows_ = 0;
  for (Copy& copy : copies_) {
    copy.first_row = rows_;
    rows_ += copy.rows();
  }
}

int64_t PackSchedule::bytes() const {
  size_t bytes = copies_.capacity() * sizeof(Copy);
  for (const Copy& copy : copies_) {
    if (copy.loops.size() > 3) bytes += copy.loops.capacity() * sizeof(Loop);
  }
  return static_cast<int64_t>(bytes);
}

template <bool to_buffer>
void PackSchedule::copy_rows(char* tensor, char* buffer, int64_t element_size, int64_t begin,
                             int64_t end) const {
  auto copy = std::upper_bound(copies_.begin(), copies_.end(), begin,
                               [](int64_t row, const Copy& c) { return row < c.first_row; }) -
              1;
  for (; begin < end; ++copy) {
    const int64_t last = std::min(end - copy->first_row, copy->rows());  // of this one, exclusive
    const int64_t bytes = copy->run * element_size;
    // Where the first row is, and at which count of each loop.
    Dims at(copy->loops.size(), 0);
    int64_t in_tensor = copy->tensor_offset, in_buffer = copy->buffer_offset;
    int64_t rest = begin - copy->first_row;
    for (size_t l = copy->loops.size(); l-- > 0; rest /= copy->loops[l].count) {
      at[l] = rest % copy->loops[l].count;
      in_tensor += at[l] * copy->loops[l].tensor_stride;
      in_buffer += at[l] * copy->loops[l].buffer_stride;
    }
    for (int64_t row = begin - copy->first_row; row < last; ++row) {
      char* const a = tensor + in_tensor * element_size;
      char* const b = buffer + in_buffer * element_size;
      char* const to = to_buffer ? b : a;
      const char* const from = to_buffer ? a : b;
      switch (bytes) {  // single elements: a call costs more than the copy
        case 4:
          std::memcpy(to, from, 4);
          break;
        case 8:
          std::memcpy(to, from, 8);
          break;
        default:
          std::memcpy(to, from, bytes);
      }
      for (size_t l = copy->loops.size(); l-- > 0;) {
        const Loop& loop = copy->loops[l];
        in_tensor += loop.tensor_stride;
        in_buffer += loop.buffer_stride;
        if (++at[l] < loop.count) break;
        in_tensor -= loop.count * loop.tensor_stride;
        in_buffer -= loop.count * loop.buffer_stride;
        at[l] = 0;
      }
    }
    begin = copy->first_row + last;
  }
}

// One copy of strided tensors, which have no negative strides: such loops are run here.
void PackSchedule::copy_on_device(Copy c, const at::Tensor& tensor, const at::Tensor& buffer,
                                  bool to_buffer) {
  const auto backwards = std::find_if(c.loops.begin(), c.loops.end(), [](const Loop& loop) {
    return loop.tensor_stride < 0 || loop.buffer_stride < 0;
  });
  if (backwards != c.loops.end()) {
    const Loop loop = *backwards;
    c.loops.erase(backwards);
    for (int64_t i = 0; i < loop.count; ++i) {
      copy_on_device(c, tensor, buffer, to_buffer);
      c.tensor_offset += loop.tensor_stride;
      c.buffer_offset += loop.buffer_stride;
    }
    return;
  }
  std::vector<int64_t> counts, in_tensor, in_buffer;
  for (const Loop& loop : c.loops) {
    counts.push_back(loop.count);
    in_tensor.push_back(loop.tensor_stride);
    in_buffer.push_back(loop.buffer_stride);
  }
  counts.push_back(c.run);
  in_tensor.push_back(1);
  in_buffer.push_back(1);
  const at::Tensor a =
      at::as_strided(tensor, counts, in_tensor, tensor.storage_offset() + c.tensor_offset);
  const at::Tensor b =
      at::as_strided(buffer, counts, in_buffer, buffer.storage_offset() + c.buffer_offset);
  to_buffer ? b.copy_(a) : a.copy_(b);
}

void PackSchedule::copy(const at::Tensor& tensor, const at::Tensor& buffer, bool to_buffer) const {
  if (tensor.sizes() != at::IntArrayRef(sizes_.data(), sizes_.size()) || !tensor.is_contiguous() ||
      buffer.numel() != numel_ || !buffer.is_contiguous() ||
      tensor.scalar_type() != buffer.scalar_type()) {
    throw Error(absl::InternalError(
        absl::StrCat("packing by a schedule for [", absl::StrJoin(sizes_, ", "), "] and ", numel_,
                     " elements: got ", c10::toString(tensor.scalar_type()), " [",
                     absl::StrJoin(tensor.sizes(), ", "), "] and ", buffer.numel(), " of ",
                     c10::toString(buffer.scalar_type()))));
  }
  if (rows_ == 0) return;
  if (!tensor.is_cpu()) {
    for (const Copy& c : copies_) copy_on_device(c, tensor, buffer, to_buffer);
    return;
  }
  const int64_t element_size = tensor.element_size();
  // What is read is not written: the address is only of one type.
  char* const a = static_cast<char*>(to_buffer ? const_cast<void*>(tensor.const_data_ptr())
                                               : tensor.mutable_data_ptr());
  char* const b = static_cast<char*>(to_buffer ? buffer.mutable_data_ptr()
                                               : const_cast<void*>(buffer.const_data_ptr()));
  const int64_t bytes_of_row = std::max<int64_t>(numel_ * element_size / rows_, 1);
  at::parallel_for(0, rows_, std::max<int64_t>(kBytesOfThread / bytes_of_row, 1),
                   [&](int64_t begin, int64_t end) {
                     to_buffer ? copy_rows<true>(a, b, element_size, begin, end)
                               : copy_rows<false>(a, b, element_size, begin, end);
                   });
}

void PackSchedule::pack(const at::Tensor& tensor, const at::Tensor& buffer) const {
  copy(tensor, buffer, true);
}

void PackSchedule::unpack(const at::Tensor& buffer, const at::Tensor& tensor) const {
  copy(tensor, buffer, false);
}

}  // namespace shardweave::dtensor_internal

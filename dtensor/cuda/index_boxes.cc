#include "shardweave/dtensor/cuda/index_boxes.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace shardweave::dtensor_internal {
namespace {

struct Dim {
  int64_t size, index_stride, memory_stride;
};

// Appends the boxes of all rows: more than one if there are too many dimensions for one.
void append(int64_t first, int64_t at, absl::Span<const Dim> dims, std::vector<IndexBox>& boxes) {
  const bool has_row = !dims.empty() && dims.back().index_stride == 1;
  const size_t ndim = dims.size() - (has_row ? 1 : 0);
  if (ndim > IndexBox::kMaxDims) {
    for (int64_t i = 0; i < dims[0].size; ++i) {
      append(first + i * dims[0].index_stride, at + i * dims[0].memory_stride, dims.subspan(1),
             boxes);
    }
    return;
  }
  IndexBox& box = boxes.emplace_back();
  box.first = first;
  box.at = at;
  if (has_row) {
    box.length = dims.back().size;
    box.step = dims.back().memory_stride;
  }
  box.ndim = static_cast<int32_t>(ndim);
  for (size_t d = 0; d < ndim; ++d) {
    box.sizes[d] = dims[d].size;
    box.index_strides[d] = dims[d].index_stride;
    box.memory_strides[d] = dims[d].memory_stride;
  }
}

}  // namespace

std::vector<IndexBox> index_boxes(absl::Span<const Intervals> held, absl::Span<const int64_t> sizes,
                                  absl::Span<const int64_t> strides) {
  std::vector<IndexBox> boxes;
  const size_t ndim = sizes.size();
  std::vector<int64_t> index_strides(ndim, 1);
  for (size_t d = ndim; d-- > 1;) index_strides[d - 1] = index_strides[d] * sizes[d];
  for (const Intervals& intervals : held) {
    if (intervals.empty()) return boxes;
  }
  // All combinations of the dimensions' intervals, the last one's first.
  std::vector<size_t> chosen(ndim, 0);
  std::vector<int64_t> local(ndim, 0);  // where the chosen ones begin, in the local tensor
  while (true) {
    int64_t first = 0, at = 0;
    std::vector<Dim> dims;
    for (size_t d = 0; d < ndim; ++d) {
      const Interval& interval = held[d][chosen[d]];
      first += interval.begin * index_strides[d];
      at += local[d] * strides[d];
      const Dim dim = {interval.size(), index_strides[d], strides[d]};
      if (dim.size == 1) continue;
      if (!dims.empty() && dims.back().index_stride == dim.size * dim.index_stride &&
          dims.back().memory_stride == dim.size * dim.memory_stride) {
        dims.back() = {dims.back().size * dim.size, dim.index_stride, dim.memory_stride};
      } else {
        dims.push_back(dim);
      }
    }
    append(first, at, dims, boxes);
    size_t d = ndim;
    while (d-- > 0) {
      local[d] += held[d][chosen[d]].size();
      if (++chosen[d] < held[d].size()) break;
      chosen[d] = 0;
      local[d] = 0;
    }
    if (d == static_cast<size_t>(-1)) return boxes;
  }
}

bool operator==(const IndexBox& a, const IndexBox& b) {
  const auto same = [&](const int64_t* x, const int64_t* y) {
    return std::equal(x, x + a.ndim, y);
  };
  return a.first == b.first && a.at == b.at && a.length == b.length && a.step == b.step &&
         a.ndim == b.ndim && same(a.sizes, b.sizes) && same(a.index_strides, b.index_strides) &&
         same(a.memory_strides, b.memory_strides);
}

std::string to_string(const IndexBox& box) {
  std::string text =
      absl::StrCat(box.length, " from ", box.first, " at ", box.at, " by ", box.step);
  for (int d = 0; d < box.ndim; ++d) {
    absl::StrAppend(&text, ", ", box.sizes[d], " times (", box.index_strides[d], ", ",
                    box.memory_strides[d], ")");
  }
  return text;
}

}  // namespace shardweave::dtensor_internal

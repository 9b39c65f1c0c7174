#include "shardweave/modules/checkpoint/box.h"

#include <algorithm>
#include <set>

#include "shardweave/comm/str_cat.h"

namespace shardweave {

int64_t Box::numel() const {
  // A product that is 0 in the end may be too large before.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t result = 1;
  for (const int64_t size : shape) result *= size;
  return result;
}

std::string Box::to_string() const {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d) {
    int64_t end = 0;
    if (__builtin_add_overflow(offset[d], shape[d], &end)) {
      str_append(&text, d == 0 ? "" : ", ", offset[d], ":", offset[d], "+", shape[d]);
    } else {
      str_append(&text, d == 0 ? "" : ", ", offset[d], ":", end);
    }
  }
  return text + "]";
}

Box whole_box(absl::Span<const int64_t> shape) {
  return {Dims(shape.size(), 0), Dims(shape.begin(), shape.end())};
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  Box common;
  for (size_t d = 0; d < a.shape.size(); ++d) {
    const int64_t begin = std::max(a.offset[d], b.offset[d]);
    const int64_t end = std::min(a.offset[d] + a.shape[d], b.offset[d] + b.shape[d]);
    if (begin >= end) return std::nullopt;
    common.offset.push_back(begin);
    common.shape.push_back(end - begin);
  }
  return common;
}

bool contains(const Box& outer, const Box& inner) {
  for (size_t d = 0; d < outer.shape.size(); ++d) {
    // Of what somebody has written into a file: where it ends may be no number.
    const int64_t before = inner.offset[d] - outer.offset[d];
    if (before < 0 || before > outer.shape[d] || inner.shape[d] > outer.shape[d] - before) {
      return false;
    }
  }
  return true;
}

absl::StatusOr<std::optional<std::pair<size_t, size_t>>> find_overlap(absl::Span<const Box> boxes,
                                                                      int64_t& left) {
  if (boxes.size() < 2) return std::nullopt;
  // Sweeps along the dimension with the most different beginnings, with what is open there.
  const size_t ndim = boxes[0].shape.size();
  if (ndim == 0) return std::pair<size_t, size_t>(0, 1);
  size_t along = 0;
  size_t most = 0;
  for (size_t d = 0; d < ndim; ++d) {
    std::set<int64_t> begins;
    for (const Box& box : boxes) begins.insert(box.offset[d]);
    if (begins.size() > most) {
      most = begins.size();
      along = d;
    }
  }
  std::vector<size_t> order(boxes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto begin = [&](size_t i) { return boxes[i].offset[along]; };
  const auto end = [&](size_t i) { return begin(i) + boxes[i].shape[along]; };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return begin(a) < begin(b); });
  std::vector<size_t> open;
  for (const size_t i : order) {
    left -= static_cast<int64_t>(open.size());
    if (left < 0) {
      return absl::ResourceExhaustedError(
          str_cat(boxes.size(),
                  " parts lie so that it takes too many comparisons to tell whether "
                  "two overlap; wanted parts of a grid, or fewer"));
    }
    std::erase_if(open, [&](size_t o) { return end(o) <= begin(i); });
    for (const size_t o : open) {
      if (intersect(boxes[o], boxes[i]).has_value()) return std::pair(o, i);
    }
    open.push_back(i);
  }
  return std::nullopt;
}

void for_each_run(const Box& common, const Box& from, const Box& to,
                  absl::FunctionRef<void(int64_t, int64_t, int64_t)> run) {
  if (common.numel() == 0) return;
  const auto ndim = static_cast<int>(common.shape.size());
  // Dimensions from `first` on are one run: both arrays hold all of those behind it.
  int first = ndim;
  int64_t length = 1;
  while (first > 0) {
    --first;
    length *= common.shape[static_cast<size_t>(first)];
    const auto d = static_cast<size_t>(first);
    if (common.shape[d] != from.shape[d] || common.shape[d] != to.shape[d]) break;
  }
  Dims from_stride(static_cast<size_t>(ndim), 1);
  Dims to_stride(static_cast<size_t>(ndim), 1);
  int64_t from_place = 0;
  int64_t to_place = 0;
  for (int i = ndim - 1; i >= 0; --i) {
    const auto d = static_cast<size_t>(i);
    if (i + 1 < ndim) {
      from_stride[d] = from_stride[d + 1] * from.shape[d + 1];
      to_stride[d] = to_stride[d + 1] * to.shape[d + 1];
    }
    from_place += (common.offset[d] - from.offset[d]) * from_stride[d];
    to_place += (common.offset[d] - to.offset[d]) * to_stride[d];
  }
  Dims index(static_cast<size_t>(first), 0);
  while (true) {
    run(from_place, to_place, length);
    int i = first - 1;
    for (; i >= 0; --i) {
      const auto d = static_cast<size_t>(i);
      from_place += from_stride[d];
      to_place += to_stride[d];
      if (++index[d] < common.shape[d]) break;
      from_place -= from_stride[d] * common.shape[d];
      to_place -= to_stride[d] * common.shape[d];
      index[d] = 0;
    }
    if (i < 0) return;
  }
}

std::vector<LocalBox> local_boxes(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                                  absl::Span<const int64_t> coordinate,
                                  absl::Span<const int64_t> shape) {
  std::vector<LocalBox> boxes = {{}};
  for (size_t d = 0; d < shape.size(); ++d) {
    const Intervals held =
        local_intervals(layout, mesh_shape, coordinate, shape, static_cast<int>(d));
    std::vector<LocalBox> longer;
    for (const LocalBox& box : boxes) {
      int64_t place = 0;
      for (const Interval& interval : held) {
        LocalBox& next = longer.emplace_back(box);
        next.box.offset.push_back(interval.begin);
        next.box.shape.push_back(interval.size());
        next.local_offset.push_back(place);
        place += interval.size();
      }
    }
    boxes = std::move(longer);
  }
  return boxes;
}

}  // namespace shardweave

// A Box is a rectangular part of a tensor: what one piece of a checkpoint holds, what a rank keeps,
// and what the two have in common.
//
//   Box piece = {{0, 0}, {4, 8}}, mine = {{2, 0}, {5, 8}};
//   Box common = *intersect(piece, mine);                     // {2, 0}, {2, 8}
//   for_each_run(common, piece, mine, [&](int64_t from, int64_t to, int64_t count) { ... });
//
// Values; no LibTorch. Numbers count elements.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardweave/placement/layout.h"

namespace shardweave {

struct Box {
  Dims offset;  // global index of its first element
  Dims shape;
  int64_t numel() const;
  // "[0:4, 8:16]"; of a number (0-dimensional) "[]".
  std::string to_string() const;
  friend bool operator==(const Box&, const Box&) = default;
};

// All of a tensor.
Box whole_box(absl::Span<const int64_t> shape);
// Nothing if they have no element in common, as when one is empty. Of numbers: the number.
std::optional<Box> intersect(const Box& a, const Box& b);
// Of any inner box with numbers that are 0 or more, as files have it.
bool contains(const Box& outer, const Box& inner);
// Which two of the boxes, of equally many dimensions and none empty, have an element in common; nothing if there are
// none. Boxes of a grid take few comparisons, what somebody has thought up may take one for each two of them:
// ResourceExhausted when none are `left`, of all that one file has.
inline constexpr int64_t kMostBoxComparisons = int64_t{1} << 28;
absl::StatusOr<std::optional<std::pair<size_t, size_t>>> find_overlap(absl::Span<const Box> boxes,
                                                                      int64_t& left);

// `common` as it lies in two row-major arrays that hold the boxes `from` and `to`, both of which
// contain it: run(place in from, place in to, length) for every run of elements that is one in both,
// in order. As few runs as there are.
void for_each_run(const Box& common, const Box& from, const Box& to,
                  absl::FunctionRef<void(int64_t, int64_t, int64_t)> run);

// A part of a rank's local tensor that is a box of the whole one. Where a rank holds several
// intervals of a dimension (strided shards, several cuts), it has several of them.
struct LocalBox {
  Box box;
  Dims local_offset;  // of its first element in the local tensor
  friend bool operator==(const LocalBox&, const LocalBox&) = default;
};
// In the order of the local tensor; none is empty. `layout` as validate() accepts it, a Partial
// counts as replicated.
std::vector<LocalBox> local_boxes(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                                  absl::Span<const int64_t> coordinate,
                                  absl::Span<const int64_t> shape);

}  // namespace shardweave

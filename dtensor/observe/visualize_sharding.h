// Which rank holds which part of a tensor, as a picture: text for the terminal, or SVG. Nothing but
// a layout, a mesh and a shape is needed; for a DTensor see dtensor.h.
//
//   const Layout layout({Shard(0), Replicate()});
//   absl::Status printed = visualize_sharding(layout, mesh, {7, 5});
//
//   [7, 5] as [S(0), R] on DeviceMesh(dp=2, tp=2)
//                                  0:5
//       ┌────────────────────────────────────────────────────────┐
//       │                                                        │
//       │                                                        │
//   0:4 │                          0, 1                          │
//       │                                                        │
//       │                                                        │
//       ├────────────────────────────────────────────────────────┤
//       │                                                        │
//   4:7 │                          2, 3                          │
//       │                                                        │
//       └────────────────────────────────────────────────────────┘
//   dp=2  S(0): cuts the rows
//   tp=2  R: copies, written "a, b"
//
// Numbers are ranks in the world. Of a tensor with more than two dimensions, two are drawn; what
// the others' cuts leave to different ranks is written "a | b", the summands of a Partial "a + b".
// Of many pieces the first and the last are drawn: the cost does not depend on the number of ranks,
// beyond a few thousand. Pure functions but for the one that prints.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/placement/layout.h"

namespace shardweave {

struct VisualizeOptions {
  // The tensor dimensions drawn downwards and to the right; default: the first two that are cut,
  // else the first two.
  std::optional<std::pair<int, int>> dims;
  int max_pieces = 8;   // drawn per tensor dimension, 2 or more
  int max_ranks = 8;    // named per piece, 1 or more
  bool colors = false;  // of text: ANSI escape sequences, a background per owner
};

// InvalidArgument: the layout does not fit the mesh and the shape, or an option is out of range.
absl::StatusOr<std::string> visualize_sharding_text(const Layout& layout, const DeviceMesh& mesh,
                                                    absl::Span<const int64_t> shape,
                                                    const VisualizeOptions& options = {});

// A document of its own, or to be put into a page: no scripts, readable on light and dark, with a
// title and a description for those who do not see it. The pointer over a piece tells its indices
// and ranks.
absl::StatusOr<std::string> visualize_sharding_svg(const Layout& layout, const DeviceMesh& mesh,
                                                   absl::Span<const int64_t> shape,
                                                   const VisualizeOptions& options = {});

// Prints the text, in colours where terminal_colors(out) or the options say so.
absl::Status visualize_sharding(const Layout& layout, const DeviceMesh& mesh,
                                absl::Span<const int64_t> shape, VisualizeOptions options = {},
                                std::FILE* out = stdout);

// `out` is a terminal that shows colours, and the environment variable NO_COLOR
// (https://no-color.org) is not set.
bool terminal_colors(std::FILE* out);

}  // namespace shardweave

// What no way from one layout to another can do without: a lower bound for the plans of
// redistribute_plan.h.
//
//   least_bytes(*Layout::parse("[S(0)]"), *Layout::parse("[R]"), {4}, {8, 4}, 4);   // 96
//
// For tests and benchmarks: it looks at every rank and every block that the cuts of both layouts
// leave.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "shardweave/placement/layout.h"

namespace shardweave {

// Some rank sends at least so many bytes, whatever the ranks do, with layouts that validate()
// accepts. The larger one of
//   - the average: each element goes to every rank that wants and does not have it; of p summands p
//     - 1 have to be sent before the first rank has the sum, and then each other rank that wants it
//     has yet to be sent it (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms",
//     2009);
//   - what one rank alone has, and others want.
// A Partial that both layouts have is left alone, as plans do: its summands are moved, not reduced.
// A new Partial needs an element on one rank of its group only.
int64_t least_bytes(const Layout& from, const Layout& to, absl::Span<const int64_t> mesh_shape,
                    absl::Span<const int64_t> shape, int64_t element_size);

}  // namespace shardweave

// Arithmetic on sets of indices along one tensor dimension. Internal to placement/.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "shardweave/placement/layout.h"

namespace shardweave::placement_internal {

// Adds the indices of `next`, which begins where `intervals` ends or later.
void append(Intervals& intervals, Interval next);

// The number of indices.
int64_t count(const Intervals& intervals);

// Leaves in `held` what `placement` gives to rank `index` of `num_ranks`, where the indices in
// `held` are what there is to cut.
void narrow(Intervals& held, const Placement& placement, int64_t num_ranks, int64_t index);

// A run of indices that is in two sets, and where it begins in the order of each of them.
struct CommonRun {
  int64_t first_offset;
  int64_t second_offset;
  int64_t size;
};
using CommonRuns = absl::InlinedVector<CommonRun, 2>;
CommonRuns intersect(const Intervals& first, const Intervals& second);

// The number of indices in both sets.
int64_t common_size(const Intervals& a, const Intervals& b);

// Counts through all combinations of digits, last digit fastest: digits[i] is below radices[i].
// False when it is through, with all digits back at 0.
bool advance(absl::Span<int64_t> digits, absl::Span<const int64_t> radices);

}  // namespace shardweave::placement_internal

#include "shardweave/placement/intervals.h"

#include <algorithm>
#include <utility>

namespace shardweave::placement_internal {

void append(Intervals& intervals, Interval next) {
  if (next.size() == 0) return;
  if (!intervals.empty() && intervals.back().end == next.begin) {
    intervals.back().end = next.end;
  } else {
    intervals.push_back(next);
  }
}

int64_t count(const Intervals& intervals) {
  int64_t n = 0;
  for (const Interval& interval : intervals) n += interval.size();
  return n;
}

void narrow(Intervals& held, const Placement& placement, int64_t num_ranks, int64_t index) {
  if (held.size() == 1 && placement.is_plain_shard()) {  // as below; most cuts are like this
    const Interval piece = chunk(held[0].size(), num_ranks, index);
    held[0].end = held[0].begin + piece.end;
    held[0].begin += piece.begin;
    if (piece.size() == 0) held.clear();
    return;
  }
  Intervals result;
  auto outer = held.begin();
  int64_t outer_begin = 0;  // of *outer, counted in the indices held
  for (const Interval& piece : cut(placement, count(held), num_ranks, index)) {
    for (int64_t at = piece.begin; at < piece.end;) {
      while (at >= outer_begin + outer->size()) {
        outer_begin += outer->size();
        ++outer;
      }
      const int64_t end = std::min(piece.end, outer_begin + outer->size());
      append(result, {outer->begin + at - outer_begin, outer->begin + end - outer_begin});
      at = end;
    }
  }
  held = std::move(result);
}

CommonRuns intersect(const Intervals& first, const Intervals& second) {
  CommonRuns result;
  int64_t first_offset = 0;
  int64_t second_offset = 0;
  auto a = first.begin();
  auto b = second.begin();
  while (a != first.end() && b != second.end()) {
    const int64_t begin = std::max(a->begin, b->begin);
    const int64_t end = std::min(a->end, b->end);
    if (begin < end) {
      result.push_back(
          {first_offset + begin - a->begin, second_offset + begin - b->begin, end - begin});
    }
    if (a->end <= b->end) {
      first_offset += a++->size();
    } else {
      second_offset += b++->size();
    }
  }
  return result;
}

int64_t common_size(const Intervals& a, const Intervals& b) {
  if (a.size() == 1 && b.size() == 1) {
    return std::max<int64_t>(0, std::min(a[0].end, b[0].end) - std::max(a[0].begin, b[0].begin));
  }
  int64_t size = 0;
  for (const CommonRun& run : intersect(a, b)) size += run.size;
  return size;
}

bool advance(absl::Span<int64_t> digits, absl::Span<const int64_t> radices) {
  for (size_t i = digits.size(); i-- > 0;) {
    if (++digits[i] < radices[i]) return true;
    digits[i] = 0;
  }
  return false;
}

}  // namespace shardweave::placement_internal

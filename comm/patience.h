// What a rank does that waits long for others: it says so once, long before its deadline.
//
//   Patience patience(absl::Seconds(10));
//   while (!done()) {
//     if (sleep_until(patience.until(deadline))) continue;
//     if (!patience.has_ended(deadline)) return deadline_exceeded();
//     say_late(wait, absl::Seconds(10), absent);  // once
//   }
//
// For backends. A value; the clock is looked at only before one sleeps and after.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "shardweave/comm/backend.h"

namespace shardweave {

class Patience {
 public:
  explicit Patience(absl::Duration time) : time_(time) {}
  static Patience endless() { return Patience(absl::InfiniteDuration()); }
  absl::Duration time() const { return time_; }
  // When to wake up: at the deadline, or before it when patience ends. It begins with the first
  // call.
  Deadline until(Deadline deadline);
  // True once, unless the deadline has passed too.
  bool has_ended(Deadline deadline);

 private:
  absl::Duration time_;
  bool has_begun_ = false;
  Deadline end_ = Deadline::max();
};

// A rank that waits in an operation.
struct Wait {
  std::string_view group;
  absl::Span<const int64_t> world_ranks;  // of the group
  int rank = 0;
  const CallSignature& call;
  int message_tag = 0;  // of a send or recv
};
// "every rank of the group has to call it", "rank 1 has to call send with message tag 7".
std::string wanted_of_others(const Wait& wait);
// On stderr: "shardweave: rank 0 has waited 10s for ranks 1, 2 in all_reduce(f32[1], sum)
// 'aten::item', #7 of group 'dp_tp'; every rank of the group has to call it". `absent` have not
// come; if it is empty, all have, but the operation does not go on for `slow`.
void say_late(const Wait& wait, absl::Duration patience, absl::Span<const int> absent,
              absl::Span<const int> slow = {});

}  // namespace shardweave

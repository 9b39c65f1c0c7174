#include "shardweave/comm/patience.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_join.h"
#include "shardweave/comm/log.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

constexpr size_t kMaxShown = 16;  // of the ranks that a line lists

template <typename T>
std::string list(const std::vector<T>& values) {
  const size_t shown = std::min(values.size(), kMaxShown);
  std::string text = absl::StrJoin(values.begin(), values.begin() + shown, ", ");
  if (values.size() > shown) str_append(&text, " and ", values.size() - shown, " more");
  return text;
}

// "ranks 1, 2", or "ranks 1, 2 (world ranks 5, 6)" where these are other numbers.
std::string name_ranks(const Wait& wait, absl::Span<const int> ranks) {
  const std::vector<int> here(ranks.begin(), ranks.end());
  std::vector<int64_t> there;
  for (int rank : here) there.push_back(wait.world_ranks[rank]);
  const char* const plural = here.size() == 1 ? "" : "s";
  std::string text = str_cat("rank", plural, " ", list(here));
  if (!std::equal(here.begin(), here.end(), there.begin())) {
    str_append(&text, " (world rank", plural, " ", list(there), ")");
  }
  return text;
}

}  // namespace

Deadline Patience::until(Deadline deadline) {
  if (!has_begun_) {
    has_begun_ = true;
    const Deadline now = std::chrono::steady_clock::now();
    const std::chrono::nanoseconds time = absl::ToChronoNanoseconds(time_);  // saturates
    end_ = time < Deadline::max() - now ? now + time : Deadline::max();
  }
  return std::min(end_, deadline);
}

bool Patience::has_ended(Deadline deadline) {
  if (end_ == Deadline::max()) return false;
  const Deadline now = std::chrono::steady_clock::now();
  if (now < end_ || now >= deadline) return false;
  end_ = Deadline::max();
  return true;
}

std::string wanted_of_others(const Wait& wait) {
  if (!is_point_to_point(wait.call.op)) return "every rank of the group has to call it";
  const int peer = wait.call.root;
  return str_cat(peer == wait.rank ? "this rank itself" : str_cat("rank ", peer), " has to call ",
                 wait.call.op == OpKind::kSend ? "recv" : "send", " with message tag ",
                 wait.message_tag);
}

void say_late(const Wait& wait, absl::Duration patience, absl::Span<const int> absent,
              absl::Span<const int> slow) {
  say(str_cat(name_ranks(wait, {wait.rank}), " has waited ", absl::FormatDuration(patience),
              " for ", name_ranks(wait, absent.empty() ? slow : absent), " in ",
              to_string(wait.call), ", #", wait.call.sequence, " of group '", wait.group, "'; ",
              absent.empty() ? "all have called it" : wanted_of_others(wait)));
}

}  // namespace shardweave

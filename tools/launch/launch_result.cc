#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/tools/launch/launcher.h"

namespace shardweave {
namespace {

std::string show_signal(int signal) {
  return absl::StrCat("signal ", signal, " (", ::strsignal(signal), ")");
}

std::string seconds(absl::Duration duration) {
  return absl::StrCat(absl::ToInt64Milliseconds(duration) / 1e3);
}

}  // namespace

int LaunchResult::exit_code() const {
  if (interrupted_by != 0) return 128 + interrupted_by;
  if (!first_failure) return 0;
  const RankResult& failed = ranks[*first_failure];
  return failed.signal != 0 ? 128 + failed.signal : failed.exit_code;
}

std::string LaunchResult::summary() const {
  const std::string after = absl::StrCat(" after ", seconds(duration), " s");
  if (interrupted_by != 0) {
    return absl::StrCat("ended by ", show_signal(interrupted_by), after);
  }
  if (!first_failure) return absl::StrCat("all ", ranks.size(), " ranks succeeded", after);
  const RankResult& failed = ranks[*first_failure];
  std::vector<size_t> left;  // before it, without having failed: which may be why it has
  absl::Duration last;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].failed() || ranks[rank].duration >= failed.duration) continue;
    left.push_back(rank);
    last = std::max(last, ranks[rank].duration);
  }
  std::string text =
      absl::StrCat("rank ", *first_failure, " (pid ", failed.pid, ") ",
                   failed.signal != 0 ? absl::StrCat("was killed by ", show_signal(failed.signal))
                                      : absl::StrCat("exited with code ", failed.exit_code),
                   " after ", seconds(failed.duration), " s");
  if (left.size() + 1 < ranks.size()) absl::StrAppend(&text, "; the others were ended");
  if (!left.empty()) {
    absl::StrAppend(&text, "; ", left.size() == 1 ? "rank " : "ranks ", absl::StrJoin(left, ", "),
                    " had left first, with exit code 0 after ", seconds(last), " s");
  }
  return text;
}

std::string LaunchResult::to_json() const {
  std::vector<std::string> results;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankResult& r = ranks[rank];
    results.push_back(absl::StrCat("{\"rank\":", rank, ",\"pid\":", r.pid,
                                   ",\"exit_code\":", r.exit_code, ",\"signal\":", r.signal,
                                   ",\"seconds\":", seconds(r.duration), "}"));
  }
  return absl::StrCat("{\"ranks\":", ranks.size(), ",\"exit_code\":", exit_code(),
                      ",\"seconds\":", seconds(duration),
                      ",\"first_failure\":", first_failure ? absl::StrCat(*first_failure) : "null",
                      ",\"interrupted_by\":", interrupted_by, ",\"results\":[",
                      absl::StrJoin(results, ","), "]}");
}

}  // namespace shardweave

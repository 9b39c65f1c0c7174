#include "shardweave/comm/rendezvous/check_in.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "shardweave/comm/log.h"

namespace shardweave {
namespace {

constexpr size_t kMaxShown = 16;  // of the ranks that a message lists
// How much longer the others wait for rank 0's verdict than it waits for them.
constexpr absl::Duration kGrace = absl::Seconds(5);
// The verdict is a status code, a newline, and what each rank has said of itself by line, or the
// message. A rank says its host, a tab, and its CPUs; one that declines a newline, and then a verdict.
constexpr int kOk = static_cast<int>(absl::StatusCode::kOk);

std::string verdict_of(const absl::Status& status, const std::string& text) {
  return absl::StrCat(static_cast<int>(status.code()), "\n", text);
}

struct Verdict {
  int code = 0;
  std::string text;
};
std::optional<Verdict> read_verdict(const std::string& written) {
  const std::vector<std::string> parts = absl::StrSplit(written, absl::MaxSplits('\n', 1));
  Verdict result;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &result.code)) return std::nullopt;
  result.text = parts[1];
  return result;
}

class CheckIn {
 public:
  CheckIn(Store& store, const RendezvousInfo& info, absl::Duration timeout, absl::Duration patience)
      : store_(store),
        info_(info),
        timeout_(timeout),
        patience_(patience),
        prefix_(absl::StrCat("shardweave/", info.run, "/")) {}

  absl::Status arrive(const std::string& myself) {
    absl::StatusOr<int64_t> count = store_.add(absl::StrCat(prefix_, "arrivals/", info_.rank), 1);
    if (!count.ok()) return count.status();
    if (*count > 1) {
      return absl::AlreadyExistsError(absl::StrCat(
          "rank ", info_.rank, " of run \"", info_.run, "\" has come to ", store_.describe(),
          " before: two ranks have the same number, this one makes a world a second time,"
          " or the store is that of an earlier run"));
    }
    return store_.set(member(info_.rank), absl::StrCat(info_.world_size, " ", myself));
  }

  // Instead: why this rank does not.
  absl::Status decline(const absl::Status& why) {
    if (info_.rank == 0) return publish(of_declined(0, why));
    store_.set(read(info_.rank), "").IgnoreError();  // it need not be waited for
    return store_.set(
        member(info_.rank),
        absl::StrCat(info_.world_size, " \n", verdict_of(why, std::string(why.message()))));
  }

  // Of rank 0: what all ranks have said.
  absl::StatusOr<std::vector<std::string>> collect() {
    std::vector<std::string> members;
    for (int rank = 0; rank < info_.world_size; ++rank) members.push_back(member(rank));
    absl::Status all = wait(members, timeout_);
    if (absl::IsDeadlineExceeded(all)) {
      if (absl::Status sizes = compare_sizes(); !sizes.ok()) return sizes;
      absl::StatusOr<std::string> missing = missing_ranks();
      if (!missing.ok()) return missing.status();
      return absl::DeadlineExceededError(
          absl::StrCat(*missing, " of ", info_.world_size, " did not come to ", store_.describe(),
                       " in ", absl::FormatDuration(timeout_), " (run \"", info_.run, "\")"));
    }
    if (!all.ok()) return all;
    std::vector<std::string> hosts;
    for (int rank = 0; rank < info_.world_size; ++rank) {
      absl::StatusOr<std::string> host = host_of(rank);
      if (!host.ok()) return host.status();
      hosts.push_back(*std::move(host));
    }
    return hosts;
  }

  absl::Status publish(const absl::StatusOr<std::vector<std::string>>& hosts) {
    return store_.set(
        verdict(), verdict_of(hosts.status(), hosts.ok() ? absl::StrJoin(*hosts, "\n")
                                                         : std::string(hosts.status().message())));
  }

  // Of rank 0 after a failure: the store may go when it goes, so it stays until those who came have
  // read; `all`: those who will, too.
  void linger(bool all) {
    std::vector<std::string> readers;
    for (int rank = 1; rank < info_.world_size; ++rank) {
      const bool reads = all || store_.check({member(rank)}).value_or(false);
      if (reads) readers.push_back(read(rank));
    }
    store_.wait(readers, kGrace).IgnoreError();
  }

  // Of the other ranks.
  absl::StatusOr<std::vector<std::string>> receive() {
    const absl::Status told = wait({verdict()}, timeout_ + kGrace);
    if (absl::IsDeadlineExceeded(told)) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank 0 of ", info_.world_size, " did not come to ", store_.describe(),
                       " in ", absl::FormatDuration(timeout_), " (run \"", info_.run, "\")"));
    }
    if (!told.ok()) return told;
    const absl::StatusOr<std::string> text = store_.get(verdict(), timeout_);
    if (!text.ok()) return text.status();
    store_.set(read(info_.rank), "").IgnoreError();
    const std::optional<Verdict> heard = read_verdict(*text);
    if (!heard.has_value()) {
      return absl::InternalError(absl::StrCat(store_.describe(), ": unreadable verdict of rank 0"));
    }
    if (heard->code != kOk) {
      return absl::Status(static_cast<absl::StatusCode>(heard->code), heard->text);
    }
    std::vector<std::string> hosts = absl::StrSplit(heard->text, '\n');
    if (static_cast<int>(hosts.size()) != info_.world_size) {
      return different_size(0, absl::StrCat(hosts.size()));
    }
    return hosts;
  }

 private:
  std::string member(int rank) const { return absl::StrCat(prefix_, "member/", rank); }
  std::string read(int rank) const { return absl::StrCat(prefix_, "read/", rank); }
  std::string verdict() const { return absl::StrCat(prefix_, "verdict"); }

  // What a rank that has come has said of itself.
  absl::StatusOr<std::string> host_of(int rank) {
    absl::StatusOr<std::string> entry = store_.get(member(rank), timeout_);
    if (!entry.ok()) return entry.status();
    const std::vector<std::string> parts = absl::StrSplit(*entry, absl::MaxSplits(' ', 1));
    if (parts[0] != absl::StrCat(info_.world_size)) return different_size(rank, parts[0]);
    if (parts.back().empty() || parts.back()[0] != '\n') return parts.back();
    const std::optional<Verdict> why = read_verdict(parts.back().substr(1));
    if (!why.has_value()) {
      return absl::InternalError(
          absl::StrCat(store_.describe(), ": unreadable word of rank ", rank));
    }
    return of_declined(rank, absl::Status(static_cast<absl::StatusCode>(why->code), why->text));
  }

  // Of those that have come: who was told of fewer ranks is not waited for by them.
  absl::Status compare_sizes() {
    for (int rank = 0; rank < info_.world_size; ++rank) {
      absl::StatusOr<bool> there = store_.check({member(rank)});
      if (!there.ok()) return there.status();
      if (!*there) continue;
      if (absl::StatusOr<std::string> host = host_of(rank); !host.ok()) return host.status();
    }
    return absl::OkStatus();
  }

  // Says after a while who has not come; rank 0 looks now and then whether they ever will.
  absl::Status wait(const std::vector<std::string>& keys, absl::Duration timeout) {
    for (bool said = false;; said = true) {
      const absl::Duration now = std::min(timeout, std::max(patience_, absl::Milliseconds(1)));
      absl::Status status = store_.wait(keys, now);
      timeout -= now;
      if (!absl::IsDeadlineExceeded(status) || timeout <= absl::ZeroDuration()) return status;
      if (info_.rank == 0) {
        if (absl::Status sizes = compare_sizes(); !sizes.ok()) return sizes;
      }
      if (said) continue;
      if (absl::StatusOr<std::string> missing = missing_ranks(); missing.ok()) {
        say(absl::StrCat("rank ", info_.rank, " of ", info_.world_size, " has waited ",
                         absl::FormatDuration(patience_), " for ", *missing, " at ",
                         store_.describe(), " (run \"", info_.run, "\")"));
      }
    }
  }

  // "ranks 1, 2": those that have not come.
  absl::StatusOr<std::string> missing_ranks() {
    std::vector<int> missing;
    for (int rank = 0; rank < info_.world_size; ++rank) {
      absl::StatusOr<bool> there = store_.check({member(rank)});
      if (!there.ok()) return there.status();
      if (!*there) missing.push_back(rank);
    }
    if (missing.empty()) missing.push_back(0);  // which has not put down its verdict
    const size_t shown = std::min(missing.size(), kMaxShown);
    return absl::StrCat(
        missing.size() == 1 ? "rank " : "ranks ",
        absl::StrJoin(missing.begin(), missing.begin() + shown, ", "),
        missing.size() > shown ? absl::StrCat(" and ", missing.size() - shown, " more") : "");
  }

  static absl::Status of_declined(int rank, const absl::Status& why) {
    return absl::Status(
        why.code(), absl::StrCat("rank ", rank, " does not join: ", std::string(why.message())));
  }

  absl::Status different_size(int other, const std::string& size) const {
    return absl::FailedPreconditionError(absl::StrCat("rank ", info_.rank, " was told of ",
                                                      info_.world_size, " ranks, rank ", other,
                                                      " of ", size));
  }

  Store& store_;
  const RendezvousInfo& info_;
  const absl::Duration timeout_;
  const absl::Duration patience_;
  const std::string prefix_;
};

}  // namespace

int Roster::local_rank(int rank) const {
  return static_cast<int>(std::count(hosts.begin(), hosts.begin() + rank, hosts[rank]));
}

int Roster::local_size(int rank) const {
  return static_cast<int>(std::count(hosts.begin(), hosts.end(), hosts[rank]));
}

std::vector<std::string> Roster::local_cpus(int rank) const {
  std::vector<std::string> local;
  for (size_t i = 0; i < hosts.size(); ++i) {
    if (hosts[i] == hosts[rank]) local.push_back(cpus[i]);
  }
  return local;
}

absl::StatusOr<Roster> check_in(Store& store, const RendezvousInfo& info, const std::string& host,
                                absl::Duration timeout, absl::Duration patience,
                                const std::string& cpus) {
  if (absl::Status status = validate(info); !status.ok()) return status;
  CheckIn me(store, info, timeout, patience);
  absl::Status came = me.arrive(absl::StrCat(host, "\t", cpus));
  if (!came.ok()) return came;
  absl::StatusOr<std::vector<std::string>> members = info.rank == 0 ? me.collect() : me.receive();
  if (info.rank == 0) {
    absl::Status told = me.publish(members);
    if (members.ok() && !told.ok()) return told;
    if (!members.ok()) me.linger(/*all=*/false);
  }
  if (!members.ok()) return members.status();
  Roster roster;
  for (const std::string& each : *members) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(each, absl::MaxSplits('\t', 1));
    roster.hosts.push_back(parts.first);
    roster.cpus.push_back(parts.second);
  }
  return roster;
}

absl::Status decline(Store& store, const RendezvousInfo& info, absl::Status why) {
  if (!validate(info).ok() || info.world_size == 1) return why;
  CheckIn me(store, info, kGrace, kGrace);
  const absl::Status told = me.decline(why);
  if (told.ok() && info.rank == 0) me.linger(/*all=*/true);
  return why;
}

std::string this_host() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) return "unknown";
  return name;
}

}  // namespace shardweave

#include "shardweave/dtensor/testing/expect_comms.h"

#include <algorithm>
#include <map>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/dtensor/distribute_module.h"

namespace shardweave {

void PrintTo(const CommEvent& event, std::ostream* out) {
  *out << event.to_string();
}

namespace testing {
namespace {

std::string of_counts(const std::map<std::string, int>& counts) {
  if (counts.empty()) return "nothing";
  return absl::StrJoin(counts, ", ", [](std::string* out, const auto& entry) {
    absl::StrAppend(out, entry.second, " ", entry.first);
  });
}

std::string listed(const std::vector<CommEvent>& events) {
  std::string text;
  for (const CommEvent& event : events) absl::StrAppend(&text, "\n    ", event.to_string());
  return text;
}

}  // namespace

CommMatcher::CommMatcher(std::string collective, std::vector<std::string> mesh_dims,
                         std::optional<int64_t> bytes)
    : collective_(std::move(collective)), mesh_dims_(std::move(mesh_dims)), bytes_(bytes) {}

CommMatcher CommMatcher::by(std::string op) && {
  op_ = std::move(op);
  return std::move(*this);
}
CommMatcher CommMatcher::of(std::string argument) && {
  argument_ = std::move(argument);
  return std::move(*this);
}
CommMatcher CommMatcher::in(std::string module) && {
  module_ = std::move(module);
  return std::move(*this);
}
CommMatcher CommMatcher::forward() && {
  phase_ = Phase::kForward;
  return std::move(*this);
}
CommMatcher CommMatcher::backward() && {
  phase_ = Phase::kBackward;
  return std::move(*this);
}
CommMatcher CommMatcher::gradient_sync() && {
  phase_ = Phase::kGradientSync;
  return std::move(*this);
}
CommMatcher CommMatcher::implicitly() && {
  implicit_ = true;
  return std::move(*this);
}
CommMatcher CommMatcher::explicitly() && {
  implicit_ = false;
  return std::move(*this);
}

bool CommMatcher::MatchAndExplain(const CommEvent& event, std::ostream* why) const {
  const auto differs = [&](bool different, const auto&... words) {
    if (different && why != nullptr) (*why << ... << words);
    return different;
  };
  return !(
      differs(event.collective != collective_, "it is ", event.collective) ||
      differs(!mesh_dims_.empty() && event.mesh_dims != mesh_dims_, "it goes along ",
              absl::StrJoin(event.mesh_dims, ", ")) ||
      differs(bytes_ && event.bytes != *bytes_, "it sends ", event.bytes, " bytes") ||
      differs(op_ && event.op != *op_, "it is for ", event.op) ||
      differs(argument_ && event.argument != *argument_, "it moves '", event.argument, "'") ||
      differs(module_ && !matches_fqn(*module_, event.module), "it is in module '", event.module,
              "'") ||
      differs(phase_ && event.phase != *phase_, "it is ", shardweave::to_string(event.phase)) ||
      differs(implicit_ && event.implicit != *implicit_, "it is ",
              event.implicit ? "implicit" : "explicit"));
}

std::string CommMatcher::to_string() const {
  std::string text = collective_;
  if (!mesh_dims_.empty()) absl::StrAppend(&text, " ", absl::StrJoin(mesh_dims_, ", "));
  if (bytes_) absl::StrAppend(&text, ", ", *bytes_, " bytes");
  if (op_) absl::StrAppend(&text, ", for ", *op_);
  if (argument_) absl::StrAppend(&text, " '", *argument_, "'");
  if (module_) absl::StrAppend(&text, ", in ", *module_);
  if (phase_) absl::StrAppend(&text, ", ", std::string(shardweave::to_string(*phase_)));
  if (implicit_) absl::StrAppend(&text, *implicit_ ? ", implicit" : ", explicit");
  return text;
}

CommMatcher all_reduce(MeshDimNames dims, std::optional<int64_t> bytes) {
  return CommMatcher("all_reduce", std::move(dims), bytes);
}
CommMatcher all_gather(MeshDimNames dims, std::optional<int64_t> bytes) {
  return CommMatcher("all_gather", std::move(dims), bytes);
}
CommMatcher reduce_scatter(MeshDimNames dims, std::optional<int64_t> bytes) {
  return CommMatcher("reduce_scatter", std::move(dims), bytes);
}
CommMatcher all_to_all(MeshDimNames dims, std::optional<int64_t> bytes) {
  return CommMatcher("all_to_all", std::move(dims), bytes);
}
CommMatcher exchange(MeshDimNames dims, std::optional<int64_t> bytes) {
  return CommMatcher("exchange", std::move(dims), bytes);
}
CommMatcher broadcast(MeshDimNames dims, std::optional<int64_t> bytes) {
  return CommMatcher("broadcast", std::move(dims), bytes);
}

std::string ExpectedComms::difference(const std::vector<CommEvent>& events) const {
  if (!counts_.empty()) {
    std::map<std::string, int> want, got;
    for (const auto& [collective, count] : counts_) {
      if (count != 0) want[collective] += count;
    }
    for (const CommEvent& event : events) ++got[event.collective];
    if (got == want) return "";
    return absl::StrCat("expected ", of_counts(want), "; got ", of_counts(got),
                        events.empty() ? "" : ":", listed(events));
  }
  bool alike = events.size() == in_order_.size();
  std::string text =
      absl::StrCat("expected ", in_order_.size(), " collectives, got ", events.size(), "\n");
  for (size_t i = 0; i < std::max(events.size(), in_order_.size()); ++i) {
    std::ostringstream why;
    const bool both = i < events.size() && i < in_order_.size();
    const bool matches = both && in_order_[i].MatchAndExplain(events[i], &why);
    alike &= matches;
    const std::string got = i < events.size() ? events[i].to_string() : "nothing";
    if (matches) {
      absl::StrAppend(&text, "  ", i, "  as expected: ", got, "\n");
      continue;
    }
    absl::StrAppend(&text, "  ", i,
                    "  expected: ", i < in_order_.size() ? in_order_[i].to_string() : "nothing",
                    "\n     got:      ", got, "\n");
    if (both) absl::StrAppend(&text, "     but ", why.str(), "\n");
  }
  return alike ? "" : text;
}

::testing::AssertionResult check_comms(const CommTrace& trace, const ExpectedComms& expected) {
  return check_comms(trace.events(), expected);
}

::testing::AssertionResult check_comms(const std::vector<CommEvent>& events,
                                       const ExpectedComms& expected) {
  const std::string difference = expected.difference(events);
  if (difference.empty()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << difference;
}

}  // namespace testing
}  // namespace shardweave

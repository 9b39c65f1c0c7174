// What gpu_check has found: checks that have passed, failed or were skipped, with figures; as a
// table for people and as JSON.
//
//   std::cout << to_text(report);
//   return report.failed() ? 1 : 0;
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shardweave_tool {

enum class Outcome : uint8_t { kPassed, kFailed, kSkipped };
// "passed", "failed", "skipped".
const char* to_string(Outcome outcome);

// A number that was measured. What it should be at most is a target, which does not decide whether
// the check has passed (GpuCheckOptions::strict).
struct Figure {
  std::string name;
  double value = 0;
  std::string unit;
  std::optional<double> at_most = {};

  bool misses_target() const { return at_most.has_value() && !(value <= *at_most); }
};

struct CheckResult {
  std::string name;
  Outcome outcome = Outcome::kPassed;
  // Why it has failed or was skipped; of one that has passed what was looked at.
  std::string why;
  std::vector<Figure> figures = {};
  std::vector<std::pair<std::string, std::string>> facts = {};  // names and what they are
  double seconds = 0;
};

struct GpuReport {
  int rank = 0;  // of this process; rank 0 has what all have found
  int ranks = 1;
  std::vector<CheckResult> checks;

  bool failed() const;
  // Null: there is none of that name.
  const CheckResult* find(const std::string& name) const;
};

// A row for each check, then facts and figures.
std::string to_text(const GpuReport& report);

// In one line:
//   {"ok": true, "rank": 0, "ranks": 1, "checks": [
//     {"name": "block", "outcome": "passed", "why": "...", "seconds": 1.5, "facts": {},
//      "figures": [{"name": "plain", "value": 1.7, "unit": "ms"}]}]}
// "at_most" is where there is a target; a value that is no number is null.
std::string to_json(const GpuReport& report);

}  // namespace shardweave_tool

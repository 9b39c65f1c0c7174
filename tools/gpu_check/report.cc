#include "report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/observe/text_table.h"

namespace shardweave_tool {

using shardweave::dtensor_internal::TextTable;

const char* to_string(Outcome outcome) {
  switch (outcome) {
    case Outcome::kPassed:
      return "passed";
    case Outcome::kFailed:
      return "failed";
    case Outcome::kSkipped:
      return "skipped";
  }
  return "";
}

bool GpuReport::failed() const {
  return std::any_of(checks.begin(), checks.end(),
                     [](const CheckResult& c) { return c.outcome == Outcome::kFailed; });
}

const CheckResult* GpuReport::find(const std::string& name) const {
  const auto found = std::find_if(checks.begin(), checks.end(),
                                  [&](const CheckResult& c) { return c.name == name; });
  return found == checks.end() ? nullptr : &*found;
}

std::string to_text(const GpuReport& report) {
  TextTable checks({"check", "outcome", "seconds", "what"}, /*right_aligned=*/{2});
  TextTable facts({"check", "fact", "is"});
  TextTable figures({"check", "figure", "value", "unit", "target"}, /*right_aligned=*/{2});
  int count[3] = {};
  for (const CheckResult& check : report.checks) {
    ++count[static_cast<int>(check.outcome)];
    checks.add(
        {check.name, to_string(check.outcome), absl::StrFormat("%.2f", check.seconds), check.why});
    for (const auto& [name, what] : check.facts) facts.add({check.name, name, what});
    for (const Figure& f : check.figures) {
      const std::string target =
          f.at_most.has_value()
              ? absl::StrFormat("at most %.4g%s", *f.at_most, f.misses_target() ? ": missed" : "")
              : "";
      figures.add({check.name, f.name, absl::StrFormat("%.4g", f.value), f.unit, target});
    }
  }
  return absl::StrCat(checks.to_string(), "\n", facts.to_string(), "\n", figures.to_string(), "\n",
                      report.ranks, report.ranks == 1 ? " rank: " : " ranks: ", count[0],
                      " passed, ", count[1], " failed, ", count[2], " skipped\n");
}

std::string to_json(const GpuReport& report) {
  nlohmann::json checks = nlohmann::json::array();
  for (const CheckResult& check : report.checks) {
    nlohmann::json facts = nlohmann::json::object();
    for (const auto& [name, what] : check.facts) facts[name] = what;
    nlohmann::json figures = nlohmann::json::array();
    for (const Figure& f : check.figures) {
      nlohmann::json figure = {{"name", f.name}, {"value", f.value}, {"unit", f.unit}};
      if (f.at_most.has_value()) figure["at_most"] = *f.at_most;
      figures.push_back(std::move(figure));
    }
    checks.push_back({{"name", check.name},
                      {"outcome", to_string(check.outcome)},
                      {"why", check.why},
                      {"seconds", check.seconds},
                      {"facts", std::move(facts)},
                      {"figures", std::move(figures)}});
  }
  const nlohmann::json json = {{"ok", !report.failed()},
                               {"rank", report.rank},
                               {"ranks", report.ranks},
                               {"checks", std::move(checks)}};
  // What libraries say need not be UTF-8.
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace shardweave_tool

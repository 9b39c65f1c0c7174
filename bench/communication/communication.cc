// What models communicate in a training step, beside what theory says.
//
//   ./bazelw run -c opt //bench:communication                       # a table
//   ./bazelw run -c opt //bench:communication -- --json             # one JSON document
//   ./bazelw run -c opt //bench:communication -- --filter="llama, tp" --trace
//   ./bazelw run -c opt //bench:communication -- --cpu --max_cpu_ratio=1.25 --dim=512 --layers=4
//       --tokens=256 --batch=4 --vocab=4096
//
// The models (models.h) know nothing of meshes. The theory (scenarios.h) is formulas of sizes; from the
// library it has what a plan makes of each parameter. Ranks are threads. Exit status 1: a loss or a
// gradient is not one device's, a rank sends what theory does not say, CPU time is beyond
// --max_cpu_ratio, or a step failed.

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "measure.h"
#include "models.h"
#include "nlohmann/json.hpp"
#include "scenarios.h"
#include "shardweave/dtensor/observe/text_table.h"

ABSL_FLAG(bool, json, false, "print one JSON document");
ABSL_FLAG(std::string, filter, "", "only scenarios with this in \"name (mesh)\"");
ABSL_FLAG(bool, trace, false, "show every collective");
ABSL_FLAG(bool, cpu, false, "measure CPU time, too");
ABSL_FLAG(
    double, max_cpu_ratio, 0,
    "of the ranks' CPU time to one device's and communication's; more is a failure (0: none is)");
ABSL_FLAG(int, steps, 5, "of which the median CPU time is taken");
ABSL_FLAG(int64_t, batch, communication_bench::Sizes().batch, "sequences, or images");
ABSL_FLAG(int64_t, tokens, communication_bench::Sizes().tokens, "of a sequence");
ABSL_FLAG(int64_t, dim, communication_bench::Sizes().dim, "features; four times as many hidden");
ABSL_FLAG(int64_t, layers, communication_bench::Sizes().layers, "layers");
ABSL_FLAG(int64_t, vocab, communication_bench::Sizes().vocabulary, "vocabulary");

namespace communication_bench {
namespace {

Sizes sizes_of_flags() {
  Sizes sizes;
  sizes.batch = absl::GetFlag(FLAGS_batch);
  sizes.tokens = absl::GetFlag(FLAGS_tokens);
  sizes.dim = absl::GetFlag(FLAGS_dim);
  sizes.hidden = 4 * sizes.dim;
  sizes.layers = absl::GetFlag(FLAGS_layers);
  sizes.vocabulary = absl::GetFlag(FLAGS_vocab);
  return sizes;
}

double ratio(int64_t measured, int64_t theory) {
  return static_cast<double>(measured) / static_cast<double>(theory);
}

// A scenario's lines: one for each phase that has or should have traffic, and the step's.
struct Line {
  const char* phase;
  Traffic measured, theory;
};
std::vector<Line> lines(const Scenario& s, const Phases& measured) {
  return {{"forward", measured.forward, s.theory.forward},
          {"backward", measured.backward, s.theory.backward},
          {"gradient sync", measured.gradient_sync, s.theory.gradient_sync},
          {"step", measured.step(), s.theory.step()}};
}

nlohmann::ordered_json json_of(const Scenario& s, const Measurement& m) {
  nlohmann::ordered_json phases;
  for (const Line& line : lines(s, m.phases())) {
    nlohmann::ordered_json& phase = phases[line.phase];
    phase = {{"collectives", line.measured.collectives()},
             {"theory_collectives", line.theory.collectives()},
             {"kinds", line.measured.kinds},
             {"theory_kinds", line.theory.kinds},
             {"bytes", line.measured.bytes},
             {"theory_bytes", line.theory.bytes}};
    if (line.theory.bytes > 0) phase["ratio"] = ratio(line.measured.bytes, line.theory.bytes);
  }
  const Verdict verdict = as_theory_says(s, m.of_ranks);
  nlohmann::ordered_json json = {{"name", s.name},
                                 {"mesh", mesh_name(s)},
                                 {"phases", std::move(phases)},
                                 {"as_theory_says", verdict != Verdict::kNo},
                                 {"right_numbers", m.right()},
                                 {"loss_error", m.loss_error},
                                 {"gradient_error", m.gradient_error},
                                 {"worst_gradient", m.worst_gradient}};
  if (s.row_sums != Traffic()) {
    json["row_sums"] = {{"phase", "backward"},
                        {"kinds", s.row_sums.kinds},
                        {"bytes", s.row_sums.bytes},
                        {"used", verdict == Verdict::kWithRowSums}};
  }
  return json;
}

void add_rows(const Scenario& s, const Measurement& m,
              shardweave::dtensor_internal::TextTable& table) {
  const Verdict verdict = as_theory_says(s, m.of_ranks);
  for (const Line& line : lines(s, m.phases())) {
    const auto& [phase, measured, theory] = line;
    if (measured == Traffic() && theory == Traffic()) continue;
    const bool total = std::string_view(phase) == "step";
    table.add(
        {s.name, mesh_name(s), phase, absl::StrCat(measured.collectives()),
         absl::StrCat(theory.collectives()), absl::StrCat(measured.bytes),
         absl::StrCat(theory.bytes),
         theory.bytes == 0 ? "-" : absl::StrFormat("%.2f", ratio(measured.bytes, theory.bytes)),
         !total                             ? ""
         : verdict == Verdict::kYes         ? "yes"
         : verdict == Verdict::kWithRowSums ? "yes, and row sums"
                                            : "NO",
         !total      ? ""
         : m.right() ? "right"
                     : "WRONG"});
  }
}

// False, with a word to stderr: not sizes that the scenarios can cut.
bool fit(const Sizes& s) {
  if (s.batch > 0 && s.tokens > 0 && s.dim > 0 && s.layers > 0 && s.vocabulary > 0 &&
      s.batch % 4 == 0 && s.tokens % 4 == 0 && s.vocabulary % 4 == 0 && s.dim % (2 * s.heads) == 0)
    return true;
  std::fprintf(stderr,
               "communication: wanted --batch, --tokens and --vocab that divide by 4, --dim by %d, "
               "and --layers of at least 1\n",
               static_cast<int>(2 * s.heads));
  return false;
}

int run() {
  using shardweave::dtensor_internal::TextTable;
  const bool as_json = absl::GetFlag(FLAGS_json);
  nlohmann::ordered_json json = {{"scenarios", nlohmann::ordered_json::array()}};
  TextTable table({"scenario", "mesh", "phase", "collectives", "theory", "bytes", "theory", "ratio",
                   "as theory says", "numbers"},
                  /*right_aligned=*/{3, 4, 5, 6, 7});
  TextTable cpu_table(
      {"scenario", "mesh", "one device ms", "ranks ms", "communication ms", "ratio"},
      /*right_aligned=*/{2, 3, 4, 5});
  int failures = 0;
  int all = 0, as_theory = 0;
  const Sizes sizes = sizes_of_flags();
  if (!fit(sizes)) return 1;
  for (const Scenario& s : scenarios(sizes)) {
    const std::string name = absl::StrCat(s.name, " ", mesh_name(s));
    if (!absl::StrContains(name, absl::GetFlag(FLAGS_filter))) continue;
    ++all;
    const absl::StatusOr<Measurement> m = measure(s);
    if (!m.ok()) {
      std::fprintf(stderr, "%s: %s\n", name.c_str(), m.status().ToString().c_str());
      ++failures;
      continue;
    }
    if (!m->right()) {
      std::fprintf(stderr, "%s: wrong: loss off by %.2g, gradients by %.2g (%s)\n", name.c_str(),
                   m->loss_error, m->gradient_error, m->worst_gradient.c_str());
      ++failures;
    }
    if (as_theory_says(s, m->of_ranks) != Verdict::kNo) {
      ++as_theory;
    } else {
      std::fprintf(stderr, "%s: not as theory says:\n%s", name.c_str(),
                   differences(s, m->of_ranks).c_str());
      ++failures;
    }
    if (absl::GetFlag(FLAGS_trace)) {
      std::fprintf(as_json ? stderr : stdout, "%s\n%s\n", name.c_str(), m->trace.c_str());
    }
    add_rows(s, *m, table);
    json["scenarios"].push_back(json_of(s, *m));
    if (!absl::GetFlag(FLAGS_cpu)) continue;
    const absl::StatusOr<CpuTime> cpu = cpu_time(s, absl::GetFlag(FLAGS_steps));
    if (!cpu.ok()) {
      std::fprintf(stderr, "%s: %s\n", name.c_str(), cpu.status().ToString().c_str());
      ++failures;
      continue;
    }
    const double limit = absl::GetFlag(FLAGS_max_cpu_ratio);
    if (limit > 0 && cpu->ratio > limit) {
      std::fprintf(stderr, "%s: CPU time is %.2f times one device's and communication's\n",
                   name.c_str(), cpu->ratio);
      ++failures;
    }
    const auto ms = [](double seconds) { return absl::StrFormat("%.1f", 1e3 * seconds); };
    cpu_table.add({s.name, mesh_name(s), ms(cpu->one_device), ms(cpu->ranks),
                   ms(cpu->communication), absl::StrFormat("%.2f", cpu->ratio)});
    json["scenarios"].back()["cpu"] = {{"one_device_s", cpu->one_device},
                                       {"ranks_s", cpu->ranks},
                                       {"communication_s", cpu->communication},
                                       {"ratio", cpu->ratio}};
  }
  if (all == 0) {
    std::fprintf(stderr, "communication: no scenario has '%s' in its name\n",
                 absl::GetFlag(FLAGS_filter).c_str());
    return 1;
  }
  TextTable skips({"not among them", "why"});
  json["skipped"] = nlohmann::ordered_json::array();
  for (const Skipped& skip : skipped()) {
    skips.add({skip.name, skip.why});
    json["skipped"].push_back({{"name", skip.name}, {"why", skip.why}});
  }
  json["as_theory_says"] = as_theory;
  json["failures"] = failures;
  if (as_json) {
    std::printf("%s\n", json.dump().c_str());
  } else {
    std::printf(
        "%s%d of %d scenarios communicate as theory says\n"
        "row sums: LibTorch's log_softmax sums each row of its gradient over the vocabulary\n\n%s",
        table.to_string().c_str(), as_theory, all, skips.to_string().c_str());
    if (absl::GetFlag(FLAGS_cpu)) {
      std::printf(
          "\nCPU time of a step, medians; one device's on as many threads at once as the ranks "
          "can\n"
          "run; ratio: of the ranks' to one device's and communication's\n%s",
          cpu_table.to_string().c_str());
    }
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace communication_bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_max_cpu_ratio) > 0 && !absl::GetFlag(FLAGS_cpu)) {
    std::fprintf(stderr, "--max_cpu_ratio wants --cpu, which measures it\n");
    return 2;
  }
  if (absl::GetFlag(FLAGS_steps) < 1) {
    std::fprintf(stderr, "--steps is %d, not at least 1\n", absl::GetFlag(FLAGS_steps));
    return 2;
  }
  return communication_bench::run();
}

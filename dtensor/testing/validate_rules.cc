// Tries every sharding rule on every sample (see rule_validator.h), and says which rules are wrong
// and which strategies are missing.
//
//   ./bazelw run -c opt //dtensor:validate_rules -- --ops=conv
//   ./bazelw run -c opt //dtensor:validate_rules -- --all --json
//   ./bazelw run -c opt //dtensor:validate_rules -- --device=cuda      # LibTorch's kernels for GPUs
//
// Exits with 1 if anything is wrong. --all tries many more combinations of placements than the
// default, which is what validate_rules_test runs, and second gradients for all that run on
// DTensors: by default for a third. What one device cannot differentiate twice has none, and is
// listed with --all.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/load_cuda.h"
#include "shardweave/dtensor/testing/rule_validator.h"
#include "shardweave/tools/progress/progress_bar.h"

ABSL_FLAG(bool, all, false,
          "try all combinations up to thousands per sample, and all samples end to end");
ABSL_FLAG(std::string, ops, "", "only operators whose name contains this");
ABSL_FLAG(
    std::string, device, "cpu",
    "whose kernels run; on another than the CPU strategies and decisions are tried, and nothing "
    "end to end, for which each rank would need one");
ABSL_FLAG(bool, json, false, "end with one line of JSON on stdout; all else goes to stderr");
ABSL_FLAG(uint64_t, seed, 1, "of the values and of the sampled combinations");
ABSL_FLAG(std::string, part, "1/1", "\"2/16\": every 16th sample, from the second");

namespace shardweave::testing {
namespace {

using Clock = std::chrono::steady_clock;

struct Job {
  const SampleFamily* family;
  const Sample* sample;
};

// Empty for a part that there is not.
std::vector<Job> jobs(const std::string& ops, const std::string& part) {
  const std::vector<std::string> numbers = absl::StrSplit(part, '/');
  size_t first = 0, step = 0;
  if (numbers.size() != 2 || !absl::SimpleAtoi(numbers[0], &first) ||
      !absl::SimpleAtoi(numbers[1], &step) || first < 1 || first > step) {
    return {};
  }
  std::vector<Job> found;
  size_t n = 0;
  for (const SampleFamily& family : sample_families()) {
    for (const Sample& sample : family.samples) {
      if (sample.op.find(ops) == std::string::npos) continue;
      if (n++ % step == first - 1) found.push_back({&family, &sample});
    }
  }
  return found;
}

// In a process of its own, for some kernels of LibTorch crash on sizes that do not fit (its front end
// looks, they do not), and the search for missing strategies tries those. After a crash only what the
// rule offers is tried, here.
Validation look_for_missing(const Sample& sample, const Rule& rule, ValidationOptions options) {
  int pipe_ends[2];
  if (::pipe(pipe_ends) != 0) throw Error(absl::ErrnoToStatus(errno, "pipe"));
  const pid_t child = ::fork();
  if (child < 0) throw Error(absl::ErrnoToStatus(errno, "fork"));
  if (child == 0) {
    ::close(pipe_ends[0]);
    const Validation found = validate_strategies(sample, rule, options);
    const std::string text =
        nlohmann::json::array({found.combinations, found.wrong, found.missing}).dump();
    const bool written =
        ::write(pipe_ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size());
    ::_exit(written ? 0 : 1);
  }
  ::close(pipe_ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = ::read(pipe_ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, n);
  ::close(pipe_ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (status != 0) {
    options.find_missing = false;
    return validate_strategies(sample, rule, options);
  }
  const nlohmann::json found = nlohmann::json::parse(text);
  Validation result;
  result.combinations = found[0];
  result.wrong = found[1].get<std::vector<std::string>>();
  result.missing = found[2].get<std::vector<std::string>>();
  return result;
}

// LibTorch has no kernel for some devices, or takes other arguments there.
bool runs_on(c10::Device device, const SampleCall& call, std::string* why) {
  Tensors inputs;
  for (size_t i = 0; i < call.inputs().size(); ++i) {
    inputs.push_back(call.inputs()[i].make(i + 1).to(device));
  }
  try {
    call.run(inputs);
  } catch (const std::exception& error) {
    *why = std::string(error.what()).substr(0, 200);
    *why = why->substr(0, why->find('\n'));
    if (why->find("CUDA error") != std::string::npos) throw;
    return false;
  }
  return true;
}

struct Extent {
  bool all = false;
  uint64_t seed = 1;
  c10::Device device = c10::kCPU;
  std::vector<std::string>* not_run = nullptr;  // samples that LibTorch does not run there
};

Validation validate(const Sample& sample, const Extent& extent) {
  const bool all = extent.all;
  Validation result;
  try {
    const SampleCall call(sample);
    if (std::string why; !extent.device.is_cpu() && !runs_on(extent.device, call, &why)) {
      extent.not_run->push_back(absl::StrCat(sample.op, ": ", why));
      return result;
    }
    const Rule* rule = RuleTable::builtin().find(call.op().operator_name());
    if (rule != nullptr) {
      ValidationOptions options;
      options.max_combinations = all ? 1500 : 40 / kCheckedShare;
      // A driver of GPUs does not survive fork().
      options.find_missing = all && extent.device.is_cpu();
      options.seed = extent.seed;
      options.device = extent.device;
      result.merge(options.find_missing ? look_for_missing(sample, *rule, options)
                                        : validate_strategies(sample, *rule, options));
      options.max_combinations = all ? 400 : 24 / kCheckedShare;
      result.merge(validate_decisions(sample, *rule, options));
    }
    if (!extent.device.is_cpu()) return result;
    CheckOptions options;
    options.max_combinations = all ? 100 : 6;
    options.all_partials = true;
    if (all) options.second_gradients_every = 1;
    options.seed = extent.seed;
    std::vector<std::vector<MeshDim>> meshes = {{{"x", 2}}, {{"x", 3}}, {{"x", 2}, {"y", 2}}};
    if (!all) meshes = {{{"x", 3}}};
    result.merge(validate_end_to_end(sample, meshes, options));
  } catch (const std::exception& error) {
    const std::string what = error.what();
    result.wrong.push_back(absl::StrCat(sample.op, ": ", what.substr(0, what.find('\n'))));
  }
  return result;
}

bool has_rule(const std::string& op) {
  const size_t dot = op.find('.', op.find("::"));
  return RuleTable::builtin().find(
             {op.substr(0, dot), dot == std::string::npos ? "" : op.substr(dot + 1)}) != nullptr;
}

// What no sample reaches, and why.
constexpr std::string_view kNotSampled[] = {
    // Lists: optimizer_test.
    "aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_",
    // No tensor is returned: data_movement_test, dispatch_test, view_test.
    "aten::allclose", "aten::equal", "aten::is_set_to", "aten::is_same_size",
    "aten::_local_scalar_dense", "aten::_is_all_true", "aten::_is_any_true",
    "aten::_linalg_check_errors",
    // What a tensor is changes: tests/op_db.
    "aten::resize_", "aten::set_", "aten::as_strided_scatter",
    // LibTorch takes them apart before they reach us, except in inference mode: tests/op_db.
    "aten::__and__", "aten::__or__", "aten::__xor__", "aten::max.o", "aten::min.o", "aten::selu",
    // Half of its results are scratch for the derivatives: segments_test.
    "aten::_embedding_bag",
    // Lengths in descending order: layers_test.
    "aten::_pack_padded_sequence",
    // By oneDNN: layers_test.
    "aten::mkldnn_rnn_layer",
    // (gradient_modes_test)
    "aten::max_pool1d",
    // Their arguments are other operators' results: tests/op_db, random_test.
    "aten::linalg_ldl_solve", "aten::max_unpool", "aten::rrelu_with_noise", "aten::normal.out",
    // LibTorch has them for GPUs alone: tests/cuda_test.cc.
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    // The same, made of others: norm_loss_test.
    "aten::cudnn_batch_norm"};

bool is_not_sampled(std::string_view name) {
  return std::any_of(std::begin(kNotSampled), std::end(kNotSampled),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

// Rules that no sample reaches.
std::vector<std::string> rules_without_samples(const std::set<std::string>& operators) {
  std::set<std::string> reached;
  for (const std::string& op : operators) {
    reached.insert(op);
    std::string name = op.substr(0, op.find('.', op.find("::")));
    reached.insert(name);
    if (name.ends_with("_")) reached.insert(name.substr(0, name.size() - 1));
  }
  std::vector<std::string> missing;
  for (const std::string& name : RuleTable::builtin().names()) {
    if (!reached.contains(name) && !is_not_sampled(name)) missing.push_back(name);
  }
  return missing;
}

void print_list(std::ostream& out, const char* title, const std::vector<std::string>& lines) {
  if (lines.empty()) return;
  out << title << "\n";
  for (const std::string& line : lines) out << "  " << line << "\n";
}

int run() {
  const auto begin = Clock::now();
  at::set_num_threads(1);
  const bool all = absl::GetFlag(FLAGS_all);
  const bool json = absl::GetFlag(FLAGS_json);
  std::vector<std::string> not_run;
  Extent extent = {.all = all, .seed = absl::GetFlag(FLAGS_seed), .not_run = &not_run};
  try {
    extent.device = c10::Device(absl::GetFlag(FLAGS_device));
    if (extent.device.is_cuda()) throw_if_error(load_cuda(0));
  } catch (const std::exception& error) {
    std::cerr << "validate_rules: --device=" << absl::GetFlag(FLAGS_device) << ": " << error.what()
              << "\n";
    return 2;
  }
  const std::vector<Job> todo = jobs(absl::GetFlag(FLAGS_ops), absl::GetFlag(FLAGS_part));
  if (todo.empty()) {
    std::cerr << "validate_rules: no sample of an operator whose name contains '"
              << absl::GetFlag(FLAGS_ops) << "' in part " << absl::GetFlag(FLAGS_part) << "\n";
    return 2;
  }
  ProgressBar bar({.title = "validating",
                   .steps = static_cast<int64_t>(todo.size()),
                   .unit = "samples",
                   .out = &std::cerr,
                   .terminal = ::isatty(STDERR_FILENO) != 0});
  std::map<std::string, Validation> families;
  Validation total;
  for (const Job& job : todo) {
    Validation found = validate(*job.sample, extent);
    for (const std::string& text : found.wrong) std::cerr << "wrong: " << text << "\n";
    families[job.family->name].merge(found);
    total.merge(std::move(found));
    bar.step_done(absl::StrFormat("%d wrong  %s", total.wrong.size(), job.sample->op));
  }
  std::set<std::string> with_rule;
  for (const std::string& op : total.operators) {
    if (has_rule(op)) with_rule.insert(op);
  }
  std::vector<std::string> unreached;
  const bool whole = absl::GetFlag(FLAGS_ops).empty() && absl::GetFlag(FLAGS_part) == "1/1";
  if (whole && extent.device.is_cpu()) unreached = rules_without_samples(total.reached);
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();

  std::ostream& out = json ? std::cerr : std::cout;
  print_list(out, "wrong:", total.wrong);
  print_list(out, "missing:", total.missing);
  print_list(out, "rules without a sample:", unreached);
  print_list(out, "samples that LibTorch does not run on this device:", not_run);
  if (all) print_list(out, "no second derivative:", total.no_second_derivative);
  out << absl::StreamFormat("%-16s %10s %14s %17s %21s %7s %9s\n", "family", "operators",
                            "combinations", "second gradients", "no second derivative", "wrong",
                            "missing");
  auto line = [&](const std::string& name, const Validation& found) {
    out << absl::StreamFormat("%-16s %10d %14d %17d %21d %7d %9d", name, found.operators.size(),
                              found.combinations, found.second_gradients,
                              found.no_second_derivative.size(), found.wrong.size(),
                              found.missing.size());
  };
  for (const auto& [name, found] : families) {
    line(name, found);
    out << "\n";
  }
  line("all", total);
  out << absl::StreamFormat("   %d operators with a rule, %.0f s\n", with_rule.size(), seconds);
  if (json) {
    std::cout << nlohmann::json{{"operators", with_rule.size()},
                                {"operators_run", total.operators.size()},
                                {"samples", todo.size()},
                                {"combinations", total.combinations},
                                {"second_gradients", total.second_gradients},
                                {"no_second_derivative", total.no_second_derivative.size()},
                                {"no_second_derivative_list", total.no_second_derivative},
                                {"wrong", total.wrong.size()},
                                {"wrong_list", total.wrong},
                                {"missing", total.missing.size()},
                                {"missing_list", total.missing},
                                {"rules_without_samples", unreached},
                                {"samples_not_run", not_run},
                                {"seconds", seconds}}
                     .dump()
              << std::endl;
  }
  const bool ran = not_run.size() < todo.size();
  return total.wrong.empty() && unreached.empty() && ran ? 0 : 1;
}

}  // namespace
}  // namespace shardweave::testing

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Tries every sharding rule against one device.");
  absl::ParseCommandLine(argc, argv);
  return shardweave::testing::run();
}

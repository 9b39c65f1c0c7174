// Whether everything works on the GPUs of this machine, and what it costs (gpu_check.h).
//
//   ./bazelw run -c opt //tools:gpu_check                        # one rank, a table
//   ./bazelw run -c opt //tools:gpu_check -- --ranks=8 --json    # a process for each of 8 GPUs
//   torchrun --no-python --nproc-per-node=8 gpu_check --output=report.json
//
// Exit codes: 0, also where all that needs a GPU was skipped; 1: something has failed, or cannot be
// done.

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gpu_check.h"
#include "shardweave/comm/rendezvous/rendezvous.h"
#include "shardweave/tools/launch/launcher.h"
#include "shardweave/tools/working_directory/working_directory.h"

ABSL_FLAG(bool, json, false, "print JSON, not a table");
ABSL_FLAG(std::string, output, "", "a file that gets the JSON, too");
ABSL_FLAG(bool, quick, false, "small sizes");
ABSL_FLAG(bool, strict, false, "a figure that misses its target is a failure");
ABSL_FLAG(std::vector<std::string>, only, {}, "names of checks, separated by commas");
ABSL_FLAG(int, ranks, 0, "start so many processes here; default: as a launcher has done, or one");
ABSL_FLAG(int, device, -1, "this rank's GPU; default: that of its local rank");
ABSL_FLAG(std::string, backend, "nccl",
          "nccl, or gloo: by way of the host, several ranks on one GPU");
ABSL_FLAG(std::string, directory, "", "where the checkpoint goes for a while; ranks share it");
ABSL_FLAG(double, timeout, 120, "seconds that a collective may take");

namespace {

using namespace shardweave_tool;

std::string usage() {
  std::string text = R"(Checks and measures Shardweave on the GPUs of this machine.

  gpu_check [--json] [--quick]              on one GPU
  gpu_check --ranks=8                       on eight: a process for each
  torchrun --no-python --nproc-per-node=8 gpu_check, srun gpu_check, ...
                                            on those of a launcher

  --json            JSON on stdout, not a table
  --output=FILE     the JSON goes to this file, too
  --quick           small sizes: a minute, not several
  --strict          a figure that misses its target is a failure
  --only=NAME,...   these checks alone (and machine and join)
  --ranks=N         starts N processes on this machine
  --backend=gloo    not NCCL but Gloo, by way of the host: several ranks may have one GPU
  --device=N        this rank's GPU (default: that of its local rank)
  --directory=DIR   where the checkpoint goes for a while; all ranks share it (default: /tmp)
  --timeout=SECONDS of a collective (default: 120)

Rank 0 writes. What cannot be checked here is skipped, with the reason. The checks, and what they
need:

)";
  for (const CheckDescription& check : checks_of_gpu_check()) {
    absl::StrAppendFormat(&text, "  %-17s %s (%s)\n", check.name, check.what, check.needs);
  }
  absl::StrAppend(&text, R"(
Exit codes: 0; 1: something has failed, or what was asked cannot be done.
)");
  return text;
}

int complain(const std::string& why) {
  std::fprintf(stderr, "gpu_check: %s\n", why.c_str());
  return 1;
}

// Starts this program once per rank.
int start_processes(int ranks, int argc, char** argv) {
  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe")};
  command.insert(command.end(), argv + 1, argv + argc);
  const auto result = shardweave::launch(
      {.num_ranks = ranks, .command = std::move(command), .prefix_output = false});
  if (!result.ok()) return complain(std::string(result.status().message()));
  if (!result->ok()) complain(result->summary());
  return result->exit_code();
}

int run(int argc, char** argv) {
  const int ranks = absl::GetFlag(FLAGS_ranks);
  if (ranks < 0) return complain(absl::StrCat("--ranks=", ranks, ": wanted 1 or more"));
  const double timeout = absl::GetFlag(FLAGS_timeout);
  if (!(timeout > 0)) return complain("--timeout: wanted a number of seconds above 0");
  const auto launched = shardweave::detect_rendezvous(shardweave::Environment::of_process());
  if (ranks > 0 && absl::IsNotFound(launched.status())) return start_processes(ranks, argc, argv);
  shardweave::enter_working_directory();
  const bool writes = !launched.ok() || launched->rank == 0;
  std::ofstream output;
  const std::string path = absl::GetFlag(FLAGS_output);
  if (writes && !path.empty()) {
    output.open(path);
    if (!output) return complain(absl::StrCat("--output=", path, ": cannot be written"));
  }
  GpuCheckOptions options;
  if (absl::GetFlag(FLAGS_quick)) options.sizes = GpuCheckSizes::quick();
  options.strict = absl::GetFlag(FLAGS_strict);
  options.only = absl::GetFlag(FLAGS_only);
  options.device = absl::GetFlag(FLAGS_device);
  options.backend = absl::GetFlag(FLAGS_backend);
  options.directory = absl::GetFlag(FLAGS_directory);
  options.timeout = absl::Seconds(timeout);
  const absl::StatusOr<GpuReport> report = gpu_check(options);
  if (!report.ok()) return complain(std::string(report.status().message()));
  if (writes) {
    const std::string json = to_json(*report);
    std::printf("%s\n", absl::GetFlag(FLAGS_json) ? json.c_str() : to_text(*report).c_str());
    if (output.is_open()) {
      output << json << "\n" << std::flush;
      if (!output) return complain(absl::StrCat("--output=", path, ": cannot be written"));
    }
  }
  return report->failed() ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word != "--help" && word != "-help" && word != "-h") continue;
    std::fputs(usage().c_str(), stdout);
    return 0;
  }
  absl::SetProgramUsageMessage(usage());
  const std::vector<char*> words = absl::ParseCommandLine(argc, argv);
  if (words.size() > 1) {
    return complain(absl::StrCat("'", words[1], "': wanted flags only; --help says which"));
  }
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    return complain(error.what());
  }
}

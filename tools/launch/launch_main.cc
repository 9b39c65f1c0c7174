// Starts the ranks of a program on this machine: launch -n 4 -- PROGRAM ARGUMENTS...
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "shardweave/tools/launch/launcher.h"
#include "shardweave/tools/working_directory/working_directory.h"

ABSL_FLAG(int, n, 1, "number of ranks");
ABSL_FLAG(bool, prefix, true, "put the rank before each line of output");
ABSL_FLAG(bool, json, false, "end with a summary as one line of JSON on stdout");
ABSL_FLAG(double, notice, 2,
          "how many seconds the other ranks have to notice a failure until they are asked to end");
ABSL_FLAG(double, grace, 5,
          "how many seconds ranks that are asked to end have until they are killed");

namespace {

// As shells do.
int exit_code_of(const absl::Status& status) {
  if (absl::IsNotFound(status)) return 127;
  if (absl::IsPermissionDenied(status)) return 126;
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = std::filesystem::path(argv[0]).filename();
  absl::SetProgramUsageMessage(absl::StrCat(
      "Starts the ranks of a program on this machine; the first that fails ends the others.\n",
      "Usage: ", name, " [FLAGS] -- PROGRAM ARGUMENTS...\n", "Example: ", name,
      " -n 4 -- ./train --steps=60"));
  // Abseil looks for files that are called as the program, which is installed under other names.
  const auto is_ours = [](absl::string_view file) {
    return absl::EndsWith(file, "launch_main.cc");
  };
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = is_ours;
  usage.contains_helpshort_flags = is_ours;
  absl::SetFlagsUsageConfig(usage);
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  shardweave::enter_working_directory();
  shardweave::LaunchOptions options;
  options.num_ranks = absl::GetFlag(FLAGS_n);
  options.command.assign(arguments.begin() + 1, arguments.end());
  options.prefix_output = absl::GetFlag(FLAGS_prefix);
  options.notice = absl::Seconds(absl::GetFlag(FLAGS_notice));
  options.grace = absl::Seconds(absl::GetFlag(FLAGS_grace));

  absl::StatusOr<shardweave::LaunchResult> result = shardweave::launch(options);
  if (!result.ok()) {
    std::fprintf(stderr, "%s\n", std::string(result.status().message()).c_str());
    return exit_code_of(result.status());
  }
  if (!result->ok()) std::fprintf(stderr, "launch: %s\n", result->summary().c_str());
  if (absl::GetFlag(FLAGS_json)) std::printf("%s\n", result->to_json().c_str());
  return result->exit_code();
}

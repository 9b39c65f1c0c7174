// Runs an example as users do. For tests.
//
//   const Ran ran = run_program("examples/train_it/train_it", {"--steps=3", "--json"});
//   ran.code;           // the exit code, or minus the signal
//   ran.json.back();    // the last line of stdout
#pragma once

#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace examples {

struct Ran {
  int code = 0;
  std::string out, err;
  std::vector<nlohmann::json> json;  // the lines of `out`, with --json
};

Ran run_program(const std::string& path, const std::vector<std::string>& args);

// In the test's own folder.
std::string file_with(const std::string& name, const std::string& text);

}  // namespace examples

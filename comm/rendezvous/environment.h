// The environment variables of a process, as a value that tests can write down.
//
//   Environment environment = Environment::of_process();
//   Environment recorded({{"RANK", "3"}, {"WORLD_SIZE", "8"}});
//   recorded.get("RANK");                                       // "3"
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace shardweave {

class Environment {
 public:
  // A copy of what this process has now. Not while another thread changes it.
  static Environment of_process();
  explicit Environment(std::map<std::string, std::string, std::less<>> variables)
      : variables_(std::move(variables)) {}

  // A variable that is set to the empty string counts as not set: shells and job scripts mean the
  // same.
  std::optional<std::string> get(std::string_view name) const;

 private:
  std::map<std::string, std::string, std::less<>> variables_;
};

}  // namespace shardweave

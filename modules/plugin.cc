#include "shardweave/modules/plugin.h"

#include <algorithm>

#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"

namespace shardweave {
namespace {

using modules_internal::PatchPlugin;
using modules_internal::RulePlugin;
using modules_internal::ShardsPlugin;

template <typename Plugin>
void check_new(const std::vector<Plugin>& plugins, const Plugin& plugin, const char* what) {
  for (const Plugin& other : plugins) {
    if (other.type.type != plugin.type.type) continue;
    throw Error("Plugins", absl::AlreadyExistsError(
                               str_cat("there is ", what, " ", plugin.type.name, " already")));
  }
}

}  // namespace

Plugins& Plugins::rule(std::string name, Rule rule) {
  const size_t colons = name.find("::");
  if (colons == 0 || colons == std::string::npos || colons + 2 == name.size()) {
    throw Error("Plugins",
                absl::InvalidArgumentError(str_cat(
                    "'", name, "' is no operator's name; wanted one such as \"mylib::swiglu\"")));
  }
  const bool is_new = std::none_of(list_.rules.begin(), list_.rules.end(),
                                   [&](const RulePlugin& other) { return other.name == name; });
  if (!is_new) {
    throw Error("Plugins",
                absl::AlreadyExistsError(str_cat("there is a rule of ", name, " already")));
  }
  list_.rules.push_back({std::move(name), std::make_shared<const Rule>(std::move(rule))});
  return *this;
}

Plugins& Plugins::add(ShardsPlugin plugin) {
  check_new(list_.shards, plugin, "a plug-in that shards");
  list_.shards.push_back(std::move(plugin));
  return *this;
}

Plugins& Plugins::add(PatchPlugin plugin) {
  check_new(list_.patches, plugin, "a patch of");
  list_.patches.push_back(std::move(plugin));
  return *this;
}

}  // namespace shardweave

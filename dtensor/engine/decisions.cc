#include "shardweave/dtensor/engine/decisions.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace shardweave::dtensor_internal {

const OpInfo& Decisions::op_info(const c10::OperatorHandle& op) {
  // Operator names live as long as the process, at one address per operator.
  std::unique_ptr<OpInfo>& info = op_infos_[&op.operator_name()];
  if (info == nullptr) info = std::make_unique<OpInfo>(op, rules_);
  return *info;
}

void Decisions::add_rule(std::string_view name, Rule rule) {
  rules_.add(name, std::move(rule));
  cache.clear();
  op_infos_.clear();
}

absl::Status Decisions::can_plug_in(std::string_view name,
                                    const std::shared_ptr<const Rule>& rule) const {
  const auto plugged = plugged_in_.find(std::string(name));
  if (plugged != plugged_in_.end() && plugged->second == rule) return absl::OkStatus();
  const std::vector<std::string> names = rules_.names();
  if (std::find(names.begin(), names.end(), name) == names.end()) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat("'", std::string(name), "' has another rule on this mesh already",
                   plugged == plugged_in_.end() ? ", by add_rule()"
                                                : ", by other plug-ins; wanted one Plugins for all "
                                                  "models of a mesh"));
}

void Decisions::plug_in(std::string_view name, const std::shared_ptr<const Rule>& rule) {
  const auto [plugged, is_new] = plugged_in_.try_emplace(std::string(name), rule);
  if (is_new) add_rule(name, *rule);
}

bool Decisions::is_plugged_in(const c10::OperatorName& op) const {
  if (plugged_in_.empty()) return false;
  return plugged_in_.contains(op.name) ||
         (!op.overload_name.empty() &&
          plugged_in_.contains(absl::StrCat(op.name, ".", op.overload_name)));
}

void Decisions::set_cost_model(CostModel model, bool under_way) {
  cost_model_ = std::move(model);
  cache.clear(under_way);
  plans.clear();
}

}  // namespace shardweave::dtensor_internal

#include "shardweave/dtensor/engine/decisions.h"

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

void Decisions::set_cost_model(CostModel model, bool under_way) {
  cost_model_ = std::move(model);
  cache.clear(under_way);
  plans.clear();
}

}  // namespace shardweave::dtensor_internal

// What one rank has decided about operators and redistributions on one mesh, and by what: rules and
// the cost model. Whatever changes one of these forgets what was decided by it. Internal to dtensor/.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "shardweave/dtensor/cost_model.h"
#include "shardweave/dtensor/engine/cache.h"
#include "shardweave/dtensor/engine/op_info.h"
#include "shardweave/dtensor/engine/plans.h"
#include "shardweave/dtensor/rule.h"

namespace shardweave::dtensor_internal {

class Decisions {
 public:
  const OpInfo& op_info(const c10::OperatorHandle& op);
  const CostModel& cost_model() const { return cost_model_; }

  // Between operators only: the keys and entries of the cache know OpInfos. See add_rule() in rule.h.
  void add_rule(std::string_view name, Rule rule);
  // A plug-in's (modules/plugin.h): the same one may come again. AlreadyExists: the name has another
  // rule.
  absl::Status can_plug_in(std::string_view name, const std::shared_ptr<const Rule>& rule) const;
  void plug_in(std::string_view name, const std::shared_ptr<const Rule>& rule);
  bool is_plugged_in(const c10::OperatorName& op) const;
  // `under_way`: while an operator runs, whose entry has to stay.
  void set_cost_model(CostModel model, bool under_way);

  PropagationCache cache;  // per operator and specs
  PlanMemo plans;          // per pair of specs
  int strict_depth = 0;    // > 0: communication that nobody asked for is an error

 private:
  RuleTable rules_;                                                           // the user's
  absl::flat_hash_map<std::string, std::shared_ptr<const Rule>> plugged_in_;  // of them
  absl::flat_hash_map<const c10::OperatorName*, std::unique_ptr<OpInfo>> op_infos_;
  CostModel cost_model_;
};

}  // namespace shardweave::dtensor_internal

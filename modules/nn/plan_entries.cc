#include "shardweave/modules/nn/plan_entries.h"

#include <utility>

#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"

namespace shardweave::nn_internal {

PlanEntries::PlanEntries(ShardingPlan& plan, const DeviceMesh& mesh, const nn::PlanOptions& options,
                         std::string fqn)
    : plan_(plan),
      options_(options),
      fqn_(std::move(fqn)),
      ranks_(mesh.size(value_or_throw(mesh.dim(options.mesh_dim)))) {}

std::string PlanEntries::at(std::string_view name) const {
  return fqn_.empty() ? std::string(name) : str_cat(fqn_, ".", name);
}

PlanEntries& PlanEntries::parameter(std::string_view name, const Placement& placement) {
  plan_.parameter.push_back({at(name), NamedPlacements{{options_.mesh_dim, placement}}});
  return *this;
}

PlanEntries& PlanEntries::forward(std::string_view value, const Placement& placement) {
  plan_.forward.push_back({at(value), NamedPlacements{{options_.mesh_dim, placement}}});
  return *this;
}

PlanEntries& PlanEntries::sums() {
  if (options_.sequence_parallel) forward("input", Replicate());
  return forward("output", between());
}

Placement PlanEntries::between() const {
  return options_.sequence_parallel ? Placement(Shard(1)) : Placement(Replicate());
}

void check_heads_divide(std::string_view fqn, int64_t heads, int64_t ranks,
                        std::string_view mesh_dim) {
  if (heads % ranks == 0) return;
  throw Error(absl::InvalidArgumentError(str_cat(fqn.empty() ? "attention" : fqn, ": ", heads,
                                                 " heads do not divide by the ", ranks,
                                                 " ranks of mesh dimension \"", mesh_dim, "\"")));
}

void add_vocabulary(ShardingPlan& plan, const DeviceMesh& mesh, const nn::PlanOptions& options,
                    std::string_view embedding, std::string_view first_layer,
                    std::string_view last_norm, std::string_view head) {
  PlanEntries entries(plan, mesh, options, "");
  if (options.shard_vocabulary) {
    entries.parameter(embedding, Shard(0));
    if (head != embedding) entries.parameter(head, Shard(0));
  }
  if (options.shard_vocabulary || options.sequence_parallel) {
    entries.forward(str_cat(first_layer, ".input"), entries.between());
  }
  if (options.sequence_parallel) entries.forward(str_cat(last_norm, ".output"), Replicate());
}

}  // namespace shardweave::nn_internal

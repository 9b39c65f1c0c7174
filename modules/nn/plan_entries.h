// What plans of the zoo are put together from. Internal to modules/nn.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "shardweave/mesh/device_mesh.h"
#include "shardweave/modules/nn/plan_options.h"
#include "shardweave/modules/parallelize_module.h"

namespace shardweave::nn_internal {

// Adds to a plan, under the FQN pattern of one module ("" for the module itself).
class PlanEntries {
 public:
  // Throws Error (NotFound): the mesh has no such dimension.
  PlanEntries(ShardingPlan& plan, const DeviceMesh& mesh, const nn::PlanOptions& options,
              std::string fqn);

  PlanEntries& parameter(std::string_view name, const Placement& placement);
  PlanEntries& forward(std::string_view value, const Placement& placement);
  // Of attention and MLP: whole inputs, and outputs summed to how activations lie between them.
  PlanEntries& sums();

  // How activations lie outside of attention and MLP.
  Placement between() const;
  int64_t ranks() const { return ranks_; }

 private:
  std::string at(std::string_view name) const;

  ShardingPlan& plan_;
  const nn::PlanOptions& options_;
  const std::string fqn_;
  int64_t ranks_;
};

// Throws Error (InvalidArgument) if `heads` cannot be shared out evenly.
void check_heads_divide(std::string_view fqn, int64_t heads, int64_t ranks,
                        std::string_view mesh_dim);

// The embedding of tokens, its sum where activations come in, the last norm and the head.
void add_vocabulary(ShardingPlan& plan, const DeviceMesh& mesh, const nn::PlanOptions& options,
                    std::string_view embedding, std::string_view first_layer,
                    std::string_view last_norm, std::string_view head);

}  // namespace shardweave::nn_internal

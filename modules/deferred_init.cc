#include "shardweave/modules/deferred_init.h"

#include "shardweave/dtensor/engine/deferred.h"
#include "shardweave/dtensor/engine/members.h"
#include "torch/nn/module.h"

namespace shardweave {

modules_internal::DeferredInitScope::DeferredInitScope()
    : scope_(std::make_unique<dtensor_internal::DeferredScope>()) {}
modules_internal::DeferredInitScope::~DeferredInitScope() = default;

void modules_internal::name_deferred_members(const torch::nn::Module& module) {
  for (const dtensor_internal::Member& member : dtensor_internal::members_of(module)) {
    if (is_dtensor(member.tensor) || !dtensor_internal::is_deferred(member.tensor)) continue;
    dtensor_internal::name_deferred(member.tensor, member.fqns[0]);
  }
}

bool is_deferred(const at::Tensor& tensor) {
  return dtensor_internal::is_deferred(tensor);
}

void materialize(torch::nn::Module& module, const MaterializeOptions& options,
                 std::source_location where) {
  dtensor_internal::make_deferred(dtensor_internal::members_of(module), options.values,
                                  options.seed, {.name = "materialize", .where = where});
}

}  // namespace shardweave

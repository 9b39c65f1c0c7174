// The tensors of a module, and what a plan says of each. Internal to dtensor/.
#pragma once

#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/parameter_plan.h"

namespace shardweave::dtensor_internal {

struct Cause;     // redistribute.h
class Agreement;  // checksum.h

struct Member {
  at::Tensor tensor;
  bool is_buffer = false;
  std::vector<std::string> fqns;  // more than one: it is tied
};

// Why a parameter or buffer lies as it does.
struct PlanOrigin {
  std::string pattern;  // of the entry that decided; empty: none did, it is replicated
  std::string where;    // of the call that distributed it: "train.cc:53"
};

// Parameters, then buffers; each tensor once, in the order of their first names.
std::vector<Member> members_of(const torch::nn::Module& module);

// DTensors among them that have lost their names, know them again: module->to() has given them data of
// tensors that had none.
void name_members(const std::vector<Member>& members);

// resolve_plan(); errors begin with `function`.
std::vector<ResolvedTensor> resolve_members(const std::vector<Member>& members,
                                            const DeviceMesh& mesh, const ParameterPlan& plan,
                                            const char* function);

// Throws Error (FailedPrecondition, InvalidArgument) for what cannot become a DTensor where it stands:
// one that is a DTensor already, is not dense, or is over the memory of another one.
void check_distributable(const std::vector<Member>& members, std::string_view function);

// distribute_module() as part of what all ranks do or none does: reaches the agreement before it
// changes anything. `also`: what else has to be the same on every rank.
void distribute_agreed(torch::nn::Module& module, const MeshPtr& mesh, const ParameterPlan& plan,
                       const DistributeOptions& options, std::source_location where,
                       Agreement& agreement, std::string_view also);

// What distribute_module() does with tensors that are plain, and dense: each becomes a DTensor where
// it stands, in its `resolved` layout. Errors begin with the cause's name.
void distribute_members(const std::vector<Member>& members,
                        const std::vector<ResolvedTensor>& resolved, const MeshPtr& mesh,
                        const DistributeOptions& options, const Cause& cause);

// "the plan's entry 2, 'a.*'"; or "no entry of the plan".
std::string deciding_entry(const ResolvedTensor& tensor);

}  // namespace shardweave::dtensor_internal

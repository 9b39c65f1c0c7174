// What happens to an operator on DTensors. Internal to dtensor/.
//
// dispatch.cc registers one boxed fallback for DispatchKey::Fake with LibTorch's dispatcher; it
// sees every operator below autograd that has a DTensor among its arguments:
//
//   plain tensors among the arguments become DTensors, if they can       (adopt.h)
//   look up (operator, specs, arguments) in the mesh's cache             (cache.h)
//     miss: ask the rule, choose a strategy, plan the redistributions    (decide.h)
//   bring the inputs where they have to be                               (redistribute.h)
//   run the operator on the local tensors
//   wrap the results
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/engine/cache.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/propagate.h"

namespace shardweave::dtensor_internal {

// The fallback: pops the operator's arguments off the stack and pushes its results.
void dispatch(const c10::OperatorHandle& op, c10::Stack* stack);

// What dispatch() would decide for a call that it has not seen before.
struct Decided {
  MeshContext* context;
  std::unique_ptr<CacheEntry> entry;
  std::vector<TensorInfo> inputs;  // flat, before they are changed
  std::vector<int> input_arg;      // the schema argument that inputs[i] comes from
  Weighed weighed;                 // empty without a rule
};
// Sends nothing, runs nothing: plain tensors count as the same on every rank. nullopt: the operator is
// made of others, which are decided one by one. Throws as dispatch() would.
std::optional<Decided> decide_only(const c10::OperatorHandle& op,
                                   absl::Span<const c10::IValue> args);

}  // namespace shardweave::dtensor_internal

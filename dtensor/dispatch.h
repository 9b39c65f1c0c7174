// What happens to an operator on DTensors. Internal to dtensor/.
//
// dispatch.cc registers one boxed fallback for DispatchKey::Fake with LibTorch's dispatcher; it sees every operator below
// autograd that has a DTensor among its arguments:
//
//   look up (operator, specs, arguments) in the mesh's cache
//     miss: ask the rule, choose a strategy, plan the redistributions     (propagate.h, plan_redistribute)
//   bring the inputs where they have to be                                (redistribute.h)
//   run the operator on the local tensors
//   wrap the results
#pragma once

#include <memory>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "shardweave/dtensor/mesh_context.h"

namespace shardweave {

// The rank whose DTensors are being worked on, for kernels that need more than LocalCall shows.
void dispatch(const c10::OperatorHandle& op, c10::Stack* stack);

}  // namespace shardweave

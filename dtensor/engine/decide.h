// What happens once for each new combination of operator, specs and arguments: the decision how it
// runs, from its rule (rule.h, propagate.h) and the planner. Internal to dtensor/.
//
//   check_call(op, info, args);                       // what LibTorch refuses is refused here
//   auto entry = decide(op, info, context, args);     // for the cache
#pragma once

#include <memory>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/engine/cache.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/propagate.h"

namespace shardweave::dtensor_internal {

// The tensors of a call, as rules see them. Outputs are not known yet.
OpCall make_call(const c10::OperatorHandle& op, const OpInfo& info,
                 absl::Span<const c10::IValue> args);

// Throws Error (InvalidArgument) if a DTensor of the call is on another mesh.
void check_one_mesh(const c10::OperatorHandle& op, const OpInfo& info, MeshContext& context,
                    absl::Span<const c10::IValue> args);

// LibTorch's error for a call that it refuses, before anything is sent.
void check_call(const c10::OperatorHandle& op, const OpInfo& info,
                absl::Span<const c10::IValue> args);

// How a call that has passed check_call() runs on local tensors. The same on every rank: it depends
// on nothing but the specs and the arguments. What was weighed is added to `weighed`, if given.
std::unique_ptr<CacheEntry> decide(const c10::OperatorHandle& op, const OpInfo& info,
                                   MeshContext& context, absl::Span<const c10::IValue> args,
                                   Weighed* weighed = nullptr);

}  // namespace shardweave::dtensor_internal

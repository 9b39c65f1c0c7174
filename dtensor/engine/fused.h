// Runs several plans together: what goes through the same collective travels as one. Internal to
// dtensor/; users call redistribute_all() in redistribute_async.h.
#pragma once

#include <string_view>
#include <vector>

#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_impl.h"

namespace shardweave::dtensor_internal {

// A tensor on its way.
struct InFlight {
  MeshContext* context;
  SpecRef target;
  PlanRef plan;      // to it
  at::Tensor local;  // replaced by the result, which is owned() (redistribute.h)
  Dims sizes;        // global
  int64_t bytes;     // global: what is decided by it is the same on all ranks
  uint64_t provenance;
  std::string_view parameter = {};  // the FQN, of it or of its gradient; lives as long as the run
};

// Of a tensor's local part to another layout.
InFlight moving_to(const DTensorMeta& meta, const Layout& layout);

// As run_plan() for each of them, in rounds: in each, every tensor that has not arrived takes part
// in one collective. Small tensors that need the same one (kind, mesh dimensions, reduction, dtype)
// share it; all of a round are under way at once. What they share, a bucket of at most 25 MiB, is
// gone when this returns: a result that is kept longer than the others must not keep theirs.
void run_plans(std::vector<InFlight>& in_flight, const Cause& cause);

}  // namespace shardweave::dtensor_internal

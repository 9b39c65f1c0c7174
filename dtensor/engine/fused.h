// Runs several plans together: what goes through the same collective travels as one. Internal to
// dtensor/; users call redistribute_all() in redistribute_async.h.
#pragma once

#include <memory>
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
  bool is_given_up = false;         // the result may share memory with `local`
};

// Of a tensor's local part to another layout.
InFlight moving_to(const DTensorMeta& meta, const Layout& layout);

// As run_plan() for each of them, in rounds: in each, every tensor that has not arrived takes part
// in one collective. Small tensors that need the same one (kind, mesh dimensions, reduction, dtype)
// share it; all of a round are under way at once. What they share, a bucket of at most 25 MiB, is
// gone when this returns: a result that is kept longer than the others must not keep theirs.
void run_plans(std::vector<InFlight>& in_flight, const Cause& cause);

// How much of what needs the same collective shares it, in bytes of the whole tensors.
struct Sharing {
  // Larger tensors gain nothing from sharing a collective: what they save in latency they lose in
  // copying.
  int64_t max_tensor = 1 << 20;
  int64_t max_bucket = 25 << 20;
};

// run_plans() in two halves: the first round is issued at once, whatever becomes of the tensors
// meanwhile (what is sent has been copied). Dropped, it waits for what is under way.
class PlansUnderWay {
 public:
  // Of `cause` the name has to stay.
  PlansUnderWay(std::vector<InFlight> in_flight, const Cause& cause, const Sharing& sharing);
  ~PlansUnderWay();
  // Waits, and runs what is left. Once.
  std::vector<InFlight> finish();

 private:
  friend void run_plans(std::vector<InFlight>& in_flight, const Cause& cause);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shardweave::dtensor_internal

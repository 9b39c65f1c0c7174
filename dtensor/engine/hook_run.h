// A bucket of gradients that goes through a hook of the user's (gradient_hook.h): PlansUnderWay for
// those. Internal to dtensor/. Threads: as GradBuckets.
#pragma once

#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shardweave/dtensor/engine/flat_row.h"
#include "shardweave/dtensor/engine/fused.h"
#include "shardweave/dtensor/gradient_hook.h"

namespace shardweave::dtensor_internal {

// Whether a hook may bring it: its plan is one all-reduce that sums.
bool goes_through_hook(const RedistributePlan& plan, at::ScalarType dtype);
inline bool goes_through_hook(const InFlight& gradient) {
  return goes_through_hook(gradient.plan->plan, gradient.local.scalar_type());
}
// Whether both may be in one bucket.
bool share_hook(const InFlight& a, const InFlight& b);

class HookRun {
 public:
  // begin(). What the hook throws is kept until finish(), for backward has to go on: operators of
  // other ranks may wait for this one's. Of `cause` the name has to stay.
  HookRun(GradientHook& hook, std::vector<InFlight> in_flight, size_t index, const Cause& cause);
  // Waits for what is under way.
  ~HookRun();
  HookRun(const HookRun&) = delete;
  HookRun& operator=(const HookRun&) = delete;

  // finish(), with what has arrived. Once. Throws what the hook has thrown; the communicator is
  // broken then.
  std::vector<InFlight> finish(bool is_discarded);

 private:
  friend class ::shardweave::GradientBucket;
  void all_reduce(const at::Tensor& tensor);
  void wait();
  void failed();

  GradientHook& hook_;
  std::vector<InFlight> in_flight_;
  const Cause cause_;
  MeshContext& context_;
  const std::vector<int> mesh_dims_;
  uint64_t provenance_ = 0;
  GradientBucket bucket_;
  std::exception_ptr error_;
  std::deque<CollectiveTransfer> transfers_;  // stay where they are
  std::vector<CollectiveUnderWay> under_way_;
};

// What each rank says at the end: whether its hook has failed. Throws `error`, or Error (Aborted) if
// another rank has one. Collective over the mesh.
void agree_on_hooks(MeshContext& context, std::string_view hook, const std::exception_ptr& error,
                    const Cause& cause);

}  // namespace shardweave::dtensor_internal

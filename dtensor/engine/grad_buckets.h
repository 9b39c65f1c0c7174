// Gradients that leave for their parameters' layouts during backward, in buckets. Behind GradSync
// (grad_sync.h) and finish_grad_sync().
//
// All ranks have to issue the same collectives in the same order. So nothing is decided by what one
// rank sees: buckets are made of what the first iteration has shown (in which order gradients come,
// how often, in which layouts), which the ranks compare; they leave in their order, each when it is
// full and those before it have left; and what is not full at the end leaves then.
//
// Internal to dtensor/. Threads: hooks may run on autograd's threads. A gradient hook of the user's may
// call pause(), resume() and counts(); what would wait for the hook itself throws Error
// (FailedPrecondition).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/engine/fused.h"
#include "shardweave/dtensor/engine/hook_run.h"
#include "shardweave/dtensor/grad_sync.h"
#include "torch/csrc/autograd/function.h"

namespace shardweave::dtensor_internal {

// Whether a parameter has a gradient, a DTensor, in another layout than its own.
bool gradient_moves(const at::Tensor& parameter);
// As its GradSync says of dtypes, if it is in one.
InFlight moving_gradient(const at::Tensor& parameter);
// The gradient as it has arrived, in the parameter's dtype: another tensor than before.
void set_gradient(const at::Tensor& parameter, InFlight arrived);

class GradBuckets : public std::enable_shared_from_this<GradBuckets> {
 public:
  // `reduce_dtype`: of gradients as they travel; nullopt: their own. `hook`: what reduces them; null:
  // an all-reduce.
  GradBuckets(std::vector<at::Tensor> parameters, int64_t bucket_bytes,
              std::optional<at::ScalarType> reduce_dtype, std::shared_ptr<GradientHook> hook);
  ~GradBuckets();
  // Hooks into autograd; they do not keep this alive.
  void attach();
  // Throws Error (FailedPrecondition) if a parameter has lost its hook: it was given other data, of
  // another dtype or device. Of all GradBuckets of the parameters' meshes that have one of them.
  static void check_in_place(const std::vector<at::Tensor>& parameters);

  // While it is above 0, gradients stay.
  void pause();
  void resume();

  // Buckets that have left arrive, those that have not leave and arrive. Gradients that were
  // written since they left are left to the caller, and those that are in no bucket.
  void land(const Cause& cause);
  // Buckets that have left arrive, and those that have not leave without values, so that each meets
  // its own on the other ranks; nothing comes of it, and the iteration is over. Collective over the
  // meshes.
  void discard();
  bool has_hook() const { return hook_ != nullptr; }
  // Whether the user's hook brings this one.
  bool has_hook_for(const InFlight& gradient) const {
    return hook_ != nullptr && goes_through_hook(gradient);
  }
  // Brings gradients of these parameters, which are of no bucket that has left, through the hook: now.
  // Collective over the mesh.
  void bring_through_hook(const std::vector<at::Tensor>& parameters, const Cause& cause);
  // From what the iteration has shown, if the buckets are not of that. Collective over the meshes,
  // then.
  void plan(const Cause& cause);

  // In which a gradient of `parameter` travels from where it lies; its own where no rank sends.
  at::ScalarType travels_as(const at::Tensor& parameter, const Layout& from) const;

  struct Counts {
    int64_t buckets = 0;
    int64_t left_in_backward = 0;  // buckets, in all iterations
  };
  Counts counts() const;

 private:
  struct Parameter {
    at::Tensor tensor;
    std::string name;
    SpecRef spec;  // when its gradients were hooked
    std::shared_ptr<torch::autograd::Node> accumulator;
    uintptr_t hook = 0;
    int bucket = -1;
    int expected = 0;  // accumulations in a backward: several where it is recomputed (checkpoint)
    std::optional<Layout> planned;  // of its gradient as it comes
    int came = 0;                   // in this iteration
    std::optional<Layout> seen;
    at::Tensor sent;  // the gradient that has left
    int64_t version = 0;
    at::Tensor local;  // its local part, which to_local() gives away
    int64_t local_version = 0;
  };
  struct Bucket {
    std::vector<size_t> members;
    int64_t bytes = 0;
    size_t missing = 0;
    bool as_planned = true;
    std::vector<size_t> sent;
    std::vector<InFlight> arrived;  // through the hook
    bool uses_hook = false;
    std::unique_ptr<PlansUnderWay> run;  // of what is sent,
    std::unique_ptr<HookRun> hook_run;   // or this
  };

  // What it changes is changed by one thread at a time. Throws Error (FailedPrecondition) in a gradient
  // hook, which runs inside of one.
  class Lock {
   public:
    explicit Lock(GradBuckets& buckets);
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    GradBuckets& buckets_;
  };

  // Has it see each gradient that comes, whoever saw that before.
  void hook(size_t index);
  void has_come_unseen(size_t index);
  void came(size_t index);
  // Whether its gradient is what was planned to leave.
  static bool is_as_planned(const Parameter& p);
  // Its gradient is the one that has left, as it was then.
  static bool is_as_sent(const Parameter& p);
  void start(Bucket& bucket, std::vector<InFlight> in_flight, const Cause& cause);
  void finish_hooks(bool is_discarded, const Cause& cause);
  MeshContext& context() const;
  // Those of its members that are as planned, if there are any.
  void leave(Bucket& bucket, const Cause& cause);
  // All of them, of NaN: a rank that takes this for an iteration sees it.
  void leave_without_values(Bucket& bucket, const Cause& cause);
  void restart();
  bool on_one_mesh() const;

  int64_t gradient_bytes(const at::Tensor& parameter) const;

  const int64_t bucket_bytes_;
  const std::optional<at::ScalarType> reduce_dtype_;
  const std::shared_ptr<GradientHook> hook_;
  std::mutex mutex_;
  std::atomic<std::thread::id> inside_;  // which thread has the Lock
  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> order_;  // of this iteration's first arrivals
  size_t next_ = 0;            // bucket to leave
  std::atomic<int> paused_ = 0;
  bool planned_ = false;
  bool surprised_ = false;                // a gradient came otherwise than planned
  std::atomic<int64_t> num_buckets_ = 0;  // of the last plan
  std::atomic<int64_t> left_in_backward_ = 0;
};

// Throws what GradSync's constructor does, if it is made of these (grad_sync.cc).
void check_grad_sync(const std::vector<at::Tensor>& parameters, const GradSyncOptions& options);
// Throws Error (InvalidArgument) if two parameters with a hook have one name.
void check_hook_names(const std::vector<std::string>& names);
// Of the options that ranks have to have alike.
uint64_t options_checksum(const GradSyncOptions& options);

// That the parameters' gradients are in.
std::vector<std::shared_ptr<GradBuckets>> buckets_of(const std::vector<at::Tensor>& parameters);

}  // namespace shardweave::dtensor_internal

// What becomes of gradients on their way: in place of the all-reduce of a GradSync (grad_sync.h) a
// function of one's own.
//
//   struct InHalf final : GradientHook {                     // what reduce_dtype does
//     std::string name() const override { return "in half"; }
//     void begin(GradientBucket& bucket) override {
//       bucket.sent = bucket.flat.to(at::kHalf);
//       bucket.all_reduce(bucket.sent);                      // while backward goes on
//     }
//     void finish(GradientBucket& bucket) override { bucket.flat.copy_(bucket.sent); }
//   };
//   GradSync sync(*model, {.hook = std::make_shared<InHalf>()});
//
// A bucket has this rank's summands, and is to have their sum over the ranks of `comm` in the end, or
// what is to stand for it (PowerSGD: modules/power_sgd.h). Gradients here are sums, not means over
// ranks: those of the loss over all ranks' input.
//
// begin() runs in backward, when a bucket is full, or in finish_grad_sync(); finish() of all buckets
// in finish_grad_sync(), after begin() of all, so that every rank issues the same collectives in the
// same order. In the first iteration all gradients go through the hook at the end, in other buckets
// than later: what a hook keeps it keeps by parameter.
//
// A hook may ask its GradSync for its counts and make a NoSync; what brings gradients (discard(),
// finish_grad_sync(), a backward to the same parameters) is an error inside of one.
//
// A hook is for gradients of float16, bfloat16, float32 and float64 that an all-reduce would sum;
// others (those of a parameter that is cut along the dimension, with a graph, complex ones) travel as
// without it. A gradient that was written between backward and finish_grad_sync() is an error, for
// nobody could take back what the hook has learned of it: several backwards go under a NoSync.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/dtensor/dtensor.h"

namespace shardweave {

namespace dtensor_internal {
class HookRun;
}

class GradientBucket {
 public:
  // Of those of this iteration, in the order in which they began.
  int64_t index = 0;
  // One-dimensional, the gradients one after the other: of the parameters' dtype, or the GradSync's
  // reduce_dtype. What it has after finish() is what arrives. Written in place.
  at::Tensor flat;
  std::vector<at::Tensor> gradients;    // views of it, with the shapes of this rank's parts
  std::vector<std::string> parameters;  // their FQNs; "" where a parameter has none
  // Of the ranks to sum over: of one mesh dimension or several. For collectives of one's own; every
  // rank issues the same.
  std::shared_ptr<Communicator> comm;
  // Backward has failed on some rank (GradSync::discard()): finish() still issues what the other
  // ranks' does, but nothing comes of it. Values may be NaN.
  bool is_discarded = false;
  // For the hook: whatever finish() needs of begin().
  at::Tensor sent;
  std::shared_ptr<void> state;

  // Begins to sum `tensor`, contiguous and on the bucket's device, over the ranks, in place. It may
  // not be touched until it is there: after wait(), and in finish() what begin() has begun.
  void all_reduce(const at::Tensor& tensor);
  // Throws Error if a sum has failed.
  void wait();

 private:
  friend class dtensor_internal::HookRun;
  dtensor_internal::HookRun* run_ = nullptr;
};

// Ranks that are threads have one each. Threads: begin() may run on one of autograd's; calls do not
// overlap.
//
// An exception of begin() or finish() comes out of finish_grad_sync(); on all other ranks of the mesh
// that fails, too, and with it the communicators: the mesh is lost, as with any collective that one
// rank does not call.
class GradientHook {
 public:
  virtual ~GradientHook() = default;
  // With its options: the ranks compare it when the GradSync is made.
  virtual std::string name() const = 0;
  virtual void begin(GradientBucket& /*bucket*/) {}
  virtual void finish(GradientBucket& bucket) = 0;
};

}  // namespace shardweave

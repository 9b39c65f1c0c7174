// Gradients' synchronisation during backward. Without it finish_grad_sync() does all of it at the
// end.
//
//   GradSync sync(*model, {.bucket_bytes = 25 << 20});   // once, when the model is sharded
//   for (...) {
//     {
//       const GradSync::NoSync accumulate(sync);         // these stay Partial
//       model->forward(first_half).backward();
//     }
//     model->forward(second_half).backward();            // buckets leave as they become full
//     finish_grad_sync(*model);                          // the rest leaves, all arrive
//     optimizer.step();
//     optimizer.zero_grad();
//   }
//
// In the first iteration finish_grad_sync() does everything, and sees in which order gradients
// come. From then on gradients that need the same collectives (mesh dimensions, kind, dtype) travel
// in buckets of at most `bucket_bytes` (of the whole tensors; a larger gradient alone), which leave
// in an order that all ranks have agreed on, while backward goes on: N bytes take ceil(N / bucket)
// collectives, as far as gradients fill them. They are made anew when a gradient comes in another
// layout. Parameters of several meshes (slices, too) do not leave in backward: their order could not
// be agreed on.
//
// Gradients of parameters that were not used are not waited for: what has not left by then leaves
// in finish_grad_sync(). Between backward and finish_grad_sync() a gradient is what autograd has
// accumulated. Written meanwhile, by a second backward or a user, it travels again in
// finish_grad_sync(), as it is then: as if there was no GradSync. finish_grad_sync() of some of the
// parameters brings those of their GradSync. A rank whose backward goes another way is an error on
// all ranks, as in any collective. After a backward that failed, on any rank, all ranks discard():
// what had left must not meet what leaves in the next one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/gradient_hook.h"

namespace shardweave {

namespace dtensor_internal {
class GradBuckets;
}

struct GradSyncOptions {
  int64_t bucket_bytes = 25 << 20;  // as they travel
  // In what gradients of float16, bfloat16, float32 and float64 travel and are summed up: one of
  // these; nullopt: their own. bfloat16 halves the bytes of float32, and keeps eight bits of each
  // rank's part and of each partial sum. What arrives has the gradient's own dtype. Gradients with a
  // graph (create_graph) travel as they are.
  std::optional<at::ScalarType> reduce_dtype = {};
  // What reduces buckets; null: an all-reduce. PowerSGD: modules/power_sgd.h. finish_grad_sync() then
  // takes one small all-reduce more, by which ranks hear whether a hook has failed.
  std::shared_ptr<GradientHook> hook = {};
};

// As long as it lives, for the DTensors among the parameters. All ranks make it alike; with a hook
// that is collective, and they compare it. Threads: as the model.
class GradSync {
 public:
  // Throws Error (InvalidArgument) if a bucket has less than one byte, for another reduce_dtype, and for
  // a hook with parameters of several meshes, of one name, or that differs between ranks;
  // (FailedPrecondition) if a parameter is fully sharded and there is a hook, or if a parameter is in another GradSync, or in a ZeroPartition (modules/zero.h).
  explicit GradSync(const torch::nn::Module& module, const GradSyncOptions& options = {});
  explicit GradSync(const std::vector<at::Tensor>& parameters, const GradSyncOptions& options = {});
  // Waits for what is under way, and leaves gradients as they are.
  ~GradSync();
  GradSync(const GradSync&) = delete;
  GradSync& operator=(const GradSync&) = delete;

  // In place of finish_grad_sync(), after a backward that failed on some rank: what has left in it
  // comes to nothing, and the next iteration is one as any. Gradients stay as they are, for the
  // caller to zero. Collective over the meshes of the parameters; costs what finish_grad_sync() does.
  //
  // The ranks have to agree that there was a failure, on a communicator that is not the mesh's, where
  // something may be under way (World::comm()). A rank that calls finish_grad_sync() instead gets
  // NaN. Throws Error where the communicators have failed: then the mesh is lost, as ever.
  void discard();

  // While it lives, backward sends nothing. Scopes may be nested. But a gradient that has been reduced
  // and is there still, as zeros even (zero_grad(false), p.grad().zero_()), is added to where it lies:
  // that sends each backward's, a parameter at a time.
  class NoSync {
   public:
    explicit NoSync(GradSync& sync);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    const std::shared_ptr<dtensor_internal::GradBuckets> buckets_;
  };

  // How many there are; 0: no iteration has been finished.
  int64_t num_buckets() const;
  // How many have left before finish_grad_sync(), of all iterations.
  int64_t left_in_backward() const;

 private:
  const std::shared_ptr<dtensor_internal::GradBuckets> buckets_;
};

}  // namespace shardweave

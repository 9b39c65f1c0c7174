// Scales losses so that gradients of 16 bits do not vanish, and skips steps whose gradients are not
// finite (Micikevicius et al., Mixed Precision Training, 2018; torch.amp.GradScaler's numbers).
//
//   GradScaler scaler;
//   scaler.scale(loss).backward();
//   finish_grad_sync(*model);
//   if (scaler.unscale(model->parameters())) {     // the same answer on every rank
//     clip_grad_norm(model->parameters(), 1.0);
//     optimizer.step();
//   }
//   scaler.update();
//   optimizer.zero_grad();
//
// Threads: as the model. All ranks call everything alike; their scales are then the same.
#pragma once

#include <cstdint>
#include <source_location>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/container/flat_hash_map.h"

namespace shardweave {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;        // above 1
  double backoff_factor = 0.5;     // above 0, below 1
  int64_t growth_interval = 2000;  // steps without a skip until the scale grows; 1 or more
};

class GradScaler {
 public:
  // Throws Error (InvalidArgument) for options out of range.
  explicit GradScaler(const GradScalerOptions& options = {});

  // The loss times scale(); differentiable, local.
  at::Tensor scale(const at::Tensor& loss) const;

  // Divides the gradients of the parameters by scale(), and says whether all of them are finite, on
  // all ranks: of gradients that several ranks have any of theirs counts. Parameters on several
  // meshes and plain ones may be among them; one that is given twice counts once. Where they are not
  // finite, the gradients are of no use. Several lists, for several optimizers, are unscaled one
  // after the other.
  //
  // Collective over the meshes of the parameters: of all gradients on a mesh one all-reduce of one
  // number. (With several meshes, which are then to have the same ranks, one more for each but the
  // last.) The host waits for its device once, however many gradients of whatever types there are.
  // Throws Error on all ranks if it does on one (FailedPrecondition): for a parameter that has
  // been unscaled since the last update(), for a gradient that is still to be synchronized, and for
  // a sparse one. Nothing is changed then.
  bool unscale(const std::vector<at::Tensor>& parameters,
               std::source_location where = std::source_location::current());

  // The scale for the next step: smaller if unscale() has found a gradient that is not finite since
  // the last time, larger after growth_interval times in a row without one. Throws Error
  // (FailedPrecondition) if there was no unscale().
  //
  // Returns the new scale over the old one, for what keeps numbers of scaled gradients from step to step:
  //
  //   power_sgd->rescale(scaler.update());   // modules/power_sgd.h
  double update();

  double scale() const { return scale_; }
  // update()s in a row without a skip, since the scale was last changed.
  int64_t growth_tracker() const { return growth_tracker_; }
  // To resume; what has been unscaled since the last update() is as if it had not. Throws Error
  // (InvalidArgument) for a scale that is not above 0 and finite, for a tracker below 0.
  void set_state(double scale, int64_t growth_tracker);

 private:
  void check_gradients(const std::vector<at::Tensor>& parameters) const;

  GradScalerOptions options_;
  double scale_;
  int64_t growth_tracker_ = 0;
  bool is_unscaled_ = false, found_inf_ = false;  // since the last update()
  // That have been. Weak: those that go leave their addresses to nobody until then.
  absl::flat_hash_map<const c10::TensorImpl*, c10::weak_intrusive_ptr<c10::TensorImpl>> parameters_;
};

}  // namespace shardweave

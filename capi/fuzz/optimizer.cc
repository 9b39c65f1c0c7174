// Groups of parameters, schedules, steps that are captured, and losses that are scaled.
#include "fuzzer.h"

namespace shardweave::capi {

void Fuzzer::optimizing(swv_tensor** parameters) {
  const swv_optimizer* const optimizers[] = {pick(optimizers_), pick(optimizers_)};
  swv_optimizer* optimizer = nullptr;
  swv_schedule schedule = SWV_SCHEDULE_INIT;
  double number = 0;
  size_t count = 0;
  if (done(swv_optimizer_create_groups(optimizers, length(2), &optimizer))) {
    keep(optimizers_, optimizer, swv_optimizer_free, 5);
  }
  swv_optimizer* const its = pick(optimizers_);
  const auto group = static_cast<size_t>(below(2));
  done(swv_optimizer_num_groups(its, one_in(9) ? nullptr : &count));
  done(swv_optimizer_group_lr(its, group, one_in(9) ? nullptr : &number));
  done(swv_optimizer_set_group_lr(its, group, real()));
  schedule.shape = static_cast<swv_schedule_shape>(below(6));
  schedule.steps = one_in(3) ? this->number() : 10, schedule.decay = one_in(3) ? small() : 2;
  schedule.warmup = one_in(3) ? this->number() : 3;
  if (one_in(3)) schedule.gamma = real(), schedule.floor = real();
  const int64_t step = one_in(3) ? this->number() : below(12);
  done(swv_schedule_factor(sized(schedule), step, one_in(9) ? nullptr : &number));
  done(swv_optimizer_apply_schedule(its, one_in(9) ? nullptr : sized(schedule), step));

  // Which no machine without a GPU can make.
  swv_captured_step* captured = nullptr;
  int64_t replays = 0;
  swv_mesh* const mesh = one_in(9) ? pick(meshes_) : meshes_[0];
  const swv_step_fn run = [](void*) -> swv_status* { return nullptr; };
  done(swv_captured_step_create(mesh, parameters, length(2), one_in(9) ? nullptr : run, nullptr,
                                one_in(9) ? nullptr : &captured));
  auto* const no_step = one_in(3) ? static_cast<swv_captured_step*>(any()) : captured;
  done(swv_captured_step_replay(no_step));
  done(swv_captured_step_replays(no_step, one_in(9) ? nullptr : &replays));
  swv_captured_step_free(captured);

  swv_grad_scaler* scaler = nullptr;
  swv_grad_scaler_options options = SWV_GRAD_SCALER_OPTIONS_INIT;
  swv_tensor* scaled = nullptr;
  swv_bool is_finite = 0;
  int64_t tracker = 0;
  if (one_in(3)) options.init_scale = real(), options.growth_factor = real();
  if (one_in(3)) options.growth_interval = this->number();
  if (!done(swv_grad_scaler_create(one_in(3) ? nullptr : sized(options), &scaler))) return;
  if (done(swv_grad_scaler_scale(scaler, pick(tensors_), one_in(9) ? small() : SWV_MODE_GRAD,
                                 &scaled))) {
    keep(scaled);
  }
  // What is kept may take the place of what was picked.
  for (int i = 0; i < 2; ++i) parameters[i] = pick(tensors_);
  done(swv_grad_scaler_unscale(scaler, parameters, length(2), one_in(9) ? nullptr : &is_finite));
  done(swv_grad_scaler_update(scaler));
  if (one_in(2)) done(swv_grad_scaler_set_state(scaler, real(), this->number()));
  done(
      swv_grad_scaler_state(scaler, one_in(2) ? nullptr : &number, one_in(2) ? nullptr : &tracker));
  swv_grad_scaler_free(scaler);
}

}  // namespace shardweave::capi

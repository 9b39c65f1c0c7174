// Optimizers, and what is done to gradients before a step.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "shardweave/capi/checkpoint.h"
#include "shardweave/capi/gradients.h"
#include "shardweave/capi/handles.h"
#include "shardweave/capi/scopes.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/optim/schedule.h"
#include "shardweave/modules/zero.h"

namespace shardweave::capi {

// What is behind a swv_optimizer: one alone, and from use_zero() on one of ZeRO's in its place.
class HostOptimizer {
 public:
  explicit HostOptimizer(std::vector<ParameterGroup> groups)
      : groups_(std::move(groups)), alone_(groups_) {
    for (size_t group = 0; group < groups_.size(); ++group) base_lrs_.push_back(alone_.lr(group));
  }

  // Where set_state() of this parameter is for all ranks; an index that is none may be one on others.
  MeshPtr mesh_of_state(size_t parameter) const {
    const std::vector<at::Tensor>& all = alone_.parameters();
    return parameter < all.size() ? first_mesh({all[parameter]}) : first_mesh(all);
  }

  // `read` makes the options.
  template <typename Read>
  void use_zero(const Read& read) {
    const ZeroOptions options =
        read_together(first_mesh(alone_.parameters()), "ZeroPartition", [&] {
          check_is_fresh();
          return read();
        });
    zero_.emplace(groups_, options, kHost);
    for (size_t group = 0; group < groups_.size(); ++group) {
      zero_->optimizer().set_lr(group, alone_.lr(group));
    }
    for (const at::Tensor& parameter : alone_.parameters()) {
      const std::vector<at::Tensor>& once = zero_->parameters();
      const auto its = [&](const at::Tensor& one) { return one.is_same(parameter); };
      places_.push_back(
          static_cast<size_t>(std::find_if(once.begin(), once.end(), its) - once.begin()));
    }
  }
  // With the learning rates that they have now, before any schedule.
  std::vector<ParameterGroup> fresh_groups() const {
    check_is_fresh();
    std::vector<ParameterGroup> groups = groups_;
    for (size_t group = 0; group < groups.size(); ++group) {
      std::visit([&](auto& o) { o.lr = base_lrs_[group]; }, groups[group].options);
    }
    return groups;
  }
  ZeroPartition& partition() {
    if (!zero_.has_value()) fail_state("does not use ZeRO");
    return zero_->partition();
  }

  void step() {
    zero_.has_value() ? zero_->step(kHost) : alone_.step(kHost);
    is_used_ = true;
  }
  void zero_grad() { zero_.has_value() ? zero_->zero_grad() : alone_.zero_grad(); }
  size_t num_groups() const { return groups_.size(); }
  double lr(size_t group) { return stepped().lr(group); }
  void set_lr(double lr) {
    for (size_t group = 0; group < groups_.size(); ++group) set_lr(group, lr);
  }
  void set_lr(size_t group, double lr) {
    stepped().set_lr(group, lr);
    base_lrs_[group] = lr;
  }
  void scale_lrs(double factor) {
    for (size_t group = 0; group < groups_.size(); ++group) {
      stepped().set_lr(group, base_lrs_[group] * factor);
    }
  }
  at::Tensor state(size_t parameter, std::string_view name) {
    at::Tensor state = stepped().state(place_of(parameter), name);
    is_used_ = true;
    return state;
  }
  // From here on it stays one alone, or ZeRO's.
  void add_to(StateDict& state, const torch::nn::Module& module, const std::string& prefix) {
    if (zero_.has_value()) {
      add_optimizer(state, *zero_, module, prefix);
    } else {
      add_optimizer(state, alone_, module, prefix);
    }
    is_used_ = true;
  }
  void set_state(size_t parameter, std::string_view name, const at::Tensor& value) {
    stepped().set_state(place_of(parameter), name, value);
    is_used_ = true;
  }

 private:
  [[noreturn]] static void fail_state(const char* what) {
    fail(absl::StatusCode::kFailedPrecondition, str_cat("the optimizer ", what));
  }
  void check_is_fresh() const {
    if (zero_.has_value()) fail_state("uses ZeRO already");
    if (is_used_) fail_state("has made steps, or its state was asked for");
  }
  FusedOptimizer& stepped() { return zero_.has_value() ? zero_->optimizer() : alone_; }
  // ZeRO has a parameter that was given twice once.
  size_t place_of(size_t parameter) const {
    return parameter < places_.size() ? places_[parameter] : parameter;
  }

  std::vector<ParameterGroup> groups_;
  std::vector<double> base_lrs_;  // what schedules multiply
  FusedOptimizer alone_;
  std::optional<ZeroRedundancyOptimizer<FusedOptimizer>> zero_;
  std::vector<size_t> places_;  // of parameters in zero_
  bool is_used_ = false;
};

}  // namespace shardweave::capi

struct swv_optimizer : shardweave::capi::Handle<shardweave::capi::Kind::kOptimizer> {
  std::shared_ptr<shardweave::capi::HostOptimizer> optimizer;
};

namespace shardweave::capi {
namespace {

HostOptimizer& optimizer_of(const swv_optimizer* optimizer) {
  return *in(optimizer, "optimizer").optimizer;
}

void clip(const swv_tensor* const* parameters, size_t num_parameters, double max_norm,
          const swv_clip_options* given, double* out_norm) {
  const swv_clip_options o = options<swv_clip_options>(given, SWV_CLIP_OPTIONS_INIT, "options");
  if (!(o.norm_type > 0)) {
    fail_argument("options.norm_type", str_cat("is ", o.norm_type, "; wanted above 0"));
  }
  if (!(max_norm >= 0)) fail_argument("max_norm", str_cat("is ", max_norm, "; wanted 0 or more"));
  const bool finite = flag(o.error_if_nonfinite, "options.error_if_nonfinite");
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  const double norm = clip_grad_norm(tensors(parameters, num_parameters, "parameters"), max_norm,
                                     o.norm_type, finite, kHost);
  if (out_norm != nullptr) *out_norm = norm;
}

SgdOptions sgd_options(const swv_sgd_options* given) {
  const swv_sgd_options o = options<swv_sgd_options>(given, SWV_SGD_OPTIONS_INIT, "options");
  return {o.lr, o.momentum, o.dampening, o.weight_decay, flag(o.nesterov, "options.nesterov")};
}

AdamOptions adam_options(const swv_adam_options* given) {
  const swv_adam_options o = options<swv_adam_options>(given, SWV_ADAM_OPTIONS_INIT, "options");
  return {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, flag(o.amsgrad, "options.amsgrad")};
}

AdamWOptions adamw_options(const swv_adamw_options* given) {
  const swv_adamw_options o = options<swv_adamw_options>(given, SWV_ADAMW_OPTIONS_INIT, "options");
  return {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, flag(o.amsgrad, "options.amsgrad")};
}

LionOptions lion_options(const swv_lion_options* given) {
  const swv_lion_options o = options<swv_lion_options>(given, SWV_LION_OPTIONS_INIT, "options");
  return {o.lr, o.beta1, o.beta2, o.weight_decay};
}

AdafactorOptions adafactor_options(const swv_adafactor_options* given) {
  const swv_adafactor_options o =
      options<swv_adafactor_options>(given, SWV_ADAFACTOR_OPTIONS_INIT, "options");
  AdafactorOptions result = {.lr = o.lr,
                             .beta2_decay = o.beta2_decay,
                             .eps1 = std::nullopt,
                             .eps2 = o.eps2,
                             .clip_threshold = o.clip_threshold,
                             .weight_decay = o.weight_decay};
  if (o.eps1 != 0) result.eps1 = o.eps1;
  return result;
}

MuonOptions muon_options(const swv_muon_options* given) {
  const swv_muon_options o = options<swv_muon_options>(given, SWV_MUON_OPTIONS_INIT, "options");
  if (o.lr_scale != SWV_MUON_ORIGINAL && o.lr_scale != SWV_MUON_MATCH_RMS_ADAMW) {
    fail_argument("options.lr_scale",
                  str_cat("is ", o.lr_scale, "; wanted SWV_MUON_ORIGINAL or another"));
  }
  return {.lr = o.lr,
          .weight_decay = o.weight_decay,
          .momentum = o.momentum,
          .nesterov = flag(o.nesterov, "options.nesterov"),
          .ns_steps = o.ns_steps,
          .ns_a = o.ns_a,
          .ns_b = o.ns_b,
          .ns_c = o.ns_c,
          .eps = o.eps,
          .lr_scale = o.lr_scale == SWV_MUON_ORIGINAL ? MuonLrScale::kOriginal
                                                      : MuonLrScale::kMatchRmsAdamW,
          .ns_dtype = scalar_type(o.ns_dtype, "options.ns_dtype", at::kBFloat16)};
}

double schedule_factor(const swv_schedule* given, int64_t step) {
  const swv_schedule o = required_options<swv_schedule>(given, SWV_SCHEDULE_INIT, "schedule");
  if (step < 0) fail_argument("step", str_cat("is ", step, "; wanted 0 or more"));
  const bool ends = o.shape == SWV_SCHEDULE_LINEAR || o.shape == SWV_SCHEDULE_COSINE ||
                    o.shape == SWV_SCHEDULE_WSD;
  if (ends && o.steps < 1) {  // of 0 steps every learning rate would be 0
    fail_argument("schedule.steps",
                  str_cat("is ", o.steps, "; wanted the number of steps to the end, 1 or more"));
  }
  const auto with_shape = [&]() -> Schedule {
    switch (o.shape) {
      case SWV_SCHEDULE_CONSTANT:
        return Schedule::constant();
      case SWV_SCHEDULE_LINEAR:
        return Schedule::linear(o.steps);
      case SWV_SCHEDULE_COSINE:
        return Schedule::cosine(o.steps);
      case SWV_SCHEDULE_WSD:
        return Schedule::wsd(o.steps, o.decay);
      case SWV_SCHEDULE_STEP:
        return Schedule::step(o.steps, o.gamma);
      default:
        fail_argument("schedule.shape",
                      str_cat("is ", o.shape, "; wanted a swv_schedule_shape, 0 to ",
                              int{SWV_SCHEDULE_STEP}));
    }
  };
  return with_shape().warmup(o.warmup).floor(o.floor).factor(step);
}

ZeroOptions zero_options(const swv_zero_options* given) {
  const swv_zero_options o = options<swv_zero_options>(given, SWV_ZERO_OPTIONS_INIT, "options");
  ZeroOptions result = {.stage = o.stage, .bucket_bytes = o.bucket_bytes};
  if (o.mesh_dim != nullptr) result.mesh_dim = text(o.mesh_dim, "options.mesh_dim");
  return result;
}

void step(HostOptimizer& optimizer) {
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  saying_how_to_synchronize([&] { optimizer.step(); });
}

swv_optimizer* new_optimizer(const swv_tensor* const* parameters, size_t num_parameters,
                             const FusedOptimizer::Options& options) {
  return make<swv_optimizer>(std::make_shared<HostOptimizer>(
      std::vector<ParameterGroup>{{tensors(parameters, num_parameters, "parameters"), options}}));
}

swv_optimizer* new_groups(const swv_optimizer* const* optimizers, size_t num_optimizers) {
  std::vector<ParameterGroup> groups;
  for (const swv_optimizer* optimizer : span(optimizers, num_optimizers, "optimizers")) {
    for (ParameterGroup& group : in(optimizer, "optimizers[]").optimizer->fresh_groups()) {
      groups.push_back(std::move(group));
    }
  }
  if (groups.empty()) fail_argument("num_optimizers", "is 0; wanted 1 or more");
  return make<swv_optimizer>(std::make_shared<HostOptimizer>(std::move(groups)));
}

}  // namespace

void add_optimizer_state(StateDict& state, const swv_optimizer* optimizer,
                         const torch::nn::Module& module, const std::string& prefix) {
  optimizer_of(optimizer).add_to(state, module, prefix);
}
std::shared_ptr<const void> optimizer_owner(const swv_optimizer* optimizer) {
  return in(optimizer, "optimizer").optimizer;
}

}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_finish_grad_sync(swv_tensor* const* parameters, size_t num_parameters) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_GRAD, "mode");
    shardweave::finish_grad_sync(tensors(parameters, num_parameters, "parameters"), kHost);
  });
}

swv_status* swv_clip_grad_norm(swv_tensor* const* parameters, size_t num_parameters,
                               double max_norm, const swv_clip_options* options, double* out_norm) {
  return guarded(__func__, [&] { clip(parameters, num_parameters, max_norm, options, out_norm); });
}

swv_status* swv_optimizer_create_sgd(swv_tensor* const* parameters, size_t num_parameters,
                                     const swv_sgd_options* options,
                                     swv_optimizer** out_optimizer) {
  return guarded(__func__, out_optimizer, "out_optimizer",
                 [&] { return new_optimizer(parameters, num_parameters, sgd_options(options)); });
}

swv_status* swv_optimizer_create_adam(swv_tensor* const* parameters, size_t num_parameters,
                                      const swv_adam_options* options,
                                      swv_optimizer** out_optimizer) {
  return guarded(__func__, out_optimizer, "out_optimizer",
                 [&] { return new_optimizer(parameters, num_parameters, adam_options(options)); });
}

swv_status* swv_optimizer_create_adamw(swv_tensor* const* parameters, size_t num_parameters,
                                       const swv_adamw_options* options,
                                       swv_optimizer** out_optimizer) {
  return guarded(__func__, out_optimizer, "out_optimizer",
                 [&] { return new_optimizer(parameters, num_parameters, adamw_options(options)); });
}

swv_status* swv_optimizer_create_lion(swv_tensor* const* parameters, size_t num_parameters,
                                      const swv_lion_options* options,
                                      swv_optimizer** out_optimizer) {
  return guarded(__func__, out_optimizer, "out_optimizer",
                 [&] { return new_optimizer(parameters, num_parameters, lion_options(options)); });
}

swv_status* swv_optimizer_create_adafactor(swv_tensor* const* parameters, size_t num_parameters,
                                           const swv_adafactor_options* options,
                                           swv_optimizer** out_optimizer) {
  return guarded(__func__, out_optimizer, "out_optimizer", [&] {
    return new_optimizer(parameters, num_parameters, adafactor_options(options));
  });
}

swv_status* swv_optimizer_create_muon(swv_tensor* const* parameters, size_t num_parameters,
                                      const swv_muon_options* options,
                                      swv_optimizer** out_optimizer) {
  return guarded(__func__, out_optimizer, "out_optimizer",
                 [&] { return new_optimizer(parameters, num_parameters, muon_options(options)); });
}

swv_status* swv_optimizer_create_groups(const swv_optimizer* const* optimizers,
                                        size_t num_optimizers, swv_optimizer** out_optimizer) {
  return guarded(__func__, out_optimizer, "out_optimizer",
                 [&] { return new_groups(optimizers, num_optimizers); });
}

swv_status* swv_optimizer_use_zero(swv_optimizer* optimizer, const swv_zero_options* options) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_GRAD, "mode");
    optimizer_of(optimizer).use_zero([&] { return zero_options(options); });
  });
}

swv_status* swv_optimizer_no_sync(swv_optimizer* optimizer, swv_scope** out_scope) {
  return guarded(__func__, out_scope, "out_scope", [&] {
    return new_scope<shardweave::ZeroPartition::NoSync>(optimizer_of(optimizer).partition())
        .release();
  });
}

swv_status* swv_optimizer_discard(swv_optimizer* optimizer) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    optimizer_of(optimizer).partition().discard();
  });
}

swv_status* swv_optimizer_share(const swv_optimizer* optimizer, swv_optimizer** out_optimizer) {
  return guarded(__func__, out_optimizer, "out_optimizer",
                 [&] { return make<swv_optimizer>(in(optimizer, "optimizer").optimizer); });
}

void swv_optimizer_free(swv_optimizer* optimizer) {
  release(optimizer, __func__);
}

swv_status* swv_optimizer_step(swv_optimizer* optimizer) {
  return guarded(__func__, [&] { step(optimizer_of(optimizer)); });
}

swv_status* swv_optimizer_zero_grad(swv_optimizer* optimizer) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    optimizer_of(optimizer).zero_grad();
  });
}

swv_status* swv_optimizer_lr(const swv_optimizer* optimizer, double* out_lr) {
  return guarded(__func__, out_lr, "out_lr", [&] { return optimizer_of(optimizer).lr(0); });
}

swv_status* swv_optimizer_set_lr(swv_optimizer* optimizer, double lr) {
  return guarded(__func__, [&] { optimizer_of(optimizer).set_lr(lr); });
}

swv_status* swv_optimizer_num_groups(const swv_optimizer* optimizer, size_t* out_num_groups) {
  return guarded(__func__, out_num_groups, "out_num_groups",
                 [&] { return optimizer_of(optimizer).num_groups(); });
}

swv_status* swv_optimizer_group_lr(const swv_optimizer* optimizer, size_t group, double* out_lr) {
  return guarded(__func__, out_lr, "out_lr", [&] { return optimizer_of(optimizer).lr(group); });
}

swv_status* swv_optimizer_set_group_lr(swv_optimizer* optimizer, size_t group, double lr) {
  return guarded(__func__, [&] { optimizer_of(optimizer).set_lr(group, lr); });
}

swv_status* swv_schedule_factor(const swv_schedule* schedule, int64_t step, double* out_factor) {
  return guarded(__func__, out_factor, "out_factor",
                 [&] { return schedule_factor(schedule, step); });
}

swv_status* swv_optimizer_apply_schedule(swv_optimizer* optimizer, const swv_schedule* schedule,
                                         int64_t step) {
  return guarded(__func__, [&] {
    HostOptimizer& its = optimizer_of(optimizer);
    const double factor = schedule_factor(schedule, step);
    if (!std::isfinite(factor)) {
      fail(absl::StatusCode::kOutOfRange, str_cat("the schedule says ", factor, " for step ", step,
                                                  "; wanted a factor of 0 or more"));
    }
    its.scale_lrs(factor);
  });
}

swv_status* swv_optimizer_state(const swv_optimizer* optimizer, size_t index, const char* name,
                                swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    return new_tensor_or_null(optimizer_of(optimizer).state(index, text(name, "name")));
  });
}

swv_status* swv_optimizer_set_state(swv_optimizer* optimizer, size_t index, const char* name,
                                    const swv_tensor* tensor) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    HostOptimizer& its = optimizer_of(optimizer);
    const auto [of, value] = read_together(its.mesh_of_state(index), "FusedOptimizer", [&] {
      return std::pair(text(name, "name"), in(tensor, "tensor").tensor);
    });
    its.set_state(index, of, value);
  });
}

// Optimizers, and what is done to gradients before a step.
#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "shardweave/capi/handles.h"
#include "shardweave/capi/scopes.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/zero.h"

namespace shardweave::capi {

// What is behind a swv_optimizer: one alone, and from use_zero() on one of ZeRO's in its place.
class HostOptimizer {
 public:
  HostOptimizer(const std::vector<at::Tensor>& parameters, const FusedOptimizer::Options& options)
      : options_(options), alone_(parameters, options) {}

  void use_zero(const ZeroOptions& options) {
    if (zero_.has_value()) fail_state("uses ZeRO already");
    if (is_used_) fail_state("has made steps, or its state was asked for");
    const double lr = alone_.lr();
    zero_.emplace(alone_.parameters(), options_, options, kHost);
    zero_->optimizer().set_lr(lr);
    for (const at::Tensor& parameter : alone_.parameters()) {
      const std::vector<at::Tensor>& once = zero_->parameters();
      const auto its = [&](const at::Tensor& one) { return one.is_same(parameter); };
      places_.push_back(
          static_cast<size_t>(std::find_if(once.begin(), once.end(), its) - once.begin()));
    }
  }
  ZeroPartition& partition() {
    if (!zero_.has_value()) fail_state("does not use ZeRO");
    return zero_->partition();
  }

  void step() {
    zero_.has_value() ? zero_->step(kHost) : alone_.step();
    is_used_ = true;
  }
  void zero_grad() { zero_.has_value() ? zero_->zero_grad() : alone_.zero_grad(); }
  double lr() { return stepped().lr(); }
  void set_lr(double lr) { stepped().set_lr(lr); }
  at::Tensor state(size_t parameter, std::string_view name) {
    at::Tensor state = stepped().state(place_of(parameter), name);
    is_used_ = true;
    return state;
  }
  void set_state(size_t parameter, std::string_view name, const at::Tensor& value) {
    stepped().set_state(place_of(parameter), name, value);
    is_used_ = true;
  }

 private:
  [[noreturn]] static void fail_state(const char* what) {
    fail(absl::StatusCode::kFailedPrecondition, str_cat("the optimizer ", what));
  }
  FusedOptimizer& stepped() { return zero_.has_value() ? zero_->optimizer() : alone_; }
  // ZeRO has a parameter that was given twice once.
  size_t place_of(size_t parameter) const {
    return parameter < places_.size() ? places_[parameter] : parameter;
  }

  FusedOptimizer::Options options_;
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

ZeroOptions zero_options(const swv_zero_options* given) {
  const swv_zero_options o = options<swv_zero_options>(given, SWV_ZERO_OPTIONS_INIT, "options");
  ZeroOptions result = {.stage = o.stage, .bucket_bytes = o.bucket_bytes};
  if (o.mesh_dim != nullptr) result.mesh_dim = text(o.mesh_dim, "options.mesh_dim");
  return result;
}

void step(HostOptimizer& optimizer) {
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  try {
    optimizer.step();
  } catch (const Error& error) {
    const std::string message(error.status().message());
    if (!message.ends_with("are to be synchronized before the step")) throw;
    fail(error.status().code(),
         message + " (swv_module_finish_grad_sync and swv_finish_grad_sync do that)");
  }
}

swv_optimizer* new_optimizer(const swv_tensor* const* parameters, size_t num_parameters,
                             const FusedOptimizer::Options& options) {
  return make<swv_optimizer>(
      std::make_shared<HostOptimizer>(tensors(parameters, num_parameters, "parameters"), options));
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_finish_grad_sync(swv_tensor* const* parameters, size_t num_parameters) {
  return guarded(__func__, [&] {
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

swv_status* swv_optimizer_use_zero(swv_optimizer* optimizer, const swv_zero_options* options) {
  return guarded(__func__, [&] { optimizer_of(optimizer).use_zero(zero_options(options)); });
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
  return guarded(__func__, [&] { optimizer_of(optimizer).zero_grad(); });
}

swv_status* swv_optimizer_lr(const swv_optimizer* optimizer, double* out_lr) {
  return guarded(__func__, out_lr, "out_lr", [&] { return optimizer_of(optimizer).lr(); });
}

swv_status* swv_optimizer_set_lr(swv_optimizer* optimizer, double lr) {
  return guarded(__func__, [&] { optimizer_of(optimizer).set_lr(lr); });
}

swv_status* swv_optimizer_state(const swv_optimizer* optimizer, size_t index, const char* name,
                                swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] {
    return new_tensor_or_null(optimizer_of(optimizer).state(index, text(name, "name")));
  });
}

swv_status* swv_optimizer_set_state(swv_optimizer* optimizer, size_t index, const char* name,
                                    const swv_tensor* tensor) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    optimizer_of(optimizer).set_state(index, text(name, "name"), in(tensor, "tensor").tensor);
  });
}

// Losses that are scaled, and steps that are skipped.
#include "shardweave/modules/optim/grad_scaler.h"

#include <memory>

#include "shardweave/capi/gradients.h"
#include "shardweave/capi/handles.h"

struct swv_grad_scaler : shardweave::capi::Handle<shardweave::capi::Kind::kGradScaler> {
  std::unique_ptr<shardweave::GradScaler> scaler;
};

namespace shardweave::capi {
namespace {

GradScaler& scaler_of(const swv_grad_scaler* scaler) {
  return *in(scaler, "scaler").scaler;
}

swv_grad_scaler* new_grad_scaler(const swv_grad_scaler_options* given) {
  const swv_grad_scaler_options o =
      options<swv_grad_scaler_options>(given, SWV_GRAD_SCALER_OPTIONS_INIT, "options");
  return make<swv_grad_scaler>(
      std::make_unique<GradScaler>(GradScalerOptions{.init_scale = o.init_scale,
                                                     .growth_factor = o.growth_factor,
                                                     .backoff_factor = o.backoff_factor,
                                                     .growth_interval = o.growth_interval}));
}

swv_tensor* scaled(const swv_grad_scaler* scaler, const swv_tensor* loss, swv_grad_mode mode) {
  const CallMode call_mode(mode, "mode");
  return new_tensor(scaler_of(scaler).scale(tensor(loss, "loss")), "the scaled loss");
}

swv_bool unscale(GradScaler& scaler, swv_tensor* const* parameters, size_t num_parameters) {
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  // NULL is refused there, on all ranks.
  const std::vector<at::Tensor> all =
      tensors_or_undefined(parameters, num_parameters, "parameters");
  return static_cast<swv_bool>(
      saying_how_to_synchronize([&] { return scaler.unscale(all, kHost); }));
}

void write_state(const swv_grad_scaler* scaler, double* out_scale, int64_t* out_growth_tracker) {
  const GradScaler& its = scaler_of(scaler);
  if (out_scale != nullptr) *out_scale = its.scale();
  if (out_growth_tracker != nullptr) *out_growth_tracker = its.growth_tracker();
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_grad_scaler_create(const swv_grad_scaler_options* options,
                                   swv_grad_scaler** out_scaler) {
  return guarded(__func__, out_scaler, "out_scaler", [&] { return new_grad_scaler(options); });
}

void swv_grad_scaler_free(swv_grad_scaler* scaler) {
  release(scaler, __func__);
}

swv_status* swv_grad_scaler_scale(const swv_grad_scaler* scaler, const swv_tensor* loss,
                                  swv_grad_mode mode, swv_tensor** out_scaled) {
  return guarded(__func__, out_scaled, "out_scaled", [&] { return scaled(scaler, loss, mode); });
}

swv_status* swv_grad_scaler_unscale(swv_grad_scaler* scaler, swv_tensor* const* parameters,
                                    size_t num_parameters, swv_bool* out_is_finite) {
  return guarded(__func__, out_is_finite, "out_is_finite",
                 [&] { return unscale(scaler_of(scaler), parameters, num_parameters); });
}

swv_status* swv_grad_scaler_update(swv_grad_scaler* scaler) {
  return guarded(__func__, [&] { scaler_of(scaler).update(); });
}

swv_status* swv_grad_scaler_state(const swv_grad_scaler* scaler, double* out_scale,
                                  int64_t* out_growth_tracker) {
  return guarded(__func__, [&] { write_state(scaler, out_scale, out_growth_tracker); });
}

swv_status* swv_grad_scaler_set_state(swv_grad_scaler* scaler, double scale,
                                      int64_t growth_tracker) {
  return guarded(__func__, [&] { scaler_of(scaler).set_state(scale, growth_tracker); });
}

// Gradients that travel while backward runs.
#include "shardweave/dtensor/grad_sync.h"

#include <memory>

#include "shardweave/capi/host_module.h"
#include "shardweave/capi/scopes.h"

struct swv_grad_sync : shardweave::capi::Handle<shardweave::capi::Kind::kGradSync> {
  std::shared_ptr<shardweave::capi::GradSyncState> state;
};

namespace shardweave::capi {
namespace {

GradSyncState& sync_of(const swv_grad_sync* sync) {
  return *in(sync, "sync").state;
}

swv_grad_sync* new_grad_sync(const swv_module* module, const swv_grad_sync_options* given) {
  const swv_grad_sync_options o =
      options<swv_grad_sync_options>(given, SWV_GRAD_SYNC_OPTIONS_INIT, "options");
  if (o.bucket_bytes < 1) {
    fail_argument("options.bucket_bytes", str_cat("is ", o.bucket_bytes, "; wanted 1 or more"));
  }
  return make<swv_grad_sync>(std::make_shared<GradSyncState>(
      any_module(module), GradSyncOptions{.bucket_bytes = o.bucket_bytes,
                                          .reduce_dtype = optional_scalar_type(
                                              o.reduce_dtype, "options.reduce_dtype")}));
}

void write_counts(const swv_grad_sync* sync, int64_t* out_buckets, int64_t* out_left_in_backward) {
  const GradSync& of = sync_of(sync).sync;
  if (out_buckets != nullptr) *out_buckets = of.num_buckets();
  if (out_left_in_backward != nullptr) *out_left_in_backward = of.left_in_backward();
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_grad_sync_create(swv_module* module, const swv_grad_sync_options* options,
                                 swv_grad_sync** out_sync) {
  return guarded(__func__, out_sync, "out_sync", [&] { return new_grad_sync(module, options); });
}

void swv_grad_sync_free(swv_grad_sync* sync) {
  release(sync, __func__);
}

swv_status* swv_grad_sync_no_sync(swv_grad_sync* sync, swv_scope** out_scope) {
  return guarded(__func__, out_scope, "out_scope",
                 [&] { return new_scope<NoSync>(in(sync, "sync").state).release(); });
}

swv_status* swv_grad_sync_discard(swv_grad_sync* sync) {
  return guarded(__func__, [&] { sync_of(sync).sync.discard(); });
}

swv_status* swv_grad_sync_counts(const swv_grad_sync* sync, int64_t* out_buckets,
                                 int64_t* out_left_in_backward) {
  return guarded(__func__, [&] { write_counts(sync, out_buckets, out_left_in_backward); });
}

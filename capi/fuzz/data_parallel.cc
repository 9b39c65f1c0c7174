// Models that every rank has a copy of.
#include "fuzzer.h"

namespace shardweave::capi {
namespace {

swv_status* bucket_of(void* user_data, const swv_gradient_bucket* bucket) {
  const int32_t chance = *static_cast<const int32_t*>(user_data);
  if (chance == 0) return swv_status_new(SWV_CODE_INTERNAL, "the hook does not want to");
  int64_t numel = 0;
  if (swv_status* status = swv_tensor_numel(bucket->flat, &numel)) return status;
  return swv_comm_barrier(bucket->comm, nullptr, nullptr);
}

}  // namespace

// A small model, its gradients through whatever there is, and what was learned of them.
void Fuzzer::data_parallel() {
  swv_module* module = nullptr;
  swv_grad_sync *sync = nullptr, *other = nullptr;
  swv_tensor *x = nullptr, *number = nullptr, *state = nullptr;
  swv_tensor* batch[SWV_MAX_BATCH_TENSORS] = {};
  swv_string* name = nullptr;
  swv_plan* plan = nullptr;
  swv_value y = SWV_NONE;
  size_t count = 0;
  int64_t ranks = 0;
  int32_t chance = static_cast<int32_t>(below(9));
  const int64_t sizes[] = {6, 8};
  swv_mesh* const mesh = one_in(9) ? pick(meshes_) : meshes_[0];
  if (!done(swv_module_create_by_kind("Linear", "{\"in_features\": 8, \"out_features\": 8}",
                                      &module)))
    return;
  must(swv_tensor_ones(sizes, 2, nullptr, &x));
  if (one_in(5)) {  // cut along the last dimension, for fully_shard along the first
    swv_mesh* two = nullptr;
    const swv_mesh_dim dims[] = {{"a", size_}, {"b", 1}};
    if (done(swv_mesh_unflatten(mesh, "x", dims, 2, &two)) &&
        done(swv_plan_from_json("{\"parameter\": {\"*\": {\"b\": \"S(0)\"}}}", &plan))) {
      done(swv_module_distribute(module, two, plan, nullptr));
      done(swv_module_enable_2d_with_fsdp(module, two, one_in(3) ? text() : nullptr));
    }
    swv_plan_free(plan);
    swv_mesh_free(two);
  }
  if (one_in(3)) {
    done(swv_module_pre_dp_transform(module, mesh, one_in(5) ? text() : nullptr,
                                     one_in(5) ? small() : 0));
  }
  swv_gradient_hook hook = SWV_GRADIENT_HOOK_INIT;
  hook.name = one_in(9) ? text() : "hook";
  hook.user_data = &chance;
  hook.begin = one_in(2) ? nullptr : bucket_of;
  hook.finish = one_in(9) ? nullptr : bucket_of;
  swv_power_sgd_options power_sgd = SWV_POWER_SGD_OPTIONS_INIT;
  power_sgd.columns = one_in(9) ? small() : 1;
  power_sgd.start_iteration = one_in(9) ? this->number() : 0;
  power_sgd.min_compression_rate = one_in(9) ? real() : 2.0;
  power_sgd.seed = chance_.word();
  power_sgd.error_feedback = one_in(9) ? small() : static_cast<swv_bool>(below(2));
  power_sgd.warm_start = one_in(9) ? small() : static_cast<swv_bool>(below(2));
  swv_grad_sync_options buckets = SWV_GRAD_SYNC_OPTIONS_INIT;
  buckets.bucket_bytes = one_in(9) ? this->number() : 64;
  const bool is_power_sgd = one_in(2);
  if (is_power_sgd ? one_in(9) : one_in(2)) buckets.hook = &hook;
  if (is_power_sgd) buckets.power_sgd = one_in(3) ? sized(power_sgd) : &power_sgd;
  swv_data_parallel_options options = SWV_DATA_PARALLEL_OPTIONS_INIT;
  options.mesh_dim = one_in(5) ? text() : nullptr;
  options.source = one_in(5) ? small() : 0;
  options.reserved = one_in(20) ? small() : 0;
  options.sync = one_in(5) ? nullptr : one_in(3) ? sized(buckets) : &buckets;
  const bool is_parallel = done(swv_module_distributed_data_parallel(module, mesh,
                                                                     one_in(9)   ? nullptr
                                                                     : one_in(3) ? sized(options)
                                                                                 : &options,
                                                                     &sync));
  if (is_parallel && one_in(3)) done(swv_grad_sync_create(module, &buckets, &other));
  const swv_tensor* const mine[] = {x, x};
  const char* const dims[] = {one_in(2) ? "x" : text()};
  if (done(swv_mesh_join_batch(mesh, dims, one_in(2) ? 0 : length(1), mine,
                               one_in(5) ? 0 : 1 + below(2), batch, one_in(20) ? nullptr : &count,
                               one_in(2) ? nullptr : &ranks))) {
    const swv_value argument = swv_value_tensor(count == 0 ? x : batch[0]);
    if (done(swv_module_call(module, "forward", SWV_MODE_GRAD, &argument, 1, &y, 1, nullptr))) {
      if (y.kind == SWV_VALUE_TENSOR) done(swv_tensor_backward(y.as.tensor, batch[0], nullptr));
      swv_value_clear(&y);
    }
    for (size_t i = 0; i < count; ++i) swv_tensor_free(batch[i]);
  }
  if (!one_in(5)) done(swv_module_finish_grad_sync(module));
  done(swv_module_broadcast_buffers(module, mesh, one_in(5) ? text() : nullptr));
  if (sync != nullptr) {
    const int64_t seven = 7;
    swv_tensor_options integer = SWV_TENSOR_OPTIONS_INIT;
    integer.dtype = SWV_DTYPE_I64;
    must(swv_tensor_from_data(&seven, sizeof(seven), nullptr, 0, &integer, &number));
    const char* const names[] = {one_in(3) ? text() : "weight.iteration"};
    const swv_tensor* const values[] = {one_in(9) ? pick(tensors_) : number};
    done(swv_grad_sync_set_states(sync, names, values, one_in(9) ? length(1) : 1));
    done(swv_grad_sync_num_states(sync, one_in(9) ? nullptr : &count));
    if (done(swv_grad_sync_state(sync, one_in(5) ? below(5) : 0, one_in(3) ? nullptr : &name,
                                 one_in(3) ? nullptr : &state))) {
      swv_string_free(name);
      if (state != nullptr) keep(state);
    }
    if (one_in(3)) done(swv_grad_sync_discard(sync));
  }
  if (one_in(2)) {
    swv_module_free(module);
    module = nullptr;
  }
  swv_grad_sync_free(other);
  swv_grad_sync_free(sync);
  for (swv_tensor* t : {x, number}) swv_tensor_free(t);
  swv_module_free(module);
}

}  // namespace shardweave::capi

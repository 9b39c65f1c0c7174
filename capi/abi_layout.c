/* The binary layout of the header's structs and its numbers, written down: a change here is a
 * change of the ABI, and belongs into CHANGELOG.md. (A struct may grow at its end: then its size
 * here changes, and nothing else. On 64-bit machines.) */
#include "shardweave.h"

#ifdef __cplusplus
#define ASSERT(what) static_assert(what, #what)
#else
#define ASSERT(what) _Static_assert(what, #what)
#endif
#define SIZE(type, size) ASSERT(sizeof(type) == (size))
#define FIELD(type, member, offset, size) \
  ASSERT(offsetof(type, member) == (offset) && sizeof(((type*)NULL)->member) == (size))
#define NUMBER(name, value) ASSERT((name) == (value))

SIZE(swv_device, 8);
FIELD(swv_device, type, 0, 4);
FIELD(swv_device, index, 4, 4);

SIZE(swv_world_options, 48);
FIELD(swv_world_options, struct_size, 0, 8);
FIELD(swv_world_options, backend, 8, 8);
FIELD(swv_world_options, network_interface, 16, 8);
FIELD(swv_world_options, timeout_ms, 24, 8);
FIELD(swv_world_options, device, 32, 8);
FIELD(swv_world_options, device_backend, 40, 8);

SIZE(swv_rendezvous, 48);
FIELD(swv_rendezvous, struct_size, 0, 8);
FIELD(swv_rendezvous, rank, 8, 4);
FIELD(swv_rendezvous, world_size, 12, 4);
FIELD(swv_rendezvous, file, 16, 8);
FIELD(swv_rendezvous, host, 24, 8);
FIELD(swv_rendezvous, port, 32, 4);
FIELD(swv_rendezvous, local_rank, 36, 4);
FIELD(swv_rendezvous, run, 40, 8);

SIZE(swv_buffer, 48);
FIELD(swv_buffer, struct_size, 0, 8);
FIELD(swv_buffer, data, 8, 8);
FIELD(swv_buffer, count, 16, 8);
FIELD(swv_buffer, dtype, 24, 4);
FIELD(swv_buffer, device, 28, 8);
FIELD(swv_buffer, reserved, 36, 4);
FIELD(swv_buffer, stream, 40, 8);

SIZE(swv_collective, 80);
FIELD(swv_collective, struct_size, 0, 8);
FIELD(swv_collective, kind, 8, 4);
FIELD(swv_collective, reduce_op, 12, 4);
FIELD(swv_collective, peer, 16, 4);
FIELD(swv_collective, message_tag, 20, 4);
FIELD(swv_collective, in, 24, 8);
FIELD(swv_collective, out, 32, 8);
FIELD(swv_collective, in_counts, 40, 8);
FIELD(swv_collective, out_counts, 48, 8);
FIELD(swv_collective, num_counts, 56, 8);
FIELD(swv_collective, timeout_ms, 64, 8);
FIELD(swv_collective, tag, 72, 8);

SIZE(swv_backend_call, 96);
FIELD(swv_backend_call, struct_size, 0, 8);
FIELD(swv_backend_call, kind, 8, 4);
FIELD(swv_backend_call, reduce_op, 12, 4);
FIELD(swv_backend_call, peer, 16, 4);
FIELD(swv_backend_call, message_tag, 20, 4);
FIELD(swv_backend_call, in, 24, 8);
FIELD(swv_backend_call, out, 32, 8);
FIELD(swv_backend_call, in_counts, 40, 8);
FIELD(swv_backend_call, out_counts, 48, 8);
FIELD(swv_backend_call, sequence, 56, 8);
FIELD(swv_backend_call, timeout_ms, 64, 8);
FIELD(swv_backend_call, tag, 72, 8);
FIELD(swv_backend_call, fingerprint, 80, 8);
FIELD(swv_backend_call, coalesced, 88, 8);

SIZE(swv_group, 32);
FIELD(swv_group, struct_size, 0, 8);
FIELD(swv_group, name, 8, 8);
FIELD(swv_group, rank, 16, 4);
FIELD(swv_group, num_ranks, 20, 4);
FIELD(swv_group, world_ranks, 24, 8);

SIZE(swv_backend, 136);
FIELD(swv_backend, struct_size, 0, 8);
FIELD(swv_backend, name, 8, 8);
FIELD(swv_backend, implements, 16, 8);
FIELD(swv_backend, self, 24, 8);
FIELD(swv_backend, start, 32, 8);
FIELD(swv_backend, done, 40, 8);
FIELD(swv_backend, wait, 48, 8);
FIELD(swv_backend, subgroup, 56, 8);
FIELD(swv_backend, abort, 64, 8);
FIELD(swv_backend, drop, 72, 8);
FIELD(swv_backend, device, 80, 8);
FIELD(swv_backend, can_reduce, 88, 8);
FIELD(swv_backend, wait_on, 96, 8);
FIELD(swv_backend, copy_to_host, 104, 8);
FIELD(swv_backend, copy_to_device, 112, 8);
FIELD(swv_backend, begin_coalescing, 120, 8);
FIELD(swv_backend, end_coalescing, 128, 8);

SIZE(swv_device_backend, 32);
FIELD(swv_device_backend, struct_size, 0, 8);
FIELD(swv_device_backend, self, 8, 8);
FIELD(swv_device_backend, connect, 16, 8);
FIELD(swv_device_backend, drop, 24, 8);

SIZE(swv_mesh_dim, 16);
FIELD(swv_mesh_dim, name, 0, 8);
FIELD(swv_mesh_dim, size, 8, 8);

SIZE(swv_link_cost, 16);
FIELD(swv_link_cost, latency, 0, 8);
FIELD(swv_link_cost, bandwidth, 8, 8);

SIZE(swv_device_cost, 24);
FIELD(swv_device_cost, struct_size, 0, 8);
FIELD(swv_device_cost, flops, 8, 8);
FIELD(swv_device_cost, bandwidth, 16, 8);

SIZE(swv_random_state, 24);
FIELD(swv_random_state, struct_size, 0, 8);
FIELD(swv_random_state, seed, 8, 8);
FIELD(swv_random_state, offset, 16, 8);

SIZE(swv_materialize_options, 48);
FIELD(swv_materialize_options, struct_size, 0, 8);
FIELD(swv_materialize_options, fqns, 8, 8);
FIELD(swv_materialize_options, values, 16, 8);
FIELD(swv_materialize_options, num_values, 24, 8);
FIELD(swv_materialize_options, seed, 32, 8);
FIELD(swv_materialize_options, has_seed, 40, 4);

SIZE(swv_fully_shard_options, 96);
FIELD(swv_fully_shard_options, struct_size, 0, 8);
FIELD(swv_fully_shard_options, mesh_dim, 8, 8);
FIELD(swv_fully_shard_options, units, 16, 8);
FIELD(swv_fully_shard_options, num_units, 24, 8);
FIELD(swv_fully_shard_options, unit_types, 32, 8);
FIELD(swv_fully_shard_options, num_unit_types, 40, 8);
FIELD(swv_fully_shard_options, min_numel, 48, 8);
FIELD(swv_fully_shard_options, source, 56, 4);
FIELD(swv_fully_shard_options, reshard_after_forward, 60, 4);
FIELD(swv_fully_shard_options, param_dtype, 64, 4);
FIELD(swv_fully_shard_options, reduce_dtype, 68, 4);
FIELD(swv_fully_shard_options, output_dtype, 72, 4);
FIELD(swv_fully_shard_options, equal_segments, 76, 4);
FIELD(swv_fully_shard_options, reshard_after_forward_ranks, 80, 8);
FIELD(swv_fully_shard_options, compute_device, 88, 8);

SIZE(swv_fully_shard_counters, 56);
FIELD(swv_fully_shard_counters, struct_size, 0, 8);
FIELD(swv_fully_shard_counters, gathers, 8, 8);
FIELD(swv_fully_shard_counters, prefetches, 16, 8);
FIELD(swv_fully_shard_counters, wrong_prefetches, 24, 8);
FIELD(swv_fully_shard_counters, reduce_scatters, 32, 8);
FIELD(swv_fully_shard_counters, gathered_bytes, 40, 8);
FIELD(swv_fully_shard_counters, peak_gathered_bytes, 48, 8);

SIZE(swv_grad_sync_options, 40);
FIELD(swv_grad_sync_options, struct_size, 0, 8);
FIELD(swv_grad_sync_options, bucket_bytes, 8, 8);
FIELD(swv_grad_sync_options, reduce_dtype, 16, 4);
FIELD(swv_grad_sync_options, hook, 24, 8);
FIELD(swv_grad_sync_options, power_sgd, 32, 8);
SIZE(swv_gradient_bucket, 64);
FIELD(swv_gradient_bucket, struct_size, 0, 8);
FIELD(swv_gradient_bucket, index, 8, 8);
FIELD(swv_gradient_bucket, flat, 16, 8);
FIELD(swv_gradient_bucket, gradients, 24, 8);
FIELD(swv_gradient_bucket, parameters, 32, 8);
FIELD(swv_gradient_bucket, num_gradients, 40, 8);
FIELD(swv_gradient_bucket, comm, 48, 8);
FIELD(swv_gradient_bucket, is_discarded, 56, 4);
SIZE(swv_gradient_hook, 48);
FIELD(swv_gradient_hook, struct_size, 0, 8);
FIELD(swv_gradient_hook, name, 8, 8);
FIELD(swv_gradient_hook, user_data, 16, 8);
FIELD(swv_gradient_hook, begin, 24, 8);
FIELD(swv_gradient_hook, finish, 32, 8);
FIELD(swv_gradient_hook, drop, 40, 8);
SIZE(swv_power_sgd_options, 48);
FIELD(swv_power_sgd_options, struct_size, 0, 8);
FIELD(swv_power_sgd_options, columns, 8, 8);
FIELD(swv_power_sgd_options, start_iteration, 16, 8);
FIELD(swv_power_sgd_options, min_compression_rate, 24, 8);
FIELD(swv_power_sgd_options, seed, 32, 8);
FIELD(swv_power_sgd_options, error_feedback, 40, 4);
FIELD(swv_power_sgd_options, warm_start, 44, 4);
SIZE(swv_data_parallel_options, 32);
FIELD(swv_data_parallel_options, struct_size, 0, 8);
FIELD(swv_data_parallel_options, mesh_dim, 8, 8);
FIELD(swv_data_parallel_options, source, 16, 4);
FIELD(swv_data_parallel_options, reserved, 20, 4);
FIELD(swv_data_parallel_options, sync, 24, 8);

SIZE(swv_verify_options, 24);
FIELD(swv_verify_options, struct_size, 0, 8);
FIELD(swv_verify_options, tolerance, 8, 8);
FIELD(swv_verify_options, forward_only, 16, 4);
FIELD(swv_verify_options, copy_values, 20, 4);

SIZE(swv_plan_auto_options, 56);
FIELD(swv_plan_auto_options, struct_size, 0, 8);
FIELD(swv_plan_auto_options, tp_mesh_dim, 8, 8);
FIELD(swv_plan_auto_options, memory_limit, 16, 8);
FIELD(swv_plan_auto_options, optimizer_states, 24, 8);
FIELD(swv_plan_auto_options, heads, 32, 8);
FIELD(swv_plan_auto_options, max_evaluations, 40, 8);
FIELD(swv_plan_auto_options, sequence_dim, 48, 4);

SIZE(swv_loader_options, 88);
FIELD(swv_loader_options, struct_size, 0, 8);
FIELD(swv_loader_options, seq, 8, 8);
FIELD(swv_loader_options, batch, 16, 8);
FIELD(swv_loader_options, seed, 24, 8);
FIELD(swv_loader_options, epochs, 32, 8);
FIELD(swv_loader_options, mesh, 40, 8);
FIELD(swv_loader_options, layout, 48, 8);
FIELD(swv_loader_options, part, 56, 8);
FIELD(swv_loader_options, num_parts, 64, 8);
FIELD(swv_loader_options, prefetch, 72, 4);
FIELD(swv_loader_options, in_order, 76, 4);
FIELD(swv_loader_options, drop_last, 80, 4);
FIELD(swv_loader_options, reserved, 84, 4);

SIZE(swv_placement, 48);
FIELD(swv_placement, struct_size, 0, 8);
FIELD(swv_placement, kind, 8, 4);
FIELD(swv_placement, dim, 12, 4);
FIELD(swv_placement, reduce_op, 16, 4);
FIELD(swv_placement, reserved, 20, 4);
FIELD(swv_placement, split_factor, 24, 8);
FIELD(swv_placement, sizes, 32, 8);
FIELD(swv_placement, num_sizes, 40, 8);

SIZE(swv_named_placement, 16);
FIELD(swv_named_placement, mesh_dim, 0, 8);
FIELD(swv_named_placement, placement, 8, 8);

SIZE(swv_tensor_options, 40);
FIELD(swv_tensor_options, struct_size, 0, 8);
FIELD(swv_tensor_options, dtype, 8, 4);
FIELD(swv_tensor_options, requires_grad, 12, 4);
FIELD(swv_tensor_options, device, 16, 8);
FIELD(swv_tensor_options, mesh, 24, 8);
FIELD(swv_tensor_options, layout, 32, 8);

SIZE(swv_distribute_options, 16);
FIELD(swv_distribute_options, struct_size, 0, 8);
FIELD(swv_distribute_options, source, 8, 4);
FIELD(swv_distribute_options, reserved, 12, 4);

SIZE(swv_value, 24);
FIELD(swv_value, kind, 0, 4);
FIELD(swv_value, reserved, 4, 4);
FIELD(swv_value, as, 8, 16);

SIZE(swv_backward_options, 24);
FIELD(swv_backward_options, struct_size, 0, 8);
FIELD(swv_backward_options, retain_graph, 8, 4);
FIELD(swv_backward_options, create_graph, 12, 4);
FIELD(swv_backward_options, allow_unused, 16, 4);

SIZE(swv_function_call, 72);
FIELD(swv_function_call, struct_size, 0, 8);
FIELD(swv_function_call, context, 8, 8);
FIELD(swv_function_call, mode, 16, 4);
FIELD(swv_function_call, reserved, 20, 4);
FIELD(swv_function_call, inputs, 24, 8);
FIELD(swv_function_call, num_inputs, 32, 8);
FIELD(swv_function_call, outputs, 40, 8);
FIELD(swv_function_call, num_outputs, 48, 8);
FIELD(swv_function_call, module, 56, 8);
FIELD(swv_function_call, fqn, 64, 8);

SIZE(swv_function, 48);
FIELD(swv_function, struct_size, 0, 8);
FIELD(swv_function, name, 8, 8);
FIELD(swv_function, user_data, 16, 8);
FIELD(swv_function, forward, 24, 8);
FIELD(swv_function, backward, 32, 8);
FIELD(swv_function, drop, 40, 8);

SIZE(swv_segment, 40);
FIELD(swv_segment, struct_size, 0, 8);
FIELD(swv_segment, name, 8, 8);
FIELD(swv_segment, user_data, 16, 8);
FIELD(swv_segment, forward, 24, 8);
FIELD(swv_segment, drop, 32, 8);

SIZE(swv_patch, 40);
FIELD(swv_patch, struct_size, 0, 8);
FIELD(swv_patch, name, 8, 8);
FIELD(swv_patch, user_data, 16, 8);
FIELD(swv_patch, forward, 24, 8);
FIELD(swv_patch, drop, 32, 8);

SIZE(swv_clip_options, 24);
FIELD(swv_clip_options, struct_size, 0, 8);
FIELD(swv_clip_options, norm_type, 8, 8);
FIELD(swv_clip_options, error_if_nonfinite, 16, 4);

SIZE(swv_sgd_options, 48);
FIELD(swv_sgd_options, struct_size, 0, 8);
FIELD(swv_sgd_options, lr, 8, 8);
FIELD(swv_sgd_options, momentum, 16, 8);
FIELD(swv_sgd_options, dampening, 24, 8);
FIELD(swv_sgd_options, weight_decay, 32, 8);
FIELD(swv_sgd_options, nesterov, 40, 4);

SIZE(swv_adamw_options, 56);
FIELD(swv_adamw_options, struct_size, 0, 8);
FIELD(swv_adamw_options, lr, 8, 8);
FIELD(swv_adamw_options, beta1, 16, 8);
FIELD(swv_adamw_options, beta2, 24, 8);
FIELD(swv_adamw_options, eps, 32, 8);
FIELD(swv_adamw_options, weight_decay, 40, 8);
FIELD(swv_adamw_options, amsgrad, 48, 4);

SIZE(swv_adam_options, 56);
FIELD(swv_adam_options, struct_size, 0, 8);
FIELD(swv_adam_options, lr, 8, 8);
FIELD(swv_adam_options, beta1, 16, 8);
FIELD(swv_adam_options, beta2, 24, 8);
FIELD(swv_adam_options, eps, 32, 8);
FIELD(swv_adam_options, weight_decay, 40, 8);
FIELD(swv_adam_options, amsgrad, 48, 4);

SIZE(swv_lion_options, 40);
FIELD(swv_lion_options, struct_size, 0, 8);
FIELD(swv_lion_options, lr, 8, 8);
FIELD(swv_lion_options, beta1, 16, 8);
FIELD(swv_lion_options, beta2, 24, 8);
FIELD(swv_lion_options, weight_decay, 32, 8);

SIZE(swv_adafactor_options, 56);
FIELD(swv_adafactor_options, struct_size, 0, 8);
FIELD(swv_adafactor_options, lr, 8, 8);
FIELD(swv_adafactor_options, beta2_decay, 16, 8);
FIELD(swv_adafactor_options, eps1, 24, 8);
FIELD(swv_adafactor_options, eps2, 32, 8);
FIELD(swv_adafactor_options, clip_threshold, 40, 8);
FIELD(swv_adafactor_options, weight_decay, 48, 8);

SIZE(swv_muon_options, 80);
FIELD(swv_muon_options, struct_size, 0, 8);
FIELD(swv_muon_options, lr, 8, 8);
FIELD(swv_muon_options, weight_decay, 16, 8);
FIELD(swv_muon_options, momentum, 24, 8);
FIELD(swv_muon_options, ns_a, 32, 8);
FIELD(swv_muon_options, ns_b, 40, 8);
FIELD(swv_muon_options, ns_c, 48, 8);
FIELD(swv_muon_options, eps, 56, 8);
FIELD(swv_muon_options, ns_steps, 64, 4);
FIELD(swv_muon_options, ns_dtype, 68, 4);
FIELD(swv_muon_options, lr_scale, 72, 4);
FIELD(swv_muon_options, nesterov, 76, 4);

SIZE(swv_schedule, 56);
FIELD(swv_schedule, struct_size, 0, 8);
FIELD(swv_schedule, steps, 8, 8);
FIELD(swv_schedule, decay, 16, 8);
FIELD(swv_schedule, warmup, 24, 8);
FIELD(swv_schedule, gamma, 32, 8);
FIELD(swv_schedule, floor, 40, 8);
FIELD(swv_schedule, shape, 48, 4);

SIZE(swv_grad_scaler_options, 40);
FIELD(swv_grad_scaler_options, struct_size, 0, 8);
FIELD(swv_grad_scaler_options, init_scale, 8, 8);
FIELD(swv_grad_scaler_options, growth_factor, 16, 8);
FIELD(swv_grad_scaler_options, backoff_factor, 24, 8);
FIELD(swv_grad_scaler_options, growth_interval, 32, 8);

SIZE(swv_checkpointer_options, 32);
FIELD(swv_checkpointer_options, struct_size, 0, 8);
FIELD(swv_checkpointer_options, keep_last, 8, 8);
FIELD(swv_checkpointer_options, timeout_ms, 16, 8);
FIELD(swv_checkpointer_options, skip_if_busy, 24, 4);

SIZE(swv_load_options, 24);
FIELD(swv_load_options, struct_size, 0, 8);
FIELD(swv_load_options, allow_missing, 8, 4);
FIELD(swv_load_options, allow_unexpected, 12, 4);
FIELD(swv_load_options, cast, 16, 4);
FIELD(swv_load_options, verify, 20, 4);

SIZE(swv_load_pretrained_options, 40);
FIELD(swv_load_pretrained_options, struct_size, 0, 8);
FIELD(swv_load_pretrained_options, ignored, 8, 8);
FIELD(swv_load_pretrained_options, num_ignored, 16, 8);
FIELD(swv_load_pretrained_options, allow_missing, 24, 4);
FIELD(swv_load_pretrained_options, allow_unexpected, 28, 4);
FIELD(swv_load_pretrained_options, allow_unknown, 32, 4);

SIZE(swv_save_pretrained_options, 40);
FIELD(swv_save_pretrained_options, struct_size, 0, 8);
FIELD(swv_save_pretrained_options, ignored, 8, 8);
FIELD(swv_save_pretrained_options, num_ignored, 16, 8);
FIELD(swv_save_pretrained_options, max_file_bytes, 24, 8);
FIELD(swv_save_pretrained_options, dtype, 32, 4);

SIZE(swv_zero_options, 32);
FIELD(swv_zero_options, struct_size, 0, 8);
FIELD(swv_zero_options, mesh_dim, 8, 8);
FIELD(swv_zero_options, stage, 16, 4);
FIELD(swv_zero_options, bucket_bytes, 24, 8);

SIZE(swv_comm_counter, 16);
FIELD(swv_comm_counter, calls, 0, 8);
FIELD(swv_comm_counter, bytes, 8, 8);

SIZE(swv_dispatch_counters, 64);
FIELD(swv_dispatch_counters, struct_size, 0, 8);
FIELD(swv_dispatch_counters, operators, 8, 8);
FIELD(swv_dispatch_counters, cache_misses, 16, 8);
FIELD(swv_dispatch_counters, implicit_redistributions, 24, 8);
FIELD(swv_dispatch_counters, gathered_operators, 32, 8);
FIELD(swv_dispatch_counters, remembered_uses, 40, 8);
FIELD(swv_dispatch_counters, remembered_bytes, 48, 8);
FIELD(swv_dispatch_counters, unsharded_weights, 56, 8);

SIZE(swv_call_options, 16);
FIELD(swv_call_options, timeout_ms, 0, 8);
FIELD(swv_call_options, tag, 8, 8);

NUMBER(SWV_CODE_OK, 0);
NUMBER(SWV_CODE_CANCELLED, 1);
NUMBER(SWV_CODE_UNKNOWN, 2);
NUMBER(SWV_CODE_INVALID_ARGUMENT, 3);
NUMBER(SWV_CODE_DEADLINE_EXCEEDED, 4);
NUMBER(SWV_CODE_NOT_FOUND, 5);
NUMBER(SWV_CODE_ALREADY_EXISTS, 6);
NUMBER(SWV_CODE_PERMISSION_DENIED, 7);
NUMBER(SWV_CODE_RESOURCE_EXHAUSTED, 8);
NUMBER(SWV_CODE_FAILED_PRECONDITION, 9);
NUMBER(SWV_CODE_ABORTED, 10);
NUMBER(SWV_CODE_OUT_OF_RANGE, 11);
NUMBER(SWV_CODE_UNIMPLEMENTED, 12);
NUMBER(SWV_CODE_INTERNAL, 13);
NUMBER(SWV_CODE_UNAVAILABLE, 14);
NUMBER(SWV_CODE_DATA_LOSS, 15);
NUMBER(SWV_CODE_UNAUTHENTICATED, 16);
NUMBER(SWV_CHECKS_OFF, 0);
NUMBER(SWV_CHECKS_REPORT, 1);
NUMBER(SWV_CHECKS_ABORT, 2);
NUMBER(SWV_DTYPE_DEFAULT, 0);
NUMBER(SWV_DTYPE_F32, 1);
NUMBER(SWV_DTYPE_F64, 2);
NUMBER(SWV_DTYPE_F16, 3);
NUMBER(SWV_DTYPE_BF16, 4);
NUMBER(SWV_DTYPE_F8_E4M3FN, 5);
NUMBER(SWV_DTYPE_F8_E5M2, 6);
NUMBER(SWV_DTYPE_I8, 7);
NUMBER(SWV_DTYPE_I16, 8);
NUMBER(SWV_DTYPE_I32, 9);
NUMBER(SWV_DTYPE_I64, 10);
NUMBER(SWV_DTYPE_U8, 11);
NUMBER(SWV_DTYPE_U16, 12);
NUMBER(SWV_DTYPE_U32, 13);
NUMBER(SWV_DTYPE_U64, 14);
NUMBER(SWV_DTYPE_BOOL, 15);
NUMBER(SWV_DTYPE_C64, 16);
NUMBER(SWV_DTYPE_C128, 17);
NUMBER(SWV_DTYPE_C32, 18);
NUMBER(SWV_DEVICE_CPU, 0);
NUMBER(SWV_DEVICE_CUDA, 1);
NUMBER(SWV_REDUCE_SUM, 0);
NUMBER(SWV_REDUCE_AVG, 1);
NUMBER(SWV_REDUCE_MIN, 2);
NUMBER(SWV_REDUCE_MAX, 3);
NUMBER(SWV_REDUCE_PRODUCT, 4);
NUMBER(SWV_COLLECTIVE_ALL_REDUCE, 0);
NUMBER(SWV_COLLECTIVE_ALL_GATHER, 1);
NUMBER(SWV_COLLECTIVE_ALL_GATHER_V, 2);
NUMBER(SWV_COLLECTIVE_REDUCE_SCATTER, 3);
NUMBER(SWV_COLLECTIVE_REDUCE_SCATTER_V, 4);
NUMBER(SWV_COLLECTIVE_ALL_TO_ALL, 5);
NUMBER(SWV_COLLECTIVE_ALL_TO_ALL_V, 6);
NUMBER(SWV_COLLECTIVE_BROADCAST, 7);
NUMBER(SWV_COLLECTIVE_REDUCE, 8);
NUMBER(SWV_COLLECTIVE_GATHER, 9);
NUMBER(SWV_COLLECTIVE_SCATTER, 10);
NUMBER(SWV_COLLECTIVE_BARRIER, 11);
NUMBER(SWV_COLLECTIVE_SEND, 12);
NUMBER(SWV_COLLECTIVE_RECV, 13);
NUMBER(SWV_PLACEMENT_REPLICATE, 0);
NUMBER(SWV_PLACEMENT_SHARD, 1);
NUMBER(SWV_PLACEMENT_STRIDED_SHARD, 2);
NUMBER(SWV_PLACEMENT_RAGGED_SHARD, 3);
NUMBER(SWV_PLACEMENT_PARTIAL, 4);
NUMBER(SWV_MUON_ORIGINAL, 0);
NUMBER(SWV_MUON_MATCH_RMS_ADAMW, 1);
NUMBER(SWV_SCHEDULE_CONSTANT, 0);
NUMBER(SWV_SCHEDULE_LINEAR, 1);
NUMBER(SWV_SCHEDULE_COSINE, 2);
NUMBER(SWV_SCHEDULE_WSD, 3);
NUMBER(SWV_SCHEDULE_STEP, 4);
NUMBER(SWV_MODE_GRAD, 0);
NUMBER(SWV_MODE_NO_GRAD, 1);
NUMBER(SWV_MODE_INFERENCE, 2);
NUMBER(SWV_MODE_AUTOCAST_F16, 4);
NUMBER(SWV_MODE_AUTOCAST_BF16, 8);
NUMBER(SWV_VALUE_NONE, 0);
NUMBER(SWV_VALUE_DEFAULT, 1);
NUMBER(SWV_VALUE_TENSOR, 2);
NUMBER(SWV_VALUE_BOOL, 3);
NUMBER(SWV_VALUE_INT, 4);
NUMBER(SWV_VALUE_FLOAT, 5);
NUMBER(SWV_VALUE_COMPLEX, 6);
NUMBER(SWV_VALUE_STRING, 7);
NUMBER(SWV_VALUE_DTYPE, 8);
NUMBER(SWV_VALUE_DEVICE, 9);
NUMBER(SWV_VALUE_TENSORS, 10);
NUMBER(SWV_VALUE_BOOLS, 11);
NUMBER(SWV_VALUE_INTS, 12);
NUMBER(SWV_VALUE_FLOATS, 13);

// Made by bindings/generate.py from capi/shardweave.h. Do not edit.

//! The header's initializers: each struct as `SWV_..._INIT` leaves it.

use core::ptr;

use crate::bindings::*;

pub const SWV_WORLD_OPTIONS_INIT: swv_world_options = swv_world_options {
    struct_size: 48,
    backend: ptr::null(),
    network_interface: ptr::null(),
    timeout_ms: 0,
    device: swv_device { type_: SWV_DEVICE_CPU, index: 0 },
    device_backend: ptr::null(),
};

pub const SWV_RENDEZVOUS_INIT: swv_rendezvous = swv_rendezvous {
    struct_size: 48,
    rank: 0,
    world_size: 1,
    file: ptr::null(),
    host: ptr::null(),
    port: 0,
    local_rank: -1,
    run: ptr::null(),
};

pub const SWV_BUFFER_INIT: swv_buffer = swv_buffer {
    struct_size: 48,
    data: ptr::null_mut(),
    count: 0,
    dtype: SWV_DTYPE_DEFAULT,
    device: swv_device { type_: SWV_DEVICE_CPU, index: 0 },
    reserved: 0,
    stream: ptr::null_mut(),
};

pub const SWV_COLLECTIVE_INIT: swv_collective = swv_collective {
    struct_size: 80,
    kind: 0,
    reduce_op: 0,
    peer: 0,
    message_tag: 0,
    in_: ptr::null(),
    out: ptr::null(),
    in_counts: ptr::null(),
    out_counts: ptr::null(),
    num_counts: 0,
    timeout_ms: 0,
    tag: ptr::null(),
};

pub const SWV_GROUP_INIT: swv_group = swv_group {
    struct_size: 32,
    name: ptr::null(),
    rank: 0,
    num_ranks: 1,
    world_ranks: ptr::null(),
};

pub const SWV_BACKEND_INIT: swv_backend = swv_backend {
    struct_size: 136,
    name: ptr::null(),
    implements: 0,
    self_: ptr::null_mut(),
    start: None,
    done: None,
    wait: None,
    subgroup: None,
    abort: None,
    drop: None,
    device: swv_device { type_: SWV_DEVICE_CPU, index: 0 },
    can_reduce: None,
    wait_on: None,
    copy_to_host: None,
    copy_to_device: None,
    begin_coalescing: None,
    end_coalescing: None,
};

pub const SWV_DEVICE_BACKEND_INIT: swv_device_backend = swv_device_backend {
    struct_size: 32,
    self_: ptr::null_mut(),
    connect: None,
    drop: None,
};

pub const SWV_DEVICE_COST_INIT: swv_device_cost = swv_device_cost {
    struct_size: 24,
    flops: 5e10,
    bandwidth: 1e10,
};

pub const SWV_RANDOM_STATE_INIT: swv_random_state = swv_random_state {
    struct_size: 24,
    seed: 0,
    offset: 0,
};

pub const SWV_PLACEMENT_INIT: swv_placement = swv_placement {
    struct_size: 48,
    kind: SWV_PLACEMENT_REPLICATE,
    dim: 0,
    reduce_op: 0,
    reserved: 0,
    split_factor: 0,
    sizes: ptr::null(),
    num_sizes: 0,
};

pub const SWV_TENSOR_OPTIONS_INIT: swv_tensor_options = swv_tensor_options {
    struct_size: 40,
    dtype: 0,
    requires_grad: 0,
    device: swv_device { type_: SWV_DEVICE_CPU, index: 0 },
    mesh: ptr::null(),
    layout: ptr::null(),
};

pub const SWV_DISTRIBUTE_OPTIONS_INIT: swv_distribute_options = swv_distribute_options {
    struct_size: 16,
    source: 0,
    reserved: 0,
};

pub const SWV_BACKWARD_OPTIONS_INIT: swv_backward_options = swv_backward_options {
    struct_size: 20,
    retain_graph: 0,
    create_graph: 0,
    allow_unused: 0,
};

pub const SWV_FUNCTION_INIT: swv_function = swv_function {
    struct_size: 48,
    name: ptr::null(),
    user_data: ptr::null_mut(),
    forward: None,
    backward: None,
    drop: None,
};

pub const SWV_SEGMENT_INIT: swv_segment = swv_segment {
    struct_size: 40,
    name: ptr::null(),
    user_data: ptr::null_mut(),
    forward: None,
    drop: None,
};

pub const SWV_PATCH_INIT: swv_patch = swv_patch {
    struct_size: 40,
    name: ptr::null(),
    user_data: ptr::null_mut(),
    forward: None,
    drop: None,
};

pub const SWV_PLAN_AUTO_OPTIONS_INIT: swv_plan_auto_options = swv_plan_auto_options {
    struct_size: 52,
    tp_mesh_dim: ptr::null(),
    memory_limit: 0,
    optimizer_states: 2,
    heads: 0,
    max_evaluations: 120,
    sequence_dim: 1,
};

pub const SWV_MATERIALIZE_OPTIONS_INIT: swv_materialize_options = swv_materialize_options {
    struct_size: 44,
    fqns: ptr::null(),
    values: ptr::null(),
    num_values: 0,
    seed: 0,
    has_seed: 0,
};

pub const SWV_FULLY_SHARD_OPTIONS_INIT: swv_fully_shard_options = swv_fully_shard_options {
    struct_size: 96,
    mesh_dim: ptr::null(),
    units: ptr::null(),
    num_units: 0,
    unit_types: ptr::null(),
    num_unit_types: 0,
    min_numel: 0,
    source: 0,
    reshard_after_forward: 1,
    param_dtype: SWV_DTYPE_DEFAULT,
    reduce_dtype: SWV_DTYPE_DEFAULT,
    output_dtype: SWV_DTYPE_DEFAULT,
    equal_segments: 0,
    reshard_after_forward_ranks: 0,
    compute_device: swv_device { type_: SWV_DEVICE_CPU, index: 0 },
};

pub const SWV_FULLY_SHARD_COUNTERS_INIT: swv_fully_shard_counters = swv_fully_shard_counters {
    struct_size: 56,
    gathers: 0,
    prefetches: 0,
    wrong_prefetches: 0,
    reduce_scatters: 0,
    gathered_bytes: 0,
    peak_gathered_bytes: 0,
};

pub const SWV_GRADIENT_HOOK_INIT: swv_gradient_hook = swv_gradient_hook {
    struct_size: 48,
    name: ptr::null(),
    user_data: ptr::null_mut(),
    begin: None,
    finish: None,
    drop: None,
};

pub const SWV_POWER_SGD_OPTIONS_INIT: swv_power_sgd_options = swv_power_sgd_options {
    struct_size: 48,
    columns: 1,
    start_iteration: 0,
    min_compression_rate: 2.0,
    seed: 0,
    error_feedback: 1,
    warm_start: 1,
};

pub const SWV_GRAD_SYNC_OPTIONS_INIT: swv_grad_sync_options = swv_grad_sync_options {
    struct_size: 40,
    bucket_bytes: 26214400,
    reduce_dtype: SWV_DTYPE_DEFAULT,
    hook: ptr::null(),
    power_sgd: ptr::null(),
};

pub const SWV_DATA_PARALLEL_OPTIONS_INIT: swv_data_parallel_options = swv_data_parallel_options {
    struct_size: 32,
    mesh_dim: ptr::null(),
    source: 0,
    reserved: 0,
    sync: ptr::null(),
};

pub const SWV_CLIP_OPTIONS_INIT: swv_clip_options = swv_clip_options {
    struct_size: 20,
    norm_type: 2.0,
    error_if_nonfinite: 0,
};

pub const SWV_SGD_OPTIONS_INIT: swv_sgd_options = swv_sgd_options {
    struct_size: 44,
    lr: 1e-3,
    momentum: 0.0,
    dampening: 0.0,
    weight_decay: 0.0,
    nesterov: 0,
};

pub const SWV_ADAM_OPTIONS_INIT: swv_adam_options = swv_adam_options {
    struct_size: 52,
    lr: 1e-3,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.0,
    amsgrad: 0,
};

pub const SWV_ADAMW_OPTIONS_INIT: swv_adamw_options = swv_adamw_options {
    struct_size: 52,
    lr: 1e-3,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 1e-2,
    amsgrad: 0,
};

pub const SWV_LION_OPTIONS_INIT: swv_lion_options = swv_lion_options {
    struct_size: 40,
    lr: 1e-4,
    beta1: 0.9,
    beta2: 0.99,
    weight_decay: 0.0,
};

pub const SWV_ADAFACTOR_OPTIONS_INIT: swv_adafactor_options = swv_adafactor_options {
    struct_size: 56,
    lr: 1e-2,
    beta2_decay: -0.8,
    eps1: 0.0,
    eps2: 1e-3,
    clip_threshold: 1.0,
    weight_decay: 0.0,
};

pub const SWV_MUON_OPTIONS_INIT: swv_muon_options = swv_muon_options {
    struct_size: 80,
    lr: 1e-3,
    weight_decay: 0.1,
    momentum: 0.95,
    ns_a: 3.4445,
    ns_b: -4.7750,
    ns_c: 2.0315,
    eps: 1e-7,
    ns_steps: 5,
    ns_dtype: SWV_DTYPE_BF16,
    lr_scale: SWV_MUON_ORIGINAL,
    nesterov: 1,
};

pub const SWV_ZERO_OPTIONS_INIT: swv_zero_options = swv_zero_options {
    struct_size: 32,
    mesh_dim: ptr::null(),
    stage: 1,
    bucket_bytes: 26214400,
};

pub const SWV_SCHEDULE_INIT: swv_schedule = swv_schedule {
    struct_size: 52,
    steps: 0,
    decay: 0,
    warmup: 0,
    gamma: 1.0,
    floor: 0.0,
    shape: SWV_SCHEDULE_CONSTANT,
};

pub const SWV_GRAD_SCALER_OPTIONS_INIT: swv_grad_scaler_options = swv_grad_scaler_options {
    struct_size: 40,
    init_scale: 65536.0,
    growth_factor: 2.0,
    backoff_factor: 0.5,
    growth_interval: 2000,
};

pub const SWV_LOADER_OPTIONS_INIT: swv_loader_options = swv_loader_options {
    struct_size: 88,
    seq: 1,
    batch: 1,
    seed: 0,
    epochs: 0,
    mesh: ptr::null(),
    layout: ptr::null(),
    part: 0,
    num_parts: 1,
    prefetch: 2,
    in_order: 0,
    drop_last: 0,
    reserved: 0,
};

pub const SWV_CHECKPOINTER_OPTIONS_INIT: swv_checkpointer_options = swv_checkpointer_options {
    struct_size: 32,
    keep_last: 0,
    timeout_ms: 0,
    skip_if_busy: 0,
    copy_beside_training: 0,
};

pub const SWV_LOAD_OPTIONS_INIT: swv_load_options = swv_load_options {
    struct_size: 24,
    allow_missing: 0,
    allow_unexpected: 0,
    cast: 0,
    verify: 0,
};

pub const SWV_LOAD_PRETRAINED_OPTIONS_INIT: swv_load_pretrained_options = swv_load_pretrained_options {
    struct_size: 36,
    ignored: ptr::null(),
    num_ignored: 0,
    allow_missing: 0,
    allow_unexpected: 0,
    allow_unknown: 0,
};

pub const SWV_SAVE_PRETRAINED_OPTIONS_INIT: swv_save_pretrained_options = swv_save_pretrained_options {
    struct_size: 36,
    ignored: ptr::null(),
    num_ignored: 0,
    max_file_bytes: 5000000000,
    dtype: SWV_DTYPE_DEFAULT,
};

pub const SWV_DISPATCH_COUNTERS_INIT: swv_dispatch_counters = swv_dispatch_counters {
    struct_size: 64,
    operators: 0,
    cache_misses: 0,
    implicit_redistributions: 0,
    gathered_operators: 0,
    remembered_uses: 0,
    remembered_bytes: 0,
    unsharded_weights: 0,
};

pub const SWV_VERIFY_OPTIONS_INIT: swv_verify_options = swv_verify_options {
    struct_size: 24,
    tolerance: 0.0,
    forward_only: 0,
    copy_values: 0,
};

pub const SWV_CALL_OPTIONS_INIT: swv_call_options = swv_call_options {
    timeout_ms: 0,
    tag: ptr::null(),
};

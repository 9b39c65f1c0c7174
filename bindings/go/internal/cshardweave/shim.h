// What Go calls instead of shardweave.h where a call would otherwise cross the border more than once,
// or hand over pointers that lie in Go memory.
#ifndef SHARDWEAVE_GO_SHIM_H_
#define SHARDWEAVE_GO_SHIM_H_

#include <shardweave.h>
#include <string.h>

// What an argument of a call points to lies in `data`: the argument says at which byte, not where. So
// nothing in Go's memory is a pointer, and nothing needs to be pinned or copied to C's heap. Where
// `reserved` is not 0, the argument is given by name: the text at byte reserved - 1.
static inline void swvgo_arguments(const swv_value* given, size_t count, const char* data,
                                   swv_value* arguments, const char** names) {
  for (size_t i = 0; i < count; ++i) {
    swv_value* to = &arguments[i];
    *to = given[i];
    if (to->reserved != 0) {
      *names++ = data + to->reserved - 1;
      to->reserved = 0;
    }
    if (to->kind == SWV_VALUE_STRING || to->kind >= SWV_VALUE_TENSORS) {
      to->as.string.data = data + (uintptr_t)to->as.string.data;
    }
  }
}

// What this rank holds of a large tensor.
static inline int64_t swvgo_large_tensor_local_bytes(const swv_tensor* tensor, int64_t numel) {
  swv_dtype dtype = SWV_DTYPE_DEFAULT;
  swv_bool sharded = 0;
  swv_tensor* local = NULL;
  swv_status* status = swv_tensor_dtype(tensor, &dtype);
  if (status == NULL) status = swv_tensor_is_sharded(tensor, &sharded);
  if (status == NULL && sharded) {
    status = swv_tensor_to_local(tensor, NULL, SWV_MODE_NO_GRAD, &local);
    if (status == NULL) status = swv_tensor_numel(local, &numel);
    swv_tensor_free(local);
  }
  if (status != NULL) {
    swv_status_free(status);
    return 0;
  }
  return numel * (int64_t)swv_dtype_size(dtype);
}

// About what this rank holds of a tensor. Of small ones what all ranks hold of it, were it F32, which is asked
// faster.
static inline int64_t swvgo_tensor_local_bytes(const swv_tensor* tensor) {
  int64_t numel = 0;
  swv_status* const status = swv_tensor_numel(tensor, &numel);
  if (status != NULL) {
    swv_status_free(status);
    return 0;
  }
  return numel <= 16384 ? 4 * numel : swvgo_large_tensor_local_bytes(tensor, numel);
}

// Here and in swvgo_tensor_free a handle is a number: of a pointer to what cgo does not know, it looks
// up at each call whether that lies in Go's memory.
//
// With `weigh` also what this rank holds of the first result, if that is a tensor.
static inline swv_status* swvgo_call(uintptr_t op_handle, swv_grad_mode mode,
                                     const swv_value* given, size_t num_arguments, size_t num_names,
                                     const char* data, swv_value* results, size_t capacity,
                                     size_t* num_results, swv_bool weigh, int64_t* out_bytes) {
  const swv_op* const op = (const swv_op*)op_handle;
  swv_status* status = NULL;
  if (data == NULL) {  // nothing points anywhere, no names
    status = swv_op_call(op, mode, given, num_arguments, results, capacity, num_results);
  } else {
    swv_value arguments[num_arguments + 1];
    const char* names[num_arguments + 1];
    swvgo_arguments(given, num_arguments, data, arguments, names);
    status = num_names == 0
                 ? swv_op_call(op, mode, arguments, num_arguments, results, capacity, num_results)
                 : swv_op_call_named(op, mode, arguments, num_arguments, names, num_names, results,
                                     capacity, num_results);
  }
  if (weigh && status == NULL && *num_results > 0 && results[0].kind == SWV_VALUE_TENSOR) {
    *out_bytes = swvgo_tensor_local_bytes(results[0].as.tensor);
  }
  return status;
}

static inline swv_status* swvgo_explain(const swv_op* op, const swv_value* given,
                                        size_t num_arguments, const char* data,
                                        swv_string** out_text, swv_string** out_json) {
  swv_value arguments[num_arguments + 1];
  const char* names[num_arguments + 1];
  swvgo_arguments(given, num_arguments, data, arguments, names);
  return swv_op_explain(op, arguments, num_arguments, out_text, out_json);
}

static inline swv_status* swvgo_module_call(swv_module* module, const char* method,
                                            swv_grad_mode mode, const swv_value* given,
                                            size_t num_arguments, size_t num_names,
                                            const char* data, swv_value* results, size_t capacity,
                                            size_t* num_results) {
  swv_value arguments[num_arguments + 1];
  const char* names[num_arguments + 1];
  swvgo_arguments(given, num_arguments, data, arguments, names);
  if (num_names == 0) {
    return swv_module_call(module, method, mode, arguments, num_arguments, results, capacity,
                           num_results);
  }
  return swv_module_call_named(module, method, mode, arguments, num_arguments, names, num_names,
                               results, capacity, num_results);
}

// The names lie in `names`, one behind the other, each with its NUL.
static inline void swvgo_texts(const char* names, size_t count, const char** out) {
  for (size_t i = 0; i < count; ++i) {
    out[i] = names;
    names += strlen(names) + 1;
  }
}

static inline swv_status* swvgo_mesh_create(const swv_world* world, const char* names,
                                            const int64_t* sizes, size_t num_dims,
                                            const int32_t* ranks, size_t num_ranks,
                                            swv_mesh** out_mesh) {
  const char* texts[num_dims + 1];
  swv_mesh_dim dims[num_dims + 1];
  swvgo_texts(names, num_dims, texts);
  for (size_t i = 0; i < num_dims; ++i) {
    dims[i].name = texts[i];
    dims[i].size = sizes[i];
  }
  if (num_ranks == 0) return swv_mesh_create(world, dims, num_dims, out_mesh);
  return swv_mesh_create_from_ranks(world, dims, num_dims, ranks, num_ranks, out_mesh);
}

static inline swv_status* swvgo_mesh_unflatten(const swv_mesh* mesh, const char* name,
                                               const char* names, const int64_t* sizes,
                                               size_t num_dims, swv_mesh** out_mesh) {
  const char* texts[num_dims + 1];
  swv_mesh_dim dims[num_dims + 1];
  swvgo_texts(names, num_dims, texts);
  for (size_t i = 0; i < num_dims; ++i) {
    dims[i].name = texts[i];
    dims[i].size = sizes[i];
  }
  return swv_mesh_unflatten(mesh, name, dims, num_dims, out_mesh);
}

static inline swv_status* swvgo_mesh_slice(const swv_mesh* mesh, const char* names,
                                           size_t num_names, swv_mesh** out_mesh) {
  const char* texts[num_names + 1];
  swvgo_texts(names, num_names, texts);
  return swv_mesh_slice(mesh, texts, num_names, out_mesh);
}

static inline swv_status* swvgo_mesh_flatten(const swv_mesh* mesh, const char* names,
                                             size_t num_names, const char* new_name,
                                             swv_mesh** out_mesh) {
  const char* texts[num_names + 1];
  swvgo_texts(names, num_names, texts);
  return swv_mesh_flatten(mesh, texts, num_names, new_name, out_mesh);
}

// Pairs: mesh dimension, placement, mesh dimension, ...
static inline void swvgo_placements(const char* pairs, size_t count, swv_named_placement* out) {
  for (size_t i = 0; i < count; ++i) {
    out[i].mesh_dim = pairs;
    pairs += strlen(pairs) + 1;
    out[i].placement = pairs;
    pairs += strlen(pairs) + 1;
  }
}

static inline swv_status* swvgo_layout_create_named(const swv_mesh* mesh, const char* pairs,
                                                    size_t count, swv_layout** out_layout) {
  swv_named_placement placements[count + 1];
  swvgo_placements(pairs, count, placements);
  return swv_layout_create_named(mesh, placements, count, out_layout);
}

static inline swv_placement swvgo_placement(void) {
  const swv_placement placement = SWV_PLACEMENT_INIT;
  return placement;
}

// The names lie in `names`, one behind the other, each with its NUL.
static inline swv_status* swvgo_module_materialize(swv_module* module, const char* names,
                                                   swv_tensor* const* values, size_t count,
                                                   uint64_t seed, swv_bool has_seed) {
  const char* texts[count + 1];
  swv_materialize_options options = SWV_MATERIALIZE_OPTIONS_INIT;
  swvgo_texts(names, count, texts);
  options.fqns = texts;
  options.values = (const swv_tensor* const*)values;
  options.num_values = count;
  options.seed = seed;
  options.has_seed = has_seed;
  return swv_module_materialize(module, &options);
}

// units and unit_types lie one behind the other in `names`, each with its NUL.
static inline swv_status* swvgo_module_fully_shard(
    swv_module* module, const swv_mesh* mesh, const char* mesh_dim, const char* names,
    size_t num_units, size_t num_unit_types, int64_t min_numel, int32_t source,
    swv_bool reshard_after_forward, swv_dtype param_dtype, swv_dtype reduce_dtype,
    swv_dtype output_dtype, swv_bool equal_segments, int64_t reshard_after_forward_ranks,
    swv_device compute_device, swv_string** out_text, swv_string** out_json) {
  const char* texts[num_units + num_unit_types + 1];
  swv_fully_shard_options options = SWV_FULLY_SHARD_OPTIONS_INIT;
  swvgo_texts(names, num_units + num_unit_types, texts);
  options.mesh_dim = mesh_dim;
  options.units = texts;
  options.num_units = num_units;
  options.unit_types = texts + num_units;
  options.num_unit_types = num_unit_types;
  options.min_numel = min_numel;
  options.source = source;
  options.reshard_after_forward = reshard_after_forward;
  options.param_dtype = param_dtype;
  options.reduce_dtype = reduce_dtype;
  options.output_dtype = output_dtype;
  options.equal_segments = equal_segments;
  options.reshard_after_forward_ranks = reshard_after_forward_ranks;
  options.compute_device = compute_device;
  return swv_module_fully_shard(module, mesh, &options, out_text, out_json);
}

// Texts are one behind the other.
static inline swv_status* swvgo_safetensors_write(const char* path, const char* names,
                                                  swv_tensor* const* tensors, size_t num_tensors,
                                                  const char* metadata, size_t num_metadata) {
  const char* all[num_tensors + 1];
  const char* words[2 * num_metadata + 1];
  swvgo_texts(names, num_tensors, all);
  swvgo_texts(metadata, 2 * num_metadata, words);
  return swv_safetensors_write(path, all, (const swv_tensor* const*)tensors, num_tensors, words,
                               num_metadata);
}

static inline swv_status* swvgo_metrics_writer_write(swv_metrics_writer* writer, int64_t step,
                                                     const char* names, const double* values,
                                                     size_t num_metrics) {
  const char* texts[num_metrics + 1];
  swvgo_texts(names, num_metrics, texts);
  return swv_metrics_writer_write(writer, step, texts, values, num_metrics);
}

static inline swv_status* swvgo_module_load_pretrained(swv_module* module, const char* path,
                                                       const swv_mesh* mesh, const char* ignored,
                                                       size_t num_ignored, swv_bool allow_missing,
                                                       swv_bool allow_unexpected,
                                                       swv_bool allow_unknown,
                                                       swv_string** out_json) {
  const char* texts[num_ignored + 1];
  swv_load_pretrained_options options = SWV_LOAD_PRETRAINED_OPTIONS_INIT;
  swvgo_texts(ignored, num_ignored, texts);
  options.ignored = texts;
  options.num_ignored = num_ignored;
  options.allow_missing = allow_missing;
  options.allow_unexpected = allow_unexpected;
  options.allow_unknown = allow_unknown;
  return swv_module_load_pretrained(module, path, mesh, &options, out_json);
}

static inline swv_status* swvgo_module_save_pretrained(
    const swv_module* module, const char* directory, const char* config_json, const swv_mesh* mesh,
    const char* ignored, size_t num_ignored, int64_t max_file_bytes, swv_dtype dtype) {
  const char* texts[num_ignored + 1];
  swv_save_pretrained_options options = SWV_SAVE_PRETRAINED_OPTIONS_INIT;
  swvgo_texts(ignored, num_ignored, texts);
  options.ignored = texts;
  options.num_ignored = num_ignored;
  options.max_file_bytes = max_file_bytes;
  options.dtype = dtype;
  return swv_module_save_pretrained(module, directory, config_json, mesh, &options);
}

static inline swv_status* swvgo_state_load(swv_state* state, const char* path, const swv_mesh* mesh,
                                           swv_bool allow_missing, swv_bool allow_unexpected,
                                           swv_bool cast, swv_bool verify, swv_string** out_json) {
  swv_load_options options = SWV_LOAD_OPTIONS_INIT;
  options.allow_missing = allow_missing;
  options.allow_unexpected = allow_unexpected;
  options.cast = cast;
  options.verify = verify;
  return swv_state_load(state, path, mesh, &options, NULL, out_json);
}

static inline swv_status* swvgo_checkpointer_load(swv_checkpointer* checkpointer, swv_state* state,
                                                  swv_bool allow_missing, swv_bool allow_unexpected,
                                                  swv_bool cast, swv_bool verify,
                                                  swv_string** out_json) {
  swv_load_options options = SWV_LOAD_OPTIONS_INIT;
  options.allow_missing = allow_missing;
  options.allow_unexpected = allow_unexpected;
  options.cast = cast;
  options.verify = verify;
  return swv_checkpointer_load(checkpointer, state, &options, NULL, out_json);
}

static inline swv_status* swvgo_checkpointer_create(const swv_mesh* mesh, const char* directory,
                                                    int64_t keep_last, int64_t timeout_ms,
                                                    swv_bool skip_if_busy,
                                                    swv_bool copy_beside_training,
                                                    swv_checkpointer** out_checkpointer) {
  swv_checkpointer_options options = SWV_CHECKPOINTER_OPTIONS_INIT;
  options.keep_last = keep_last;
  options.timeout_ms = timeout_ms;
  options.skip_if_busy = skip_if_busy;
  options.copy_beside_training = copy_beside_training;
  return swv_checkpointer_create(mesh, directory, &options, out_checkpointer);
}

static inline swv_status* swvgo_mesh_fully_shard_counters(const swv_mesh* mesh, int64_t* out) {
  swv_fully_shard_counters counters = SWV_FULLY_SHARD_COUNTERS_INIT;
  swv_status* status = swv_mesh_fully_shard_counters(mesh, &counters);
  out[0] = counters.gathers;
  out[1] = counters.prefetches;
  out[2] = counters.wrong_prefetches;
  out[3] = counters.reduce_scatters;
  out[4] = counters.gathered_bytes;
  out[5] = counters.peak_gathered_bytes;
  return status;
}

// rank 0: no PowerSGD. hook 0: none; else a handle of Go's (function.go).
typedef struct swvgo_grad_sync {
  int64_t bucket_bytes;
  swv_dtype reduce_dtype;
  uintptr_t hook;
  const char* hook_name;
  int64_t rank;
  int64_t start_iteration;
  double min_compression_rate;
  uint64_t seed;
  swv_bool error_feedback;
  swv_bool warm_start;
} swvgo_grad_sync;
swv_status* swvgo_grad_sync_create(swv_module* module, const swvgo_grad_sync* with,
                                   swv_grad_sync** out_sync);
swv_status* swvgo_module_distributed_data_parallel(swv_module* module, const swv_mesh* mesh,
                                                   const char* mesh_dim, int32_t source,
                                                   const swvgo_grad_sync* with,
                                                   swv_grad_sync** out_sync);

static inline swv_status* swvgo_grad_sync_set_states(swv_grad_sync* sync, const char* names,
                                                     swv_tensor* const* tensors, size_t count) {
  const char* texts[count + 1];
  swvgo_texts(names, count, texts);
  return swv_grad_sync_set_states(sync, texts, (const swv_tensor* const*)tensors, count);
}

static inline swv_status* swvgo_mesh_join_batch(swv_mesh* mesh, const char* names, size_t num_names,
                                                swv_tensor* const* tensors, size_t num_tensors,
                                                swv_tensor** out_tensors, size_t* out_num_tensors,
                                                int64_t* out_ranks) {
  const char* texts[num_names + 1];
  swvgo_texts(names, num_names, texts);
  return swv_mesh_join_batch(mesh, texts, num_names, (const swv_tensor* const*)tensors, num_tensors,
                             out_tensors, out_num_tensors, out_ranks);
}

static inline swv_status* swvgo_loader_create(swv_token_file** files, size_t num_files, int64_t seq,
                                              int64_t batch, uint64_t seed, int64_t epochs,
                                              const swv_mesh* mesh, const swv_layout* layout,
                                              int64_t part, int64_t num_parts, int32_t prefetch,
                                              swv_bool in_order, swv_bool drop_last,
                                              swv_loader** out_loader) {
  swv_loader_options options = SWV_LOADER_OPTIONS_INIT;
  options.seq = seq;
  options.batch = batch;
  options.seed = seed;
  options.epochs = epochs;
  options.mesh = mesh;
  options.layout = layout;
  options.part = part;
  options.num_parts = num_parts;
  options.prefetch = prefetch;
  options.in_order = in_order;
  options.drop_last = drop_last;
  return swv_loader_create((const swv_token_file* const*)files, num_files, &options, out_loader);
}

static inline swv_status* swvgo_plan_add(swv_plan* plan, const char* pattern, const char* pairs,
                                         size_t count) {
  swv_named_placement placements[count + 1];
  swvgo_placements(pairs, count, placements);
  return swv_plan_add(plan, pattern, placements, count);
}

static inline swv_status* swvgo_plan_add_forward(swv_plan* plan, const char* pattern,
                                                 const char* pairs, size_t count) {
  swv_named_placement placements[count + 1];
  swvgo_placements(pairs, count, placements);
  return swv_plan_add_forward(plan, pattern, placements, count);
}

static inline swv_status* swvgo_plan_add_module(swv_plan* plan, const char* pattern,
                                                const char* pairs, size_t count) {
  const char *dims[count + 1], *styles[count + 1];
  for (size_t i = 0; i < count; ++i) {
    dims[i] = pairs;
    pairs += strlen(pairs) + 1;
    styles[i] = pairs;
    pairs += strlen(pairs) + 1;
  }
  return swv_plan_add_module(plan, pattern, dims, styles, count);
}

static inline swv_world_options swvgo_world_options(const char* backend, const char* interface,
                                                    int64_t timeout_ms, swv_device device) {
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  options.backend = backend;
  options.network_interface = interface;
  options.timeout_ms = timeout_ms;
  options.device = device;
  return options;
}

static inline swv_status* swvgo_world_create_local(int32_t num_ranks, const char* backend,
                                                   int64_t timeout_ms, swv_world** out_worlds) {
  const swv_world_options options = swvgo_world_options(backend, NULL, timeout_ms, (swv_device){0});
  return swv_world_create_local(num_ranks, &options, out_worlds);
}

static inline swv_status* swvgo_world_from_environment(const char* backend, const char* interface,
                                                       int64_t timeout_ms, swv_device device,
                                                       swv_world** out_world) {
  const swv_world_options options = swvgo_world_options(backend, interface, timeout_ms, device);
  return swv_world_from_environment(&options, out_world);
}

static inline swv_status* swvgo_world_join(int32_t rank, int32_t world_size, const char* file,
                                           const char* host, int32_t port, int32_t local_rank,
                                           const char* run, const char* backend,
                                           const char* interface, int64_t timeout_ms,
                                           swv_device device, swv_world** out_world) {
  const swv_world_options options = swvgo_world_options(backend, interface, timeout_ms, device);
  swv_rendezvous rendezvous = SWV_RENDEZVOUS_INIT;
  rendezvous.rank = rank;
  rendezvous.world_size = world_size;
  rendezvous.file = file;
  rendezvous.host = host;
  rendezvous.port = port;
  rendezvous.local_rank = local_rank;
  rendezvous.run = run;
  return swv_world_join(&rendezvous, &options, out_world);
}

enum { SWVGO_EMPTY, SWVGO_ZEROS, SWVGO_ONES, SWVGO_FULL, SWVGO_RAND, SWVGO_RANDN };

static inline swv_status* swvgo_tensor_create(int32_t factory, double value, const int64_t* sizes,
                                              size_t ndim, swv_dtype dtype, swv_bool requires_grad,
                                              swv_device device, const swv_mesh* mesh,
                                              const swv_layout* layout, swv_tensor** out_tensor) {
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.dtype = dtype;
  options.requires_grad = requires_grad;
  options.device = device;
  options.mesh = mesh;
  options.layout = layout;
  switch (factory) {
    case SWVGO_ZEROS:
      return swv_tensor_zeros(sizes, ndim, &options, out_tensor);
    case SWVGO_ONES:
      return swv_tensor_ones(sizes, ndim, &options, out_tensor);
    case SWVGO_FULL:
      return swv_tensor_full(sizes, ndim, value, &options, out_tensor);
    case SWVGO_RAND:
      return swv_tensor_rand(sizes, ndim, &options, out_tensor);
    case SWVGO_RANDN:
      return swv_tensor_randn(sizes, ndim, &options, out_tensor);
    default:
      return swv_tensor_empty(sizes, ndim, &options, out_tensor);
  }
}

// Memory of Go's is char here: of a void* cgo checks the whole object that it lies in.
static inline swv_status* swvgo_tensor_copy_to_host(const swv_tensor* tensor, char* data,
                                                    size_t num_bytes) {
  return swv_tensor_copy_to_host(tensor, data, num_bytes);
}

static inline swv_status* swvgo_tensor_copy_from_host(swv_tensor* tensor, const char* data,
                                                      size_t num_bytes) {
  return swv_tensor_copy_from_host(tensor, data, num_bytes);
}

static inline swv_status* swvgo_tensor_from_data(const char* data, size_t num_bytes,
                                                 const int64_t* sizes, size_t ndim, swv_dtype dtype,
                                                 swv_bool requires_grad, swv_device device,
                                                 swv_tensor** out_tensor) {
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.dtype = dtype;
  options.requires_grad = requires_grad;
  options.device = device;
  return swv_tensor_from_data(data, num_bytes, sizes, ndim, &options, out_tensor);
}

static inline void swvgo_tensor_free(uintptr_t tensor) {
  swv_tensor_free((swv_tensor*)tensor);
}

static inline void swvgo_tensors_free(swv_tensor* const* tensors, size_t count) {
  for (size_t i = 0; i < count; ++i) swv_tensor_free(tensors[i]);
}

static inline swv_status* swvgo_tensor_distribute(const swv_tensor* tensor, const swv_mesh* mesh,
                                                  const swv_layout* layout, int32_t source,
                                                  swv_tensor** out_tensor) {
  swv_distribute_options options = SWV_DISTRIBUTE_OPTIONS_INIT;
  options.source = source;
  return swv_tensor_distribute(tensor, mesh, layout, &options, out_tensor);
}

static inline swv_status* swvgo_module_distribute(swv_module* module, const swv_mesh* mesh,
                                                  const swv_plan* plan, int32_t source) {
  swv_distribute_options options = SWV_DISTRIBUTE_OPTIONS_INIT;
  options.source = source;
  return swv_module_distribute(module, mesh, plan, &options);
}

// Go has no const.
static inline swv_status* swvgo_forward_begin(const swv_forward* forward, swv_grad_mode mode,
                                              swv_tensor* const* inputs, size_t count,
                                              swv_tensor** out_inputs, swv_scope** out_scope) {
  return swv_forward_begin(forward, mode, (const swv_tensor* const*)inputs, count, out_inputs,
                           out_scope);
}

static inline swv_status* swvgo_forward_end(swv_scope* scope, swv_tensor* const* outputs,
                                            size_t count, swv_tensor** out_outputs) {
  return swv_forward_end(scope, (const swv_tensor* const*)outputs, count, out_outputs);
}

static inline swv_status* swvgo_tensor_backward(const swv_tensor* tensor,
                                                const swv_tensor* gradient, swv_bool retain_graph,
                                                swv_bool create_graph) {
  swv_backward_options options = SWV_BACKWARD_OPTIONS_INIT;
  options.retain_graph = retain_graph;
  options.create_graph = create_graph;
  return swv_tensor_backward(tensor, gradient, &options);
}

// outputs, inputs, grad_outputs (or none of these) lie in one array.
static inline swv_status* swvgo_gradients(swv_tensor* const* all, size_t num_outputs,
                                          size_t num_inputs, swv_bool has_grad_outputs,
                                          swv_bool retain_graph, swv_bool create_graph,
                                          swv_bool allow_unused, swv_tensor** out_grads) {
  swv_backward_options options = SWV_BACKWARD_OPTIONS_INIT;
  const swv_tensor* const* tensors = (const swv_tensor* const*)all;
  options.retain_graph = retain_graph;
  options.create_graph = create_graph;
  options.allow_unused = allow_unused;
  return swv_gradients(tensors, num_outputs, tensors + num_outputs, num_inputs,
                       has_grad_outputs ? tensors + num_outputs + num_inputs : NULL, &options,
                       out_grads);
}

static inline swv_status* swvgo_optimizer_create_sgd(swv_tensor* const* parameters, size_t count,
                                                     double lr, double momentum, double dampening,
                                                     double weight_decay, swv_bool nesterov,
                                                     swv_optimizer** out_optimizer) {
  swv_sgd_options options = SWV_SGD_OPTIONS_INIT;
  options.lr = lr;
  options.momentum = momentum;
  options.dampening = dampening;
  options.weight_decay = weight_decay;
  options.nesterov = nesterov;
  return swv_optimizer_create_sgd(parameters, count, &options, out_optimizer);
}

static inline swv_status* swvgo_optimizer_create_adamw(swv_tensor* const* parameters, size_t count,
                                                       double lr, double beta1, double beta2,
                                                       double eps, double weight_decay,
                                                       swv_bool amsgrad,
                                                       swv_optimizer** out_optimizer) {
  swv_adamw_options options = SWV_ADAMW_OPTIONS_INIT;
  options.lr = lr;
  options.beta1 = beta1;
  options.beta2 = beta2;
  options.eps = eps;
  options.weight_decay = weight_decay;
  options.amsgrad = amsgrad;
  return swv_optimizer_create_adamw(parameters, count, &options, out_optimizer);
}

static inline swv_status* swvgo_optimizer_create_adam(swv_tensor* const* parameters, size_t count,
                                                      double lr, double beta1, double beta2,
                                                      double eps, double weight_decay,
                                                      swv_bool amsgrad,
                                                      swv_optimizer** out_optimizer) {
  swv_adam_options options = SWV_ADAM_OPTIONS_INIT;
  options.lr = lr;
  options.beta1 = beta1;
  options.beta2 = beta2;
  options.eps = eps;
  options.weight_decay = weight_decay;
  options.amsgrad = amsgrad;
  return swv_optimizer_create_adam(parameters, count, &options, out_optimizer);
}

static inline swv_status* swvgo_optimizer_create_lion(swv_tensor* const* parameters, size_t count,
                                                      double lr, double beta1, double beta2,
                                                      double weight_decay,
                                                      swv_optimizer** out_optimizer) {
  swv_lion_options options = SWV_LION_OPTIONS_INIT;
  options.lr = lr;
  options.beta1 = beta1;
  options.beta2 = beta2;
  options.weight_decay = weight_decay;
  return swv_optimizer_create_lion(parameters, count, &options, out_optimizer);
}

static inline swv_status* swvgo_optimizer_create_adafactor(
    swv_tensor* const* parameters, size_t count, double lr, double beta2_decay, double eps1,
    double eps2, double clip_threshold, double weight_decay, swv_optimizer** out_optimizer) {
  swv_adafactor_options options = SWV_ADAFACTOR_OPTIONS_INIT;
  options.lr = lr;
  options.beta2_decay = beta2_decay;
  options.eps1 = eps1;
  options.eps2 = eps2;
  options.clip_threshold = clip_threshold;
  options.weight_decay = weight_decay;
  return swv_optimizer_create_adafactor(parameters, count, &options, out_optimizer);
}

static inline swv_status* swvgo_optimizer_create_muon(
    swv_tensor* const* parameters, size_t count, double lr, double weight_decay, double momentum,
    swv_bool nesterov, int32_t ns_steps, double ns_a, double ns_b, double ns_c, double eps,
    swv_dtype ns_dtype, swv_muon_lr_scale lr_scale, swv_optimizer** out_optimizer) {
  swv_muon_options options = SWV_MUON_OPTIONS_INIT;
  options.lr = lr;
  options.weight_decay = weight_decay;
  options.momentum = momentum;
  options.nesterov = nesterov;
  options.ns_steps = ns_steps;
  options.ns_a = ns_a;
  options.ns_b = ns_b;
  options.ns_c = ns_c;
  options.eps = eps;
  options.ns_dtype = ns_dtype;
  options.lr_scale = lr_scale;
  return swv_optimizer_create_muon(parameters, count, &options, out_optimizer);
}

static inline swv_status* swvgo_grad_scaler_create(double init_scale, double growth_factor,
                                                   double backoff_factor, int64_t growth_interval,
                                                   swv_grad_scaler** out_scaler) {
  swv_grad_scaler_options options = SWV_GRAD_SCALER_OPTIONS_INIT;
  options.init_scale = init_scale;
  options.growth_factor = growth_factor;
  options.backoff_factor = backoff_factor;
  options.growth_interval = growth_interval;
  return swv_grad_scaler_create(&options, out_scaler);
}

static inline swv_status* swvgo_optimizer_use_zero(swv_optimizer* optimizer, const char* mesh_dim,
                                                   int32_t stage, int64_t bucket_bytes) {
  swv_zero_options options = SWV_ZERO_OPTIONS_INIT;
  options.mesh_dim = mesh_dim;
  options.stage = stage;
  options.bucket_bytes = bucket_bytes;
  return swv_optimizer_use_zero(optimizer, &options);
}

static inline swv_status* swvgo_finish_grad_sync(swv_tensor* const* parameters, size_t count) {
  return swv_finish_grad_sync(parameters, count);
}

static inline swv_status* swvgo_clip_grad_norm(swv_tensor* const* parameters, size_t count,
                                               double max_norm, double norm_type,
                                               swv_bool error_if_nonfinite, double* out_norm) {
  swv_clip_options options = SWV_CLIP_OPTIONS_INIT;
  options.norm_type = norm_type;
  options.error_if_nonfinite = error_if_nonfinite;
  return swv_clip_grad_norm(parameters, count, max_norm, &options, out_norm);
}

static inline swv_status* swvgo_mesh_dispatch_counters(const swv_mesh* mesh, int64_t* out) {
  swv_dispatch_counters counters = SWV_DISPATCH_COUNTERS_INIT;
  swv_status* status = swv_mesh_dispatch_counters(mesh, &counters);
  out[0] = counters.operators;
  out[1] = counters.cache_misses;
  out[2] = counters.implicit_redistributions;
  out[3] = counters.gathered_operators;
  out[4] = counters.remembered_uses;
  out[5] = counters.remembered_bytes;
  out[6] = counters.unsharded_weights;
  return status;
}

static inline swv_status* swvgo_mesh_add_rule(swv_mesh* mesh, const char* name, const char* ways,
                                              size_t num_ways) {
  const char* texts[num_ways + 1];
  swvgo_texts(ways, num_ways, texts);
  return swv_mesh_add_rule(mesh, name, texts, num_ways);
}

// Links as latency, bandwidth, latency, ...; out: flops and bandwidth of the device.
static inline swv_status* swvgo_mesh_cost_model(const swv_mesh* mesh, swv_link_cost* links,
                                                size_t capacity, double* device) {
  swv_device_cost cost = SWV_DEVICE_COST_INIT;
  size_t count = 0;
  swv_status* status = swv_mesh_cost_model(mesh, links, capacity, &count, &cost);
  device[0] = cost.flops;
  device[1] = cost.bandwidth;
  return status;
}

static inline swv_status* swvgo_mesh_set_cost_model(swv_mesh* mesh, const swv_link_cost* links,
                                                    size_t num_links, double flops,
                                                    double bandwidth) {
  swv_device_cost device = SWV_DEVICE_COST_INIT;
  device.flops = flops;
  device.bandwidth = bandwidth;
  return swv_mesh_set_cost_model(mesh, links, num_links, &device);
}

// One collective that waits: memory of Go is in use only during the call.
static inline swv_status* swvgo_collective(swv_comm* comm, swv_collective_kind kind, const char* in,
                                           int64_t in_count, char* out, int64_t out_count,
                                           swv_dtype dtype, const int64_t* in_counts,
                                           const int64_t* out_counts, size_t num_counts,
                                           int32_t reduce_op_or_tag, int32_t peer, swv_bool has_in,
                                           swv_bool has_out, int64_t timeout_ms, const char* tag) {
  swv_buffer from = SWV_BUFFER_INIT, to = SWV_BUFFER_INIT;
  swv_collective collective = SWV_COLLECTIVE_INIT;
  from.data = (void*)in;
  from.count = in_count;
  to.data = out;
  to.count = out_count;
  from.dtype = to.dtype = dtype;
  collective.kind = kind;
  collective.reduce_op = collective.message_tag = reduce_op_or_tag;
  collective.peer = peer;
  collective.in = has_in ? &from : NULL;
  collective.out = has_out ? &to : NULL;
  collective.in_counts = in_counts;
  collective.out_counts = out_counts;
  collective.num_counts = num_counts;
  collective.timeout_ms = timeout_ms;
  collective.tag = tag;
  return swv_comm_start(comm, &collective, NULL);
}

// A state of random numbers as two numbers.
static inline swv_random_state swvgo_random_state(uint64_t seed, uint64_t offset) {
  swv_random_state state = SWV_RANDOM_STATE_INIT;
  state.seed = seed;
  state.offset = offset;
  return state;
}
static inline swv_status* swvgo_mesh_random_state(const swv_mesh* mesh, uint64_t* out) {
  swv_random_state state = SWV_RANDOM_STATE_INIT;
  swv_status* status = swv_mesh_random_state(mesh, &state);
  out[0] = state.seed;
  out[1] = state.offset;
  return status;
}
static inline swv_status* swvgo_mesh_set_random_state(swv_mesh* mesh, uint64_t seed,
                                                      uint64_t offset) {
  const swv_random_state state = swvgo_random_state(seed, offset);
  return swv_mesh_set_random_state(mesh, &state);
}
static inline swv_status* swvgo_mesh_use_random_state(swv_mesh* mesh, uint64_t seed,
                                                      uint64_t offset, swv_scope** out_scope) {
  const swv_random_state state = swvgo_random_state(seed, offset);
  return swv_mesh_use_random_state(mesh, &state, out_scope);
}

static inline swv_status* swvgo_function_context_save(swv_function_context* context,
                                                      swv_tensor* const* tensors, size_t count) {
  return swv_function_context_save(context, (const swv_tensor* const*)tensors, count);
}

static inline swv_status* swvgo_function_context_original(swv_function_context* context,
                                                          swv_grad_mode mode,
                                                          swv_tensor* const* inputs,
                                                          size_t num_inputs, swv_tensor** outputs,
                                                          size_t num_outputs) {
  return swv_function_context_original(context, mode, (const swv_tensor* const*)inputs, num_inputs,
                                       outputs, num_outputs);
}

// Calls a function of the host (function.go). swvgo_forward and the others are Go's.
swv_status* swvgo_function_apply(uintptr_t handle, const char* name, swv_grad_mode mode,
                                 swv_tensor* const* inputs, size_t num_inputs, swv_tensor** outputs,
                                 size_t num_outputs);
// 0: to stderr.
swv_status* swvgo_set_log(uintptr_t handle);
swv_status* swvgo_captured_step_create(const swv_mesh* mesh, swv_tensor* const* parameters,
                                       size_t count, uintptr_t handle,
                                       swv_captured_step** out_step);
swv_status* swvgo_module_memory(swv_module* module, uintptr_t handle, swv_string** out_text,
                                swv_string** out_json);
swv_status* swvgo_module_list_communication(swv_module* module, uintptr_t handle,
                                            swv_string** out_text, swv_string** out_json);
swv_status* swvgo_module_verify(swv_module* module, swv_module* reference, uintptr_t handle,
                                double tolerance, swv_bool forward_only, swv_bool copy_values,
                                swv_bool* out_same, swv_string** out_text, swv_string** out_json);
swv_status* swvgo_plan_auto(const swv_mesh* mesh, uintptr_t handle, const char* tp_mesh_dim,
                            int64_t memory_limit, int64_t optimizer_states, int64_t heads,
                            int64_t max_evaluations, int32_t sequence_dim, swv_plan** out_plan,
                            swv_string** out_text, swv_string** out_json);
swv_status* swvgo_checkpoint(uintptr_t handle, const char* name, swv_grad_mode mode,
                             swv_tensor* const* inputs, size_t num_inputs, swv_tensor** outputs,
                             size_t num_outputs);
swv_status* swvgo_module_patch(swv_module* module, const char* pattern, uintptr_t handle);

#endif  // SHARDWEAVE_GO_SHIM_H_

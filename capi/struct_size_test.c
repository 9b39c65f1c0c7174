/* Every struct with a struct_size, at every size that a caller may give: shorter than it ever was,
 * as it is, and longer, with and without something in what this library does not know. */
#define _DEFAULT_SOURCE
#include "page.h"
#include "testing/check.h"

static swv_world* world;
static swv_mesh* mesh;
static swv_comm* comm;
static swv_tensor* parameter;
static int dropped;
static const char* store_path;

/* ---- One use of each ------------------------------------------------------------------------- */

static swv_status* use_world_options(void* options) {
  swv_world* made = NULL;
  swv_status* status = swv_world_create_local(1, (swv_world_options*)options, &made);
  swv_world_free(made);
  return status;
}
static swv_status* use_collective(void* collective) {
  return swv_comm_start(comm, (swv_collective*)collective, NULL);
}
static swv_status* use_buffer(void* buffer) {
  return swv_comm_broadcast(comm, (swv_buffer*)buffer, 0, NULL, NULL);
}
static swv_status* use_buffer_result(void* buffer) {
  return swv_tensor_buffer(parameter, (swv_buffer*)buffer);
}
/* In an array: the second lies where the first one's size says. */
static swv_status* use_placement(void* placement) {
  const size_t size = *(size_t*)placement;
  /* What is no size is that of one, all of which is there. */
  const size_t have = size >= sizeof(swv_placement) && size <= 4096 ? size : sizeof(swv_placement);
  const size_t stride = (have + 7) / 8 * 8;
  char both[2 * 4200];
  swv_layout* made = NULL;
  swv_status* status;
  memcpy(both, placement, have);
  memcpy(both + stride, placement, have);
  status =
      swv_layout_create((swv_placement*)at_end_of_page(both, stride + have), 2, NULL, 0, &made);
  swv_layout_free(made);
  return status;
}
static swv_status* use_placement_result(void* placement) {
  swv_layout* layout;
  swv_status* status;
  CHECK_OK(swv_layout_parse("[S(0)]", &layout));
  status = swv_layout_placement(layout, 0, (swv_placement*)placement);
  swv_layout_free(layout);
  return status;
}
static swv_status* use_random_state(void* state) {
  return swv_mesh_set_random_state(mesh, (swv_random_state*)state);
}
static swv_status* use_random_state_result(void* state) {
  return swv_mesh_random_state(mesh, (swv_random_state*)state);
}
static swv_status* use_device_cost(void* cost) {
  const swv_link_cost link = {1e-6, 1e9};
  return swv_mesh_set_cost_model(mesh, &link, 1, (swv_device_cost*)cost);
}
static swv_status* use_rendezvous(void* rendezvous) {
  swv_world* made = NULL;
  swv_status* status = swv_world_join((swv_rendezvous*)rendezvous, NULL, &made);
  swv_world_free(made);
  unlink(((swv_rendezvous*)rendezvous)->file);
  return status;
}

static swv_status* start(void* self, const swv_backend_call* call, uint64_t* out_ticket) {
  (void)self, (void)call, (void)out_ticket;
  return NULL;
}
static void abort_group(void* self, swv_code code, const char* reason) {
  (void)self, (void)code, (void)reason;
}
static void drop(void* self) {
  ++*(int*)self;
}
static swv_backend good_backend(void) {
  swv_backend backend = SWV_BACKEND_INIT;
  backend.name = "test";
  backend.self = &dropped;
  backend.start = start;
  backend.abort = abort_group;
  backend.drop = drop;
  return backend;
}
static swv_status* use_backend(void* backend) {
  swv_group group = SWV_GROUP_INIT;
  swv_world* made = NULL;
  swv_status* status = swv_world_create_with_backend((swv_backend*)backend, &group, NULL, &made);
  swv_world_free(made);
  return status;
}
static swv_bool is_done(void* self, uint64_t ticket) {
  (void)self, (void)ticket;
  return 1;
}
static swv_status* wait_for(void* self, uint64_t ticket, int64_t timeout_ms) {
  (void)self, (void)ticket, (void)timeout_ms;
  return NULL;
}
static swv_status* connect_device(void* self, const swv_group* group, swv_comm* bootstrap,
                                  int64_t timeout_ms, swv_backend* out_backend) {
  (void)self, (void)group, (void)bootstrap, (void)timeout_ms;
  out_backend->name = "test";
  out_backend->device.type = SWV_DEVICE_CUDA;
  out_backend->start = start;
  out_backend->done = is_done;
  out_backend->wait = wait_for;
  out_backend->abort = abort_group;
  return NULL;
}
static swv_status* use_device_backend(void* device_backend) {
  swv_rendezvous alone = SWV_RENDEZVOUS_INIT;
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  swv_world* made = NULL;
  swv_status* status;
  alone.file = store_path;
  alone.local_rank = 0;
  options.device_backend = (swv_device_backend*)device_backend;
  status = swv_world_join(&alone, &options, &made);
  swv_world_free(made);
  unlink(store_path);
  return status;
}
static swv_status* use_group(void* group) {
  const swv_backend backend = good_backend();
  swv_world* made = NULL;
  swv_status* status = swv_world_create_with_backend(&backend, (swv_group*)group, NULL, &made);
  swv_world_free(made);
  return status;
}

static swv_status* use_tensor_options(void* options) {
  swv_tensor* made = NULL;
  swv_status* status = swv_tensor_zeros(NULL, 0, (swv_tensor_options*)options, &made);
  swv_tensor_free(made);
  return status;
}
static swv_status* use_distribute_options(void* options) {
  swv_layout* layout;
  swv_tensor* made = NULL;
  swv_status* status;
  CHECK_OK(swv_layout_parse("[R]", &layout));
  status = swv_tensor_distribute(parameter, mesh, layout, (swv_distribute_options*)options, &made);
  swv_tensor_free(made);
  swv_layout_free(layout);
  return status;
}
static swv_status* use_backward_options(void* options) {
  const swv_value twice[] = {swv_value_tensor(parameter), swv_value_int(2)};
  swv_tensor* const product = call_op("aten::mul", SWV_MODE_GRAD, twice, 2);
  swv_status* status = swv_tensor_backward(product, NULL, (swv_backward_options*)options);
  swv_tensor_free(product);
  return status;
}
static swv_status* forward(void* user_data, const swv_function_call* call) {
  (void)user_data;
  return swv_tensor_detach(call->inputs[0], &call->outputs[0]);
}
static swv_status* use_segment(void* segment) {
  swv_tensor* made = NULL;
  swv_status* status = swv_checkpoint((swv_segment*)segment, SWV_MODE_NO_GRAD,
                                      (const swv_tensor* const*)&parameter, 1, &made, 1);
  swv_tensor_free(made);
  return status;
}
static swv_status* use_patch(void* patch) {
  swv_module* module = NULL;
  swv_status* status = swv_module_create_by_kind("ReLU", NULL, &module);
  if (status == NULL) status = swv_module_patch(module, "", (swv_patch*)patch);
  swv_module_free(module);
  return status;
}
static swv_status* use_function(void* function) {
  swv_tensor* made = NULL;
  swv_status* status = swv_function_apply((swv_function*)function, SWV_MODE_NO_GRAD,
                                          (const swv_tensor* const*)&parameter, 1, &made, 1);
  swv_tensor_free(made);
  return status;
}
static swv_status* use_clip_options(void* options) {
  return swv_clip_grad_norm(&parameter, 1, 1.0, (swv_clip_options*)options, NULL);
}
static swv_status* use_sgd_options(void* options) {
  swv_optimizer* made = NULL;
  swv_status* status = swv_optimizer_create_sgd(&parameter, 1, (swv_sgd_options*)options, &made);
  swv_optimizer_free(made);
  return status;
}
static swv_status* use_adamw_options(void* options) {
  swv_optimizer* made = NULL;
  swv_status* status =
      swv_optimizer_create_adamw(&parameter, 1, (swv_adamw_options*)options, &made);
  swv_optimizer_free(made);
  return status;
}
static swv_status* use_adam_options(void* options) {
  swv_optimizer* made = NULL;
  swv_status* status = swv_optimizer_create_adam(&parameter, 1, (swv_adam_options*)options, &made);
  swv_optimizer_free(made);
  return status;
}
static swv_status* use_lion_options(void* options) {
  swv_optimizer* made = NULL;
  swv_status* status = swv_optimizer_create_lion(&parameter, 1, (swv_lion_options*)options, &made);
  swv_optimizer_free(made);
  return status;
}
static swv_status* use_adafactor_options(void* options) {
  swv_optimizer* made = NULL;
  swv_status* status =
      swv_optimizer_create_adafactor(&parameter, 1, (swv_adafactor_options*)options, &made);
  swv_optimizer_free(made);
  return status;
}
static swv_status* use_muon_options(void* options) {
  swv_optimizer* made = NULL; /* of no parameters: it takes no numbers */
  swv_status* status = swv_optimizer_create_muon(NULL, 0, (swv_muon_options*)options, &made);
  swv_optimizer_free(made);
  return status;
}
static swv_status* use_schedule(void* schedule) {
  double factor = 0;
  return swv_schedule_factor((swv_schedule*)schedule, 1, &factor);
}
static swv_status* use_grad_scaler_options(void* options) {
  swv_grad_scaler* made = NULL;
  swv_status* status = swv_grad_scaler_create((swv_grad_scaler_options*)options, &made);
  swv_grad_scaler_free(made);
  return status;
}
static swv_status* use_zero_options(void* options) {
  swv_tensor_options sharded = SWV_TENSOR_OPTIONS_INIT;
  const int64_t size = 3;
  swv_tensor* its = NULL;
  swv_optimizer* made = NULL;
  sharded.mesh = mesh;
  sharded.requires_grad = 1;
  CHECK_OK(swv_tensor_ones(&size, 1, &sharded, &its));
  CHECK_OK(swv_optimizer_create_adam(&its, 1, NULL, &made));
  swv_status* status = swv_optimizer_use_zero(made, (swv_zero_options*)options);
  swv_optimizer_free(made);
  swv_tensor_free(its);
  return status;
}
static swv_module* linear(swv_tensor** out_x) {
  const int64_t sizes[] = {2, 3};
  swv_module* made = NULL;
  CHECK_OK(swv_module_create_by_kind(
      "Linear", "{\"in_features\": 3, \"out_features\": 2, \"bias\": false}", &made));
  if (out_x != NULL) CHECK_OK(swv_tensor_ones(sizes, 2, NULL, out_x));
  return made;
}
static swv_status* use_materialize_options(void* options) {
  swv_module* module = linear(NULL);
  swv_status* status = swv_module_materialize(module, (swv_materialize_options*)options);
  swv_module_free(module);
  return status;
}
static swv_status* use_fully_shard_options(void* options) {
  swv_module* module = linear(NULL);
  swv_status* status =
      swv_module_fully_shard(module, mesh, (swv_fully_shard_options*)options, NULL, NULL);
  swv_module_free(module);
  return status;
}
static swv_status* use_fully_shard_counters(void* counters) {
  return swv_mesh_fully_shard_counters(mesh, (swv_fully_shard_counters*)counters);
}
static swv_status* use_grad_sync_options(void* options) {
  swv_module* module = linear(NULL);
  swv_grad_sync* made = NULL;
  swv_status* status = swv_grad_sync_create(module, (swv_grad_sync_options*)options, &made);
  swv_grad_sync_free(made);
  swv_module_free(module);
  return status;
}
static swv_status* nothing(void* user_data, const swv_gradient_bucket* bucket) {
  (void)user_data;
  (void)bucket;
  return NULL;
}
static swv_status* use_gradient_hook(void* hook) {
  swv_grad_sync_options options = SWV_GRAD_SYNC_OPTIONS_INIT;
  options.hook = (const swv_gradient_hook*)hook;
  return use_grad_sync_options(&options);
}
static swv_status* use_power_sgd_options(void* power_sgd) {
  swv_grad_sync_options options = SWV_GRAD_SYNC_OPTIONS_INIT;
  options.power_sgd = (const swv_power_sgd_options*)power_sgd;
  return use_grad_sync_options(&options);
}
static swv_status* use_data_parallel_options(void* options) {
  swv_module* module = linear(NULL);
  swv_grad_sync* made = NULL;
  swv_status* status = swv_module_distributed_data_parallel(
      module, mesh, (swv_data_parallel_options*)options, &made);
  swv_grad_sync_free(made);
  swv_module_free(module);
  return status;
}
static const char* token_path; /* a file of the four bytes "text" */
static swv_status* use_loader_options(void* options) {
  swv_token_file* file = NULL;
  swv_loader* made = NULL;
  swv_status* status;
  CHECK_OK(swv_token_file_open(token_path, SWV_DTYPE_U8, &file));
  status = swv_loader_create((const swv_token_file* const*)&file, 1, (swv_loader_options*)options,
                             &made);
  swv_loader_free(made);
  swv_token_file_free(file);
  return status;
}
static const char* checkpoints_path; /* a directory that is not there */
static swv_status* use_checkpointer_options(void* options) {
  swv_checkpointer* made = NULL;
  swv_status* status =
      swv_checkpointer_create(mesh, checkpoints_path, (swv_checkpointer_options*)options, &made);
  swv_checkpointer_free(made);
  return status;
}
/* There is no checkpoint, which is found out after the options were read. */
static swv_status* use_load_options(void* options) {
  swv_state* state = NULL;
  swv_status* status;
  CHECK_OK(swv_state_create(&state));
  status = swv_state_load(state, checkpoints_path, mesh, (swv_load_options*)options, NULL, NULL);
  swv_state_free(state);
  if (swv_status_code(status) != SWV_CODE_NOT_FOUND) return status;
  swv_status_free(status);
  return NULL;
}
/* Nor are there files of a model. */
static swv_status* use_load_pretrained_options(void* options) {
  swv_module* module = NULL;
  swv_status* status;
  CHECK_OK(swv_module_create(&module));
  status = swv_module_load_pretrained(module, checkpoints_path, mesh,
                                      (swv_load_pretrained_options*)options, NULL);
  swv_module_free(module);
  if (swv_status_code(status) != SWV_CODE_NOT_FOUND) return status;
  swv_status_free(status);
  return NULL;
}
/* The directory is there, which is found out last. */
static swv_status* use_save_pretrained_options(void* options) {
  static const char kConfig[] =
      "{\"model_type\": \"gpt2\", \"vocab_size\": 3, \"n_positions\": 2, \"n_embd\": 2, "
      "\"n_layer\": 1, \"n_head\": 1}";
  swv_module* module = NULL;
  swv_status* status;
  CHECK_OK(swv_module_create_by_kind("gpt2", kConfig, &module));
  status = swv_module_save_pretrained(module, "/tmp", kConfig, mesh,
                                      (swv_save_pretrained_options*)options);
  swv_module_free(module);
  if (swv_status_code(status) != SWV_CODE_ALREADY_EXISTS) return status;
  swv_status_free(status);
  return NULL;
}
struct run {
  swv_module *module, *reference;
  swv_tensor* x;
};
static swv_status* run_one(swv_module* module, swv_tensor* tensor, swv_tensor** out_result) {
  const swv_value x = swv_value_tensor(tensor);
  swv_value y = SWV_NONE;
  swv_status* status = swv_module_call(module, "forward", SWV_MODE_GRAD, &x, 1, &y, 1, NULL);
  if (status == NULL) *out_result = y.as.tensor;
  return status;
}
static swv_status* run_module(void* user_data, swv_tensor** out_result) {
  const struct run* run = (const struct run*)user_data;
  return run_one(run->module, run->x, out_result);
}
static swv_status* run_reference(void* user_data, swv_tensor** out_result) {
  const struct run* run = (const struct run*)user_data;
  return run_one(run->reference, run->x, out_result);
}
static swv_status* use_verify_options(void* options) {
  swv_bool same = 0;
  swv_status* status;
  struct run run;
  run.module = linear(&run.x);
  run.reference = linear(NULL);
  CHECK_OK(swv_module_distribute(run.module, mesh, NULL, NULL));
  status = swv_module_verify(run.module, run_module, run.reference, run_reference, &run,
                             (swv_verify_options*)options, &same, NULL, NULL);
  swv_tensor_free(run.x);
  swv_module_free(run.reference);
  swv_module_free(run.module);
  return status;
}
static swv_status* make_linear(void* user_data, swv_module** out_module) {
  (void)user_data;
  *out_module = linear(NULL);
  return NULL;
}
static swv_status* loss_of_linear(void* user_data, swv_module* module, swv_mesh* on,
                                  swv_tensor** out_loss) {
  const int64_t sizes[] = {2, 3};
  swv_tensor_options plain = SWV_TENSOR_OPTIONS_INIT;
  swv_tensor *x, *y = NULL;
  swv_op* sum;
  swv_value argument, result = SWV_NONE;
  swv_status* status;
  (void)user_data;
  plain.mesh = on;
  CHECK_OK(swv_tensor_ones(sizes, 2, &plain, &x));
  status = run_one(module, x, &y);
  swv_tensor_free(x);
  if (status != NULL) return status;
  argument = swv_value_tensor(y);
  CHECK_OK(swv_op_find("aten::sum", &sum));
  status = swv_op_call(sum, SWV_MODE_GRAD, &argument, 1, &result, 1, NULL);
  if (status == NULL) *out_loss = result.as.tensor;
  swv_op_free(sum);
  swv_tensor_free(y);
  return status;
}
static swv_status* use_plan_auto_options(void* options) {
  swv_plan* plan = NULL;
  swv_status* status = swv_plan_auto(mesh, make_linear, loss_of_linear, NULL,
                                     (swv_plan_auto_options*)options, &plan, NULL, NULL);
  swv_plan_free(plan);
  return status;
}
static swv_status* use_dispatch_counters(void* counters) {
  return swv_mesh_dispatch_counters(mesh, (swv_dispatch_counters*)counters);
}

/* ---- Every size ------------------------------------------------------------------------------ */

enum { kMore = 24 };

/* The struct with another struct_size, and `fill` in the bytes behind what we know. */
static void* resized(const void* from, size_t known, size_t size, int fill) {
  char bytes[4200];
  memset(bytes, fill, sizeof(bytes));
  memcpy(bytes, from, known);
  memcpy(bytes, &size, sizeof(size));
  return at_end_of_page(bytes, size < sizeof(size) ? known : size);
}

/* `first`: the size that it had at first, which callers of old have. `out`: it is written, not read.
 * `drops`: it comes with a drop, which counts. */
static void every_size(const char* name, swv_status* (*use)(void*), const void* from, size_t first,
                       size_t known, int out, int drops) {
  const size_t wrong[] = {0, 7, first - 1, 4097, (size_t)1 << 40};
  size_t i;
  char text[64];
  printf("%s\n", name);
  for (i = 0; i < sizeof(wrong) / sizeof(wrong[0]); ++i) {
    void* const given = resized(from, known, wrong[i] < 4096 ? wrong[i] : known, 0);
    memcpy(given, &wrong[i], sizeof(wrong[i]));
    snprintf(text, sizeof(text), "has struct_size %zu; wanted ", wrong[i]);
    dropped = 0;
    CHECK_FAILS(use(given), SWV_CODE_INVALID_ARGUMENT, text);
    /* A drop that may not be there is not called; another struct's is. */
    CHECK(drops != 1 || dropped == 0);
  }
  for (i = 0; i <= kMore; ++i) {
    void* given = resized(from, known, known + i, 0);
    dropped = 0;
    CHECK_OK(use(given));
    CHECK(drops == 0 || dropped == 1);
    if (i == 0) continue;
    given = resized(from, known, known + i, 0xa5);
    dropped = 0;
    if (out) {
      size_t b;
      CHECK_OK(use(given));
      for (b = known; b < known + i; ++b) CHECK(((unsigned char*)given)[b] == 0xa5);
      CHECK(*(size_t*)given == known + i);
    } else if (known + i <= (known + 7) / 8 * 8) {
      CHECK_OK(use(given)); /* padding */
    } else {
      CHECK_FAILS(use(given), SWV_CODE_UNIMPLEMENTED, "does not know");
    }
    CHECK(drops == 0 || dropped == 1);
  }
}

int main(void) {
  const swv_mesh_dim dim = {"x", 1};
  swv_tensor_options with_grad = SWV_TENSOR_OPTIONS_INIT;
  swv_world_options world_options = SWV_WORLD_OPTIONS_INIT;
  swv_collective collective = SWV_COLLECTIVE_INIT;
  swv_placement placement = SWV_PLACEMENT_INIT;
  swv_random_state state = SWV_RANDOM_STATE_INIT;
  swv_device_cost cost = SWV_DEVICE_COST_INIT;
  swv_segment segment = SWV_SEGMENT_INIT;
  float number = 1;
  const swv_buffer buffer = cpu_buffer(&number, 1, SWV_DTYPE_F32);
  swv_rendezvous rendezvous = SWV_RENDEZVOUS_INIT;
  swv_group group = SWV_GROUP_INIT;
  swv_distribute_options distribute = SWV_DISTRIBUTE_OPTIONS_INIT;
  swv_backward_options backward = SWV_BACKWARD_OPTIONS_INIT;
  swv_clip_options clip = SWV_CLIP_OPTIONS_INIT;
  swv_sgd_options sgd = SWV_SGD_OPTIONS_INIT;
  swv_adamw_options adamw = SWV_ADAMW_OPTIONS_INIT;
  swv_adam_options adam = SWV_ADAM_OPTIONS_INIT;
  swv_lion_options lion = SWV_LION_OPTIONS_INIT;
  swv_adafactor_options adafactor = SWV_ADAFACTOR_OPTIONS_INIT;
  swv_muon_options muon = SWV_MUON_OPTIONS_INIT;
  swv_schedule schedule = SWV_SCHEDULE_INIT;
  swv_grad_scaler_options grad_scaler = SWV_GRAD_SCALER_OPTIONS_INIT;
  swv_zero_options zero = SWV_ZERO_OPTIONS_INIT;
  swv_dispatch_counters counters = SWV_DISPATCH_COUNTERS_INIT;
  swv_function function = SWV_FUNCTION_INIT;
  swv_patch patch = SWV_PATCH_INIT;
  swv_materialize_options materialize = SWV_MATERIALIZE_OPTIONS_INIT;
  swv_fully_shard_options fully_shard = SWV_FULLY_SHARD_OPTIONS_INIT;
  swv_fully_shard_counters fully_shard_counts = SWV_FULLY_SHARD_COUNTERS_INIT;
  swv_grad_sync_options grad_sync = SWV_GRAD_SYNC_OPTIONS_INIT;
  swv_gradient_hook gradient_hook = SWV_GRADIENT_HOOK_INIT;
  swv_power_sgd_options power_sgd = SWV_POWER_SGD_OPTIONS_INIT;
  swv_data_parallel_options data_parallel = SWV_DATA_PARALLEL_OPTIONS_INIT;
  swv_verify_options verify = SWV_VERIFY_OPTIONS_INIT;
  swv_plan_auto_options plan_auto = SWV_PLAN_AUTO_OPTIONS_INIT;
  swv_loader_options loader = SWV_LOADER_OPTIONS_INIT;
  swv_checkpointer_options checkpointer = SWV_CHECKPOINTER_OPTIONS_INIT;
  swv_load_options load = SWV_LOAD_OPTIONS_INIT;
  swv_load_pretrained_options load_pretrained = SWV_LOAD_PRETRAINED_OPTIONS_INIT;
  swv_save_pretrained_options save_pretrained = SWV_SAVE_PRETRAINED_OPTIONS_INIT;
  FILE* tokens;
  char tokens_file[4200];
  const swv_backend backend = good_backend();
  swv_device_backend device_backend = SWV_DEVICE_BACKEND_INIT;
  const char* const folder = getenv("TEST_TMPDIR");
  char file[4096];
  snprintf(file, sizeof(file), "%s/struct_size.%ld", folder == NULL ? "/tmp" : folder,
           (long)getpid());
  snprintf(tokens_file, sizeof(tokens_file), "%s.tokens", file);
  token_path = tokens_file;
  checkpoints_path = file;
  tokens = fopen(tokens_file, "w");
  CHECK(tokens != NULL && fputs("text", tokens) >= 0 && fclose(tokens) == 0);
  rendezvous.file = file;
  rendezvous.local_rank = 0;
  function.user_data = &dropped;
  function.forward = forward;
  function.drop = drop;
  segment.user_data = &dropped;
  segment.forward = forward;
  segment.drop = drop;
  gradient_hook.user_data = &dropped;
  gradient_hook.finish = nothing;
  gradient_hook.drop = drop;
  collective.kind = SWV_COLLECTIVE_BARRIER;
  with_grad.requires_grad = 1;
  CHECK_OK(swv_world_create_local(1, NULL, &world));
  CHECK_OK(swv_world_comm(world, &comm));
  CHECK_OK(swv_mesh_create(world, &dim, 1, &mesh));
  CHECK_OK(swv_tensor_ones(NULL, 0, &with_grad, &parameter));
  CHECK_OK(use_backward_options(NULL)); /* there is a gradient to clip */

#define EVERY_SIZE(type, value, out, drops) \
  GROWN_SINCE(type, (value).struct_size, value, out, drops)
#define GROWN_SINCE(type, first, value, out, drops) \
  every_size(#type, use_##type, &(value), first, (value).struct_size, out, drops)
  GROWN_SINCE(world_options, SWV_SIZE_TO(swv_world_options, timeout_ms), world_options, 0, 0);
  EVERY_SIZE(collective, collective, 0, 0);
  EVERY_SIZE(buffer, buffer, 0, 0);
  EVERY_SIZE(buffer_result, buffer, 1, 0);
  EVERY_SIZE(placement, placement, 0, 0);
  EVERY_SIZE(placement_result, placement, 1, 0);
  EVERY_SIZE(random_state, state, 0, 0);
  EVERY_SIZE(random_state_result, state, 1, 0);
  EVERY_SIZE(device_cost, cost, 0, 0);
  EVERY_SIZE(segment, segment, 0, 1);
  patch.user_data = &dropped;
  patch.forward = forward;
  patch.drop = drop;
  EVERY_SIZE(patch, patch, 0, 1);
  GROWN_SINCE(backend, SWV_SIZE_TO(swv_backend, drop), backend, 0, 1);
  store_path = file;
  device_backend.self = &dropped;
  device_backend.connect = connect_device;
  device_backend.drop = drop;
  EVERY_SIZE(device_backend, device_backend, 0, 1);
  EVERY_SIZE(group, group, 0, 2);
  EVERY_SIZE(tensor_options, with_grad, 0, 0);
  EVERY_SIZE(distribute_options, distribute, 0, 0);
  EVERY_SIZE(backward_options, backward, 0, 0);
  EVERY_SIZE(function, function, 0, 1);
  EVERY_SIZE(clip_options, clip, 0, 0);
  EVERY_SIZE(sgd_options, sgd, 0, 0);
  EVERY_SIZE(adamw_options, adamw, 0, 0);
  EVERY_SIZE(adam_options, adam, 0, 0);
  EVERY_SIZE(lion_options, lion, 0, 0);
  EVERY_SIZE(adafactor_options, adafactor, 0, 0);
  EVERY_SIZE(muon_options, muon, 0, 0);
  EVERY_SIZE(schedule, schedule, 0, 0);
  EVERY_SIZE(grad_scaler_options, grad_scaler, 0, 0);
  EVERY_SIZE(zero_options, zero, 0, 0);
  EVERY_SIZE(dispatch_counters, counters, 1, 0);
  EVERY_SIZE(rendezvous, rendezvous, 0, 0);
  EVERY_SIZE(materialize_options, materialize, 0, 0);
  EVERY_SIZE(fully_shard_options, fully_shard, 0, 0);
  EVERY_SIZE(fully_shard_counters, fully_shard_counts, 1, 0);
  EVERY_SIZE(grad_sync_options, grad_sync, 0, 0);
  EVERY_SIZE(gradient_hook, gradient_hook, 0, 1);
  EVERY_SIZE(power_sgd_options, power_sgd, 0, 0);
  EVERY_SIZE(data_parallel_options, data_parallel, 0, 0);
  EVERY_SIZE(verify_options, verify, 0, 0);
  EVERY_SIZE(plan_auto_options, plan_auto, 0, 0);
  EVERY_SIZE(loader_options, loader, 0, 0);
  GROWN_SINCE(checkpointer_options, SWV_SIZE_TO(swv_checkpointer_options, skip_if_busy),
              checkpointer, 0, 0);
  EVERY_SIZE(load_options, load, 0, 0);
  EVERY_SIZE(load_pretrained_options, load_pretrained, 0, 0);
  EVERY_SIZE(save_pretrained_options, save_pretrained, 0, 0);

  unlink(tokens_file);
  swv_tensor_free(parameter);
  swv_mesh_free(mesh);
  swv_comm_free(comm);
  swv_world_free(world);
  return 0;
}

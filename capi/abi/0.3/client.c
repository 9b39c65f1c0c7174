/* A program of 0.3, which uses every struct of its header: it goes on running with every later
 * version of the same soname. Its structs end where its memory ends: what a later version knows more
 * of must not be read or written there. */
#define _DEFAULT_SOURCE
#include "shardweave.h"

#include <math.h>
#include <stdio.h>

#include "page.h"

#define TRY(call)                             \
  do {                                        \
    if ((status = (call)) != NULL) goto done; \
  } while (0)
#define WANT(condition)                                               \
  do {                                                                \
    if (!(condition)) {                                               \
      status = swv_status_new(SWV_CODE_INTERNAL, "not: " #condition); \
      goto done;                                                      \
    }                                                                 \
  } while (0)

enum { kRanks = 2 };

/* ---- Groups ---------------------------------------------------------------------------------- */

static swv_buffer numbers(float* data, int64_t count) {
  swv_buffer buffer = SWV_BUFFER_INIT;
  buffer.data = data;
  buffer.count = count;
  buffer.dtype = SWV_DTYPE_F32;
  return buffer;
}

static swv_status* groups(swv_world* world) {
  float in[] = {1, 2}, out[] = {0, 0};
  const swv_buffer from = numbers(in, 2), to = numbers(out, 2);
  swv_collective collective = SWV_COLLECTIVE_INIT;
  swv_call_options call = SWV_CALL_OPTIONS_INIT;
  swv_comm_counter counters[SWV_COLLECTIVE_RECV + 1];
  swv_comm* comm = NULL;
  swv_status* status;
  size_t count = 0;
  call.timeout_ms = 60000;
  call.tag = "client";
  TRY(swv_world_comm(world, &comm));
  TRY(swv_comm_all_reduce(comm, AT_END_OF_PAGE(swv_buffer, from), AT_END_OF_PAGE(swv_buffer, to),
                          SWV_REDUCE_SUM, WHOLE_AT_END_OF_PAGE(swv_call_options, call), NULL));
  WANT(out[0] == kRanks && out[1] == 2 * kRanks);
  collective.kind = SWV_COLLECTIVE_ALL_REDUCE;
  collective.reduce_op = SWV_REDUCE_MAX;
  collective.in = &from;
  collective.out = &to;
  collective.timeout_ms = 60000;
  collective.tag = "again";
  TRY(swv_comm_start(comm, AT_END_OF_PAGE(swv_collective, collective), NULL));
  WANT(out[0] == 1 && out[1] == 2);
  memset(counters, 0, sizeof(counters));
  {
    swv_comm_counter* const at_end = WHOLE_AT_END_OF_PAGE(swv_comm_counter, counters);
    TRY(swv_comm_counters(comm, at_end, SWV_COLLECTIVE_RECV + 1, &count));
    WANT(count > SWV_COLLECTIVE_RECV && at_end[SWV_COLLECTIVE_ALL_REDUCE].calls >= 1);
    WANT(at_end[SWV_COLLECTIVE_ALL_REDUCE].bytes >= 8);
  }
done:
  swv_comm_free(comm);
  return status;
}

/* ---- Tensors, layouts and gradients ---------------------------------------------------------- */

static int dropped = 0;

static swv_status* forward(void* user_data, const swv_function_call* call) {
  (void)user_data;
  if (call->struct_size < SWV_SIZE_TO(swv_function_call, num_outputs))
    return swv_status_new(SWV_CODE_INTERNAL, "the call is shorter than it was");
  if (call->num_inputs != 1 || call->num_outputs != 1)
    return swv_status_new(SWV_CODE_INTERNAL, "not one and one");
  return swv_tensor_detach(call->inputs[0], &call->outputs[0]);
}
static swv_status* backward(void* user_data, const swv_function_call* call) {
  (void)user_data;
  return swv_tensor_share(call->inputs[0], &call->outputs[0]);
}
static void drop(void* user_data) {
  ++*(int*)user_data;
}
static swv_status* again(void* user_data, const swv_function_call* call) {
  (void)user_data;
  if (call->num_inputs != 1 || call->num_outputs != 1)
    return swv_status_new(SWV_CODE_INTERNAL, "not one and one");
  return swv_tensor_share(call->inputs[0], &call->outputs[0]);
}

static swv_status* tensors(swv_world* world) {
  const swv_mesh_dim dim = {"x", kRanks};
  swv_placement shard = SWV_PLACEMENT_INIT, got = SWV_PLACEMENT_INIT;
  const swv_named_placement named = {"x", "S(0)"};
  const int64_t sizes[] = {3, 4};
  const float data[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  swv_distribute_options distribute = SWV_DISTRIBUTE_OPTIONS_INIT;
  swv_backward_options backward_options = SWV_BACKWARD_OPTIONS_INIT;
  swv_clip_options clip = SWV_CLIP_OPTIONS_INIT;
  swv_sgd_options sgd = SWV_SGD_OPTIONS_INIT;
  swv_adamw_options adamw = SWV_ADAMW_OPTIONS_INIT;
  swv_dispatch_counters counters = SWV_DISPATCH_COUNTERS_INIT;
  swv_function function = SWV_FUNCTION_INIT;
  swv_random_state state = SWV_RANDOM_STATE_INIT;
  swv_segment segment = SWV_SEGMENT_INIT;
  swv_link_cost link = {1e-6, 2e9};
  swv_device_cost cost = SWV_DEVICE_COST_INIT;
  swv_device device = {-1, -1};
  swv_buffer buffer = SWV_BUFFER_INIT;
  swv_mesh* mesh = NULL;
  swv_scope* scope = NULL;
  swv_layout *layout = NULL, *same = NULL;
  swv_tensor *x = NULL, *plain = NULL, *cut = NULL, *y = NULL, *z = NULL;
  swv_op *mul = NULL, *sum = NULL;
  swv_value product = SWV_NONE, loss = SWV_NONE, number = SWV_NONE;
  swv_optimizer *first = NULL, *second = NULL;
  swv_status* status;
  swv_bool equal = 0;
  double norm = 0;
  int user_data = 0, segment_data = 0;
  size_t num_links = 0;
  shard.kind = SWV_PLACEMENT_SHARD;
  state.seed = 7;
  state.offset = 3;

  TRY(swv_mesh_create(world, WHOLE_AT_END_OF_PAGE(swv_mesh_dim, dim), 1, &mesh));
  TRY(swv_layout_create(AT_END_OF_PAGE(swv_placement, shard), 1, NULL, 0, &layout));
  TRY(swv_layout_create_named(mesh, WHOLE_AT_END_OF_PAGE(swv_named_placement, named), 1, &same));
  TRY(swv_layout_equal(layout, same, &equal));
  WANT(equal);
  {
    swv_placement* const at_end = AT_END_OF_PAGE(swv_placement, got);
    TRY(swv_layout_placement(layout, 0, at_end));
    WANT(at_end->kind == SWV_PLACEMENT_SHARD && at_end->dim == 0);
  }
  {
    swv_random_state* const at_end = AT_END_OF_PAGE(swv_random_state, state);
    TRY(swv_mesh_set_random_state(mesh, at_end));
    at_end->seed = at_end->offset = 0;
    TRY(swv_mesh_random_state(mesh, at_end));
    WANT(at_end->seed == 7 && at_end->offset == 3);
    TRY(swv_mesh_use_random_state(mesh, at_end, &scope));
    swv_scope_free(scope);
  }
  cost.flops = 3e10;
  TRY(swv_mesh_set_cost_model(mesh, WHOLE_AT_END_OF_PAGE(swv_link_cost, link), 1,
                              AT_END_OF_PAGE(swv_device_cost, cost)));
  {
    swv_device_cost* const at_end = AT_END_OF_PAGE(swv_device_cost, cost);
    at_end->flops = 0;
    link.latency = 0;
    TRY(swv_mesh_cost_model(mesh, &link, 1, &num_links, at_end));
    WANT(num_links == 1 && link.latency == 1e-6 && at_end->flops == 3e10);
    WANT(at_end->struct_size == cost.struct_size);
  }
  options.dtype = SWV_DTYPE_F32;
  options.requires_grad = 1;
  options.mesh = mesh;
  options.layout = layout;
  TRY(swv_tensor_ones(sizes, 2, AT_END_OF_PAGE(swv_tensor_options, options), &x));
  TRY(swv_tensor_from_data(data, sizeof(data), sizes, 2, NULL, &plain));
  {
    swv_device* const at_end = WHOLE_AT_END_OF_PAGE(swv_device, device);
    TRY(swv_tensor_device(plain, at_end));
    WANT(at_end->type == SWV_DEVICE_CPU && at_end->index == 0);
  }
  {
    swv_buffer* const at_end = AT_END_OF_PAGE(swv_buffer, buffer);
    TRY(swv_tensor_buffer(plain, at_end));
    WANT(at_end->count == 12 && at_end->dtype == SWV_DTYPE_F32 &&
         at_end->device.type == SWV_DEVICE_CPU);
  }
  distribute.source = 1;
  TRY(swv_tensor_distribute(plain, mesh, layout, AT_END_OF_PAGE(swv_distribute_options, distribute),
                            &cut));

  function.name = "same";
  function.user_data = &user_data;
  function.forward = forward;
  function.backward = backward;
  function.drop = drop;
  TRY(swv_function_apply(AT_END_OF_PAGE(swv_function, function), SWV_MODE_GRAD,
                         (const swv_tensor* const*)&x, 1, &y, 1));
  segment.name = "again";
  segment.user_data = &segment_data;
  segment.forward = again;
  segment.drop = drop;
  TRY(swv_checkpoint(AT_END_OF_PAGE(swv_segment, segment), SWV_MODE_GRAD,
                     (const swv_tensor* const*)&y, 1, &z, 1));
  TRY(swv_op_find("aten::mul.Tensor", &mul));
  TRY(swv_op_find("aten::sum", &sum));
  {
    const swv_value factors[] = {swv_value_tensor(z), swv_value_tensor(cut)};
    TRY(swv_op_call(mul, SWV_MODE_GRAD, (const swv_value*)at_end_of_page(factors, sizeof(factors)),
                    2, &product, 1, NULL));
  }
  TRY(swv_op_call(sum, SWV_MODE_GRAD, &product, 1, &loss, 1, NULL));
  backward_options.retain_graph = 1;
  TRY(swv_tensor_backward(loss.as.tensor, NULL,
                          AT_END_OF_PAGE(swv_backward_options, backward_options)));
  {
    swv_value* const at_end = WHOLE_AT_END_OF_PAGE(swv_value, number);
    TRY(swv_tensor_item(loss.as.tensor, at_end));
    WANT(at_end->kind == SWV_VALUE_FLOAT && at_end->as.number == 12);
  }
  clip.norm_type = 1;
  clip.error_if_nonfinite = 1;
  TRY(swv_clip_grad_norm(&x, 1, 100.0, AT_END_OF_PAGE(swv_clip_options, clip), &norm));
  WANT(fabs(norm - 12) < 1e-9);
  sgd.lr = 0.5;
  sgd.momentum = 0.5;
  sgd.nesterov = 1;
  TRY(swv_optimizer_create_sgd(&x, 1, AT_END_OF_PAGE(swv_sgd_options, sgd), &first));
  TRY(swv_optimizer_step(first)); /* nesterov: 1 - 0.5 * (1 + 0.5 * 1) */
  swv_value_clear(&product);
  swv_value_clear(&loss);
  TRY(swv_op_call(sum, SWV_MODE_NO_GRAD, (const swv_value[]){swv_value_tensor(x)}, 1, &loss, 1,
                  NULL));
  TRY(swv_tensor_item(loss.as.tensor, &number));
  WANT(fabs(number.as.number - 12 * 0.25) < 1e-6);
  adamw.lr = 0.25;
  adamw.weight_decay = 0;
  adamw.amsgrad = 1;
  TRY(swv_optimizer_create_adamw(&x, 1, AT_END_OF_PAGE(swv_adamw_options, adamw), &second));
  TRY(swv_optimizer_step(second)); /* the first step is of size lr */
  swv_value_clear(&loss);
  TRY(swv_op_call(sum, SWV_MODE_NO_GRAD, (const swv_value[]){swv_value_tensor(x)}, 1, &loss, 1,
                  NULL));
  TRY(swv_tensor_item(loss.as.tensor, &number));
  WANT(fabs(number.as.number) < 1e-5);
  {
    swv_dispatch_counters* const at_end = AT_END_OF_PAGE(swv_dispatch_counters, counters);
    TRY(swv_mesh_dispatch_counters(mesh, at_end));
    WANT(at_end->operators > 0 && at_end->struct_size == counters.struct_size);
  }
done:
  swv_optimizer_free(second);
  swv_optimizer_free(first);
  swv_value_clear(&loss);
  swv_value_clear(&product);
  swv_op_free(sum);
  swv_op_free(mul);
  swv_tensor_free(z);
  swv_tensor_free(y);
  swv_tensor_free(cut);
  swv_tensor_free(plain);
  swv_tensor_free(x);
  swv_layout_free(same);
  swv_layout_free(layout);
  swv_mesh_free(mesh);
  if (status == NULL && (user_data != 1 || segment_data != 1))
    status = swv_status_new(SWV_CODE_INTERNAL, "no drop");
  return status;
}

/* ---- A backend ------------------------------------------------------------------------------- */

static swv_status* start(void* self, const swv_backend_call* call, uint64_t* out_ticket) {
  if (call->struct_size < SWV_SIZE_TO(swv_backend_call, tag))
    return swv_status_new(SWV_CODE_INTERNAL, "the call is shorter than it was");
  if (strcmp(call->tag, "client") == 0) ++*(int*)self;
  if (call->in->data != NULL && call->out->data != NULL)
    memmove(call->out->data, call->in->data,
            (size_t)call->in->count * swv_dtype_size(call->in->dtype));
  *out_ticket = SWV_TICKET_DONE;
  return NULL;
}
static swv_status* subgroup(void* self, const swv_group* group, const int32_t* members,
                            size_t num_members, const char* key, int64_t timeout_ms,
                            void** out_self) {
  (void)members, (void)num_members, (void)key, (void)timeout_ms;
  if (group->struct_size < SWV_SIZE_TO(swv_group, world_ranks) || group->num_ranks != 1)
    return swv_status_new(SWV_CODE_INTERNAL, "the group is shorter than it was");
  *out_self = self;
  return NULL;
}
static void abort_group(void* self, swv_code code, const char* reason) {
  (void)self, (void)code, (void)reason;
}
static void drop_group(void* self) {
  (void)self;
  ++dropped;
}

static swv_status* backends(void) {
  float in = 3, out = 0;
  const swv_buffer from = numbers(&in, 1), to = numbers(&out, 1);
  const int32_t ranks[] = {0};
  swv_backend backend = SWV_BACKEND_INIT;
  swv_group group = SWV_GROUP_INIT;
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  swv_call_options call = SWV_CALL_OPTIONS_INIT;
  swv_world* world = NULL;
  swv_comm *comm = NULL, *part = NULL;
  swv_status* status;
  int calls = 0;
  backend.name = "client";
  backend.implements = (1 << (SWV_COLLECTIVE_RECV + 1)) - 1;
  backend.self = &calls;
  backend.start = start;
  backend.subgroup = subgroup;
  backend.abort = abort_group;
  backend.drop = drop_group;
  group.name = "all";
  group.world_ranks = ranks;
  options.timeout_ms = 60000;
  call.tag = "client";
  TRY(swv_world_create_with_backend(AT_END_OF_PAGE(swv_backend, backend),
                                    AT_END_OF_PAGE(swv_group, group),
                                    AT_END_OF_PAGE(swv_world_options, options), &world));
  TRY(swv_world_comm(world, &comm));
  TRY(swv_comm_subgroup(comm, ranks, 1, "part", &part));
  TRY(swv_comm_all_reduce(part, &from, &to, SWV_REDUCE_MAX, &call, NULL));
  WANT(out == 3 && calls == 1);
done:
  swv_comm_free(part);
  swv_comm_free(comm);
  swv_world_free(world);
  if (status == NULL && dropped != 2) status = swv_status_new(SWV_CODE_INTERNAL, "not dropped");
  return status;
}

/* ---- Alone, by a file ------------------------------------------------------------------------ */

static swv_status* rendezvous(void) {
  const char* const folder = getenv("TEST_TMPDIR");
  char file[4096];
  swv_rendezvous with = SWV_RENDEZVOUS_INIT;
  swv_world* world = NULL;
  swv_status* status;
  int32_t rank = -1, local_rank = -1;
  snprintf(file, sizeof(file), "%s/client.%ld", folder == NULL ? "/tmp" : folder, (long)getpid());
  with.file = file;
  with.local_rank = 0;
  with.run = "client";
  TRY(swv_world_join(AT_END_OF_PAGE(swv_rendezvous, with), NULL, &world));
  TRY(swv_world_rank(world, &rank));
  TRY(swv_world_local_rank(world, &local_rank));
  WANT(rank == 0 && local_rank == 0);
done:
  swv_world_free(world);
  unlink(file);
  return status;
}

static swv_status* rank_main(void* user_data, swv_world* world) {
  swv_status* status;
  int32_t rank = 0;
  TRY(swv_world_rank(world, &rank));
  TRY(groups(world));
  TRY(tensors(world));
  ((int*)user_data)[rank] = 1;
done:
  return status;
}

int main(void) {
  int ran[kRanks] = {0, 0};
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  swv_status* status;
  options.timeout_ms = 60000;
  if ((status = swv_run_ranks(kRanks, rank_main, ran,
                              AT_END_OF_PAGE(swv_world_options, options))) == NULL &&
      (status = backends()) == NULL) {
    status = rendezvous();
  }
  if (status != NULL) fprintf(stderr, "%s\n", swv_status_message(status));
  return status != NULL || !ran[0] || !ran[1];
}

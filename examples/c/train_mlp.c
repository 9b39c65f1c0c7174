/* Trains a small network in plain C: data parallel and tensor parallel, on 4 rank threads or on
 * processes.
 *
 *   cc train_mlp.c $(pkg-config --cflags --libs shardweave) -o train_mlp
 *   ./train_mlp                                        # a thread per rank
 *   for r in 0 1 2 3; do ./train_mlp --rank=$r --ranks=4 --store=/tmp/train_mlp.store & done; wait
 *
 * The network is relu(x W1' + b1) W2'. W1 and b1 are cut by rows along "tp", W2 by columns: the
 * product of the two needs one sum over the ranks, which nobody has to write. The batch is cut
 * along "dp". */
#include <shardweave.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kBatch = 32, kIn = 16, kHidden = 64, kOut = 4, kSteps = 60 };

static const char kPlan[] =
    "{\"parameter\": {"
    "  \"up.*\":        {\"tp\": \"S(0)\"},"
    "  \"down.weight\": {\"tp\": \"S(1)\"}"
    "}}";

/* The operators that the network uses. They belong to no rank. */
typedef struct Ops {
  swv_op *linear, *relu, *loss;
} Ops;

/* Ends the function with the first error. */
#define TRY(call)                             \
  do {                                        \
    if ((status = (call)) != NULL) goto done; \
  } while (0)

static swv_status* call(const swv_op* op, const swv_value* arguments, size_t num_arguments,
                        swv_tensor** out) {
  swv_value result;
  swv_status* status = swv_op_call(op, SWV_MODE_GRAD, arguments, num_arguments, &result, 1, NULL);
  if (status == NULL) *out = result.as.tensor;
  return status;
}

/* A parameter, random but the same everywhere: drawn on the mesh by element index, then
 * gathered. */
static swv_status* add_parameter(swv_module* module, const char* fqn, const int64_t* sizes,
                                 size_t ndim, const swv_mesh* mesh, swv_tensor** out_parameter) {
  swv_tensor *drawn = NULL, *scaled = NULL, *whole = NULL;
  swv_op* mul = NULL;
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  swv_value arguments[2];
  swv_status* status;
  options.mesh = mesh;
  TRY(swv_tensor_randn(sizes, ndim, &options, &drawn));
  TRY(swv_op_find("aten::mul.Scalar", &mul));
  arguments[0] = swv_value_tensor(drawn);
  arguments[1] = swv_value_float(0.2);
  TRY(call(mul, arguments, 2, &scaled));
  TRY(swv_tensor_full_tensor(scaled, SWV_MODE_NO_GRAD, &whole));
  TRY(swv_module_add_parameter(module, fqn, whole));
  *out_parameter = whole;
  whole = NULL;
done:
  swv_op_free(mul);
  swv_tensor_free(whole);
  swv_tensor_free(scaled);
  swv_tensor_free(drawn);
  return status;
}

static swv_status* train(void* user_data, swv_world* world) {
  const Ops* ops = (const Ops*)user_data;
  const int64_t up_sizes[] = {kHidden, kIn}, bias_sizes[] = {kHidden},
                down_sizes[] = {kOut, kHidden};
  const int64_t x_sizes[] = {kBatch, kIn}, y_sizes[] = {kBatch, kOut};
  const swv_named_placement batch[] = {{"dp", "S(0)"}};
  swv_mesh* mesh = NULL;
  swv_layout* rows = NULL;
  swv_module* module = NULL;
  swv_plan* plan = NULL;
  swv_optimizer* optimizer = NULL;
  swv_tensor *up = NULL, *bias = NULL, *down = NULL, *x = NULL, *y = NULL;
  swv_tensor *hidden = NULL, *active = NULL, *out = NULL, *loss = NULL;
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  swv_adamw_options adamw = SWV_ADAMW_OPTIONS_INIT;
  swv_status* status;
  int32_t rank, size;
  int step;

  TRY(swv_world_rank(world, &rank));
  TRY(swv_world_size(world, &size));
  {
    const swv_mesh_dim dims[] = {{"dp", size % 2 == 0 ? size / 2 : size},
                                 {"tp", size % 2 == 0 ? 2 : 1}};
    TRY(swv_mesh_create(world, dims, 2, &mesh));
  }
  TRY(swv_mesh_seed(mesh, 1));
  TRY(swv_module_create(&module));
  TRY(add_parameter(module, "up.weight", up_sizes, 2, mesh, &up));
  TRY(add_parameter(module, "up.bias", bias_sizes, 1, mesh, &bias));
  TRY(add_parameter(module, "down.weight", down_sizes, 2, mesh, &down));
  TRY(swv_plan_from_json(kPlan, &plan));
  TRY(swv_module_distribute(module, mesh, plan, NULL)); /* in place: our handles see it */
  {
    swv_tensor* const parameters[] = {up, bias, down};
    adamw.lr = 1e-2;
    TRY(swv_optimizer_create_adamw(parameters, 3, &adamw, &optimizer));
  }
  TRY(swv_layout_create_named(mesh, batch, 1, &rows));
  options.mesh = mesh;
  options.layout = rows;
  TRY(swv_tensor_randn(x_sizes, 2, &options, &x));
  TRY(swv_tensor_randn(y_sizes, 2, &options, &y));

  for (step = 0; step < kSteps; ++step) {
    swv_value arguments[3], number;
    arguments[0] = swv_value_tensor(x);
    arguments[1] = swv_value_tensor(up);
    arguments[2] = swv_value_tensor(bias);
    TRY(call(ops->linear, arguments, 3, &hidden));
    arguments[0] = swv_value_tensor(hidden);
    TRY(call(ops->relu, arguments, 1, &active));
    arguments[0] = swv_value_tensor(active);
    arguments[1] = swv_value_tensor(down);
    TRY(call(ops->linear, arguments, 2, &out));
    arguments[0] = swv_value_tensor(out);
    arguments[1] = swv_value_tensor(y);
    TRY(call(ops->loss, arguments, 2, &loss));
    TRY(swv_tensor_backward(loss, NULL, NULL));
    TRY(swv_module_finish_grad_sync(module));
    TRY(swv_optimizer_step(optimizer));
    TRY(swv_optimizer_zero_grad(optimizer));
    TRY(swv_tensor_item(loss, &number)); /* on every rank: it sums over them */
    if (rank == 0 && (step % 10 == 0 || step == kSteps - 1)) {
      printf("step %2d  loss %.9g\n", step, number.as.number);
    }
    swv_tensor_free(loss);
    swv_tensor_free(out);
    swv_tensor_free(active);
    swv_tensor_free(hidden);
    loss = out = active = hidden = NULL;
  }

done:
  swv_tensor_free(loss);
  swv_tensor_free(out);
  swv_tensor_free(active);
  swv_tensor_free(hidden);
  swv_tensor_free(y);
  swv_tensor_free(x);
  swv_tensor_free(down);
  swv_tensor_free(bias);
  swv_tensor_free(up);
  swv_layout_free(rows);
  swv_optimizer_free(optimizer);
  swv_plan_free(plan);
  swv_module_free(module);
  swv_mesh_free(mesh);
  return status;
}

/* Joins the processes that --rank, --ranks and --store tell of. */
static swv_status* train_as_process(int rank, int ranks, const char* store, Ops* ops) {
  swv_rendezvous rendezvous = SWV_RENDEZVOUS_INIT;
  swv_world* world = NULL;
  swv_status* status;
  rendezvous.rank = rank;
  rendezvous.world_size = ranks;
  rendezvous.file = store;
  TRY(swv_world_join(&rendezvous, NULL, &world));
  TRY(train(ops, world));
done:
  swv_world_free(world);
  return status;
}

int main(int argc, char** argv) {
  Ops ops = {NULL, NULL, NULL};
  int rank = -1, ranks = 4, i;
  const char* store = NULL;
  swv_status* status;
  for (i = 1; i < argc; ++i) {
    if (sscanf(argv[i], "--rank=%d", &rank) == 1 || sscanf(argv[i], "--ranks=%d", &ranks) == 1)
      continue;
    if (strncmp(argv[i], "--store=", 8) == 0) {
      store = argv[i] + 8;
      continue;
    }
    fprintf(stderr, "usage: %s [--ranks=N] [--rank=R --store=FILE]\n", argv[0]);
    return 2;
  }
  TRY(swv_set_num_threads(1));
  TRY(swv_op_find("aten::linear", &ops.linear));
  TRY(swv_op_find("aten::relu", &ops.relu));
  TRY(swv_op_find("aten::mse_loss", &ops.loss));
  if (rank < 0) {
    TRY(swv_run_ranks(ranks, train, &ops, NULL));
  } else {
    TRY(train_as_process(rank, ranks, store, &ops));
  }
done:
  swv_op_free(ops.loss);
  swv_op_free(ops.relu);
  swv_op_free(ops.linear);
  if (status != NULL) fprintf(stderr, "train_mlp: %s\n", swv_status_message(status));
  i = status != NULL;
  swv_status_free(status);
  return i;
}

/* The model of README.md in plain C: prints the loss of every step.
 *
 *   same_model_c PLAN DP TP */
#include <shardweave.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  kVocabulary = 13,
  kDim = 24,
  kHeads = 12,
  kLayers = 2,
  kLength = 6,
  kBatch = 5,
  kSteps = 20,
  kMostParameters = 2 + 16 * kLayers + 3,
  kMostTensors = 64 /* of a step */
};

typedef struct Settings {
  char plan[4096];
  int64_t dp, tp;
} Settings;

/* One rank's model. */
typedef struct Model {
  swv_module* module;
  swv_tensor* parameters[kMostParameters];
  char names[kMostParameters][32];
  size_t num_parameters;
  swv_tensor* made[kMostTensors]; /* in this step, with the batch */
  size_t num_made;
} Model;

/* Ends the function with the first error. */
#define TRY(call)                             \
  do {                                        \
    if ((status = (call)) != NULL) goto done; \
  } while (0)

static swv_status* add(Model* model, const char* layer, const char* name, int64_t out, int64_t in) {
  const size_t index = model->num_parameters;
  const int64_t sizes[] = {out, in};
  const size_t ndim = in > 0 ? 2 : 1;
  const size_t count = (size_t)(in > 0 ? out * in : out);
  const int is_norm = strstr(layer, "norm") != NULL && strcmp(name, "weight") == 0;
  float* data = malloc(count * sizeof(float));
  swv_status* status;
  size_t i;
  for (i = 0; i < count; ++i) {
    const uint32_t mixed = (uint32_t)i * 2654435761u + (uint32_t)index * 2246822519u + 374761393u;
    const uint32_t bits = (mixed ^ (mixed >> 15)) * 2246822519u;
    data[i] = (float)(bits >> 8) / 33554432.0f - 0.25f + (is_norm ? 1.0f : 0.0f);
  }
  snprintf(model->names[index], sizeof(model->names[index]), "%s.%s", layer, name);
  status = swv_tensor_from_data(data, count * sizeof(float), sizes, ndim, NULL,
                                &model->parameters[index]);
  free(data);
  if (status != NULL) return status;
  ++model->num_parameters;
  return swv_module_add_parameter(model->module, model->names[index], model->parameters[index]);
}

static swv_status* add_layer(Model* model, const char* layer, int64_t out, int64_t in) {
  swv_status* status = add(model, layer, "weight", out, in);
  return status != NULL ? status : add(model, layer, "bias", out, 0);
}

static swv_status* make_model(Model* model) {
  static const char* const kSquare[] = {"q", "k", "v", "o"};
  swv_status* status;
  int block, i;
  char name[32];
  TRY(swv_module_create(&model->module));
  TRY(add(model, "embedding", "weight", kVocabulary, kDim));
  TRY(add(model, "positions", "weight", kLength, kDim));
  for (block = 0; block < kLayers; ++block) {
    snprintf(name, sizeof(name), "blocks.%d.norm1", block);
    TRY(add_layer(model, name, kDim, 0));
    for (i = 0; i < 4; ++i) {
      snprintf(name, sizeof(name), "blocks.%d.%s", block, kSquare[i]);
      TRY(add_layer(model, name, kDim, kDim));
    }
    snprintf(name, sizeof(name), "blocks.%d.norm2", block);
    TRY(add_layer(model, name, kDim, 0));
    snprintf(name, sizeof(name), "blocks.%d.up", block);
    TRY(add_layer(model, name, 4 * kDim, kDim));
    snprintf(name, sizeof(name), "blocks.%d.down", block);
    TRY(add_layer(model, name, kDim, 4 * kDim));
  }
  TRY(add_layer(model, "norm", kDim, 0));
  TRY(add(model, "head", "weight", kVocabulary, kDim));
done:
  return status;
}

static swv_value parameter(const Model* model, const char* layer, const char* name) {
  char fqn[64];
  size_t i;
  snprintf(fqn, sizeof(fqn), "%s.%s", layer, name);
  for (i = 0; i < model->num_parameters; ++i) {
    if (strcmp(model->names[i], fqn) == 0) return swv_value_tensor(model->parameters[i]);
  }
  return swv_value_none();
}

/* The result belongs to the model, until the step is over. */
static swv_status* call(Model* model, const char* name, const swv_value* arguments, size_t count,
                        swv_value* out) {
  swv_op* op = NULL;
  swv_status* status;
  TRY(swv_op_find(name, &op));
  TRY(swv_op_call(op, SWV_MODE_GRAD, arguments, count, out, 1, NULL));
  model->made[model->num_made++] = out->as.tensor;
done:
  swv_op_free(op);
  return status;
}

static swv_status* linear(Model* model, const char* layer, swv_value x, swv_value* out) {
  const swv_value arguments[] = {x, parameter(model, layer, "weight"),
                                 parameter(model, layer, "bias")};
  return call(model, "aten::linear", arguments, 3, out);
}

static swv_status* norm(Model* model, const char* layer, swv_value x, swv_value* out) {
  const int64_t shape[] = {kDim};
  const swv_value arguments[] = {x, swv_value_ints(shape, 1), parameter(model, layer, "weight"),
                                 parameter(model, layer, "bias")};
  return call(model, "aten::layer_norm", arguments, 4, out);
}

static swv_status* sum(Model* model, swv_value a, swv_value b, swv_value* out) {
  const swv_value arguments[] = {a, b};
  return call(model, "aten::add.Tensor", arguments, 2, out);
}

static swv_status* transposed(Model* model, swv_value x, swv_value* out) {
  const swv_value arguments[] = {x, swv_value_int(1), swv_value_int(2)};
  return call(model, "aten::transpose.int", arguments, 3, out);
}

static swv_status* shaped(Model* model, const char* op, swv_value x, const int64_t* sizes,
                          size_t ndim, swv_value* out) {
  const swv_value arguments[] = {x, swv_value_ints(sizes, ndim)};
  return call(model, op, arguments, 2, out);
}

/* x, through a block. */
static swv_status* run_block(Model* model, int block, swv_value* x) {
  static const char* const kProjections[] = {"q", "k", "v"};
  const int64_t heads[] = {kBatch, kLength, kHeads, kDim / kHeads};
  const int64_t rows[] = {kBatch, kLength, kDim};
  swv_value n, t, attention[6];
  swv_status* status;
  char name[32];
  int i;
  snprintf(name, sizeof(name), "blocks.%d.norm1", block);
  TRY(norm(model, name, *x, &n));
  for (i = 0; i < 3; ++i) {
    snprintf(name, sizeof(name), "blocks.%d.%s", block, kProjections[i]);
    TRY(linear(model, name, n, &t));
    TRY(shaped(model, "aten::view", t, heads, 4, &t));
    TRY(transposed(model, t, &attention[i]));
  }
  attention[3] = swv_value_none();
  attention[4] = swv_value_float(0);
  attention[5] = swv_value_bool(1);
  TRY(call(model, "aten::scaled_dot_product_attention", attention, 6, &t));
  TRY(transposed(model, t, &t));
  TRY(shaped(model, "aten::reshape", t, rows, 3, &t));
  snprintf(name, sizeof(name), "blocks.%d.o", block);
  TRY(linear(model, name, t, &t));
  TRY(sum(model, *x, t, x));
  snprintf(name, sizeof(name), "blocks.%d.norm2", block);
  TRY(norm(model, name, *x, &t));
  snprintf(name, sizeof(name), "blocks.%d.up", block);
  TRY(linear(model, name, t, &t));
  TRY(call(model, "aten::gelu", &t, 1, &t));
  snprintf(name, sizeof(name), "blocks.%d.down", block);
  TRY(linear(model, name, t, &t));
  TRY(sum(model, *x, t, x));
done:
  return status;
}

static swv_status* loss_of(Model* model, swv_tensor* tokens, swv_tensor* targets, swv_value* out) {
  const int64_t rows[] = {-1, kVocabulary}, flat[] = {-1};
  const swv_value lookup[] = {parameter(model, "embedding", "weight"), swv_value_tensor(tokens)};
  swv_value x, both[2];
  swv_status* status;
  int block;
  TRY(call(model, "aten::embedding", lookup, 2, &x));
  TRY(sum(model, x, parameter(model, "positions", "weight"), &x));
  for (block = 0; block < kLayers; ++block) TRY(run_block(model, block, &x));
  TRY(norm(model, "norm", x, &x));
  TRY(linear(model, "head", x, &x));
  TRY(shaped(model, "aten::view", x, rows, 2, &both[0]));
  TRY(shaped(model, "aten::view", swv_value_tensor(targets), flat, 1, &both[1]));
  TRY(call(model, "aten::cross_entropy_loss", both, 2, out));
done:
  return status;
}

static void forget(Model* model) {
  while (model->num_made > 0) swv_tensor_free(model->made[--model->num_made]);
}

static swv_status* on_mesh(const int64_t* data, const swv_mesh* mesh, const swv_layout* rows,
                           swv_tensor** out) {
  const int64_t sizes[] = {kBatch, kLength};
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  swv_distribute_options distribute = SWV_DISTRIBUTE_OPTIONS_INIT;
  swv_tensor* plain = NULL;
  swv_status* status;
  options.dtype = SWV_DTYPE_I64;
  distribute.source = -1;
  TRY(swv_tensor_from_data(data, kBatch * kLength * sizeof(int64_t), sizes, 2, &options, &plain));
  TRY(swv_tensor_distribute(plain, mesh, rows, &distribute, out));
done:
  swv_tensor_free(plain);
  return status;
}

static swv_status* train(void* user_data, swv_world* world) {
  const Settings* settings = (const Settings*)user_data;
  const swv_mesh_dim dims[] = {{"dp", settings->dp}, {"tp", settings->tp}};
  const swv_named_placement batch_rows[] = {{"dp", "S(0)"}};
  const int first = settings->dp == 1; /* then there is no dp */
  swv_distribute_options distribute = SWV_DISTRIBUTE_OPTIONS_INIT;
  swv_adamw_options adamw = SWV_ADAMW_OPTIONS_INIT;
  swv_mesh* mesh = NULL;
  swv_plan* plan = NULL;
  swv_layout* rows = NULL;
  swv_optimizer* optimizer = NULL;
  swv_tensor *tokens = NULL, *targets = NULL;
  int64_t in[kBatch * kLength], out[kBatch * kLength];
  swv_status* status;
  Model model;
  int32_t rank;
  int step, i;
  memset(&model, 0, sizeof(model));
  for (i = 0; i < kBatch * kLength; ++i) {
    const int64_t b = i / kLength, t = i % kLength;
    in[i] = (5 * b + 3 * t + b * t) % kVocabulary;
    out[i] = (5 * b + 3 * (t + 1) + b * (t + 1)) % kVocabulary;
  }
  TRY(swv_world_rank(world, &rank));
  TRY(swv_mesh_create(world, dims + first, (size_t)(2 - first), &mesh));
  TRY(make_model(&model));
  TRY(swv_plan_from_json(settings->plan, &plan));
  distribute.source = -1;
  TRY(swv_module_distribute(model.module, mesh, plan, &distribute));
  adamw.lr = 1e-2;
  TRY(swv_optimizer_create_adamw(model.parameters, model.num_parameters, &adamw, &optimizer));
  TRY(swv_layout_create_named(mesh, batch_rows, (size_t)(1 - first), &rows));
  TRY(on_mesh(in, mesh, rows, &tokens));
  TRY(on_mesh(out, mesh, rows, &targets));
  for (step = 0; step < kSteps; ++step) {
    swv_value loss, number;
    TRY(loss_of(&model, tokens, targets, &loss));
    TRY(swv_tensor_backward(loss.as.tensor, NULL, NULL));
    TRY(swv_module_finish_grad_sync(model.module));
    TRY(swv_optimizer_step(optimizer));
    TRY(swv_optimizer_zero_grad(optimizer));
    TRY(swv_tensor_item(loss.as.tensor, &number)); /* on every rank: it may sum over them */
    if (rank == 0) printf("%.9g\n", number.as.number);
    forget(&model);
  }
done:
  forget(&model);
  while (model.num_parameters > 0) swv_tensor_free(model.parameters[--model.num_parameters]);
  swv_tensor_free(targets);
  swv_tensor_free(tokens);
  swv_layout_free(rows);
  swv_optimizer_free(optimizer);
  swv_plan_free(plan);
  swv_module_free(model.module);
  swv_mesh_free(mesh);
  return status;
}

int main(int argc, char** argv) {
  Settings settings;
  swv_status* status;
  FILE* file;
  int failed;
  size_t size;
  if (argc != 4 || (file = fopen(argv[1], "rb")) == NULL) {
    fprintf(stderr, "usage: %s PLAN DP TP\n", argv[0]);
    return 2;
  }
  size = fread(settings.plan, 1, sizeof(settings.plan) - 1, file);
  fclose(file);
  settings.plan[size] = '\0';
  settings.dp = atoi(argv[2]);
  settings.tp = atoi(argv[3]);
  TRY(swv_set_num_threads(1));
  TRY(swv_run_ranks((int32_t)(settings.dp * settings.tp), train, &settings, NULL));
done:
  if (status != NULL) fprintf(stderr, "same_model: %s\n", swv_status_message(status));
  failed = status != NULL;
  swv_status_free(status);
  return failed;
}

/* A program of 0.1: what it uses of the interface goes on working with every later minor
 * version. */
#include "shardweave.h"

#include <stdio.h>

static swv_status* rank_main(void* user_data, swv_world* world) {
  const swv_mesh_dim dim = {"x", 2};
  const int64_t sizes[] = {3, 4};
  swv_mesh* mesh = NULL;
  swv_layout* layout = NULL;
  swv_tensor* x = NULL;
  swv_op* op = NULL;
  swv_value product = SWV_NONE, loss = SWV_NONE, number = SWV_NONE;
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  swv_status* status;
  int32_t rank = 0;
  if ((status = swv_world_rank(world, &rank)) != NULL) return status;
  ((int*)user_data)[rank] = 1;
  if ((status = swv_mesh_create(world, &dim, 1, &mesh)) != NULL) goto done;
  if ((status = swv_layout_parse("[S(0)]", &layout)) != NULL) goto done;
  options.mesh = mesh;
  options.layout = layout;
  options.requires_grad = 1;
  if ((status = swv_tensor_ones(sizes, 2, &options, &x)) != NULL) goto done;
  if ((status = swv_op_find("aten::mul.Tensor", &op)) != NULL) goto done;
  {
    const swv_value factors[] = {swv_value_tensor(x), swv_value_tensor(x)};
    if ((status = swv_op_call(op, SWV_GRAD, factors, 2, &product, 1, NULL)) != NULL) goto done;
  }
  swv_op_free(op);
  op = NULL;
  if ((status = swv_op_find("aten::sum", &op)) != NULL) goto done;
  if ((status = swv_op_call(op, SWV_GRAD, &product, 1, &loss, 1, NULL)) != NULL) goto done;
  if ((status = swv_tensor_backward(loss.as.tensor, NULL, NULL)) != NULL) goto done;
  if ((status = swv_tensor_item(loss.as.tensor, &number)) != NULL) goto done;
  if (number.as.number != 12) status = swv_status_new(SWV_INTERNAL, "the sum is not 12");
done:
  swv_value_clear(&loss);
  swv_value_clear(&product);
  swv_op_free(op);
  swv_tensor_free(x);
  swv_layout_free(layout);
  swv_mesh_free(mesh);
  return status;
}

int main(void) {
  int ran[2] = {0, 0};
  swv_status* status = swv_run_ranks(2, rank_main, ran, NULL);
  if (status != NULL) fprintf(stderr, "%s\n", swv_status_message(status));
  if (status != NULL || !ran[0] || !ran[1]) return 1;
  return 0;
}

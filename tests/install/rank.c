/* A rank that a launcher starts: says who it is, and what all ranks' numbers add up to. */
#include <shardweave.h>
#include <stdio.h>

int main(void) {
  swv_world* world = NULL;
  swv_comm* comm = NULL;
  int32_t rank = -1, size = 0;
  int64_t sum = 0;
  swv_buffer buffer = SWV_BUFFER_INIT;
  swv_status* status = swv_world_from_environment(NULL, &world);
  if (status == NULL) status = swv_world_rank(world, &rank);
  if (status == NULL) status = swv_world_size(world, &size);
  if (status == NULL) status = swv_world_comm(world, &comm);
  sum = rank + 1;
  buffer.data = &sum;
  buffer.count = 1;
  buffer.dtype = SWV_DTYPE_I64;
  if (status == NULL)
    status = swv_comm_all_reduce(comm, &buffer, &buffer, SWV_REDUCE_SUM, NULL, NULL);
  if (status == NULL) {
    printf("rank %d of %d: %lld\n", (int)rank, (int)size, (long long)sum);
  } else {
    fprintf(stderr, "%s\n", swv_status_message(status));
  }
  swv_status_free(status);
  swv_comm_free(comm);
  swv_world_free(world);
  return status != NULL;
}

/* The C interface from plain C: what works, on 4 rank threads. Bad input is in
 * bad_input_test.cc. */
#define _DEFAULT_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <unistd.h>

#include "testing/check.h"

#define RANKS 4

static swv_mesh* make_mesh(swv_world* world) {
  const swv_mesh_dim dims[] = {{"dp", 2}, {"tp", 2}};
  swv_mesh* mesh;
  CHECK_OK(swv_mesh_create(world, dims, 2, &mesh));
  return mesh;
}

static swv_layout* make_layout(const char* text) {
  swv_layout* layout;
  CHECK_OK(swv_layout_parse(text, &layout));
  return layout;
}

static swv_tensor* make_randn(const swv_mesh* mesh, const char* placements, int64_t rows,
                              int64_t columns, swv_bool requires_grad) {
  const int64_t sizes[] = {rows, columns};
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  swv_layout* layout = make_layout(placements);
  swv_tensor* tensor;
  options.mesh = mesh;
  options.layout = layout;
  options.requires_grad = requires_grad;
  CHECK_OK(swv_tensor_randn(sizes, 2, &options, &tensor));
  swv_layout_free(layout);
  return tensor;
}

static void check_equal(const swv_tensor* a, const swv_tensor* b, float tolerance) {
  int64_t n, m, i;
  float* x = elements(a, &n);
  float* y = elements(b, &m);
  CHECK(n == m);
  for (i = 0; i < n; ++i) CHECK(fabsf(x[i] - y[i]) <= tolerance * (1 + fabsf(y[i])));
  free(x);
  free(y);
}

static void test_world_and_collectives(swv_world* world) {
  int32_t rank, size, local_rank;
  swv_comm *comm, *half;
  swv_work* work;
  swv_string* string;
  swv_coalescing* coalescing;
  float x[2], all[2 * RANKS], sum[2];
  int32_t members[2] = {1, 3}, ranks[RANKS];
  size_t count, i;
  swv_comm_counter counters[SWV_COLLECTIVE_RECV + 1];
  swv_bool done;
  CHECK_OK(swv_world_rank(world, &rank));
  CHECK_OK(swv_world_size(world, &size));
  CHECK_OK(swv_world_local_rank(world, &local_rank));
  CHECK(size == RANKS && rank == local_rank);
  CHECK_OK(swv_world_comm(world, &comm));
  CHECK_OK(swv_comm_backend(comm, &string));
  CHECK_TEXT(string, "inproc");
  CHECK_OK(swv_comm_world_ranks(comm, ranks, RANKS, &count));
  CHECK(count == RANKS && ranks[3] == 3);
  CHECK_OK(swv_comm_world_ranks(comm, NULL, 0, &count));
  CHECK(count == RANKS);

  x[0] = (float)rank;
  x[1] = 1;
  {
    const swv_buffer in = cpu_buffer(x, 2, SWV_DTYPE_F32);
    const swv_buffer out = cpu_buffer(sum, 2, SWV_DTYPE_F32);
    const swv_buffer everyone = cpu_buffer(all, 2 * RANKS, SWV_DTYPE_F32);
    const swv_buffer part = cpu_buffer(sum, 1, SWV_DTYPE_F32);
    const swv_buffer one = cpu_buffer(x, 1, SWV_DTYPE_F32);
    swv_call_options options = SWV_CALL_OPTIONS_INIT;
    options.tag = "test";
    options.timeout_ms = 60000;
    CHECK_OK(swv_comm_all_reduce(comm, &in, &out, SWV_REDUCE_SUM, &options, NULL));
    CHECK(sum[0] == 6 && sum[1] == 4);
    CHECK_OK(swv_comm_all_gather(comm, &in, &everyone, NULL, &work));
    CHECK_OK(swv_work_wait(work));
    CHECK_OK(swv_work_is_done(work, &done));
    CHECK(done == 1);
    swv_work_free(work);
    for (i = 0; i < RANKS; ++i) CHECK(all[2 * i] == (float)i && all[2 * i + 1] == 1);
    CHECK_OK(swv_comm_broadcast(comm, &one, 2, NULL, NULL));
    CHECK(x[0] == 2);
    x[0] = (float)rank;
    sum[0] = sum[1] = -1;
    CHECK_OK(swv_comm_reduce(comm, &in, rank == 1 ? &out : NULL, SWV_REDUCE_MAX, 1, NULL, NULL));
    CHECK(sum[0] == (rank == 1 ? 3 : -1));
    CHECK_OK(swv_comm_gather(comm, &in, rank == 0 ? &everyone : NULL, 0, NULL, NULL));
    {
      float parts[RANKS] = {10, 11, 12, 13};
      const swv_buffer source = cpu_buffer(parts, RANKS, SWV_DTYPE_F32);
      CHECK_OK(swv_comm_scatter(comm, rank == 3 ? &source : NULL, &part, 3, NULL, NULL));
      CHECK(sum[0] == 10 + (float)rank);
      CHECK_OK(swv_comm_reduce_scatter(comm, &source, &part, SWV_REDUCE_SUM, NULL, NULL));
      CHECK(sum[0] == 4 * (10 + (float)rank));
    }
    {
      float send[RANKS], recv[RANKS];
      const swv_buffer from = cpu_buffer(send, RANKS, SWV_DTYPE_F32);
      const swv_buffer to = cpu_buffer(recv, RANKS, SWV_DTYPE_F32);
      for (i = 0; i < RANKS; ++i) send[i] = (float)(10 * rank + (int)i);
      CHECK_OK(swv_comm_all_to_all(comm, &from, &to, NULL, NULL));
      for (i = 0; i < RANKS; ++i) CHECK(recv[i] == (float)(10 * (int)i + rank));
    }
    {
      /* Rank r has r elements. */
      float mine[RANKS], got[6];
      const int64_t counts[RANKS] = {0, 1, 2, 3};
      const swv_buffer from = cpu_buffer(mine, counts[rank], SWV_DTYPE_F32);
      const swv_buffer to = cpu_buffer(got, 6, SWV_DTYPE_F32);
      for (i = 0; i < RANKS; ++i) mine[i] = (float)rank;
      CHECK_OK(swv_comm_all_gather_v(comm, &from, &to, counts, RANKS, NULL, NULL));
      CHECK(got[0] == 1 && got[1] == 2 && got[2] == 2 && got[3] == 3 && got[5] == 3);
    }
    /* A ring. */
    CHECK_OK(swv_comm_send(comm, &one, (rank + 1) % RANKS, 7, NULL, &work));
    CHECK_OK(swv_comm_recv(comm, &part, (rank + RANKS - 1) % RANKS, 7, NULL, NULL));
    CHECK(sum[0] == (float)((rank + RANKS - 1) % RANKS));
    CHECK_OK(swv_work_wait(work));
    swv_work_free(work);
    /* Two at once. */
    CHECK_OK(swv_comm_coalesce(comm, &coalescing));
    CHECK_OK(swv_comm_all_reduce(comm, &in, &out, SWV_REDUCE_SUM, NULL, NULL));
    CHECK_OK(swv_comm_barrier(comm, NULL, NULL));
    CHECK_OK(swv_coalescing_finish(coalescing, NULL));
    CHECK(sum[0] == 6);
    CHECK_FAILS(swv_coalescing_finish(coalescing, NULL), SWV_CODE_INVALID_ARGUMENT,
                "finished already");
    swv_coalescing_free(coalescing);
  }
  if (rank % 2 == 1) {
    CHECK_OK(swv_comm_subgroup(comm, members, 2, "odd", &half));
    CHECK_OK(swv_comm_name(half, &string));
    CHECK_TEXT(string, "odd");
    CHECK_OK(swv_comm_barrier(half, NULL, NULL));
    swv_comm_free(half);
  }
  CHECK_OK(swv_comm_split(comm, rank < 3 ? 0 : -1, -rank, "first", &half));
  CHECK((half == NULL) == (rank == 3));
  if (half != NULL) {
    int32_t in_half;
    CHECK_OK(swv_comm_rank(half, &in_half));
    CHECK(in_half == 2 - rank);
    swv_comm_free(half);
  }
  CHECK_OK(swv_comm_counters(comm, counters, SWV_COLLECTIVE_RECV + 1, &count));
  CHECK(count == SWV_COLLECTIVE_RECV + 1);
  CHECK(counters[SWV_COLLECTIVE_ALL_REDUCE].calls == 2 &&
        counters[SWV_COLLECTIVE_ALL_REDUCE].bytes == 16);
  CHECK_OK(swv_world_flight_record(world, &string));
  CHECK(strstr(swv_string_data(string), "\"tag\":\"test\"") != NULL ||
        strstr(swv_string_data(string), "\"tag\": \"test\"") != NULL);
  swv_string_free(string);
  CHECK_OK(swv_comm_health(comm));
  swv_comm_free(comm);
}

static void test_mesh(swv_world* world) {
  swv_mesh *mesh = make_mesh(world), *tp, *flat, *deep, *parsed;
  const swv_mesh_dim split[] = {{"a", 2}, {"b", 2}};
  const char* names[] = {"tp"};
  int64_t shape[2], coordinate[2];
  size_t count;
  int32_t rank, ndim, dim, size, group_size;
  swv_string* text;
  swv_comm* comm;
  swv_bool equal;
  CHECK_OK(swv_world_rank(world, &rank));
  CHECK_OK(swv_mesh_ndim(mesh, &ndim));
  CHECK_OK(swv_mesh_size(mesh, &size));
  CHECK(ndim == 2 && size == 4);
  CHECK_OK(swv_mesh_shape(mesh, shape, 1, &count));
  CHECK(count == 2 && shape[0] == 2);
  CHECK_OK(swv_mesh_coordinate(mesh, coordinate, 2, &count));
  CHECK(coordinate[0] == rank / 2 && coordinate[1] == rank % 2);
  CHECK_OK(swv_mesh_find_dim(mesh, "tp", &dim));
  CHECK(dim == 1);
  CHECK_FAILS(swv_mesh_find_dim(mesh, "pp", &dim), SWV_CODE_NOT_FOUND, "dp");
  CHECK_OK(swv_mesh_dim_name(mesh, 0, &text));
  CHECK_TEXT(text, "dp");
  CHECK_OK(swv_mesh_to_string(mesh, &text));
  CHECK_TEXT(text, "DeviceMesh(dp=2, tp=2)");
  CHECK_OK(swv_mesh_connect(mesh));
  CHECK_OK(swv_mesh_comm(mesh, 1, &comm));
  CHECK_OK(swv_comm_size(comm, &group_size));
  CHECK(group_size == 2);
  swv_comm_free(comm);
  CHECK_OK(swv_mesh_slice(mesh, names, 1, &tp));
  CHECK_OK(swv_mesh_flatten(mesh, NULL, 0, NULL, &flat));
  CHECK_OK(swv_mesh_to_string(flat, &text));
  CHECK_TEXT(text, "DeviceMesh(dp_tp=4)");
  CHECK_OK(swv_mesh_unflatten(flat, "dp_tp", split, 2, &deep));
  CHECK_OK(swv_mesh_parse(world, "dp=2, tp=2", &parsed));
  CHECK_OK(swv_mesh_equal(parsed, mesh, &equal));
  CHECK(equal == 1);
  CHECK_OK(swv_mesh_equal(tp, mesh, &equal));
  CHECK(equal == 0);
  swv_mesh_free(parsed);
  swv_mesh_free(deep);
  swv_mesh_free(flat);
  swv_mesh_free(tp);
  swv_mesh_free(mesh);
}

static void test_layout(swv_world* world) {
  swv_placement placements[2] = {SWV_PLACEMENT_INIT, SWV_PLACEMENT_INIT}, got = SWV_PLACEMENT_INIT;
  const int64_t ragged[] = {3, 4};
  const int64_t mesh_shape[] = {2, 2}, coordinate[] = {1, 0}, sizes[] = {7, 5};
  const swv_named_placement named[] = {{"tp", "S(0)"}};
  swv_layout *layout, *other;
  swv_mesh* mesh = make_mesh(world);
  swv_string* text;
  int64_t shape[2], offset[2], bytes;
  int32_t ndim;
  swv_bool equal;
  placements[0].kind = SWV_PLACEMENT_RAGGED_SHARD;
  placements[0].sizes = ragged;
  placements[0].num_sizes = 2;
  placements[1].kind = SWV_PLACEMENT_PARTIAL;
  placements[1].reduce_op = SWV_REDUCE_AVG;
  CHECK_OK(swv_layout_create(placements, 2, NULL, 0, &layout));
  CHECK_OK(swv_layout_to_string(layout, &text));
  other = make_layout(swv_string_data(text));
  swv_string_free(text);
  CHECK_OK(swv_layout_equal(layout, other, &equal));
  CHECK(equal == 1);
  CHECK_OK(swv_layout_placement(layout, 0, &got));
  CHECK(got.kind == SWV_PLACEMENT_RAGGED_SHARD && got.num_sizes == 2 && got.sizes[1] == 4);
  swv_layout_free(layout);
  swv_layout_free(other);

  CHECK_OK(swv_layout_create_named(mesh, named, 1, &layout));
  CHECK_OK(swv_layout_to_string(layout, &text));
  CHECK_TEXT(text, "[R, S(0)]");
  CHECK_OK(swv_layout_mesh_ndim(layout, &ndim));
  CHECK(ndim == 2);
  other = make_layout("[S(0), S(0)]");
  CHECK_OK(swv_layout_local_extent(other, mesh_shape, coordinate, 2, sizes, 2, shape, offset));
  CHECK(shape[0] == 2 && shape[1] == 5 && offset[0] == 4 && offset[1] == 0);
  swv_layout* from_end = make_layout("[S(-2), S(-2)]");
  CHECK_OK(swv_layout_local_extent(from_end, mesh_shape, coordinate, 2, sizes, 2, shape, offset));
  CHECK(shape[0] == 2 && shape[1] == 5 && offset[0] == 4 && offset[1] == 0);
  CHECK_OK(swv_layout_plan(other, from_end, mesh_shape, 2, sizes, 2, SWV_DTYPE_F32, &bytes, NULL));
  CHECK(bytes == 0);
  swv_layout_free(from_end);
  CHECK_OK(swv_layout_plan(layout, other, mesh_shape, 2, sizes, 2, SWV_DTYPE_F32, &bytes, &text));
  CHECK(bytes > 0 && swv_string_size(text) > 0);
  swv_string_free(text);
  CHECK_FAILS(swv_layout_parse("[S(0), Q]", &layout), SWV_CODE_INVALID_ARGUMENT,
              "swv_layout_parse: ");
  swv_layout_free(layout);
  swv_layout_free(other);
  swv_mesh_free(mesh);
}

/* requires_grad of each factory, on a mesh (or NULL). */
static void check_factories(const swv_mesh* mesh) {
  const int64_t sizes[] = {2, 3};
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  swv_tensor* made[6];
  swv_bool requires_grad, leaf;
  int i;
  options.mesh = mesh;
  options.requires_grad = 1;
  CHECK_OK(swv_tensor_empty(sizes, 2, &options, &made[0]));
  CHECK_OK(swv_tensor_zeros(sizes, 2, &options, &made[1]));
  CHECK_OK(swv_tensor_ones(sizes, 2, &options, &made[2]));
  CHECK_OK(swv_tensor_full(sizes, 2, 0.5, &options, &made[3]));
  CHECK_OK(swv_tensor_rand(sizes, 2, &options, &made[4]));
  CHECK_OK(swv_tensor_randn(sizes, 2, &options, &made[5]));
  for (i = 0; i < 6; ++i) {
    CHECK_OK(swv_tensor_requires_grad(made[i], &requires_grad));
    CHECK_OK(swv_tensor_is_leaf(made[i], &leaf));
    CHECK(requires_grad == 1 && leaf == 1);
    swv_tensor_free(made[i]);
  }
  options.dtype = SWV_DTYPE_I64;
  CHECK_FAILS(swv_tensor_zeros(sizes, 2, &options, &made[0]), SWV_CODE_INVALID_ARGUMENT,
              "floating point");
}

static void test_plain_tensors(void) {
  const float data[] = {1, 2, 3, 4, 5, 6};
  const int64_t sizes[] = {2, 3};
  float back[6], changed[6] = {6, 5, 4, 3, 2, 1};
  int64_t got[2];
  size_t count;
  int32_t ndim;
  int64_t numel;
  swv_dtype dtype;
  swv_device device;
  swv_bool same, sharded;
  swv_tensor *t, *second, *transposed;
  swv_buffer buffer = SWV_BUFFER_INIT;
  swv_value value;
  struct DLManagedTensorVersioned* managed;
  check_factories(NULL);
  CHECK_OK(swv_tensor_from_data(data, sizeof(data), sizes, 2, NULL, &t));
  CHECK_OK(swv_tensor_ndim(t, &ndim));
  CHECK_OK(swv_tensor_numel(t, &numel));
  CHECK_OK(swv_tensor_dtype(t, &dtype));
  CHECK_OK(swv_tensor_device(t, &device));
  CHECK_OK(swv_tensor_is_sharded(t, &sharded));
  CHECK(ndim == 2 && numel == 6 && dtype == SWV_DTYPE_F32 && device.type == SWV_DEVICE_CPU &&
        sharded == 0);
  value = swv_value_tensor(t);
  transposed = call_op("aten::t", SWV_MODE_GRAD, &value, 1);
  CHECK_OK(swv_tensor_sizes(transposed, got, 2, &count));
  CHECK(count == 2 && got[0] == 3 && got[1] == 2);
  CHECK_OK(swv_tensor_strides(transposed, got, 2, &count));
  CHECK(got[0] == 1 && got[1] == 3);
  CHECK_OK(swv_tensor_copy_to_host(transposed, back, sizeof(back)));
  CHECK(back[0] == 1 && back[1] == 4 && back[5] == 6);
  CHECK_FAILS(swv_tensor_buffer(transposed, &buffer), SWV_CODE_INVALID_ARGUMENT, "not contiguous");
  CHECK_OK(swv_tensor_buffer(t, &buffer));
  CHECK(buffer.count == 6 && ((float*)buffer.data)[5] == 6);
  CHECK_OK(swv_tensor_copy_from_host(t, changed, sizeof(changed)));
  CHECK(((float*)buffer.data)[5] == 1);
  /* DLPack there and back: the same memory. */
  CHECK_FAILS(swv_tensor_to_dlpack(t, &managed, &managed), SWV_CODE_INVALID_ARGUMENT,
              "argument 'stream' is given; a CPU has no streams");
  CHECK_OK(swv_tensor_to_dlpack(t, NULL, &managed));
  CHECK_OK(swv_tensor_from_dlpack(managed, NULL, &second));
  {
    /* Its memory is not freed under who has the address. */
    const int64_t larger[1] = {1000};
    swv_op* resize;
    swv_value args[2], result;
    size_t n;
    args[0] = swv_value_tensor(t);
    args[1] = swv_value_ints(larger, 1);
    CHECK_OK(swv_op_find("aten::resize_", &resize));
    CHECK_FAILS(swv_op_call(resize, SWV_MODE_NO_GRAD, args, 2, &result, 1, &n),
                SWV_CODE_INVALID_ARGUMENT, "not resizable");
    swv_op_free(resize);
  }
  swv_tensor_free(t);
  {
    swv_buffer again = SWV_BUFFER_INIT;
    CHECK_OK(swv_tensor_buffer(second, &again));
    CHECK(again.data == buffer.data);
  }
  CHECK_OK(swv_tensor_share(second, &t));
  CHECK_OK(swv_tensor_is_same(second, t, &same));
  CHECK(same == 1);
  swv_tensor_free(second);
  swv_tensor_free(t);
  swv_tensor_free(transposed);
}

/* Every element type to and from the host, as one number, as text, and over a mesh: the same bytes.
 */
static void test_dtypes(swv_world* world) {
  const struct {
    swv_dtype dtype;
    size_t size;
    unsigned char bytes[3][16]; /* 1, 0 or -2, 3 or 1 */
    swv_value_kind kind;
    double third; /* the last of them, as swv_tensor_item has it */
  } rows[] = {
      {SWV_DTYPE_F32,
       4,
       {{0, 0, 0x80, 0x3f}, {0, 0, 0, 0xc0}, {0, 0, 0x40, 0x40}},
       SWV_VALUE_FLOAT,
       3},
      {SWV_DTYPE_F64,
       8,
       {{0, 0, 0, 0, 0, 0, 0xf0, 0x3f}, {0}, {0, 0, 0, 0, 0, 0, 0x08, 0x40}},
       SWV_VALUE_FLOAT,
       3},
      {SWV_DTYPE_F16, 2, {{0, 0x3c}, {0, 0xc0}, {0, 0x42}}, SWV_VALUE_FLOAT, 3},
      {SWV_DTYPE_BF16, 2, {{0x80, 0x3f}, {0, 0xc0}, {0x40, 0x40}}, SWV_VALUE_FLOAT, 3},
      {SWV_DTYPE_F8_E4M3FN, 1, {{0x38}, {0xc0}, {0x44}}, SWV_VALUE_FLOAT, 3},
      {SWV_DTYPE_F8_E5M2, 1, {{0x3c}, {0xc0}, {0x42}}, SWV_VALUE_FLOAT, 3},
      {SWV_DTYPE_I8, 1, {{1}, {0xfe}, {3}}, SWV_VALUE_INT, 3},
      {SWV_DTYPE_I16, 2, {{1}, {0xfe, 0xff}, {3}}, SWV_VALUE_INT, 3},
      {SWV_DTYPE_I32, 4, {{1}, {0xfe, 0xff, 0xff, 0xff}, {3}}, SWV_VALUE_INT, 3},
      {SWV_DTYPE_I64, 8, {{1}, {0}, {3, 0, 0, 0, 1}}, SWV_VALUE_INT, 4294967299.0},
      {SWV_DTYPE_U8, 1, {{1}, {0}, {0xff}}, SWV_VALUE_INT, 255},
      {SWV_DTYPE_U16, 2, {{1}, {0}, {0xff, 0xff}}, SWV_VALUE_INT, 65535},
      {SWV_DTYPE_U32, 4, {{1}, {0}, {0xff, 0xff, 0xff, 0xff}}, SWV_VALUE_INT, 4294967295.0},
      {SWV_DTYPE_U64, 8, {{1}, {0}, {3, 0, 0, 0, 1}}, SWV_VALUE_INT, 4294967299.0},
      {SWV_DTYPE_BOOL, 1, {{1}, {0}, {1}}, SWV_VALUE_BOOL, 1},
      {SWV_DTYPE_C64,
       8,
       {{0, 0, 0x80, 0x3f}, {0, 0, 0, 0xc0}, {0, 0, 0x40, 0x40, 0, 0, 0x80, 0x3f}},
       SWV_VALUE_COMPLEX,
       3},
      {SWV_DTYPE_C128,
       16,
       {{0, 0, 0, 0, 0, 0, 0xf0, 0x3f},
        {0},
        {0, 0, 0, 0, 0, 0, 0x08, 0x40, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f}},
       SWV_VALUE_COMPLEX,
       3},
      {SWV_DTYPE_C32, 4, {{0, 0x3c}, {0, 0xc0}, {0, 0x42, 0, 0x3c}}, SWV_VALUE_COMPLEX, 3},
  };
  const int64_t three[] = {3};
  swv_mesh* mesh = make_mesh(world);
  swv_layout* rows_over_dp = make_layout("[S(0), R]");
  size_t r, i;
  CHECK(sizeof(rows) / sizeof(rows[0]) == SWV_DTYPE_C32); /* all of them */
  for (r = 0; r < sizeof(rows) / sizeof(rows[0]); ++r) {
    const size_t size = rows[r].size;
    unsigned char data[48], back[48];
    swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
    swv_tensor *plain, *sharded, *whole, *last, *last_sharded;
    swv_string* text;
    swv_dtype dtype;
    swv_value args[4], item;
    CHECK(swv_dtype_size(rows[r].dtype) == size);
    CHECK(strcmp(swv_dtype_name(rows[r].dtype), "unknown") != 0);
    for (i = 0; i < 3; ++i) memcpy(data + i * size, rows[r].bytes[i], size);
    options.dtype = rows[r].dtype;
    CHECK_OK(swv_tensor_from_data(data, 3 * size, three, 1, &options, &plain));
    CHECK_OK(swv_tensor_dtype(plain, &dtype));
    CHECK(dtype == rows[r].dtype);
    CHECK_OK(swv_tensor_copy_to_host(plain, back, 3 * size));
    CHECK(memcmp(data, back, 3 * size) == 0);
    CHECK_OK(swv_tensor_copy_from_host(plain, data, 3 * size));
    CHECK_OK(swv_tensor_distribute(plain, mesh, rows_over_dp, NULL, &sharded));
    CHECK_OK(swv_tensor_full_tensor(sharded, SWV_MODE_NO_GRAD, &whole));
    memset(back, 0x55, sizeof(back));
    CHECK_OK(swv_tensor_copy_to_host(whole, back, 3 * size));
    CHECK(memcmp(data, back, 3 * size) == 0);
    CHECK_OK(swv_tensor_to_string(plain, &text));
    swv_string_free(text);
    CHECK_OK(swv_tensor_values_to_string(sharded, &text));
    swv_string_free(text);
    args[1] = swv_value_int(0);
    args[2] = swv_value_int(2);
    args[0] = swv_value_tensor(plain);
    last = call_op("aten::select.int", SWV_MODE_NO_GRAD, args, 3);
    args[0] = swv_value_tensor(sharded);
    last_sharded = call_op("aten::select.int", SWV_MODE_NO_GRAD, args, 3);
    for (i = 0; i < 2; ++i) {
      CHECK_OK(swv_tensor_item(i == 0 ? last : last_sharded, &item));
      CHECK(item.kind == rows[r].kind);
      if (item.kind == SWV_VALUE_COMPLEX) {
        CHECK(item.as.complex_number.real == rows[r].third);
        CHECK(item.as.complex_number.imaginary == 1);
      } else {
        CHECK((item.kind == SWV_VALUE_FLOAT ? item.as.number : (double)item.as.integer) ==
              rows[r].third);
      }
    }
    swv_tensor_free(last_sharded);
    swv_tensor_free(last);
    swv_tensor_free(whole);
    swv_tensor_free(sharded);
    swv_tensor_free(plain);
  }
  {
    const uint64_t largest = UINT64_MAX;
    swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
    swv_tensor* t;
    swv_value item;
    options.dtype = SWV_DTYPE_U64;
    CHECK_OK(swv_tensor_from_data(&largest, sizeof(largest), NULL, 0, &options, &t));
    CHECK_FAILS(swv_tensor_item(t, &item), SWV_CODE_OUT_OF_RANGE, "18446744073709551615");
    swv_tensor_free(t);
  }
  swv_layout_free(rows_over_dp);
  swv_mesh_free(mesh);
}

/* The elements of a plain tensor as they are; those of a sharded one on request. */
static void test_text(swv_world* world) {
  const float data[] = {1, 2, 3, 4};
  const int64_t sizes[] = {2, 2};
  swv_mesh* mesh = make_mesh(world);
  swv_layout* layout = make_layout("[S(0), S(1)]");
  swv_tensor *plain, *sharded;
  swv_string *text, *values;
  CHECK_OK(swv_tensor_from_data(data, sizeof(data), sizes, 2, NULL, &plain));
  CHECK_OK(swv_tensor_distribute(plain, mesh, layout, NULL, &sharded));
  CHECK_OK(swv_tensor_values_to_string(plain, &text));
  CHECK_TEXT(text, " 1  2\n 3  4\n[ CPUFloatType{2,2} ]");
  CHECK_OK(swv_tensor_to_string(plain, &text));
  CHECK_TEXT(text, " 1  2\n 3  4\n[ CPUFloatType{2,2} ]");
  CHECK_OK(swv_tensor_to_string(sharded, &text));
  CHECK(strstr(swv_string_data(text), "DTensor[2, 2] Float [S(0), S(1)]") != NULL);
  CHECK(strchr(swv_string_data(text), '\n') == NULL);
  CHECK_OK(swv_tensor_values_to_string(sharded, &values));
  CHECK(strncmp(swv_string_data(values), swv_string_data(text), swv_string_size(text)) == 0);
  CHECK(strcmp(swv_string_data(values) + swv_string_size(text),
               "\n 1  2\n 3  4\n[ CPUFloatType{2,2} ]") == 0);
  swv_string_free(values);
  swv_string_free(text);
  swv_tensor_free(sharded);
  swv_tensor_free(plain);
  {
    /* LibTorch's own text lacks the imaginary parts. */
    swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
    const int64_t two[] = {2};
    options.dtype = SWV_DTYPE_C64;
    CHECK_OK(swv_tensor_from_data(data, sizeof(data), two, 1, &options, &plain));
    CHECK_OK(swv_tensor_to_string(plain, &text));
    CHECK(strstr(swv_string_data(text), " 1  2\n 3  4\n") != NULL);
    swv_string_free(text);
    swv_tensor_free(plain);
  }
  swv_layout_free(layout);
  swv_mesh_free(mesh);
}

static void test_values(void) {
  const int64_t sizes[] = {4, 3};
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  const swv_device cpu = {SWV_DEVICE_CPU, 0};
  const swv_bool flags[] = {1, 0};
  swv_tensor *t, *r, *last, *list[2];
  swv_op* op;
  swv_value args[4], results[2], value;
  const char* names[] = {"keepdim"};
  size_t n;
  swv_string* text;
  CHECK_OK(swv_tensor_full(sizes, 2, 2.5, &options, &t));

  /* A number among tensors; overloads; names without "aten::". */
  args[0] = swv_value_tensor(t);
  args[1] = swv_value_int(2);
  r = call_op("add", SWV_MODE_GRAD, args, 2);
  CHECK_OK(swv_tensor_full_tensor(r, SWV_MODE_GRAD, &list[0]));
  swv_tensor_free(list[0]);
  swv_tensor_free(r);
  r = call_op("aten::add.Tensor", SWV_MODE_GRAD, args, 2);
  swv_tensor_free(r);

  /* A list of tensors in and out, several results. */
  list[0] = list[1] = t;
  value = swv_value_tensors(list, 2);
  r = call_op("aten::cat", SWV_MODE_GRAD, &value, 1);
  args[0] = swv_value_tensor(r);
  args[1] = swv_value_int(4);
  CHECK_OK(swv_op_find("aten::split.Tensor", &op));
  CHECK_OK(swv_op_call(op, SWV_MODE_GRAD, args, 2, results, 2, &n));
  CHECK(n == 1 && results[0].kind == SWV_VALUE_TENSORS && results[0].as.tensors.size == 2);
  swv_value_clear(&results[0]);
  swv_value_clear(&results[0]);
  swv_op_free(op);
  CHECK_OK(swv_op_find("aten::max.dim", &op));
  args[1] = swv_value_int(1);
  args[2] = swv_value_bool(1);
  CHECK_OK(swv_op_call(op, SWV_MODE_GRAD, args, 3, results, 2, &n));
  CHECK(n == 2 && results[1].kind == SWV_VALUE_TENSOR);
  swv_value_clear(&results[0]);
  swv_value_clear(&results[1]);
  CHECK_OK(swv_op_call_named(op, SWV_MODE_GRAD, args, 3, names, 1, results, 2, &n));
  swv_value_clear(&results[0]);
  swv_value_clear(&results[1]);
  CHECK_FAILS(swv_op_call(op, SWV_MODE_GRAD, args, 3, results, 1, &n), SWV_CODE_INVALID_ARGUMENT,
              "capacity");
  CHECK_FAILS(swv_op_call(op, SWV_MODE_GRAD, args, 1, results, 2, &n), SWV_CODE_INVALID_ARGUMENT,
              "argument 'dim' is missing; its schema is aten::max.dim(Tensor self, int dim");
  CHECK_OK(swv_op_schema(op, &text));
  CHECK(strncmp(swv_string_data(text), "aten::max.dim(", 14) == 0);
  swv_string_free(text);
  swv_op_free(op);

  /* None, dtypes, defaults, a list of integers. */
  {
    const int64_t dims[] = {0, 1};
    args[0] = swv_value_tensor(t);
    args[1] = swv_value_ints(dims, 2);
    args[2] = swv_value_default();
    args[3] = swv_value_dtype(SWV_DTYPE_F64);
    swv_tensor_free(r);
    r = call_op("aten::sum.dim_IntList", SWV_MODE_GRAD, args, 4);
  }
  swv_tensor_free(r);
  args[0] = swv_value_tensor(t);
  args[1] = swv_value_none();
  args[2] = swv_value_bool(0);
  args[3] = swv_value_dtype(SWV_DTYPE_F64);
  r = call_op("aten::sum.dim_IntList", SWV_MODE_GRAD, args, 4);
  CHECK_OK(swv_tensor_item(r, &value));
  CHECK(value.kind == SWV_VALUE_FLOAT && value.as.number == 30);
  swv_tensor_free(r);
  CHECK_FAILS(swv_op_find("aten::mull", &op), SWV_CODE_NOT_FOUND, "'aten::mul'");
  CHECK_FAILS(swv_op_find("aten::add.Tensr", &op), SWV_CODE_NOT_FOUND, "'aten::add.Tensor'");
  CHECK_OK(swv_op_find("aten::mul", &op));
  args[0] = swv_value_string("x", 1);
  CHECK_FAILS(swv_op_call(op, SWV_MODE_GRAD, args, 2, results, 1, NULL), SWV_CODE_INVALID_ARGUMENT,
              "fit none of its schemas:\naten::mul.");
  /* The makers of the rarer kinds. */
  args[0] = swv_value_tensor(t);
  args[1] = swv_value_complex(0, -2);
  r = call_op("aten::mul", SWV_MODE_NO_GRAD, args, 2);
  args[0] = swv_value_tensor(r);
  last = call_op("aten::sum", SWV_MODE_NO_GRAD, args, 1);
  CHECK_OK(swv_tensor_item(last, &value));
  CHECK(value.kind == SWV_VALUE_COMPLEX && value.as.complex_number.real == 0 &&
        value.as.complex_number.imaginary != 0);
  swv_tensor_free(last);
  swv_tensor_free(r);
  args[0] = swv_value_tensor(t);
  args[1] = swv_value_device(cpu);
  args[2] = swv_value_dtype(SWV_DTYPE_F64);
  r = call_op("aten::to.device", SWV_MODE_NO_GRAD, args, 3);
  swv_tensor_free(r);
  args[1] = swv_value_bools(flags, 2);
  CHECK(args[1].kind == SWV_VALUE_BOOLS && args[1].as.bools.data == flags &&
        args[1].as.bools.size == 2);
  /* In place, result dropped. */
  swv_op_free(op);
  CHECK_OK(swv_op_find("aten::mul_", &op));
  args[0] = swv_value_tensor(t);
  args[1] = swv_value_float(2);
  CHECK_OK(swv_op_call(op, SWV_MODE_NO_GRAD, args, 2, NULL, 0, &n));
  CHECK(n == 1);
  swv_op_free(op);
  CHECK_OK(swv_op_find("aten::mm", &op));
  args[1] = swv_value_tensor(t);
  CHECK_FAILS(swv_op_call(op, SWV_MODE_GRAD, args, 2, results, 1, NULL), SWV_CODE_INVALID_ARGUMENT,
              "swv_op_call: aten::mm: ");
  swv_op_free(op);
  swv_tensor_free(t);
}

static void test_factories_on_a_mesh(swv_world* world) {
  swv_mesh* mesh = make_mesh(world);
  check_factories(mesh);
  swv_mesh_free(mesh);
}

static void test_cost_model(swv_world* world) {
  swv_mesh* mesh = make_mesh(world);
  swv_link_cost links[] = {{3e-5, 2e10}, {0, 3e11}}, got[2];
  swv_device_cost device = SWV_DEVICE_COST_INIT, got_device = SWV_DEVICE_COST_INIT;
  size_t count;
  int32_t rank;
  swv_world* counting;
  swv_string* text;
  CHECK_OK(swv_mesh_cost_model(mesh, got, 2, &count, &got_device));
  CHECK(count == 2 && got[1].bandwidth == 5e9 && got_device.flops == 5e10);
  device.flops = 4e14;
  CHECK_OK(swv_mesh_set_cost_model(mesh, links, 2, &device));
  CHECK_OK(swv_mesh_cost_model(mesh, got, 1, &count, &got_device));
  CHECK(count == 2 && got[0].latency == 3e-5 && got[1].bandwidth == 5e9);
  CHECK(got_device.flops == 4e14 && got_device.bandwidth == 1e10);
  CHECK_OK(swv_mesh_set_cost_model_from_json(
      mesh,
      "{\"links\": {\"dp\": {\"latency\": 1e-6, \"bandwidth\": 7}, \"tp\": {\"latency\": 0, "
      "\"bandwidth\": 8}}, \"device\": {\"flops\": 9, \"bandwidth\": 10}}"));
  CHECK_OK(swv_mesh_cost_model(mesh, got, 2, &count, NULL));
  CHECK(got[0].bandwidth == 7 && got[1].bandwidth == 8);
  /* One rank has another one: all hear of it. */
  CHECK_OK(swv_world_rank(world, &rank));
  if (rank == 3) device.flops = 1;
  CHECK_FAILS(swv_mesh_set_cost_model(mesh, links, rank == 2 ? 1 : 2, &device),
              SWV_CODE_INVALID_ARGUMENT,
              rank == 2 ? "has 1 links" : "were not given the same cost model");
  CHECK_OK(swv_mesh_cost_model(mesh, got, 2, &count, NULL));
  CHECK(got[0].bandwidth == 7);

  /* Measured: nothing is set by it, and all ranks have the same to set. */
  CHECK_OK(swv_mesh_measure_cost_model(mesh, &text));
  CHECK_OK(swv_mesh_cost_model(mesh, got, 2, &count, &got_device));
  CHECK(got[0].bandwidth == 7 && got_device.flops == 9);
  CHECK_OK(swv_mesh_set_cost_model_from_json(mesh, swv_string_data(text)));
  CHECK_OK(swv_mesh_cost_model(mesh, got, 2, &count, &got_device));
  for (size_t i = 0; i < 2; ++i) {
    CHECK(got[i].latency >= 0 && got[i].latency < 1 && got[i].bandwidth > 1e5);
  }
  CHECK(got_device.flops > 1e6 && got_device.bandwidth > 1e6);
  swv_string_free(text);
  swv_mesh_free(mesh);

  /* Where the others are not there. */
  CHECK_OK(swv_world_create_counting(3, 1024, &counting));
  CHECK_OK(swv_mesh_parse(counting, "dp=512,tp=2", &mesh));
  CHECK_OK(swv_mesh_set_cost_model(mesh, links, 2, NULL));
  CHECK_OK(swv_mesh_cost_model(mesh, got, 2, &count, &got_device));
  CHECK(got[0].bandwidth == 2e10 && got_device.flops == 5e10);
  swv_mesh_free(mesh);
  swv_world_free(counting);
}

static void test_sharded(swv_world* world) {
  swv_mesh *mesh = make_mesh(world), *of_tensor;
  swv_tensor *x = make_randn(mesh, "[S(0), R]", 7, 5, 0),
             *w = make_randn(mesh, "[R, S(1)]", 5, 3, 0);
  swv_tensor *y, *plain_x, *plain_w, *plain_y, *local, *again, *moved, *distributed;
  swv_layout *layout, *replicated = make_layout("[R, R]");
  swv_string* text;
  swv_value args[2];
  swv_bool sharded, equal;
  swv_dispatch_counters counters = SWV_DISPATCH_COUNTERS_INIT;
  swv_scope* strict;
  swv_op* op;
  swv_value result;
  swv_random_state state = SWV_RANDOM_STATE_INIT;
  args[0] = swv_value_tensor(x);
  args[1] = swv_value_tensor(w);
  y = call_op("aten::mm", SWV_MODE_GRAD, args, 2);
  CHECK_OK(swv_tensor_is_sharded(y, &sharded));
  CHECK(sharded == 1);
  CHECK_OK(swv_tensor_layout(y, &layout));
  CHECK_OK(swv_layout_to_string(layout, &text));
  CHECK_TEXT(text, "[S(0), S(1)]");
  swv_layout_free(layout);
  CHECK_OK(swv_tensor_mesh(y, &of_tensor));
  CHECK_OK(swv_mesh_equal(mesh, of_tensor, &equal));
  CHECK(equal == 1);
  CHECK_OK(swv_tensor_full_tensor(x, SWV_MODE_GRAD, &plain_x));
  CHECK_OK(swv_tensor_full_tensor(w, SWV_MODE_GRAD, &plain_w));
  args[0] = swv_value_tensor(plain_x);
  args[1] = swv_value_tensor(plain_w);
  plain_y = call_op("aten::mm", SWV_MODE_GRAD, args, 2);
  check_equal(y, plain_y, 1e-5f);

  CHECK_OK(swv_tensor_to_local(x, NULL, SWV_MODE_GRAD, &local));
  CHECK_OK(swv_tensor_layout(x, &layout));
  CHECK_OK(swv_tensor_from_local(local, mesh, layout, NULL, 0, SWV_MODE_GRAD, &again));
  check_equal(again, x, 0);
  CHECK_OK(swv_tensor_redistribute(x, replicated, SWV_MODE_GRAD, &moved));
  check_equal(moved, x, 0);
  CHECK_OK(swv_tensor_distribute(plain_x, mesh, layout, NULL, &distributed));
  check_equal(distributed, x, 0);
  CHECK_FAILS(swv_tensor_copy_to_host(x, NULL, 0), SWV_CODE_INVALID_ARGUMENT, "is sharded");

  /* Communication that nobody asked for is refused: a sum into a norm. */
  CHECK_OK(swv_mesh_forbid_communication(mesh, &strict));
  CHECK_OK(swv_op_find("aten::softmax.int", &op));
  args[0] = swv_value_tensor(w);
  args[1] = swv_value_int(1);
  CHECK_FAILS(swv_op_call(op, SWV_MODE_GRAD, args, 2, &result, 1, NULL),
              SWV_CODE_FAILED_PRECONDITION, "_softmax: needs communication");
  swv_scope_free(strict);
  CHECK_OK(swv_op_call(op, SWV_MODE_GRAD, args, 2, &result, 1, NULL));
  swv_value_clear(&result);
  swv_op_free(op);
  CHECK_OK(swv_mesh_dispatch_counters(mesh, &counters));
  CHECK(counters.operators > 0 && counters.implicit_redistributions > 0);
  /* A sum that is reduced for one use is there for the next. */
  {
    const int64_t rows[] = {0};
    swv_tensor* partial;
    args[0] = swv_value_tensor(x);
    args[1] = swv_value_ints(rows, 1);
    partial = call_op("aten::sum.dim_IntList", SWV_MODE_GRAD, args, 2);
    args[0] = swv_value_tensor(partial);
    swv_tensor_free(call_op("aten::relu", SWV_MODE_GRAD, args, 1));
    CHECK_OK(swv_mesh_dispatch_counters(mesh, &counters));
    CHECK(counters.remembered_uses == 0 && counters.remembered_bytes == 5 * sizeof(float));
    swv_tensor_free(call_op("aten::relu", SWV_MODE_GRAD, args, 1));
    swv_tensor_free(partial);
    CHECK_OK(swv_mesh_dispatch_counters(mesh, &counters));
    CHECK(counters.remembered_uses == 1 && counters.remembered_bytes == 0);
  }

  /* The same seed, another layout: the same numbers. */
  CHECK_OK(swv_mesh_seed(mesh, 7));
  swv_tensor_free(again);
  again = make_randn(mesh, "[S(1), S(0)]", 7, 5, 0);
  CHECK_OK(swv_mesh_random_state(mesh, &state));
  CHECK(state.seed == 7 && state.offset > 0);
  state.offset = 0;
  CHECK_OK(swv_mesh_set_random_state(mesh, &state));
  swv_tensor_free(moved);
  moved = make_randn(mesh, "[R, R]", 7, 5, 0);
  check_equal(again, moved, 0);

  swv_layout_free(layout);
  swv_layout_free(replicated);
  swv_tensor_free(distributed);
  swv_tensor_free(moved);
  swv_tensor_free(again);
  swv_tensor_free(local);
  swv_tensor_free(plain_y);
  swv_tensor_free(plain_w);
  swv_tensor_free(plain_x);
  swv_mesh_free(of_tensor);
  swv_mesh_free(mesh);
  /* In any order. */
  swv_tensor_free(y);
  swv_tensor_free(w);
  swv_tensor_free(x);
}

/* y = x * x by hand. */
static int drops = 0;
static pthread_mutex_t drops_mutex = PTHREAD_MUTEX_INITIALIZER;
static void count_drop(void* user_data) {
  pthread_mutex_lock(&drops_mutex);
  drops += *(int*)user_data;
  pthread_mutex_unlock(&drops_mutex);
}
static swv_status* square_forward(void* user_data, const swv_function_call* call) {
  swv_value args[2];
  (void)user_data;
  CHECK(call->struct_size >= SWV_SIZE_TO(swv_function_call, num_outputs));
  CHECK(call->num_inputs == 1 && call->num_outputs == 1 && call->outputs[0] == NULL);
  args[0] = args[1] = swv_value_tensor((swv_tensor*)call->inputs[0]);
  call->outputs[0] = call_op("aten::mul.Tensor", call->mode, args, 2);
  return swv_function_context_save(call->context, call->inputs, call->num_inputs);
}
static swv_status* square_backward(void* user_data, const swv_function_call* call) {
  swv_value args[2];
  swv_tensor *x, *once;
  swv_status* status = swv_function_context_saved(call->context, 0, &x);
  (void)user_data;
  if (status != NULL) return status;
  CHECK(call->num_inputs == 1 && call->num_outputs == 1);
  args[0] = swv_value_tensor((swv_tensor*)call->inputs[0]);
  args[1] = swv_value_tensor(x);
  once = call_op("aten::mul.Tensor", call->mode, args, 2);
  args[0] = swv_value_tensor(once);
  args[1] = swv_value_float(2);
  call->outputs[0] = call_op("aten::mul.Scalar", call->mode, args, 2);
  swv_tensor_free(once);
  swv_tensor_free(x);
  return NULL;
}
static swv_status* failing_forward(void* user_data, const swv_function_call* call) {
  (void)user_data;
  /* What was written before the failure is not lost. */
  CHECK_OK(swv_tensor_share(call->inputs[0], &call->outputs[0]));
  return swv_status_new(SWV_CODE_DATA_LOSS, "the cat ate it");
}

static void test_autograd(swv_world* world) {
  static int one = 1;
  swv_mesh* mesh = make_mesh(world);
  swv_tensor *x = make_randn(mesh, "[S(0), S(1)]", 7, 5, 1), *y = NULL, *loss, *grad, *twice,
             *grads[1];
  const swv_tensor* inputs[1];
  const swv_tensor* outputs[1];
  swv_function function = SWV_FUNCTION_INIT;
  swv_backward_options options = SWV_BACKWARD_OPTIONS_INIT;
  swv_value args[2];
  swv_bool flag;
  inputs[0] = x;
  function.name = "square";
  function.forward = square_forward;
  function.backward = square_backward;
  function.drop = count_drop;
  function.user_data = &one;
  CHECK_OK(swv_tensor_grad(x, &grad));
  CHECK(grad == NULL);
  CHECK_OK(swv_function_apply(&function, SWV_MODE_GRAD, inputs, 1, &y, 1));
  CHECK_OK(swv_tensor_requires_grad(y, &flag));
  CHECK(flag == 1);
  args[0] = swv_value_tensor(y);
  loss = call_op("aten::sum", SWV_MODE_GRAD, args, 1);
  options.retain_graph = 1;
  CHECK_OK(swv_tensor_backward(loss, NULL, &options));
  CHECK_OK(swv_tensor_grad(x, &grad));
  args[0] = swv_value_tensor(x);
  args[1] = swv_value_int(2);
  twice = call_op("aten::mul", SWV_MODE_NO_GRAD, args, 2);
  check_equal(grad, twice, 1e-6f);
  outputs[0] = loss;
  CHECK_OK(swv_gradients(outputs, 1, inputs, 1, NULL, NULL, grads));
  check_equal(grads[0], twice, 1e-6f);
  CHECK_FAILS(swv_tensor_backward(loss, NULL, NULL), SWV_CODE_INVALID_ARGUMENT,
              "swv_tensor_backward: ");
  swv_tensor_free(grads[0]);
  CHECK_OK(swv_tensor_set_grad(x, NULL));
  swv_tensor_free(grad);
  CHECK_OK(swv_tensor_grad(x, &grad));
  CHECK(grad == NULL);

  function.forward = failing_forward;
  {
    swv_tensor* before = y;
    CHECK_FAILS(swv_function_apply(&function, SWV_MODE_GRAD, inputs, 1, &y, 1), SWV_CODE_DATA_LOSS,
                "square.forward: the cat ate it");
    CHECK(y == before);
  }

  /* Without gradients. */
  swv_tensor_free(twice);
  twice = call_op("aten::mul", SWV_MODE_INFERENCE, args, 2);
  CHECK_OK(swv_tensor_requires_grad(twice, &flag));
  CHECK(flag == 0);
  swv_tensor_free(twice);
  CHECK_OK(swv_tensor_detach(x, &twice));
  CHECK_OK(swv_tensor_is_leaf(twice, &flag));
  CHECK(flag == 1);
  CHECK_OK(swv_tensor_set_requires_grad(twice, 1));
  CHECK_FAILS(swv_tensor_set_requires_grad(y, 0), SWV_CODE_INVALID_ARGUMENT, "leaf");
  swv_tensor_free(twice);
  swv_tensor_free(loss);
  swv_tensor_free(y);
  swv_tensor_free(x);
  swv_mesh_free(mesh);
}

/* dropout(gelu(x)) * weight, of which nothing in between is kept. */
typedef struct segment_state {
  swv_tensor* weight;
  int runs;
  int drops;
  int fails_in; /* this run */
} segment_state;
static void count_segment_drop(void* user_data) {
  ++((segment_state*)user_data)->drops;
}
static swv_tensor* run_segment(const swv_tensor* x, const swv_tensor* weight, swv_grad_mode mode) {
  swv_value args[3];
  swv_tensor *active, *dropped, *result;
  args[0] = swv_value_tensor((swv_tensor*)x);
  active = call_op("aten::gelu", mode, args, 1);
  args[0] = swv_value_tensor(active);
  args[1] = swv_value_float(0.5);
  args[2] = swv_value_bool(1);
  dropped = call_op("aten::dropout", mode, args, 3);
  args[0] = swv_value_tensor(dropped);
  args[1] = swv_value_tensor((swv_tensor*)weight);
  result = call_op("aten::mul.Tensor", mode, args, 2);
  swv_tensor_free(dropped);
  swv_tensor_free(active);
  return result;
}
static swv_status* segment_forward(void* user_data, const swv_function_call* call) {
  segment_state* state = (segment_state*)user_data;
  CHECK(call->num_inputs == 1 && call->num_outputs == 1 && call->outputs[0] == NULL);
  CHECK(call->context == NULL);
  CHECK(call->mode == (state->runs == 0 ? SWV_MODE_NO_GRAD : SWV_MODE_GRAD));
  call->outputs[0] = run_segment(call->inputs[0], state->weight, call->mode);
  if (++state->runs == state->fails_in) return swv_status_new(SWV_CODE_DATA_LOSS, "the cat ate it");
  return NULL;
}
/* The sum of the squares of a segment's output. */
static swv_tensor* squares(const swv_tensor* y) {
  swv_value args[2];
  swv_tensor *product, *loss;
  args[0] = args[1] = swv_value_tensor((swv_tensor*)y);
  product = call_op("aten::mul.Tensor", SWV_MODE_GRAD, args, 2);
  args[0] = swv_value_tensor(product);
  loss = call_op("aten::sum", SWV_MODE_GRAD, args, 1);
  swv_tensor_free(product);
  return loss;
}

static void test_checkpoint(swv_world* world) {
  swv_mesh* mesh = make_mesh(world);
  swv_tensor *x = make_randn(mesh, "[S(0), R]", 7, 5, 1),
             *w = make_randn(mesh, "[R, S(1)]", 7, 5, 1), *y, *again, *loss, *x_grad, *w_grad,
             *x_again, *w_again;
  const swv_tensor* inputs[1];
  swv_segment segment = SWV_SEGMENT_INIT;
  segment_state state = {NULL, 0, 0, 0};
  swv_random_state before = SWV_RANDOM_STATE_INIT, after = SWV_RANDOM_STATE_INIT,
                   after_again = SWV_RANDOM_STATE_INIT;
  swv_scope *scope, *inner;
  swv_bool flag;
  inputs[0] = x;
  state.weight = w;
  segment.name = "block";
  segment.user_data = &state;
  segment.forward = segment_forward;
  segment.drop = count_segment_drop;

  CHECK_OK(swv_mesh_random_state(mesh, &before));
  y = run_segment(x, w, SWV_MODE_GRAD);
  loss = squares(y);
  CHECK_OK(swv_tensor_backward(loss, NULL, NULL));
  swv_tensor_free(loss);
  CHECK_OK(swv_tensor_grad(x, &x_grad));
  CHECK_OK(swv_tensor_grad(w, &w_grad));
  CHECK_OK(swv_tensor_set_grad(x, NULL));
  CHECK_OK(swv_tensor_set_grad(w, NULL));
  CHECK_OK(swv_mesh_random_state(mesh, &after));
  CHECK(after.offset > before.offset);

  /* The same numbers, by a checkpoint: values, gradients, and what is drawn next. */
  CHECK_OK(swv_mesh_set_random_state(mesh, &before));
  CHECK_OK(swv_checkpoint(&segment, SWV_MODE_GRAD, inputs, 1, &again, 1));
  CHECK(state.runs == 1 && state.drops == 0);
  check_equal(again, y, 0);
  loss = squares(again);
  swv_tensor_free(again);
  CHECK_OK(swv_tensor_backward(loss, NULL, NULL));
  CHECK(state.runs == 2);
  swv_tensor_free(loss);
  CHECK(state.drops == 1);
  CHECK_OK(swv_tensor_grad(x, &x_again));
  CHECK_OK(swv_tensor_grad(w, &w_again));
  check_equal(x_again, x_grad, 1e-6f);
  check_equal(w_again, w_grad, 1e-6f);
  CHECK_OK(swv_mesh_random_state(mesh, &after_again));
  CHECK(after_again.seed == after.seed && after_again.offset == after.offset);

  /* By hand: a scope draws from its state, and the mesh goes on where it was. */
  CHECK_OK(swv_mesh_use_random_state(mesh, &before, &scope));
  again = run_segment(x, w, SWV_MODE_NO_GRAD);
  swv_scope_free(scope);
  check_equal(again, y, 0);
  swv_tensor_free(again);
  CHECK_OK(swv_mesh_random_state(mesh, &after_again));
  CHECK(after_again.offset == after.offset);
  /* The outer one ends first: the inner one counts, and then the mesh goes on where it was. */
  CHECK_OK(swv_mesh_use_random_state(mesh, &before, &scope));
  CHECK_OK(swv_mesh_use_random_state(mesh, &after, &inner));
  swv_scope_free(scope);
  CHECK_OK(swv_mesh_set_random_state(mesh, &before));
  swv_scope_free(inner);
  CHECK_OK(swv_mesh_random_state(mesh, &after_again));
  CHECK(after_again.seed == after.seed && after_again.offset == after.offset);

  /* Not recorded: one run, and nothing is kept. */
  state.runs = state.drops = 0;
  CHECK_OK(swv_checkpoint(&segment, SWV_MODE_NO_GRAD, inputs, 1, &again, 1));
  CHECK(state.runs == 1 && state.drops == 1);
  CHECK_OK(swv_tensor_requires_grad(again, &flag));
  CHECK(flag == 0);

  /* A failure of either run comes to whoever called. */
  state.runs = state.drops = 0;
  state.fails_in = 1;
  y = (swv_tensor_free(y), again);
  CHECK_FAILS(swv_checkpoint(&segment, SWV_MODE_GRAD, inputs, 1, &again, 1), SWV_CODE_DATA_LOSS,
              "swv_checkpoint: block.forward: the cat ate it");
  CHECK(state.drops == 1 && again == y);
  state.runs = state.drops = 0;
  state.fails_in = 2;
  CHECK_OK(swv_checkpoint(&segment, SWV_MODE_GRAD, inputs, 1, &again, 1));
  loss = squares(again);
  CHECK_FAILS(swv_tensor_backward(loss, NULL, NULL), SWV_CODE_DATA_LOSS,
              "swv_tensor_backward: block.forward, run again in backward: the cat ate it");
  CHECK(state.runs == 2 && state.drops == 0);
  swv_tensor_free(loss);
  swv_tensor_free(again);
  CHECK(state.drops == 1);
  CHECK_OK(swv_mesh_random_state(mesh, &after_again));
  CHECK(after_again.offset > after.offset); /* the scope of the run that failed has ended */

  swv_tensor_free(w_again);
  swv_tensor_free(x_again);
  swv_tensor_free(w_grad);
  swv_tensor_free(x_grad);
  swv_tensor_free(y);
  swv_tensor_free(w);
  swv_tensor_free(x);
  swv_mesh_free(mesh);
}

/* A parameter in a module, distributed by a plan; both optimizers; the loss falls, state is
 * sharded. */
/* A batch that is cut meets a weight that a plan cut along the same mesh dimension. */
static void test_unsharded_weight(swv_world* world) {
  const int64_t sizes[] = {6, 5};
  swv_mesh* mesh = make_mesh(world);
  swv_tensor *w, *x = make_randn(mesh, "[S(0), R]", 8, 5, 0);
  swv_module* module;
  swv_plan* plan;
  swv_scope* strict;
  swv_op* linear;
  swv_value args[2], result;
  swv_dispatch_counters counters = SWV_DISPATCH_COUNTERS_INIT;
  CHECK_OK(swv_tensor_ones(sizes, 2, NULL, &w));
  CHECK_OK(swv_module_create(&module));
  CHECK_OK(swv_module_add_parameter(module, "up.weight", w));
  CHECK_OK(swv_plan_from_json("{\"parameter\": {\"up.weight\": {\"dp\": \"S(0)\"}}}", &plan));
  CHECK_OK(swv_module_distribute(module, mesh, plan, NULL));
  CHECK_OK(swv_op_find("aten::linear", &linear));
  args[0] = swv_value_tensor(x);
  args[1] = swv_value_tensor(w);
  CHECK_OK(swv_mesh_forbid_communication(mesh, &strict));
  CHECK_FAILS(swv_op_call(linear, SWV_MODE_GRAD, args, 2, &result, 1, NULL),
              SWV_CODE_FAILED_PRECONDITION, "(the weight 'up.weight')");
  swv_scope_free(strict);
  CHECK_OK(swv_mesh_dispatch_counters(mesh, &counters));
  CHECK(counters.unsharded_weights == 0);
  CHECK_OK(swv_op_call(linear, SWV_MODE_GRAD, args, 2, &result, 1, NULL));
  swv_value_clear(&result);
  CHECK_OK(swv_mesh_dispatch_counters(mesh, &counters));
  CHECK(counters.unsharded_weights == 1);
  swv_op_free(linear);
  swv_plan_free(plan);
  swv_module_free(module);
  swv_tensor_free(w);
  swv_tensor_free(x);
  swv_mesh_free(mesh);
}

static void test_training(swv_world* world) {
  const int64_t sizes[] = {6, 5};
  swv_mesh* mesh = make_mesh(world);
  swv_tensor *w, *x = make_randn(mesh, "[S(0), R]", 9, 5, 0), *found, *state;
  swv_tensor* parameters[1];
  swv_module* module;
  swv_plan* plan;
  swv_optimizer* optimizer;
  swv_sgd_options sgd = SWV_SGD_OPTIONS_INIT;
  swv_adamw_options adamw = SWV_ADAMW_OPTIONS_INIT;
  swv_layout* layout;
  swv_string* text;
  swv_op *linear, *pow, *mean;
  size_t count;
  int step, kind;
  double lr;
  CHECK_OK(swv_op_find("aten::linear", &linear));
  CHECK_OK(swv_op_find("aten::pow.Tensor_Scalar", &pow));
  CHECK_OK(swv_op_find("aten::mean", &mean));
  for (kind = 0; kind < 2; ++kind) {
    double first = 0, last = 0;
    CHECK_OK(swv_tensor_full(sizes, 2, 0.5, NULL, &w));
    CHECK_OK(swv_module_create(&module));
    CHECK_OK(swv_module_add_parameter(module, "blocks.0.up.weight", w));
    CHECK_FAILS(swv_module_add_parameter(module, "blocks.0.up.weight", w), SWV_CODE_ALREADY_EXISTS,
                "blocks.0.up.weight");
    CHECK_FAILS(swv_module_add_parameter(module, "blocks..w", w), SWV_CODE_INVALID_ARGUMENT,
                "empty");
    CHECK_OK(swv_module_num_parameters(module, &count));
    CHECK(count == 1);
    CHECK_FAILS(swv_module_get(module, "blocks.0.up.wight", &found), SWV_CODE_NOT_FOUND,
                "did you mean 'blocks.0.up.weight'");
    CHECK_OK(swv_plan_from_json("{\"parameter\": {\"*.up.weight\": {\"tp\": \"S(0)\"}}}", &plan));
    CHECK_OK(swv_plan_to_json(plan, &text));
    CHECK_TEXT(text, "{\"parameter\":{\"*.up.weight\":{\"tp\":\"S(0)\"}}}");
    CHECK_OK(swv_module_distribute(module, mesh, plan, NULL));
    swv_plan_free(plan);
    /* The handle that the module was given sees it. */
    CHECK_OK(swv_tensor_layout(w, &layout));
    CHECK_OK(swv_layout_to_string(layout, &text));
    CHECK_TEXT(text, "[R, S(0)]");
    swv_layout_free(layout);
    parameters[0] = w;
    sgd.lr = 0.05;
    sgd.momentum = 0.9;
    adamw.lr = 0.05;
    if (kind == 0)
      CHECK_OK(swv_optimizer_create_sgd(parameters, 1, &sgd, &optimizer));
    else
      CHECK_OK(swv_optimizer_create_adamw(parameters, 1, &adamw, &optimizer));
    CHECK_OK(swv_optimizer_lr(optimizer, &lr));
    CHECK(lr == 0.05);
    for (step = 0; step < 20; ++step) {
      swv_value args[2], y, squared, loss, number;
      args[0] = swv_value_tensor(x);
      args[1] = swv_value_tensor(w);
      CHECK_OK(swv_op_call(linear, SWV_MODE_GRAD, args, 2, &y, 1, NULL));
      args[0] = y;
      args[1] = swv_value_int(2);
      CHECK_OK(swv_op_call(pow, SWV_MODE_GRAD, args, 2, &squared, 1, NULL));
      CHECK_OK(swv_op_call(mean, SWV_MODE_GRAD, &squared, 1, &loss, 1, NULL));
      CHECK_OK(swv_tensor_backward(loss.as.tensor, NULL, NULL));
      if (step == 0)
        CHECK_FAILS(swv_optimizer_step(optimizer), SWV_CODE_FAILED_PRECONDITION,
                    "synchronized before the step");
      CHECK_OK(swv_module_finish_grad_sync(module));
      CHECK_OK(swv_optimizer_step(optimizer));
      CHECK_OK(swv_optimizer_zero_grad(optimizer));
      CHECK_OK(swv_tensor_item(loss.as.tensor, &number));
      last = number.as.number;
      if (step == 0) first = last;
      swv_value_clear(&loss);
      swv_value_clear(&squared);
      swv_value_clear(&y);
    }
    CHECK(last < first / 2);
    CHECK_OK(swv_optimizer_state(optimizer, 0, kind == 0 ? "momentum_buffer" : "exp_avg", &state));
    CHECK_OK(swv_tensor_layout(state, &layout));
    CHECK_OK(swv_layout_to_string(layout, &text));
    CHECK_TEXT(text, "[R, S(0)]");
    swv_layout_free(layout);
    swv_tensor_free(state);
    CHECK_FAILS(swv_optimizer_state(optimizer, 0, "mood", &state), SWV_CODE_NOT_FOUND,
                "there are step");
    CHECK_OK(swv_optimizer_set_lr(optimizer, 0.1));
    CHECK_OK(swv_module_zero_grad(module));
    swv_optimizer_free(optimizer);
    swv_module_free(module);
    swv_tensor_free(w);
  }
  swv_op_free(linear);
  swv_op_free(pow);
  swv_op_free(mean);
  swv_tensor_free(x);
  swv_mesh_free(mesh);
}

/* One tensor under two names is one parameter: listed, clipped and stepped once. */
static void test_tied_weights(swv_world* world) {
  const int64_t sizes[] = {2, 2};
  swv_mesh* mesh = make_mesh(world);
  swv_tensor *w, *other, *gradient, *found;
  swv_tensor* parameters[3];
  swv_module* module;
  swv_plan* plan;
  swv_optimizer* optimizer;
  swv_adamw_options adamw = SWV_ADAMW_OPTIONS_INIT;
  swv_string* fqn;
  swv_bool same;
  size_t count;
  double norm;
  float* data;
  int64_t n, i;
  int on_a_mesh;
  for (on_a_mesh = 0; on_a_mesh < 2; ++on_a_mesh) {
    CHECK_OK(swv_tensor_ones(sizes, 2, NULL, &w));
    CHECK_OK(swv_tensor_ones(sizes, 2, NULL, &other));
    CHECK_OK(swv_module_create(&module));
    CHECK_OK(swv_module_add_parameter(module, "embedding.weight", w));
    CHECK_OK(swv_module_add_parameter(module, "norm.weight", other));
    CHECK_OK(swv_module_add_parameter(module, "head.weight", w));
    CHECK_FAILS(swv_module_add_parameter(module, "head.weight", other), SWV_CODE_ALREADY_EXISTS,
                "head.weight");
    CHECK_OK(swv_module_num_parameters(module, &count));
    CHECK(count == 2);
    CHECK_OK(swv_module_parameter(module, 0, &fqn, &found));
    CHECK_TEXT(fqn, "embedding.weight");
    swv_tensor_free(found);
    CHECK_OK(swv_module_parameter(module, 1, &fqn, NULL));
    CHECK_TEXT(fqn, "norm.weight");
    CHECK_FAILS(swv_module_parameter(module, 2, &fqn, NULL), SWV_CODE_OUT_OF_RANGE, "2 of 2");
    CHECK_OK(swv_module_get(module, "head.weight", &found));
    CHECK_OK(swv_tensor_is_same(found, w, &same));
    CHECK(same == 1);
    swv_tensor_free(found);
    if (on_a_mesh) {
      CHECK_OK(swv_plan_from_json(
          "{\"parameter\": {\"embedding.*\": {\"dp\": \"S(0)\"}, \"head.*\": {\"dp\": \"S(1)\"}}}",
          &plan));
      CHECK_FAILS(swv_module_distribute(module, mesh, plan, NULL), SWV_CODE_INVALID_ARGUMENT,
                  "head.weight");
      swv_plan_free(plan);
      CHECK_OK(swv_tensor_is_sharded(w, &same)); /* before anything has changed */
      CHECK(same == 0);
      CHECK_OK(swv_plan_from_json("{\"parameter\": {\"embedding.*\": {\"dp\": \"S(0)\"}}}", &plan));
      CHECK_OK(swv_module_distribute(module, mesh, plan, NULL));
      swv_plan_free(plan);
    }
    {
      swv_value args[1], y;
      swv_op* sum;
      args[0] = swv_value_tensor(w);
      CHECK_OK(swv_op_find("aten::sum", &sum));
      CHECK_OK(swv_op_call(sum, SWV_MODE_GRAD, args, 1, &y, 1, NULL));
      CHECK_OK(swv_tensor_backward(y.as.tensor, NULL, NULL));
      swv_value_clear(&y);
      swv_op_free(sum);
    }
    CHECK_OK(swv_module_finish_grad_sync(module));
    parameters[0] = w;
    parameters[1] = other;
    CHECK_OK(swv_tensor_share(w, (swv_tensor**)&parameters[2])); /* another handle, one tensor */
    CHECK_OK(swv_clip_grad_norm(parameters, 3, 1.0, NULL, &norm));
    CHECK(fabs(norm - 2) < 1e-6); /* of four ones */
    CHECK_OK(swv_tensor_grad(w, &gradient));
    data = elements(gradient, &n);
    for (i = 0; i < n; ++i) CHECK(fabsf(data[i] - 0.5f) < 1e-5f);
    free(data);
    swv_tensor_free(gradient);
    adamw.lr = 0.25;
    adamw.weight_decay = 0;
    CHECK_OK(swv_optimizer_create_adamw(parameters, 3, &adamw, &optimizer));
    CHECK_OK(swv_optimizer_step(optimizer));
    data = elements(w, &n);
    for (i = 0; i < n; ++i) CHECK(fabsf(data[i] - 0.75f) < 1e-3f); /* once, not twice */
    free(data);
    swv_optimizer_free(optimizer);
    swv_tensor_free((swv_tensor*)parameters[2]);
    swv_module_free(module);
    swv_tensor_free(other);
    swv_tensor_free(w);
  }
  swv_mesh_free(mesh);
}

/* What is frozen stays so in modules; a tensor that nobody has spoken of is trained. */
static void test_frozen(void) {
  const int64_t sizes[] = {2, 3};
  swv_tensor *w = NULL, *same = NULL;
  swv_module* module = NULL;
  swv_bool requires_grad = 1;
  CHECK_OK(swv_tensor_ones(sizes, 2, NULL, &w));
  CHECK_OK(swv_tensor_share(w, &same));
  CHECK_OK(swv_module_create(&module));
  CHECK_OK(swv_tensor_set_requires_grad(same, 0));
  CHECK_OK(swv_module_add_parameter(module, "frozen", w));
  CHECK_OK(swv_tensor_requires_grad(w, &requires_grad));
  CHECK(requires_grad == 0);
  CHECK_OK(swv_tensor_set_requires_grad(w, 1));
  CHECK_OK(swv_tensor_clear_requires_grad(w));
  CHECK_OK(swv_tensor_requires_grad(same, &requires_grad));
  CHECK(requires_grad == 0);
  CHECK_OK(swv_module_add_parameter(module, "trained", w));
  CHECK_OK(swv_tensor_requires_grad(w, &requires_grad));
  CHECK(requires_grad == 1);
  swv_module_free(module);
  swv_tensor_free(same);
  swv_tensor_free(w);
}

static void step_with_gradient(swv_optimizer* optimizer, swv_tensor* w, double value) {
  swv_value args[2];
  swv_tensor* gradient;
  args[0] = swv_value_tensor(w);
  args[1] = swv_value_float(value);
  gradient = call_op("aten::full_like", SWV_MODE_NO_GRAD, args, 2);
  CHECK_OK(swv_tensor_set_grad(w, gradient));
  swv_tensor_free(gradient);
  CHECK_OK(swv_optimizer_step(optimizer));
}

/* A second optimizer that gets the state of a first goes on as that does. */
static void test_optimizer_state(swv_world* world) {
  const char* const names[2][4] = {{"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
                                   {"momentum_buffer", NULL, NULL, NULL}};
  swv_mesh* mesh = make_mesh(world);
  swv_adamw_options adamw = SWV_ADAMW_OPTIONS_INIT;
  swv_sgd_options sgd = SWV_SGD_OPTIONS_INIT;
  int kind, which, k;
  adamw.amsgrad = 1;
  sgd.momentum = 0.9;
  sgd.dampening = 0.5;
  for (kind = 0; kind < 2; ++kind) {
    swv_tensor *w[2], *state, *wrong;
    swv_optimizer* optimizers[2];
    const int64_t three[] = {3};
    w[0] = make_randn(mesh, "[S(0), R]", 5, 3, 1);
    w[1] = make_randn(mesh, "[S(0), R]", 5, 3, 1);
    for (which = 0; which < 2; ++which) {
      swv_tensor* parameter = w[which];
      if (kind == 0) {
        CHECK_OK(swv_optimizer_create_adamw(&parameter, 1, &adamw, &optimizers[which]));
      } else {
        CHECK_OK(swv_optimizer_create_sgd(&parameter, 1, &sgd, &optimizers[which]));
      }
    }
    /* There before the first step: zeros, as large as the parameter. */
    for (k = 0; k < 4 && names[kind][k] != NULL; ++k) {
      int64_t n, i;
      float* data;
      CHECK_OK(swv_optimizer_state(optimizers[0], 0, names[kind][k], &state));
      CHECK(state != NULL);
      data = elements(state, &n);
      CHECK(n == (strcmp(names[kind][k], "step") == 0 ? 1 : 15));
      for (i = 0; i < n; ++i) CHECK(data[i] == 0);
      free(data);
      swv_tensor_free(state);
    }
    step_with_gradient(optimizers[0], w[0], 0.5);
    step_with_gradient(optimizers[0], w[0], -0.25);
    for (k = 0; k < 4 && names[kind][k] != NULL; ++k) {
      swv_tensor* copy;
      CHECK_OK(swv_optimizer_state(optimizers[0], 0, names[kind][k], &state));
      CHECK_OK(swv_optimizer_set_state(optimizers[1], 0, names[kind][k], state));
      CHECK_OK(swv_optimizer_state(optimizers[1], 0, names[kind][k], &copy));
      check_equal(copy, state, 0);
      swv_tensor_free(copy);
      swv_tensor_free(state);
    }
    {
      swv_value args[2];
      args[0] = swv_value_tensor(w[1]);
      args[1] = swv_value_tensor(w[0]);
      swv_tensor_free(call_op("aten::copy_", SWV_MODE_NO_GRAD, args, 2));
    }
    for (which = 0; which < 2; ++which) step_with_gradient(optimizers[which], w[which], 2);
    check_equal(w[1], w[0], 0);
    CHECK_OK(swv_tensor_zeros(three, 1, NULL, &wrong));
    CHECK_FAILS(swv_optimizer_set_state(optimizers[1], 0, names[kind][kind == 0], wrong),
                SWV_CODE_INVALID_ARGUMENT, "[3]");
    CHECK_FAILS(swv_optimizer_set_state(optimizers[1], 0, "mood", wrong), SWV_CODE_NOT_FOUND,
                "mood");
    CHECK_FAILS(swv_optimizer_set_state(optimizers[1], 1, "step", wrong), SWV_CODE_OUT_OF_RANGE,
                "parameter 1 of 1");
    swv_tensor_free(wrong);
    for (which = 0; which < 2; ++which) {
      swv_optimizer_free(optimizers[which]);
      swv_tensor_free(w[which]);
    }
  }
  swv_mesh_free(mesh);
}

static void check_contains(swv_string* string, const char* part) {
  if (strstr(swv_string_data(string), part) == NULL) {
    fprintf(stderr, "'%s' is not in:\n%s\n", part, swv_string_data(string));
    abort();
  }
  swv_string_free(string);
}

/* Gradients of norm 12 wherever they lie become ones of norm 6. */
static void test_clipping(swv_world* world) {
  const int64_t sizes[] = {3, 3};
  swv_mesh* mesh = make_mesh(world);
  swv_layout* layout = make_layout("[S(0), S(1)]");
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  swv_clip_options largest = SWV_CLIP_OPTIONS_INIT;
  swv_tensor *w, *g;
  swv_tensor* parameters[1];
  double norm;
  float* data;
  int64_t n, i;
  options.mesh = mesh;
  options.layout = layout;
  CHECK_OK(swv_tensor_full(sizes, 2, 4, &options, &g));
  options.requires_grad = 1;
  CHECK_OK(swv_tensor_zeros(sizes, 2, &options, &w));
  CHECK_OK(swv_tensor_set_grad(w, g));
  parameters[0] = w;
  largest.norm_type = INFINITY;
  CHECK_OK(swv_clip_grad_norm(parameters, 1, 100, &largest, &norm));
  CHECK(norm == 4);
  CHECK_OK(swv_clip_grad_norm(parameters, 1, 6, NULL, &norm));
  CHECK(fabs(norm - 12) < 1e-5);
  data = elements(g, &n);
  for (i = 0; i < n; ++i) CHECK(fabsf(data[i] - 2) < 1e-5f);
  free(data);
  largest.norm_type = 0;
  CHECK_FAILS(swv_clip_grad_norm(parameters, 1, 6, &largest, NULL), SWV_CODE_INVALID_ARGUMENT,
              "swv_clip_grad_norm: argument 'options.norm_type' is 0; wanted above 0");
  swv_tensor_free(w);
  swv_tensor_free(g);
  swv_layout_free(layout);
  swv_mesh_free(mesh);
}

static swv_status* never_called(void* user_data) {
  (void)user_data;
  return swv_status_new(SWV_CODE_INTERNAL, "called");
}

/* Every rank hears that there is no GPU; nothing is called. */
static void test_captured_step(swv_world* world) {
  const int64_t sizes[] = {4};
  swv_mesh* mesh = make_mesh(world);
  swv_captured_step* step = NULL;
  swv_tensor* parameter;
  int64_t replays = 0;
  CHECK_OK(swv_tensor_ones(sizes, 1, NULL, &parameter));
  CHECK_FAILS(
      swv_captured_step_create(mesh, &parameter, 1, never_called, NULL, &step),
      SWV_CODE_FAILED_PRECONDITION,
      "swv_captured_step_create: a step is captured on a GPU, and LibTorch has no CUDA here: "
      "a tensor on a GPU, which loads it, comes first");
  CHECK(step == NULL);
  CHECK_FAILS(swv_captured_step_create(mesh, NULL, 0, never_called, NULL, &step),
              SWV_CODE_FAILED_PRECONDITION, "no CUDA here");
  CHECK_FAILS(swv_captured_step_create(mesh, NULL, 0, NULL, NULL, &step), SWV_CODE_INVALID_ARGUMENT,
              "swv_captured_step_create: argument 'step' is NULL");
  CHECK_FAILS(swv_captured_step_replay(NULL), SWV_CODE_INVALID_ARGUMENT,
              "swv_captured_step_replay: argument 'step' is NULL");
  CHECK_FAILS(swv_captured_step_replays(NULL, &replays), SWV_CODE_INVALID_ARGUMENT,
              "argument 'step' is NULL");
  swv_captured_step_free(NULL);
  swv_tensor_free(parameter);
  swv_mesh_free(mesh);
}

/* A block of the host's without a weight of its own: relu(x up') down', where the plan meets it. */
static swv_tensor* run_block(const swv_forward* forward, swv_tensor* up, swv_tensor* down,
                             swv_tensor* x) {
  const swv_tensor* const inputs[] = {x, NULL};
  const swv_tensor* outputs[1];
  swv_tensor *in[2], *hidden, *positive, *y, *out;
  swv_scope* scope;
  swv_value args[2];
  CHECK_OK(swv_forward_begin(forward, SWV_MODE_GRAD, inputs, 2, in, &scope));
  CHECK(in[1] == NULL);
  args[0] = swv_value_tensor(in[0]);
  args[1] = swv_value_tensor(up);
  hidden = call_op("aten::linear", SWV_MODE_GRAD, args, 2);
  args[0] = swv_value_tensor(hidden);
  positive = call_op("aten::relu", SWV_MODE_GRAD, args, 1);
  args[0] = swv_value_tensor(positive);
  args[1] = swv_value_tensor(down);
  y = call_op("aten::linear", SWV_MODE_GRAD, args, 2);
  outputs[0] = y;
  CHECK_OK(swv_forward_end(scope, outputs, 1, &out));
  CHECK_FAILS(swv_forward_end(scope, outputs, 1, &out), SWV_CODE_FAILED_PRECONDITION,
              "has ended already");
  swv_scope_free(scope);
  swv_tensor_free(y);
  swv_tensor_free(positive);
  swv_tensor_free(hidden);
  swv_tensor_free(in[0]);
  return out;
}

static void backward_of_sum(swv_tensor* y) {
  swv_value arg = swv_value_tensor(y);
  swv_tensor *squares, *loss;
  swv_value args[2];
  args[0] = args[1] = arg;
  squares = call_op("aten::mul.Tensor", SWV_MODE_GRAD, args, 2);
  args[0] = swv_value_tensor(squares);
  loss = call_op("aten::sum", SWV_MODE_GRAD, args, 1);
  CHECK_OK(swv_tensor_backward(loss, NULL, NULL));
  swv_tensor_free(loss);
  swv_tensor_free(squares);
}

static swv_tensor* make_numbers(int64_t rows, int64_t columns, int seed) {
  float data[64];
  const int64_t sizes[] = {rows, columns};
  swv_tensor* tensor;
  int64_t i;
  for (i = 0; i < rows * columns; ++i) data[i] = (float)((i * 7 + seed * 5) % 11 - 5) / 8;
  CHECK_OK(swv_tensor_from_data(data, (size_t)(rows * columns) * 4, sizes, 2, NULL, &tensor));
  return tensor;
}

/* Two blocks, each a module of its own with children, sequence parallel: what one device computes,
 * gradients too. Sizes do not divide. */
static void test_forwards(swv_world* world) {
  swv_mesh* mesh = make_mesh(world);
  swv_layout *rows = make_layout("[R, S(0)]"), *layout;
  swv_plan* plan;
  swv_module *models[2], *block, *other;
  swv_forward *forwards[2][2], *whole, *second;
  swv_tensor *up[2][2], *down[2][2], *x, *on_mesh, *y[2], *grads[2], *full;
  swv_trace* trace;
  swv_scope* scope;
  swv_string *text, *json;
  swv_bool is_training;
  size_t count;
  int m, b;
  char name[32];
  const swv_named_placement cut_rows = {"tp", "S(0)"}, gathered = {"tp", "R"};
  for (m = 0; m < 2; ++m) { /* one for one device, one for the mesh */
    CHECK_OK(swv_module_create(&models[m]));
    for (b = 0; b < 2; ++b) {
      up[m][b] = make_numbers(7, 5, b);
      down[m][b] = make_numbers(5, 7, b + 2);
      CHECK_OK(swv_module_create(&block));
      CHECK_OK(swv_module_add_parameter(block, "up.weight", up[m][b]));
      snprintf(name, sizeof(name), "blocks.%d", b);
      CHECK_OK(swv_module_add_child(models[m], name, block));
      CHECK_FAILS(swv_module_add_child(models[m], name, block), SWV_CODE_ALREADY_EXISTS, name);
      CHECK_FAILS(swv_module_add_child(models[m], "again", block), SWV_CODE_ALREADY_EXISTS,
                  "'child' is a part of a module already, as 'blocks.");
      CHECK_FAILS(swv_module_add_child(block, "in", models[m]), SWV_CODE_INVALID_ARGUMENT,
                  "'child' has the module as a part of it");
      /* What a child gets later is a part of the whole, too. */
      CHECK_OK(swv_module_add_parameter(block, "down.weight", down[m][b]));
      swv_module_free(block);
    }
    CHECK_OK(swv_module_num_parameters(models[m], &count));
    CHECK(count == 4);
    CHECK_OK(swv_module_child(models[m], "blocks.1", &block));
    CHECK_OK(swv_module_parameter(block, 1, &text, NULL));
    CHECK_TEXT(text, "down.weight");
    CHECK_OK(swv_module_train(models[m], 0));
    CHECK_OK(swv_module_is_training(block, &is_training));
    CHECK(is_training == 0);
    CHECK_OK(swv_module_train(block, 1));
    CHECK_OK(swv_module_is_training(models[m], &is_training));
    CHECK(is_training == 0);
    CHECK_OK(swv_module_is_training(block, &is_training));
    CHECK(is_training == 1);
    swv_module_free(block);
    CHECK_FAILS(swv_module_child(models[m], "blocks.2", &other), SWV_CODE_NOT_FOUND,
                "did you mean 'blocks.0'");
  }

  CHECK_OK(swv_plan_create(&plan));
  CHECK_OK(swv_plan_add(plan, "blocks.*.up.*", &cut_rows, 1));
  CHECK_OK(swv_layout_parse("[R, S(1)]", &layout));
  CHECK_OK(swv_plan_add_layout(plan, "blocks.*.down.*", layout));
  swv_layout_free(layout);
  CHECK_OK(swv_plan_add_forward(plan, "blocks.?.input", &gathered, 1));
  CHECK_OK(swv_plan_add_forward_layout(plan, "blocks.?.output", rows));
  CHECK_OK(swv_plan_add_forward(plan, "blocks.?.input", &gathered, 1)); /* agrees */
  CHECK_OK(swv_plan_to_json(plan, &text));
  CHECK_TEXT(text,
             "{\"parameter\":{\"blocks.*.up.*\":{\"tp\":\"S(0)\"},"
             "\"blocks.*.down.*\":\"[R, S(1)]\"},"
             "\"forward\":{\"blocks.?.input\":{\"tp\":\"R\"},"
             "\"blocks.?.output\":\"[R, S(0)]\"}}");
  /* Nobody has said that the host runs the blocks between begin and end. */
  CHECK_FAILS(swv_module_distribute(models[1], mesh, plan, NULL), SWV_CODE_FAILED_PRECONDITION,
              "the forward of 'blocks.0' cannot be met: it has no parameter of its own; "
              "announce it by swv_module_forward first, and run it by swv_forward_begin, or speak "
              "of the modules in it");
  for (m = 0; m < 2; ++m) {
    for (b = 0; b < 2; ++b) {
      snprintf(name, sizeof(name), "blocks.%d", b);
      CHECK_OK(swv_module_forward(models[m], name, &forwards[m][b]));
    }
  }
  CHECK_OK(swv_plan_resolve(plan, models[1], mesh, &text, &json));
  check_contains(text, "blocks.0.down.weight");
  check_contains(json,
                 "{\"module\":\"blocks.1\",\"value\":\"output.0\",\"placements\":\"[R, S(0)]\","
                 "\"pattern\":\"blocks.?.output\"}");
  CHECK_OK(swv_plan_resolve(plan, models[1], mesh, NULL, &json));
  check_contains(json,
                 "{\"names\":[\"blocks.0.up.weight\"],\"shape\":[7,5],\"is_buffer\":false,"
                 "\"layout\":\"[R, S(0)]\",\"local_shape\":[4,5],\"pattern\":\"blocks.*.up.*\"}");
  CHECK_OK(swv_module_distribute(models[1], mesh, plan, NULL));

  x = make_numbers(9, 5, 1);
  CHECK_OK(swv_tensor_distribute(x, mesh, rows, NULL, &on_mesh));
  swv_module_free(models[1]); /* forwards need no more of the model than their own part */
  CHECK_OK(swv_trace_create(mesh, &trace));
  for (m = 0; m < 2; ++m) {
    swv_tensor* half = run_block(forwards[m][0], up[m][0], down[m][0], m == 0 ? x : on_mesh);
    y[m] = run_block(forwards[m][1], up[m][1], down[m][1], half);
    swv_tensor_free(half);
    backward_of_sum(y[m]);
  }
  for (b = 0; b < 2; ++b) {
    CHECK_OK(swv_finish_grad_sync(&up[1][b], 1));
    CHECK_OK(swv_finish_grad_sync(&down[1][b], 1));
  }
  CHECK_OK(swv_tensor_layout(y[1], &layout));
  CHECK_OK(swv_layout_to_string(layout, &text));
  CHECK_TEXT(text, "[R, S(0)]");
  swv_layout_free(layout);
  CHECK_OK(swv_trace_to_json(trace, &json));
  CHECK(strstr(swv_string_data(json), "\"collective\":\"all_gather") != NULL);
  CHECK(strstr(swv_string_data(json), "\"collective\":\"reduce_scatter") != NULL);
  CHECK(strstr(swv_string_data(json), ".cc:") == NULL); /* no places in the library's own code */
  check_contains(json, "\"module\":\"blocks.1\"");
  swv_trace_free(trace);
  CHECK_OK(swv_tensor_full_tensor(y[1], SWV_MODE_NO_GRAD, &full));
  check_equal(full, y[0], 1e-5F);
  swv_tensor_free(full);
  for (b = 0; b < 2; ++b) {
    for (m = 0; m < 2; ++m) CHECK_OK(swv_tensor_grad(up[m][b], &grads[m]));
    CHECK_OK(swv_tensor_full_tensor(grads[1], SWV_MODE_NO_GRAD, &full));
    check_equal(full, grads[0], 1e-5F);
    for (m = 0; m < 2; ++m) swv_tensor_free(grads[m]);
    swv_tensor_free(full);
    for (m = 0; m < 2; ++m) CHECK_OK(swv_tensor_grad(down[m][b], &grads[m]));
    CHECK_OK(swv_tensor_full_tensor(grads[1], SWV_MODE_NO_GRAD, &full));
    check_equal(full, grads[0], 1e-5F);
    for (m = 0; m < 2; ++m) swv_tensor_free(grads[m]);
    swv_tensor_free(full);
  }

  /* A run that fails in between; a value that the plan speaks of and that is not there. */
  CHECK_OK(swv_forward_begin(forwards[1][0], SWV_MODE_NO_GRAD, NULL, 0, NULL, &scope));
  swv_scope_free(scope);
  CHECK_OK(swv_forward_begin(forwards[1][0], SWV_MODE_NO_GRAD, NULL, 0, NULL, &scope));
  CHECK_FAILS(swv_forward_end(scope, NULL, 0, NULL), SWV_CODE_INVALID_ARGUMENT,
              "the plan's 'blocks.0.input.0': there are only 0 tensors");
  swv_scope_free(scope);
  CHECK_OK(swv_module_forward(models[0], "", &whole));
  CHECK_OK(swv_forward_share(whole, &second));
  swv_forward_free(whole);
  swv_forward_free(second);

  for (m = 0; m < 2; ++m) {
    for (b = 0; b < 2; ++b) {
      swv_forward_free(forwards[m][b]);
      swv_tensor_free(up[m][b]);
      swv_tensor_free(down[m][b]);
    }
    swv_tensor_free(y[m]);
  }
  swv_module_free(models[0]);
  swv_tensor_free(on_mesh);
  swv_tensor_free(x);
  swv_plan_free(plan);
  swv_layout_free(rows);
  swv_mesh_free(mesh);
}

/* What is communicated, why, and which rank holds what. */
static void test_observing(swv_world* world) {
  const int64_t sizes[] = {7, 5};
  swv_mesh* mesh = make_mesh(world);
  swv_layout *whole = make_layout("[R, R]"), *rows = make_layout("[S(0), R]");
  swv_tensor *x = make_randn(mesh, "[R, S(1)]", 8, 12, 0),
             *w = make_randn(mesh, "[R, S(0)]", 12, 4, 0);
  swv_tensor *y, *moved, *positive;
  swv_trace *outer, *inner;
  swv_scope *scope, *source, *module_outer, *module_inner;
  swv_string *text, *json;
  swv_value args[2];
  swv_op *mm, *linear;
  int64_t bytes;
  size_t count;
  CHECK_OK(swv_trace_create(mesh, &outer));
  args[0] = swv_value_tensor(x);
  args[1] = swv_value_tensor(w);
  y = call_op("aten::mm", SWV_MODE_NO_GRAD, args, 2); /* [R, P(sum)], without communication */
  CHECK_OK(swv_trace_num_events(outer, &count));
  CHECK(count == 0);
  CHECK_OK(swv_mesh_enter_source(mesh, "train.rs:1", &scope)); /* inner does not know this one */
  CHECK_OK(swv_mesh_enter_source(mesh, "train.rs:53", &source));
  CHECK_OK(swv_tensor_redistribute(y, whole, SWV_MODE_NO_GRAD, &moved));
  swv_scope_free(source);
  CHECK_OK(swv_trace_create(mesh, &inner));
  swv_scope_free(scope);
  CHECK_OK(swv_mesh_enter_module(mesh, "blocks.0.mlp", &scope));
  args[0] = swv_value_tensor(y);
  positive = call_op("aten::relu", SWV_MODE_NO_GRAD, args, 1);
  swv_scope_free(scope);
  CHECK_OK(swv_trace_num_events(outer, &count));
  CHECK(count == 2);
  CHECK_OK(swv_trace_num_events(inner, &count));
  CHECK(count == 1);
  CHECK_OK(swv_trace_bytes(inner, &bytes));
  CHECK(bytes > 0);
  CHECK_OK(swv_trace_to_string(inner, &text));
  check_contains(text, "blocks.0.mlp");
  CHECK_OK(swv_trace_to_json(outer, &json));
  CHECK(strstr(swv_string_data(json), "\"op\":\"aten::relu\"") != NULL);
  CHECK(strstr(swv_string_data(json), "\"module\":\"blocks.0.mlp\"") != NULL);
  CHECK(strstr(swv_string_data(json), "capi/") == NULL); /* no places in the library's own code */
  /* Asked for by name, as a host's call is, and told where. */
  check_contains(json, "\"op\":\"redistribute\",\"argument\":\"\",\"implicit\":false");
  CHECK_OK(swv_trace_to_json(outer, &json));
  CHECK(strstr(swv_string_data(json), "\"source\":\"train.rs:53\"") != NULL);
  CHECK(strstr(swv_string_data(json), "train.rs:1\"") == NULL);
  check_contains(json, "\"source\":\"\""); /* of the relu, after the scopes */
  CHECK_OK(swv_trace_clear(outer));
  CHECK_OK(swv_trace_num_events(outer, &count));
  CHECK(count == 0);
  /* Scopes end in any order: the inner one's label stays while it does, and none after it. */
  CHECK_OK(swv_mesh_enter_source(mesh, "outer.rs:1", &scope));
  CHECK_OK(swv_mesh_enter_source(mesh, "inner.rs:1", &source));
  CHECK_OK(swv_mesh_enter_module(mesh, "outer_module", &module_outer));
  CHECK_OK(swv_mesh_enter_module(mesh, "inner_module", &module_inner));
  swv_scope_free(scope);
  swv_scope_free(module_outer);
  swv_tensor_free(moved);
  CHECK_OK(swv_tensor_redistribute(y, whole, SWV_MODE_NO_GRAD, &moved));
  CHECK_OK(swv_trace_to_json(outer, &json));
  check_contains(json, "\"source\":\"inner.rs:1\"");
  CHECK_OK(swv_trace_to_json(outer, &json));
  check_contains(json, "\"module\":\"inner_module\"");
  swv_scope_free(source);
  swv_scope_free(module_inner);
  CHECK_OK(swv_trace_clear(outer));
  swv_tensor_free(moved);
  CHECK_OK(swv_tensor_redistribute(y, whole, SWV_MODE_NO_GRAD, &moved));
  CHECK_OK(swv_trace_to_json(outer, &json));
  check_contains(json, "\"source\":\"\"");
  CHECK_OK(swv_trace_to_json(outer, &json));
  check_contains(json, "\"module\":\"\"");
  swv_trace_free(outer); /* in any order */
  swv_trace_free(inner);

  CHECK_OK(swv_op_find("aten::mm", &mm));
  args[0] = swv_value_tensor(x);
  args[1] = swv_value_tensor(w);
  CHECK_OK(swv_op_explain(mm, args, 2, &text, &json));
  check_contains(text, "aten::mm on DeviceMesh(dp=2, tp=2)");
  check_contains(json, "\"has_rule\":true");
  CHECK_OK(swv_op_find("aten::linear", &linear));
  CHECK_FAILS(swv_op_explain(linear, args, 2, NULL, &json), SWV_CODE_FAILED_PRECONDITION,
              "aten::linear");
  swv_op_free(linear);
  swv_op_free(mm);

  CHECK_OK(swv_layout_picture(rows, mesh, sizes, 2, &text));
  check_contains(text, "4:7");
  CHECK_OK(swv_tensor_picture(x, &text));
  check_contains(text, "[8, 12] as [R, S(1)] on DeviceMesh(dp=2, tp=2)");
  swv_tensor_free(positive);
  swv_tensor_free(moved);
  swv_tensor_free(y);
  swv_tensor_free(w);
  swv_tensor_free(x);
  swv_layout_free(rows);
  swv_layout_free(whole);
  swv_mesh_free(mesh);
}

static const char* run_directory; /* of all ranks */

/* What is saved, changed and loaded is there again. */
static void test_saving(swv_world* world) {
  swv_mesh* mesh = make_mesh(world);
  swv_tensor *w = make_randn(mesh, "[S(0), R]", 7, 5, 1), *before, *after;
  swv_module* model;
  swv_optimizer* optimizer;
  swv_state* state;
  swv_checkpointer* checkpointer;
  int64_t step = 0;
  CHECK_OK(swv_module_create(&model));
  CHECK_OK(swv_module_add_parameter(model, "w", w));
  CHECK_OK(swv_optimizer_create_adamw(&w, 1, NULL, &optimizer));
  CHECK_OK(swv_tensor_full_tensor(w, SWV_MODE_NO_GRAD, &before));

  CHECK_OK(swv_state_create(&state));
  CHECK_OK(swv_state_add_module(state, NULL, model));               /* "model.w" */
  CHECK_OK(swv_state_add_optimizer(state, NULL, optimizer, model)); /* "optimizer.w.exp_avg" */
  CHECK_OK(swv_state_set_value(state, "epoch", "3"));
  CHECK_OK(swv_checkpointer_create(mesh, run_directory, NULL, &checkpointer));
  CHECK_OK(swv_checkpointer_save_async(checkpointer, 100, state, NULL)); /* beside training */
  step_with_gradient(optimizer, w, 2);
  CHECK_OK(swv_checkpointer_load(checkpointer, state, NULL, &step, NULL)); /* the newest */

  CHECK(step == 100);
  CHECK_OK(swv_tensor_full_tensor(w, SWV_MODE_NO_GRAD, &after));
  check_equal(before, after, 0);
  swv_checkpointer_free(checkpointer);
  swv_state_free(state);
  swv_optimizer_free(optimizer);
  swv_module_free(model);
  swv_tensor_free(after);
  swv_tensor_free(before);
  swv_tensor_free(w);
  swv_mesh_free(mesh);
}

static swv_status* rank_main(void* user_data, swv_world* world) {
  CHECK(user_data == &drops);
  test_world_and_collectives(world);
  test_mesh(world);
  test_layout(world);
  test_plain_tensors();
  test_dtypes(world);
  test_text(world);
  test_values();
  test_factories_on_a_mesh(world);
  test_sharded(world);
  test_cost_model(world);
  test_autograd(world);
  test_checkpoint(world);
  test_unsharded_weight(world);
  test_training(world);
  test_tied_weights(world);
  test_optimizer_state(world);
  test_clipping(world);
  test_captured_step(world);
  test_forwards(world);
  test_observing(world);
  test_saving(world);
  return NULL;
}

static swv_status* failing_rank(void* user_data, swv_world* world) {
  int32_t rank;
  swv_comm* comm;
  swv_status* status;
  (void)user_data;
  CHECK_OK(swv_world_rank(world, &rank));
  if (rank == 2) return swv_status_new(SWV_CODE_DATA_LOSS, "disk on fire");
  CHECK_OK(swv_world_comm(world, &comm));
  status = swv_comm_barrier(comm, NULL, NULL);
  CHECK(swv_status_code(status) == SWV_CODE_ABORTED ||
        swv_status_code(status) == SWV_CODE_UNAVAILABLE);
  swv_comm_free(comm);
  return status;
}

/* Ranks on threads of the host, each step of a rank on another thread. */
static void* step_on_thread(void* argument) {
  swv_tensor** x = (swv_tensor**)argument;
  swv_value args[2];
  swv_tensor* next;
  args[0] = args[1] = swv_value_tensor(*x);
  next = call_op("aten::matmul", SWV_MODE_GRAD, args, 2);
  swv_tensor_free(*x);
  *x = next;
  return NULL;
}
static void* check_on_thread(void* argument) {
  int64_t n, i;
  float* data = elements(*(swv_tensor**)argument, &n);
  CHECK(n == 16);
  for (i = 0; i < n; ++i) CHECK(data[i] == 64); /* 0.5, 1, 4, 64 */
  free(data);
  return NULL;
}
static void test_any_thread(void) {
  swv_world* worlds[2];
  swv_mesh* meshes[2];
  swv_tensor* x[2];
  pthread_t threads[2];
  const swv_mesh_dim dim = {"x", 2};
  const int64_t sizes[] = {4, 4};
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  swv_layout* layout = make_layout("[S(0)]");
  int rank, step;
  CHECK_OK(swv_world_create_local(2, NULL, worlds));
  for (rank = 0; rank < 2; ++rank) {
    CHECK_OK(swv_mesh_create(worlds[rank], &dim, 1, &meshes[rank]));
    options.mesh = meshes[rank];
    options.layout = layout;
    CHECK_OK(swv_tensor_full(sizes, 2, 0.5, &options, &x[rank]));
  }
  for (step = 0; step < 4; ++step) {
    for (rank = 0; rank < 2; ++rank) {
      CHECK(pthread_create(&threads[rank], NULL, step < 3 ? step_on_thread : check_on_thread,
                           &x[rank]) == 0);
    }
    for (rank = 0; rank < 2; ++rank) CHECK(pthread_join(threads[rank], NULL) == 0);
  }
  for (rank = 0; rank < 2; ++rank) {
    swv_tensor_free(x[rank]);
    swv_mesh_free(meshes[rank]);
    swv_world_free(worlds[rank]);
  }
  swv_layout_free(layout);
}

static void test_counting(void) {
  swv_world* world;
  swv_mesh* mesh;
  const swv_mesh_dim dims[] = {{"dp", 1024}, {"tp", 8}};
  swv_comm_counter counters[SWV_COLLECTIVE_RECV + 1];
  size_t count;
  swv_tensor *x, *moved;
  swv_layout* replicated = make_layout("[R, R]");
  CHECK_OK(swv_world_create_counting(8191, 8192, &world));
  CHECK_OK(swv_mesh_create(world, dims, 2, &mesh));
  x = make_randn(mesh, "[R, S(0)]", 64, 64, 0);
  CHECK_OK(swv_tensor_redistribute(x, replicated, SWV_MODE_NO_GRAD, &moved));
  CHECK_OK(swv_world_counters(world, counters, SWV_COLLECTIVE_RECV + 1, &count));
  CHECK(counters[SWV_COLLECTIVE_ALL_GATHER].calls + counters[SWV_COLLECTIVE_ALL_GATHER_V].calls ==
        1);
  swv_tensor_free(moved);
  swv_tensor_free(x);
  swv_layout_free(replicated);
  swv_mesh_free(mesh);
  swv_world_free(world);
}

int main(void) {
  const int64_t before = swv_live_handles();
  const char* const folder = getenv("TEST_TMPDIR");
  char directory[4096];
  snprintf(directory, sizeof(directory), "%s/capi_test.%ld", folder == NULL ? "/tmp" : folder,
           (long)getpid());
  run_directory = directory;
  CHECK(swv_version() == SWV_VERSION);
  CHECK(strstr(swv_build_info(), "LibTorch 2.") != NULL);
  CHECK(strcmp(swv_dtype_name(SWV_DTYPE_BF16), "bf16") == 0 && swv_dtype_size(SWV_DTYPE_BF16) == 2);
  CHECK_OK(swv_set_num_threads(1));
  CHECK_OK(swv_seed(1));
  CHECK_OK(swv_run_ranks(RANKS, rank_main, &drops, NULL));
  CHECK(drops == 2 * RANKS); /* two functions a rank, each dropped once */
  CHECK_FAILS(swv_run_ranks(RANKS, failing_rank, NULL, NULL), SWV_CODE_DATA_LOSS,
              "rank 2: disk on fire");
  test_frozen();
  test_any_thread();
  test_counting();
  CHECK(swv_live_handles() == before); /* nothing leaked, in checked mode */
  puts("PASS");
  return 0;
}

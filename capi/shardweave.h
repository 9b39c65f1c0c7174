/* shardweave.h: the C interface of Shardweave, sharded training on LibTorch.
 *
 * Four ranks multiply two tensors that lie on a mesh, and differentiate:
 *
 *   #include <shardweave.h>
 *   #include <stdio.h>
 *
 *   static swv_status* rank_main(void* unused, swv_world* world) {
 *     const swv_mesh_dim dims[] = {{"dp", 2}, {"tp", 2}};
 *     const int64_t sizes[] = {8, 6};
 *     swv_mesh* mesh = NULL;
 *     swv_layout* layout = NULL;
 *     swv_tensor* x = NULL;
 *     swv_op *mul = NULL, *sum = NULL;
 *     swv_value y = SWV_NONE, loss = SWV_NONE;
 *     swv_status* status;
 *     (void)unused;
 *
 *     if ((status = swv_mesh_create(world, dims, 2, &mesh)) != NULL) goto done;
 *     if ((status = swv_layout_parse("[S(0), S(1)]", &layout)) != NULL) goto done;
 *     swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
 *     options.mesh = mesh;
 *     options.layout = layout;
 *     options.requires_grad = 1;
 *     if ((status = swv_tensor_randn(sizes, 2, &options, &x)) != NULL) goto done;
 *
 *     if ((status = swv_op_find("aten::mul.Tensor", &mul)) != NULL) goto done;
 *     if ((status = swv_op_find("aten::sum", &sum)) != NULL) goto done;
 *     const swv_value factors[] = {swv_value_tensor(x), swv_value_tensor(x)};
 *     if ((status = swv_op_call(mul, SWV_MODE_GRAD, factors, 2, &y, 1, NULL)) != NULL) goto done;
 *     if ((status = swv_op_call(sum, SWV_MODE_GRAD, &y, 1, &loss, 1, NULL)) != NULL) goto done;
 *     status = swv_tensor_backward(loss.as.tensor, NULL, NULL);      // x's gradient is 2 x
 *   done:
 *     swv_value_clear(&loss);
 *     swv_value_clear(&y);
 *     swv_op_free(sum);
 *     swv_op_free(mul);
 *     swv_tensor_free(x);
 *     swv_layout_free(layout);
 *     swv_mesh_free(mesh);
 *     return status;
 *   }
 *
 *   int main(void) {
 *     swv_status* status = swv_run_ranks(4, rank_main, NULL, NULL);  // a thread per rank
 *     if (status != NULL) fprintf(stderr, "%s\n", swv_status_message(status));
 *     int failed = status != NULL;
 *     swv_status_free(status);
 *     return failed;
 *   }
 *
 * Errors. A function that can fail returns a swv_status*: NULL is success, anything else is an
 * error that the caller owns and frees. Its message begins with the name of the function and names
 * the argument that was wrong. Outputs come last, are named out_..., and are untouched on failure.
 * A NULL where none is allowed is an error, never a crash; "may be NULL" is said where it holds.
 *
 * Handles. A swv_<noun>* is opaque. A function that writes one to out_<noun> gives it to the
 * caller, who ends it with swv_<noun>_free: once, in any order, from any thread. _free accepts
 * NULL. An object lives as long as anything needs it: a tensor keeps its mesh alive, a mesh its
 * world. Two handles may mean one object; what is done through one is seen through the other.
 * swv_<noun>_share makes a second handle. What ends with its _free (swv_scope, swv_coalescing,
 * swv_grad_sync), and what is only read and copied (swv_status, swv_string), has none. const says
 * that a call does not change what the handle stands for: its data, its gradient, its settings.
 *
 * Input is borrowed for the call. Text is UTF-8 and ends with NUL. Arrays are a pointer and a
 * number of elements; the pointer may be NULL if the number is 0. Text comes out as a swv_string;
 * other arrays are copied into the caller's memory, as many elements as it has room for, and the
 * full number is reported (out_count), so that a call with no room asks for the number.
 *
 * Structs that may grow begin with struct_size, which the SWV_..._INIT initializers fill in (it
 * ends with the last member, which sizeof need not). Caller and library may be of different
 * versions: members that the caller does not have keep their defaults, or are not written; members
 * that the library does not have must be 0, else SWV_CODE_UNIMPLEMENTED, and are not written; 0 is
 * the default of every member that comes later. Of a struct that the library passes to a callback,
 * struct_size is the library's. A pointer to options may be NULL: all defaults. reserved members
 * must be 0. Of an array of such structs the elements have one struct_size. Flags (swv_bool) are 0
 * or 1. Enumerations are int32_t whose numbers never change; a number that is none of them is an
 * error.
 *
 * Numbers. Ranks and numbers of ranks are int32_t, as are numbers of dimensions. Elements, sizes of
 * dimensions (of tensors and of meshes), places in them and bytes are int64_t. The length of an
 * array is size_t.
 *
 * Callbacks return a status as functions here do, and the library takes it over. A callback that is
 * kept beyond the call comes with `drop`, which runs exactly once when the library has done with
 * it, also if the call that took it failed. (Not if struct_size is no size: then there is no drop
 * to find.)
 *
 * Threads. A rank (its world, meshes, tensors, modules, optimizers) may be driven from any thread,
 * and from another thread at every call, but by one thread at a time; different ranks run in
 * parallel. Nothing depends on thread-local state (but for swv_deferred_init, which says so):
 * whether operators are recorded for gradients is an argument of each call. Operators, layouts,
 * plans, strings and statuses belong to no rank and may be used by several threads at once, as may
 * swv_comm_abort, swv_world_abort and swv_work_wait.
 * Functions marked COLLECTIVE communicate: all ranks of the mesh or the group call them in the same
 * order. So do operators on sharded tensors.
 *
 * Checks. With SWV_CHECK_HANDLES=1 in the environment, or after swv_set_handle_checks before the first
 * handle is made, every handle is looked up before it is used: one of another kind, or that was freed,
 * or that never was one, is an error; _free says so where swv_set_log wants it. SWV_CHECK_HANDLES=abort
 * ends the process there. (Without, only the kind is looked at.)
 *
 * C11 and C++. Link with -lshardweave (pkg-config shardweave). No symbol of LibTorch is exported.
 */
#ifndef SHARDWEAVE_H_
#define SHARDWEAVE_H_

#include <stddef.h>
#include <stdint.h>

#if UINTPTR_MAX != UINT64_MAX || SIZE_MAX != UINT64_MAX
#error "Shardweave is for 64-bit machines: its structs have other places for their members here"
#endif

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define SWV_API
#else
#define SWV_API __attribute__((visibility("default")))
#endif

/* A dropped status is a leak and an unseen error. */
#if defined(__GNUC__) /* Clang too; it wants [[nodiscard]] before SWV_API */
#define SWV_MUST_USE __attribute__((warn_unused_result))
#elif defined(__cplusplus) && __cplusplus >= 201703L
#define SWV_MUST_USE [[nodiscard]]
#else
#define SWV_MUST_USE
#endif

/* The size of `type` up to its member `last`: what struct_size says. */
#define SWV_SIZE_TO(type, last) (offsetof(type, last) + sizeof(((type*)NULL)->last))

typedef int32_t swv_bool; /* 0 or 1 */

/* ---- Version ----------------------------------------------------------------------------------
 * Minor versions add functions, members at the end of structs, and numbers to enumerations; a
 * program that was built with an older minor version goes on working. Before 1.0 a minor version
 * may also break programs, and then changes the library's soname. */

#define SWV_VERSION_MAJOR 0
#define SWV_VERSION_MINOR 4
#define SWV_VERSION_PATCH 0
#define SWV_VERSION (SWV_VERSION_MAJOR * 1000000 + SWV_VERSION_MINOR * 1000 + SWV_VERSION_PATCH)

/* SWV_VERSION as the library was built. */
SWV_API int32_t swv_version(void);
/* "0.4.0; LibTorch 2.11.0; backends inproc, gloo, counting". Lives as long as the library. */
SWV_API const char* swv_build_info(void);

/* ---- Handles --------------------------------------------------------------------------------- */

typedef struct swv_status swv_status;                     /* an error */
typedef struct swv_string swv_string;                     /* text that the library made */
typedef struct swv_world swv_world;                       /* one rank among all */
typedef struct swv_comm swv_comm;                         /* a group of ranks that exchange bytes */
typedef struct swv_work swv_work;                         /* an operation under way */
typedef struct swv_coalescing swv_coalescing;             /* several operations as one */
typedef struct swv_mesh swv_mesh;                         /* an n-dimensional grid of ranks */
typedef struct swv_scope swv_scope;                       /* what holds until it is freed */
typedef struct swv_layout swv_layout;                     /* how a tensor lies on a mesh */
typedef struct swv_tensor swv_tensor;                     /* plain or sharded */
typedef struct swv_op swv_op;                             /* an operator of LibTorch */
typedef struct swv_function_context swv_function_context; /* of one call of a custom function */
typedef struct swv_module swv_module;                     /* parameters and buffers by name */
typedef struct swv_forward swv_forward;                   /* of a module, in the host's code */
typedef struct swv_plan swv_plan;                         /* placements by name */
typedef struct swv_optimizer swv_optimizer;
typedef struct swv_grad_sync swv_grad_sync;         /* gradients that leave during backward */
typedef struct swv_grad_scaler swv_grad_scaler;     /* scales losses, skips steps */
typedef struct swv_captured_step swv_captured_step; /* a step as a CUDA graph */
typedef struct swv_trace swv_trace;                 /* a record of communication */
typedef struct swv_token_file swv_token_file;       /* token ids in a file */
typedef struct swv_loader swv_loader;               /* of batches of them */

/* ---- Status and strings ---------------------------------------------------------------------- */

/* The numbers of google.rpc.Code. */
typedef int32_t swv_code;
enum {
  SWV_CODE_OK = 0,
  SWV_CODE_CANCELLED = 1,
  SWV_CODE_UNKNOWN = 2,
  SWV_CODE_INVALID_ARGUMENT = 3,
  SWV_CODE_DEADLINE_EXCEEDED = 4, /* a rank did not come in time; the message names it */
  SWV_CODE_NOT_FOUND = 5,
  SWV_CODE_ALREADY_EXISTS = 6,
  SWV_CODE_PERMISSION_DENIED = 7,
  SWV_CODE_RESOURCE_EXHAUSTED = 8,  /* memory, threads */
  SWV_CODE_FAILED_PRECONDITION = 9, /* also: ranks called different things */
  SWV_CODE_ABORTED = 10,            /* a rank failed, or gave up */
  SWV_CODE_OUT_OF_RANGE = 11,
  SWV_CODE_UNIMPLEMENTED = 12,
  SWV_CODE_INTERNAL = 13,
  SWV_CODE_UNAVAILABLE = 14, /* a rank is gone, a server does not answer */
  SWV_CODE_DATA_LOSS = 15,
  SWV_CODE_UNAUTHENTICATED = 16
};

/* An error of the caller's own, to be returned from a callback. `message` may be NULL. Never
 * NULL. */
SWV_API SWV_MUST_USE swv_status* swv_status_new(swv_code code, const char* message);
/* The same of an error that is a rank's, as swv_status_rank says; -1: not known. */
SWV_API SWV_MUST_USE swv_status* swv_status_new_of_rank(swv_code code, const char* message,
                                                        int32_t rank);
/* SWV_CODE_OK for NULL. */
SWV_API swv_code swv_status_code(const swv_status* status);
/* Lives as long as the status; "" for NULL. */
SWV_API const char* swv_status_message(const swv_status* status);
/* The world rank that failed, where the error is another rank's, or one of swv_run_ranks; -1: the
 * caller's own error, or not known. */
SWV_API int32_t swv_status_rank(const swv_status* status);
SWV_API void swv_status_free(swv_status* status);
/* "INVALID_ARGUMENT"; "UNKNOWN_CODE" for a number that is none. Lives as long as the library. */
SWV_API const char* swv_code_name(swv_code code);

/* Ends with NUL, lives as long as the string; "" for NULL. */
SWV_API const char* swv_string_data(const swv_string* string);
/* Without the NUL; 0 for NULL. */
SWV_API size_t swv_string_size(const swv_string* string);
SWV_API void swv_string_free(swv_string* string);

/* How many handles there are of those that were made with checks; -1 without checks. For tests that
 * look for leaks. */
SWV_API int64_t swv_live_handles(void);

typedef int32_t swv_checks;
enum {
  SWV_CHECKS_OFF = 0,
  SWV_CHECKS_REPORT = 1, /* as SWV_CHECK_HANDLES=1 */
  SWV_CHECKS_ABORT = 2   /* as SWV_CHECK_HANDLES=abort */
};

/* Whether handles are looked up, from now on, in the whole process. Of a handle that was made
 * without checks only the kind is looked at, and what never was a handle may be taken for one of
 * those: best called before the first handle is made. */
SWV_API SWV_MUST_USE swv_status* swv_set_handle_checks(swv_checks checks);

/* What the library has to say while no call fails: who is waited for, which operator gathers.
 * `message` is one line, without an end of line, and lives during the call. Any thread, several at
 * once; calls nothing of this library. */
typedef void (*swv_log_fn)(void* user_data, const char* message);

/* Where that goes, in the whole process, in place of what was set before, whose drop runs when no
 * thread is in it any more. Any thread, at any time. It belongs to the process, as stderr does, and
 * not to a world: there is something to say before a world is there (who does not come), after it
 * is gone (a handle that was freed twice), and by LibTorch, which knows no worlds. log NULL: to
 * stderr, with "shardweave: " before it, as without this call; warnings (a weight that is gathered, an
 * operator without a rule) then as LibTorch writes its own. What LibTorch's TCP store says of a
 * server that is gone goes to stderr in any case. drop may be NULL. */
SWV_API SWV_MUST_USE swv_status* swv_set_log(swv_log_fn log, void* user_data,
                                             void (*drop)(void* user_data));

/* ---- Element types, devices, reductions ------------------------------------------------------ */

typedef int32_t swv_dtype;
enum {
  SWV_DTYPE_DEFAULT = 0, /* as a default: SWV_DTYPE_F32 */
  SWV_DTYPE_F32 = 1,
  SWV_DTYPE_F64 = 2,
  SWV_DTYPE_F16 = 3,
  SWV_DTYPE_BF16 = 4,
  SWV_DTYPE_F8_E4M3FN = 5,
  SWV_DTYPE_F8_E5M2 = 6,
  SWV_DTYPE_I8 = 7,
  SWV_DTYPE_I16 = 8,
  SWV_DTYPE_I32 = 9,
  SWV_DTYPE_I64 = 10,
  SWV_DTYPE_U8 = 11,
  SWV_DTYPE_U16 = 12,
  SWV_DTYPE_U32 = 13,
  SWV_DTYPE_U64 = 14,
  SWV_DTYPE_BOOL = 15,
  SWV_DTYPE_C64 = 16, /* complex: two f32 */
  SWV_DTYPE_C128 = 17,
  SWV_DTYPE_C32 = 18 /* complex: two f16 */
};
/* Bytes of one element; 0 for a number that is no dtype. */
SWV_API size_t swv_dtype_size(swv_dtype dtype);
/* "f32"; "unknown" for a number that is no dtype. Lives as long as the library. */
SWV_API const char* swv_dtype_name(swv_dtype dtype);

typedef int32_t swv_device_type;
enum { SWV_DEVICE_CPU = 0, SWV_DEVICE_CUDA = 1 };

typedef struct swv_device {
  swv_device_type type;
  int32_t index;
} swv_device;

typedef int32_t swv_reduce_op;
enum {
  SWV_REDUCE_SUM = 0,
  SWV_REDUCE_AVG = 1,
  SWV_REDUCE_MIN = 2,
  SWV_REDUCE_MAX = 3,
  SWV_REDUCE_PRODUCT = 4
};

/* ---- Worlds -----------------------------------------------------------------------------------
 * A world is one rank's view of all ranks. Ranks are threads of one process (swv_run_ranks,
 * swv_world_create_local) or processes (swv_world_from_environment, swv_world_join). */

typedef struct swv_world_options {
  size_t struct_size;
  const char* backend; /* "gloo", "nccl"; NULL: "gloo". Ranks that are threads: not used */
  const char* network_interface; /* NULL: loopback on one host, else by host name */
  int64_t timeout_ms; /* default deadline of rendezvous and collectives; 0: five minutes */
  /* This rank's GPU, as CUDA numbers those that are visible. The CPU: with "nccl" that of the local
   * rank, with "gloo" none. With "gloo" a GPU's memory goes by way of the host: slowly, but several
   * processes may have one GPU. Ranks that are threads: not used. */
  swv_device device;
  /* Memory of a GPU moves by a backend of the caller ("Backends of third parties"), on all ranks alike;
   * `backend` and `device` are not given then. NULL: as those say. Ranks that are threads of
   * swv_run_ranks or swv_world_create_local: SWV_CODE_INVALID_ARGUMENT. */
  const struct swv_device_backend* device_backend;
} swv_world_options;
/* clang-format off */
#define SWV_WORLD_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_world_options, device_backend), NULL, NULL, 0, {SWV_DEVICE_CPU, 0}, NULL}
/* clang-format on */

/* What a rank does. `world` is borrowed. */
typedef swv_status* (*swv_rank_fn)(void* user_data, swv_world* world);

/* Runs `body` on num_ranks threads and joins them. If one fails, the others' collectives fail,
 * naming it; the result is the failure that came first, with its rank in the message. An
 * options.backend that no world can have here (not NULL, "inproc" or "gloo") is
 * SWV_CODE_INVALID_ARGUMENT. */
SWV_API SWV_MUST_USE swv_status* swv_run_ranks(int32_t num_ranks, swv_rank_fn body, void* user_data,
                                               const swv_world_options* options);

/* The same for hosts with threads of their own: writes num_ranks worlds, that of rank r to
 * out_worlds[r]. A world that is freed, with all that was made from it, has left: ranks that wait
 * for it get SWV_CODE_UNAVAILABLE. A rank that fails calls swv_world_abort. */
SWV_API SWV_MUST_USE swv_status* swv_world_create_local(int32_t num_ranks,
                                                        const swv_world_options* options,
                                                        swv_world** out_worlds);

/* Joins the ranks that torchrun, Slurm, Open MPI, PMI, PMIx, Kubernetes, or RANK, WORLD_SIZE,
 * MASTER_ADDR and MASTER_PORT describe. SWV_CODE_NOT_FOUND if nothing has started this process.
 * COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_world_from_environment(const swv_world_options* options,
                                                            swv_world** out_world);

typedef struct swv_rendezvous {
  size_t struct_size;
  int32_t rank;
  int32_t world_size; /* 1 .. 2^20 */
  const char* file;   /* a path that all ranks can open and only this run uses; or NULL and */
  const char* host;   /* where rank 0 serves a store, as the others reach it */
  int32_t port;       /* 1 .. 65535 */
  int32_t local_rank; /* among the ranks of this machine; -1: to be found out */
  const char* run;    /* names this start of the program, the same on all ranks; NULL: "run" */
} swv_rendezvous;
#define SWV_RENDEZVOUS_INIT {SWV_SIZE_TO(swv_rendezvous, run), 0, 1, NULL, NULL, 0, -1, NULL}

/* Joins the ranks that the caller describes. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_world_join(const swv_rendezvous* rendezvous,
                                                const swv_world_options* options,
                                                swv_world** out_world);

/* One rank of a world of any size that is not there: communication is counted, nothing moves. */
SWV_API SWV_MUST_USE swv_status* swv_world_create_counting(int32_t rank, int32_t num_ranks,
                                                           swv_world** out_world);

/* A second handle. */
SWV_API SWV_MUST_USE swv_status* swv_world_share(const swv_world* world, swv_world** out_world);
SWV_API void swv_world_free(swv_world* world);

SWV_API SWV_MUST_USE swv_status* swv_world_rank(const swv_world* world, int32_t* out_rank);
SWV_API SWV_MUST_USE swv_status* swv_world_size(const swv_world* world, int32_t* out_size);
/* Among the ranks of this machine. */
SWV_API SWV_MUST_USE swv_status* swv_world_local_rank(const swv_world* world,
                                                      int32_t* out_local_rank);
/* The group of all ranks. */
SWV_API SWV_MUST_USE swv_status* swv_world_comm(const swv_world* world, swv_comm** out_comm);
/* Breaks all groups of this world, on all ranks where the backend can: pending and later operations
 * fail with SWV_CODE_ABORTED and `reason`. Any thread. */
SWV_API SWV_MUST_USE swv_status* swv_world_abort(swv_world* world, const char* reason);

/* ---- Communicators ----------------------------------------------------------------------------
 * Operations over memory of the caller, all COLLECTIVE. swv_comm_start issues one. With out_work
 * the memory must stay alive and be left alone until swv_work_wait or swv_work_is_done says that it
 * is done; with out_work NULL the call waits. Ranks that call different things all get
 * SWV_CODE_FAILED_PRECONDITION, which names both calls; a rank that does not come is
 * SWV_CODE_DEADLINE_EXCEEDED. An error that is not of this rank's arguments alone breaks the group.
 */

/* `count` elements at `data`; data may be NULL if count is 0. The dtype has to be said. Complex numbers
 * are not moved (give twice as many F32 or F64), 8-bit floats not reduced; SWV_REDUCE_AVG of integers
 * rounds towards zero. */
typedef struct swv_buffer {
  size_t struct_size;
  void* data; /* only read where the buffer is an input */
  int64_t count;
  swv_dtype dtype;
  swv_device device;
  int32_t reserved; /* 0 */
  /* Of a GPU: a cudaStream_t (NULL: the default one), that of both sides of an operation, which
   * begins when the GPU has done what is on it by now. It lives until the operation is done. */
  void* stream;
} swv_buffer;
#define SWV_BUFFER_INIT \
  {SWV_SIZE_TO(swv_buffer, stream), NULL, 0, SWV_DTYPE_DEFAULT, {SWV_DEVICE_CPU, 0}, 0, NULL}

SWV_API SWV_MUST_USE swv_status* swv_comm_share(const swv_comm* comm, swv_comm** out_comm);
SWV_API void swv_comm_free(swv_comm* comm);

SWV_API SWV_MUST_USE swv_status* swv_comm_rank(const swv_comm* comm, int32_t* out_rank);
SWV_API SWV_MUST_USE swv_status* swv_comm_size(const swv_comm* comm, int32_t* out_size);
SWV_API SWV_MUST_USE swv_status* swv_comm_name(const swv_comm* comm, swv_string** out_name);
/* "inproc", "gloo", ... */
SWV_API SWV_MUST_USE swv_status* swv_comm_backend(const swv_comm* comm, swv_string** out_backend);
/* The world rank of each of its ranks. */
SWV_API SWV_MUST_USE swv_status* swv_comm_world_ranks(const swv_comm* comm, int32_t* ranks,
                                                      size_t capacity, size_t* out_count);

/* What an operation does with in and out:
 *   all_reduce         out[i] = the reduction of all ranks' in[i]. in and out may be one memory.
 *   all_gather         out = all ranks' in, in rank order
 *   all_gather_v       the same with out_counts[r] elements from rank r
 *   reduce_scatter     out = this rank's part of the reduction of all ranks' in
 *   reduce_scatter_v   the same with in_counts[r] elements for rank r
 *   all_to_all         part r of in goes to rank r, part r of out came from rank r
 *   all_to_all_v       the same with parts of in_counts[r] and out_counts[r] elements
 *   broadcast          every rank's out becomes the root's; there is no in
 *   reduce             as all_reduce, but only the root has an out
 *   gather             as all_gather, but only the root has an out
 *   scatter            part r of the root's in goes to rank r; only the root has an in
 *   barrier            neither in nor out: done when all ranks have called it
 *   send, recv         in goes to the recv of peer with the same message_tag, in order; a recv has
 *                      an out. Not COLLECTIVE. peer may be this rank, which then issues the first
 *                      of the two with out_work. */
typedef int32_t swv_collective_kind;
enum {
  SWV_COLLECTIVE_ALL_REDUCE = 0,
  SWV_COLLECTIVE_ALL_GATHER = 1,
  SWV_COLLECTIVE_ALL_GATHER_V = 2,
  SWV_COLLECTIVE_REDUCE_SCATTER = 3,
  SWV_COLLECTIVE_REDUCE_SCATTER_V = 4,
  SWV_COLLECTIVE_ALL_TO_ALL = 5,
  SWV_COLLECTIVE_ALL_TO_ALL_V = 6,
  SWV_COLLECTIVE_BROADCAST = 7,
  SWV_COLLECTIVE_REDUCE = 8,
  SWV_COLLECTIVE_GATHER = 9,
  SWV_COLLECTIVE_SCATTER = 10,
  SWV_COLLECTIVE_BARRIER = 11,
  SWV_COLLECTIVE_SEND = 12,
  SWV_COLLECTIVE_RECV = 13
};

/* One rank's part in one operation. Pointers are NULL where the kind has none; what only the root
 * has may be NULL elsewhere. Numbers that the kind does not have are not looked at. */
typedef struct swv_collective {
  size_t struct_size;
  swv_collective_kind kind;
  swv_reduce_op reduce_op; /* of reductions */
  int32_t peer;            /* of send and recv; of what has a root, that */
  int32_t message_tag;     /* of send and recv */
  const swv_buffer* in;
  const swv_buffer* out;
  const int64_t* in_counts;  /* of reduce_scatter_v and all_to_all_v; else NULL */
  const int64_t* out_counts; /* of all_gather_v and all_to_all_v; else NULL */
  size_t num_counts;         /* of these: the size of the group */
  int64_t timeout_ms;        /* 0: the group's default */
  const char* tag;           /* shown in errors and records; may be NULL */
} swv_collective;
#define SWV_COLLECTIVE_INIT \
  {SWV_SIZE_TO(swv_collective, tag), 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0, 0, NULL}

/* Issues the operation. swv_comm_all_reduce and the like, below, are this with what their kinds
 * have, and errors call the operation and its arguments as they do. */
SWV_API SWV_MUST_USE swv_status* swv_comm_start(swv_comm* comm, const swv_collective* collective,
                                                swv_work** out_work);

/* Does not wait for other ranks. Of a GPU's memory that goes by way of the host, what has come is copied
 * back here, after what its stream has to do before; anything else never blocks. */
SWV_API SWV_MUST_USE swv_status* swv_work_is_done(const swv_work* work, swv_bool* out_is_done);
/* Until done or the operation's deadline. Any number of times, from any thread. */
SWV_API SWV_MUST_USE swv_status* swv_work_wait(const swv_work* work);
/* Of memory of a GPU: what is put on `stream` (as in swv_buffer) afterwards runs when the operation is
 * done. The host does not wait for the GPU, and learns only of errors that are known by now. It waits,
 * until the operation's deadline, for what the GPU cannot be given yet: the first operations between
 * ranks for the others to issue their part, what goes by way of the host. Of memory of the CPU it is
 * swv_work_wait; `stream` is not used then. */
SWV_API SWV_MUST_USE swv_status* swv_work_wait_on(const swv_work* work, void* stream);
SWV_API SWV_MUST_USE swv_status* swv_work_share(const swv_work* work, swv_work** out_work);
/* Does not cancel: the memory is in use until the operation is done. */
SWV_API void swv_work_free(swv_work* work);

/* Several operations of one group as one, which a backend may run together:
 *
 *   idle --swv_comm_coalesce--> collecting --swv_coalescing_finish--> finished
 *
 * While a group is collecting (through whichever handle):
 *   an operation with out_work NULL     is issued and collected; it returns without waiting, with
 *                                       an error only if it was refused. Its memory is in use until
 *                                       the coalescing's end.
 *   an operation with out_work          SWV_CODE_INVALID_ARGUMENT; nothing is issued or changes
 *   swv_comm_coalesce                   SWV_CODE_INVALID_ARGUMENT; nothing changes
 *   swv_coalescing_finish               is the end: one work for all that was collected; out_work
 *                                       NULL waits. It fails with the first error of all,
 *                                       arguments that were refused among them, when all have ended
 *   swv_coalescing_free                 is the end too: waits for all that was collected, however
 *                                       it ends, and frees; the error is swv_comm_health's
 *   what needs its result at once       (swv_comm_split, swv_comm_subgroup, operators on tensors of
 *                                       the mesh) waits for itself, as ever
 *   a group that is split from it       is idle, and has a state of its own
 *   swv_comm_free                       the coalescing keeps the group alive
 *   swv_comm_abort                      all that was collected and is not done fails, and all that
 *                                       comes; the state stays, and ends as above
 * Once finished, swv_coalescing_finish is SWV_CODE_INVALID_ARGUMENT, swv_coalescing_free only
 * frees, and the group is idle: it may be coalesced again. The work outlives the handles of its
 * coalescing and its group; it may be freed without a wait, and its memory is in use until it is
 * done all the same. A group whose handles and works are all freed has left: what is under way
 * in it fails on the others with SWV_CODE_UNAVAILABLE. */
SWV_API SWV_MUST_USE swv_status* swv_comm_coalesce(swv_comm* comm, swv_coalescing** out_coalescing);
SWV_API SWV_MUST_USE swv_status* swv_coalescing_finish(swv_coalescing* coalescing,
                                                       swv_work** out_work);
SWV_API void swv_coalescing_free(swv_coalescing* coalescing);

/* A new group per color, of the ranks that gave it, ordered by key, then by rank. With a negative
 * color the rank is in none: *out_comm is NULL. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_comm_split(swv_comm* comm, int32_t color, int32_t key,
                                                const char* name, swv_comm** out_comm);
/* The group of `members`, ranks of this one in the order of the new one. Only they call. */
SWV_API SWV_MUST_USE swv_status* swv_comm_subgroup(swv_comm* comm, const int32_t* members,
                                                   size_t num_members, const char* name,
                                                   swv_comm** out_comm);
/* As swv_world_abort, for this group and those made from it. Any thread. */
SWV_API SWV_MUST_USE swv_status* swv_comm_abort(swv_comm* comm, const char* reason);
/* Success, or the error that broke the group, as far as this rank knows. Any thread. */
SWV_API SWV_MUST_USE swv_status* swv_comm_health(const swv_comm* comm);

/* ---- Backends of third parties ----------------------------------------------------------------
 * A table of functions moves the bytes of one group. Of the CPU's memory those for send and recv are
 * enough: the library builds the other collectives from them. start, subgroup and drop are called by
 * one thread at a time, done, wait and abort by any thread at any time: a ticket may be waited for by
 * several threads, again after an error, and not at all. After a wait() that succeeded nobody asks
 * for it again but those who have begun to.
 * start() gets calls that are valid: counts fit each other and the group, pointers are not NULL
 * where there is something to move, in and out have one dtype, what a rank does not have (the out
 * of a gather elsewhere than on the root) has count 0, a broadcast has the same memory as in and
 * out. It may block until the operation is done (SWV_TICKET_DONE), but for send and recv, which
 * wait for the other side in wait() only. Ranks that call different things should all get
 * SWV_CODE_FAILED_PRECONDITION. Once wait() has returned, with an error or not, the memory of the
 * operation is not touched any more. After an error of start or wait nothing more is started.
 *
 * Memory of a GPU moves by a table of its own, beside that of the CPU: a swv_device_backend in the
 * options of a world makes it. Nothing of it may wait for other ranks on the host where the GPU can;
 * ranks meet in the middle of its work, where one that is missing, or has called something else, is
 * seen by nobody. So the library has the ranks tell each other what they call, over the CPU's backend,
 * beside the operation: the table compares nothing, and gets abort() when one of them is wrong or late.
 * A thread of the library looks for that, by done(), every 10 ms while something is under way.
 * What the table does not implement, or cannot reduce, goes through memory of the host and the CPU's
 * backend (copy_to_host, copy_to_device), send and recv or not: right, but slow, and who issues it waits
 * for its stream. Before drop(), the library waits for what is under way, by done(), for 5 seconds at
 * most; what has not ended then gets abort(), of which the other ranks hear. */

/* One rank's part in one operation, validated. What it points to lives during start(), the memory
 * of in and out until the operation is done. */
typedef struct swv_backend_call {
  size_t struct_size;
  swv_collective_kind kind;
  swv_reduce_op reduce_op;
  int32_t peer; /* or root */
  int32_t message_tag;
  const swv_buffer* in; /* never NULL */
  const swv_buffer* out;
  const int64_t* in_counts;  /* all_to_all_v, reduce_scatter_v; else NULL */
  const int64_t* out_counts; /* all_to_all_v, all_gather_v; else NULL */
  uint64_t sequence;         /* counts the group's collectives, from 1; its sends and recvs apart */
  int64_t timeout_ms;        /* from now to the deadline; -1: none */
  const char* tag;           /* "" if there is none */
  uint64_t
      fingerprint; /* of a collective: what it is about; ranks that have different ones, neither
                         * of them 0, have called different things */
  uint64_t
      coalesced; /* of a collective of a GPU's: those of one number are coalesced as one, the same
                       * number on all ranks; 0: alone */
} swv_backend_call;

/* Who is in the group. */
typedef struct swv_group {
  size_t struct_size;
  const char* name;
  int32_t rank;
  int32_t num_ranks;
  const int32_t* world_ranks; /* of each; num_ranks of them */
} swv_group;
#define SWV_GROUP_INIT {SWV_SIZE_TO(swv_group, world_ranks), NULL, 0, 1, NULL}

/* out_ticket value of an operation that start() has finished. It is what a start() of the CPU's that
 * sets nothing has said; a device's sets it whenever it succeeds. */
#define SWV_TICKET_DONE ((uint64_t)0)

typedef struct swv_backend {
  size_t struct_size;
  const char* name;
  uint64_t implements; /* bit i: kind i of swv_collective_kind */
  void* self;          /* first argument of the functions */
  swv_status* (*start)(void* self, const swv_backend_call* call, uint64_t* out_ticket);
  /* NULL if start() finishes everything. Never blocks; 1 also if the operation failed. */
  swv_bool (*done)(void* self, uint64_t ticket);
  /* NULL if start() finishes everything. timeout_ms as above. */
  swv_status* (*wait)(void* self, uint64_t ticket, int64_t timeout_ms);
  /* NULL: no subgroups. Writes the `self` of the new group. `members` are ranks of this group in
   * the new order; all members get the same key, which no other subgroup of this backend ever
   * has. */
  swv_status* (*subgroup)(void* self, const swv_group* group, const int32_t* members,
                          size_t num_members, const char* key, int64_t timeout_ms, void** out_self);
  /* Pending and later operations fail, on all ranks where possible, and so do copies: whoever waits in a
   * function of the table returns. */
  void (*abort)(void* self, swv_code code, const char* reason);
  /* Once for each self, its own and those of subgroups. What is under way on the CPU's memory is given
   * up. Must not wait for other ranks; may be NULL. */
  void (*drop)(void* self);
  /* The memory that it moves: the CPU's, or, of a swv_device_backend, that of this GPU. */
  swv_device device;
  /* NULL: all that are defined. Whether it has this reduction. */
  swv_bool (*can_reduce)(void* self, swv_dtype dtype, swv_reduce_op op);
  /* The next three are of a GPU's backend. wait_on: what is put on `stream` afterwards runs when the
   * operation is done. Does not wait for the GPU; may wait, until the operation's deadline, for other
   * ranks to issue their part. NULL: the host waits, by wait(). Any thread at any time. */
  swv_status* (*wait_on)(void* self, uint64_t ticket, void* stream);
  /* device->count elements between the host's memory and the GPU's, in the order of device->stream,
   * and waits for that. NULL: what would need it is SWV_CODE_UNIMPLEMENTED. */
  swv_status* (*copy_to_host)(void* self, void* host, const swv_buffer* device);
  swv_status* (*copy_to_device)(void* self, const swv_buffer* device, const void* host);
  /* Around calls of start() that are coalesced: they may be held back and run as one. A wait() or
   * wait_on() for one that is held back runs what is held back so far; done() does not. NULL both:
   * they come as ever. */
  void (*begin_coalescing)(void* self);
  swv_status* (*end_coalescing)(void* self);
} swv_backend;
#define SWV_BACKEND_INIT                     \
  {SWV_SIZE_TO(swv_backend, end_coalescing), \
   NULL,                                     \
   0,                                        \
   NULL,                                     \
   NULL,                                     \
   NULL,                                     \
   NULL,                                     \
   NULL,                                     \
   NULL,                                     \
   NULL,                                     \
   {SWV_DEVICE_CPU, 0},                      \
   NULL,                                     \
   NULL,                                     \
   NULL,                                     \
   NULL,                                     \
   NULL,                                     \
   NULL}

/* Makes the table of a group's GPUs, on each of its ranks: those of a world, and again of each group
 * that is made of it (so `subgroup` of these tables is not called). */
typedef struct swv_device_backend {
  size_t struct_size;
  void* self; /* first argument of the functions */
  /* Fills *out_backend, an SWV_BACKEND_INIT, as far as its struct_size goes: its device is this rank's
   * GPU, and it has wait and done. `bootstrap` has the group's ranks and is for this table alone: what
   * brings them together goes over it. It is borrowed; to keep it, swv_comm_share. All ranks of the group
   * call this at once. An error on one of them is an error on all: the library aborts `bootstrap`. */
  swv_status* (*connect)(void* self, const swv_group* group, swv_comm* bootstrap,
                         int64_t timeout_ms, swv_backend* out_backend);
  /* When no group needs it any more, from whatever thread ends the last. Once, also if the world is
   * not made. May be NULL. */
  void (*drop)(void* self);
} swv_device_backend;
#define SWV_DEVICE_BACKEND_INIT {SWV_SIZE_TO(swv_device_backend, drop), NULL, NULL, NULL}

/* The world of this rank over a backend of the caller. `backend` is copied. options: timeout and
 * device_backend only; with the latter COLLECTIVE, and `backend` has a subgroup. */
SWV_API SWV_MUST_USE swv_status* swv_world_create_with_backend(const swv_backend* backend,
                                                               const swv_group* group,
                                                               const swv_world_options* options,
                                                               swv_world** out_world);

/* ---- Meshes -----------------------------------------------------------------------------------
 * A mesh names every rank by its coordinate in a grid with named dimensions. The handle is one
 * rank's view of it; communicators along its dimensions are made on first use. */

typedef struct swv_mesh_dim {
  const char* name; /* letters, digits, '_', '-', '.' */
  int64_t size;
} swv_mesh_dim;

/* All ranks of `world`, row-major: the last dimension varies fastest. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_create(const swv_world* world, const swv_mesh_dim* dims,
                                                 size_t num_dims, swv_mesh** out_mesh);
/* "dp=2,tp=4". */
SWV_API SWV_MUST_USE swv_status* swv_mesh_parse(const swv_world* world, const char* text,
                                                swv_mesh** out_mesh);
/* From an explicit array of world ranks, row-major, all distinct; this rank is among them. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_create_from_ranks(const swv_world* world,
                                                            const swv_mesh_dim* dims,
                                                            size_t num_dims, const int32_t* ranks,
                                                            size_t num_ranks, swv_mesh** out_mesh);
SWV_API SWV_MUST_USE swv_status* swv_mesh_share(const swv_mesh* mesh, swv_mesh** out_mesh);
SWV_API void swv_mesh_free(swv_mesh* mesh);

/* The sub-mesh of the named dimensions, in that order, with this rank in it. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_slice(const swv_mesh* mesh, const char* const* names,
                                                size_t num_names, swv_mesh** out_mesh);
/* Merges neighbouring dimensions into one (all if num_names is 0). new_name NULL: joined by "_". */
SWV_API SWV_MUST_USE swv_status* swv_mesh_flatten(const swv_mesh* mesh, const char* const* names,
                                                  size_t num_names, const char* new_name,
                                                  swv_mesh** out_mesh);
/* Splits one dimension into several, row-major. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_unflatten(const swv_mesh* mesh, const char* name,
                                                    const swv_mesh_dim* dims, size_t num_dims,
                                                    swv_mesh** out_mesh);

SWV_API SWV_MUST_USE swv_status* swv_mesh_ndim(const swv_mesh* mesh, int32_t* out_ndim);
/* Number of ranks. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_size(const swv_mesh* mesh, int32_t* out_size);
SWV_API SWV_MUST_USE swv_status* swv_mesh_shape(const swv_mesh* mesh, int64_t* sizes,
                                                size_t capacity, size_t* out_count);
SWV_API SWV_MUST_USE swv_status* swv_mesh_dim_name(const swv_mesh* mesh, int32_t dim,
                                                   swv_string** out_name);
/* SWV_CODE_NOT_FOUND lists the names that there are. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_find_dim(const swv_mesh* mesh, const char* name,
                                                   int32_t* out_dim);
/* Of this rank. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_coordinate(const swv_mesh* mesh, int64_t* coordinate,
                                                     size_t capacity, size_t* out_count);
/* All world ranks, row-major. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_ranks(const swv_mesh* mesh, int32_t* ranks,
                                                size_t capacity, size_t* out_count);
/* This rank's group along a dimension; rank in the group == coordinate. COLLECTIVE at first. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_comm(const swv_mesh* mesh, int32_t dim,
                                               swv_comm** out_comm);
/* Makes the groups of all dimensions now. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_connect(const swv_mesh* mesh);
/* "DeviceMesh(dp=2, tp=2)". */
SWV_API SWV_MUST_USE swv_status* swv_mesh_to_string(const swv_mesh* mesh, swv_string** out_text);
/* The same names, sizes and ranks. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_equal(const swv_mesh* a, const swv_mesh* b,
                                                swv_bool* out_equal);

/* How an operator shards, one of a library that the process has loaded (TORCH_LIBRARY) or one of
 * LibTorch's: "mylib::swiglu" with all its overloads, or "aten::add.Tensor". Each way says, along one
 * mesh dimension, how the tensor arguments lie and how the results lie then, where nothing has to be
 * sent: {"S(0), R -> S(0)", "R, S(0) -> S(1)"}. A placement for each argument of the schema that is a
 * tensor or a list of them, None included, and for each result, or one for all; R, S(d) with d from 0,
 * P and P(max) as in layouts. All replicated is always a way. {"pointwise"} alone: element by element,
 * broadcast. Operators take the cheapest way, and bring their arguments there. A derivative is an
 * operator of its own, with a rule of its own. It comes before a rule of the library; the operator
 * counts as a layer's, where plans meet inputs and outputs.
 *
 * On this mesh, not on its slices; every rank adds the same, before or between operators.
 * SWV_CODE_NOT_FOUND for an operator that is not there; SWV_CODE_ALREADY_EXISTS for a second rule;
 * SWV_CODE_INVALID_ARGUMENT for a way that does not fit the schema, and out of swv_op_call for a
 * dimension that a tensor does not have; SWV_CODE_FAILED_PRECONDITION while an operator runs. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_add_rule(swv_mesh* mesh, const char* name,
                                                   const char* const* ways, size_t num_ways);

/* What communication and computation cost, by which operators choose among the strategies of their
 * sharding rules, and redistributions their steps. */
typedef struct swv_link_cost {
  double latency;   /* seconds per collective; 0 or more */
  double bandwidth; /* bytes per second and rank */
} swv_link_cost;

typedef struct swv_device_cost {
  size_t struct_size;
  double flops;     /* multiplications and additions per second, in matrix products */
  double bandwidth; /* bytes per second that are read or written */
} swv_device_cost;
#define SWV_DEVICE_COST_INIT {SWV_SIZE_TO(swv_device_cost, bandwidth), 5e10, 1e10}

/* From now on, on this mesh; its slices have costs of their own. A link for each mesh dimension;
 * device NULL: the default. COLLECTIVE, once: ranks that are not all given the same, or one of
 * which is given what is none, all get SWV_CODE_INVALID_ARGUMENT and keep what they had. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_set_cost_model(swv_mesh* mesh, const swv_link_cost* links,
                                                         size_t num_links,
                                                         const swv_device_cost* device);
/* The same from JSON, as swv_mesh_measure_cost_model gives it and //tools:measure_cost_model prints
 * it. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_set_cost_model_from_json(swv_mesh* mesh,
                                                                   const char* text);
/* What they are here and now, the same text on every rank: each link by collectives of a few bytes and
 * of many, the device by a matrix product and a copy, medians of the slowest rank. Nothing is set: give
 * the text to swv_mesh_set_cost_model_from_json, and keep it for the runs that follow.
 *   {"links": {"dp": {"latency": 3e-5, "bandwidth": 2e10}, "tp": {...}},
 *    "device": {"flops": 4e14, "bandwidth": 3e12}}
 * Of the host: its memory and its processor, whatever GPUs there are, whose costs are to be set. All
 * ranks compute and send at once, as they do in training. A second or two. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_measure_cost_model(const swv_mesh* mesh,
                                                             swv_string** out_json);
/* out_device may be NULL. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_cost_model(const swv_mesh* mesh, swv_link_cost* links,
                                                     size_t capacity, size_t* out_count,
                                                     swv_device_cost* out_device);

/* Where the random numbers of a mesh are (below). */
typedef struct swv_random_state {
  size_t struct_size;
  uint64_t seed;
  uint64_t offset; /* operators drawn so far */
} swv_random_state;
#define SWV_RANDOM_STATE_INIT {SWV_SIZE_TO(swv_random_state, offset), 0, 0}

/* ---- Scopes -----------------------------------------------------------------------------------
 * A scope holds on one mesh until it is freed, in any order. Local: no communication. */

/* Operators on this mesh's tensors that would communicate by themselves fail with
 * SWV_CODE_FAILED_PRECONDITION, naming operator and tensors. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_forbid_communication(swv_mesh* mesh,
                                                               swv_scope** out_scope);
/* Traces and errors say that `name` runs: "blocks.0.attn". The innermost scope counts. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_enter_module(swv_mesh* mesh, const char* name,
                                                       swv_scope** out_scope);
/* Traces of the mesh that live now say that what runs was called at `source`, "train.rs:53". The
 * innermost scope counts. For bindings: a scope around a call while there is a trace. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_enter_source(swv_mesh* mesh, const char* source,
                                                       swv_scope** out_scope);
/* The mesh draws from `state`; then it goes on where it was. What is computed a second time draws
 * its numbers a second time. The innermost scope counts. The same on every rank. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_use_random_state(swv_mesh* mesh,
                                                           const swv_random_state* state,
                                                           swv_scope** out_scope);
SWV_API void swv_scope_free(swv_scope* scope);

/* ---- Layouts ----------------------------------------------------------------------------------
 * A layout has a placement for each mesh dimension: "[S(0), R]" cuts tensor dimension 0 along mesh
 * dimension 0 and replicates along mesh dimension 1. As text: R; S(dim); P(sum), P(avg), ...;
 * strided S(1, sf=3); ragged S(0, sizes=[3,0,4]); cut order S(0)@1. A layout never changes. */

typedef int32_t swv_placement_kind;
enum {
  SWV_PLACEMENT_REPLICATE = 0,
  SWV_PLACEMENT_SHARD = 1, /* chunks of ceil(size / ranks), then the rest, then empty ones */
  SWV_PLACEMENT_STRIDED_SHARD = 2, /* split_factor chunks, each cut over the ranks */
  SWV_PLACEMENT_RAGGED_SHARD = 3,  /* sizes[i] elements for rank i */
  SWV_PLACEMENT_PARTIAL = 4        /* the tensor is the reduction of what the ranks hold */
};

typedef struct swv_placement {
  size_t struct_size;
  swv_placement_kind kind;
  int32_t dim;             /* of shards; below 0: from the end */
  swv_reduce_op reduce_op; /* of partials */
  int32_t reserved;        /* 0 */
  int64_t split_factor;    /* of strided shards */
  const int64_t* sizes;    /* of ragged shards */
  size_t num_sizes;
} swv_placement;
#define SWV_PLACEMENT_INIT \
  {SWV_SIZE_TO(swv_placement, num_sizes), SWV_PLACEMENT_REPLICATE, 0, 0, 0, 0, NULL, 0}

/* order: which mesh dimension cuts first when several shard one tensor dimension, a permutation;
 * num_order 0: in their own order. */
SWV_API SWV_MUST_USE swv_status* swv_layout_create(const swv_placement* placements,
                                                   size_t num_placements, const int32_t* order,
                                                   size_t num_order, swv_layout** out_layout);
/* An error says where the text is wrong. */
SWV_API SWV_MUST_USE swv_status* swv_layout_parse(const char* text, swv_layout** out_layout);

typedef struct swv_named_placement {
  const char* mesh_dim;  /* "tp" */
  const char* placement; /* "S(0)" */
} swv_named_placement;

/* By names of mesh dimensions; those that are not named are replicated. */
SWV_API SWV_MUST_USE swv_status* swv_layout_create_named(const swv_mesh* mesh,
                                                         const swv_named_placement* placements,
                                                         size_t num_placements,
                                                         swv_layout** out_layout);
SWV_API SWV_MUST_USE swv_status* swv_layout_share(const swv_layout* layout,
                                                  swv_layout** out_layout);
SWV_API void swv_layout_free(swv_layout* layout);

SWV_API SWV_MUST_USE swv_status* swv_layout_to_string(const swv_layout* layout,
                                                      swv_string** out_text);
SWV_API SWV_MUST_USE swv_status* swv_layout_mesh_ndim(const swv_layout* layout, int32_t* out_ndim);
/* out_placement->sizes lives as long as the layout. */
SWV_API SWV_MUST_USE swv_status* swv_layout_placement(const swv_layout* layout, int32_t mesh_dim,
                                                      swv_placement* out_placement);
SWV_API SWV_MUST_USE swv_status* swv_layout_equal(const swv_layout* a, const swv_layout* b,
                                                  swv_bool* out_equal);

/* What the rank at `coordinate` holds of a tensor: the shape of its part and the global index of
 * the first element. Arithmetic only. out_shape and out_offset have room for num_sizes numbers;
 * either may be NULL. */
SWV_API SWV_MUST_USE swv_status* swv_layout_local_extent(const swv_layout* layout,
                                                         const int64_t* mesh_shape,
                                                         const int64_t* coordinate,
                                                         size_t mesh_ndim, const int64_t* sizes,
                                                         size_t num_sizes, int64_t* out_shape,
                                                         int64_t* out_offset);
/* The cheapest steps from one layout to another, one text; and the bytes that the busiest rank
 * sends. Either output may be NULL. Arithmetic only. */
SWV_API SWV_MUST_USE swv_status* swv_layout_plan(const swv_layout* from, const swv_layout* to,
                                                 const int64_t* mesh_shape, size_t mesh_ndim,
                                                 const int64_t* sizes, size_t num_sizes,
                                                 swv_dtype dtype, int64_t* out_bytes,
                                                 swv_string** out_text);

/* ---- Tensors ----------------------------------------------------------------------------------
 * A tensor is plain (its data is here) or sharded (it has the global shape, and each rank of its
 * mesh holds a part). */

/* Whether a call is recorded for gradients: one of SWV_MODE_... And whether it runs under LibTorch's
 * autocast: one of SWV_MODE_AUTOCAST_... may be added. LibTorch's lists say which operators see what:
 * products, convolutions and attention see floating-point tensors but float64 cast to that type
 * (weights too, at each use), most losses see float32 (on GPUs softmax, norms and sums, too); forms
 * that write into a tensor cast nothing. Backward needs none: an operator goes back in the types that
 * it had, and a parameter's gradient has the parameter's. Never a property of the thread: a callback
 * gets the mode of the call that it is in, a segment's second run that of swv_checkpoint(). */
typedef int32_t swv_grad_mode;
enum {
  SWV_MODE_GRAD = 0, /* if an input requires grad */
  SWV_MODE_NO_GRAD = 1,
  SWV_MODE_INFERENCE = 2,    /* not at all, ever: SWV_MODE_GRAD refuses its results later */
  SWV_MODE_AUTOCAST_F16 = 4, /* SWV_MODE_GRAD | SWV_MODE_AUTOCAST_F16 */
  SWV_MODE_AUTOCAST_BF16 = 8
};

typedef struct swv_tensor_options {
  size_t struct_size;
  swv_dtype dtype;
  swv_bool requires_grad;
  swv_device device;
  const swv_mesh* mesh;     /* NULL: a plain tensor */
  const swv_layout* layout; /* NULL with a mesh: replicated */
} swv_tensor_options;
#define SWV_TENSOR_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_tensor_options, layout), 0, 0, {SWV_DEVICE_CPU, 0}, NULL, NULL}

SWV_API SWV_MUST_USE swv_status* swv_tensor_empty(const int64_t* sizes, size_t ndim,
                                                  const swv_tensor_options* options,
                                                  swv_tensor** out_tensor);
SWV_API SWV_MUST_USE swv_status* swv_tensor_zeros(const int64_t* sizes, size_t ndim,
                                                  const swv_tensor_options* options,
                                                  swv_tensor** out_tensor);
SWV_API SWV_MUST_USE swv_status* swv_tensor_ones(const int64_t* sizes, size_t ndim,
                                                 const swv_tensor_options* options,
                                                 swv_tensor** out_tensor);
SWV_API SWV_MUST_USE swv_status* swv_tensor_full(const int64_t* sizes, size_t ndim, double value,
                                                 const swv_tensor_options* options,
                                                 swv_tensor** out_tensor);
/* Uniform in [0, 1), and normal. On a mesh element i is drawn by its global index: the same numbers
 * for every layout and number of ranks (swv_mesh_seed). Plain ones draw from the process
 * (swv_seed). */
SWV_API SWV_MUST_USE swv_status* swv_tensor_rand(const int64_t* sizes, size_t ndim,
                                                 const swv_tensor_options* options,
                                                 swv_tensor** out_tensor);
SWV_API SWV_MUST_USE swv_status* swv_tensor_randn(const int64_t* sizes, size_t ndim,
                                                  const swv_tensor_options* options,
                                                  swv_tensor** out_tensor);
/* A plain tensor with a copy of row-major data; num_bytes is what the sizes need, exactly. options:
 * dtype, requires_grad and device. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_from_data(const void* data, size_t num_bytes,
                                                      const int64_t* sizes, size_t ndim,
                                                      const swv_tensor_options* options,
                                                      swv_tensor** out_tensor);

/* DLPack 1.x; the struct is declared in dlpack.h of github.com/dmlc/dlpack, which is not installed
 * here. No copies. from_dlpack takes `managed` over and
 * runs its deleter, also on failure. to_dlpack wants a plain tensor that does not require grad; the
 * caller runs the deleter. From then on the tensor's memory stays where it is: what would resize it
 * (resize_, an out= argument of another size) fails. stream: of a GPU, the one (a cudaStream_t) on
 * which the other side uses the memory; NULL: the default one, which is all that there is yet. */
struct DLManagedTensorVersioned;
SWV_API SWV_MUST_USE swv_status* swv_tensor_from_dlpack(struct DLManagedTensorVersioned* managed,
                                                        void* stream, swv_tensor** out_tensor);
SWV_API SWV_MUST_USE swv_status* swv_tensor_to_dlpack(
    swv_tensor* tensor, void* stream, struct DLManagedTensorVersioned** out_managed);

/* A second handle to the same tensor; for a copy of the data call aten::clone. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_share(const swv_tensor* tensor,
                                                  swv_tensor** out_tensor);
SWV_API void swv_tensor_free(swv_tensor* tensor);
/* Whether two handles mean one tensor. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_is_same(const swv_tensor* a, const swv_tensor* b,
                                                    swv_bool* out_is_same);

/* Global sizes and strides, in elements. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_ndim(const swv_tensor* tensor, int32_t* out_ndim);
SWV_API SWV_MUST_USE swv_status* swv_tensor_numel(const swv_tensor* tensor, int64_t* out_numel);
SWV_API SWV_MUST_USE swv_status* swv_tensor_sizes(const swv_tensor* tensor, int64_t* sizes,
                                                  size_t capacity, size_t* out_count);
SWV_API SWV_MUST_USE swv_status* swv_tensor_strides(const swv_tensor* tensor, int64_t* strides,
                                                    size_t capacity, size_t* out_count);
SWV_API SWV_MUST_USE swv_status* swv_tensor_dtype(const swv_tensor* tensor, swv_dtype* out_dtype);
SWV_API SWV_MUST_USE swv_status* swv_tensor_device(const swv_tensor* tensor,
                                                   swv_device* out_device);
SWV_API SWV_MUST_USE swv_status* swv_tensor_is_sharded(const swv_tensor* tensor,
                                                       swv_bool* out_is_sharded);
/* "DTensor[7, 5] Float [S(0), R] on DeviceMesh(dp=2, tp=2), local [4, 5] at [0, 0]"; the elements
 * of a plain one. Never communicates. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_to_string(const swv_tensor* tensor,
                                                      swv_string** out_text);
/* The same, and below it the elements of the whole tensor, on every rank. COLLECTIVE if it is
 * sharded. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_values_to_string(const swv_tensor* tensor,
                                                             swv_string** out_text);

/* Memory of a plain tensor (of a sharded one: swv_tensor_to_local, swv_tensor_full_tensor). The
 * data row-major into or from the caller's memory; num_bytes is what the tensor needs, exactly. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_copy_to_host(const swv_tensor* tensor, void* data,
                                                         size_t num_bytes);
SWV_API SWV_MUST_USE swv_status* swv_tensor_copy_from_host(swv_tensor* tensor, const void* data,
                                                           size_t num_bytes);
/* Where a contiguous plain tensor lies, for collectives; as long as the tensor lives. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_buffer(const swv_tensor* tensor,
                                                   swv_buffer* out_buffer);

/* ---- Sharded tensors ------------------------------------------------------------------------- */

typedef struct swv_distribute_options {
  size_t struct_size;
  int32_t
      source; /* rank (row-major in the mesh) whose data counts; -1: all have the same already */
  int32_t reserved; /* 0 */
} swv_distribute_options;
#define SWV_DISTRIBUTE_OPTIONS_INIT {SWV_SIZE_TO(swv_distribute_options, reserved), 0, 0}

/* Cuts a plain tensor, of the same shape and dtype on every rank. No partial placements. A leaf
 * that requires grad if the tensor does. COLLECTIVE unless source is -1: nothing is compared then;
 * another shape or dtype on a rank is an error of the tensor's next collective. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_distribute(const swv_tensor* tensor,
                                                       const swv_mesh* mesh,
                                                       const swv_layout* layout,
                                                       const swv_distribute_options* options,
                                                       swv_tensor** out_tensor);
/* From every rank's part. sizes NULL: the global sizes are worked out from the parts,
 * COLLECTIVE; parts that are not those of an even split, 1 + 2 rows, make a shard a ragged one. What
 * is replicated has to be the same on all ranks, and is not compared. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_from_local(const swv_tensor* local,
                                                       const swv_mesh* mesh,
                                                       const swv_layout* layout,
                                                       const int64_t* sizes, size_t ndim,
                                                       swv_grad_mode mode, swv_tensor** out_tensor);
/* This rank's part; shares memory. grad_layout: how the gradients of the parts lie together; NULL:
 * as the tensor, replicated where that is partial. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_to_local(const swv_tensor* tensor,
                                                     const swv_layout* grad_layout,
                                                     swv_grad_mode mode, swv_tensor** out_local);
/* The same tensor in another layout. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_redistribute(const swv_tensor* tensor,
                                                         const swv_layout* layout,
                                                         swv_grad_mode mode,
                                                         swv_tensor** out_tensor);
/* The whole tensor, plain, on every rank; of a plain one itself. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_full_tensor(const swv_tensor* tensor,
                                                        swv_grad_mode mode,
                                                        swv_tensor** out_tensor);
SWV_API SWV_MUST_USE swv_status* swv_tensor_layout(const swv_tensor* tensor,
                                                   swv_layout** out_layout);
SWV_API SWV_MUST_USE swv_status* swv_tensor_mesh(const swv_tensor* tensor, swv_mesh** out_mesh);

/* ---- Operators --------------------------------------------------------------------------------
 * Every operator of LibTorch, by the name in its schema, on plain and sharded tensors. A plain
 * tensor among sharded ones counts as replicated if it is the same on every rank, which a small
 * collective finds out. */

typedef int32_t swv_value_kind;
enum {
  SWV_VALUE_NONE = 0,
  SWV_VALUE_DEFAULT = 1, /* as an argument: what the schema says */
  SWV_VALUE_TENSOR = 2,
  SWV_VALUE_BOOL = 3,
  SWV_VALUE_INT = 4,
  SWV_VALUE_FLOAT = 5,
  SWV_VALUE_COMPLEX = 6,
  SWV_VALUE_STRING = 7, /* also memory formats ("channels_last") and torch layouts ("strided") */
  SWV_VALUE_DTYPE = 8,
  SWV_VALUE_DEVICE = 9,
  SWV_VALUE_TENSORS = 10, /* NULL elements: none */
  SWV_VALUE_BOOLS = 11,
  SWV_VALUE_INTS = 12,
  SWV_VALUE_FLOATS = 13
};

/* An argument borrows what it points to. A result owns it, until swv_value_clear; to keep a tensor,
 * take as.tensor (or an element of as.tensors.data) and write NULL in its place. */
typedef struct swv_value {
  swv_value_kind kind;
  int32_t reserved; /* 0 */
  union {
    swv_tensor* tensor;
    int64_t integer; /* INT and BOOL */
    double number;
    struct {
      double real;
      double imaginary;
    } complex_number;
    struct {
      const char* data; /* NUL is not needed; results have it */
      size_t size;
    } string;
    swv_dtype dtype;
    swv_device device;
    struct {
      swv_tensor** data;
      size_t size;
    } tensors;
    struct {
      const swv_bool* data;
      size_t size;
    } bools;
    struct {
      const int64_t* data;
      size_t size;
    } ints;
    struct {
      const double* data;
      size_t size;
    } floats;
  } as;
} swv_value;

#define SWV_NONE         \
  {                      \
    SWV_VALUE_NONE, 0, { \
      NULL               \
    }                    \
  }

/* "aten::add.Tensor" is that overload. "aten::add", or "add", is all overloads: each call takes the
 * first whose arguments fit. SWV_CODE_NOT_FOUND suggests names that are nearly the same. A lookup
 * is slow, a call is not: look up once. */
SWV_API SWV_MUST_USE swv_status* swv_op_find(const char* name, swv_op** out_op);
SWV_API SWV_MUST_USE swv_status* swv_op_share(const swv_op* op, swv_op** out_op);
SWV_API void swv_op_free(swv_op* op);
/* The schemas of its overloads, a line each. */
SWV_API SWV_MUST_USE swv_status* swv_op_schema(const swv_op* op, swv_string** out_text);

/* Arguments in the schema's order; those that are left out at the end have their defaults. Outputs
 * (out=) go by name, swv_op_call_named, or by position to an overload that was asked for, as
 * "aten::add.out". Where the schema wants a Tensor, a number does too, but for one that is written;
 * where it wants int[2], a single integer; where float, an integer. Writes as many results as the
 * operator has; `capacity` must suffice, or be 0, which drops them. out_num_results may be NULL. An
 * error lists the kinds that were given and the schemas if no overload fits. */
SWV_API SWV_MUST_USE swv_status* swv_op_call(const swv_op* op, swv_grad_mode mode,
                                             const swv_value* arguments, size_t num_arguments,
                                             swv_value* out_results, size_t capacity,
                                             size_t* out_num_results);
/* The same where the last num_names arguments are given by name. */
SWV_API SWV_MUST_USE swv_status* swv_op_call_named(const swv_op* op, swv_grad_mode mode,
                                                   const swv_value* arguments, size_t num_arguments,
                                                   const char* const* names, size_t num_names,
                                                   swv_value* out_results, size_t capacity,
                                                   size_t* out_num_results);
/* Frees what a result owns, and makes it none. NULL is allowed; not for arguments. */
SWV_API void swv_value_clear(swv_value* value);

/* The one element of a tensor of any dtype: SWV_VALUE_FLOAT, SWV_VALUE_INT (of u64 above INT64_MAX
 * SWV_CODE_OUT_OF_RANGE), SWV_VALUE_BOOL or SWV_VALUE_COMPLEX. COLLECTIVE if it is sharded. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_item(const swv_tensor* tensor, swv_value* out_value);

/* ---- Autograd ---------------------------------------------------------------------------------
 * Gradients of sharded tensors are sharded. A parameter's may be partial until
 * swv_module_finish_grad_sync brings it into the parameter's layout. */

SWV_API SWV_MUST_USE swv_status* swv_tensor_requires_grad(const swv_tensor* tensor,
                                                          swv_bool* out_requires_grad);
/* Of a leaf. 0 freezes it, sharded or not yet: it stays so in every module that it is added to. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_set_requires_grad(swv_tensor* tensor,
                                                              swv_bool requires_grad);
/* As a fresh tensor: it does not require grad, and is not frozen: a module that gets it as a
 * parameter trains it. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_clear_requires_grad(swv_tensor* tensor);
SWV_API SWV_MUST_USE swv_status* swv_tensor_is_leaf(const swv_tensor* tensor,
                                                    swv_bool* out_is_leaf);
/* The same data without history. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_detach(const swv_tensor* tensor,
                                                   swv_tensor** out_tensor);
/* *out_grad is NULL if there is none. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_grad(const swv_tensor* tensor, swv_tensor** out_grad);
/* grad NULL: none. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_set_grad(swv_tensor* tensor, const swv_tensor* grad);

typedef struct swv_backward_options {
  size_t struct_size;
  swv_bool retain_graph; /* for another backward through the same graph */
  swv_bool create_graph; /* the gradients can be differentiated; implies retain_graph */
  swv_bool allow_unused; /* of swv_gradients: an input that nothing depends on has gradient NULL */
} swv_backward_options;
#define SWV_BACKWARD_OPTIONS_INIT {SWV_SIZE_TO(swv_backward_options, allow_unused), 0, 0, 0}

/* Adds to the gradients of the leaves that `tensor` depends on. gradient NULL: 1, of a tensor with
 * one element. A plain gradient of a sharded tensor is the same on all ranks, which are compared
 * before a value leaves the mesh. Runs on the calling thread. COLLECTIVE on sharded tensors. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_backward(const swv_tensor* tensor,
                                                     const swv_tensor* gradient,
                                                     const swv_backward_options* options);
/* The gradients of the inputs: num_inputs handles to out_grads. grad_outputs: num_outputs of them,
 * or NULL; an element may be NULL. COLLECTIVE on sharded tensors. */
SWV_API SWV_MUST_USE swv_status* swv_gradients(const swv_tensor* const* outputs, size_t num_outputs,
                                               const swv_tensor* const* inputs, size_t num_inputs,
                                               const swv_tensor* const* grad_outputs,
                                               const swv_backward_options* options,
                                               swv_tensor** out_grads);

/* One call of a function of the host. The inputs are borrowed; what the callback writes to outputs,
 * which are NULL before, is taken over. All of it lives during the callback. */
typedef struct swv_function_call {
  size_t struct_size;
  swv_function_context* context; /* NULL in a swv_segment */
  swv_grad_mode mode;            /* to call operators with */
  int32_t reserved;
  const swv_tensor* const* inputs;
  size_t num_inputs;
  swv_tensor** outputs;
  size_t num_outputs;
  swv_module* module; /* in a swv_patch: whose forward it is; borrowed. NULL else */
  const char* fqn;    /* in a swv_patch: its name in the module that was patched. NULL else */
} swv_function_call;

/* A function of the host with a derivative of its own. */
typedef struct swv_function {
  size_t struct_size;
  const char* name; /* in messages; may be NULL */
  void* user_data;
  swv_status* (*forward)(void* user_data, const swv_function_call* call);
  /* inputs: the gradients of forward's outputs, NULL where nothing depends on one. outputs: the
   * gradients of forward's inputs; may stay NULL. Itself it may be NULL: then backward through it is
   * SWV_CODE_UNIMPLEMENTED. */
  swv_status* (*backward)(void* user_data, const swv_function_call* call);
  void (*drop)(void* user_data); /* may be NULL */
} swv_function;
#define SWV_FUNCTION_INIT {SWV_SIZE_TO(swv_function, drop), NULL, NULL, NULL, NULL, NULL}

/* Calls forward once, and backward when gradients pass. `function` is copied; user_data is dropped
 * when the graph no longer needs it. Writes num_outputs handles. */
SWV_API SWV_MUST_USE swv_status* swv_function_apply(const swv_function* function,
                                                    swv_grad_mode mode,
                                                    const swv_tensor* const* inputs,
                                                    size_t num_inputs, swv_tensor** out_outputs,
                                                    size_t num_outputs);
/* In forward: what backward needs (inputs, outputs or others). In place of what was saved
 * before. */
SWV_API SWV_MUST_USE swv_status* swv_function_context_save(swv_function_context* context,
                                                           const swv_tensor* const* tensors,
                                                           size_t num_tensors);
/* In backward. */
SWV_API SWV_MUST_USE swv_status* swv_function_context_saved(const swv_function_context* context,
                                                            size_t index, swv_tensor** out_tensor);

/* A part of the host's forward whose intermediate results are not kept: backward runs it again.
 * Both runs draw the same random numbers on the meshes of the inputs, and have the same inputs; the
 * host sees to it that they compute the same. Their mode is SWV_MODE_NO_GRAD first
 * (SWV_MODE_INFERENCE if the call's is), SWV_MODE_GRAD again, and the call's autocast both times. */
typedef struct swv_segment {
  size_t struct_size;
  const char* name;
  void* user_data;
  swv_status* (*forward)(void* user_data, const swv_function_call* call);
  void (*drop)(void* user_data); /* may be NULL */
} swv_segment;
#define SWV_SEGMENT_INIT {SWV_SIZE_TO(swv_segment, drop), NULL, NULL, NULL, NULL}

/* Activation checkpointing: calls forward at once, and when gradients pass once more, on the thread
 * that calls backward. `segment` is copied; user_data is dropped when the graph no longer needs it.
 * At least one input. Gradients of what forward uses besides its inputs are added to its leaves:
 * swv_tensor_backward gives them, swv_gradients does not. No create_graph through it. COLLECTIVE as
 * forward is, both times. */
SWV_API SWV_MUST_USE swv_status* swv_checkpoint(const swv_segment* segment, swv_grad_mode mode,
                                                const swv_tensor* const* inputs, size_t num_inputs,
                                                swv_tensor** out_outputs, size_t num_outputs);

/* ---- Random numbers ---------------------------------------------------------------------------
 * Random operators on sharded tensors draw from their mesh, by global element index. */

/* Local: the same seed on every rank. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_seed(swv_mesh* mesh, uint64_t seed);
SWV_API SWV_MUST_USE swv_status* swv_mesh_random_state(const swv_mesh* mesh,
                                                       swv_random_state* out_state);
SWV_API SWV_MUST_USE swv_status* swv_mesh_set_random_state(swv_mesh* mesh,
                                                           const swv_random_state* state);
/* Of plain tensors: one generator for the process, whatever the rank. */
SWV_API SWV_MUST_USE swv_status* swv_seed(uint64_t seed);

/* Threads that one operator may use, from now on, in every thread of the process. Not called: a
   rank that is a process (swv_world_from_environment, swv_world_join) uses its share of its
   machine's cores, or OMP_NUM_THREADS if that is set. */
SWV_API SWV_MUST_USE swv_status* swv_set_num_threads(int32_t num_threads);

/* ---- Modules ----------------------------------------------------------------------------------
 * A module holds parameters, buffers and modules by fully qualified name (FQN,
 * "blocks.0.attn.q.weight"). Its forward is the host's own code, on the handles that it registered;
 * a TorchScript file's; or the library's. */

SWV_API SWV_MUST_USE swv_status* swv_module_create(swv_module** out_module);
/* A module of the library's, in training mode, whose forward swv_module_call runs. Kinds are
 *   Linear, Embedding, EmbeddingBag, LayerNorm, RMSNorm, BatchNorm1d, BatchNorm2d, GroupNorm,
 *   Conv1d, Conv2d, Dropout, ReLU, GELU, SiLU, MultiheadAttention, TransformerEncoderLayer,
 *   TransformerDecoderLayer, LSTM, with the options, defaults and arguments of PyTorch's C++ by
 *   their names there: {"in_features": 4, "out_features": 8}; an LSTM's state are arguments h_0 and
 *   c_0. Every one has "dtype" besides: "float32", "float64", "float16", "bfloat16";
 *   Sequential: {"layers": [{"kind": "Linear", ...}, {"kind": "ReLU"}]};
 *   gpt2, llama, mixtral, vit, whose options are the configuration of a Hugging Face model
 *   (config.json), and whose forward takes input_ids or pixel_values and gives logits.
 * options_json NULL: {}. Its modules are parts with the names that they have there, which
 * swv_module_child gives and swv_module_call runs, too, where their forward takes tensors; nothing
 * is added to them. Parameters are drawn as PyTorch draws them, from the process's generator
 * (swv_seed), which rank threads share: swv_module_distribute sends those of one rank to all.
 * SWV_CODE_INVALID_ARGUMENT for a kind or an option that there is not lists those that there are,
 * and for a value says its line. */
SWV_API SWV_MUST_USE swv_status* swv_module_create_by_kind(const char* kind,
                                                           const char* options_json,
                                                           swv_module** out_module);
/* A file that torch.jit.save or torch::jit::Module::save wrote. Its parts (swv_module_child) are
 * modules of the file, too, also those without tensors: their mode and methods are the file's, and
 * a parameter requires grad as it did when it was saved. */
SWV_API SWV_MUST_USE swv_status* swv_module_load(const char* path, swv_module** out_module);
SWV_API SWV_MUST_USE swv_status* swv_module_share(const swv_module* module,
                                                  swv_module** out_module);
SWV_API void swv_module_free(swv_module* module);

/* The module and the caller's handle share the tensor: what distributes the module changes it where
 * it stands, and every handle sees that. A parameter is a leaf, and requires grad from now on, unless
 * swv_tensor_set_requires_grad has frozen it. A tensor may have several names (tied weights): it is
 * one parameter, or one buffer, all the same. Modules that an FQN names on its way ("blocks",
 * "blocks.0") are made where they are missing. */
SWV_API SWV_MUST_USE swv_status* swv_module_add_parameter(swv_module* module, const char* fqn,
                                                          swv_tensor* tensor);
SWV_API SWV_MUST_USE swv_status* swv_module_add_buffer(swv_module* module, const char* fqn,
                                                       swv_tensor* tensor);
/* `child`, with all that it has and will have, is a part of the module from now on, and of no other
 * one. It may be the library's; the module is not. */
SWV_API SWV_MUST_USE swv_status* swv_module_add_child(swv_module* module, const char* fqn,
                                                      swv_module* child);
/* The module of this name inside of the module; "" is the module itself. SWV_CODE_NOT_FOUND
 * suggests names that are nearly the same. */
SWV_API SWV_MUST_USE swv_status* swv_module_child(const swv_module* module, const char* fqn,
                                                  swv_module** out_child);

/* How a module of the host's shards, for plans that name it in their third part: where its parameters
 * and buffers (by name or pattern within it) and its inputs and outputs go, along whichever mesh
 * dimension the plan says; what is not named is replicated. In place of what was said before.
 *   {"parameter": {"up": "S(0)", "down": "S(1)"}, "forward": {"output": "R"},
 *    "styles": {"experts": {"parameter": {"up": "S(-3)", "down": "S(-3)"}}}}
 * The same on every rank. An error says on which line of the text; that a name is not the module's,
 * swv_module_distribute says. */
SWV_API SWV_MUST_USE swv_status* swv_module_set_sharding(swv_module* module,
                                                         const char* sharding_json);

/* In the order of their registration by modules: those of a module before those of its children.
 * Each tensor once, by its first name. */
SWV_API SWV_MUST_USE swv_status* swv_module_num_parameters(const swv_module* module,
                                                           size_t* out_num);
/* Either output may be NULL. */
SWV_API SWV_MUST_USE swv_status* swv_module_parameter(const swv_module* module, size_t index,
                                                      swv_string** out_fqn,
                                                      swv_tensor** out_tensor);
SWV_API SWV_MUST_USE swv_status* swv_module_num_buffers(const swv_module* module, size_t* out_num);
SWV_API SWV_MUST_USE swv_status* swv_module_buffer(const swv_module* module, size_t index,
                                                   swv_string** out_fqn, swv_tensor** out_tensor);
/* 0 for one that a module of the library's computes from its options (a Llama's rotary frequencies):
 * swv_state_add_module and the functions for Hugging Face's files leave it out. */
SWV_API SWV_MUST_USE swv_status* swv_module_buffer_is_persistent(const swv_module* module,
                                                                 size_t index,
                                                                 swv_bool* out_is_persistent);
/* A parameter or buffer, by any of its names; SWV_CODE_NOT_FOUND suggests names that are nearly the
 * same. */
SWV_API SWV_MUST_USE swv_status* swv_module_get(const swv_module* module, const char* fqn,
                                                swv_tensor** out_tensor);

/* Training mode (on) or evaluation, of the module and all modules in it: what dropout and batch
 * norms of a file and of the library go by, and a host's forward may ask for. A module that was
 * created is in training mode, and so is one of a file that keeps no mode; else one of a file as it
 * was saved. */
SWV_API SWV_MUST_USE swv_status* swv_module_train(swv_module* module, swv_bool on);
SWV_API SWV_MUST_USE swv_status* swv_module_is_training(const swv_module* module,
                                                        swv_bool* out_is_training);
/* Calls a method ("forward") of a module that was loaded or is the library's, or of a part of one.
 * Results as swv_op_call. COLLECTIVE where its tensors are sharded. */
SWV_API SWV_MUST_USE swv_status* swv_module_call(swv_module* module, const char* method,
                                                 swv_grad_mode mode, const swv_value* arguments,
                                                 size_t num_arguments, swv_value* out_results,
                                                 size_t capacity, size_t* out_num_results);
/* The same where the last num_names arguments are given by name. */
SWV_API SWV_MUST_USE swv_status* swv_module_call_named(
    swv_module* module, const char* method, swv_grad_mode mode, const swv_value* arguments,
    size_t num_arguments, const char* const* names, size_t num_names, swv_value* out_results,
    size_t capacity, size_t* out_num_results);

/* A forward of the host's in place of one of the library's. Its inputs are the tensors that the
 * module's forward takes, NULL for one that it is not given, and its outputs what that gives, each of
 * which it writes. */
typedef struct swv_patch {
  size_t struct_size;
  const char* name; /* for errors */
  void* user_data;
  swv_status* (*forward)(void* user_data, const swv_function_call* call);
  void (*drop)(void* user_data); /* may be NULL */
} swv_patch;
#define SWV_PATCH_INIT {SWV_SIZE_TO(swv_patch, drop), NULL, NULL, NULL, NULL}

/* From now on patch->forward runs in place of the forward of every module of the library's in `module`
 * that `pattern` names (of FQNs, as in plans; "" is the module itself), whoever calls it, between the
 * inputs and outputs of a plan, which may come before or after. A module that is patched already gives
 * its patched forward to the new patch. `patch` is copied; user_data is dropped with the modules, also
 * if this fails, and must not keep a handle of them, which would keep it: call->module is one. The same
 * on every rank; patch->forward runs on the thread that runs the model.
 * SWV_CODE_NOT_FOUND: no module is called so, with names that are nearly the same;
 * SWV_CODE_FAILED_PRECONDITION, with nothing changed: one of them is the host's, takes or gives something
 * else than tensors, or is a layer of LibTorch's inside of another module, where it is called directly
 * (Linear, Embedding, LayerNorm, ...): patch what calls it. */
SWV_API SWV_MUST_USE swv_status* swv_module_patch(swv_module* module, const char* pattern,
                                                  const swv_patch* patch);
/* In a patch's forward: runs what would have run without the patch, as often as wanted. Inputs and
 * outputs as many as the call's; an input may be NULL. COLLECTIVE as that is. */
SWV_API SWV_MUST_USE swv_status* swv_function_context_original(
    const swv_function_context* context, swv_grad_mode mode, const swv_tensor* const* inputs,
    size_t num_inputs, swv_tensor** out_outputs, size_t num_outputs);

/* ---- Plans ------------------------------------------------------------------------------------
 * A plan says where everything lies, by lines of a pattern and placements. Its first part speaks of
 * parameters and buffers by their FQNs. Of the lines that match a name the most specific counts: an
 * exact name, then patterns in which * stands for any characters, ? for one and {a,b} for either,
 * by how many characters they have besides, then "re:" and a regular expression (ECMAScript's).
 * Lines of equal standing have to agree. Dots are characters, too: "blocks.*.input" also speaks of
 * "blocks.0.up"; the blocks alone are "blocks.?.input", or "re:blocks\.[0-9]+.input".
 *
 * Its second part says where inputs and outputs of modules go whenever they run. The pattern is a
 * module's, then ".input" or ".output", then nothing (the first), an index (".input.1") or the name
 * that an operator's schema has for an argument. Along mesh dimensions that are not named a tensor
 * stays as it is. A module is met in the operators that its parameter "weight" (or its only one)
 * takes part in, whoever calls them; one without, where the host runs it between swv_forward_begin
 * and swv_forward_end.
 *
 * Its third part names modules that say themselves how they shard (swv_module_set_sharding), and the
 * mesh dimensions along which, each with a style that the module has, or none.
 *
 * As JSON, where ["R", "S(0)"] and "[R, S(0)]" are placements by position, too:
 *   {"parameter": {"*.{q,k,v,up}.weight": {"tp": "S(0)"}, "*.{o,down}.weight": {"tp": "S(1)"}},
 *    "forward": {"*.norm.input": {"tp": "S(1)"}, "*.o.output": {"tp": "R"}},
 *    "module": {"*.mlp": "tp", "*.moe": {"tp": "experts"}}} */

SWV_API SWV_MUST_USE swv_status* swv_plan_create(swv_plan** out_plan);
/* An error says on which line of the text. */
SWV_API SWV_MUST_USE swv_status* swv_plan_from_json(const char* text, swv_plan** out_plan);
/* From the tensor-parallel plan of a Hugging Face model: its object ({"layers.*.mlp.up_proj":
 * "colwise"}), or the configuration that has it as base_model_tp_plan. `module` has its parameters
 * by the names that they have there. tp_mesh_dim NULL: "tp". */
SWV_API SWV_MUST_USE swv_status* swv_plan_from_hugging_face(const swv_module* module,
                                                            const char* text,
                                                            const char* tp_mesh_dim,
                                                            swv_plan** out_plan);
/* The library's plan for its models, tensor parallelism as in Megatron-LM, also for a model that is
 * written otherwise with the same names. kind and config_json as swv_module_create_by_kind takes
 * them; kind NULL: the configuration's "model_type". options_json NULL: {}; else
 *   "mesh_dim": "tp"             along which; other dimensions replicate
 *   "sequence_parallel": false   activations between attention and MLP lie along the sequence
 *   "shard_vocabulary": true     embedding, head and logits are cut by the vocabulary; not of vit
 *   "expert_parallel": false     whole experts on every rank, in place of parts; of mixtral
 * kind may also be a part of models, for those that the library does not have: "attention" (q_proj,
 * k_proj, v_proj, o_proj; of the configuration it reads "num_attention_heads" and
 * "num_key_value_heads"), "mlp" (gate_proj, up_proj, down_proj; config_json "{}" will do) or "moe",
 * which say where they stand:
 *   "fqn": "model.layers.*.mlp"  a pattern of modules; "" is the model
 * SWV_CODE_INVALID_ARGUMENT for an option that the model does not have (it lists those that it has),
 * and for heads that do not divide; SWV_CODE_NOT_FOUND for a mesh without the dimension. No
 * communication. */
SWV_API SWV_MUST_USE swv_status* swv_plan_from_zoo(const char* kind, const char* config_json,
                                                   const swv_mesh* mesh, const char* options_json,
                                                   swv_plan** out_plan);
/* From what modules are, in place of where each parameter lies: patterns of modules, each with a
 * style by its name or an object with its options.
 *   {"layers.*.mlp":  "pairwise",
 *    "layers.*.attn": {"style": "sequence", "sequence_dim": 1, "heads": 8},
 *    "embedding":     {"style": "rowwise", "output": "S(1)"},
 *    "layers.*":      {"style": "prepare_input", "input": ["S(1)", null], "mask": "R"}}
 * colwise and rowwise take "input" and "output", a placement each; pairwise "output" and "heads";
 * sequence "sequence_dim" and "heads"; prepare_input "input", a placement or a list, and arguments
 * by name; prepare_output "output". {"style": "pairwise"} is the style of the whole. tp_mesh_dim
 * NULL: the mesh's only dimension, or "tp" of several. SWV_CODE_INVALID_ARGUMENT says on which line
 * something is no style, lists the styles or the options, and names a module that a style does not
 * know; SWV_CODE_NOT_FOUND for a pattern that matches none. No communication. */
SWV_API SWV_MUST_USE swv_status* swv_plan_from_styles(const swv_module* module,
                                                      const swv_mesh* mesh, const char* styles_json,
                                                      const char* tp_mesh_dim, swv_plan** out_plan);

/* A model for swv_plan_auto: the same one every time, which no plan has been applied to. Called
 * within deferred initialisation: what it makes has no memory. What it writes to *out_module, which
 * is NULL before, is taken over. */
typedef swv_status* (*swv_make_model_fn)(void* user_data, swv_module** out_module);
/* What a step of the model that was made last minimises: a number, on `mesh`, where the module lies
 * now. Brings the batch there as a real step does; does not call backward. module and mesh are the
 * library's, and only meanwhile; the mesh has other ranks that are not there, and counts what would
 * be sent. What it writes to *out_loss, which is NULL before, is taken over. */
typedef swv_status* (*swv_model_loss_fn)(void* user_data, swv_module* module, swv_mesh* mesh,
                                         swv_tensor** out_loss);

typedef struct swv_plan_auto_options {
  size_t struct_size;
  const char* tp_mesh_dim;  /* along which to cut; NULL: the only one, or "tp" of several */
  int64_t memory_limit;     /* bytes that a rank has; 0: as many as it takes */
  int64_t optimizer_states; /* numbers that the optimizer keeps for each parameter: of Adam 2 */
  int64_t heads;            /* of attentions; 0: not known */
  int64_t max_evaluations;  /* plans that are measured at most, each about a step of one rank */
  int32_t sequence_dim;     /* of the activations */
} swv_plan_auto_options;
#define SWV_PLAN_AUTO_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_plan_auto_options, sequence_dim), NULL, 0, 2, 0, 120, 1}

/* Searches for a plan: which modules are worth cutting on the mesh, and how, by the mesh's cost model
 * (swv_mesh_set_cost_model). Every plan that is looked at is measured: the model is made without
 * memory, and one rank's part of a step really runs on the CPU, on the thread of the call. out_text
 * and out_json (either may be NULL) say what each choice costs, and what the next best was.
 *   {"plan": {"parameter", "forward"}, "cost": {"seconds", "bytes_sent", "memory", ...},
 *    "evaluations": 31, "finished": true, "groups": [{"modules": "h.*.attn", "count": 2,
 *      "chosen": "PairwiseParallel", "choices": [{"style", "cost", "obstacle"}]}]}
 * SWV_CODE_NOT_FOUND for a mesh without the dimension; SWV_CODE_RESOURCE_EXHAUSTED if no plan keeps
 * the memory limit; SWV_CODE_FAILED_PRECONDITION for a step that reads values. Local; every rank
 * finds the same. */
SWV_API SWV_MUST_USE swv_status* swv_plan_auto(const swv_mesh* mesh, swv_make_model_fn make,
                                               swv_model_loss_fn loss, void* user_data,
                                               const swv_plan_auto_options* options,
                                               swv_plan** out_plan, swv_string** out_text,
                                               swv_string** out_json);

SWV_API SWV_MUST_USE swv_status* swv_plan_to_json(const swv_plan* plan, swv_string** out_text);
SWV_API SWV_MUST_USE swv_status* swv_plan_share(const swv_plan* plan, swv_plan** out_plan);
SWV_API void swv_plan_free(swv_plan* plan);

/* Append a line: of the first part, by the names of mesh dimensions (those that are not named
 * replicate) or by position, with the order in which they cut; and of the second part. Not while
 * another thread uses the plan. */
SWV_API SWV_MUST_USE swv_status* swv_plan_add(swv_plan* plan, const char* pattern,
                                              const swv_named_placement* placements,
                                              size_t num_placements);
SWV_API SWV_MUST_USE swv_status* swv_plan_add_layout(swv_plan* plan, const char* pattern,
                                                     const swv_layout* layout);
SWV_API SWV_MUST_USE swv_status* swv_plan_add_forward(swv_plan* plan, const char* pattern,
                                                      const swv_named_placement* placements,
                                                      size_t num_placements);
SWV_API SWV_MUST_USE swv_status* swv_plan_add_forward_layout(swv_plan* plan, const char* pattern,
                                                             const swv_layout* layout);

/* Appends a line of the third part. styles NULL: none; else one for each mesh dimension, NULL or ""
 * for none. */
SWV_API SWV_MUST_USE swv_status* swv_plan_add_module(swv_plan* plan, const char* pattern,
                                                     const char* const* mesh_dims,
                                                     const char* const* styles,
                                                     size_t num_mesh_dims);
/* Appends all lines of `other`, a plan of another part of the model, say; it may be the plan itself. */
SWV_API SWV_MUST_USE swv_status* swv_plan_append(swv_plan* plan, const swv_plan* other);

/* What swv_module_distribute would do, or its error; nothing is changed or sent. A table, and JSON,
 * in which a tensor that no line matches has the pattern null; either may be NULL.
 *   {"parameter": [{"names": ["h.0.q.weight"], "shape": [8, 4], "is_buffer": false,
 *      "layout": "[R, S(0)]", "local_shape": [4, 4], "pattern": "*.q.weight"}],
 *    "forward": [{"module": "h.0.q", "value": "input.0", "placements": {"tp": "R"},
 *      "pattern": "*.q.input"}]} */
SWV_API SWV_MUST_USE swv_status* swv_plan_resolve(const swv_plan* plan, const swv_module* module,
                                                  const swv_mesh* mesh, swv_string** out_text,
                                                  swv_string** out_json);

/* Turns every parameter and buffer into a sharded tensor, in place; what no line matches is
 * replicated. plan NULL: all replicated. A line that matches nothing, one that decides nothing
 * since more specific lines match all that it does, lines that place one tensor differently, and
 * one about a forward that cannot be met are errors before anything changes. COLLECTIVE, also if
 * source is -1: whether all have the same is found out then. */
SWV_API SWV_MUST_USE swv_status* swv_module_distribute(swv_module* module, const swv_mesh* mesh,
                                                       const swv_plan* plan,
                                                       const swv_distribute_options* options);

/* ---- Modules that are larger than a machine ----------------------------------------------------
 * Constructed without memory, sharded, and then made, each rank its parts and nothing else:
 *
 *   swv_deferred_init(&scope);
 *   swv_module_create_by_kind("llama", config, &model);
 *   swv_scope_free(scope);
 *   swv_module_distribute(model, mesh, plan, NULL);
 *   swv_module_materialize(model, NULL);
 *
 * The values are, bit by bit, the parts of what the same calls make on one rank. */

/* Until the scope is freed, what the calling thread makes is deferred: modules by their kinds,
 * tensors that are filled (swv_tensor_zeros and the like), what operators make without tensors among
 * their arguments. It has a shape and a dtype, and no memory; what operators do to it is recorded,
 * within the scope and after it. What needs values is SWV_CODE_FAILED_PRECONDITION, which names the
 * tensor. swv_tensor_from_data, swv_tensor_from_dlpack and swv_module_load make what they make at
 * once. This is a thread's, and not a rank's, since a tensor that is made belongs to no rank yet: a
 * host whose tasks change threads holds on to one in between. Scopes nest, and may be freed in any
 * order, from any thread; two that are open at once on a thread are one. */
SWV_API SWV_MUST_USE swv_status* swv_deferred_init(swv_scope** out_scope);

/* Given values, in place of what was recorded: num_values of them, by their FQNs in the module.
 * Whole plain tensors, the same on all ranks, of which each copies its part; or sharded ones on the
 * same mesh, in any layout. */
typedef struct swv_materialize_options {
  size_t struct_size;
  const char* const* fqns;
  const swv_tensor* const* values;
  size_t num_values;
  uint64_t seed;     /* of the random numbers, whatever the mesh and its ranks */
  swv_bool has_seed; /* 0: sharded ones draw from their mesh (swv_mesh_seed), which goes on, plain
                        ones from the process (swv_seed) */
} swv_materialize_options;
#define SWV_MATERIALIZE_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_materialize_options, has_seed), NULL, NULL, 0, 0, 0}

/* Gives values to the parameters and buffers of the module, a whole or a part, that have none; what
 * has values is left alone. Before anything is changed: SWV_CODE_NOT_FOUND for a value with an FQN
 * that the module does not have, SWV_CODE_FAILED_PRECONDITION for one that has values already,
 * SWV_CODE_INVALID_ARGUMENT for one of another shape, and for ranks that have recorded different
 * things. COLLECTIVE over the meshes that they are on: one small comparison. */
SWV_API SWV_MUST_USE swv_status* swv_module_materialize(swv_module* module,
                                                        const swv_materialize_options* options);
/* Whether it has no values yet: plain, or sharded. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_is_deferred(const swv_tensor* tensor,
                                                        swv_bool* out_is_deferred);

/* ---- Fully sharded -----------------------------------------------------------------------------
 * Along one mesh dimension each rank keeps a part of every parameter, of its gradient and of the
 * optimizer's state. Parameters are whole only while operators use them, a unit at a time:
 *
 *   const char* const units[] = {"blocks.*"};  // one for each block, and one for the rest
 *   swv_fully_shard_options options = SWV_FULLY_SHARD_OPTIONS_INIT;
 *   options.units = units;
 *   options.num_units = 1;
 *   swv_module_fully_shard(model, mesh, &options, NULL, NULL);
 *
 * A unit is gathered when an operator first touches one of its parameters, forward or backward,
 * whoever wrote the forward. The order in which units come is learned, and the next one is gathered
 * ahead. A unit is emptied when the next one is touched. When its gradients are there one
 * reduce-scatter begins to bring them to where the parameters rest, while backward goes on; when that
 * ends they are there. A parameter rests as a sharded tensor
 * that is cut into rows, unevenly, and its gradient lies alike: optimizers, swv_clip_grad_norm and
 * swv_tensor_full_tensor need to know nothing. Without gradients operators on parameters alone, or with
 * numbers, work on what rests. Its parts share their unit's memory.
 *
 * Along other mesh dimensions parameters stay as they are: a plan (swv_module_distribute) comes
 * first. With a dimension on which they are replicated and the batch is cut, this is hybrid
 * sharding. */

/* What is a unit. Patterns are of modules' FQNs, as a plan's; of modules within each other one takes
 * the outermost that it matches, and another may name units in those. What is in no other unit is
 * one with the module that is given. Modules with less than min_numel elements belong to the unit
 * around them; without patterns and types every module is a unit that has so many outside of units
 * within it.
 * With a param_dtype an operator that takes a parameter, or a view of one, casts what it takes beside
 * it, but buffers and numbers. Parameters that are complex or have eight bits stay as they are. */
typedef struct swv_fully_shard_options {
  size_t struct_size;
  const char* mesh_dim;     /* along which parameters are cut; NULL: the mesh's first */
  const char* const* units; /* patterns */
  size_t num_units;
  const char* const* unit_types; /* of modules of the library's: "Linear" */
  size_t num_unit_types;
  int64_t min_numel;              /* 0 or more */
  int32_t source;                 /* of what is plain; as in swv_distribute_options */
  swv_bool reshard_after_forward; /* 0: what forward has gathered stays for backward */
  /* Mixed precision: F16, BF16, F32 or F64; SWV_DTYPE_DEFAULT, which is 0: as below. What rests, its
   * gradient, and so what optimizers work on, keeps its type: master weights. */
  swv_dtype param_dtype;   /* what operators see, as units are gathered; 0: as they rest */
  swv_dtype reduce_dtype;  /* in what gradients are summed over ranks; 0: as operators see them */
  swv_dtype output_dtype;  /* of what operators give that meet them and an input; 0: as it comes */
  swv_bool equal_segments; /* 1: ranks keep as much as each other, with gaps ("padding" below) */
  /* After forward a unit stays divided among so many neighbours, from whom backward gathers it: a
   * divisor of the ranks; 0: among all of them. */
  int64_t reshard_after_forward_ranks;
  /* CPU offload: where operators see parameters that rest on the CPU, as their gradients and optimizers'
   * states do; the CPU: where they rest. Buffers and numbers move to it. */
  swv_device compute_device;
} swv_fully_shard_options;
#define SWV_FULLY_SHARD_OPTIONS_INIT                                                       \
  {                                                                                        \
    SWV_SIZE_TO(swv_fully_shard_options, compute_device), NULL, NULL, 0, NULL, 0, 0, 0, 1, \
        SWV_DTYPE_DEFAULT, SWV_DTYPE_DEFAULT, SWV_DTYPE_DEFAULT, 0, 0, {                   \
      SWV_DEVICE_CPU, 0                                                                    \
    }                                                                                      \
  }

/* Plain parameters and buffers become sharded tensors, in place; parameters that are in units
 * already, of a module inside that was given before, stay there. A tied parameter belongs to one
 * unit, that of its first name. Numbers (0-dimensional parameters) stay replicated, and need
 * swv_module_finish_grad_sync. Units live as long as their parameters, and need the module no more.
 * What became a unit: a table, and JSON with the elements of this rank's whole parameters and of
 * what it keeps; either may be NULL.
 *   [{"module": "blocks.0", "parameters": ["blocks.0.up.weight"], "numel": 40, "kept": 20, "padding": 0}]
 * "padding" are the elements of gaps, of all ranks together, which travel, too.
 * Before anything is changed: SWV_CODE_NOT_FOUND for a dimension that the mesh does not have, and for
 * a pattern or a type that matches no module with parameters; SWV_CODE_INVALID_ARGUMENT for a
 * parameter on another mesh or cut along the dimension already, a compute_device that LibTorch does
 * not have here or of parameters on another GPU, and options that differ between ranks;
 * SWV_CODE_FAILED_PRECONDITION if all parameters are in units
 * already: modules inside come first. While the model runs: SWV_CODE_FAILED_PRECONDITION for a write
 * to a view of a parameter, and for ranks that use units in different orders; with a compute_device
 * also in a captured step and where gradients would be recorded on the CPU, and
 * SWV_CODE_UNIMPLEMENTED for gradients of gradients. Of a backward that fails on one rank the others
 * wait for its collectives: that rank returns its error or calls swv_comm_abort, and all end at once.
 * COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_module_fully_shard(swv_module* module, const swv_mesh* mesh,
                                                        const swv_fully_shard_options* options,
                                                        swv_string** out_text,
                                                        swv_string** out_json);
/* Empties what is whole, of all units of the mesh: what evaluation used last stays so until the next
 * is touched. A graph that is still to go backward gathers again. Sends nothing, but waits for what
 * is under way. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_reshard(swv_mesh* mesh);

/* Until the scope is freed, backward leaves the gradients of parameters in units of the mesh as they
 * are: sums that are still to be reduced, whole on each rank, which take memory as in a model that is
 * not sharded. The next backward that runs without such a scope sends them with its own, one
 * reduce-scatter for a unit; swv_module_finish_grad_sync sends what is left, and swv_optimizer_step
 * refuses it. A parameter that had its gradient before has it reduced in each backward, as without;
 * so has what rests on the CPU (compute_device), and what has a graph (create_graph). Scopes nest and
 * end in any order; all ranks have them around the same backwards, and zero gradients alike.
 * SWV_CODE_FAILED_PRECONDITION if nothing on the mesh is fully sharded. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_fully_shard_no_sync(const swv_mesh* mesh,
                                                              swv_scope** out_scope);

typedef struct swv_fully_shard_counters {
  size_t struct_size;
  int64_t gathers;          /* of units */
  int64_t prefetches;       /* of these, begun before the unit was touched */
  int64_t wrong_prefetches; /* then another one was touched */
  int64_t reduce_scatters;
  int64_t gathered_bytes; /* that units which are whole take up now */
  int64_t peak_gathered_bytes;
} swv_fully_shard_counters;
#define SWV_FULLY_SHARD_COUNTERS_INIT \
  {SWV_SIZE_TO(swv_fully_shard_counters, peak_gathered_bytes), 0, 0, 0, 0, 0, 0}

/* Of this rank since the mesh was made, the same on all ranks but for the bytes; as many members as
 * struct_size says. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_fully_shard_counters(
    const swv_mesh* mesh, swv_fully_shard_counters* out_counters);

/* A scope in which fully sharded parameters of a module are whole, along the mesh dimension that cuts
 * them: to export or check them, or to write them as on one rank.
 *
 *   swv_module_full_params(model, 1, -1, &scope);            // of every rank
 *   swv_full_params_get(scope, "head.weight", &plain);       // or the module's own, whole meanwhile
 *   swv_full_params_end(scope);                              // what was written is kept
 *   swv_scope_free(scope);                                   // without an end it is dropped
 *
 * With rank -1 the parameters themselves are whole on every rank, in the memory of the plain tensors;
 * each rank keeps its part of what it has itself, so all write the same. With a rank, a place along
 * the dimension, that one alone has plain copies, and the parameters rest as ever. Without writeback
 * operators that write parameters are SWV_CODE_FAILED_PRECONDITION, and what is written to the plain
 * tensors is dropped. SWV_CODE_FAILED_PRECONDITION are operators on whole parameters that record
 * gradients, too. Of every rank's, scopes may be nested.
 * SWV_CODE_FAILED_PRECONDITION if no parameter is fully sharded, one is deferred, for writeback inside
 * of a scope without, and for a rank's scope and another of the same units;
 * SWV_CODE_INVALID_ARGUMENT for a rank that is not there and for ranks that differ. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_module_full_params(const swv_module* module,
                                                        swv_bool writeback, int32_t rank,
                                                        swv_scope** out_scope);
/* By the FQN in the outermost module that was sharded. NULL on a rank that has none. A plain tensor,
 * which is the parameter's until the scope ends, and nobody's afterwards. SWV_CODE_NOT_FOUND. */
SWV_API SWV_MUST_USE swv_status* swv_full_params_get(const swv_scope* scope, const char* fqn,
                                                     swv_tensor** out_tensor);
/* The parameters rest again, with what was written if there is writeback. A second time it does
 * nothing. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_full_params_end(swv_scope* scope);

/* ---- Forwards of the host's -------------------------------------------------------------------
 * How a plan meets a module without a weight of its own, whose forward is the host's code:
 *
 *   swv_module_forward(model, "blocks.0", &forward);       // once, before swv_module_distribute
 *
 *   swv_forward_begin(forward, mode, &x, 1, &in, &scope);  // every time that it runs
 *   ...                                                    // y from in
 *   swv_forward_end(scope, &y, 1, &out);
 *   swv_scope_free(scope);                                 // also if something failed in between
 */

/* The forward of the module of this name inside of the module; "" is the module itself. Asking for
 * it says that the host runs it as above: plans that are applied later may speak of it, and then
 * meet it there, also if it has a weight. */
SWV_API SWV_MUST_USE swv_status* swv_module_forward(swv_module* module, const char* fqn,
                                                    swv_forward** out_forward);
SWV_API SWV_MUST_USE swv_status* swv_forward_share(const swv_forward* forward,
                                                   swv_forward** out_forward);
SWV_API void swv_forward_free(swv_forward* forward);
/* Writes the inputs, num_inputs handles, as the plan wants them: redistributed, differentiably, or
 * the same tensors where it says nothing. One that is NULL stays so. From now on traces and errors
 * say that the module runs, until the scope is freed. Without a plan it costs little, and on plain
 * modules too. COLLECTIVE as what the plan says is. */
SWV_API SWV_MUST_USE swv_status* swv_forward_begin(const swv_forward* forward, swv_grad_mode mode,
                                                   const swv_tensor* const* inputs,
                                                   size_t num_inputs, swv_tensor** out_inputs,
                                                   swv_scope** out_scope);
/* The same with the outputs, once, in the mode of the beginning. SWV_CODE_INVALID_ARGUMENT if the
 * plan speaks of an input or an output that there was not. */
SWV_API SWV_MUST_USE swv_status* swv_forward_end(swv_scope* scope, const swv_tensor* const* outputs,
                                                 size_t num_outputs, swv_tensor** out_outputs);

/* ---- Gradients after backward ------------------------------------------------------------------
 * Between swv_tensor_backward and the optimizer's step. */

/* Brings every gradient into its parameter's layout, in buckets. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_module_finish_grad_sync(swv_module* module);
SWV_API SWV_MUST_USE swv_status* swv_finish_grad_sync(swv_tensor* const* parameters,
                                                      size_t num_parameters);

/* Gradients on their way, one after the other, for a hook. Everything is borrowed for the call. */
typedef struct swv_gradient_bucket {
  size_t struct_size;
  int64_t index;                /* of those of this iteration, in the order in which they began */
  swv_tensor* flat;             /* plain, one-dimensional; what it has in the end is what arrives */
  swv_tensor* const* gradients; /* views of it, with the shapes of this rank's parts */
  const char* const* parameters; /* their names; "" where there is none */
  size_t num_gradients;          /* and of names */
  swv_comm* comm;                /* the ranks whose summands are to be summed up */
  swv_bool is_discarded;         /* swv_grad_sync_discard: nothing comes of it */
} swv_gradient_bucket;

/* What reduces buckets in place of an all-reduce. begin (may be NULL) is called when a bucket is full,
 * in swv_tensor_backward mostly, and finish of all buckets in swv_module_finish_grad_sync, after begin
 * of all: each rank issues the same operations in the same order. In the first iteration all
 * gradients come at the end, in other buckets than later. The mode is SWV_MODE_NO_GRAD. For gradients
 * of F16, BF16, F32 and F64 that an all-reduce would sum; others travel as without it. A failed call
 * comes out of swv_module_finish_grad_sync, on all ranks of the mesh, which is lost then.
 * begin and finish are called by one thread at a time, that of swv_tensor_backward or
 * swv_module_finish_grad_sync. */
typedef struct swv_gradient_hook {
  size_t struct_size;
  const char* name; /* the ranks compare it; with what it does, options and all */
  void* user_data;
  swv_status* (*begin)(void* user_data, const swv_gradient_bucket* bucket);
  swv_status* (*finish)(void* user_data, const swv_gradient_bucket* bucket);
  void (*drop)(void* user_data); /* may be NULL */
} swv_gradient_hook;
#define SWV_GRADIENT_HOOK_INIT {SWV_SIZE_TO(swv_gradient_hook, drop), NULL, NULL, NULL, NULL, NULL}

/* PowerSGD (Vogels et al., 2019): gradients that are matrices travel as two thin ones, of so many
 * columns, in two collectives for a bucket; what is lost is added to the next gradient. */
typedef struct swv_power_sgd_options {
  size_t struct_size;
  int64_t columns;             /* 1 or more: the rank of what arrives */
  int64_t start_iteration;     /* so many times a gradient travels whole before */
  double min_compression_rate; /* 1 or more: a matrix that would not become so much smaller stays */
  uint64_t seed;
  swv_bool error_feedback;
  swv_bool warm_start; /* begins with what the step before has ended with */
} swv_power_sgd_options;
#define SWV_POWER_SGD_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_power_sgd_options, warm_start), 1, 0, 2.0, 0, 1, 1}

typedef struct swv_grad_sync_options {
  size_t struct_size;
  int64_t bucket_bytes;   /* as they travel, 1 or more */
  swv_dtype reduce_dtype; /* see below; SWV_DTYPE_DEFAULT: their own */
  /* One of these at most; NULL: an all-reduce. With one, swv_grad_sync_create is COLLECTIVE, and
   * swv_module_finish_grad_sync takes one small all-reduce more. The hook is copied, its user_data is
   * dropped with the swv_grad_sync. */
  const swv_gradient_hook* hook;
  const swv_power_sgd_options* power_sgd;
} swv_grad_sync_options;
#define SWV_GRAD_SYNC_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_grad_sync_options, power_sgd), 26214400, SWV_DTYPE_DEFAULT, NULL, NULL}

/* From now on, until it is freed, gradients of the module's sharded parameters leave in buckets
 * while backward goes on; swv_module_finish_grad_sync sends the rest, and waits for all. The first
 * iteration shows in which order they come, and sends at its end. All ranks make it alike. It keeps
 * the parameters alive, and needs the module no more. SWV_CODE_FAILED_PRECONDITION if a parameter is
 * in another one that is still there. After a backward that failed, on any rank, all ranks call
 * swv_grad_sync_discard.
 * With a reduce_dtype, F16, BF16, F32 or F64, gradients of these types travel and are summed up in
 * it: BF16 halves the bytes of F32, and keeps eight bits of each rank's part and of each partial sum.
 * What arrives has the gradient's own type. Those with a graph (create_graph) travel as they are. */
SWV_API SWV_MUST_USE swv_status* swv_grad_sync_create(swv_module* module,
                                                      const swv_grad_sync_options* options,
                                                      swv_grad_sync** out_sync);
/* Waits for what is under way, and leaves gradients as they are. Its scopes end, too. */
SWV_API void swv_grad_sync_free(swv_grad_sync* sync);
/* Until the scope is freed, backward sends nothing: gradients of several are summed up first. Scopes
 * nest, end in any order, and do nothing once the swv_grad_sync is freed. */
SWV_API SWV_MUST_USE swv_status* swv_grad_sync_no_sync(swv_grad_sync* sync, swv_scope** out_scope);
/* In place of swv_module_finish_grad_sync, after a backward that failed on some rank: what has left in
 * it comes to nothing, and the next iteration is one as any. Gradients stay as they are, for the
 * caller to zero. The ranks agree that it failed on a communicator that is not the mesh's, where
 * something may be under way (swv_world_comm); one that calls swv_module_finish_grad_sync instead
 * gets NaN. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_grad_sync_discard(swv_grad_sync* sync);
/* How many buckets there are, 0 before the first iteration's end; and how many have left before
 * swv_module_finish_grad_sync, in all iterations. Either may be NULL. */
SWV_API SWV_MUST_USE swv_status* swv_grad_sync_counts(const swv_grad_sync* sync,
                                                      int64_t* out_buckets,
                                                      int64_t* out_left_in_backward);
/* What PowerSGD has learned on this rank, by name ("blocks.0.weight.error", ".q", ".iteration"): plain
 * tensors, copies. Each rank keeps its own, and gives it back when it resumes on as many ranks. Under a
 * swv_grad_scaler every ".error" is in units of its scale: where swv_grad_scaler_update has changed
 * that, the host sets them (swv_grad_sync_set_states) to as many times what they were.
 * Either output may be NULL. SWV_CODE_FAILED_PRECONDITION without PowerSGD. */
SWV_API SWV_MUST_USE swv_status* swv_grad_sync_num_states(const swv_grad_sync* sync,
                                                          size_t* out_num);
SWV_API SWV_MUST_USE swv_status* swv_grad_sync_state(const swv_grad_sync* sync, size_t index,
                                                     swv_string** out_name,
                                                     swv_tensor** out_tensor);
/* All of it, in place of what there was. SWV_CODE_INVALID_ARGUMENT, before anything is changed, for a
 * name or a tensor that swv_grad_sync_state does not give. */
SWV_API SWV_MUST_USE swv_status* swv_grad_sync_set_states(swv_grad_sync* sync,
                                                          const char* const* names,
                                                          const swv_tensor* const* tensors,
                                                          size_t num_states);

/* ---- Data parallelism -------------------------------------------------------------------------
 *   swv_module_distributed_data_parallel(model, mesh, NULL, &ddp);
 *   ...                                      // the batch cut along the mesh's first dimension
 *   swv_tensor_backward(loss, NULL, NULL);   // gradients leave in buckets
 *   swv_module_finish_grad_sync(model);
 *   swv_optimizer_step(optimizer);
 *
 * A loss is that of all ranks' input, and nothing is divided by the number of ranks. A batch norm's
 * statistics are of all of it, and the same on all ranks. */
typedef struct swv_data_parallel_options {
  size_t struct_size;
  const char* mesh_dim; /* along which no parameter may be cut; NULL: the mesh's first */
  int32_t source;       /* as that of swv_distribute_options, of what is plain */
  int32_t reserved;     /* 0 */
  const swv_grad_sync_options* sync; /* NULL: the defaults */
} swv_data_parallel_options;
#define SWV_DATA_PARALLEL_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_data_parallel_options, sync), NULL, 0, 0, NULL}

/* Parameters and buffers that are plain become replicated over the mesh, in place, and gradients leave
 * by themselves as long as out_sync lives. What tensor parallelism (swv_module_distribute, before this,
 * on the same mesh) has cut stays so. Before anything is changed, on all ranks:
 * SWV_CODE_NOT_FOUND for a dimension that the mesh does not have; SWV_CODE_INVALID_ARGUMENT for a
 * parameter on another mesh or cut along the dimension, and for modules or options that differ between
 * ranks; SWV_CODE_FAILED_PRECONDITION for a module without parameters, and for one that is fully
 * sharded, in an optimizer's ZeRO or in a swv_grad_sync. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_module_distributed_data_parallel(
    swv_module* module, const swv_mesh* mesh, const swv_data_parallel_options* options,
    swv_grad_sync** out_sync);
/* The same without gradients: for a swv_grad_sync of one's own. mesh_dim, source: as above.
 * COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_module_pre_dp_transform(swv_module* module,
                                                             const swv_mesh* mesh,
                                                             const char* mesh_dim, int32_t source);
/* Every rank gets the buffers of the first one along mesh_dim (NULL: the mesh's first): for what a
 * program writes of its own on each rank. Those that are cut along it stay. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_module_broadcast_buffers(swv_module* module,
                                                              const swv_mesh* mesh,
                                                              const char* mesh_dim);
/* Between swv_module_distribute and swv_module_fully_shard: whether the module is tensor parallel on
 * this mesh, and whole along mesh_dim (NULL: the mesh's first), as the other one wants it.
 * SWV_CODE_FAILED_PRECONDITION for the wrong order, on all ranks. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_module_enable_2d_with_fsdp(swv_module* module,
                                                                const swv_mesh* mesh,
                                                                const char* mesh_dim);

#define SWV_MAX_BATCH_TENSORS 8
/* Ranks with different numbers of batches, at the end of an epoch: of each rank's rows of the tensors of
 * a batch, plain, one tensor each, cut between rows as ranks have brought them; a rank that has no more
 * gives num_tensors 0, and takes part without rows. Writes out_num_tensors handles to out_tensors,
 * which has room for SWV_MAX_BATCH_TENSORS; none once no rank has any. mesh_dims, num_mesh_dims:
 * along which ranks have input of their own (NULL, 0: the mesh's first); out_ranks_with_input: how many
 * do, may be NULL. SWV_CODE_INVALID_ARGUMENT, on all ranks, for more tensors than there is room for,
 * sharded ones, numbers, other dtypes, types of devices or rows of other shapes than other ranks have. A
 * rank without rows has its parts on the current device of the others' type. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_join_batch(swv_mesh* mesh, const char* const* mesh_dims,
                                                     size_t num_mesh_dims,
                                                     const swv_tensor* const* tensors,
                                                     size_t num_tensors, swv_tensor** out_tensors,
                                                     size_t* out_num_tensors,
                                                     int64_t* out_ranks_with_input);

typedef struct swv_clip_options {
  size_t struct_size;
  double norm_type;            /* above 0; infinity too */
  swv_bool error_if_nonfinite; /* a norm that is not finite: SWV_CODE_OUT_OF_RANGE, on every rank */
} swv_clip_options;
#define SWV_CLIP_OPTIONS_INIT {SWV_SIZE_TO(swv_clip_options, error_if_nonfinite), 2.0, 0}

/* Multiplies all gradients by max_norm / (norm + 1e-6) if their norm as one vector, wherever they
 * lie, is above max_norm; one that is given twice counts once. An infinite max_norm only measures, and
 * multiplies nothing, whatever the norm is. After finish_grad_sync. out_norm:
 * before the clipping, the same on every rank; may be NULL. SWV_CODE_INVALID_ARGUMENT for a
 * max_norm that is negative or no number. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_clip_grad_norm(swv_tensor* const* parameters,
                                                    size_t num_parameters, double max_norm,
                                                    const swv_clip_options* options,
                                                    double* out_norm);
/* Every gradient is none. */
SWV_API SWV_MUST_USE swv_status* swv_module_zero_grad(swv_module* module);

/* ---- Optimizers -------------------------------------------------------------------------------
 * Steps work on this rank's parts, by LibTorch's fused kernels; the state is sharded as its
 * parameter is. Those of SGD, Adam, AdamW and Lion communicate nothing; call
 * swv_module_finish_grad_sync before all. */

typedef struct swv_sgd_options {
  size_t struct_size;
  double lr;
  double momentum;
  double dampening;
  double weight_decay;
  swv_bool nesterov;
} swv_sgd_options;
#define SWV_SGD_OPTIONS_INIT {SWV_SIZE_TO(swv_sgd_options, nesterov), 1e-3, 0.0, 0.0, 0.0, 0}

typedef struct swv_adam_options {
  size_t struct_size;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay; /* added to the gradient */
  swv_bool amsgrad;
} swv_adam_options;
#define SWV_ADAM_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_adam_options, amsgrad), 1e-3, 0.9, 0.999, 1e-8, 0.0, 0}

typedef struct swv_adamw_options {
  size_t struct_size;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay; /* taken off the parameter */
  swv_bool amsgrad;
} swv_adamw_options;
#define SWV_ADAMW_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_adamw_options, amsgrad), 1e-3, 0.9, 0.999, 1e-8, 1e-2, 0}

/* Chen et al., Symbolic Discovery of Optimization Algorithms, 2023. */
typedef struct swv_lion_options {
  size_t struct_size;
  double lr;
  double beta1;
  double beta2;
  double weight_decay; /* taken off the parameter */
} swv_lion_options;
#define SWV_LION_OPTIONS_INIT {SWV_SIZE_TO(swv_lion_options, weight_decay), 1e-4, 0.9, 0.99, 0.0}

/* Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018: PyTorch's
 * numbers. The squares of gradients are kept as the means of rows and of columns. */
typedef struct swv_adafactor_options {
  size_t struct_size;
  double lr;
  double beta2_decay;    /* below 0 */
  double eps1;           /* the smallest root of a mean square; 0: the element type's epsilon */
  double eps2;           /* the smallest root mean square of a parameter */
  double clip_threshold; /* of the root mean square of an update, above 0 */
  double weight_decay;   /* taken off the parameter */
} swv_adafactor_options;
#define SWV_ADAFACTOR_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_adafactor_options, weight_decay), 1e-2, -0.8, 0.0, 1e-3, 1.0, 0.0}

/* What Muon's learning rate is multiplied by, for R rows and C columns. */
typedef int32_t swv_muon_lr_scale;
enum {
  SWV_MUON_ORIGINAL = 0,       /* sqrt(max(1, R / C)) */
  SWV_MUON_MATCH_RMS_ADAMW = 1 /* 0.2 sqrt(max(R, C)): AdamW's learning rate fits */
};
/* Jordan et al., Muon, 2024: PyTorch's numbers. Momentum of matrices that is made orthogonal by the
 * iteration X <- a X + (b A + c A A) X, where A = X X^T. */
typedef struct swv_muon_options {
  size_t struct_size;
  double lr;
  double weight_decay; /* taken off the parameter */
  double momentum;
  double ns_a;
  double ns_b;
  double ns_c;
  double eps;         /* the smallest norm that a matrix is divided by, above 0 */
  int32_t ns_steps;   /* of the iteration, 1 to 99 */
  swv_dtype ns_dtype; /* in which it computes, and matrices travel: BF16, F32 or F64 */
  swv_muon_lr_scale lr_scale;
  swv_bool nesterov;
} swv_muon_options;
#define SWV_MUON_OPTIONS_INIT               \
  {SWV_SIZE_TO(swv_muon_options, nesterov), \
   1e-3,                                    \
   0.1,                                     \
   0.95,                                    \
   3.4445,                                  \
   -4.7750,                                 \
   2.0315,                                  \
   1e-7,                                    \
   5,                                       \
   SWV_DTYPE_BF16,                          \
   SWV_MUON_ORIGINAL,                       \
   1}

/* The optimizer shares the parameters; one that is given twice is stepped once. They may be
 * distributed until the first step or look at the state. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_create_sgd(swv_tensor* const* parameters,
                                                          size_t num_parameters,
                                                          const swv_sgd_options* options,
                                                          swv_optimizer** out_optimizer);
SWV_API SWV_MUST_USE swv_status* swv_optimizer_create_adam(swv_tensor* const* parameters,
                                                           size_t num_parameters,
                                                           const swv_adam_options* options,
                                                           swv_optimizer** out_optimizer);
SWV_API SWV_MUST_USE swv_status* swv_optimizer_create_adamw(swv_tensor* const* parameters,
                                                            size_t num_parameters,
                                                            const swv_adamw_options* options,
                                                            swv_optimizer** out_optimizer);
SWV_API SWV_MUST_USE swv_status* swv_optimizer_create_lion(swv_tensor* const* parameters,
                                                           size_t num_parameters,
                                                           const swv_lion_options* options,
                                                           swv_optimizer** out_optimizer);
/* A step is COLLECTIVE over the meshes of parameters that are cut: two all-reduces along each mesh
 * dimension that cuts one, for all parameters together. Ranks that differ in what they are about to
 * do (gradients, options, steps) hear SWV_CODE_INVALID_ARGUMENT, before anything is changed. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_create_adafactor(
    swv_tensor* const* parameters, size_t num_parameters, const swv_adafactor_options* options,
    swv_optimizer** out_optimizer);
/* The same, with parameters of two dimensions: SWV_CODE_INVALID_ARGUMENT for others, which are better
 * in a group with AdamW. A matrix that is cut goes to one of the ranks that have parts of it, and its
 * result comes back: two all-to-alls for all that are cut over the same mesh dimensions. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_create_muon(swv_tensor* const* parameters,
                                                           size_t num_parameters,
                                                           const swv_muon_options* options,
                                                           swv_optimizer** out_optimizer);
/* One optimizer of several: each becomes a group, with its options and its learning rate. Parameters
 * are numbered group by group. The given ones are only read; free them. A parameter is in one group:
 * else SWV_CODE_INVALID_ARGUMENT; SWV_CODE_FAILED_PRECONDITION for one that has made steps, whose
 * state was asked for, or which uses ZeRO. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_create_groups(const swv_optimizer* const* optimizers,
                                                             size_t num_optimizers,
                                                             swv_optimizer** out_optimizer);
SWV_API SWV_MUST_USE swv_status* swv_optimizer_share(const swv_optimizer* optimizer,
                                                     swv_optimizer** out_optimizer);
SWV_API void swv_optimizer_free(swv_optimizer* optimizer);
/* Parameters without a gradient stay as they are. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_step(swv_optimizer* optimizer);
SWV_API SWV_MUST_USE swv_status* swv_optimizer_zero_grad(swv_optimizer* optimizer);
/* Of the first group; of all groups. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_lr(const swv_optimizer* optimizer, double* out_lr);
SWV_API SWV_MUST_USE swv_status* swv_optimizer_set_lr(swv_optimizer* optimizer, double lr);
/* SWV_CODE_OUT_OF_RANGE for a group that is not there. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_num_groups(const swv_optimizer* optimizer,
                                                          size_t* out_num_groups);
SWV_API SWV_MUST_USE swv_status* swv_optimizer_group_lr(const swv_optimizer* optimizer,
                                                        size_t group, double* out_lr);
SWV_API SWV_MUST_USE swv_status* swv_optimizer_set_group_lr(swv_optimizer* optimizer, size_t group,
                                                            double lr);
/* The state of parameter `index`, laid out as it is, zeros before the first step: "step" (one plain
 * f32 number); of Adam and AdamW "exp_avg", "exp_avg_sq" and, with amsgrad, "max_exp_avg_sq"; of Lion
 * "exp_avg"; of SGD with a momentum and of Muon "momentum_buffer"; of Adafactor "variance" or, from two
 * dimensions on, "row_var" and "col_var", which are whole where a mean was taken. With ZeRO it is
 * laid out as the rank's part is, in rows that are cut unevenly, and swv_tensor_full_tensor makes it
 * whole. NULL for what these options do not use. Writing to it writes the state. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_state(const swv_optimizer* optimizer, size_t index,
                                                     const char* name, swv_tensor** out_tensor);
/* Copies `tensor` over it, to resume from what was saved: of any floating-point type and the
 * parameter's shape; sharded over the same mesh if that is, else plain ("step" always). COLLECTIVE
 * if the parameter is sharded: what one rank refuses, and what differs, fails on all. SGD's first
 * step takes the gradient for its momentum: it is the first as long as "step" is 0, unless
 * momentum_buffer was set and "step" was not. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_set_state(swv_optimizer* optimizer, size_t index,
                                                         const char* name,
                                                         const swv_tensor* tensor);

/* ZeRO (Rajbhandari et al., 2020): along one mesh dimension parameters are whole on every rank, as in
 * data parallelism, and the optimizer's state and its work are divided. A step is then COLLECTIVE:
 *
 *   swv_zero_options options = SWV_ZERO_OPTIONS_INIT;
 *   options.mesh_dim = "dp";
 *   swv_optimizer_create_adamw(parameters, count, NULL, &optimizer);
 *   swv_optimizer_use_zero(optimizer, &options);
 *
 *   swv_tensor_backward(loss, NULL, NULL);
 *   swv_module_finish_grad_sync(model);  // a rank has its part of each gradient
 *   swv_optimizer_step(optimizer);       // steps its part, and gets the others'
 *
 * In stage 1 gradients are whole until swv_module_finish_grad_sync. In stage 2 they leave in backward,
 * in buckets, and only a rank's part of them stays. */
typedef struct swv_zero_options {
  size_t struct_size;
  const char* mesh_dim; /* along which the optimizer is divided; NULL: the mesh's first */
  int32_t stage;        /* 1 or 2 */
  int64_t bucket_bytes; /* of parameters that travel together, 1 or more; a larger one alone */
} swv_zero_options;
#define SWV_ZERO_OPTIONS_INIT {SWV_SIZE_TO(swv_zero_options, bucket_bytes), NULL, 1, 26214400}

/* From now on, as long as it lives. Parameters get other memory: what swv_tensor_to_local gave before
 * is no longer theirs. Before anything is changed: SWV_CODE_INVALID_ARGUMENT for options out of range
 * or that differ between ranks, and for a parameter that is plain, on another mesh, cut along the
 * dimension or fully sharded; SWV_CODE_NOT_FOUND for a dimension that the mesh does not have;
 * SWV_CODE_FAILED_PRECONDITION for an optimizer that has made steps, whose state was asked for or
 * which uses ZeRO already (of these a rank does not tell the others), and for a parameter of another
 * one that does, or did, as long as a scope of its is there, of a swv_grad_sync, or one that is still
 * deferred. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_use_zero(swv_optimizer* optimizer,
                                                        const swv_zero_options* options);
/* Until the scope is freed, backward sends nothing in stage 2 either: gradients of several are summed
 * up first. Scopes nest. SWV_CODE_FAILED_PRECONDITION without ZeRO. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_no_sync(swv_optimizer* optimizer,
                                                       swv_scope** out_scope);
/* After a backward in stage 2 that failed on this rank, at once, for others may wait in theirs for
 * buckets that this rank owes them; and, when the ranks have agreed that it failed, on a communicator
 * that is not the mesh's (swv_world_comm), on the others in place of swv_module_finish_grad_sync. What
 * has left comes to nothing, and the next iteration is one as any. Gradients stay as they are, for the
 * caller to zero. One that calls swv_module_finish_grad_sync instead gets NaN, or waits for what
 * nobody sends. What backward's own operators send is not covered, nor are several optimizers that
 * use ZeRO in one backward: then the mesh is lost. SWV_CODE_FAILED_PRECONDITION without ZeRO. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_discard(swv_optimizer* optimizer);

/* Learning-rate schedules: by what learning rates are multiplied in a step, which is counted from 0.
 * The numbers are those of transformers' get_..._schedule_with_warmup() and of torch's StepLR. */
typedef int32_t swv_schedule_shape;
enum {
  SWV_SCHEDULE_CONSTANT = 0, /* 1 */
  SWV_SCHEDULE_LINEAR = 1,   /* from 1 in a line down to 0 at step `steps` */
  SWV_SCHEDULE_COSINE = 2,   /* the same by half a wave of the cosine */
  SWV_SCHEDULE_WSD = 3,      /* 1, and in the last `decay` of `steps` steps in a line down to 0 */
  SWV_SCHEDULE_STEP = 4      /* multiplied by `gamma` every `steps` steps (0: never) */
};
typedef struct swv_schedule {
  size_t struct_size;
  int64_t steps;  /* of LINEAR, COSINE and WSD 1 or more */
  int64_t decay;  /* of SWV_SCHEDULE_WSD */
  int64_t warmup; /* from 0 in a line up to 1 at this step; the shape begins behind it */
  double gamma;   /* of SWV_SCHEDULE_STEP, 0 or more */
  double floor;   /* the smallest factor behind the warm-up, 0 to 1: the shape ends there */
  swv_schedule_shape shape;
} swv_schedule;
#define SWV_SCHEDULE_INIT \
  {SWV_SIZE_TO(swv_schedule, shape), 0, 0, 0, 1.0, 0.0, SWV_SCHEDULE_CONSTANT}

SWV_API SWV_MUST_USE swv_status* swv_schedule_factor(const swv_schedule* schedule, int64_t step,
                                                     double* out_factor);
/* Sets the learning rate of each group to what it was made with, or was set to, times the factor. */
SWV_API SWV_MUST_USE swv_status* swv_optimizer_apply_schedule(swv_optimizer* optimizer,
                                                              const swv_schedule* schedule,
                                                              int64_t step);

/* Scales losses so that gradients of 16 bits do not vanish, and tells when they are not finite
 * (Micikevicius et al., Mixed Precision Training, 2018); torch.amp.GradScaler's numbers.
 *
 *   swv_grad_scaler_scale(scaler, loss, SWV_MODE_GRAD, &scaled);
 *   swv_tensor_backward(scaled, NULL, NULL);
 *   swv_module_finish_grad_sync(model);
 *   swv_grad_scaler_unscale(scaler, parameters, count, &is_finite);  // the same on every rank
 *   if (is_finite) swv_optimizer_step(optimizer);
 *   swv_grad_scaler_update(scaler);
 */
typedef struct swv_grad_scaler_options {
  size_t struct_size;
  double init_scale;
  double growth_factor;    /* above 1 */
  double backoff_factor;   /* above 0, below 1 */
  int64_t growth_interval; /* steps without a skip until the scale grows, 1 or more */
} swv_grad_scaler_options;
#define SWV_GRAD_SCALER_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_grad_scaler_options, growth_interval), 65536.0, 2.0, 0.5, 2000}

SWV_API SWV_MUST_USE swv_status* swv_grad_scaler_create(const swv_grad_scaler_options* options,
                                                        swv_grad_scaler** out_scaler);
SWV_API void swv_grad_scaler_free(swv_grad_scaler* scaler);
/* The loss times the scale. */
SWV_API SWV_MUST_USE swv_status* swv_grad_scaler_scale(const swv_grad_scaler* scaler,
                                                       const swv_tensor* loss, swv_grad_mode mode,
                                                       swv_tensor** out_scaled);
/* Divides the gradients of the parameters by the scale. out_is_finite: whether all of them are, on all
 * ranks. One all-reduce of one number for each mesh. SWV_CODE_FAILED_PRECONDITION, before anything is
 * changed, for a parameter that has been unscaled since the last swv_grad_scaler_update, and for a
 * gradient that is still to be synchronized. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_grad_scaler_unscale(swv_grad_scaler* scaler,
                                                         swv_tensor* const* parameters,
                                                         size_t num_parameters,
                                                         swv_bool* out_is_finite);
/* The scale of the next step: smaller if a gradient was not finite, larger after growth_interval times
 * in a row where all were. SWV_CODE_FAILED_PRECONDITION if nothing was unscaled. */
SWV_API SWV_MUST_USE swv_status* swv_grad_scaler_update(swv_grad_scaler* scaler);
/* To resume. Either result may be NULL. */
SWV_API SWV_MUST_USE swv_status* swv_grad_scaler_state(const swv_grad_scaler* scaler,
                                                       double* out_scale,
                                                       int64_t* out_growth_tracker);
SWV_API SWV_MUST_USE swv_status* swv_grad_scaler_set_state(swv_grad_scaler* scaler, double scale,
                                                           int64_t growth_tracker);

/* A step on a GPU that is captured once and replayed: the GPU runs its kernels and collectives
 * again, and the host does nothing for each of them (a CUDA graph).
 *
 *   for (i = 0; i < 3; ++i) TRY(train(&model));  // as ever: what is made at first use is there
 *   TRY(swv_captured_step_create(mesh, parameters, count, train, &model, &step));
 *   while (next_batch(words)) {  // by aten::copy_: inputs are where they were
 *     TRY(swv_captured_step_replay(step));
 *     if (++n % 100 == 0) TRY(swv_tensor_item(model.loss, &number));  // and so are results
 *   }
 *
 * Nothing of the step runs when it is captured: the first replay is the first time. All shapes are
 * those of that call, and so is what the host decides in it (branches, numbers that it computes):
 * the next batch and a schedule's learning rate come between replays, never in the step. Between
 * them anything may be called: it finds the weights as the last one has left them. Read anew in each replay: steps and learning rates of a swv_optimizer (SGD, Adam, AdamW); random
 * numbers go on as if the step had been called (where the library has kernels for them:
 * --config=cuda). Callbacks, traces and counters see the step once. No number of it may be wanted
 * by the host (swv_tensor_item, swv_clip_grad_norm, a swv_grad_scaler): that is an error.
 *
 * What the step allocates stays the graph's as long as the handle is there: its results hold the
 * numbers of the last replay, as do the gradients of `parameters`, which each replay makes their
 * gradients again; the step makes them anew (zero_grad comes before backward, in it). What is used
 * for the first time in the step is refused where a replay would make it anew: take a step before.
 * Tensors that it only reads (inputs, weights) must stay where they are: their handles must live.
 * All ranks of the mesh capture the same step, and
 * replay it equally often; a rank that does not is an error on the others. On one rank, or over
 * NCCL. */

/* A step, on the thread of the call, which is the one whose operators are captured. */
typedef swv_status* (*swv_step_fn)(void* user_data);

/* Calls `step` once, on this thread and before it returns. `parameters`: those that the step has
 * gradients for; without backward, a tensor that it reads. The step is captured on the GPU of the
 * first one; without any, on the thread's current one. The handle is the caller's; it keeps the
 * mesh. SWV_CODE_FAILED_PRECONDITION: LibTorch has no CUDA here, the backend is not NCCL, something
 * is being captured already, the step wants a number on the host, or random numbers without
 * kernels. SWV_CODE_INVALID_ARGUMENT: a parameter is on the CPU or on another GPU; a rank has
 * captured another step. SWV_CODE_UNIMPLEMENTED: a step of another optimizer. A status of `step`
 * comes out with its code. After an error the mesh can be used as before, and gradients are those
 * of before. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_captured_step_create(const swv_mesh* mesh,
                                                          swv_tensor* const* parameters,
                                                          size_t num_parameters, swv_step_fn step,
                                                          void* user_data,
                                                          swv_captured_step** out_step);
/* Waits for the last replay, and ends what the step has allocated: nothing of that may be used any
 * more. */
SWV_API void swv_captured_step_free(swv_captured_step* step);
/* Runs it on the GPU, behind what is there; the host does not wait. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_captured_step_replay(swv_captured_step* step);
/* So far. */
SWV_API SWV_MUST_USE swv_status* swv_captured_step_replays(const swv_captured_step* step,
                                                           int64_t* out_replays);

/* ---- Data --------------------------------------------------------------------------------------
 * Token ids in files, and a loader that makes batches of them ahead, on a thread of its own. What a
 * batch consists of does not depend on the number of ranks: a rank gets its part. */

/* A file of token ids, that tools/tokenize has written or that is plain. plain_dtype: of a file that
 * has no header and consists of ids alone: SWV_DTYPE_U8 (a text: its bytes), SWV_DTYPE_U16,
 * SWV_DTYPE_U32; SWV_DTYPE_DEFAULT: it has a header. SWV_CODE_INVALID_ARGUMENT for what is no such
 * file, or not whole. Files belong to no rank: several threads may use one at once. */
SWV_API SWV_MUST_USE swv_status* swv_token_file_open(const char* path, swv_dtype plain_dtype,
                                                     swv_token_file** out_file);
SWV_API SWV_MUST_USE swv_status* swv_token_file_share(const swv_token_file* file,
                                                      swv_token_file** out_file);
SWV_API void swv_token_file_free(swv_token_file* file);
SWV_API SWV_MUST_USE swv_status* swv_token_file_num_tokens(const swv_token_file* file,
                                                           int64_t* out_num);
SWV_API SWV_MUST_USE swv_status* swv_token_file_dtype(const swv_token_file* file,
                                                      swv_dtype* out_dtype);
/* Every id is smaller; 0: not known. */
SWV_API SWV_MUST_USE swv_status* swv_token_file_vocab_size(const swv_token_file* file,
                                                           int64_t* out_size);
/* As many tokens as there is room for, from `begin` on; SWV_CODE_OUT_OF_RANGE if the file has less,
 * SWV_CODE_DATA_LOSS if it has become shorter, or has an id outside of its vocabulary. */
SWV_API SWV_MUST_USE swv_status* swv_token_file_read(const swv_token_file* file, int64_t begin,
                                                     int64_t* tokens, size_t num_tokens);

typedef struct swv_loader_options {
  size_t struct_size;
  int64_t seq;              /* tokens of a sample */
  int64_t batch;            /* samples of a batch, of all ranks together */
  uint64_t seed;            /* of the shuffles, another in each epoch */
  int64_t epochs;           /* 0: no end */
  const swv_mesh* mesh;     /* NULL: plain tensors */
  const swv_layout* layout; /* of batches, [batch, seq], of S(0), S(1), R; NULL: replicated */
  /* Without a mesh: which of num_parts parts of each batch, cut as S(0) does. 0 of 1 is all of it. */
  int64_t part;
  int64_t num_parts;
  int32_t prefetch;   /* batches that are read ahead; 0: swv_loader_next reads */
  swv_bool in_order;  /* not shuffled */
  swv_bool drop_last; /* with an end: not the last batch, if it is not whole */
  int32_t reserved;   /* 0 */
} swv_loader_options;
#define SWV_LOADER_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_loader_options, reserved), 1, 1, 0, 0, NULL, NULL, 0, 1, 2, 0, 0, 0}

/* Sample i of a file has the tokens i * seq to (i + 1) * seq. Files are shared, not needed any more.
 * COLLECTIVE with a mesh: SWV_CODE_INVALID_ARGUMENT on all ranks if their options or files differ. */
SWV_API SWV_MUST_USE swv_status* swv_loader_create(const swv_token_file* const* files,
                                                   size_t num_files,
                                                   const swv_loader_options* options,
                                                   swv_loader** out_loader);
SWV_API SWV_MUST_USE swv_status* swv_loader_share(const swv_loader* loader,
                                                  swv_loader** out_loader);
/* The last one waits for a read that is under way. */
SWV_API void swv_loader_free(swv_loader* loader);
/* Of one pass through the files. */
SWV_API SWV_MUST_USE swv_status* swv_loader_num_samples(const swv_loader* loader, int64_t* out_num);
/* The next batch: int64, [samples, seq]; targets are the tokens that come next. NULL, both, at the
 * end. All ranks call it alike; nothing is sent. An error of a file is this rank's alone, comes in the
 * place of its batch, and stays until swv_loader_set_position. */
SWV_API SWV_MUST_USE swv_status* swv_loader_next(swv_loader* loader, swv_tensor** out_tokens,
                                                 swv_tensor** out_targets);
/* Of the batch that comes next, whatever was read ahead:
 *   {"epoch":3,"sample":640,"num_samples":1000,"seed":7,"shuffle":true} */
SWV_API SWV_MUST_USE swv_status* swv_loader_position(const swv_loader* loader,
                                                     swv_string** out_json);
/* Goes on there, on any number of ranks, with any batch, with the same files, seq and seed.
 * SWV_CODE_INVALID_ARGUMENT for anything else. COLLECTIVE with a mesh. */
SWV_API SWV_MUST_USE swv_status* swv_loader_set_position(swv_loader* loader, const char* json);

/* ---- Checkpoints ------------------------------------------------------------------------------
 * What a run needs to go on, saved by all ranks together, and loaded on any mesh, plan or number of
 * ranks: each writes what it is to write of it, and reads what it keeps.
 *
 *   swv_state_create(&state);
 *   swv_state_add_module(state, NULL, model);            // "model.h.0.attn.q.weight", ...
 *   swv_state_add_optimizer(state, NULL, optimizer, model);
 *   swv_state_add_random(state, NULL, mesh);
 *   swv_state_set_value(state, "epoch", "3");            // JSON
 *   swv_checkpointer_create(mesh, "run", NULL, &checkpointer);
 *   swv_checkpointer_load(checkpointer, state, NULL, &step, NULL);  // the newest, in place
 *   swv_checkpointer_save_async(checkpointer, 100, state, NULL);    // "run/step-000100"
 *   swv_checkpointer_wait(checkpointer);
 *
 * A checkpoint is safetensors files and a manifest, which C++, Rust and Go read and write alike. It is
 * there with all its bytes on the disk, or not at all, whatever happens to the process. The directory
 * is shared by all ranks. Errors are the same on all ranks, and leave everything as it was. A state
 * and a checkpointer belong to one rank, and are used by one thread at a time. */

typedef struct swv_state swv_state;               /* tensors and values, by name */
typedef struct swv_checkpointer swv_checkpointer; /* what saves into one directory */
typedef struct swv_safetensors swv_safetensors;   /* a file of tensors, or several with an index */

/* Has handles, not copies: made once, it saves what is there at each save. It keeps alive what was
 * added. All ranks add the same. */
SWV_API SWV_MUST_USE swv_status* swv_state_create(swv_state** out_state);
SWV_API SWV_MUST_USE swv_status* swv_state_share(const swv_state* state, swv_state** out_state);
SWV_API void swv_state_free(swv_state* state);
/* Sharded in any layout without Partial, or plain: then all ranks have it alike, and rank 0's is
 * saved. SWV_CODE_ALREADY_EXISTS for a name that is there. */
SWV_API SWV_MUST_USE swv_status* swv_state_add_tensor(swv_state* state, const char* name,
                                                      swv_tensor* tensor);
/* Parameters and buffers by FQN behind `prefix` (NULL: "model."), tied ones once, as they are now: a
 * module is distributed first. */
SWV_API SWV_MUST_USE swv_status* swv_state_add_module(swv_state* state, const char* prefix,
                                                      swv_module* module);
/* The optimizer's state of each parameter by the parameter's FQN in `module`, behind `prefix` (NULL:
 * "optimizer."): "optimizer.w.exp_avg". Its options (lr) are the program's. swv_optimizer_use_zero
 * comes before. SWV_CODE_INVALID_ARGUMENT for a parameter that is none of the module's. */
SWV_API SWV_MUST_USE swv_status* swv_state_add_optimizer(swv_state* state, const char* prefix,
                                                         swv_optimizer* optimizer,
                                                         const swv_module* module);
/* Where the mesh stands in its random numbers, as the value `name` (NULL: "random"). */
SWV_API SWV_MUST_USE swv_status* swv_state_add_random(swv_state* state, const char* name,
                                                      swv_mesh* mesh);
/* Where the loader stands (swv_loader_position), as the value `name` (NULL: "loader"): it goes on there
 * once loaded. Positions among other samples are SWV_CODE_INVALID_ARGUMENT when loading. */
SWV_API SWV_MUST_USE swv_status* swv_state_add_loader(swv_state* state, const char* name,
                                                      swv_loader* loader);
/* JSON of the caller's own, the same on all ranks; again: another one. Loading replaces it, and wants it
 * to be there. What a checkpoint has beyond those that are set is not kept for the next one. */
SWV_API SWV_MUST_USE swv_status* swv_state_set_value(swv_state* state, const char* name,
                                                     const char* json);
/* SWV_CODE_NOT_FOUND. */
SWV_API SWV_MUST_USE swv_status* swv_state_value(const swv_state* state, const char* name,
                                                 swv_string** out_json);

typedef struct swv_checkpointer_options {
  size_t struct_size;
  int64_t keep_last;     /* checkpoints that stay, after a new one is there; 0: all */
  int64_t timeout_ms;    /* for the slowest rank to write its part, 1 or more; 0: an hour */
  swv_bool skip_if_busy; /* beside training: nothing is saved while a save is under way; 0: waits */
  /* Parameters, and what optimizers keep of them, are copied beside the forward and backward that follow,
   * if they are DTensors in the CPU's memory: see swv_checkpointer_wait_for_copy. 0: before
   * swv_checkpointer_save_async returns */
  swv_bool copy_beside_training;
} swv_checkpointer_options;
#define SWV_CHECKPOINTER_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_checkpointer_options, copy_beside_training), 0, 0, 0, 0}

typedef struct swv_load_options {
  size_t struct_size;
  swv_bool allow_missing;    /* what the checkpoint has not stays as it is, and is no error */
  swv_bool allow_unexpected; /* what the state has not is no error */
  swv_bool cast;             /* another floating-point type is converted, not refused */
  swv_bool verify;           /* every byte of every file is compared with its checksum first; else
                                every byte that is loaded, while it is */
} swv_load_options;
#define SWV_LOAD_OPTIONS_INIT {SWV_SIZE_TO(swv_load_options, verify), 0, 0, 0, 0}

/* Touches no file. From swv_checkpointer_open or the first save on the directory is this one's, until
 * it is freed: another one, of any process, gets SWV_CODE_FAILED_PRECONDITION. */
SWV_API SWV_MUST_USE swv_status* swv_checkpointer_create(const swv_mesh* mesh,
                                                         const char* directory,
                                                         const swv_checkpointer_options* options,
                                                         swv_checkpointer** out_checkpointer);
/* Waits for what is under way; its error, if nobody has asked, is a warning on stderr. */
SWV_API void swv_checkpointer_free(swv_checkpointer* checkpointer);
/* What the first save does before there is anything to save, so that a run hears at its beginning what
 * would be an error after its first steps: makes the directory, if it is not there, and takes it. `done`
 * is how many steps are; a checkpoint of a later one is an error then. -1: who resumes from this
 * directory, before swv_checkpointer_load. SWV_CODE_FAILED_PRECONDITION if another run saves there, or
 * for that later step; SWV_CODE_DATA_LOSS if what would be the newest checkpoint has no manifest; of the
 * disk, SWV_CODE_PERMISSION_DENIED and others. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_checkpointer_open(swv_checkpointer* checkpointer,
                                                       int64_t done);
/* The directory has step-000100 when it returns. SWV_CODE_ALREADY_EXISTS for a step that is there,
 * SWV_CODE_RESOURCE_EXHAUSTED for a full disk, SWV_CODE_PERMISSION_DENIED; SWV_CODE_INVALID_ARGUMENT
 * for a Partial, and for what differs between ranks. An error of a save beside training before it is a
 * warning on stderr here, and keeps nothing from being saved. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_checkpointer_save(swv_checkpointer* checkpointer, int64_t step,
                                                       const swv_state* state);
/* Returns when this rank's part is copied (but for copy_beside_training), and writes it on a thread of
 * its own. One save is under way
 * at a time. An error of it comes out of the next call that is not swv_checkpointer_save. out_saved: 0
 * if it was skipped; may be NULL. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_checkpointer_save_async(swv_checkpointer* checkpointer,
                                                             int64_t step, const swv_state* state,
                                                             swv_bool* out_saved);
/* With copy_beside_training: until the copy of the save that is under way is there. It is called in each
 * step before parameters are written to, as by swv_optimizer_step, and costs nothing where nothing is
 * under way. Nothing is on the disk before all ranks have called it, or another function of their
 * checkpointer. A save whose tensors were written to before it fails with SWV_CODE_FAILED_PRECONDITION,
 * which comes out where its other errors do; what is written through a pointer (DLPack,
 * swv_tensor_buffer) is not seen. Every other call with the checkpointer does it, too. */
SWV_API SWV_MUST_USE swv_status* swv_checkpointer_wait_for_copy(swv_checkpointer* checkpointer);
/* Until what is under way is on the disk. */
SWV_API SWV_MUST_USE swv_status* swv_checkpointer_wait(swv_checkpointer* checkpointer);
/* The newest checkpoint of its directory, as swv_state_load. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_checkpointer_load(swv_checkpointer* checkpointer,
                                                       swv_state* state,
                                                       const swv_load_options* options,
                                                       int64_t* out_step, swv_string** out_json);
/* `path`: a checkpoint, or a directory of them: that of the highest step. Values go to where the
 * tensors lie. Before anything is changed: SWV_CODE_NOT_FOUND without a checkpoint, and else never;
 * SWV_CODE_INVALID_ARGUMENT for another state, with all that is missing, unexpected or of another
 * shape or type in one message, and for foreign files; SWV_CODE_DATA_LOSS for a file that is gone, cut
 * short or damaged; SWV_CODE_FAILED_PRECONDITION for a symbolic link in it. out_step may be
 * NULL, as may out_json: {"path": ..., "step": 100, "missing": [], "unexpected": [], "values":
 * {"epoch": 3}, "bytes_read": 96, "bytes_kept": 96}. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_state_load(swv_state* state, const char* path,
                                                const swv_mesh* mesh,
                                                const swv_load_options* options, int64_t* out_step,
                                                swv_string** out_json);
/* The steps that a directory has, ascending; *out_count of them, also with less room. Like the next
 * two it sends nothing: for any thread, of one process alone. SWV_CODE_NOT_FOUND without the
 * directory. */
SWV_API SWV_MUST_USE swv_status* swv_list_checkpoints(const char* directory, int64_t* steps,
                                                      size_t capacity, size_t* out_count);
/* What swv_state_load would load: `path` itself, or its checkpoint of the highest step.
 * SWV_CODE_NOT_FOUND; SWV_CODE_DATA_LOSS if the directory of a higher step has files of a checkpoint
 * and no manifest. */
SWV_API SWV_MUST_USE swv_status* swv_find_checkpoint(const char* path, swv_string** out_path);
/* Reads all of what swv_find_checkpoint finds: sizes, headers, checksums. */
SWV_API SWV_MUST_USE swv_status* swv_verify_checkpoint(const char* path);

/* Safetensors (https://github.com/huggingface/safetensors), read strictly: `path` is a file, an index
 * (model.safetensors.index.json), or a folder with either. Bytes of tensors are read when they are
 * asked for. A handle is used by one thread at a time. */
SWV_API SWV_MUST_USE swv_status* swv_safetensors_open(const char* path, swv_safetensors** out_file);
SWV_API SWV_MUST_USE swv_status* swv_safetensors_share(const swv_safetensors* file,
                                                       swv_safetensors** out_file);
SWV_API void swv_safetensors_free(swv_safetensors* file);
SWV_API SWV_MUST_USE swv_status* swv_safetensors_num_tensors(const swv_safetensors* file,
                                                             size_t* out_num);
/* In the order of their names. Outputs may be NULL; out_ndim is the full number of `sizes`. */
SWV_API SWV_MUST_USE swv_status* swv_safetensors_tensor(const swv_safetensors* file, size_t index,
                                                        swv_string** out_name, swv_dtype* out_dtype,
                                                        int64_t* sizes, size_t capacity,
                                                        size_t* out_ndim);
/* A plain tensor on the CPU: all of it (ndim 0 and NULL), or the box of `sizes` from `offset` on, of
 * which no byte more is read. SWV_CODE_NOT_FOUND, SWV_CODE_INVALID_ARGUMENT. */
SWV_API SWV_MUST_USE swv_status* swv_safetensors_read(const swv_safetensors* file, const char* name,
                                                      const int64_t* offset, const int64_t* sizes,
                                                      size_t ndim, swv_tensor** out_tensor);
/* A file that is not there yet, of plain tensors; on the disk when it returns. `metadata`: pairs of
 * texts, key and value, num_metadata pairs. */
SWV_API SWV_MUST_USE swv_status* swv_safetensors_write(const char* path, const char* const* names,
                                                       const swv_tensor* const* tensors,
                                                       size_t num_tensors,
                                                       const char* const* metadata,
                                                       size_t num_metadata);

/* ---- Models of Hugging Face ---------------------------------------------------------------------
 * Directories that transformers writes and reads: config.json, and weights in safetensors files (or, in
 * older ones, pytorch_model.bin), into a module on any mesh under any plan, and back.
 *
 *   swv_read_pretrained_config("llama/", 0, &config);
 *   swv_module_create_by_kind("llama", swv_string_data(config), &model);  // or the host's own, of it
 *   swv_module_distribute(model, mesh, plan, NULL);
 *   swv_module_load_pretrained(model, "llama/", mesh, NULL, NULL);        // each rank reads its parts
 *   swv_module_save_pretrained(model, "tuned/", swv_string_data(config), mesh, NULL);
 *
 * A module has its parameters and buffers by the names that they have in memory, those of the library's
 * model of that kind (swv_module_dump); they become those of the files. Tied weights are in files once.
 * The directory is shared by all ranks. Errors are the same on all ranks, and leave the module and the
 * disk as they were. */

typedef struct swv_load_pretrained_options {
  size_t struct_size;
  const char* const* ignored; /* FQNs of tensors that are in no file: what the host computes */
  size_t num_ignored;
  swv_bool allow_missing;    /* what the files have not stays as it is (a classifier that is new) */
  swv_bool allow_unexpected; /* what the module has not is no error */
  swv_bool allow_unknown;    /* keys of config.json that nobody here knows are passed over */
} swv_load_pretrained_options;
#define SWV_LOAD_PRETRAINED_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_load_pretrained_options, allow_unknown), NULL, 0, 0, 0, 0}

typedef struct swv_save_pretrained_options {
  size_t struct_size;
  const char* const* ignored; /* as above */
  size_t num_ignored;
  int64_t max_file_bytes; /* a file ends before a tensor with which it would have more; 1 or more */
  swv_dtype dtype;        /* of floating-point tensors; SWV_DTYPE_DEFAULT: as they are */
} swv_save_pretrained_options;
#define SWV_SAVE_PRETRAINED_OPTIONS_INIT \
  {SWV_SIZE_TO(swv_save_pretrained_options, dtype), NULL, 0, 5000000000, SWV_DTYPE_DEFAULT}

/* config.json of `directory`, as it stands there, if it describes what a model of the library's
 * computes; else SWV_CODE_INVALID_ARGUMENT, with line and key. SWV_CODE_NOT_FOUND without one. Sends
 * nothing: for any thread. */
SWV_API SWV_MUST_USE swv_status* swv_read_pretrained_config(const char* directory,
                                                            swv_bool allow_unknown,
                                                            swv_string** out_json);
/* Values of parameters and buffers, in place, also of sharded and of fully sharded ones; another
 * floating-point type is converted. `path`: a directory, or a file of weights (*.safetensors, an index,
 * or *.bin, *.pt and *.pth by torch.save), or a directory of torch.distributed.checkpoint; without a
 * config.json names are the module's. Before anything is changed: SWV_CODE_NOT_FOUND;
 * SWV_CODE_INVALID_ARGUMENT with all that is missing, unexpected or of another shape or type in one
 * message, for foreign and damaged files, for an ignored tensor that the module does not have, and for
 * what differs between ranks; SWV_CODE_FAILED_PRECONDITION for a module without values
 * (swv_module_materialize). out_json may be NULL: {"kind": "llama", "missing": [], "unexpected": [],
 * "bytes_read": 96, "bytes_kept": 96}. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_module_load_pretrained(
    swv_module* module, const char* path, const swv_mesh* mesh,
    const swv_load_pretrained_options* options, swv_string** out_json);
/* A directory that is not there yet, which transformers loads: it is there whole, or not at all. Tensors
 * are gathered one at a time. SWV_CODE_ALREADY_EXISTS; SWV_CODE_INVALID_ARGUMENT for the configuration
 * of another model, with all names that differ; else as swv_checkpointer_save. COLLECTIVE. */
SWV_API SWV_MUST_USE swv_status* swv_module_save_pretrained(
    const swv_module* module, const char* directory, const char* config_json, const swv_mesh* mesh,
    const swv_save_pretrained_options* options);

/* ---- Metrics ----------------------------------------------------------------------------------
 * The numbers of a run, step by step, for people and programs; usually of the first rank.
 *
 *   swv_metrics_writer_create_events("runs/first", 0, &writer);
 *   const char* names[] = {"loss", "lr"};
 *   const double values[] = {2.5, 3e-4};
 *   swv_metrics_writer_write(writer, 10, names, values, 2);
 *
 * Any thread; several at once wait for each other. An error of the system (full disk) is every later
 * call's as well. */
typedef struct swv_metrics_writer swv_metrics_writer; /* lines of JSON, or files of TensorBoard */

/* A line of JSON for each step: {"step":10,"time":1732461123.25,"loss":2.5,"lr":0.0003}. Appends; of a
 * file that a run has left in the middle of a line, this line goes. A line is in the file when
 * swv_metrics_writer_write returns. */
SWV_API SWV_MUST_USE swv_status* swv_metrics_writer_open_json_lines(
    const char* path, swv_metrics_writer** out_writer);
/* A new file of events in `folder`, which is made if it is not there: TensorBoard draws a curve for
 * each name. Values travel as float. first_step: where a run goes on; what other files have from there
 * on is shown no more. 0: from the beginning. */
SWV_API SWV_MUST_USE swv_status* swv_metrics_writer_create_events(const char* folder,
                                                                  int64_t first_step,
                                                                  swv_metrics_writer** out_writer);
/* What is not in the file yet is written; an error of that is lost: flush first. */
SWV_API void swv_metrics_writer_free(swv_metrics_writer* writer);
/* SWV_CODE_INVALID_ARGUMENT for lines of JSON with a metric that is called "step" or "time", or as
 * another one. */
SWV_API SWV_MUST_USE swv_status* swv_metrics_writer_write(swv_metrics_writer* writer, int64_t step,
                                                          const char* const* names,
                                                          const double* values, size_t num_metrics);
SWV_API SWV_MUST_USE swv_status* swv_metrics_writer_flush(swv_metrics_writer* writer);

/* ---- What happened --------------------------------------------------------------------------- */

/* Operations issued, and their bytes: of the larger of the two buffers. */
typedef struct swv_comm_counter {
  int64_t calls;
  int64_t bytes;
} swv_comm_counter;

/* By swv_collective_kind, of one group; and of all groups of this rank. */
SWV_API SWV_MUST_USE swv_status* swv_comm_counters(const swv_comm* comm, swv_comm_counter* counters,
                                                   size_t capacity, size_t* out_count);
SWV_API SWV_MUST_USE swv_status* swv_world_counters(const swv_world* world,
                                                    swv_comm_counter* counters, size_t capacity,
                                                    size_t* out_count);
/* The last operations of every group of this rank, oldest first, as JSON. Any thread, also while
 * something hangs. "state" is "issued", "done" or "failed"; "peer" is there where there is one;
 * "time" is that of the issue, in seconds since 1970, "microseconds" until it was seen done.
 *   {"groups": [{"name": "dp", "rank": 0, "world_ranks": [0, 2], "operations": [
 *     {"sequence": 12, "operation": "all_reduce", "dtype": "f32", "bytes": 4096,
 *      "state": "issued", "tag": "loss", "time": 1700000000.25, "microseconds": 12.5}]}]} */
SWV_API SWV_MUST_USE swv_status* swv_world_flight_record(const swv_world* world,
                                                         swv_string** out_json);

typedef struct swv_dispatch_counters {
  size_t struct_size;
  int64_t operators; /* on sharded tensors */
  int64_t cache_misses;
  int64_t implicit_redistributions; /* with communication, that nobody asked for by name */
  int64_t gathered_operators;       /* calls of operators without a sharding rule */
  int64_t remembered_uses;          /* redistributions that an earlier one's result made needless */
  int64_t remembered_bytes;         /* that such results take up now */
  int64_t unsharded_weights; /* times that a weight that the user had cut was brought elsewhere */
} swv_dispatch_counters;
#define SWV_DISPATCH_COUNTERS_INIT \
  {SWV_SIZE_TO(swv_dispatch_counters, unsharded_weights), 0, 0, 0, 0, 0, 0, 0}

/* Of this rank since the mesh was made; as many members as struct_size says. */
SWV_API SWV_MUST_USE swv_status* swv_mesh_dispatch_counters(const swv_mesh* mesh,
                                                            swv_dispatch_counters* out_counters);

/* Records every collective that tensors of the mesh start until it is freed: what moves, how far,
 * and who wanted it. Traces nest. */
SWV_API SWV_MUST_USE swv_status* swv_trace_create(const swv_mesh* mesh, swv_trace** out_trace);
SWV_API SWV_MUST_USE swv_status* swv_trace_share(const swv_trace* trace, swv_trace** out_trace);
SWV_API void swv_trace_free(swv_trace* trace);
SWV_API SWV_MUST_USE swv_status* swv_trace_clear(swv_trace* trace);
SWV_API SWV_MUST_USE swv_status* swv_trace_num_events(const swv_trace* trace, size_t* out_num);
/* That a rank sends, as planned. */
SWV_API SWV_MUST_USE swv_status* swv_trace_bytes(const swv_trace* trace, int64_t* out_bytes);
/* A table; and JSON:
 *   {"mesh": "DeviceMesh(dp=2, tp=2)", "rank": 3, "dropped": 0, "events": [
 *     {"collective": "all_reduce", "mesh_dims": ["tp"], "group_size": 2, "bytes": 384,
 *      "op": "aten::add", "argument": "other", "implicit": true, "dtype": "Float",
 *      "shape": [8, 12], "before": "[R, P(sum)]", "after": "[R, R]", "module": "mlp",
 *      "phase": "forward", "source": "", "parameters": [], "is_check": false}]}
 * The phase is "forward", "backward" or "gradient sync"; source is where the call stands in C++, or
 * what swv_mesh_enter_source said; parameters are the names of those that move, or whose gradients
 * do; is_check: plain values are compared. */
SWV_API SWV_MUST_USE swv_status* swv_trace_to_string(const swv_trace* trace, swv_string** out_text);
SWV_API SWV_MUST_USE swv_status* swv_trace_to_json(const swv_trace* trace, swv_string** out_json);

/* Why an operator on sharded tensors moves what it moves: the ways that its sharding rule offers,
 * what each would cost, which would be taken, and what follows. Nothing runs. As a table, and as
 * JSON; either may be NULL. SWV_CODE_FAILED_PRECONDITION for an operator that is made of others
 * (aten::linear): trace those.
 *   {"op", "mesh", "has_rule", "gathered", "bytes", "dims": [{"name", "ranks", "chosen",
 *   "not_offered", "options": [{"inputs", "outputs", "seconds", "move", "compute", "owed",
 *   "gives_up", "bytes", "obstacle"}]}], "inputs": [{"name", "dtype", "shape", "before", "after",
 *   "steps": [{"kind", "mesh_dims", "before", "after", "bytes", "seconds"}]}], "outputs": [like
 *   inputs]}
 * An option's seconds: to move the arguments, to compute on a rank's part, and the reduction that
 * sums still owe. What it gives up counts before them: "", or the cuts of "data" (that becomes
 * whole; "data's place": cut in another way) or of a "weight", ", " between them. not_offered are
 * sentences: the cuts of arguments that no option takes as they are. */
SWV_API SWV_MUST_USE swv_status* swv_op_explain(const swv_op* op, const swv_value* arguments,
                                                size_t num_arguments, swv_string** out_text,
                                                swv_string** out_json);

/* What a module is and how it lies: a tree of its modules with their tensors, shapes, parts,
 * placements, bytes, and which line of a plan decided. As a table, and as JSON; either may be NULL.
 *   {"name": "", "fqn": "", "type", "elements", "bytes", "global_bytes",
 *    "tensors": [{"name", "fqns", "is_buffer", "shown_before", "dtype", "shape", "local_shape",
 *      "placements", "bytes", "global_bytes", "pattern", "source"}],
 *    "forward": [{"value", "placements", "pattern", "source"}], "modules": [...]} */
SWV_API SWV_MUST_USE swv_status* swv_module_dump(const swv_module* module, swv_string** out_text,
                                                 swv_string** out_json);

/* Runs a model, its forward or a whole step, on the thread of the call. What it writes to
 * *out_result, which is NULL before, is taken over. */
typedef swv_status* (*swv_run_fn)(void* user_data, swv_tensor** out_result);

/* The memory of this rank by modules, in bytes: of parameters, buffers and gradients, as they are;
 * and of activations, which is measured where `run` is not NULL: it is run once, with gradients,
 * and what is still in memory then counts for the module whose operator has made it. As a table, and
 * as JSON; either may be NULL. COLLECTIVE if run is.
 *   [{"module": "", "parameters": 1320, "buffers": 0, "gradients": 0, "activations": 4608}] */
SWV_API SWV_MUST_USE swv_status* swv_module_memory(swv_module* module, swv_run_fn run,
                                                   void* user_data, swv_string** out_text,
                                                   swv_string** out_json);
/* Every collective of one run, in order, with the module that needs it. As a table, and as JSON,
 * {"bytes", "events"} with events as swv_trace_to_json has them; either may be NULL.
 * SWV_CODE_FAILED_PRECONDITION if nothing in the module is sharded, or within another such call on
 * this thread. COLLECTIVE as run is. */
SWV_API SWV_MUST_USE swv_status* swv_module_list_communication(swv_module* module, swv_run_fn run,
                                                               void* user_data,
                                                               swv_string** out_text,
                                                               swv_string** out_json);

typedef struct swv_verify_options {
  size_t struct_size;
  double tolerance;      /* between the largest difference of a tensor and its largest element; 0:
                            by its dtype, of f32 1e-4 */
  swv_bool forward_only; /* no backward, no gradients */
  swv_bool copy_values;  /* the reference gets the module's values first */
} swv_verify_options;
#define SWV_VERIFY_OPTIONS_INIT {SWV_SIZE_TO(swv_verify_options, copy_values), 0.0, 0, 0}

/* Whether a sharded module is still right: runs it, and a plain one with the same modules and
 * values, and compares parameters, what every operator gives, and gradients; out_text and out_json
 * (either may be NULL) say where they differ first, by module, rank and index. Each run gives the
 * module's result, which is differentiated. Both modules' gradients and buffers stay as they were,
 * but for what copy_values writes. No dropout: it draws other numbers on sharded tensors. An error
 * of `run` is a difference; one of run_reference is the call's. All ranks get the same answer.
 * COLLECTIVE.
 *   {"ok": false, "difference": {"kind": "output", ...}, "parameters", "outputs", "gradients",
 *    "not_met"} */
SWV_API SWV_MUST_USE swv_status* swv_module_verify(swv_module* module, swv_run_fn run,
                                                   swv_module* reference, swv_run_fn run_reference,
                                                   void* user_data,
                                                   const swv_verify_options* options,
                                                   swv_bool* out_same, swv_string** out_text,
                                                   swv_string** out_json);

/* Which rank holds which part, as a picture of characters. */
SWV_API SWV_MUST_USE swv_status* swv_tensor_picture(const swv_tensor* tensor,
                                                    swv_string** out_text);
SWV_API SWV_MUST_USE swv_status* swv_layout_picture(const swv_layout* layout, const swv_mesh* mesh,
                                                    const int64_t* sizes, size_t num_sizes,
                                                    swv_string** out_text);

#ifdef __cplusplus
} /* extern "C" */
#endif

/* ---- Collectives, inline ----------------------------------------------------------------------
 * swv_comm_start by the names of its kinds. out_work NULL: the call waits. */

typedef struct swv_call_options {
  int64_t timeout_ms; /* 0: the group's default */
  const char* tag;    /* shown in errors and records; may be NULL */
} swv_call_options;
#define SWV_CALL_OPTIONS_INIT {0, NULL}

static inline swv_collective swv_collective_of(swv_collective_kind kind,
                                               const swv_call_options* options) {
  swv_collective result = SWV_COLLECTIVE_INIT;
  result.kind = kind;
  if (options != NULL) {
    result.timeout_ms = options->timeout_ms;
    result.tag = options->tag;
  }
  return result;
}

SWV_MUST_USE static inline swv_status* swv_comm_all_reduce(swv_comm* comm, const swv_buffer* in,
                                                           const swv_buffer* out, swv_reduce_op op,
                                                           const swv_call_options* options,
                                                           swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_ALL_REDUCE, options);
  c.in = in;
  c.out = out;
  c.reduce_op = op;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_all_gather(swv_comm* comm, const swv_buffer* in,
                                                           const swv_buffer* out,
                                                           const swv_call_options* options,
                                                           swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_ALL_GATHER, options);
  c.in = in;
  c.out = out;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_all_gather_v(
    swv_comm* comm, const swv_buffer* in, const swv_buffer* out, const int64_t* counts,
    size_t num_counts, const swv_call_options* options, swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_ALL_GATHER_V, options);
  c.in = in;
  c.out = out;
  c.out_counts = counts;
  c.num_counts = num_counts;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_reduce_scatter(swv_comm* comm, const swv_buffer* in,
                                                               const swv_buffer* out,
                                                               swv_reduce_op op,
                                                               const swv_call_options* options,
                                                               swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_REDUCE_SCATTER, options);
  c.in = in;
  c.out = out;
  c.reduce_op = op;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_reduce_scatter_v(
    swv_comm* comm, const swv_buffer* in, const swv_buffer* out, const int64_t* counts,
    size_t num_counts, swv_reduce_op op, const swv_call_options* options, swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_REDUCE_SCATTER_V, options);
  c.in = in;
  c.out = out;
  c.in_counts = counts;
  c.num_counts = num_counts;
  c.reduce_op = op;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_all_to_all(swv_comm* comm, const swv_buffer* in,
                                                           const swv_buffer* out,
                                                           const swv_call_options* options,
                                                           swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_ALL_TO_ALL, options);
  c.in = in;
  c.out = out;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_all_to_all_v(
    swv_comm* comm, const swv_buffer* in, const int64_t* send_counts, const swv_buffer* out,
    const int64_t* recv_counts, size_t num_counts, const swv_call_options* options,
    swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_ALL_TO_ALL_V, options);
  c.in = in;
  c.in_counts = send_counts;
  c.out = out;
  c.out_counts = recv_counts;
  c.num_counts = num_counts;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_broadcast(swv_comm* comm, const swv_buffer* data,
                                                          int32_t root,
                                                          const swv_call_options* options,
                                                          swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_BROADCAST, options);
  c.out = data;
  c.peer = root;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_reduce(swv_comm* comm, const swv_buffer* in,
                                                       const swv_buffer* out, swv_reduce_op op,
                                                       int32_t root,
                                                       const swv_call_options* options,
                                                       swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_REDUCE, options);
  c.in = in;
  c.out = out;
  c.reduce_op = op;
  c.peer = root;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_gather(swv_comm* comm, const swv_buffer* in,
                                                       const swv_buffer* out, int32_t root,
                                                       const swv_call_options* options,
                                                       swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_GATHER, options);
  c.in = in;
  c.out = out;
  c.peer = root;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_scatter(swv_comm* comm, const swv_buffer* in,
                                                        const swv_buffer* out, int32_t root,
                                                        const swv_call_options* options,
                                                        swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_SCATTER, options);
  c.in = in;
  c.out = out;
  c.peer = root;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_send(swv_comm* comm, const swv_buffer* data,
                                                     int32_t peer, int32_t message_tag,
                                                     const swv_call_options* options,
                                                     swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_SEND, options);
  c.in = data;
  c.peer = peer;
  c.message_tag = message_tag;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_recv(swv_comm* comm, const swv_buffer* data,
                                                     int32_t peer, int32_t message_tag,
                                                     const swv_call_options* options,
                                                     swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_RECV, options);
  c.out = data;
  c.peer = peer;
  c.message_tag = message_tag;
  return swv_comm_start(comm, &c, out_work);
}
SWV_MUST_USE static inline swv_status* swv_comm_barrier(swv_comm* comm,
                                                        const swv_call_options* options,
                                                        swv_work** out_work) {
  swv_collective c = swv_collective_of(SWV_COLLECTIVE_BARRIER, options);
  return swv_comm_start(comm, &c, out_work);
}

/* ---- Values, inline -------------------------------------------------------------------------- */

static inline swv_value swv_value_none(void) {
  swv_value value = SWV_NONE;
  return value;
}
static inline swv_value swv_value_default(void) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_DEFAULT;
  return value;
}
static inline swv_value swv_value_tensor(swv_tensor* tensor) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_TENSOR;
  value.as.tensor = tensor;
  return value;
}
static inline swv_value swv_value_bool(swv_bool flag) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_BOOL;
  value.as.integer = flag;
  return value;
}
static inline swv_value swv_value_int(int64_t number) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_INT;
  value.as.integer = number;
  return value;
}
static inline swv_value swv_value_float(double number) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_FLOAT;
  value.as.number = number;
  return value;
}
static inline swv_value swv_value_complex(double real, double imaginary) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_COMPLEX;
  value.as.complex_number.real = real;
  value.as.complex_number.imaginary = imaginary;
  return value;
}
static inline swv_value swv_value_dtype(swv_dtype dtype) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_DTYPE;
  value.as.dtype = dtype;
  return value;
}
static inline swv_value swv_value_device(swv_device device) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_DEVICE;
  value.as.device = device;
  return value;
}
static inline swv_value swv_value_string(const char* data, size_t size) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_STRING;
  value.as.string.data = data;
  value.as.string.size = size;
  return value;
}
static inline swv_value swv_value_bools(const swv_bool* data, size_t size) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_BOOLS;
  value.as.bools.data = data;
  value.as.bools.size = size;
  return value;
}
static inline swv_value swv_value_ints(const int64_t* data, size_t size) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_INTS;
  value.as.ints.data = data;
  value.as.ints.size = size;
  return value;
}
static inline swv_value swv_value_floats(const double* data, size_t size) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_FLOATS;
  value.as.floats.data = data;
  value.as.floats.size = size;
  return value;
}
static inline swv_value swv_value_tensors(swv_tensor** data, size_t size) {
  swv_value value = SWV_NONE;
  value.kind = SWV_VALUE_TENSORS;
  value.as.tensors.data = data;
  value.as.tensors.size = size;
  return value;
}

#endif /* SHARDWEAVE_H_ */

#include "testing/carrier_backend.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One group. A ticket is a number from 1: the place of its work in the list. Works are kept to the
 * end, for the library may ask for one again. */
typedef struct Carrier {
  swv_comm* comm;
  pthread_mutex_t mutex;
  swv_work** works; /* guarded by mutex, as are */
  size_t num_works;
  size_t capacity;
} Carrier;

static Carrier* new_carrier(swv_comm* comm) {
  Carrier* carrier = (Carrier*)calloc(1, sizeof(Carrier));
  if (carrier == NULL) return NULL;
  carrier->comm = comm;
  pthread_mutex_init(&carrier->mutex, NULL);
  return carrier;
}

static void carrier_drop(void* self) {
  Carrier* carrier = (Carrier*)self;
  size_t i;
  for (i = 0; i < carrier->num_works; ++i) swv_work_free(carrier->works[i]);
  free(carrier->works);
  swv_comm_free(carrier->comm);
  pthread_mutex_destroy(&carrier->mutex);
  free(carrier);
}

/* Takes the work over. */
static swv_status* keep(Carrier* carrier, swv_work* work, uint64_t* out_ticket) {
  pthread_mutex_lock(&carrier->mutex);
  if (carrier->num_works == carrier->capacity) {
    const size_t capacity = carrier->capacity == 0 ? 64 : 2 * carrier->capacity;
    swv_work** grown = (swv_work**)realloc(carrier->works, capacity * sizeof(swv_work*));
    if (grown == NULL) {
      pthread_mutex_unlock(&carrier->mutex);
      swv_work_free(work);
      return swv_status_new(SWV_CODE_RESOURCE_EXHAUSTED, "no memory for a work");
    }
    carrier->works = grown;
    carrier->capacity = capacity;
  }
  carrier->works[carrier->num_works++] = work;
  *out_ticket = carrier->num_works;
  pthread_mutex_unlock(&carrier->mutex);
  return NULL;
}

static swv_work* work_of(Carrier* carrier, uint64_t ticket) {
  swv_work* work;
  pthread_mutex_lock(&carrier->mutex);
  work = carrier->works[ticket - 1];
  pthread_mutex_unlock(&carrier->mutex);
  return work;
}

/* The library's own tags are negative; the carrier takes none of those. Far below 2^30 both. */
static int32_t carrier_tag(int32_t tag) {
  return tag >= 0 ? 2 * tag : -2 * tag - 1;
}

/* An abort of the carrier has the code SWV_CODE_ABORTED, whatever the reason: ours is in its text. */
static const char kCode[] = "code of the carried group: ";

static swv_status* with_code(swv_status* status) {
  const char* found = status == NULL ? NULL : strstr(swv_status_message(status), kCode);
  swv_status* result = status;
  if (found != NULL) {
    result = swv_status_new(atoi(found + sizeof(kCode) - 1), swv_status_message(status));
    swv_status_free(status);
  }
  return result;
}

static swv_status* carrier_start(void* self, const swv_backend_call* call, uint64_t* out_ticket) {
  Carrier* carrier = (Carrier*)self;
  swv_call_options options = SWV_CALL_OPTIONS_INIT;
  swv_work* work = NULL;
  swv_status* status;
  /* A deadline that has passed is not "the default". */
  options.timeout_ms = call->timeout_ms == 0 ? 1 : call->timeout_ms < 0 ? 0 : call->timeout_ms;
  options.tag = call->tag;
  if (call->kind == SWV_COLLECTIVE_SEND) {
    status = swv_comm_send(carrier->comm, call->in, call->peer, carrier_tag(call->message_tag),
                           &options, &work);
  } else {
    status = swv_comm_recv(carrier->comm, call->out, call->peer, carrier_tag(call->message_tag),
                           &options, &work);
  }
  return status != NULL ? with_code(status) : keep(carrier, work, out_ticket);
}

static swv_bool carrier_done(void* self, uint64_t ticket) {
  swv_bool done = 1;
  swv_status_free(swv_work_is_done(work_of((Carrier*)self, ticket), &done));
  return done;
}

static swv_status* carrier_wait(void* self, uint64_t ticket, int64_t timeout_ms) {
  (void)timeout_ms; /* the work has its deadline */
  return with_code(swv_work_wait(work_of((Carrier*)self, ticket)));
}

static swv_status* carrier_subgroup(void* self, const swv_group* group, const int32_t* members,
                                    size_t num_members, const char* key, int64_t timeout_ms,
                                    void** out_self) {
  Carrier* carrier = (Carrier*)self;
  swv_comm* comm = NULL;
  swv_status* status = swv_comm_subgroup(carrier->comm, members, num_members, group->name, &comm);
  (void)key, (void)timeout_ms;
  if (status != NULL) return status;
  *out_self = new_carrier(comm);
  return *out_self == NULL ? swv_status_new(SWV_CODE_RESOURCE_EXHAUSTED, "no memory for a group")
                           : NULL;
}

static void carrier_abort(void* self, swv_code code, const char* reason) {
  const size_t size = strlen(reason) + sizeof(kCode) + 16;
  char* text = (char*)malloc(size);
  if (text != NULL) snprintf(text, size, "%s%d: %s", kCode, (int)code, reason);
  swv_status_free(swv_comm_abort(((Carrier*)self)->comm, text != NULL ? text : reason));
  free(text);
}

swv_status* carrier_world_create(const swv_world* carrier, int64_t timeout_ms,
                                 swv_world** out_world) {
  swv_backend backend = SWV_BACKEND_INIT;
  swv_group group = SWV_GROUP_INIT;
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  swv_comm* comm = NULL;
  swv_status* status;
  if ((status = swv_world_rank(carrier, &group.rank)) != NULL) return status;
  if ((status = swv_world_size(carrier, &group.num_ranks)) != NULL) return status;
  if ((status = swv_world_comm(carrier, &comm)) != NULL) return status;
  backend.name = "carrier";
  backend.implements = (uint64_t)1 << SWV_COLLECTIVE_SEND | (uint64_t)1 << SWV_COLLECTIVE_RECV;
  backend.self = new_carrier(comm);
  backend.start = carrier_start;
  backend.done = carrier_done;
  backend.wait = carrier_wait;
  backend.subgroup = carrier_subgroup;
  backend.abort = carrier_abort;
  backend.drop = carrier_drop;
  options.timeout_ms = timeout_ms;
  return swv_world_create_with_backend(&backend, &group, &options, out_world);
}

/* A backend as a third party would write one in C: send and recv alone, here carried by another
 * world's. The library builds all collectives from them. */
#ifndef SHARDWEAVE_CAPI_TESTING_CARRIER_BACKEND_H_
#define SHARDWEAVE_CAPI_TESTING_CARRIER_BACKEND_H_

#include "shardweave.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The world of the same rank over `carrier`, which is borrowed. timeout_ms: of its operations; 0:
 * the default. */
swv_status* carrier_world_create(const swv_world* carrier, int64_t timeout_ms,
                                 swv_world** out_world);

#ifdef __cplusplus
}
#endif

#endif /* SHARDWEAVE_CAPI_TESTING_CARRIER_BACKEND_H_ */

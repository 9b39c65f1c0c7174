// How a world is made, and what moves the memory of its devices.
#pragma once

#include "shardweave.h"
#include "shardweave/comm/paired/paired.h"
#include "shardweave/comm/world.h"

namespace shardweave::capi {

struct GivenWorldOptions {
  WorldOptions world;
  ConnectDevice connect_device;  // null: as `world` says
};
// Takes over the device_backend of `given`, also where it throws.
GivenWorldOptions world_options(const swv_world_options* given);

// What `given` makes of each group; null for NULL. Takes over given->self, also where it throws: its
// `drop` is called when the result and its copies are gone. `argument` names it.
ConnectDevice connect_device(const swv_device_backend* given, const char* argument);

}  // namespace shardweave::capi

// How many threads one operator may use. LibTorch keeps that number per thread; here it is the
// process's, and every thread that calls is brought into line.
#pragma once

#include "shardweave/comm/world.h"

namespace shardweave::capi {

void set_num_threads(int num_threads);
// This process is a rank of `world`, whose making may have told LibTorch of fewer threads: they
// become the process's number, unless set_num_threads has said another.
void default_num_threads(const World& world);
// Before operators: what set_num_threads said holds on this thread. Costs a comparison.
void use_num_threads();

}  // namespace shardweave::capi

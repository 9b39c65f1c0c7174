// How many threads one operator may use. LibTorch keeps that number per thread; here it is the
// process's, and every thread that calls is brought into line.
#pragma once

namespace shardweave::capi {

void set_num_threads(int num_threads);
// Before operators: what set_num_threads said holds on this thread. Costs a comparison.
void use_num_threads();

}  // namespace shardweave::capi

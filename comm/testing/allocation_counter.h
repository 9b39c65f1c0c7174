// Counts the heap allocations of the whole program, for tests that must find none. Linking this
// replaces operator new.
#pragma once

#include <cstdint>

namespace shardweave {

// Calls of operator new so far, by all threads.
int64_t allocations_so_far();

}  // namespace shardweave

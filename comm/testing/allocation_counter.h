// Counts heap allocations, for tests that must find none, or not more than so many. Linking this
// replaces operator new.
#pragma once

#include <cstdint>

namespace shardweave {

// Calls of operator new so far, by all threads.
int64_t allocations_so_far();
// Of these, what has not been deleted.
int64_t live_allocations();
// What this thread has asked for so far, in bytes.
int64_t allocated_bytes_of_thread();

}  // namespace shardweave

// LibTorch's own scopes of autocast on threads that are ranks.
#pragma once

namespace shardweave::dtensor_internal {

// From now on this thread keeps nothing that autocast has cast: LibTorch has one table of that for the
// process, which any thread that leaves its outermost scope clears, so ranks that are threads would cast,
// and then communicate, unlike each other. No AutocastScope that is open ends it.
void keep_no_casts();

}  // namespace shardweave::dtensor_internal

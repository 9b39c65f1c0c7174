// Collectives made of a backend's sends and recvs, for backends that do not implement them.
//
//   if (!backend.implements(call.op) && can_compose(backend, call)) {
//     absl::Status status = run_composed(backend, call);
//   }
//
// Plain exchanges between all pairs: right on every group, at its best on small ones. Sums and copies
// are the host's, and so the memory has to be: that of a device is refused, never touched.
#pragma once

#include "absl/status/status.h"
#include "shardweave/comm/backend.h"

namespace shardweave {

// Whether run_composed can do it: a collective, of memory of the host, and the backend has send and
// recv.
bool can_compose(const Backend& backend, const Call& call);

// Runs the collective to its end, or to call.deadline. All ranks compare what they called before
// anything moves. Uses message tags below zero, which users of a composed backend cannot give.
absl::Status run_composed(Backend& backend, const Call& call);

}  // namespace shardweave

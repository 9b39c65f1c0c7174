// Waits until somebody listens at an address.
//
//   absl::Status s = wait_for_listener("node007", 29500, absl::Minutes(5));
//   // Unavailable: "node007:29500: nobody answers in 5m: Connection refused"
//
// LibTorch's client waits too, but tells of a server that does not come in pages of stack traces.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace shardweave {

// Names that cannot be resolved are tried again as well: a pod's name may come later than its
// peers.
absl::Status wait_for_listener(const std::string& host, uint16_t port, absl::Duration timeout);

}  // namespace shardweave

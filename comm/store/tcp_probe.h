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

struct ListenerPatience {
  // A name that has no address is an error at once, unless names may come later than those who look
  // for them, as those of Kubernetes' pods do.
  bool names_come_later = false;
  // After this time stderr says, once, who is waited for; at once if it is a name that may come.
  absl::Duration say_after = absl::Seconds(10);
};

// Unavailable, with the reason.
absl::Status wait_for_listener(const std::string& host, uint16_t port, absl::Duration timeout,
                               const ListenerPatience& patience = {});

// Unavailable if the name has no address, and will not get one.
absl::Status check_name(const std::string& host);

}  // namespace shardweave

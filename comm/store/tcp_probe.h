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
  // How long a name may have no address, if name servers do not answer, or it appears when its
  // container is up (docker compose, swarm). For ever if names may come much later than those who
  // look for them, as those of Kubernetes' pods do.
  absl::Duration for_name = absl::Seconds(10);
  bool names_come_later = false;
  // After this time stderr says, once, who is waited for; at once if it is for a name.
  absl::Duration say_after = absl::Seconds(10);
};

// Unavailable, with the reason.
absl::Status wait_for_listener(const std::string& host, uint16_t port, absl::Duration timeout,
                               const ListenerPatience& patience = {});

// Unavailable if the name gets no address in time: then nobody will find who listens there.
absl::Status wait_for_name(const std::string& host, absl::Duration timeout,
                           const ListenerPatience& patience = {});

}  // namespace shardweave

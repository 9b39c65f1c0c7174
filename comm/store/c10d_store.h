// A Store over TCP: LibTorch's c10d::TCPStore, which torchrun and torch.distributed speak too.
//
//   auto server = open_c10d_store({.host = "10.0.0.1", .serve = true});       // rank 0
//   tell_the_others((*server)->port());                                       // surely ours
//   auto store = open_c10d_store({.host = "10.0.0.1", .port = port});         // the others
//
// Under torchrun (TORCHELASTIC_USE_AGENT_STORE=True) its agent serves, and every rank joins as a
// client.
//
// Whoever chooses a port itself binds first and tells afterwards: port 0, or a listening socket
// that a launcher has bound and passed on (listen_fd).
//
// Threads: a call that waits holds up no other thread; a key is seen within a tenth of a second. The
// server lives as long as the object that serves; when
// it has gone, calls answer Unavailable. TCPStore knows no passwords: whoever reaches the port can
// read and write the keys.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardweave/comm/store/store.h"

namespace shardweave {

struct C10dStoreOptions {
  std::string host = "127.0.0.1";             // where the server is, as this rank reaches it
  uint16_t port = 0;                          // 0 only with serve: the system chooses
  bool serve = false;                         // run the server in this process too
  std::optional<int> listen_fd;               // with serve: a bound, listening socket; taken over
  absl::Duration timeout = absl::Minutes(5);  // for the connection, and for an answer of the server
  // How long the host's name may have no address, and whether it may for all of `timeout`, as those
  // of Kubernetes' pods.
  absl::Duration name_timeout = absl::Seconds(10);
  bool names_come_later = false;
};

class C10dStore : public Store {
 public:
  virtual uint16_t port() const = 0;  // the real one
};

// Errors: InvalidArgument for options that contradict each other, Unavailable when nobody answers
// in time or the port cannot be bound, and when the host's name gets no address within name_timeout
// (also to the rank that serves: the others will not find it), of which stderr tells at once; the
// message has the host, and the port if one was given.
absl::StatusOr<std::shared_ptr<C10dStore>> open_c10d_store(const C10dStoreOptions& options);

}  // namespace shardweave

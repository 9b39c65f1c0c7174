// The Gloo backend: collectives between CPUs over TCP, on loopback or a named interface. Ranks are
// processes, or threads.
//
//   auto backend = make_gloo_backend(
//       store, {.name = "world", .rank = rank, .world_ranks = {0, 1, 2, 3}});
//   if (!backend.ok()) return backend.status();
//   auto comm = Communicator::create(*std::move(backend));
//
// Gloo brings the ranks together (mesh.h). What they say then goes through connection.h and
// schedule.h: Gloo itself hands every message to a thread of its own and back, has no
// reduce_scatter, reduces f16 in f16, and does not see that ranks called different things.
// gloo_benchmark.cc measures both in one run.
//
// An operation that is issued and waited for at once is carried out by the calling thread alone.
// What is issued and left goes on too, in a helper thread of the group, which sleeps until something
// comes: at once if it is 64 KiB or more, or several operations are pending. Of a smaller one the
// kernel has all that is sent and holds all that comes; it is looked after some milliseconds later.
//
// A rank that waits stays awake for a fraction of a millisecond, giving its core to any other
// thread that wants it, then sleeps. Memory: 256 KiB for each pending reduction; and for each peer
// up to 4 MiB of what it sends before this rank wants it (a rank that is further ahead waits). Two
// sockets for each peer of a group: data, and the reason of a failure.
//
// Ranks of different builds are refused. While a group is being connected, its ranks watch the
// groups that it is made from: if one of those breaks, or a rank leaves it that is still missing
// here, they know within a second. After 10 s stderr says who is waited for.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/store/store.h"

namespace shardweave {

struct GlooOptions {
  // Network interface. Empty: loopback if all ranks are on one host, else where the host's name
  // leads.
  std::string interface;
  // What the keys in the store begin with. No two groups in one store may have the same.
  std::string prefix = "gloo";
  // Of the rendezvous.
  absl::Duration timeout = absl::Minutes(5);
};

// All ranks of the group call. DeadlineExceeded: names the ranks that did not come in time.
absl::StatusOr<std::unique_ptr<Backend>> make_gloo_backend(std::shared_ptr<Store> store,
                                                           GroupInfo group,
                                                           const GlooOptions& options = {});

}  // namespace shardweave

// Runs a test's body on rank threads over a backend that writes down what every collective sends.
//
//   const auto sent = on_counted_mesh({{"x", 2}}, Carrier::kInproc, [](const MeshPtr& mesh, Sent& sent) {
//     const at::Tensor a = zeros({4, 4}, mesh, {Shard(0)});
//     sent.clear();
//     redistribute(a, {Shard(1)});
//   });
//   sent[0];   // of rank 0: {{kAllToAll, 16}}
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "shardweave/comm/backend.h"
#include "shardweave/dtensor/dtensor.h"

namespace shardweave::testing {

struct SentCollective {
  OpKind op;
  // What this rank sends in a ring, as RedistributeStep::bytes counts it: an all_gather passes on
  // all pieces but that of the next rank, a reduce_scatter all of the input but this rank's part,
  // an all_reduce is one and then the other with parts as even as can be; an all_to_all sends what
  // is not for this rank. (inproc sends nothing at all, ranks read each other's memory; gloo sends
  // each piece directly to each rank that wants it, which is as much where pieces are even.)
  int64_t bytes;
  friend bool operator==(const SentCollective&, const SentCollective&) = default;
};
using Sent = std::vector<SentCollective>;

enum class Carrier { kInproc, kGloo };

// What each rank has in its list at the end. Fails the test if a body throws.
std::vector<Sent> on_counted_mesh(const std::vector<MeshDim>& dims, Carrier carrier,
                                  const std::function<void(const MeshPtr&, Sent&)>& body);

// How each rank ended, for tests in which some fail: a rank whose body throws aborts the world.
std::vector<absl::Status> try_on_each(const std::vector<MeshDim>& dims, Carrier carrier,
                                      const std::function<void(const MeshPtr&)>& body);

}  // namespace shardweave::testing

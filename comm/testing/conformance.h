// The test suite that every backend passes. A test program links this library and names its
// backend:
//
//   ConformanceBackend::Connect make_world(int num_ranks, const CommunicatorOptions& options) {
//     return [=](int rank) { return connect_pigeons(rank, num_ranks, options); };
//   }
//   SHARDWEAVE_COMM_CONFORMANCE(Pigeons, (ConformanceBackend{"Pigeons", make_world}));
//
// Ranks are threads of the test program. The cases are in *_cases.cc.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "shardweave/comm/communicator.h"

namespace shardweave {

struct ConformanceBackend {
  // Called once per rank, each on its own thread: that rank's communicator over all ranks.
  using Connect = std::function<absl::StatusOr<std::shared_ptr<Communicator>>(int rank)>;

  std::string name;
  // A new world, which has nothing to do with earlier ones.
  std::function<Connect(int num_ranks, const CommunicatorOptions& options)> make_world;
  // A collective is done when it is issued, as those are that are composed of sends and recvs.
  bool blocks_at_issue = false;
  // What a device's backend need not do (on_device.h): the last bits of a sum are its own, and sends
  // and recvs match in order, whatever their message tags.
  bool rounds_once = true;
  bool matches_by_tag = true;
};
inline void PrintTo(const ConformanceBackend& backend, std::ostream* os) {
  *os << backend.name;
}

using RankBody = std::function<absl::Status(const std::shared_ptr<Communicator>& comm)>;

// Runs `body` on a thread per rank; the result is what each rank's body returned. A rank whose body
// has ended drops its communicator.
std::vector<absl::Status> run_on_threads(const ConformanceBackend& backend, int num_ranks,
                                         const RankBody& body,
                                         const CommunicatorOptions& options = {});

// Who waits longer than CommunicatorOptions::patience says so, and for whom: of a backend that keeps
// it itself.
void expect_late_ranks_are_named(const ConformanceBackend& backend);
// A group knows that its ranks are threads of one process (GroupInfo::has_threads), and so does a part of it.
void expect_ranks_are_threads(const ConformanceBackend& backend);

// Cases for a number of ranks.
class CommConformance : public testing::TestWithParam<std::tuple<ConformanceBackend, int>> {
 protected:
  const ConformanceBackend& backend() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }
  // Runs `body` on size() ranks, all of which must succeed.
  void run(const RankBody& body);
};

// Cases that choose their number of ranks.
class CommErrorConformance : public testing::TestWithParam<ConformanceBackend> {
 protected:
  std::vector<absl::Status> run(int num_ranks, const RankBody& body,
                                absl::Duration timeout = absl::Minutes(1)) {
    return run_on_threads(GetParam(), num_ranks, body, {.timeout = timeout});
  }
};

#define SHARDWEAVE_COMM_CONFORMANCE(suite, backend)                                             \
  INSTANTIATE_TEST_SUITE_P(                                                                     \
      suite, CommConformance, testing::Combine(testing::Values(backend), testing::Range(1, 6)), \
      [](const auto& tested) { return std::to_string(std::get<1>(tested.param)) + "Ranks"; });  \
  INSTANTIATE_TEST_SUITE_P(suite, CommErrorConformance, testing::Values(backend),               \
                           [](const auto& tested) { return tested.param.name; })

}  // namespace shardweave

#include "shardweave/comm/composed.h"

#include "gtest/gtest.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/testing/conformance.h"
#include "shardweave/comm/testing/point_to_point_backend.h"

namespace shardweave {
namespace {

ConformanceBackend composed() {
  const auto make_world = [](int num_ranks, const CommunicatorOptions& options) {
    auto hub = std::make_shared<InprocHub>(num_ranks);
    return [=](int rank) {
      return Communicator::create(std::make_unique<PointToPointBackend>(hub->make_backend(rank)),
                                  options);
    };
  };
  return {.name = "Composed", .make_world = make_world, .blocks_at_issue = true};
}

SHARDWEAVE_COMM_CONFORMANCE(Composed, composed());

}  // namespace
}  // namespace shardweave

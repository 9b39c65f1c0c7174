#include "shardweave/comm/inproc/inproc.h"

#include "gtest/gtest.h"
#include "shardweave/comm/testing/conformance.h"

namespace shardweave {
namespace {

ConformanceBackend inproc() {
  return {"Inproc", [](int num_ranks, const CommunicatorOptions& options) {
            auto hub = std::make_shared<InprocHub>(num_ranks);
            return [=](int rank) { return hub->connect(rank, options); };
          }};
}

SHARDWEAVE_COMM_CONFORMANCE(Inproc, inproc());

}  // namespace
}  // namespace shardweave

#include <memory>
#include <numeric>

#include "gtest/gtest.h"
#include "shardweave/comm/gloo/gloo_backend.h"
#include "shardweave/comm/store/in_process_store.h"
#include "shardweave/comm/testing/conformance.h"

namespace shardweave {
namespace {

GroupInfo world(int rank, int size) {
  GroupInfo group{.name = "world", .rank = rank, .world_ranks = std::vector<int64_t>(size)};
  std::iota(group.world_ranks.begin(), group.world_ranks.end(), 0);
  return group;
}

ConformanceBackend gloo_threads() {
  return {"Gloo", [](int num_ranks, const CommunicatorOptions& options) {
            std::shared_ptr<Store> store = make_in_process_store();
            return [=](int rank) -> absl::StatusOr<std::shared_ptr<Communicator>> {
              auto backend = make_gloo_backend(store, world(rank, num_ranks));
              if (!backend.ok()) return backend.status();
              return Communicator::create(*std::move(backend), options);
            };
          }};
}

SHARDWEAVE_COMM_CONFORMANCE(Gloo, gloo_threads());

}  // namespace
}  // namespace shardweave

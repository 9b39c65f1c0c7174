// The comm/ conformance suite on a backend that is written in C (testing/carrier_backend.c).
#include "absl/time/time.h"
#include "shardweave/capi/handles.h"
#include "shardweave/comm/testing/conformance.h"
#include "testing/carrier_backend.h"

namespace shardweave {
namespace {

ConformanceBackend in_c() {
  const auto make_world = [](int num_ranks, const CommunicatorOptions& options) {
    auto carriers = std::make_shared<std::vector<swv_world*>>(num_ranks);
    swv_world_options long_time = SWV_WORLD_OPTIONS_INIT;
    long_time.timeout_ms = 300000;
    capi::throw_if_failed(swv_world_create_local(num_ranks, &long_time, carriers->data()),
                          "carriers");
    const int64_t timeout_ms = absl::ToInt64Milliseconds(options.timeout);
    return [=](int rank) -> absl::StatusOr<std::shared_ptr<Communicator>> {
      swv_world* world = nullptr;
      const absl::Status made =
          capi::take(carrier_world_create((*carriers)[rank], timeout_ms, &world));
      swv_world_free((*carriers)[rank]);  // lives on in the backend
      if (!made.ok()) return made;
      std::shared_ptr<Communicator> comm = world->world->comm();
      swv_world_free(world);
      return comm;
    };
  };
  return {.name = "InC", .make_world = make_world, .blocks_at_issue = true};
}

SHARDWEAVE_COMM_CONFORMANCE(InC, in_c());

}  // namespace
}  // namespace shardweave

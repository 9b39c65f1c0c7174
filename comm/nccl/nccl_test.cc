// The conformance suite on the GPUs of the fake: on NCCL, every call of memory of a device, then some of
// each; and by way of the host.
#include "shardweave/comm/nccl/nccl_backend.h"

#include "shardweave/comm/communicator.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/nccl/staged_backend.h"
#include "shardweave/comm/nccl/testing/fake_device.h"
#include "shardweave/comm/nccl/testing/fake_gpu.h"
#include "shardweave/comm/testing/conformance.h"
#include "shardweave/comm/testing/on_device.h"

namespace shardweave {
namespace {

using Connect = ConnectDevice (*)(const NcclOptions&);

ConformanceBackend on_gpus(const std::string& name, Connect connect, const FakeGpuScript& script,
                           const PairedOptions& paired, const OnDeviceOptions& on) {
  const auto make_world = [=](int num_ranks, const CommunicatorOptions& options) {
    fake_gpu_of_tests().reset(script);
    auto hub = std::make_shared<InprocHub>(num_ranks);
    return [=](int rank) -> absl::StatusOr<std::shared_ptr<Communicator>> {
      absl::StatusOr<std::unique_ptr<Backend>> backend = make_paired_backend(
          hub->make_backend(rank), connect({.device = rank, .libraries = fake_libraries()}), paired,
          std::chrono::steady_clock::now() + std::chrono::seconds(60));
      if (!backend.ok()) return backend.status();
      return Communicator::create(on_device(*std::move(backend), fake_device(rank), on), options);
    };
  };
  return {.name = name, .make_world = make_world};
}

ConformanceBackend nccl(const std::string& name, const FakeGpuScript& script,
                        const PairedOptions& paired, const OnDeviceOptions& on) {
  ConformanceBackend result = on_gpus(name, connect_nccl, script, paired, on);
  result.blocks_at_issue = paired.compare_first;
  result.rounds_once = false;
  result.matches_by_tag = false;
  return result;
}

SHARDWEAVE_COMM_CONFORMANCE(Nccl, nccl("Nccl", {}, {}, {}));
SHARDWEAVE_COMM_CONFORMANCE(Mixed, nccl("Mixed", {.calls_go_on = false}, {.compare_first = true},
                                        {.every_on_cpu = 3}));
// Every guarantee of the CPU's backend, but that wait_on() waits for the operation.
ConformanceBackend staged() {
  ConformanceBackend result = on_gpus("Staged", connect_staged, {}, {}, {});
  result.blocks_at_issue = true;
  return result;
}
SHARDWEAVE_COMM_CONFORMANCE(Staged, staged());

}  // namespace
}  // namespace shardweave

#include "shardweave/dtensor/engine/tensor_work.h"

#include <utility>

#include "absl/time/time.h"
#include "c10/core/Stream.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/provenance.h"

namespace shardweave::dtensor_internal {

DeviceStream current_stream(c10::Device device) {
  if (device.is_cpu()) return {};
  return {c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle()};
}

CallOptions collective_options(const MeshContext& context, c10::Device device,
                               std::string_view tag) {
  return {.timeout = absl::ZeroDuration(),
          .tag = tag,
          .fingerprint = fingerprint(context),
          .stream = current_stream(device)};
}

TensorWork::TensorWork(MeshContext& context, Work work, c10::Device device)
    : work_(std::move(work)), issued_on_(current_stream(device)), device_(device) {
  // One that was refused here alone says so in wait(), and the group goes on.
  if (!device.is_cpu() && !work_.immediate()) context.on_device.add(work_);
}

absl::Status TensorWork::wait_on_stream() const {
  const DeviceStream current = current_stream(device_);
  absl::Status status = work_.wait_on(current);
  if (status.ok() && current != issued_on_) status = work_.wait_on(issued_on_);
  return status.ok() ? status : work_.wait();
}

}  // namespace shardweave::dtensor_internal

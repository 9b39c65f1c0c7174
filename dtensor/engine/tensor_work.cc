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
    : work_(std::move(work)), device_(device) {
  if (!device.is_cpu()) context.on_device.add(work_);
}

absl::Status TensorWork::wait_on_stream() const {
  absl::Status status = work_.wait_on(current_stream(device_));
  return status.ok() ? status : work_.wait();
}

}  // namespace shardweave::dtensor_internal

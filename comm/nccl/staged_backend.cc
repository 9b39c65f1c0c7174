#include "shardweave/comm/nccl/staged_backend.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "shardweave/comm/nccl/bootstrap.h"
#include "shardweave/comm/nccl/library.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace nccl_internal {
namespace {

// Only copies: what it does not implement goes by the host and the control group.
class StagedBackend : public Backend {
 public:
  StagedBackend(GroupInfo group, std::string name, int device,
                std::shared_ptr<const Library> library)
      : Backend(std::move(group)),
        name_(std::move(name)),
        device_(device),
        library_(std::move(library)) {}

  std::string_view name() const override { return name_; }
  bool supports(DeviceType type) const override { return type == DeviceType::kCuda; }
  absl::Status check_device(Device device) const override {
    return check_device_is(device, device_);
  }
  bool compares_calls() const override { return false; }
  bool implements(OpKind) const override { return false; }

  absl::StatusOr<Ticket> start(const Call& call) override {
    return absl::InternalError(str_cat("not implemented on a device: ", to_string(call)));
  }
  absl::Status copy_to_host(void* host, const ConstBuffer& device, DeviceStream stream) override {
    return library_->copy(device_, host, device.data, device.bytes(), kCudaMemcpyDeviceToHost,
                          stream);
  }
  absl::Status copy_to_device(const Buffer& device, const void* host,
                              DeviceStream stream) override {
    return library_->copy(device_, device.data, host, device.bytes(), kCudaMemcpyHostToDevice,
                          stream);
  }
  void abort(const absl::Status&) override {}

 private:
  const std::string name_;
  const int device_;
  const std::shared_ptr<const Library> library_;
};

}  // namespace
}  // namespace nccl_internal

ConnectDevice connect_staged(const NcclOptions& options) {
  return [options](const GroupInfo& group, const std::shared_ptr<Communicator>& bootstrap,
                   Deadline) -> absl::StatusOr<std::unique_ptr<Backend>> {
    absl::StatusOr<std::shared_ptr<const nccl_internal::Library>> library =
        nccl_internal::load_on_all(options, nccl_internal::Library::Parts::kCuda, group,
                                   *bootstrap);
    if (!library.ok()) return library.status();
    return std::make_unique<nccl_internal::StagedBackend>(
        group, std::string(bootstrap->backend_name()), options.device, *std::move(library));
  };
}

}  // namespace shardweave

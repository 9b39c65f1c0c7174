#include "shardweave/dtensor/engine/mesh_context.h"

#include "c10/core/impl/VirtualGuardImpl.h"
#include "shardweave/dtensor/engine/capture.h"
#include "shardweave/dtensor/engine/keep_no_casts.h"

namespace shardweave::dtensor_internal {

c10::Device with_index(c10::Device device) {
  if (!device.is_cuda() || device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

MeshContext::MeshContext(ConnectedMesh& mesh)
    : random{.state = seeded(mesh.mesh(), PhiloxState().seed)}, mesh_(&mesh) {
  if (mesh.world()->has_threads()) keep_no_casts();
}

std::shared_ptr<MeshContext> MeshContext::of(const std::shared_ptr<ConnectedMesh>& mesh) {
  if (mesh == nullptr) throw Error(absl::InvalidArgumentError("the mesh is null"));
  auto context = std::static_pointer_cast<MeshContext>(mesh->extension([](ConnectedMesh& m) {
    return std::static_pointer_cast<void>(std::make_shared<MeshContext>(m));
  }));
  // Shares ownership of the mesh, which owns the context: no cycle, and neither dies before the
  // other.
  return std::shared_ptr<MeshContext>(mesh, context.get());
}

Communicator& MeshContext::communicator(absl::Span<const int> mesh_dims) {
  auto communicator =
      mesh_dims.size() == 1 ? mesh_->communicator(mesh_dims[0]) : mesh_->communicator(mesh_dims);
  check_captured_mesh(*this);
  Communicator& result = *value_or_throw(std::move(communicator));
  if (captures.under_way != nullptr) captures.under_way->uses(result);
  return result;
}

void MeshContext::before_host_reads() {
  if (captures.under_way != nullptr) {
    throw Error(
        absl::FailedPreconditionError("numbers of a step that is being captured do not reach the "
                                      "host: there are none before it is "
                                      "replayed"));
  }
  throw_if_error(on_device.wait());
}

SpecRef MeshContext::intern(const Layout& layout, absl::Span<const int64_t> sizes,
                            absl::Span<const int64_t> strides, at::ScalarType dtype,
                            c10::Device device, CutOrigins origins) {
  const SpecParts parts{
      layout, sizes, strides, dtype, with_index(device), of_cuts(origins, layout)};
  SpecRef spec = specs_.find(parts);
  if (spec != nullptr) return spec;
  throw_if_error(validate(layout, mesh().shape(), sizes));
  spec = c10::make_intrusive<const Spec>(this, layout, Dims(sizes.begin(), sizes.end()),
                                         Dims(strides.begin(), strides.end()), dtype, parts.device,
                                         parts.origins);
  specs_.insert(spec);
  return spec;
}

}  // namespace shardweave::dtensor_internal

#include "shardweave/dtensor/mesh_context.h"

#include "ATen/autocast_mode.h"
#include "absl/hash/hash.h"

namespace shardweave::dtensor_internal {
namespace {

// Interned specs beyond this number are swept: those that no tensor and no cache entry uses go.
constexpr size_t kMaxSpecs = 16384;

}  // namespace

MeshContext::MeshContext(ConnectedMesh& mesh)
    : random(seeded(mesh.mesh(), PhiloxState().seed)), mesh_(&mesh) {
  // What autocast has cast once it keeps in a table of the process, which any thread that leaves
  // its outermost scope clears: ranks that are threads would cast, and then communicate, unlike each
  // other. The switch is the thread's own.
  if (mesh.world()->backend_name() == "inproc") at::autocast::set_autocast_cache_enabled(false);
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
  return *value_or_throw(std::move(communicator));
}

const OpInfo& MeshContext::op_info(const c10::OperatorHandle& op) {
  // Operator names live as long as the process, at one address per operator.
  std::unique_ptr<OpInfo>& info = op_infos_[&op.operator_name()];
  if (info == nullptr) info = std::make_unique<OpInfo>(op, rules_);
  return *info;
}

void MeshContext::add_rule(std::string_view name, Rule rule) {
  rules_.add(name, std::move(rule));
  cache.clear();  // its keys and entries know OpInfos
  op_infos_.clear();
}

size_t MeshContext::Hash::operator()(const SpecRef& s) const {
  return absl::HashOf(s->layout, s->sizes, s->strides, static_cast<int>(s->dtype),
                      static_cast<int>(s->device.type()), static_cast<int>(s->device.index()),
                      s->origins.data, s->origins.weight);
}

bool MeshContext::Equal::operator()(const SpecRef& a, const SpecRef& b) const {
  return a->sizes == b->sizes && a->strides == b->strides && a->dtype == b->dtype &&
         a->device == b->device && a->origins == b->origins && a->layout == b->layout;
}

SpecRef MeshContext::intern(const Layout& layout, absl::Span<const int64_t> sizes,
                            absl::Span<const int64_t> strides, at::ScalarType dtype,
                            c10::Device device, CutOrigins origins) {
  throw_if_error(validate(layout, mesh().shape(), sizes));
  auto spec =
      c10::make_intrusive<const Spec>(this, layout, Dims(sizes.begin(), sizes.end()),
                                      Dims(strides.begin(), strides.end()), dtype, device, origins);
  if (auto it = specs_.find(spec); it != specs_.end()) return *it;
  if (specs_.size() >= kMaxSpecs) {
    absl::erase_if(specs_, [](const SpecRef& s) { return s.use_count() == 1; });
  }
  specs_.insert(spec);
  return spec;
}

}  // namespace shardweave::dtensor_internal

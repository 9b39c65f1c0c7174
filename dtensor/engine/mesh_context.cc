#include "shardweave/dtensor/engine/mesh_context.h"

#include "ATen/autocast_mode.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"

namespace shardweave::dtensor_internal {
namespace {

// How many specs are looked at for each new one. Of n specs in use, those that are not are n / 3 at
// most, in the long run.
constexpr int kLooks = 4;

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
  if (operator_under_way()) {
    throw Error("add_rule", absl::FailedPreconditionError(absl::StrCat(
                                "'", std::string(name),
                                "': an operator on DTensors of the mesh is running; add rules "
                                "before or between operators")));
  }
  rules_.add(name, std::move(rule));
  cache.clear();  // its keys and entries know OpInfos
  op_infos_.clear();
}

void MeshContext::set_cost_model(CostModel model) {
  cost_model = std::move(model);
  cache.clear(operator_under_way());
  plans.clear();
}

MeshContext::SpecParts MeshContext::parts_of(const Spec* spec) {
  return {spec->layout, spec->sizes, spec->strides, spec->dtype, spec->device, spec->origins};
}

size_t MeshContext::Hash::operator()(const SpecParts& s) const {
  return absl::HashOf(s.layout, s.sizes, s.strides, static_cast<int>(s.dtype),
                      static_cast<int>(s.device.type()), static_cast<int>(s.device.index()),
                      s.origins.data, s.origins.weight);
}

bool MeshContext::equal(const SpecParts& a, const SpecParts& b) {
  return a.sizes == b.sizes && a.strides == b.strides && a.dtype == b.dtype &&
         a.device == b.device && a.origins == b.origins && a.layout == b.layout;
}

// Other threads may let go of a spec meanwhile, but none can take one that only this table has.
void MeshContext::release_unused_specs() {
  for (int i = 0; i < kLooks && !specs_.empty(); ++i) {
    if (next_spec_ >= specs_.size()) next_spec_ = 0;
    SpecRef& spec = specs_[next_spec_];
    if (spec.use_count() > 1) {
      ++next_spec_;
      continue;
    }
    by_parts_.erase(spec.get());
    std::swap(spec, specs_.back());
    specs_.pop_back();
  }
}

SpecRef MeshContext::intern(const Layout& layout, absl::Span<const int64_t> sizes,
                            absl::Span<const int64_t> strides, at::ScalarType dtype,
                            c10::Device device, CutOrigins origins) {
  const SpecParts parts{layout, sizes, strides, dtype, device, of_cuts(origins, layout)};
  if (const auto it = by_parts_.find(parts); it != by_parts_.end()) {
    return SpecRef::reclaim_copy(*it);
  }
  throw_if_error(validate(layout, mesh().shape(), sizes));
  auto spec = c10::make_intrusive<const Spec>(this, layout, Dims(sizes.begin(), sizes.end()),
                                              Dims(strides.begin(), strides.end()), dtype, device,
                                              parts.origins);
  release_unused_specs();
  by_parts_.insert(spec.get());
  specs_.push_back(spec);
  return spec;
}

}  // namespace shardweave::dtensor_internal

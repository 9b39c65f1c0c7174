#include "shardweave/dtensor/random.h"

#include <array>
#include <utility>

#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/philox.h"

namespace shardweave {

using namespace dtensor_internal;

PhiloxState dtensor_internal::seeded(const DeviceMesh& mesh, uint64_t seed) {
  const auto first = static_cast<uint64_t>(mesh.min_rank().value);
  if (first == 0) return {seed, 0};
  const auto low = [](uint64_t v) { return static_cast<uint32_t>(v); };
  const auto high = [](uint64_t v) { return static_cast<uint32_t>(v >> 32); };
  const std::array<uint32_t, 4> mixed =
      philox4x32_10({low(first), high(first), 0, 0}, {low(seed), high(seed)});
  return {uint64_t{mixed[1]} << 32 | mixed[0], 0};
}

void manual_seed(const MeshPtr& mesh, uint64_t seed) {
  if (mesh == nullptr) throw Error(absl::InvalidArgumentError("the mesh is null"));
  set_random_state(mesh, seeded(mesh->mesh(), seed));
}

PhiloxState random_state(const MeshPtr& mesh) {
  return MeshContext::of(mesh)->random.state;
}

void set_random_state(const MeshPtr& mesh, const PhiloxState& state) {
  MeshContext::of(mesh)->random.state = state;
}

RandomStateScope::RandomStateScope(const MeshPtr& mesh, const PhiloxState& state)
    : mesh_(mesh),
      goes_on_(random_state(mesh)),
      outer_(std::exchange(MeshContext::of(mesh)->random.scope, this)) {
  set_random_state(mesh_, state);
}

RandomStateScope::~RandomStateScope() {
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh_);
  if (context->random.scope == this) {
    context->random.state = goes_on_;
    context->random.scope = outer_;
    return;
  }
  // The one within it goes on where this one would have.
  RandomStateScope* inner = context->random.scope;
  while (inner->outer_ != this) inner = inner->outer_;
  inner->goes_on_ = goes_on_;
  inner->outer_ = outer_;
}

}  // namespace shardweave

#include "shardweave/dtensor/random.h"

#include "shardweave/dtensor/mesh_context.h"

namespace shardweave {

void manual_seed(const MeshPtr& mesh, uint64_t seed) {
  set_random_state(mesh, {seed, 0});
}

PhiloxState random_state(const MeshPtr& mesh) {
  return MeshContext::of(mesh)->random;
}

void set_random_state(const MeshPtr& mesh, const PhiloxState& state) {
  MeshContext::of(mesh)->random = state;
}

}  // namespace shardweave

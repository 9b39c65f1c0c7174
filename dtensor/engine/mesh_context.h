// A MeshContext is what dtensor/ keeps for one mesh on one rank: its specs, what was decided, what is
// told of it, random state. It hangs off the ConnectedMesh, so that nothing is
// process-global and ranks may be threads.
//
// Threads: a rank is driven by one thread at a time; contexts of different ranks share nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/decisions.h"
#include "shardweave/dtensor/engine/device_works.h"
#include "shardweave/dtensor/engine/spec_table.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/observe/observation.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/spec.h"
#include "shardweave/mesh/connected_mesh.h"

namespace shardweave {
class RandomStateScope;
}

namespace shardweave::dtensor_internal {

// The state that a seed means on a mesh (random.h).
PhiloxState seeded(const DeviceMesh& mesh, uint64_t seed);

class Capture;
class FsdpState;
class GradBuckets;

// "cuda" is the thread's current device.
c10::Device with_index(c10::Device device);

// Where random numbers come from (random.h).
struct RandomState {
  PhiloxState state;                  // seeded() with the default
  RandomStateScope* scope = nullptr;  // the innermost
};

// What values are made of (provenance.h).
struct Provenance {
  uint64_t about = 0;         // what is sent now is about this; 0: none
  uint64_t tensors_made = 0;  // of plain ones, by functions that users call
};

// Steps that are captured (capture.h).
struct Captures {
  Capture* under_way = nullptr;
  uint64_t count = 0;  // so far
  // Another number when memory may have been written without any operator here: a graph was replayed.
  uint64_t generation = 0;
};

// Who gathers parameters and reduces their gradients.
struct GradientWork {
  std::shared_ptr<FsdpState> fsdp;  // of the units (fsdp_unit.h); null: there were none
  std::vector<std::weak_ptr<GradBuckets>> buckets;  // grad_buckets.h; some may be gone
};

class MeshContext {
 public:
  explicit MeshContext(ConnectedMesh& mesh);

  // The context of a mesh, created on first use. The pointer keeps the mesh alive.
  static std::shared_ptr<MeshContext> of(const std::shared_ptr<ConnectedMesh>& mesh);

  ConnectedMesh& connected_mesh() { return *mesh_; }
  const DeviceMesh& mesh() const { return mesh_->mesh(); }
  const Coordinate& coordinate() const { return mesh_->coordinate(); }
  // Throws Error when the group cannot be formed.
  Communicator& communicator(absl::Span<const int> mesh_dims);
  Communicator& communicator(int mesh_dim) {
    return communicator(absl::Span<const int>(&mesh_dim, 1));
  }

  // Equal arguments give the same object, as long as somebody has it. Throws Error if the layout does
  // not fit the mesh and the sizes.
  SpecRef intern(const Layout& layout, absl::Span<const int64_t> sizes,
                 absl::Span<const int64_t> strides, at::ScalarType dtype, c10::Device device,
                 CutOrigins origins = {});
  // The same tensor in another layout.
  SpecRef with_layout(const Spec& spec, const Layout& layout) {
    return intern(layout, spec.sizes, spec.strides, spec.dtype, spec.device, spec.origins);
  }
  size_t num_specs() const { return specs_.size(); }

  // Numbers are about to reach the host. Throws Error: an error in flight, which is there before what
  // it has spoilt; FailedPrecondition while a step is captured, whose numbers are not there.
  void before_host_reads();

  // Some operator runs: what it has looked up has to stay (cache.h).
  bool operator_under_way() const { return provenance.about != 0; }

  Decisions decisions;
  Observation observation;
  RandomState random;
  Provenance provenance;
  PlainTensors plain_tensors;
  DeviceWorks on_device;
  Captures captures;
  GradientWork gradients;

 private:
  ConnectedMesh* mesh_;  // owns this
  SpecTable specs_;
};

}  // namespace shardweave::dtensor_internal

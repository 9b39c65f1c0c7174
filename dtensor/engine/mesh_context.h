// A MeshContext is what dtensor/ keeps for one mesh on one rank: interned specs, the propagation
// cache, counters of communication, the strict scope. It hangs off the ConnectedMesh, so that
// nothing is process-global and ranks may be threads.
//
// Threads: a rank is driven by one thread at a time; contexts of different ranks share nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/cache.h"
#include "shardweave/dtensor/engine/module_names.h"
#include "shardweave/dtensor/engine/op_info.h"
#include "shardweave/dtensor/engine/plans.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/spec.h"
#include "shardweave/mesh/connected_mesh.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave::dtensor_internal {

class Observer;

// The state that a seed means on a mesh (random.h).
PhiloxState seeded(const DeviceMesh& mesh, uint64_t seed);

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

  // Equal arguments give the same object, as long as somebody has it: those that nobody has go, a
  // few with each new one, so that there are never many more than are in use. Throws Error if the
  // layout does not fit the mesh and the sizes.
  SpecRef intern(const Layout& layout, absl::Span<const int64_t> sizes,
                 absl::Span<const int64_t> strides, at::ScalarType dtype, c10::Device device,
                 CutOrigins origins = {});
  // The same tensor in another layout.
  SpecRef with_layout(const Spec& spec, const Layout& layout) {
    return intern(layout, spec.sizes, spec.strides, spec.dtype, spec.device, spec.origins);
  }
  size_t num_specs() const { return specs_.size(); }

  const OpInfo& op_info(const c10::OperatorHandle& op);
  // See add_rule() in rule.h. What was decided before is forgotten.
  void add_rule(std::string_view name, Rule rule);
  // Decisions and plans are made by it: those so far are forgotten.
  void set_cost_model(CostModel model);
  // Some operator runs: what it has looked up has to stay (cache.h).
  bool operator_under_way() const { return about != 0; }

  PropagationCache cache;
  PlanMemo plans;
  DispatchCounters counters;
  CostModel cost_model;       // changed by set_cost_model()
  PhiloxState random;         // seeded() with the default
  int strict_depth = 0;       // > 0: implicit communication is an error
  uint64_t about = 0;         // what is sent now is about this (provenance.h); 0: none
  uint64_t tensors_made = 0;  // of plain ones, by functions that users call
  absl::flat_hash_set<std::string> warned;  // operators without a rule that were reported
  absl::flat_hash_set<std::string>
      unsharded_said;  // weights without a name that were (dispatch.cc)
  ModuleNames modules;
  PlainTensors plain_tensors;
  std::vector<Observer*> observers;              // who looks (observer.h); none, most of the time
  int64_t collectives_seen = 0;                  // by observers
  std::vector<std::string_view> operators_seen;  // by observers, that run; outermost first

 private:
  // What a spec is made of, to find it without making one.
  struct SpecParts {
    const Layout& layout;
    absl::Span<const int64_t> sizes, strides;
    at::ScalarType dtype;
    c10::Device device;
    CutOrigins origins;
  };
  static SpecParts parts_of(const Spec* spec);
  static const SpecParts& parts_of(const SpecParts& parts) { return parts; }
  struct Hash {
    using is_transparent = void;
    size_t operator()(const SpecParts& parts) const;
    size_t operator()(const Spec* spec) const { return (*this)(parts_of(spec)); }
  };
  struct Equal {
    using is_transparent = void;
    template <typename A, typename B>
    bool operator()(const A& a, const B& b) const {
      return equal(parts_of(a), parts_of(b));
    }
  };
  static bool equal(const SpecParts& a, const SpecParts& b);
  void release_unused_specs();

  ConnectedMesh* mesh_;  // owns this
  RuleTable rules_;      // the user's
  absl::flat_hash_map<const c10::OperatorName*, std::unique_ptr<OpInfo>> op_infos_;
  absl::flat_hash_set<const Spec*, Hash, Equal> by_parts_;
  std::vector<SpecRef> specs_;  // the same
  size_t next_spec_ = 0;        // to be looked at by release_unused_specs()
};

}  // namespace shardweave::dtensor_internal

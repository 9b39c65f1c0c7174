// Where the value of a DTensor comes from, as one number: the operator that made it, its arguments,
// and where their values come from, back to what was distributed.
//
//   x = distribute_tensor(...)   1st of the mesh, f32[7, 5] [S(0)]
//   y = x * 2                    (mul, 2, provenance of x)
//   y.sum().item()               its all-reduce is about (sum, provenance of y)
//
// Ranks that run the same program have the same numbers, in every process. Each collective carries
// that of what it moves (CallOptions::fingerprint), so that ranks that have gone apart hear so at
// once instead of getting sums of different things: one has called item() alone, or multiplied by
// another number, or drawn from another seed. What one rank alone does with operators on
// DTensors that send nothing stays its own affair, for numbers go from arguments to results only.
//
// Costs a multiplication for each argument. Internal to dtensor/.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/types/span.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"

namespace shardweave::dtensor_internal {

// A value that ranks may have from different places: the gradient of a local part, which some have
// and others do not. So has what is made of it, and collectives about it are compared with nothing.
inline constexpr uint64_t kRanksOwn = 0x6b8b4567327b23c6;

// The order counts.
inline uint64_t mix(uint64_t provenance, uint64_t with) {
  if (provenance == kRanksOwn || with == kRanksOwn) [[unlikely]]
    return kRanksOwn;
  const uint64_t product = (provenance ^ with) * 0x9e3779b97f4a7c15;
  return product ^ (product >> 29);
}

// What was written through a view, or through what this is a view of, counts. (Not how often, nor
// whether there are views: one rank may have taken one alone.)
inline uint64_t provenance_of(const DTensorMeta& meta) {
  if (meta.family == nullptr || meta.family->writes == meta.provenance_writes) [[likely]]
    return meta.provenance;
  return mix(meta.provenance, meta.family->last_written);
}

// Of what a function that all ranks call makes of plain tensors; it is counted on the mesh.
uint64_t provenance_of_new(MeshContext& context, const Spec& spec);

// "add_" is add: which of the two autograd takes depends on who else holds a gradient.
uint64_t provenance_of_name(const c10::OperatorHandle& op);

// The operator's share: its name, the specs of its tensors, the arguments that are part of the cache
// key.
uint64_t provenance_of_call(const c10::OperatorHandle& op, const OpInfo& info,
                            absl::Span<const c10::IValue> args);

// CallOptions::fingerprint of what is sent now.
inline uint64_t fingerprint(const MeshContext& context) {
  return context.provenance.about == kRanksOwn ? 0 : context.provenance.about;
}

// While it lives, what the mesh's collectives are about. Never 0: that says that no operator runs
// (MeshContext::operator_under_way()).
class About {
 public:
  About(MeshContext& context, uint64_t provenance)
      : context_(context),
        before_(std::exchange(context.provenance.about, provenance + uint64_t{provenance == 0})) {}
  ~About() { context_.provenance.about = before_; }
  About(const About&) = delete;
  About& operator=(const About&) = delete;

 private:
  MeshContext& context_;
  const uint64_t before_;
};

}  // namespace shardweave::dtensor_internal

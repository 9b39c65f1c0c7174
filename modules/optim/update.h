// What a step does to one parameter. Internal to modules/optim/.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/spec.h"
#include "shardweave/modules/optim/options.h"

namespace shardweave::optim_internal {

struct Update {
  const OptimizerOptions* options = nullptr;
  SpecRef spec;                // of the parameter; null: it is plain
  std::vector<int> cutting;    // mesh dimensions of more than one rank that cut it
  std::string_view name = {};  // the FQN, or ""
  uint64_t provenance = 0;     // of the gradient (provenance.h)
  at::Tensor part;             // of the parameter: this rank's, contiguous
  at::Tensor grad;             // of its shape and dtype, contiguous
  // The state, as FusedOptimizer::slots() has it.
  at::Tensor* first = nullptr;
  at::Tensor* second = nullptr;
  at::Tensor* largest = nullptr;
  at::Tensor step;             // a number: with this step
  bool is_first_step = false;  // of SGD's momentum

  dtensor_internal::MeshContext* context() const {
    return spec == nullptr ? nullptr : spec->context;
  }
  at::IntArrayRef sizes() const {  // global
    return spec == nullptr ? part.sizes() : at::IntArrayRef(spec->sizes.data(), spec->sizes.size());
  }
};

// Of the whole list together. Collective over the meshes of parameters that are cut.
using Updates = std::vector<Update*>;
void adafactor_step(const Updates& updates, const dtensor_internal::Cause& cause);
void muon_step(const Updates& updates, const dtensor_internal::Cause& cause);

}  // namespace shardweave::optim_internal

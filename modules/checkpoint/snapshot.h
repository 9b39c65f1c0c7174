// A state at one moment: what is to be written of it, and by whom. Internal to modules/checkpoint/.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/modules/checkpoint/staging_memory.h"
#include "shardweave/modules/checkpoint/state_dict.h"
#include "shardweave/modules/checkpoint/write_checkpoint.h"

namespace shardweave::checkpoint_internal {

// A tensor of the state, and how it lies on the mesh that saves.
struct StateTensor {
  std::string name;
  at::Tensor tensor;
  std::vector<std::string> aliases;
};

// The group of all of the mesh's ranks; its ranks are row-major.
Communicator& whole(dtensor_internal::MeshContext& context);

// As Manifest::mesh has it: "dp=2,tp=2".
std::string mesh_text(const DeviceMesh& mesh);

// Fills in all of `request` but the directory. `memory`: what this rank is to write is copied now, to
// this memory, or other if that is too small; null: it is read when it is written. Compares the ranks' states, and `settings` beside them. Collective;
// throws Error on all ranks.
void take_snapshot(dtensor_internal::MeshContext& context, const StateDict& state, int64_t step,
                   std::shared_ptr<StagingMemory>* memory, const std::string& settings,
                   const dtensor_internal::Cause& cause, SaveRequest& request);

}  // namespace shardweave::checkpoint_internal

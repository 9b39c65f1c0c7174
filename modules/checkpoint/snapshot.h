// A state at one moment: what is to be written of it, and by whom. Internal to modules/checkpoint/.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/checkpoint/staging_memory.h"
#include "shardweave/modules/checkpoint/state_dict.h"
#include "shardweave/modules/checkpoint/write_checkpoint.h"

namespace shardweave::checkpoint_internal {

// A tensor of the state, and how it lies on the mesh that saves.
struct StateTensor {
  std::string name;
  at::Tensor tensor;
  std::vector<std::string> aliases;
  bool is_trained = false;  // only an optimizer writes to it
};

// What take_snapshot() leaves to be copied beside training.
class LateCopies {
 public:
  // `local` is of `tensor`, `part` of `local`; it is copied to `copy`.
  void add(const std::string& name, const at::Tensor& tensor, const at::Tensor& local,
           at::Tensor part, at::Tensor copy);
  // Copies; what is large on this thread alone.
  void run();
  // FailedPrecondition if one of them has been written to since it was added. On the thread that may have.
  absl::Status check() const;

 private:
  struct Copy {
    at::Tensor part, copy;
  };
  struct Written {
    std::string name;
    at::Tensor tensor;
    uint32_t version;  // when it was added
  };
  std::vector<Copy> copies_;
  std::vector<Written> watched_;
};

// The group of all of the mesh's ranks; its ranks are row-major.
Communicator& whole(dtensor_internal::MeshContext& context);

// On the whole mesh: a tensor on a slice of it lies alike on all slices beside that one. Nothing: it lies on what is no
// slice.
std::optional<Layout> layout_on(const DeviceMesh& mesh, Rank rank, const at::Tensor& tensor);

// As Manifest::mesh has it: "dp=2,tp=2".
std::string mesh_text(const DeviceMesh& mesh);

// Fills in all of `request` but the directory. `memory`: what this rank is to write is copied now, to
// this memory, or other if that is too small; null: it is read when it is written. `late`, if not null, gets
// what need not be copied now. Compares the ranks' states, and `settings` beside them. Collective;
// throws Error on all ranks.
void take_snapshot(dtensor_internal::MeshContext& context, const StateDict& state, int64_t step,
                   std::shared_ptr<StagingMemory>* memory, LateCopies* late,
                   const std::string& settings, const dtensor_internal::Cause& cause,
                   SaveRequest& request);

// load_checkpoint(), which reads to `memory` if it is not null and large enough. `timeout`: of a rank's wait for
// the others.
LoadedCheckpoint load_to(const std::string& path, StateDict& state, const MeshPtr& mesh,
                         const LoadOptions& options, std::shared_ptr<StagingMemory> memory,
                         absl::Duration timeout, std::source_location where);

}  // namespace shardweave::checkpoint_internal

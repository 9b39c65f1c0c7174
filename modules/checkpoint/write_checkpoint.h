// The one way in which a checkpoint gets to the disk, whoever asks for it. Internal to
// modules/checkpoint/; without LibTorch.
//
//   all ranks   agree on the temporary directory, which rank 0 has made under the lock
//   each rank   writes its file, and syncs it
//   rank 0      writes the manifest with all checksums, syncs it and the directory; renames the directory;
//               syncs the one around it; then `latest`, then old checkpoints go
//   all ranks   agree that it is so
//
// Until the rename there is the old state, from it on the new one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/modules/checkpoint/file_system.h"
#include "shardweave/modules/checkpoint/manifest.h"
#include "shardweave/modules/checkpoint/safetensors.h"
#include "shardweave/modules/checkpoint/save_plan.h"

namespace shardweave::checkpoint_internal {

struct SaveRequest {
  std::string directory;
  int64_t keep_last = 0;  // 0: all
  // All of it but pieces and files.
  Manifest manifest;
  std::vector<LaidOutTensor> tensors;
  std::vector<PlannedPiece> plan;  // of all ranks
  // The bytes of this rank's pieces, in the order of the plan; asked for one after the other, given up
  // when they are written. May throw.
  std::vector<std::function<std::shared_ptr<const void>()>> bytes;
  // On rank 0, when the rest is done: old checkpoints and leftovers that would not go. The new one is
  // there all the same, and the next save tries again.
  absl::Status not_removed;
};

// Of rank 0, before there is anything to save: makes the directory and takes `lock`, if it is null, and finds
// out whether a save could make its own in there. `done`: FailedPrecondition for a checkpoint of a later step.
absl::Status open_directory(FileSystem& fs, const std::string& directory,
                            std::optional<int64_t> done, std::unique_ptr<FileLock>& lock);

// `comm`: its ranks are those of the plan. `lock`: rank 0's, taken if it is null, and kept. Collective;
// the same status on all ranks. `timeout`: for the slowest rank to write its part.
absl::Status write_checkpoint(Communicator& comm, const std::shared_ptr<FileSystem>& fs,
                              SaveRequest& request, std::unique_ptr<FileLock>& lock,
                              absl::Duration timeout);

}  // namespace shardweave::checkpoint_internal

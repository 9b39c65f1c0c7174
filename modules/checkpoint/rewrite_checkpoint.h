// Writes a checkpoint of tensors that lie in files: another one's, for another number of files, or what some
// other program has saved.
//
//   auto manifest = read_manifest("run/step-000100");                             // StatusOr
//   auto sources = checkpoint_sources("run/step-000100", *manifest);
//   rewrite_checkpoint("other", *manifest, *sources, {.num_files = 6});           // other/step-000100
//
// One process, a piece in memory at a time; the way to the disk is that of a save (checkpointer.h): it is
// there whole, or not at all.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "shardweave/modules/checkpoint/file_system.h"
#include "shardweave/modules/checkpoint/manifest.h"
#include "shardweave/modules/checkpoint/tensor_source.h"

namespace shardweave {

struct RewriteOptions {
  int64_t num_files = 1;  // as if so many ranks had saved it: 1 to 256
  // After each piece, with its bytes. Called by one thread at a time.
  std::function<void(int64_t bytes)> piece_done = {};
  std::shared_ptr<FileSystem> file_system = {};  // null: POSIX
};

// DIRECTORY/step-N. `about`: step, values, resumes, aliases and without_state; its tensors are those of `sources`.
// Errors: InvalidArgument for options out of range; as Checkpointer::save(), and what reading says.
absl::Status rewrite_checkpoint(const std::string& directory, const Manifest& about,
                                const std::vector<TensorSource>& sources,
                                const RewriteOptions& options = {});

}  // namespace shardweave

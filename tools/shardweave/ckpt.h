// `shardweave ckpt ...`: looking at checkpoints (modules/checkpoint), comparing them, and writing them anew.
//
//   absl::StatusOr<CkptOutcome> outcome = run_ckpt({"show", "run/step-000100"}, {.json = true});
//
// One process; files are streamed: at most two tensors are in memory, whatever the checkpoint's size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace shardweave_tool {

struct CkptFlags {
  bool json = false;
  int64_t files = 0;           // of reshard and import; 0: as many as there are, or 1
  int64_t step = 0;            // of import
  std::string config;          // of export: a file, a directory with one, or "none"
  std::string prefix;          // of a model's tensors in a checkpoint
  std::string dtype;           // of export; "": as it is
  int64_t max_file_bytes = 0;  // of export
  bool verify = true;          // of reshard and export: checksums before anything is written
  bool allow_unknown = false;  // of export and import: keys of config.json
};

// What it prints, and whether all is well: not where fsck or diff has found something.
struct CkptOutcome {
  std::string text;
  bool ok = true;
};

// The commands, a line each.
std::string ckpt_usage();

// `words`: the command and what it takes. InvalidArgument for what cannot be asked; what files and disk say.
absl::StatusOr<CkptOutcome> run_ckpt(const std::vector<std::string>& words, const CkptFlags& flags);

}  // namespace shardweave_tool
